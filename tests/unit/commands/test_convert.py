"""The verb convert, and each verb with a folder of another kind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from glm46.cli import main
from glm46.compute.model.transformer import Transformer
from glm46.config.loader import dump_config
from glm46.config.model import ModelConfig, ShapeConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.inference.stored_model import stored_model
from glm46.files import progress
from glm46.operate.models.conversions import _table_of
from glm46.storage.chats.chat_format import GLM_47
from glm46.storage.chats.chat_template import find_format
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.stored_values import StepTensors
from glm46.storage.data.tokenizer import BUILTIN_PATH, TOKENIZER_KEY, load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.names import has_repeats
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, tokenizer_files
from glm46.tasks.weights.write_model import ReadAhead, write_model
from tests.builders import model_table, with_shape
from tests.step_tensors import step_tensors
from tests.unit.storage.huggingface.adapters import LATENT, TINY

ROOT = Path(__file__).resolve().parents[3]
TABLE = ModelConfig(**model_table(
    flavor="debug", hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=16,
    n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, head_dim=8,
))  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A step folder as the trainer writes it, optimizer states and generators included, and its model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    model = Transformer(resolve_shape(TABLE))
    tensors = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        torch.nn.init.normal_(tensor, std=0.2)
        tensors[f"model.{name}"] = tensor.detach()
        tensors[f"optimizer.{name}.exp_avg"] = torch.ones_like(tensor)
    tensors["rng.0.cpu"] = torch.get_rng_state()
    CheckpointManager(folder, keep_latest_k=0).save(7, tensors, {"config": dump_config(RunConfig(model=TABLE))})
    return folder / "step-000007", model


@pytest.mark.slow
def test_transformers_loads_a_converted_folder(trained, tmp_path):
    step, model = trained
    out = tmp_path / "hf"
    command = ["--checkpoint", str(step), "--output", str(out), "--dtype", "float32", "--max-file-gb", "0.001"]
    script = subprocess.run(
        [sys.executable, str(ROOT / "scripts/convert_to_hf.py"), *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert script.returncode == 0, script.stderr
    theirs = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.randint(0, 8192, (2, 19))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)  # FP32, other order of sums
    assert len(list(out.glob("*.safetensors"))) > 1
    tokenizer, ours = AutoTokenizer.from_pretrained(out), load_tokenizer("builtin")
    text = "def f(x):\n    return x + 1  # naïve 中文 12345\n\n\n\tend"
    assert tokenizer(text)["input_ids"] == ours.encode(text).tolist()
    assert tokenizer.decode(ours.encode(text).tolist()) == text
    assert tokenizer.convert_tokens_to_ids("<|assistant|>") == ours.special["<|assistant|>"]
    generation = GenerationConfig.from_pretrained(out)
    stops = [ours.special[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert generation.eos_token_id == theirs.config.eos_token_id == stops


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(trained, tmp_path, monkeypatch, capsys):
    step, _ = trained
    export = ["convert", "to-hf", "--checkpoint", str(step), "--output"]
    assert main([*export, str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    new = tmp_path / "new"
    for command in ([*export, str(new)], ["convert", "from-hf", "--model", str(tmp_path / "hf"), "--output", str(new)]):
        assert main(command) == 2
        assert "1,000 free" in capsys.readouterr().err
        assert not new.exists()


@pytest.mark.slow
def test_a_round_trip_keeps_every_bit_of_the_model(trained, tmp_path, capsys):
    step, _ = trained
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "a"), "--mtp-copies",
                 "--dtype", "float32"]) == 0  # fmt: skip
    config = tmp_path / "a/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"their_field": 5}))
    assert main(["convert", "from-hf", "--model", str(tmp_path / "a"), "--output", str(tmp_path / "b")]) == 0
    before, after = step_tensors(step), step_tensors(tmp_path / "b/step-000000")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = ["--checkpoint", str(tmp_path / "b/step-000000"), "--output", str(tmp_path / "c")]
    assert main(["convert", "to-hf", *again, "--tokenizer", str(tmp_path / "a")]) == 0
    exported = json.loads((tmp_path / "c/config.json").read_text())
    assert exported["their_field"] == 5 and exported["torch_dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    said = capsys.readouterr().out
    assert "bytes of weights in bfloat16" in said and f"vllm serve {tmp_path}" in said and "sglang" in said


def test_a_model_of_glm_47_has_its_repeats_template_and_sampling(trained, tmp_path):
    """Its shape is that of 4.6: the name of a run decides, then the folder, by repeats and template."""
    folder, table = tmp_path / "steps", resolve_shape(TABLE).model_dump()
    tensors = {f"model.{name}": t.detach() for name, t in [*trained[1].named_parameters(), *trained[1].named_buffers()]}
    config = dump_config(RunConfig(model=ModelConfig(flavor="GLM-4.7", shape=table)))
    CheckpointManager(folder, keep_latest_k=0).save(1, tensors, {"config": config})
    step, out = folder / "step-000001", tmp_path / "hf"
    assert stored_model(step).tokenizer(None).flavor == "GLM-4.7"
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(out)]) == 0
    shape = stored_model(out).shape
    assert has_repeats(find_tensors(out), shape)
    assert json.loads((out / "generation_config.json").read_text())["top_p"] == 0.95
    assert find_format(stored_model(out).tokenizer(None)) is GLM_47
    assert main(["convert", "from-hf", "--model", str(out), "--output", str(tmp_path / "back")]) == 0


@pytest.mark.parametrize("repeats, flavor", [(True, "GLM-4.7"), (False, "GLM-4.6")])
def test_the_preset_of_an_imported_folder(repeats, flavor):
    table = _table_of(PRESETS["GLM-4.7"], Path("builtin"), repeats)
    assert table.flavor == flavor and table.shape == ShapeConfig()
    assert _table_of(PRESETS["debug"], Path("builtin"), repeats).flavor == "debug"


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("rope_theta", [1e4, 1e6], ids=["nearest debug-flash", "nearest GLM-4.7-Flash"])
def test_an_export_repeats_what_the_imported_folder_repeats(rope_theta, repeats, tmp_path):
    """The nearest preset does not decide: GLM-4.7-Flash repeats, debug-flash does not."""
    small = TINY | LATENT | {"num_hidden_layers": 3, "vocab_size": 8256, "rope_theta": rope_theta}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}  # sizes of neither preset
    shape = PRESETS["GLM-4.7-Flash"].model_copy(update=small)
    with torch.device("cpu"):
        tensors = Transformer(shape).state_dict()
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor, std=0.02)
    files = files_beside_weights(load_tokenizer("builtin"), max_length=shape.max_position_embeddings)
    options = ExportOptions(repeat_shared=repeats, other_files=files)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    export_weights(tmp_path / "in", shape, config, tensors, options=options)
    assert main(["convert", "from-hf", "--model", str(tmp_path / "in"), "--output", str(tmp_path / "steps")]) == 0
    step = ["--checkpoint", str(tmp_path / "steps/step-000000")]
    folder = ["--checkpoint", str(tmp_path / "in"), "--dtype", "bfloat16"]
    for name, source in (("from step", step), ("from folder", folder)):
        assert main(["convert", "to-hf", *source, "--output", str(tmp_path / name)]) == 0
        assert set(find_tensors(tmp_path / name)) == set(find_tensors(tmp_path / "in"))
    flavor = stored_model(tmp_path / "steps/step-000000").flavor
    assert flavor == ("debug-flash" if rope_theta == 1e4 else "GLM-4.7-Flash")


def step_with(folder, trained, tokenizer_path, fingerprint=None):
    """The trained step, as a run with this tokenizer saves it."""
    model = trained[1]
    tensors = {f"model.{name}": t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    config = dump_config(RunConfig(model=TABLE.model_copy(update={"tokenizer_path": str(tokenizer_path)})))
    meta = {"config": config} | ({TOKENIZER_KEY: fingerprint} if fingerprint else {})
    CheckpointManager(folder, keep_latest_k=0).save(1, tensors, meta)
    return ["convert", "to-hf", "--checkpoint", str(folder / "step-000001"), "--output"]


@pytest.mark.parametrize("neighbour", [True, False])
@pytest.mark.parametrize("name", ["glm.json", "ranks.txt", "tokenizer.json"])
def test_the_export_has_the_tokenizer_of_the_run(name, neighbour, trained, tmp_path, capsys):
    folder = tmp_path / "tok"
    folder.mkdir()
    content = json.loads(tokenizer_files(load_tokenizer("builtin"), max_length=64)["tokenizer.json"])
    content["added_tokens"][-1]["content"] = "<|own|>"
    if neighbour:
        for other in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
            (folder / other).write_text('{"of": "another"}')
    if name == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / name).write_bytes(BUILTIN_PATH.read_bytes() if name == "ranks.txt" else json.dumps(content).encode())
    ours = load_tokenizer(str(folder / name))
    to_hf = step_with(tmp_path / "run", trained, folder / name, ours.fingerprint)
    assert main([*to_hf, str(tmp_path / "out")]) == 0, capsys.readouterr().err
    exported = load_tokenizer(str(tmp_path / "out"))
    assert exported.fingerprint == ours.fingerprint
    theirs, text = AutoTokenizer.from_pretrained(tmp_path / "out"), "def f(x): return 'naïve'"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist() and theirs.eos_token == "<|endoftext|>"
    assert ("of" in json.loads((tmp_path / "out/generation_config.json").read_text())) == (
        neighbour and name == "tokenizer.json"
    )


@pytest.mark.slow
def test_a_changed_or_too_large_tokenizer_is_refused(trained, tmp_path, capsys, monkeypatch):
    content = json.loads(tokenizer_files(load_tokenizer("builtin"), max_length=64)["tokenizer.json"])
    (tmp_path / "own.json").write_text(json.dumps(content))
    to_hf = step_with(tmp_path / "run", trained, "own.json", load_tokenizer("builtin").fingerprint)
    monkeypatch.chdir(tmp_path)
    assert main([*to_hf, "a"]) == 0
    content["added_tokens"][-1]["content"] = "<|own|>"
    (tmp_path / "own.json").write_text(json.dumps(content))
    generate = ["generate", "--prompt", "x", "--max-new-tokens", "1", *to_hf[2:4]]
    for command in ([*to_hf, "b"], generate):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "'own.json'" in error and "trained with" in error and "--tokenizer" in error
    assert main([*to_hf, "b", "--tokenizer", "own.json"]) == 0
    (tmp_path / "own.json").unlink()
    assert main([*to_hf, "c"]) == 2
    assert "or give --tokenizer" in capsys.readouterr().err
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 8192, "content": "<|far|>"})
    (tmp_path / "large.json").write_text(json.dumps(content))
    assert main([*to_hf, "c", "--tokenizer", "large.json"]) == 2
    assert "8193 ids, the model has 8192" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_an_import_keeps_the_tokenizer_of_its_folder(trained, tmp_path, monkeypatch, capsys):
    content = json.loads(tokenizer_files(load_tokenizer("builtin"), max_length=64)["tokenizer.json"])
    content["added_tokens"][-1]["content"] = "<|own|>"
    (tmp_path / "own.json").write_text(json.dumps(content))
    to_hf = step_with(tmp_path / "run", trained, tmp_path / "own.json")
    monkeypatch.chdir(tmp_path)
    assert main([*to_hf, "hf"]) == 0
    assert main(["convert", "from-hf", "--model", "hf", "--output", "back"]) == 0
    monkeypatch.chdir("/")
    again = ["--checkpoint", str(tmp_path / "back/step-000000"), "--output", str(tmp_path / "again")]
    assert main(["convert", "to-hf", *again]) == 0, capsys.readouterr().err
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / "own.json").read_bytes()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["to-hf", "--checkpoint", "{step}", "--output", "{tmp}"], "exists already"),
        (["to-hf", "--checkpoint", "{step}", "--output", "{tmp}/x", "--tokenizer", "{tmp}/none"], "no such file"),
    ],
)  # fmt: skip
def test_mistakes_have_exit_code_2_and_leave_nothing(arguments, words, trained, tmp_path, capsys):
    filled = [word.format(tmp=tmp_path, step=trained[0]) for word in arguments]
    assert main(["convert", *filled]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_or_has_checkpoints_is_refused(trained, tmp_path, capsys):
    step, _ = trained
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path))  # no empty line of a progress bar before it
    from_hf = ["convert", "from-hf", "--model", str(tmp_path / "hf"), "--output"]
    (tmp_path / "file").write_text("")
    for place, words in (("file", "file: "), ("file/below", "file/below: "), (str(step.parent), f"{step}: exists")):
        assert main([*from_hf, str(tmp_path / place)]) == 2
        assert words in capsys.readouterr().err
    assert (step.parent / "latest").read_text().strip() == step.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf"]


def test_progress_counts_every_byte(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    step, model = trained
    nbytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "hf")]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"writing weights: {nbytes / 1e6:.0f} of {nbytes / 1e6:.0f} MB, ") and "0 s left" in last
    assert main(["convert", "from-hf", "--model", str(tmp_path / "hf"), "--output", str(tmp_path / "dcp")]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"reading weights: {nbytes / 1e6:.0f} of {nbytes / 1e6:.0f} MB, ") and "0 s left" in last


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_neither_exported_nor_imported_nor_run(value, trained, tmp_path, capsys):
    good, bad = "layers.1.mlp.experts.down", "model.layers.1.mlp.experts.2.down_proj.weight"
    model = trained[1]
    tensors = {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    tensors[good][2, 3, 1] = value
    # Not with CheckpointManager, which refuses these values: a folder that a version before this rule has written.
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    meta = {"config": dump_config(RunConfig(model=TABLE))}
    step = write_model(tmp_path / "run", kinds, lambda name, target: target.copy_(tensors[name]), meta)
    to_hf = ["convert", "to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "out")]
    for dtype in ("float32", "bfloat16", "fp8-channel"):
        assert main([*to_hf, "--dtype", dtype]) == 2
        error = capsys.readouterr().err
        assert bad in error and "NaN or infinite" in error and "earlier step" in error
    assert main(["generate", "--prompt", "x", "--checkpoint", str(step)]) == 2
    error = capsys.readouterr().err
    assert f"{step}: {good} holds values that are not finite" in error and "earlier step" in error
    to_hf[3] = str(trained[0])
    assert main([*to_hf, "--dtype", "float32"]) == 0
    weights = load_file(tmp_path / "out/model.safetensors")
    weights[bad][3, 1] = value
    save_file(weights, tmp_path / "out/model.safetensors", {"format": "pt"})
    capsys.readouterr()
    for command in (["convert", "from-hf", "--output", str(tmp_path / "in")], ["generate", "--prompt", "x"]):
        assert main([*command, "--model", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert bad in error and "NaN or infinite" in error and "earlier step" in error
    assert sorted(path.name for path in tmp_path.iterdir() if any(path.iterdir())) == ["out", "run"]


def test_a_damaged_checkpoint_is_not_exported(trained, tmp_path, capsys):
    shutil.copytree(trained[0], tmp_path / "step-000007")
    path = next((tmp_path / "step-000007").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert (
        main(["convert", "to-hf", "--checkpoint", str(tmp_path / "step-000007"), "--output", str(tmp_path / "x")]) == 2
    )
    assert "SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_tensors_are_filled_ahead_once_each_in_the_memory_of_two():
    filled = []

    def fill(name, tensor):
        filled.append(name)
        if name == "d":
            raise OSError("the disk fails")
        tensor.fill_(len(filled))

    kinds = {name: ((size, 2), torch.bfloat16) for name, size in zip("abcd", (3, 0, 5, 1), strict=True)}
    with ReadAhead(kinds, fill) as tensors:
        assert "a" in tensors and "e" not in tensors and list(tensors) == list("abcd") and filled == []
        first = tensors["a"]
        assert torch.equal(first, torch.full((3, 2), 1.0, dtype=torch.bfloat16))
        assert first.untyped_storage().nbytes() == first.nbytes  # or DCP copies it
        assert tensors["b"].shape == (0, 2)
        third = tensors["c"]
        assert torch.equal(third, torch.full((5, 2), 2.0, dtype=torch.bfloat16))
        assert first.data_ptr() == third.data_ptr()
        with pytest.raises(OSError, match="the disk fails"):
            tensors["d"]
    assert filled == ["a", "c", "d"]


def test_a_tensor_out_of_turn_is_filled_again():
    with ReadAhead(dict.fromkeys("abc", ((4,), torch.float32)), lambda name, t: t.fill_(ord(name))) as tensors:
        for name in "acba":
            assert torch.equal(tensors[name], torch.full((4,), float(ord(name))))


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
