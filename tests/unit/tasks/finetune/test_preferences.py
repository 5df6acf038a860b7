"""A run on pairs, in one process: the first loss, learning, resumes over the same reference, and bad sources."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.config.text_recipe import TextRecipe
from glm46.operate.estimate.requirement import INTEGERS_TORCH
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.stored_values import StepTensors
from glm46.storage.prepare.pipeline import prepare_text
from glm46.tasks.finetune.task import PreferenceTuning
from tests.builders import TINY, call_here, small_config, write_source
from tests.step_tensors import step_tensors

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "blue")
PAIRS = [{"prompt": f"Say {word}.", "chosen": f"{word}, gladly.", "rejected": f"No {word}."} for word in WORDS]
SHAPE = {"num_nextn_predict_layers": 0}
KINDS = {
    "full": {},
    "lora": {"adapter": {"rank": 4, "expert_rank": 4}, "moe": {"balance": "none", "sequence_aux_loss_weight": 0.0}},
}


LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS for side in ("chosen", "rejected")
]  # fmt: skip


def prepare_rows(folder: Path, rows: list[dict], format: str) -> None:
    """A prepared source of short pairs or labelled answers, some of them held out."""
    file = folder.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"input": (str(file),), "output": str(folder), "format": format, "max_tokens": 64, "held_out": 0.2}
    prepare_text(TextRecipe(**recipe, name=folder.name, processes=1), report=lambda line: None)


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory) -> Path:
    """A folder with a step to start from, pairs and labelled answers."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text").mkdir()
    source = write_source(folder / "text", tokenizer)
    assert train(small_config(source, folder / "base", training={"steps": 2})) == 0  # with a prediction layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
        prepare_rows(folder / "pairs", PAIRS, "preference")
        prepare_rows(folder / "labelled", LABELLED, "unpaired_preference")
    return folder


def tuned(start: Path, dump_folder: Path, kind: str, source: str = "pairs", **tables):
    sources = [{"name": source, "path": str(start / source), "packing": "best_fit"}]
    base = start / "base/checkpoint/step-000002"
    return small_config(start / "text", dump_folder, **{
        "model": SHAPE, "data": {"sources": sources}, "finetune": {"preference": {"beta": 0.5}},
        "training": {"steps": 4, "seq_len": 128, "global_batch_size": 2},
        "checkpoint": {"initial_load_path": str(base), "initial_load_model_only": True, "interval": 2},
        "validation": {"enable": True, "freq": 4},
    } | KINDS[kind] | tables)  # fmt: skip


def rows_of(folder: Path, key: str) -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if key in row]


def contents(step: Path) -> dict[str, torch.Tensor]:
    return step_tensors(step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_at_ln_2_learns_and_resumes_bit_for_bit(start, tmp_path, kind):
    """Another reference is refused with what changed."""
    out, base = tmp_path / "out", tmp_path / "base/step-000002"
    shutil.copytree(start / "base/checkpoint/step-000002", base)
    first = {"initial_load_path": str(base), "initial_load_model_only": True, "interval": 2}
    config = tuned(start, out, kind, checkpoint=first)
    torch.seed()  # as each process begins
    assert train(config) == 0
    rows, held_out = rows_of(out, "loss"), rows_of(out, "validation_loss")
    # The same weights give the same log-probabilities, but for the rounding of another forward.
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(rows[0]["rewards/margins"]) < 1e-5
    assert held_out[0]["validation_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["loss"] < 0.6 and rows[-1]["rewards/margins"] > 0.2 and rows[-1]["rewards/accuracies"] > 0.9
    assert held_out[-1]["validation_loss"] < held_out[0]["validation_loss"]
    margin = rows[-1]["rewards/chosen"] - rows[-1]["rewards/rejected"]
    assert margin == pytest.approx(rows[-1]["rewards/margins"])
    step = out / "checkpoint/step-000004"
    whole, names = contents(step), set(StepTensors(step))
    assert not any("reference" in name for name in names) and all("lora_" in n for n in names) == (kind == "lora")
    shutil.rmtree(step)
    torch.seed()
    assert train(config) == 0
    resumed = contents(step)
    found = [(row["step"], row["loss"], row["grad_norm"], row["rewards/margins"]) for row in rows_of(out, "loss")]
    assert found == [(row["step"], row["loss"], row["grad_norm"], row["rewards/margins"]) for row in rows]
    assert whole.keys() == resumed.keys() and all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    if kind == "lora":
        return
    shutil.rmtree(base)
    shutil.copytree(out / "checkpoint/step-000002", base)
    with pytest.raises(UserError, match=r"initial_load_path = .*manifest.json changed since .*; restore them, or"):
        train(tuned(start, out, kind, checkpoint=first, training={"steps": 6, "seq_len": 128, "global_batch_size": 2}))


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "source"), [
    ({"loss_type": "ipo", "beta": 0.2}, "pairs"), ({"loss_type": "simpo", "beta": 2.0}, "pairs"),
    ({"loss_type": "orpo", "beta": 0.5}, "pairs"), ({"loss_type": "kto", "beta": 0.5}, "pairs"),
    ({"loss_type": "kto", "beta": 0.5, "undesirable_weight": 1.5}, "labelled"),
], ids=lambda value: value if isinstance(value, str) else value["loss_type"])  # fmt: skip
def test_each_loss_learns_to_prefer_and_resumes_bit_for_bit(start, tmp_path, keys, source):
    config, out = tuned(start, tmp_path / "out", "full", source, finetune={"preference": keys}), tmp_path / "out"
    torch.seed()
    assert train(config) == 0
    rows, held_out = rows_of(out, "loss"), rows_of(out, "validation_loss")
    begin = {"ipo": 1 / (2 * 0.2) ** 2, "kto": 0.5 * (1.25 if source == "labelled" else 1.0)}
    if source == "pairs" and keys["loss_type"] in begin:  # labels of a step are not as many of each
        assert rows[0]["loss"] == pytest.approx(begin[keys["loss_type"]], rel=1e-5)
    if keys["loss_type"] == "kto":
        assert rows[0]["kl"] < 1e-5 and rows[-1]["kl"] >= 0.0 and "rewards/accuracies" not in rows[0]
    else:
        assert rows[-1]["rewards/accuracies"] > 0.9 and held_out[-1]["validation_rewards/accuracies"] >= 0.5
    assert rows[-1]["loss"] < rows[0]["loss"] and held_out[-1]["validation_loss"] < held_out[0]["validation_loss"]
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"] + 0.02
    step = out / "checkpoint/step-000004"
    whole = contents(step)
    shutil.rmtree(step)
    torch.seed()
    assert train(config) == 0
    assert whole.keys() == contents(step).keys()
    assert all(torch.equal(tensor, contents(step)[name]) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("in_hf", [False, True])
def test_a_reward_model_begins_with_a_new_head_learns_and_resumes_bit_for_bit(start, tmp_path, in_hf, capsys):
    out, step = tmp_path / "out", start / "base/checkpoint/step-000002"
    if in_hf:
        folder = str(tmp_path / "folder")
        assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", folder, "--dtype", "float32"]) == 0
        tables = {"checkpoint": {"initial_load_path": folder, "initial_load_in_hf": True, "interval": 2}}
    else:
        tables = {}
    config = tuned(start, out, "full", finetune={"preference": {"loss_type": "reward"}}, **tables)
    torch.seed()
    assert train(config) == 0
    rows, held_out = rows_of(out, "loss"), rows_of(out, "validation_loss")
    assert "logps/chosen" not in rows[0] and "nll_loss" not in rows[0]
    margin = rows[0]["rewards/chosen"] - rows[0]["rewards/rejected"]
    assert margin == pytest.approx(rows[0]["rewards/margins"]) and abs(rows[0]["loss"] - math.log(2)) < 0.4
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1 and rows[-1]["rewards/accuracies"] > 0.9
    assert held_out[-1]["validation_loss"] < held_out[0]["validation_loss"] - 0.1
    last = out / "checkpoint/step-000004"
    whole = contents(last)
    assert "value_head.weight" in whole and "lm_head.weight" not in whole
    shutil.rmtree(last)
    torch.seed()
    assert train(config) == 0
    assert [row["loss"] for row in rows_of(out, "loss")] == [row["loss"] for row in rows]
    assert all(torch.equal(tensor, contents(last)[name]) for name, tensor in whole.items())
    for verb in (["generate", "--prompt", "x"], ["convert", "to-hf", "--output", str(tmp_path / "none")]):
        assert main([*verb, "--checkpoint", str(last)]) == 2
        assert "holds a reward model, which gives a number and no text" in capsys.readouterr().err
    # A model that is no language model is no base of one, and a base of another reward model with its head.
    more = {"initial_load_path": str(last), "initial_load_model_only": True}
    again = tuned(start, tmp_path / "more", "full", finetune=config.finetune.model_dump(), checkpoint=more)
    assert train(again) == 0
    assert rows_of(tmp_path / "more", "loss")[0]["rewards/accuracies"] > 0.9
    with pytest.raises(UserError, match="lm_head.weight"):
        train(tuned(start, tmp_path / "other", "full", checkpoint=more))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["simpo", "orpo"])
def test_a_loss_without_a_reference_has_no_second_network_and_no_second_pass(start, tmp_path, monkeypatch, loss_type):
    def unexpected(*arguments):
        raise AssertionError("a second network")

    monkeypatch.setattr("glm46.tasks.finetune.task.build_frozen_network", unexpected)
    monkeypatch.setattr(PreferenceTuning, "_logprobs", unexpected)
    tables = {"finetune": {"preference": {"loss_type": loss_type}}, "validation": {"enable": False}}
    config = tuned(start, tmp_path / "out", "full", **tables, training={"steps": 1, "seq_len": 128})
    assert train(config) == 0 and rows_of(tmp_path / "out", "loss")
    assert f"preference   {loss_type}, without a reference\n" in (tmp_path / "out/log.txt").read_text()


@pytest.mark.slow
def test_a_policy_and_its_reference_in_host_memory_train_as_on_the_device(start, tmp_path):
    """Muon's states, and the weights of both networks."""
    steps = {}
    for name, offload in (("device", False), ("host", True)):
        optimizer = {"name": "Muon", "lr": 2e-3, "state_offload": "cpu" if offload else "none"}
        training = {"steps": 4, "seq_len": 128, "global_batch_size": 2, "parameter_offload": offload}
        assert train(tuned(start, tmp_path / name, "full", optimizer=optimizer, training=training)) == 0
        steps[name] = contents(tmp_path / name / "checkpoint/step-000004")
    rows = rows_of(tmp_path / "host", "loss")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[-1]["loss"] < 0.4
    assert steps["device"].keys() == steps["host"].keys()
    assert all(torch.equal(tensor, steps["host"][name]) for name, tensor in steps["device"].items())


@pytest.mark.slow
@pytest.mark.parametrize("float8", [
    {"recipe_name": "rowwise", "experts_recipe_name": "rowwise"},
    {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": True},
], ids=["rowwise", "gathered"])  # fmt: skip
def test_a_policy_and_its_reference_in_float8_begin_equal(start, tmp_path, float8):
    """Both round alike; a reference in another precision would begin with a margin."""
    config = tuned(start, tmp_path / "out", "full", float8=float8 | {"emulate": True})
    assert train(config) == 0
    rows = rows_of(tmp_path / "out", "loss")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(rows[0]["rewards/margins"]) < 1e-5
    assert rows[-1]["loss"] < 0.1 and rows[-1]["rewards/accuracies"] > 0.9


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < INTEGERS_TORCH, reason="the launcher refuses a quantised base on this torch"
)
@pytest.mark.parametrize("preference", [{"beta": 0.5}, {"loss_type": "kto", "beta": 0.5}], ids=["dpo", "kto"])
@pytest.mark.parametrize(("scheme", "base_dtype"), [("int4", "int4"), ("float32", "nf4")])
def test_preferences_on_a_base_in_4_bits_train_as_on_the_converted_one_and_merge_into_it(
    start, tmp_path, preference, scheme, base_dtype, capsys
):
    """To the last bit of each adapter and state; and what is merged, and what goes on from the saved adapters, gives
    the held-out pairs the log-probabilities that were trained."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    wide, folder = {"model": TINY | sizes | SHAPE}, tmp_path / "folder"
    assert train(small_config(start / "text", tmp_path / "base", training={"steps": 2}, **wide)) == 0
    step = str(tmp_path / "base/checkpoint/step-000002")
    assert main(["convert", "to-hf", "--checkpoint", step, "--output", str(folder), "--dtype", scheme]) == 0
    hf = {"initial_load_in_hf": True, "last_save_in_hf": True, "interval": 4}
    adapter = {"rank": 8, "expert_rank": 4, "base_dtype": base_dtype}

    def tune(name: str, preference: dict, adapter: dict, folder: Path = folder) -> list[dict]:
        tables = wide | {"checkpoint": {"initial_load_path": str(folder), **hf}, "finetune": {"preference": preference}}
        kind, tables = ("lora", tables | {"adapter": adapter}) if adapter else ("full", tables)
        assert train(tuned(start, tmp_path / name, kind, **tables)) == 0
        return rows_of(tmp_path / name, "loss")

    rows = tune("quantised", preference, adapter)
    saved = tmp_path / "quantised/huggingface/step-000004"
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert json.loads((saved / "base_format.json").read_text()) == {"base_dtype": base_dtype}
    capsys.readouterr()
    ask = ["generate", "--model", str(folder), "--adapter", str(saved), "--prompt", "x", "--max-new-tokens", "1"]
    assert main(ask) == 0
    is_rounded = base_dtype == "nf4"  # INT4 weights stay as the folder has them
    assert (f"{saved}: was trained on a base in nf4, which {folder} is not" in capsys.readouterr().err) is is_rounded
    merged = tmp_path / "merged"
    merge = ["convert", "merge", "--base", str(folder), "--adapter", str(saved), "--output", str(merged)]
    assert main([*merge, "--dtype", "float32"]) == 0
    if base_dtype == "int4":
        plain = tune("plain", preference, adapter | {"base_dtype": None})
        assert [row["loss"] for row in plain] == [row["loss"] for row in rows]
        one, other = (contents(tmp_path / name / "checkpoint/step-000004") for name in ("quantised", "plain"))
        assert one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    tune("on", {"loss_type": "orpo"}, adapter | {"initial_load_path": str(saved)})
    tune("whole", {"loss_type": "orpo"}, {}, merged)
    first = [rows_of(tmp_path / name, "validation_loss")[0]["validation_loss"] for name in ("on", "whole")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_a_prepared_source_must_hold_what_the_task_reads(start, tmp_path):
    text = [{"name": "text", "path": str(start / "text")}]
    with pytest.raises(UserError, match=r"text: no pairs, which \[finetune.preference\] reads; give"):
        train(tuned(start, tmp_path / "out", "full", data={"sources": text}))
    with pytest.raises(UserError, match=r"pairs: pairs, which only \[finetune.preference\] reads; add"):
        train(tuned(start, tmp_path / "out", "full", finetune={}))
    with pytest.raises(UserError, match=r'labelled: labelled answers, which only .*loss_type = "kto" reads; set that'):
        train(tuned(start, tmp_path / "out", "full", "labelled"))
    kto = {"finetune": {"preference": {"loss_type": "kto"}}, "training": {"steps": 1, "seq_len": 100}}
    with pytest.raises(
        UserError, match=r"labelled: max_tokens = 64: longer than half of .* 100 tokens, .*lower it to 50"
    ):
        train(tuned(start, tmp_path / "out", "full", "labelled", **kto))
