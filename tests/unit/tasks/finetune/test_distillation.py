"""Runs that learn from a teacher, in one process: they learn, and resume over the same teacher."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.tasks.finetune.task import train
from glm46.tasks.pretrain.task import train as pretrain
from tests.small_run import TINY, call_here, small_config, write_source
from tests.unit.tasks.finetune.test_preferences import KINDS, SHAPE, WORDS, contents, prepare_rows, rows_of

CHATS = [{"prompt": f"Say {word}.", "completion": f"{word}, gladly."} for word in WORDS]


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory) -> Path:
    """A folder with a base, a teacher that has learned chats, as a step and in Hugging Face's format, and the chats."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text").mkdir()
    source = write_source(folder / "text", tokenizer)
    assert pretrain(small_config(source, folder / "base", model=SHAPE, training={"steps": 2})) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
        prepare_rows(folder / "chats", CHATS, "prompt_completion")
    config = tuned(folder, folder / "teacher", "full", finetune={}, training={"steps": 8, "seq_len": 128})
    assert train(config) == 0
    step, output = str(step_of(folder / "teacher", 8)), str(folder / "hf")
    assert main(["convert", "to-hf", "--checkpoint", step, "--output", output, "--dtype", "float32"]) == 0
    return folder


def step_of(folder: Path, step: int) -> Path:
    return folder / f"checkpoint/step-{step:06}"


def tuned(start: Path, dump_folder: Path, kind: str, **tables):
    sources = [{"name": "chats", "path": str(start / "chats"), "packing": "best_fit"}]
    return small_config(start / "text", dump_folder, **{
        "model": SHAPE, "data": {"sources": sources},
        "training": {"steps": 8, "seq_len": 128, "global_batch_size": 2},
        "checkpoint": {"initial_load_path": str(step_of(start / "base", 2)), "initial_load_model_only": True,
                       "interval": 4},
        "validation": {"enable": True, "freq": 8},
    } | KINDS[kind] | tables)  # fmt: skip


def taught(start: Path, in_hf: bool = False, **keys) -> dict:
    path = start / "hf" if in_hf else step_of(start / "teacher", 8)
    return {"finetune": {"distillation": {"load_path": str(path), "top_k": 8192} | keys}}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_hf", "keys"), [
    ("full", False, {}), ("full", True, {"beta": 1.0}), ("lora", True, {"beta": 0.5}),
    ("full", False, {"sft_weight": 0.5, "temperature": 2.0}),
])  # fmt: skip
def test_a_student_learns_what_its_teacher_says_and_resumes_bit_for_bit(start, tmp_path, kind, in_hf, keys):
    tables = {"optimizer": {"name": "AdamW", "lr": 5e-2}} if kind == "lora" else {}
    config, out = tuned(start, tmp_path / "out", kind, **taught(start, in_hf, **keys), **tables), tmp_path / "out"
    torch.seed()  # as each process begins
    assert train(config) == 0
    rows, held_out = rows_of(out, "loss"), rows_of(out, "validation_kl")
    said = f"temperature {keys.get('temperature', 1.0):g}, top_k 8192; teacher {config.distillation.load_path}\n"
    assert said in (out / "log.txt").read_text() and re.search(r"step +1 .* kl +\d", (out / "log.txt").read_text())
    has_nll = "nll_loss" in rows[0]
    assert has_nll == (keys.get("temperature", 1.0) == 1.0 or "sft_weight" in keys)
    for row in rows:
        nll = keys.get("sft_weight", 0.0) * row["nll_loss"] if has_nll else 0.0
        assert row["loss"] == pytest.approx(row["kl"] + nll, rel=1e-6)
    if not keys.get("sft_weight"):
        most = 0.95 if kind == "lora" else 0.7  # few weights of a model that knows nothing yet
        assert rows[-1]["kl"] < most * rows[0]["kl"]
        assert held_out[-1]["validation_kl"] < max(most, 0.8) * held_out[0]["validation_kl"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    # No label was read but with a weight of the cross-entropy: what it knows of them is the teacher's.
    assert held_out[-1]["validation_loss"] < held_out[0]["validation_loss"]
    names = set(contents(step_of(out, 8)))
    assert not any("teacher" in name for name in names) and all("lora_" in n for n in names) == (kind == "lora")
    whole = contents(step_of(out, 8))
    shutil.rmtree(step_of(out, 8))
    torch.seed()
    assert train(config) == 0
    resumed = contents(step_of(out, 8))
    assert [row["loss"] for row in rows_of(out, "loss")] == [row["loss"] for row in rows]
    assert whole.keys() == resumed.keys() and all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_student_that_begins_as_its_teacher_stays_near_it(start, tmp_path):
    """The teacher is the base: without adapters a network of its own, with them none. Its divergence begins at zero,
    and a run without it goes farther away."""
    for kind in KINDS:
        found = {}
        for weight in (0.05, 50.0):
            keys = {"finetune": {"distillation": {"sft_weight": weight, "top_k": 8192}}}
            assert train(tuned(start, tmp_path / f"{kind}{weight}", kind, **keys)) == 0
            found[weight] = rows_of(tmp_path / f"{kind}{weight}", "kl")
        assert found[0.05][0]["kl"] < 1e-6
        assert found[0.05][-1]["kl"] < 0.9 * found[50.0][-1]["kl"]


@pytest.mark.slow
def test_a_teacher_of_another_shape_teaches(start, tmp_path, monkeypatch):
    from glm46.config import presets

    wide = {"hidden_size": 64, "num_hidden_layers": 3}
    shape = presets.resolve_shape(small_config(start / "text", tmp_path, model=TINY | SHAPE | wide).model)
    monkeypatch.setitem(presets.PRESETS, "wide", shape)
    model = {"checkpoint": {"interval": 2}, "model": TINY | SHAPE | wide, "training": {"steps": 2}}
    assert pretrain(small_config(start / "text", tmp_path / "wide", **model)) == 0
    folder = {"load_path": str(step_of(tmp_path / "wide", 2))}
    assert train(tuned(start, tmp_path / "out", "full", **taught(start, **folder, flavor="wide"))) == 0
    rows = rows_of(tmp_path / "out", "kl")
    assert rows[-1]["kl"] < 0.8 * rows[0]["kl"]
    with pytest.raises(UserError, match=r"finetune.distillation.load_path = .*hidden_size = 32: .*saved with 64"):
        train(tuned(start, tmp_path / "other", "full", **taught(start, **folder)))


@pytest.mark.slow
def test_another_teacher_is_refused_and_so_is_another_tokenizer(start, tmp_path, tokenizer):
    base = tmp_path / "step-000008"
    shutil.copytree(step_of(start / "teacher", 8), base)
    first = taught(start, load_path=str(base)) | {"training": {"steps": 4, "seq_len": 128, "global_batch_size": 2}}
    assert train(tuned(start, tmp_path / "out", "full", **first)) == 0
    other = taught(start, load_path=str(step_of(start / "base", 2)))
    with pytest.raises(
        UserError, match=r"^finetune.distillation.load_path = '.*step-000002'?.*changed since .* was saved"
    ):
        train(tuned(start, tmp_path / "out", "full", **other))
    folder = tmp_path / "hf"
    shutil.copytree(start / "hf", folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|observation|>", "<|observed|>"))
    with pytest.raises(UserError, match=r"load_path = .*its tokenizer is not model.tokenizer_path = 'builtin'"):
        train(tuned(start, tmp_path / "again", "full", **taught(start, True, load_path=str(folder))))
