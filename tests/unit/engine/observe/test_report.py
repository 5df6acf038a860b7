"""Rows reach every place once, and a resumed run leaves no step twice."""

import json
import math
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from glm46.config.run_config import RunConfig
from glm46.engine.observe.console import ConsoleView, duration, train_line, validation_line
from glm46.engine.observe.history import read_history
from glm46.engine.observe.layout_report import _attention
from glm46.engine.observe.metrics import METRICS, MOST_IMPORTANT, SHOWN, find_metric
from glm46.engine.observe.report import Report
from glm46.run import context_keys
from glm46.run.plan import describe_exchange, resolve_plan
from tests.builders import small_config
from tests.processes import wait_until
from tests.terminal import terminal


def _row(step, **more):
    row = {"step": step, "tokens": step * 100, "loss": 5.0 - 0.1 * step, "grad_norm": 1.0, "lr": 1e-3}
    return row | {"tokens_per_second": 50.0} | more


def _report(folder, *, resumed_step=None, tensorboard=False, width=200, is_main=True, said=None):
    console = Console(file=(said or folder / "console.txt").open("a"), width=width, highlight=False)
    return Report(
        folder,
        is_main=is_main,
        tensorboard_folder=folder / "tb" if tensorboard else None,
        total_tokens=1000,
        resumed_step=resumed_step,
        console=ConsoleView(1000, console),
    )


def _steps(folder, key="step"):
    return [row[key] for row in read_history(folder / "metrics.jsonl") if key in row]


def _fill(disk):
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while file.write(b"x" * 4096) == 4096:
            pass


def test_rows_are_in_the_file_at_once_and_in_the_log(tmp_path):
    started = time.time()
    report = _report(tmp_path)
    report.train(_row(1))
    report.validation({"step": 1, "validation_loss": 4.5, "validation_loss/wiki": 4.25})
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [first.pop("kind"), second.pop("kind")] == ["train", "validation"]
    # Rows are written between the start of this test and now, and keep milliseconds.
    assert started - 0.001 <= first.pop("unix_seconds") <= second.pop("unix_seconds") <= time.time() + 0.001
    assert first == _row(1)
    assert second == {"step": 1, "validation_loss": 4.5, "validation_loss/wiki": 4.25}
    report.message("a [bracketed] word")
    report.close()
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(log) == 3
    assert "loss  4.9000" in log[0] and "10.0%" in log[0] and "18s left" in log[0]
    assert "validation loss 4.5000" in log[1] and "wiki 4.2500" in log[1]
    assert log[2].endswith("a [bracketed] word")
    assert "a [bracketed] word" in (tmp_path / "console.txt").read_text()


def test_a_resumed_run_writes_each_step_once(tmp_path):
    report = _report(tmp_path)
    for step in (1, 2, 3, 4):
        report.train(_row(step))
    report.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # the crash that made the resume necessary
    report = _report(tmp_path, resumed_step=2)
    assert _steps(tmp_path) == [1, 2]
    for step in (3, 4, 5):
        report.train(_row(step, loss=1.0))
    report.close()
    assert _steps(tmp_path) == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in read_history(tmp_path / "metrics.jsonl")][2:] == [1.0] * 3
    assert not (tmp_path / "metrics.tmp").exists()


def test_a_damaged_line_is_left_out_of_a_resume(tmp_path):
    report = _report(tmp_path)
    for step in (1, 2, 3):
        report.train(_row(step))
    report.close()
    path = tmp_path / "metrics.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    second = second.replace(b"tokens", b"\xff\xfeens", 1)
    path.write_bytes(first + second + b"\0\0\0\n[1]\n17\n{}\n" + third)
    _report(tmp_path, resumed_step=3).close()
    assert _steps(tmp_path) == [1, 3]


def test_a_full_disk_pauses_the_files_and_says_so_once(tmp_path, small_disk):
    mount, resize = small_disk
    report = _report(mount, said=tmp_path / "said", width=300)
    report.train(_row(1))
    _fill(mount)
    for step in range(2, 60):  # the rest of a page is filled first
        report.train(_row(step))
    written = _steps(mount)
    assert written == list(range(1, len(written) + 1)) and len(written) < 50
    resize("2m")
    report.train(_row(60))
    report.close()
    assert _steps(mount) == list(range(1, 61))  # whole lines, those of the time in between too
    said = (tmp_path / "said").read_text()
    for name in ("metrics.jsonl", "log.txt"):
        assert said.count(f"{mount / name}: cannot be written (No space left on device)") == 1
        assert said.count(f"{mount / name}: written again") == 1


def test_rows_wait_for_a_lost_folder(tmp_path):
    """As after a network disk has failed: the open files stay broken, and below the mount is an empty folder."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    report = _report(folder, said=tmp_path / "said", width=300)
    report.train(_row(1))
    folder.rename(away)
    folder.mkdir()
    os.dup2(os.open(os.devnull, os.O_RDONLY), report._history._file._file.fileno())
    for step in (2, 3):
        report.train(_row(step))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    away.rename(folder)
    report.train(_row(4))
    report.close()
    assert _steps(folder) == [1, 2, 3, 4]
    said = (tmp_path / "said").read_text()
    assert said.count("cannot be written") == said.count("metrics.jsonl: written again") == 1


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("before"))])
def test_nothing_is_written_after_the_folder_was_deleted_or_renamed(tmp_path, change):
    folder = tmp_path / "run"
    folder.mkdir()
    report = _report(folder, tensorboard=True, said=tmp_path / "said")
    report.train(_row(1))
    assert not report.has_lost_folder()
    change(folder)
    assert report.has_lost_folder()
    folder.mkdir()  # as the last save does
    report.train(_row(2))
    report.message("to the console")
    report.close()
    assert report.has_lost_folder() and list(folder.iterdir()) == []
    assert "to the console" in (tmp_path / "said").read_text()


def test_a_deleted_file_is_reported_once_and_continued_if_it_returns(tmp_path):
    report = _report(tmp_path, said=tmp_path / "said", width=300)
    report.train(_row(1))
    (tmp_path / "metrics.jsonl").unlink()
    for step in (2, 3):
        report.train(_row(step))
    assert not report.has_lost_folder() and not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "metrics.jsonl").touch()
    report.train(_row(4))
    report.close()
    assert _steps(tmp_path) == [2, 3, 4]
    said = (tmp_path / "said").read_text()
    assert said.count("cannot be written") == said.count("metrics.jsonl: written again") == 1


@pytest.mark.slow
def test_a_full_disk_ends_tensorboard_with_one_message(tmp_path, small_disk, monkeypatch):
    mount, _ = small_disk
    tracebacks = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    report = _report(tmp_path, tensorboard=True, said=tmp_path / "said", width=300)
    report._tensorboard._folders = {"train": mount / "tb", "validation": mount / "tb/validation"}
    _fill(mount)
    for step in range(1, 400):
        report.train(_row(step))
    report.close()
    said = (tmp_path / "said").read_text()
    assert said.count(f"{tmp_path / 'tb'}: cannot be written (No space left on device)") == 1
    assert tracebacks == [] and threading.excepthook == tracebacks.append
    assert _steps(tmp_path) == list(range(1, 400))


def test_a_new_run_keeps_the_earlier_rows_aside(tmp_path):
    for run in range(3):
        report = _report(tmp_path, tensorboard=run == 0)
        report.train(_row(run + 1))
        report.close()
    assert _steps(tmp_path) == [3]
    assert [row["step"] for row in read_history(tmp_path / "metrics.1.jsonl")] == [1]
    assert [row["step"] for row in read_history(tmp_path / "metrics.2.jsonl")] == [2]


def test_tensorboard_holds_the_same_numbers_after_a_resume(tmp_path):
    report = _report(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        report.train(_row(step))
    report.close()
    report = _report(tmp_path, tensorboard=True, resumed_step=1)
    for step in (2, 3):
        report.train(_row(step, loss=1.0))
    report.close()
    events = _events(tmp_path / "tb")
    scalars = [(event.step, event.value) for event in events.Scalars("loss/loss")]
    # TensorBoard stores FP32.
    assert [step for step, _ in scalars] == [1, 2, 3]
    assert [value for _, value in scalars] == pytest.approx([4.9, 1.0, 1.0], rel=1e-6)


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in folder.glob("events.*"):  # read by name, where file 10 of a second comes before file 9
        stem, _, number = file.name.rpartition(".")
        file.rename(folder / f"{stem}.{int(number):04d}")
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_training_and_validation_loss_share_a_chart_in_tensorboard(tmp_path):
    report = _report(tmp_path, tensorboard=True)
    for step in (1, 2):
        report.train(_row(step))
        report.validation({"step": step, "validation_loss": 4.0 - step, "validation_loss/wiki": 4.25})
    report.close()
    report = _report(tmp_path, tensorboard=True, resumed_step=1)
    report.validation({"step": 2, "validation_loss": 1.5})
    report.close()
    train, validation = _events(tmp_path / "tb"), _events(tmp_path / "tb/validation")
    # TensorBoard draws one chart for one tag, with a line for each folder.
    assert [(event.step, event.value) for event in validation.Scalars("loss/loss")] == [(1, 3.0), (2, 1.5)]
    assert [event.step for event in train.Scalars("loss/loss")] == [1]
    assert validation.Tags()["scalars"] == ["loss/loss", "validation/validation_loss/wiki"]


def test_a_run_without_validation_has_no_validation_in_tensorboard(tmp_path):
    for resumed_step in (None, 1):
        report = _report(tmp_path, tensorboard=True, resumed_step=resumed_step)
        report.train(_row(1 if resumed_step is None else 2))
        report.close()
    assert [path.name for path in (tmp_path / "tb").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("resumed_step, first_step", [(None, 0), (3, 4)])
def test_tensorboard_shows_the_configuration_at_the_first_step_of_a_start(tmp_path, resumed_step, first_step):
    report = _report(tmp_path, tensorboard=True, resumed_step=resumed_step)
    report.config("[job]\nlr = 1\n")
    report.close()
    (event,) = _events(tmp_path / "tb").Tensors("config/text_summary")
    # Markdown shows indented lines as they are.
    assert (event.step, event.tensor_proto.string_val[0]) == (first_step, b"    [job]\n    lr = 1\n")


def test_rows_of_an_older_release_survive_a_resume(tmp_path):
    rows = [_row(1), _row(2), {"step": 2, "validation_loss": 4.0}, _row(3)]  # no kind, no time, no mean
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = _report(tmp_path, resumed_step=2)
    report.train(_row(3))
    report.close()
    kept = read_history(tmp_path / "metrics.jsonl")
    assert kept[:3] == rows[:3] and kept[3]["kind"] == "train" and len(kept) == 4


def test_other_ranks_write_nothing(tmp_path):
    report = Report(tmp_path / "out", is_main=False, tensorboard_folder=tmp_path / "tb", total_tokens=10)
    report.train(_row(1))
    report.validation({"step": 1, "validation_loss": 1.0})
    report.message("x")
    report.close()
    assert not (tmp_path / "out").exists()


def test_a_non_finite_number_is_null_and_said(tmp_path):
    report = _report(tmp_path)
    report.train(_row(1, loss=math.nan, grad_norm=math.inf))
    report.close()
    (row,) = read_history(tmp_path / "metrics.jsonl")
    assert row["loss"] is None and row["grad_norm"] is None
    assert "loss non-finite" in (tmp_path / "log.txt").read_text()


def test_an_unknown_metric_is_our_bug(tmp_path):
    report = _report(tmp_path)
    with pytest.raises(KeyError, match="lozz"):
        report.train(_row(1, lozz=1.0))
    with pytest.raises(KeyError, match="not split"):
        report.train(_row(1, **{"mfu/wiki": 1.0}))
    with pytest.raises(AssertionError, match="not a plain number"):
        report.train(_row(1, perplexity="12"))
    report.close()
    assert _steps(tmp_path) == []


PRETRAINED = _row(4)
REINFORCED = _row(4, loss=-0.0, reward=0.375, entropy=0.5, completion_tokens=12.25, reference_kl=1e-3)
PREFERRED = _row(4, **{"rewards/accuracies": 0.75, "rewards/margins": 0.125})
BARS = [
    (PRETRAINED, "loss 4.6000"),
    (REINFORCED, "reward 0.375"),
    (PREFERRED, "accuracy 75.0%  margin 0.125"),
    (_row(4, loss=-1.0, entropy=5.5), "entropy 5.500"),  # labels as answers
    (_row(4, reward=math.nan), "reward non-finite"),
    ({"step": 4, "tokens": 400, "reward": 0.25}, "reward 0.250"),  # rollouts alone
]


@pytest.mark.parametrize(("row", "bar"), BARS)
def test_a_terminal_shows_each_row_of_the_log_above_a_bar_of_what_the_run_optimises(tmp_path, row, bar):
    with terminal() as shown:
        report = Report(tmp_path, is_main=True, tensorboard_folder=None, total_tokens=1000)
        report.train(row)
        report.finish_writes()
        (logged,) = (tmp_path / "log.txt").read_text().splitlines()
        assert shown().count(logged.split("  ", 1)[1] + "\n") == 1
        report.step(row | {"step": 7, "tokens": 700})  # a step without a row
        report.message("between")
        # It is drawn ten times a second.
        wait_until(lambda: f"70% {bar}" in re.sub(r"\x1b\[[0-9;]*m", "", shown()), shown)
        report.close_bar()
        report.message("the summary")
        report.close()
        screen = shown()
    assert screen.rindex("\u2501") < screen.rindex("\x1b[2K") < screen.index("the summary"), "erased, not left there"
    assert screen.rindex("\x1b[?25l") < screen.rindex("\x1b[?25h"), "the cursor is back"
    assert "\u2501" not in (tmp_path / "log.txt").read_text() and _steps(tmp_path) == [4]


@pytest.mark.parametrize(("row", "bar"), BARS)
def test_a_pipe_gets_the_lines_of_the_log_and_no_bar(tmp_path, row, bar):
    report = _report(tmp_path, width=300)
    report.train(row)
    report.step(row)
    report.close()
    (line,) = (tmp_path / "console.txt").read_text().splitlines()
    assert line == (tmp_path / "log.txt").read_text().rstrip("\n").split("  ", 1)[1]
    absent = {"loss", "grad", "lr", "tok/s"} if "loss" not in row else set()
    assert not absent.intersection(line.split()), "nothing is said of what was not measured"


def test_validation_of_preferences_and_rewards_shows_what_they_optimise():
    row = {"step": 4, "validation_loss": 0.5, "validation_rewards/accuracies": 0.75, "validation_rewards/margins": 0.25}
    for part in ("validation loss 0.5000", "validation accuracy 75.0%", "validation margin 0.250"):
        assert part in validation_line(row)
    row = {"step": 4, "validation_reward/sums": 0.5, "validation_pass/sums@4": 0.75, "validation_tokens/sums": 8.0}
    assert validation_line(row).endswith("reward sums 0.500  pass sums@4 75.0%  length sums 8.0")


def test_plain_lines_are_aligned():
    short = train_line(_row(1), 10_000_000)
    long = train_line(_row(99_999, grad_norm=12.5, loss=10.25), 10_000_000)
    assert short.index("tok/s") == long.index("tok/s")


def test_the_time_left_is_that_of_the_budget():
    assert "  2s left" in train_line(_row(1, budget_tokens_per_second=250.0), 600)


def test_memory_on_the_console_is_that_of_the_fullest_gpu():
    spread = {"memory_peak_gib/min": 9.0, "memory_peak_gib/mean": 60.25, "memory_peak_gib/max": 100.0}
    assert "  GiB 100.0  10s left" in train_line(_row(1, **spread), 600)
    assert "GiB" not in train_line(_row(1), 600)


PRETRAINED_ON_GPU = {
    "mtp_loss": 9.0, "expert_balance_cv": 0.5, "mfu": 0.4, "memory_peak_gib/max": 70.0,
}  # fmt: skip
REINFORCED_FULLY = {
    "reward": 0.5, "entropy": 1.5, "loss": -1.0, "completion_tokens": 812.5, "reference_kl": 1e-3, "mismatch_kl": 1e-4,
    "draft_acceptance_ratio": 0.5, "mtp_loss": 1.0, "expert_balance_cv": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(("columns", "words", "absent"), [
    ({"mtp_loss": 9.0, "expert_balance_cv": 0.5}, "loss grad lr tok/s mtp balance", ""),
    (PRETRAINED_ON_GPU, "loss grad lr tok/s mfu GiB", "balance"),
    ({"rewards/accuracies": 0.5, "rewards/margins": 0.1, "mtp_loss": 9.0, "expert_balance_cv": 0.5},
     "accuracy margin loss grad tok/s", ""),
    ({"kl": 0.5, "mtp_loss": 9.0, "expert_balance_cv": 0.5}, "loss kl grad lr tok/s", ""),
    (REINFORCED_FULLY, "reward entropy grad length kl", "loss drafts"),
    ({"loss": -1.0, "entropy": 5.5, "expert_balance_cv": 0.5}, "entropy grad lr tok/s balance", "loss"),
])  # fmt: skip
def test_a_row_of_every_task_fits_120_columns(columns, words, absent):
    """The longest: a million steps, seconds of an hour, a speed of millions."""
    row = _row(999_999, tokens=0, loss=12.0, grad_norm=123.456, lr=3.33e-4, tokens_per_second=2_606_635.0) | columns
    line = train_line(row, 3599 * 2_606_635)
    assert len(line) <= 120 and line.endswith("59m 59s left"), line
    assert set(words.split()) <= set(line.split())
    assert not set(absent.split()) & set(line.split())


def test_every_part_of_a_line_has_its_importance():
    assert sorted(MOST_IMPORTANT) == sorted(shown.column for shown in SHOWN if shown.text)


def test_durations_read_like_a_clock():
    known = {0: "0s", 59.4: "59s", 60: "1m 00s", 3599: "59m 59s", 3600: "1h 00m", 86399: "23h 59m", 90000: "1d 01h"}
    assert {seconds: duration(seconds) for seconds in known} == known


def test_names_of_metrics_are_unique_and_found_by_their_parts():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert find_metric("validation_loss/wiki").name == "validation_loss"


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120, 200])
def test_no_number_is_cut_on_a_narrow_terminal(width):
    """Rows break between words, and the bar leaves out what has no room."""
    screen = StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None, highlight=False, soft_wrap=True)
    view, row = ConsoleView(1000, console), _row(3, mfu=0.34)
    view.train(row)
    view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n")
    shown = [line for line in text.splitlines() if line.strip()]
    assert max(map(len, shown)) <= width
    words = " ".join(shown).split()
    assert {"3", "30.0%", "4.7000", "1.000", "1.00e-03", "50", "34.0%"} <= {*words} and "…" not in "".join(shown)
    assert shown[-1].split()[:2] == ["step", "3"] and "4.7000" in shown[-1] or width < 40


@pytest.mark.parametrize(
    ("device", "tables", "cp", "said"),
    [
        ("cpu", {"data": {"document_mask": False}}, 1, "causal, by torch's scaled_dot_product_attention"),
        ("cpu", {"data": {"document_mask": True}}, 1, "blocks of 128 queries by torch's CPU kernel, within documents"),
        (
            "cuda",
            {"data": {"document_mask": True}, "training": {"mixed_precision_param": "bfloat16"}},
            2,
            "variable-length flash attention, within documents, keys gathered over 2 ranks",
        ),
        (
            "cuda",
            {"data": {"document_mask": False}, "model": {"sliding_window": 1024}},
            2,
            "blocks of 128 queries by matrix products, window of 1,024 tokens, keys exchanged over 2 ranks",
        ),
        (
            "cuda",
            {"data": {"document_mask": True}, "training": {"mixed_precision_param": "bfloat16"}},
            4,
            "variable-length flash attention, within documents, keys passed around 4 ranks",
        ),
    ],
)
def test_the_core_of_attention_is_named(source_folder, tmp_path, monkeypatch, device, tables, cp, said):
    if cp == 4:
        monkeypatch.setattr(context_keys, "MOST_GATHERED_BYTES", 1)
    tables = {"parallelism": {"context_parallel_degree": cp}} | tables
    plan = resolve_plan(small_config(source_folder, tmp_path, **tables), cp)
    task = SimpleNamespace(plan=plan, cluster=SimpleNamespace(device=torch.device(device)))
    assert _attention(task) == said


@pytest.mark.parametrize(
    ("parallelism", "host_ranks", "said"),
    [
        ({}, 8, "two levels, one host of 8 ranks: rows of a token 4.7 inside them (all to all 7.0); 1 host wait per "
         "layer"),
        ({"expert_exchange": "all_to_all"}, 8, "all to all: 7.0 rows of a token to 8 ranks; 1 host wait per layer"),
        ({"expert_parallel_degree": 32}, 8, "two levels, 4 hosts x 8 ranks, 2 chunks: 2.7 rows of a token between "
         "hosts (all to all 6.0), 6.4 inside them (all to all 1.8); 1 host wait per layer"),
        ({"expert_exchange": "deepep"}, 8, "DeepEP, one host of 8 ranks: rows of a token 4.7 inside them (all to all "
         "7.0); 1 host wait per layer"),
        ({"expert_exchange": "deepep", "expert_parallel_degree": 32}, 8, "DeepEP, 4 hosts x 8 ranks: 2.7 rows of a "
         "token between hosts (all to all 6.0), 6.4 inside them (all to all 1.8); 1 host wait per layer"),
        ({"expert_exchange_chunks": 2}, 8, "two levels, one host of 8 ranks, 2 chunks: rows of a token 4.7 inside them "
         "(all to all 7.0); 1 host wait per layer; 128 rows of an expert at a time: products of fewer than 512 are "
         "slow"),
        ({}, 0, "all to all: 7.0 rows of a token to 8 ranks; 1 host wait per layer; not two levels: the 8 ranks that "
         "share experts (parallelism.expert_parallel_degree) are not whole hosts, or on one: hosts have unequal "
         "numbers of ranks"),
    ],
)  # fmt: skip
def test_the_way_of_tokens_to_experts_is_named(parallelism, host_ranks, said):
    parallelism = {"expert_parallel_degree": 8} | parallelism
    training = {"seq_len": 512, "local_batch_size": 1}
    tables = {"model": {"flavor": "GLM-4.5-Air"}, "parallelism": parallelism, "training": training}
    plan = resolve_plan(RunConfig.model_validate(tables), 32, host_ranks=host_ranks)
    assert describe_exchange(plan) == said


@pytest.mark.parametrize(
    ("seq_len", "ranks", "chunks"), [(4096, 16, 2), (1024, 16, 2), (512, 16, 1), (4096, 8, 1), (4096, 1, 1)]
)
def test_chunks_are_two_between_hosts_where_products_stay_large(seq_len, ranks, chunks):
    """Air has 128 experts and a token 8: 1,024 tokens of 16 ranks are 1,024 rows of each expert."""
    training = {"seq_len": seq_len, "local_batch_size": 1}
    tables = {"parallelism": {"expert_parallel_degree": ranks}, "training": training}
    config = RunConfig.model_validate({"model": {"flavor": "GLM-4.5-Air"}} | tables)
    assert resolve_plan(config, 32, host_ranks=8).exchange_chunks == chunks
