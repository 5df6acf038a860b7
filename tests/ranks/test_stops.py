"""Signals to the launcher at moments that are hard to hit, and a rank that leaves."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from glm46.config.loader import dump_config
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training import loop, resume
from glm46.engine.training.saving import Saver
from glm46.storage.checkpoint.integrity import published_steps
from glm46.tasks.pretrain import task
from tests.builders import metric_rows, small_config
from tests.harness import call
from tests.processes import HANG_SECONDS, is_alive, wait_until
from tests.ranks.forked_launch import fork_launch

MOMENTS = ("start", "load", "count", "sum", "validation", "save", "step")
LEFT_WITH = 7
"""Exit code of a rank that leaves on its own."""


def hamper(rank: int, moment: str, mark: Path, pause: float) -> None:
    """Make the mark when this rank is at a moment, and stay there for a while."""
    steps, signals, on_signal = 0, [], StopRequest._on_signal

    def note(request: StopRequest, number: int) -> None:
        on_signal(request, number)
        signals.append(number)

    def arrive(there: int = 0) -> None:
        """Stay until this rank has got the signal, and then a while."""
        if rank == there and not mark.exists():
            mark.write_text(str(steps))
            wait_until(lambda: signals or moment == "none")
        time.sleep(pause)

    def at(name: str, function):
        def wrapped(*arguments):
            nonlocal steps
            if moment == name and (name not in ("step", "second", "leave") or steps == 2):
                if name == "leave" and rank == 1:
                    os._exit(LEFT_WITH)
                arrive()
            steps += function is train_step
            return function(*arguments)

        return wrapped

    def around_first(name: str, function):
        """Rank 1 is behind rank 0, which is in the exchange before step 1 ("count"), or has left it ("sum")."""

        def wrapped(*arguments):
            if rank == 1 and name == "count" and moment == "leave first":
                os._exit(LEFT_WITH)
            if rank == 1 and name == moment == "count" and not mark.exists():
                arrive(1)
            result = function(*arguments)
            if rank == 1 and name == moment == "sum" and not mark.exists():
                arrive(1)
            return result

        return wrapped

    loop.count_step, loop.sum_on_host = around_first("count", loop.count_step), around_first("sum", loop.sum_on_host)
    train_step, StopRequest._on_signal = loop.train_step, note
    for name in ("step", "second", "leave"):
        if name == moment:
            loop.train_step = at(name, train_step)
    if moment not in ("step", "second", "leave"):
        loop.train_step = at("none", train_step)
    task.evaluate = at("validation", task.evaluate)
    resume.start = at("load", resume.start)
    Saver._save = at("save", Saver._save)


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal, or blocks it until it has."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return any(int(status[mask], 16) >> (number - 1) & 1 for mask in ("SigCgt", "SigBlk"))


def attempt(config, base: Path, moment: str, number: signal.Signals, chance: random.Random) -> dict:
    """Start the run and end it at a moment."""
    mark, log = base / "mark", base / "log"
    mark.unlink(missing_ok=True)
    pause = 1000.0 if moment == "second" else chance.uniform(0.05, 0.3)
    launcher = fork_launch(base / "run.toml", log, lambda rank: hamper(rank, moment, mark, pause))
    if moment == "start":
        wait_until(lambda: catches(launcher, number))  # before, the launcher itself is only beginning
        time.sleep(chance.uniform(0.0, 0.7))
    wait_until(lambda: moment in ("start", "leave first", "leave", "none") or mark.exists() or not is_alive(launcher))
    began = time.monotonic()
    if moment not in ("leave first", "leave", "none"):
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(launcher, number)
    if moment == "second":
        began = time.monotonic()
        while is_alive(launcher) and time.monotonic() - began < HANG_SECONDS:  # a busy one may take two for one
            time.sleep(1.5)
            os.kill(launcher, number)
    with suppress(AssertionError):
        wait_until(lambda: not is_alive(launcher))
    if is_alive(launcher):
        os.kill(launcher, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    folder = Path(config.job.dump_folder)
    steps = [row["step"] for row in metric_rows(folder, "loss")]
    return {
        "moment": moment,
        "signal": number.name,
        "code": code,
        "seconds": time.monotonic() - began,
        "step": max(steps, default=0),
        "saved": max(published_steps(folder / "checkpoint"), default=0),
        "said": log.read_text(),
    }


def run_moments(source: Path, base: Path, moments: int, seed: int) -> list[dict]:
    """A row for each of so many random moments; 0: each moment once, and the other cases."""
    chance = random.Random(seed)
    config = small_config(
        source, base / "out", training={"steps": 12 if not moments else 10_000},
        checkpoint={"interval": 3}, validation={"enable": True, "freq": 2, "steps": 1},
        data={"num_workers": 1},
    )  # fmt: skip
    (base / "run.toml").write_text(dump_config(config))
    chosen = ["step", *MOMENTS[:-1], "second", "leave first", "leave", "none"]
    if moments:
        chosen = ["step"] + [chance.choice(MOMENTS) for _ in range(moments - 1)]
    rows = []
    for moment in chosen:
        number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
        rows.append(attempt(config, base, moment, number, chance))
    return rows


def test_a_signal_at_any_moment_loses_nothing_and_a_second_one_ends_at_once(source_folder, tmp_path):
    rows = {row["moment"]: row for row in call(run_moments, source_folder, tmp_path, 0, 0)}
    for moment in ("step", "start", "load", "count", "sum", "validation", "save"):
        row = rows[moment]
        assert row["code"] == 75, row
        assert row["saved"] == row["step"] >= 3, row  # what was computed is saved; nothing before it is lost
        assert "Traceback" not in row["said"], row
    assert rows["step"]["step"] == 3  # the signal came in this step, which was ended
    second = rows["second"]
    assert second["code"] not in (0, 75) and second["seconds"] < HANG_SECONDS, second  # a rank would sleep on
    for moment in ("leave first", "leave"):
        row = rows[moment]
        assert row["code"] == 1 and "rank 1 ended with exit code 7" in row["said"], row
    assert rows["none"]["code"] == 0 and rows["none"]["saved"] == rows["none"]["step"] == 12, rows["none"]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_signals_at_fifty_moments_lose_nothing(source_folder, tmp_path, seed):
    for row in call(run_moments, source_folder, tmp_path, 50, seed, deadline=24 * 3600):
        assert row["code"] == 75 and row["saved"] == row["step"], row
