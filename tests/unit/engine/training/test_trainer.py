"""A whole run in one process: it logs, validates, saves, resumes bit for bit, skips bad steps and stops when asked.

A checkpoint states the validation loss of its own step, or none.
"""

import gc
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from glm46.commands.checkpoint import checkpoint_command
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.ablation import AblationConfig, VariantConfig, require_one_run
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.engine.inference.sampling import continue_tokens
from glm46.engine.observe import writes
from glm46.engine.observe.history import LineFile
from glm46.engine.reliability.run_lock import refuse_small_disk
from glm46.engine.reliability.stop import Diverged, StopRequest
from glm46.engine.reliability.watchdog import Watchdog
from glm46.engine.training import build, loop
from glm46.engine.training.saving import FolderLost, SaveFailed, Saver, SavesFail
from glm46.engine.training.state import Progress
from glm46.engine.training.totals import count_step
from glm46.operate.launch.train_rank import train
from glm46.operate.models.checkpoint_steps import summarise
from glm46.run.plan import resolve_plan
from glm46.storage.checkpoint import save
from glm46.storage.checkpoint.integrity import META, published_steps, step_folder
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.tasks.pretrain import next_token
from glm46.tasks.pretrain.task import Pretraining
from tests.builders import metric_rows
from tests.step_tensors import step_tensors, tensor_hashes

SLOW = pytest.mark.slow
TIMED = ("seconds", "second", "device", "mfu", "gib", "overhead_ratio")


def rows(config) -> list[dict]:
    lines = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.partition("/")[0].endswith(TIMED)} for line in lines]


def training_rows(config) -> list[dict]:
    return [row for row in rows(config) if "loss" in row]


def test_a_deterministic_run_is_prepared_before_it_uses_a_gpu(make_config, monkeypatch):
    """cuBLAS reads the variable when it starts, and torch refuses products without it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")

    def joined(_seconds):
        found = os.environ["CUBLAS_WORKSPACE_CONFIG"], torch.backends.cuda.cudnn_sdp_enabled()
        assert found == (":4096:8", False) and torch.are_deterministic_algorithms_enabled()
        raise InterruptedError

    monkeypatch.setattr(build, "join", joined)
    try:
        with pytest.raises(InterruptedError):
            train(make_config(debug={"deterministic": True}))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_step_is_published_after_its_row_however_slow_the_storage_of_rows(mode, make_config, monkeypatch):
    """Otherwise a run that is killed in between goes on after a step without a row."""
    config = make_config(training={"steps": 6}, checkpoint={"interval": 2, "keep_latest_k": 0, "async_mode": mode})
    at_publishing, append, publish = {}, LineFile._append, save.publish

    def late(*call) -> None:
        time.sleep(0.3)
        append(*call)

    def watched(draft, step, *more) -> None:
        at_publishing[step] = [row["step"] for row in training_rows(config)]
        publish(draft, step, *more)

    monkeypatch.setattr(writes, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(LineFile, "_append", late)
    monkeypatch.setattr(save, "publish", watched)
    assert train(config) == 0
    assert 2 in at_publishing and 6 in at_publishing
    assert all(step in done for step, done in at_publishing.items())
    assert [row["step"] for row in training_rows(config)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_promises(make_config, tmp_path):
    config = make_config(
        training={"steps": 30},
        checkpoint={"interval": 10, "keep_latest_k": 2},
        validation={"enable": True, "freq": 10},
        metrics={"log_freq": 10, "enable_tensorboard": True},
        inference={"prompt": "def function_1("},
    )
    assert train(config) == 0
    folder = Path(config.job.dump_folder)
    steps = [row["step"] for row in training_rows(config)]
    assert steps == [1, 10, 20, 30]
    assert {"tokens", "loss", "grad_norm", "lr", "mtp_loss", "mtp_acceptance"} <= training_rows(config)[0].keys()
    validation = [row["validation_loss"] for row in rows(config) if "validation_loss" in row]
    assert len(validation) == 4
    # ln(8192) is 9.01; the text repeats a handful of tokens, so any working optimizer is far below after 30 steps.
    assert 8.8 < validation[0] < 9.3 and validation[-1] < 6.0
    assert sorted(p.name for p in (folder / "checkpoint").glob("step-*")) == ["step-000020", "step-000030"]
    assert list((folder / "tb").iterdir())
    assert "Continuation" in (folder / "log.txt").read_text()
    # The resolved configuration runs again as it is.
    assert load_config(folder / "config.toml", []) == config


def test_a_signal_ends_the_continuation_and_a_warmup_beyond_the_run_is_told(make_config, monkeypatch):
    asked = []

    def continue_three(*arguments, is_stopped, **keys):
        """Three tokens, then somebody presses Ctrl-C."""

        def is_stopped_then() -> bool:
            if len(asked) == 3:
                stop.signal_name = "SIGINT"
            asked.append(is_stopped())
            return asked[-1]

        return continue_tokens(*arguments, is_stopped=is_stopped_then, **keys)

    monkeypatch.setattr("glm46.engine.evaluation.continuation.continue_tokens", continue_three)
    stop = StopRequest()
    config = make_config(
        inference={"prompt": "def function_1("},
        lr_scheduler={"warmup_tokens": 640},
    )
    assert train(config, stop) == 0
    assert asked == [False, False, False, True]
    text = (Path(config.job.dump_folder) / "log.txt").read_text()
    assert "lr_scheduler.warmup_tokens = 640, and the run ends at 128 tokens: its learning rate reaches 20%" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_after", "dtype"),
    [
        pytest.param(0, "float32", marks=SLOW),
        pytest.param(1, "float32", marks=SLOW),
        (2, "float32"),
        pytest.param(3, "float32", marks=SLOW),
        (2, "bfloat16"),
    ],
)
def test_stopping_after_any_step_and_starting_again_changes_no_bit(make_config, tmp_path, stop_after, dtype):
    settings = dict(
        # Waited for: a save behind training is left out while the one before is under way.
        checkpoint={"interval": 1, "keep_latest_k": 0, "async_mode": "disabled"},
        validation={"enable": True, "freq": 2},
        moe={"balance": "proportional", "bias_update_rate": 0.01},
        training={"steps": 4, "global_batch_size": 4, "dtype": dtype},
        metrics={"log_freq": 2},
    )
    whole = make_config(job={"dump_folder": str(tmp_path / "whole")}, **settings)
    torch.seed()  # as each process begins
    assert train(whole) == 0
    figures = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[-2])
    # Weights, both AdamW states in FP32 for each of 556,392 parameters, and some KB for each tensor.
    entry_bytes = getattr(torch, dtype).itemsize + 2 * torch.float32.itemsize
    assert 1 < figures["checkpoint_gib"] * 2**30 / (entry_bytes * 556_392) < 1.1
    assert figures["checkpoint_save_seconds"] == figures["checkpoint_seconds"] > 0  # it was waited for
    again = make_config(job={"dump_folder": str(tmp_path / "again")}, **settings)
    (tmp_path / "again").mkdir()
    for step in range(1, stop_after + 1):
        shutil.copytree(tmp_path / f"whole/checkpoint/step-{step:06d}", tmp_path / f"again/checkpoint/step-{step:06d}")
    shutil.copy(tmp_path / "whole/metrics.jsonl", tmp_path / "again/metrics.jsonl")
    torch.seed()
    assert train(again) == 0
    assert rows(again) == rows(whole)
    # The states of generators, too.
    assert tensor_hashes(again.checkpoint_folder, 4) == tensor_hashes(whole.checkpoint_folder, 4)
    # Rows are of steps 1, 2 and 4; the mean is over the steps since the row before, also where the run was stopped.
    means = [row["loss_mean"] for row in training_rows(whole)]
    losses = [row["loss"] for row in training_rows(whole)]
    assert means[:2] == losses[:2] and means[1] > means[2] != losses[2]


@pytest.mark.slow
def test_a_run_that_continues_another_one_changes_no_bit(make_config, tmp_path, capsys):
    def config(name: str, steps: int = 6, interval: int = 2, **checkpoint):
        return make_config(
            job={"dump_folder": str(tmp_path / name)},
            checkpoint={"interval": interval, "keep_latest_k": 0, "async_mode": "disabled", **checkpoint},
            moe={"balance": "proportional", "bias_update_rate": 0.01, "z_loss_weight": [[0, 0.0], [384, 0.1]]},
            lr_scheduler={"warmup_tokens": 256, "total_tokens": 2000},
            training={"steps": steps, "global_batch_size": 4},
            metrics={"log_freq": 2},
        )

    def files(name: str, step: int) -> dict[str, Any]:
        """Hashes of the tensor files, and the counters."""
        folder = tmp_path / name / f"checkpoint/step-{step:06d}"
        manifest, meta = (json.loads((folder / file).read_text()) for file in ("manifest.json", "meta.json"))
        tensors = {file: hashes for file, hashes in manifest["body"]["files"].items() if file.endswith(".distcp")}
        return {**tensors, "progress": meta["progress"], "read": meta["read"], "spikes": meta["spikes"]}

    whole = config("whole")
    assert train(whole) == 0
    (tmp_path / "link").symlink_to(tmp_path / "whole/checkpoint/step-000002")
    keys = {"load_path": str(tmp_path / "link")}
    # An attempt that fails before its first save leaves rows, and no checkpoint.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "end_step", fail_after(3, loop.end_step))
        with pytest.raises(InterruptedError):
            train(config("again", interval=50, **keys))
    assert not list((tmp_path / "again").rglob("step-*"))
    capsys.readouterr()
    assert train(config("again", **keys)) == 0
    assert (
        f"resumed after step 2, 128 tokens, from checkpoint.load_path = '{keys['load_path']}'"
        in capsys.readouterr().out
    )
    assert training_rows(whole)[0]["step"] == 1
    assert training_rows(config("again")) == training_rows(whole)[2:]
    assert files("again", 4) == files("whole", 4) and files("again", 6) == files("whole", 6)
    # Its own checkpoints come first: nobody looks at the other run's folder any more.
    (tmp_path / "link").unlink()
    assert train(config("again", steps=8, **keys)) == 0 == train(config("whole", steps=8))
    assert "resumed after step 6, 384 tokens\n" in capsys.readouterr().out
    assert training_rows(config("again")) == training_rows(whole)[2:] and files("again", 8) == files("whole", 8)
    # A budget that is spent before a step is trained, too, leaves a checkpoint of its own.
    assert train(config("spent", load_path=str(tmp_path / "whole/checkpoint/step-000006"))) == 0
    assert files("spent", 6) == files("whole", 6)


@pytest.mark.slow
def test_outputs_events_and_checkpoints_may_lie_apart(make_config, tmp_path, capsys):
    steps_folder, events_folder = (tmp_path / "big/run [a-z]*/steps?", tmp_path / "boards/{a,b}")  # no patterns
    apart = {"checkpoint.folder": steps_folder, "metrics.save_tb_folder": events_folder}

    def config(name: str = "out", steps: int = 4, **checkpoint):
        return make_config(
            job={"dump_folder": str(tmp_path / name)},
            checkpoint={"folder": str(apart["checkpoint.folder"]), "interval": 2, "keep_latest_k": 1, **checkpoint},
            metrics={"enable_tensorboard": True, "save_tb_folder": str(apart["metrics.save_tb_folder"])},
            training={"steps": steps},
            lr_scheduler={"total_tokens": 1000},
        )

    def steps() -> list[str]:
        return sorted(path.name for path in apart["checkpoint.folder"].glob("step-*"))

    whole = make_config(job={"dump_folder": str(tmp_path / "whole")}, lr_scheduler={"total_tokens": 1000})
    assert config().folders_apart == apart and whole.folders_apart == {}
    assert train(config(steps=2)) == 0 and train(config()) == 0 == train(whole)
    assert training_rows(config()) == training_rows(whole)
    assert steps() == ["step-000002", "step-000004"]  # the one that the run started from is kept
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.toml",
        "log.txt",
        "metrics.jsonl",
        "run.lock",
    }
    assert list(apart["metrics.save_tb_folder"].glob("events*"))
    said = capsys.readouterr().out
    for path in (steps_folder / "step-000004", f"tensorboard --logdir {shlex.quote(str(events_folder))}"):
        assert str(path) in said
    # Another run cannot take these checkpoints for its own, but go on from them.
    with pytest.raises(UserError) as caught:
        train(config("other"))
    (fault,) = caught.value.faults
    assert fault.startswith(f"checkpoint.folder = '{apart['checkpoint.folder']}': has checkpoints of the run in ")
    assert f"checkpoint.load_path = '{apart['checkpoint.folder'] / 'step-000004'}'" in fault
    assert not (tmp_path / "other").exists() and len(steps()) == 2
    inside = make_config(
        job={"dump_folder": str(tmp_path / "other")}, checkpoint={"folder": str(tmp_path / "out/mine")}
    )
    with pytest.raises(
        UserError, match=rf"checkpoint\.folder = .*: lies in the folder of the run in {tmp_path / 'out'};"
    ):
        train(inside)
    # What a new run finds in the folder of event files is kept aside.
    shutil.rmtree(apart["checkpoint.folder"])
    assert train(config(steps=1)) == 0
    assert sorted(path.name for path in (tmp_path / "boards").iterdir()) == ["{a,b}", "{a,b}.1", "{a,b}.run.lock"]


def fail_after(calls: int, original: Callable) -> Callable:
    """A function that raises InterruptedError in place of a later call."""
    numbers = iter(range(calls + 1))

    def called(*arguments):
        if next(numbers) == calls - 1:
            raise InterruptedError
        return original(*arguments)

    return called


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused_with_its_key(make_config, tmp_path):
    first = make_config(training={"steps": 2}, checkpoint={"interval": 1, "async_mode": "disabled"})
    assert train(first) == 0
    folder = Path(first.job.dump_folder) / "checkpoint"

    def refusal(path: Path, **tables) -> str:
        config = make_config(
            job={"dump_folder": str(tmp_path / "new")}, checkpoint={"load_path": str(path)}, **tables
        )  # fmt: skip
        with pytest.raises(UserError) as caught:
            train(config)
        assert not (tmp_path / "new/checkpoint").exists() and not (tmp_path / "new/metrics.jsonl").exists()
        assert caught.value.faults[0].startswith(("checkpoint.load_path = ", "debug.seed = ", "optimizer.name = "))
        return str(caught.value)

    step = folder / "step-000002"
    assert "no such folder; " in (text := refusal(folder / "step-000009")) and f"{folder} has steps 1, 2" in text
    assert "not a step folder; " in (text := refusal(folder)) and f"such as {step}" in text
    assert "no such folder; give one such as" in refusal(tmp_path / "nowhere")
    wider = refusal(step, model={"moe_intermediate_size": 24})
    assert "model.shape.moe_intermediate_size = 24: " in wider and "saved with 16; restore it, or" in wider
    assert "initial_load_path" in wider
    assert "optimizer.name = " in refusal(step, optimizer={"name": "Muon", "lr": 0.5})
    assert "debug.seed = 1: " in refusal(step, debug={"seed": 1})
    (tensors,) = step.glob("*.distcp")
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "SHA-256" in (text := refusal(step)) and "give another one" in text
    tensors.write_bytes(content[:-1])
    assert f"{len(content) - 1} bytes, expected {len(content)}; restore" in refusal(step)
    tensors.unlink()
    assert "missing; restore what is missing, or give another step folder" in refusal(step)


def test_the_mean_loss_weighs_labels_and_leaves_steps_without_labels_out():
    progress = Progress()
    progress.add_loss(30.0, 10)
    progress.add_loss(10.0, 30)
    assert Progress(**asdict(progress)).take_mean_loss() == 1.0  # as a checkpoint carries it
    assert progress.take_mean_loss() == 1.0
    assert progress.take_mean_loss() is None  # every step since then was skipped


def test_news_of_a_failed_save_does_not_keep_a_rank_from_the_next_one(make_config, monkeypatch):
    # Only this rank may have heard of it by now, and the next save is collective.
    news = iter([[CheckpointError("rank 0: writing tensors: Input/output error")], [], [], []])

    def poll(self):
        for error in next(news):
            raise error
        return []

    monkeypatch.setattr(CheckpointManager, "poll", poll)
    config = make_config(checkpoint={"interval": 1, "async_mode": "disabled"}, training={"steps": 2})
    assert train(config) == 0
    assert "Input/output error" in (Path(config.job.dump_folder) / "log.txt").read_text()
    folder = Path(config.job.dump_folder) / "checkpoint"
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-000001", "step-000002"]


def poison(monkeypatch, bad_steps: set[int]) -> list[dict]:
    """Make the loss of some steps NaN; returns the weights before each step."""
    original, weights, calls = next_token.next_token_loss, [], iter(range(1, 100))

    def objective(*arguments):
        loss = original(*arguments)
        return loss * float("nan") if next(calls) in bad_steps else loss

    original_step = loop.train_step

    def recorded(task, *arguments):
        weights.append({name: p.detach().clone() for name, p in task.network.parameters.items()})
        weights[-1] |= {n: t.clone() for n, t in task.network.optimizer.state_tensors().items()}
        return original_step(task, *arguments)

    monkeypatch.setattr(next_token, "next_token_loss", objective)
    monkeypatch.setattr(loop, "train_step", recorded)
    return weights


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_too_many_bad_steps_in_a_row_end_the_run(make_config, monkeypatch):
    config = make_config(training={"steps": 9, "max_skipped_steps": 2})
    poison(monkeypatch, {2, 3, 5, 6, 7})
    with pytest.raises(Diverged, match="max_skipped_steps = 2: 3 steps in a row"):
        train(config)
    assert gc.isenabled()  # also after an error
    assert training_rows(config)[-1]["step"] == 7  # step 7 was the third in a row


def spoil(monkeypatch, after_step: int) -> None:
    """Put a NaN into a weight after a step whose figures are good, as an update that overflows does; once."""
    original, calls = loop.train_step, iter(range(1, 100))

    def train_step(task, *arguments):
        outcome = original(task, *arguments)
        if next(calls) == after_step:
            local(task.network.parameters["layers.1.mlp.experts.down"].detach()).view(-1)[5] = float("nan")
        return outcome

    monkeypatch.setattr(loop, "train_step", train_step)


def saved_steps(config) -> list[int]:
    return sorted(int(path.name[5:]) for path in (Path(config.job.dump_folder) / "checkpoint").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("async_mode", ["async", pytest.param("disabled", marks=SLOW)])
def test_ruined_weights_are_never_published_and_end_the_run_as_diverged(make_config, monkeypatch, async_mode):
    settings = dict(checkpoint={"interval": 1, "keep_latest_k": 1, "async_mode": async_mode}, training={"steps": 8})
    config = make_config(**settings)
    spoil(monkeypatch, after_step=3)
    with pytest.raises(Diverged, match=r"layers\.1\.mlp\.experts\.down.* not finite.*optimizer\.lr") as caught:
        train(config)
    assert caught.value.exit_code == 77
    (kept,) = saved_steps(config)
    assert kept <= 2  # a save behind training may still have been under way
    assert checkpoint_command(["verify", str(Path(config.job.dump_folder) / "checkpoint")]) == 0
    # With a way back the same run goes on from there, past the text that ruined it.
    settings["training"] |= {"max_rollbacks": 1}
    assert train(make_config(**settings)) == 0
    assert saved_steps(config)[-1] == 8


@pytest.mark.slow
def test_values_that_only_a_save_found_not_finite_name_the_save_and_roll_back_to_the_checkpoint(
    make_config, monkeypatch
):
    """The weights are finite again when the run reacts. Which samples were bad is unknown: step 2 was skipped long ago
    for another reason, and its samples are not excluded again."""
    settings = dict(checkpoint={"interval": 1, "async_mode": "disabled"}, training={"steps": 6})
    begin_step = loop.begin_step

    def heal(task, *arguments):
        local(task.network.parameters["layers.1.mlp.experts.down"].detach()).nan_to_num_()
        return begin_step(task, *arguments)

    monkeypatch.setattr(loop, "begin_step", heal)
    spoil(monkeypatch, after_step=4)
    poison(monkeypatch, {2})
    config = make_config(**settings)
    with pytest.raises(Diverged, match="^a save before step 5 found values that are not finite; .*optimizer.lr"):
        train(config)
    spoil(monkeypatch, after_step=1)  # of the run that resumes
    settings["training"] |= {"max_rollbacks": 1}
    config = make_config(**settings)
    assert train(config) == 0
    progress = json.loads((step_folder(config.checkpoint_folder, 6) / META).read_text())["progress"]
    assert progress["rollbacks"] == 1 and progress["bad_since_step"] == 2
    assert progress["excluded_samples"] == [[6, 8]]  # of step 4; a step reads two


@pytest.mark.slow
def test_a_row_of_skipped_steps_publishes_no_checkpoint(make_config, monkeypatch):
    config = make_config(checkpoint={"interval": 2, "async_mode": "disabled"}, training={"steps": 7})
    poison(monkeypatch, {3, 4, 5, 7})
    assert train(config) == 0
    assert saved_steps(config) == [2, 6, 7]
    log = (Path(config.job.dump_folder) / "log.txt").read_text()
    assert "step 4: not saved, skipped 2 steps in a row" in log
    # The last state is kept for whoever goes on, and marked.
    folder = Path(config.job.dump_folder) / "checkpoint"
    assert [one.is_good for one in summarise(folder, read_contents=False)] == [True, True, False]


@pytest.mark.slow
def test_a_changed_run_is_refused_by_its_keys_and_a_finished_one_says_so(make_config, monkeypatch, capsys):
    assert train(make_config(training={"steps": 2})) == 0
    capsys.readouterr()
    assert train(make_config(training={"steps": 2})) == 0
    assert "finished     the budget of 64 tokens is spent" in capsys.readouterr().out
    config = Path(make_config().job.dump_folder) / "config.toml"
    before = config.read_text()

    def refusal(**tables) -> list[str]:
        with pytest.raises(UserError) as caught:
            train(make_config(**tables))
        assert config.read_text() == before  # what is refused leaves no trace
        return caught.value.faults

    (fault,) = refusal(debug={"seed": 1})
    assert fault.startswith("debug.seed = 1: ") and "was saved with 0" in fault and "initial_load_path" in fault
    assert "seq_len" not in fault and "data.sources" not in fault
    with monkeypatch.context() as patch:  # prepared again from another text
        patch.setattr(Pretraining, "fingerprint", lambda self: "another")
        (fault,) = refusal()
        assert fault.startswith("data.sources: the shards hold other text than before")
    for tables, key, value, saved in (
        ({"model": {"moe_intermediate_size": 24}}, "model.shape.moe_intermediate_size", 24, 16),
        ({"optimizer": {"name": "Muon", "lr": 0.5}}, "optimizer.name", '"Muon"', '"AdamW"'),
        ({"optimizer": {"state_dtype": "bfloat16"}}, "optimizer.state_dtype", '"bfloat16"', '"float32"'),
        ({"moe": {"balance": "proportional"}}, "moe.balance", '"proportional"', '"sign"'),
    ):
        cause, *examples = refusal(**tables)
        assert cause.startswith(f"{key} = {value}: ") and f"was saved with {saved}" in cause, cause
        assert "another job.dump_folder" in cause and len(examples) <= 4, examples


@pytest.mark.slow
def test_a_phase_starts_from_the_weights_of_the_one_before(make_config, tmp_path):
    first = make_config(training={"steps": 3})
    assert train(first) == 0
    second = make_config(
        job={"dump_folder": str(tmp_path / "second")},
        checkpoint={"initial_load_path": str(Path(first.job.dump_folder) / "checkpoint/step-000003")},
        lr_scheduler={"start_tokens": 96, "total_tokens": 1000},
        training={"steps": 2, "seq_len": 24},
    )
    assert train(second) == 0
    assert training_rows(second)[0]["curriculum_tokens"] == 96 + 48
    assert training_rows(second)[0]["loss"] < training_rows(first)[0]["loss"]


@pytest.mark.slow
def test_a_run_starts_from_weights_that_another_program_saved_with_dcp(make_config, tmp_path, caplog):
    first = make_config(training={"steps": 3})
    assert train(first) == 0
    step_path = Path(first.job.dump_folder) / "checkpoint/step-000003"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": step_tensors(step_path), "step": 3}, checkpoint_id=tmp_path / "step-3")
    runs = []
    for name, start in (("native", step_path), ("other", tmp_path / "step-3")):
        runs.append(
            make_config(
                job={"dump_folder": str(tmp_path / name)},
                checkpoint={"initial_load_path": str(start), "initial_load_model_only": True},
                training={"steps": 2},
            )
        )
        assert train(runs[-1]) == 0
    losses = [[row["loss"] for row in training_rows(config)] for config in runs]
    assert losses[0] == losses[1] and losses[0][0] < training_rows(first)[0]["loss"]
    (warning,) = (record.getMessage() for record in caplog.records if "unverified" in record.getMessage())
    assert str(tmp_path / "step-3") in warning
    with pytest.raises(UserError, match="this is a folder of torch.distributed.checkpoint.*initial_load_in_hf = false"):
        checkpoint = {"initial_load_path": str(tmp_path / "step-3"), "initial_load_in_hf": True}
        train(make_config(job={"dump_folder": str(tmp_path / "third")}, checkpoint=checkpoint))


@pytest.mark.parametrize("place", ["checkpoint.folder", "checkpoint.node_local_folder"])
def test_a_disk_that_cannot_hold_one_checkpoint_is_refused_before_the_start(make_config, tmp_path, small_disk, place):
    """556,392 weights, two states each, in FP32: 6.4 MiB. What an interrupted save has left is removed by the next."""
    mount, resize = small_disk
    resize("6m")
    keys = {"folder": str(mount / "steps"), "enable": True}
    if place == "checkpoint.node_local_folder":
        keys = {"node_local_folder": str(mount / "steps"), "enable": True}
    config = make_config(checkpoint=keys, training={"steps": 1})
    with pytest.raises(UserError) as caught:
        train(config)
    (fault,) = caught.value.faults
    assert all(
        part in fault for part in (f"{place} = ", "6.4 MiB", "6.0 MiB", "free space", "checkpoint.enable = false")
    )
    assert not (tmp_path / "out").exists() and list(mount.iterdir()) == []
    plan = resolve_plan(config, 1)
    refuse_small_disk(resolve_plan(make_config(checkpoint=keys | {"enable": False}), 1), 1)
    resize("10m")
    (mount / "steps/step-000007.tmp").mkdir(parents=True)
    (mount / "steps/step-000007.tmp/shard").write_bytes(bytes(4 << 20))
    refuse_small_disk(plan, 1)
    (mount / "steps/step-000007.tmp").rename(mount / "steps/step-000007")
    with pytest.raises(UserError, match="must fit beside those"):
        refuse_small_disk(plan, 1)


@pytest.mark.slow
def test_a_disk_that_fills_up_while_training_costs_what_cannot_be_written(make_config, small_disk):
    mount, resize = small_disk
    resize("400m")
    config = make_config(
        job={"dump_folder": str(mount)}, checkpoint={"interval": 2, "async_mode": "disabled"}, training={"steps": 4}
    )
    original, calls = loop.train_step, iter(range(1, 100))

    def train_step(*arguments):
        number = next(calls)
        if number == 3:
            (mount / "filler").write_bytes(b"x")
            with suppress(OSError), (mount / "filler").open("ab", buffering=0) as file:
                while file.write(bytes(1 << 16)) == 1 << 16:
                    pass
                while file.write(b"x"):
                    pass
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(SaveFailed) as caught:
            train(config)
    (fault,) = caught.value.faults
    assert caught.value.exit_code == 1 and "No space left on device" in fault
    assert "continues from the checkpoint of step 2" in fault
    assert [1, 2] <= [row["step"] for row in training_rows(config)] <= [1, 2, 3, 4]  # what fits into the last page
    (mount / "filler").unlink()
    assert train(config) == 0
    assert [row["step"] for row in training_rows(config)] == [1, 2, 3, 4]


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("before"))])
@pytest.mark.parametrize("log_freq", [1, 100])
def test_a_run_whose_folder_is_deleted_or_renamed_saves_its_step_and_ends(make_config, monkeypatch, change, log_freq):
    config = make_config(
        checkpoint={"interval": 2, "async_mode": "disabled"},
        training={"steps": 8},
        metrics={"log_freq": log_freq, "enable_tensorboard": True},
    )
    folder = Path(config.job.dump_folder)
    original = loop.begin_step
    calls = iter(range(1, 100))

    def begin_step(*arguments):
        if next(calls) == 4:
            change(folder)
        return original(*arguments)

    monkeypatch.setattr(loop, "begin_step", begin_step)
    with pytest.raises(FolderLost) as caught:
        train(config)
    (fault,) = caught.value.faults
    assert caught.value.exit_code == 2
    assert f"job.dump_folder = '{folder}'" in fault and str(config.checkpoint_folder / "step-000003") in fault
    assert published_steps(config.checkpoint_folder) == [3] and not (folder / "metrics.jsonl").exists()
    monkeypatch.undo()
    assert train(config) == 0
    assert published_steps(config.checkpoint_folder)[-1] == 8 and (folder / "config.toml").exists()


def delete_after_step_2(monkeypatch, config) -> None:
    """Delete the dump folder when the second step has been saved."""
    after_step = Saver.after_step

    def delete_folder(saver, progress, validation):
        after_step(saver, progress, validation)
        if progress.step == 2:
            shutil.rmtree(config.job.dump_folder)

    monkeypatch.setattr(Saver, "after_step", delete_folder)


def test_a_step_that_was_saved_into_a_deleted_folder_is_saved_again(make_config, monkeypatch):
    config = make_config(checkpoint={"interval": 2, "async_mode": "disabled"}, training={"steps": 4})
    delete_after_step_2(monkeypatch, config)
    with pytest.raises(FolderLost):
        train(config)
    assert published_steps(config.checkpoint_folder) == [2]


def record_watching(monkeypatch, owner: type, name: str) -> list[bool]:
    """Record at each call of a method whether the watchdog of the run watches."""
    watchdogs = []
    states = []
    step_begins = Watchdog.step_begins
    original = getattr(owner, name)

    def recorded_step_begins(watchdog, step):
        watchdogs.append(watchdog)
        step_begins(watchdog, step)

    def recorded(*arguments, **options):
        states.append(watchdogs[-1]._is_watched)
        return original(*arguments, **options)

    monkeypatch.setattr(Watchdog, "step_begins", recorded_step_begins)
    monkeypatch.setattr(owner, name, recorded)
    return states


@pytest.mark.slow
def test_a_rollback_may_read_its_checkpoint_for_longer_than_a_hang(make_config, monkeypatch):
    spoil(monkeypatch, after_step=2)
    watched = record_watching(monkeypatch, CheckpointManager, "load")
    config = make_config(
        checkpoint={"interval": 1, "async_mode": "disabled"}, training={"steps": 3, "max_rollbacks": 1}
    )
    assert train(config) == 0
    assert watched == [False]


def test_the_last_save_of_a_lost_folder_may_take_longer_than_a_hang(make_config, monkeypatch):
    config = make_config(checkpoint={"interval": 2, "async_mode": "disabled"}, training={"steps": 4})
    delete_after_step_2(monkeypatch, config)
    watched = record_watching(monkeypatch, Saver, "finish")
    with pytest.raises(FolderLost):
        train(config)
    assert watched == [False]


def test_commands_to_copy_name_paths_with_blanks_as_one_word(make_config, tmp_path, capsys):
    folder = tmp_path / "my runs" / "it's one"
    assert train(make_config(job={"dump_folder": str(folder)}, training={"steps": 1},
                             metrics={"enable_tensorboard": True})) == 0  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("TensorBoard")]
    assert shlex.split(line) == ["TensorBoard", "tensorboard", "--logdir", str(folder / "tb")]
    with pytest.raises(UserError) as caught:
        require_one_run(AblationConfig(variants=(VariantConfig(name="a"),)), folder / "a.toml", "glm46")
    assert f"ablate --config {shlex.quote(str(folder / 'a.toml'))}, or" in caught.value.faults[0]


@pytest.mark.slow
def test_a_run_whose_saves_fail_in_a_row_ends_so_that_it_is_started_again(make_config, capsys):
    """The folder of checkpoints is gone for two saves, and after a good one for three."""
    config = make_config(checkpoint={"interval": 2, "async_mode": "disabled"}, training={"steps": 1000})
    original, folder = loop.train_step, config.checkpoint_folder
    away, step = folder.with_name("away"), 0

    def train_step(*arguments):
        nonlocal step
        step += 1
        if step in (3, 9):
            folder.rename(away)
            folder.write_text("a file, in which nobody can make a folder")
        if step == 7:
            folder.unlink()
            away.rename(folder)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(SavesFail) as caught:
            train(config)
    (fault,) = caught.value.faults
    assert caught.value.exit_code == 75 and "3 saves in a row" in fault and "File exists" in fault, fault
    folder.unlink()
    away.rename(folder)
    assert step == 14 and capsys.readouterr().out.count("could not be saved") == 5
    assert train(config.model_copy(update={"training": config.training.model_copy(update={"steps": 12})})) == 0
    assert [row["step"] for row in training_rows(config)] == list(range(1, 13))


@pytest.mark.slow
def test_a_phase_takes_what_its_patterns_say_and_no_more(make_config, tmp_path):
    first = make_config(training={"steps": 3})
    assert train(first) == 0
    step = Path(first.job.dump_folder) / "checkpoint/step-000003"

    def start(name: str, **keys):
        config = make_config(
            job={"dump_folder": str(tmp_path / name)}, checkpoint={"initial_load_path": str(step), **keys},
            training={"steps": 1}, model={"num_nextn_predict_layers": 0 if name == "without" else 1},
        )  # fmt: skip
        assert train(config) == 0
        return training_rows(config)[0]

    whole = start("whole")
    fresh = start("fresh", initial_load_exclude=["model.mtp.*"])
    # The main model is the trained one, the prediction layer is new.
    assert fresh["loss"] == whole["loss"] and fresh["mtp_loss"] > whole["mtp_loss"] + 0.3
    with pytest.raises(UserError, match="holds model.mtp.0"):
        start("without")
    without = start("without", initial_load_exclude=["model.mtp.*"])
    assert "mtp_loss" not in without and without["loss"] < 8.5  # ln(8192) is 9.01; its text is other text
    for keys, reason in (
        (
            {"initial_load_exclude": ["model.mtp.7.*"]},
            "initial_load_exclude: 'model.mtp.7.\\*' matches no tensor of this",
        ),
        ({"initial_load_exclude": ["*"]}, "nothing of .* is loaded"),
    ):
        with pytest.raises(UserError, match=reason):
            start("wrong", **keys)


@pytest.mark.parametrize("document_mask", [True, False])
def test_padding_enters_no_statistic_and_no_balance_loss(make_config, monkeypatch, document_mask):
    config = make_config(
        data={"document_mask": document_mask},
        training={"steps": 1, "max_norm": 1e9},
        moe={"sequence_aux_loss_weight": 0.01, "z_loss_weight": 0.001, "capacity_factor": 8.0},
    )
    original, real, outcomes = loop.train_step, 11, []

    def padded(task, micro_batches, totals, *arguments):
        for first in (7, 900):  # the same real tokens, before other padding: nothing may change
            for batch in micro_batches:
                batch["document_ids"][:, :real], batch["document_ids"][:, real:] = 0, -1
                batch["input_ids"][:, real:] = first + torch.arange(batch["input_ids"].shape[1] - real)
                batch["labels"][:, real - 1 :], batch["mtp_labels"][:, :, real - 2 :] = -100, -100
                batch["mtp_input_ids"][:, :, real:] = first
            totals = count_step(task, micro_batches)
            # No step is made, so both see the same weights.
            outcomes.append(original(task, micro_batches, totals, *arguments[:-1], lambda loss, norm: "kept"))
        tokens = totals.real * task.plan.shape.num_experts_per_tok
        assert totals.real == real * sum(batch["labels"].shape[0] for batch in micro_batches)
        assert outcomes[0].main.tokens_per_expert.sum(1).tolist() == [tokens] * len(task.network.balance.routers)
        return outcomes[-1]

    monkeypatch.setattr(loop, "train_step", padded)
    assert train(config) == 0
    for field in ("objective", "aux_losses", "tokens_per_expert", "overflow", "grad_norm"):
        first, second = (getattr(outcome.main, field) for outcome in outcomes)
        torch.testing.assert_close(first, second, rtol=1e-6, atol=0.0)


def test_a_step_without_targets_changes_nothing_and_is_no_bad_step(make_config, monkeypatch):
    """Neither the momentum of earlier steps nor weight decay moves a weight, and the run goes on although none may be
    skipped."""
    config = make_config(training={"max_skipped_steps": 0}, optimizer={"weight_decay": 0.1})
    weights = poison(monkeypatch, set())  # of no step
    recorded = loop.train_step

    def without_labels(task, micro_batches, totals, *arguments):
        if len(weights) == 1:
            micro_batches = [
                batch | {key: torch.full_like(batch[key], -100) for key in ("labels", "mtp_labels") if key in batch}
                for batch in micro_batches
            ]
            totals = count_step(task, micro_batches)
        return recorded(task, micro_batches, totals, *arguments)

    monkeypatch.setattr(loop, "train_step", without_labels)
    assert train(config) == 0
    moved = [any(not torch.equal(local(a[name]), local(b[name])) for name in a) for a, b in pairwise(weights)]
    assert moved == [True, False, True]
    assert [row["skipped_steps"] for row in training_rows(config)] == [0] * 4
    log = (Path(config.job.dump_folder) / "log.txt").read_text()
    assert log.count(" skipped: ") == 1 and "step 2 skipped: no rank has a token to learn from; samples 2 to 3" in log


@pytest.mark.parametrize("found", ["no folder", "an empty folder", "a run"])
@pytest.mark.parametrize(
    "refused",
    [
        {"model": {"attention_kernel": "FA3"}},
        {"checkpoint": {"load_path": "nowhere/step-000001"}},
        {"checkpoint": {"initial_load_path": "nowhere", "initial_load_in_hf": True}},
        {"metrics": {"enable_wandb": True}},
    ],
    ids=["kernel", "load_path", "initial_load_path", "wandb"],
)
def test_a_start_that_is_refused_leaves_a_folder_as_it_was(refused, found, make_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = tmp_path / "runs" / "one"
    apart = {"folder": str(tmp_path / "disk" / "steps")}
    if found == "an empty folder":
        folder.mkdir(parents=True)
    if found == "a run":
        assert train(make_config(job={"dump_folder": str(folder)}, training={"steps": 1}, checkpoint=apart)) == 0

    def files() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}

    before = files()
    job = {"dump_folder": str(tmp_path / "other" if found == "a run" and "checkpoint" in refused else folder)}
    with pytest.raises(UserError):
        train(make_config(**{**refused, "job": job, "checkpoint": {**refused.get("checkpoint", {}), **apart}}))
    assert files() == before


def test_a_checkpoint_has_the_loss_of_its_step_or_none(make_config):
    config = make_config(
        training={"steps": 4},
        checkpoint={"interval": 1, "keep_latest_k": 1, "keep_best_k": 4, "keep_every": 1, "async_mode": "disabled"},
        validation={"enable": True, "freq": 3, "steps": 1},
    )
    assert train(config) == 0

    rows = metric_rows(config.job.dump_folder)
    measured = {row["step"]: row["validation_loss"] for row in rows if row["kind"] == "validation"}
    assert sorted(measured) == [0, 3, 4]

    for step in range(1, 5):
        folder = config.checkpoint_folder / f"step-{step:06d}"
        manifest = json.loads((folder / "manifest.json").read_text())["body"]
        meta = json.loads((folder / "meta.json").read_text())
        assert manifest["validation_loss"] == measured.get(step)
        assert manifest["validation_step"] == (step if step in measured else None)
        assert meta["validation"].get("validation_loss") == measured.get(step)
