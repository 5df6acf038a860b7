"""A hung rank is found in time and named with its operation, every rank's stacks are kept, and the run ends."""

import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.engine.reliability import watchdog
from glm46.engine.reliability.hang_report import find_culprits
from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.tasks.pretrain.data_stream import DataStream
from tests.builders import metric_rows, small_config
from tests.harness import Ranks, start, this_rank
from tests.processes import HANG_SECONDS, is_alive, wait_until
from tests.ranks.forked_launch import train_and_exit

HANGS = {
    "asleep": lambda: time.sleep(1000),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # Years of backtracking without giving the interpreter back; unlike a C sleep, no signal ends it.
    "blocked": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    # A collective that the other rank never comes to: it waits in another.
    "deadlocked": lambda: dist.all_reduce(torch.ones(1), group=_GROUPS[0]),
}
_GROUPS: list[dist.ProcessGroup] = []
SILENT_STEP = 30  # after the steps that are timed


def run_cut_off(base: Path, source: Path) -> dict:
    """Two ranks whose store, which lives in this process, stops to answer, as that of a node behind a cut network."""
    folder = base / "cut-off"
    config = small_config(
        source, folder, training={"steps": 100_000}, checkpoint={"enable": False}, comm={"hang_seconds": 5.0}
    )
    watchdog._STORE_SECONDS = 5.0
    ranks = Ranks(2, train_and_exit, config)
    watchdog._STORE_SECONDS = 30.0
    wait_until((folder / "metrics.jsonl").exists)
    began, server = time.monotonic(), os.getpid()
    helper = os.fork()
    if helper == 0:
        os.kill(server, signal.SIGSTOP)
        with suppress(AssertionError):
            wait_until(lambda: not any(map(is_alive, ranks.pids)))
        os.kill(server, signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)
    return {
        "codes": ranks.wait(),
        "seconds": time.monotonic() - began,
        "said": ranks.text(),
    }


def train_until_hang(config, hang: str, victim: int, moment: Path) -> None:
    """On each rank."""
    rank = this_rank()
    step, original = 0, loop.train_step

    def train_step(*arguments):
        nonlocal step
        step += 1
        if step == 1:
            _GROUPS[:] = [dist.new_group(backend="gloo")]
        if step == SILENT_STEP and rank == victim and hang != "no text":
            moment.write_text(str(time.monotonic()))
            HANGS[hang]()
        return original(*arguments)

    def next_batches(stream, *arguments):
        if step == SILENT_STEP - 1 and rank == victim and hang == "no text":
            moment.write_text(str(time.monotonic()))
            time.sleep(1000)
        return read(stream, *arguments)

    read = DataStream.next
    loop.train_step, DataStream.next = train_step, next_batches
    sys.exit(train(config))


VICTIMS = {"asleep": 1, "stopped": 0, "blocked": 1, "no text": 0, "deadlocked": 1}
"""The rank that hangs."""


def run_hang(base: Path, source: Path, hang: str) -> dict:
    folder, moment, victim = base / hang, base / f"moment-{hang}", VICTIMS[hang]
    config = small_config(
        source, folder, training={"steps": 1000}, checkpoint={"enable": False}, comm={"hang_seconds": 5.0}
    )
    ranks = Ranks(2, train_until_hang, config, hang, victim, moment)
    codes = ranks.wait()
    times = [row["step_seconds"] for row in metric_rows(folder)]
    return {
        "hang": hang,
        "victim": victim,
        "codes": codes,
        "seconds": time.monotonic() - float(moment.read_text()),
        "found_seconds": (folder / "hang" / f"stacks-rank{1 - victim}.txt").stat().st_mtime - moment.stat().st_mtime,
        "slowest_step": max(times[2:]),
        "said": ranks.text(),
        "files": {path.name: path.stat().st_size for path in (folder / "hang").iterdir()},
        "stacks": (folder / "hang" / f"stacks-rank{victim}.txt").read_text(),
    }


def test_a_hung_rank_is_found_named_and_ended(source_folder, tmp_path):
    folders = tmp_path, source_folder
    calls = [(run_cut_off, *folders), *((run_hang, *folders, hang) for hang in VICTIMS)]
    found = []
    for pair in zip(calls[::2], calls[1::2], strict=True):  # these wait most of the time; more at once slow their steps
        found += [program.result() for program in [start(*arguments) for arguments in pair]]
    cut_off, *rows = found
    host = socket.gethostname()
    # The store's host does not answer while the ranks run: each ends on its own.
    # The one that ends first breaks the connection of the other, which ends by that error with the same code.
    assert cut_off["codes"] == [76, 76] and cut_off["seconds"] < HANG_SECONDS, cut_off
    for rank in range(2):
        assert f"rank {rank} on {host} has had no answer from the store" in cut_off["said"], cut_off
    assert [row["hang"] for row in rows] == [*VICTIMS]
    for row in rows:
        victim, other = row["victim"], 1 - row["victim"]
        # The other rank kills one that cannot run.
        is_mute = row["hang"] in ("stopped", "blocked")
        assert row["codes"][other] == 76 and row["codes"][victim] == (-9 if is_mute else 76), row
        assert row["seconds"] < HANG_SECONDS, row  # without an end it waits until the program is killed
        # Found at the limit, which follows the steps of this run; a busy machine delays one look by a minute.
        assert row["found_seconds"] < max(5.0, 5 * row["slowest_step"]) + 60.0, row
        assert row["said"].count("error: no progress for") == 1, row
        doing, waiting = "training step", "training step"
        if row["hang"] == "no text":
            doing, waiting = "reading data", "agreeing on the step"
        if is_mute:
            assert f"rank {victim} on {host} does not answer" in row["said"], row
        else:
            assert f"rank {victim} on {host} is blocking the others: {doing}, step 30, in" in row["said"], row
        assert f"rank {other} on {host} waits: {waiting}, step 30, after gloo:" in row["said"], row
        assert {"hang.txt", f"stacks-rank{other}.txt", f"flight-rank{other}.json"} <= row["files"].keys(), row
        assert ("in next" if row["hang"] == "no text" else "in train_step") in row["stacks"], (
            row
        )  # the victim's own, even where its interpreter is blocked


def answer(frame: str = "torch/x.py:1 wait", **collectives: int) -> dict:
    return {"stack": [frame], "collectives": {name: [number, "op"] for name, number in collectives.items()}}


def test_the_rank_that_waits_for_no_other_is_the_culprit():
    # 1 has not come to the collective that 0 waits in, and waits itself for 3, in another group.
    waiting = {0: answer(a=7), 1: answer(a=6, b=4), 2: answer(c=1), 3: answer(b=3, c=1)}
    assert find_culprits(waiting, 4) == [3]
    assert find_culprits(waiting, 5) == [4]  # the one without an answer
    # Without a recorder: the rank that is not inside torch.
    assert find_culprits({0: answer(), 1: answer("glm46/storage/data/loader.py:9 read")}, 2) == [1]
