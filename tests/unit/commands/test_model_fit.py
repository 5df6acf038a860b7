"""What does not fit is refused before anything is downloaded, allocated or given to ranks: one line, exit code 2."""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from glm46.cli import main
from glm46.compute.model.transformer import Transformer
from glm46.config.generation_degrees import Degrees
from glm46.config.presets import PRESETS
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.other_networks import inference_bytes
from glm46.operate.models.model_fit import memory_faults
from glm46.run.layout import generation_layout
from glm46.storage.huggingface.config_json import config_of

GIB = 2**30


@pytest.fixture
def folder(tmp_path):
    """A function that makes a folder whose config.json differs from the debug model's; it holds no weights."""

    def make(**changes) -> str:
        config = config_of(PRESETS["debug"], None, eos_ids=[0], dtype="bfloat16") | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(("flavor", "degrees"), [("debug", (1, 1, 1)), ("100M", (2, 1, 2)), ("GLM-4.5-Air", (1, 1, 1))])
@pytest.mark.parametrize("drafts", [False, True])
def test_bytes_are_those_of_the_model(flavor, degrees, drafts):
    """Against the parameters of the modules on the meta device. Norms, routers and the projection of a prediction
    layer, up to 5 %, are on all tensor-parallel ranks."""
    shape = PRESETS[flavor]
    found = inference_bytes(shape, generation_layout(Degrees(*degrees), prod(degrees[:2])), "bfloat16", drafts=drafts)
    held = shape if drafts else shape.model_copy(update={"num_nextn_predict_layers": 0})
    if degrees == (1, 1, 1):
        model = ModelMesh().part_of_model(held, torch.bfloat16)
        assert found == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        return
    with torch.device("meta"):
        model = Transformer(held).cast(torch.bfloat16)
    whole = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert whole / 2 < found < 1.05 * whole / 2


def test_keys_and_values_of_a_rank():
    """GLM-4.6: 92 layers x 2 x 8 heads x 128 x 2 bytes = 376,832 of a token, as vLLM's documentation has it."""
    shape, alone = PRESETS["GLM-4.6"], generation_layout(Degrees(), 1)
    of = lambda rows, length: inference_bytes(shape, alone, "bfloat16", rows=rows, length=length)  # noqa: E731
    assert of(3, 1000) - of(0, 0) == 3 * 1000 * 376_832


def test_a_machine_says_what_is_too_little():
    cpu, gpus = Machine(8, 64 * GIB, 32 * GIB), Machine(8, 64 * GIB, 32 * GIB, (Gpu("H100", 80 * GIB),) * 2)
    assert memory_faults(cpu, 20.0 * GIB) == [] == memory_faults(gpus, 70.0 * GIB, 2)
    assert "2 processes need 40.7 GiB" in memory_faults(cpu, 20.0 * GIB, 2)[0]
    assert "each GPU needs 82.0 GiB" in memory_faults(gpus, 80.0 * GIB)[0]
    assert "it needs 3 GPUs, one for each process; found: 2" in memory_faults(gpus, 1.0 * GIB, 3)[0]


LARGE = {"hidden_size": 1_000_000}
GENERATE, EVALUATE = ["generate", "--prompt", "a"], ["evaluate", "--tasks", "gsm8k"]


@pytest.mark.parametrize(("verb", "changes", "words"), [
    (GENERATE, LARGE, ("this machine cannot run it in float32", "too much", "--dtype bfloat16")),
    (EVALUATE, LARGE, ("this machine cannot run it", "too much")),
    ([*GENERATE, "--max-new-tokens", "99999999"], {"max_position_embeddings": 10**9}, ("too much", "shorter rows")),
    ([*GENERATE, "--max-new-tokens", "99999999"], {}, ("--max-new-tokens", "2048 positions")),
    ([*GENERATE, "--nproc", "4", "--tensor-parallel-degree", "3"], {}, ("degree 3", "num_attention_heads")),
    ([*GENERATE, "--nproc", "3", "--tensor-parallel-degree", "2"], {}, ("--tensor-parallel-degree 2", "must divide 3")),
    ([*EVALUATE, "--nproc", "2", "--expert-parallel-degree", "32"], {}, ("--expert-parallel-degree 32", "n_routed")),
    ([*EVALUATE, "--tasks", "loss", "--data", "none"], {}, ("none",)),
    ([*EVALUATE, "--lengths", "4096"], {}, ("--lengths 4096", "2048")),
    ([*EVALUATE, "--tasks", "loss", "--data", "a", "--fewshot", "3"], {}, ("--fewshot", "--tasks")),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_work(verb, changes, words, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glm46.operate.launch.ranks.run_ranks", lambda *_: pytest.fail("ranks were started"))
    before = {path.name for path in tmp_path.iterdir()} | {"config.json"}
    tokenizer = ["--tokenizer", "builtin"] if verb[0] in ("generate", "evaluate") else []
    assert main([*verb, "--model", folder(**changes), *tokenizer]) == 2
    printed = capfd.readouterr()
    faults = printed.err.splitlines()
    assert not printed.out and all(line.startswith("error: ") for line in faults) and len(faults) <= 2, printed
    assert all(word in printed.err for word in words), printed.err
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("verb", [GENERATE, EVALUATE])
def test_a_model_of_the_hub_is_compared_before_its_weights_are_fetched(verb, folder, monkeypatch, capsys):
    monkeypatch.setattr("glm46.storage.huggingface.hub.local_path", lambda *_: pytest.fail("weights were fetched"))
    place = Path(folder(**LARGE))
    monkeypatch.setattr("glm46.operate.models.model_fit.config_folder", lambda _: place)
    assert main([*verb, "--model", "hf://owner/name"]) == 2
    assert "cannot" in capsys.readouterr().err
