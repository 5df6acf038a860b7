"""`python -m glm46 serve-config`: what servers would refuse, memory as vLLM splits it, and the written files."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm46.cli import main
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.operate.estimate.serving import plan_serving
from glm46.operate.serving.folder import ServedFolder, check_served_folder
from glm46.operate.serving.layout import Machines, Wishes, find_layout
from glm46.run.parameters import named_rows
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import CheckedFolder
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import SCHEMES, config_of_scheme, quantised_names
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids

GIB = 2**30
H100, H200 = 79 * GIB, 140 * GIB
FREE = Wishes(None, None, False, False)


def served(flavor: str, scheme: str | None = None) -> ServedFolder:
    """A folder of a preset, in BF16 or quantised, without its files."""
    shape = PRESETS[flavor]
    names = HFNames(shape, repeat_shared=False)
    kept = quantised_names(names, SCHEMES.get(scheme))
    stored = {name: 2.0 * row.numel(shape) for name, row in named_rows(shape).items()}
    checked = CheckedFolder(names, {}, SCHEMES.get(scheme), {name: names.places[name][1].hf_shape for name in kept})
    return ServedFolder(Path("models") / flavor, shape, stored, True, (), checked)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a small model, in BF16 and in FP8."""
    shape, tokenizer = PRESETS["debug"].model_copy(update={"num_hidden_layers": 2}), load_tokenizer("builtin")
    tensors = Transformer(shape).state_dict()
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor, std=0.02)
    made = {}
    for name in ("bfloat16", "fp8-channel"):
        made[name], scheme = tmp_path_factory.mktemp("models") / name, SCHEMES.get(name)
        options = ExportOptions(
            scheme=scheme, other_files=files_beside_weights(tokenizer, max_length=shape.max_position_embeddings)
        )
        config = config_of(shape, None, eos_ids=stop_ids(tokenizer), dtype="bfloat16")
        if scheme is not None:
            config["quantization_config"] = config_of_scheme(scheme, HFNames(shape, repeat_shared=False))
        export_weights(made[name], shape, config, tensors, options=options)
    return made


def test_quick_start_layout_has_the_memory_of_the_published_counts():
    """3,935,625,632 parameters of an expert layer, 376,832 bytes of keys and values of a token."""
    folder = served("GLM-4.6")
    plan = plan_serving(folder.shape, folder.stored, (2, 4), usable=0.9 * H200)
    assert [stage.layers for stage in plan.stages] == [23] * 4
    # 23 layers in BF16 over 2 GPUs: as many bytes on each as parameters. Norms and routers are on both: 2e-4 of them.
    assert plan.stages[1].weights == pytest.approx(23 * 3_935_625_632, rel=5e-4)
    assert plan.stages[0].weights == pytest.approx(20 * 3_935_625_632 + 3 * 325_083_392 + 151_552 * 5_120, rel=5e-4)
    assert sum(stage.token for stage in plan.stages) * 2 == 376_832
    drafting = plan_serving(folder.shape, folder.stored, (2, 4), usable=0.9 * H200, drafts=True)
    more = drafting.stages[3].weights - plan.stages[3].weights
    assert more == pytest.approx(3_988_069_792 + 2 * 151_552 * 5_120, rel=2e-2)  # eh_proj and norms are on both
    assert drafting.stages[3].token == plan.stages[3].token * 24 / 23
    # 46 layers in 4 stages, as vLLM's get_pp_indices: the first and the last have no additional one.
    air = served("GLM-4.5-Air")
    stages = plan_serving(air.shape, air.stored, (16, 4), usable=H100).stages
    assert [stage.layers for stage in stages] == [11, 12, 12, 11]
    assert stages[0].token == 11 * 2 * 1 * 128 * 2  # 16 GPUs share 8 key heads: one on each


def test_gpus_that_cannot_hold_the_model_name_the_fewest_that_can():
    folder = served("GLM-4.6")
    machines = Machines(8, 8, "H100", H100, 0.9)
    with pytest.raises(UserError, match=r"--gpus 8: 8 x H100 cannot hold models/GLM-4.6.*fewest that can are 16 "):
        find_layout(folder, machines, FREE)
    plan, context = find_layout(folder, replace(machines, gpus=16), FREE)
    assert (plan.tp, plan.pp) == (8, 2) and 2048 <= context <= 202_752 and context % 16 == 0
    plan, context = find_layout(folder, Machines(8, 8, "H200", H200, 0.9), replace(FREE, tp=2))
    assert (plan.tp, plan.pp, context) == (2, 4, 202_752)
    with pytest.raises(UserError, match="--context 300000.*202752"):
        find_layout(folder, machines, replace(FREE, context=300_000))
    with pytest.raises(UserError, match="--gpus 12.*--gpus-per-node 8"):
        find_layout(folder, replace(machines, gpus=12), FREE)


@pytest.mark.parametrize(
    ("flavor", "scheme", "allowed"),
    [  # docs/huggingface.md: a part must be whole blocks or groups of 128
        ("GLM-4.6", "fp8-block", {1, 2, 4}),
        ("GLM-4.5-Air", "fp8-block", {1}),
        ("GLM-4.6", "fp8-channel", {1, 2, 4, 8}),
        ("GLM-4.6", "int4", {1, 2, 4}),
        ("GLM-4.5-Air", "int4", {1}),
    ],
)
def test_degrees_that_split_blocks_are_refused(flavor, scheme, allowed):
    folder = served(flavor, scheme)
    assert {tp for tp in (1, 2, 4, 8) if not folder.quantisation_refused(tp)} == allowed
    for tp in {8} - allowed:
        with pytest.raises(UserError, match=f"--tensor-parallel-degree {tp}: .*128; take another degree"):
            find_layout(folder, Machines(8, 8, "H200", H200, 0.9), replace(FREE, tp=tp))


def test_commands_and_files(folders, tmp_path, capsys):
    words = ["serve-config", "--model", str(folders["bfloat16"]), "--gpus", "16", "--first-node", "10.0.0.1"]
    assert (
        main([*words, "--tensor-parallel-degree", "4", "--gpus-per-node", "8", "--speculative"]) == 2
    )  # 4 stages of 2
    assert "num_hidden_layers = 2 is less than 4 stages" in capsys.readouterr().err
    words[4] = "8"
    words += ["--gpus-per-node", "4", "--speculative", "--context", "512", "--kv-cache-dtype", "fp8"]
    assert main([*words, "--output", str(tmp_path / "a b%")]) == 0
    assert "tensor parallelism 4 x pipeline 2" in capsys.readouterr().out
    node = tmp_path / "a b%/node1"
    script = (node / "vllm.sh").read_text()
    for part in ("--tensor-parallel-size 4", "--max-model-len 512", "--kv-cache-dtype fp8", "--node-rank 1",
                 "--headless", "--master-addr 10.0.0.1", '"method": "mtp"', "--tool-call-parser glm45"):  # fmt: skip
        assert part in script
    assert "--speculative" not in (node / "sglang.sh").read_text()  # it has no drafts in a pipeline
    assert "--headless" not in (tmp_path / "a b%/node0/vllm.sh").read_text()
    for name in ("vllm.sh", "sglang.sh"):
        subprocess.run(["bash", "-n", node / name], check=True)


def test_quantised_weights_count_as_they_are_stored(folders):
    plain, fp8 = (check_served_folder(folders[name]).stored for name in ("bfloat16", "fp8-channel"))
    name = "layers.1.mlp.experts.down"
    width = PRESETS["debug"].moe_intermediate_size
    assert fp8[name] == plain[name] / 2 * (1 + 4 / width)  # a byte each, and an FP32 scale a row
    assert fp8["lm_head.weight"] == plain["lm_head.weight"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"architectures": None}, "architectures"),
        ("generation_config.json", {"eos_token_id": [8192]}, "eos_token_id"),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"}, "chat template"),
        ("config.json", {"num_attention_heads": 3}, "q_proj"),
    ],
)
def test_folder_that_a_server_would_refuse_or_serve_badly(folders, tmp_path, capsys, file, change, message):
    folder = shutil.copytree(folders["bfloat16"], tmp_path / "copy")
    if file == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({k: v for k, v in (content | change).items() if v is not None}))
    assert main(["serve-config", "--model", str(folder), "--gpus", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and str(folder) in error


@pytest.mark.parametrize("stated", [5, [5], None, "one", "all"])
def test_an_export_stops_at_all_ids_that_end_a_turn(folders, tmp_path, stated):
    """The generation config of the tokenizer's folder has fewer, as many releases have."""
    wanted = stop_ids(load_tokenizer("builtin"))
    folder = tmp_path / "tokenizer"
    shutil.copytree(folders["bfloat16"], folder)
    given = {"all": wanted[::-1], "one": wanted[0]}.get(str(stated), stated)
    content = {"eos_token_id": given, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(content))
    files = files_beside_weights(load_tokenizer(str(folder)), max_length=512)
    found = json.loads(files["generation_config.json"])
    assert found["temperature"] == 0.6
    assert (found == content) is (stated == "all")
    assert set(found["eos_token_id"]) == {*wanted, *([5] if stated in (5, [5]) else [])}
    (folder / "generation_config.json").write_bytes(files["generation_config.json"])
    check_served_folder(folder)
    (folder / "generation_config.json").write_text("[1")
    with pytest.raises(UserError, match="generation_config.json: damaged"):
        files_beside_weights(load_tokenizer(str(folder)), max_length=512)


def test_a_folder_without_template_serves_completions_only(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["bfloat16"], tmp_path / "copy")
    (folder / "chat_template.jinja").unlink()
    assert main(["serve-config", "--model", str(folder), "--gpus", "1", "--name", "base"]) == 0
    out = capsys.readouterr().out
    assert "completions only" in out and "--tool-call-parser" not in out and "--served-model-name base" in out
