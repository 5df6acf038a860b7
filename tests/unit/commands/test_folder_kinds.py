"""Each verb given a folder of another kind says what it is and what takes it; exit code 2, and nothing is written."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from glm46.cli import main
from glm46.compute.model.transformer import Transformer
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.stored_values import StepTensors
from tests.builders import with_shape
from tests.unit.commands.test_convert import TABLE, resolve_shape


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("kinds")
    torch.manual_seed(0)
    model = Transformer(resolve_shape(TABLE))
    tensors = {f"model.{name}": t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor, std=0.2)
    run = root / "run"
    meta = {"config": dump_config(RunConfig(model=TABLE))}
    for step in (3, 7):
        CheckpointManager(run / "checkpoint", keep_latest_k=0).save(step, tensors, meta)
    (run / "config.toml").write_text(meta["config"])
    step = run / "checkpoint/step-000007"
    hf = run / "huggingface/step-000007"
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(hf), "--mtp-copies"]) == 0
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(tensors, checkpoint_id=root / "dcp")
    for name, file, content in (
        ("peft", "adapter_config.json", {"base_model_name_or_path": "zai-org/GLM-4.6"}),
        ("tokenizer", "tokenizer.json", {}), ("pickles", "pytorch_model.bin", {}),
    ):  # fmt: skip
        (root / name).mkdir()
        (root / name / file).write_text(json.dumps(content))
    shards = root / "shards"
    shards.mkdir()
    save_file({"tokens": torch.zeros(3, dtype=torch.int32)}, shards / "train-00000.safetensors")
    (shards / "manifest.json").write_text("{}")
    (root / "empty").mkdir()
    kinds = {
        Kind.STEP: step, Kind.HUGGING_FACE: hf, Kind.PEFT: root / "peft", Kind.DCP: root / "dcp",
        Kind.STEPS: run / "checkpoint", Kind.RUN: run, Kind.SHARDS: shards, Kind.TOKENIZER: root / "tokenizer",
        Kind.FILE: hf / "config.json", Kind.OTHER: root / "empty", Kind.ABSENT: root / "none",
    }  # fmt: skip
    return kinds | {"pickles": root / "pickles"}


def test_each_kind_is_known(folders):
    assert {kind: kind_of(path) for kind, path in folders.items() if kind != "pickles"} == {k: k for k in Kind}


SAID = {
    Kind.STEP: "this is a step folder of glm46", Kind.HUGGING_FACE: "this is a Hugging Face folder",
    Kind.PEFT: "zai-org/GLM-4.6; --adapter and adapter.initial_load_path take it",
    Kind.DCP: "convert from-dcp", Kind.STEPS: "it holds steps; give one of them, such as ",
    Kind.RUN: "this is the dump folder of a run; it holds steps",
    Kind.SHARDS: "data.sources takes", Kind.TOKENIZER: "--tokenizer take", Kind.FILE: "is a file; give its folder",
    Kind.OTHER: "neither a Hugging Face folder", Kind.ABSENT: "no such folder",
    "pickles": "pytorch_model.bin is a pickle",
}  # fmt: skip
VERBS = {
    "to-hf": (["convert", "to-hf", "--checkpoint", "PATH", "--output", "OUT"], {Kind.STEP}),
    "to-hf --dtype int4": (
        ["convert", "to-hf", "--dtype", "int4", "--checkpoint", "PATH", "--output", "OUT"],
        {Kind.STEP, Kind.HUGGING_FACE},
    ),
    "from-hf": (["convert", "from-hf", "--model", "PATH", "--output", "OUT"], {Kind.HUGGING_FACE}),
    "from-dcp": (["convert", "from-dcp", "--checkpoint", "PATH", "--config", "PATH", "--output", "OUT"], {Kind.DCP}),
    "adapter-to-hf": (["convert", "adapter-to-hf", "--checkpoint", "PATH", "--output", "OUT"], {Kind.STEP}),
    "merge": (["convert", "merge", "--base", "PATH", "--adapter", "none", "--output", "OUT"], {Kind.HUGGING_FACE}),
    "generate": (["generate", "--checkpoint", "PATH", "--prompt", "x"], {Kind.STEP, Kind.HUGGING_FACE}),
    "evaluate": (
        ["evaluate", "--checkpoint", "PATH", "--tasks", "needle", "--lengths", "64", "--output", "OUT"],
        {Kind.STEP, Kind.HUGGING_FACE},
    ),
    "adapter": (["generate", "--model", "HF", "--adapter", "PATH", "--prompt", "x"], {Kind.PEFT}),
    "checkpoint show": (["checkpoint", "show", "PATH"], {Kind.STEP}),
    "checkpoint list": (["checkpoint", "list", "PATH"], {Kind.STEP, Kind.STEPS, Kind.RUN}),
    "checkpoint verify": (["checkpoint", "verify", "PATH"], {Kind.STEP, Kind.STEPS, Kind.RUN}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID, ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_what_a_folder_of_another_kind_is(verb, kind, folders, tmp_path, capsys):
    command, taken = VERBS[verb]
    if kind in taken:
        return
    paths = {"PATH": str(folders[kind]), "OUT": str(tmp_path / "out"), "HF": str(folders[Kind.HUGGING_FACE])}
    filled = [paths.get(word, word) for word in command]
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert SAID[kind] in error and str(folders[kind]) in error and error.count("error:") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.STEPS, Kind.RUN])
def test_a_verb_that_takes_an_adapter_says_where_that_of_a_run_lies(kind, tmp_path, folders, capsys):
    run = tmp_path / "run"
    step = run / "checkpoint/step-000007"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    given = {Kind.STEP: step, Kind.STEPS: step.parent, Kind.RUN: run}[kind]
    command = ["convert", "merge", "--base", str(folders[Kind.HUGGING_FACE]), "--output", str(tmp_path / "out")]
    assert main([*command, "--adapter", str(given)]) == 2
    said = capsys.readouterr().err
    assert "adapter-to-hf" in said or "such as" in said
    for number in (3, 7):
        adapter = run / f"huggingface/step-{number:06d}"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text("{}")
    assert main([*command, "--adapter", str(given)]) == 2
    said = capsys.readouterr().err
    assert f"the newest adapter of this run is {adapter}; give that" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.STEPS, Kind.RUN])
@pytest.mark.parametrize("verb", ["list", "verify"])
def test_checkpoints_are_found_in_the_folders_of_a_run(verb, kind, folders, capsys):
    assert main(["checkpoint", verb, str(folders[kind])]) == 0
    steps = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps == (["7"] if kind is Kind.STEP else ["3", "7"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8-block", "fp8-channel", "int4", "float32", "bfloat16"])
def test_a_hugging_face_folder_is_quantised_as_its_step_folder_is(dtype, folders, tmp_path):
    hf, wide = folders[Kind.HUGGING_FACE], ["--dtype", dtype]
    wide += ["--max-file-gb", "0.0001"]
    shape = resolve_shape(TABLE)
    if dtype in ("fp8-block", "int4"):  # sizes that are multiples of a block
        run = with_shape(RunConfig(model=TABLE), hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
        shape, model = resolve_shape(run.model), Transformer(resolve_shape(run.model))
        tensors = {f"model.{n}": t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        for tensor in tensors.values():
            torch.nn.init.normal_(tensor, std=0.2)
        CheckpointManager(tmp_path / "run", keep_latest_k=0).save(1, tensors, {"config": dump_config(run)})
        hf = tmp_path / "hf"
        assert main(["convert", "to-hf", "--checkpoint", str(tmp_path / "run/step-000001"), "--output", str(hf)]) == 0
    assert main(["convert", "from-hf", "--model", str(hf), "--output", str(tmp_path / "native")]) == 0
    native = tmp_path / "native/step-000000"
    assert StepTensors(native).function.shape == shape
    for source, name in ((native, "through"), (hf, "straight")):
        assert main(["convert", "to-hf", "--checkpoint", str(source), "--output", str(tmp_path / name), *wide]) == 0
    through, straight = (sorted((tmp_path / name).iterdir()) for name in ("through", "straight"))
    assert [path.name for path in through] == [path.name for path in straight] and len(through) > 8
    for one, other in zip(through, straight, strict=True):
        if one.suffix == ".safetensors":
            ours, theirs = load_file(one), load_file(other)
            assert ours.keys() == theirs.keys() and all(ours[n].dtype == theirs[n].dtype for n in ours)
        assert one.read_bytes() == other.read_bytes(), one.name
