"""Two ranks train until one of them hangs, is slowed, or fails in a save; prints the results as JSON."""

import json
import os
import re
import signal
import statistics
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.engine.reliability import watchdog
from glm46.engine.training import loop
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint import save
from glm46.tasks.pretrain.data_stream import DataStream
from tests.processes import is_alive, wait_until
from tests.ranks.forked_ranks import await_ranks, start_ranks
from tests.small_run import folder_with_source, small_config

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


FATAL_SAVE = 20
SLOW_FROM, LAST_STEP = 60, 110


def hampered_work(rank: int, config, moment: Path) -> int:
    """Train while the writer thread of rank 1 raises SystemExit in one save; later rank 0 is slowed in every step."""
    torch.set_num_threads(1)
    step, train_step, write = 0, loop.train_step, save.write_tensors
    times = deque[float](maxlen=20)

    def counted(*arguments):
        nonlocal step
        step += 1
        if rank == 0 and step >= SLOW_FROM:
            # Much, because other work may share the cores, and more if they become slower.
            time.sleep(max(3 * statistics.median(times), 0.1))
        began = time.perf_counter()
        outcome = train_step(*arguments)
        times.append(time.perf_counter() - began)
        return outcome

    def write_tensors(folder: Path, *arguments):
        if rank == 1 and folder.name == f"step-{FATAL_SAVE:06d}.tmp":
            moment.write_text(str(step))
            raise SystemExit(3)
        return write(folder, *arguments)

    loop.train_step, save.write_tensors = counted, write_tensors
    return train(config)


def run_hampered(base: Path, source: Path) -> dict:
    folder, log, moment = base / "hampered", base / "log-hampered-", base / "moment-hampered"
    config = small_config(source, folder, training={"steps": LAST_STEP}, checkpoint={"interval": 20})
    codes = await_ranks(start_ranks(2, log, lambda rank: hampered_work(rank, config, moment)))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "codes": codes,
        "raised_in_step": int(moment.read_text()),
        "saved": sorted(int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*")),
        "failed_saves": [row["failed_saves"] for row in rows],
        "slowest": [(row["slowest_rank"], row["slowest_rank_ratio"]) for row in rows if "slowest_rank" in row],
        "log": (folder / "log.txt").read_text(),
        "said": "".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)),
    }


def run_cut_off(base: Path, source: Path) -> dict:
    """Two ranks whose store, which lives in this process, stops to answer, as that of a node behind a cut network."""
    folder, log = base / "cut-off", base / "log-cut-off-"
    config = small_config(
        source, folder, training={"steps": 100_000}, checkpoint={"enable": False}, comm={"hang_seconds": 5.0}
    )
    watchdog._STORE_SECONDS = 5.0
    children = start_ranks(2, log, lambda rank: torch.set_num_threads(1) or train(config))
    watchdog._STORE_SECONDS = 30.0
    wait_until((folder / "metrics.jsonl").exists)
    began, server = time.monotonic(), os.getpid()
    helper = os.fork()
    if helper == 0:
        os.kill(server, signal.SIGSTOP)
        with suppress(AssertionError):
            wait_until(lambda: not any(map(is_alive, children)))
        os.kill(server, signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)
    return {
        "codes": await_ranks(children),
        "seconds": time.monotonic() - began,
        "said": "".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)),
    }


def work(rank: int, config, hang: str, victim: int, moment: Path) -> int:
    torch.set_num_threads(1)
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
    return train(config)


VICTIMS = {"asleep": 1, "stopped": 0, "blocked": 1, "no text": 0, "deadlocked": 1}
"""The rank that hangs."""


def run_hang(base: Path, source: Path, hang: str, victim: int) -> dict:
    folder, log, moment = base / hang, base / f"log-{hang}-", base / f"moment-{hang}"
    config = small_config(
        source, folder, training={"steps": 1000}, checkpoint={"enable": False}, comm={"hang_seconds": 5.0}
    )
    codes = await_ranks(start_ranks(2, log, lambda rank: work(rank, config, hang, victim, moment)))
    times = [json.loads(line)["step_seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "hang": hang,
        "victim": victim,
        "codes": codes,
        "seconds": time.monotonic() - float(moment.read_text()),
        "found_seconds": (folder / "hang" / f"stacks-rank{1 - victim}.txt").stat().st_mtime - moment.stat().st_mtime,
        "slowest_step": max(times[2:]),
        "said": "".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)),
        "files": {path.name: path.stat().st_size for path in (folder / "hang").iterdir()},
        "stacks": (folder / "hang" / f"stacks-rank{victim}.txt").read_text(),
    }


def main(case: str) -> None:
    """One case: "hampered", "cut off", or a hang of `VICTIMS`."""
    with folder_with_source() as (base, source):
        others = {"hampered": run_hampered, "cut off": run_cut_off}
        row = others[case](base, source) if case in others else run_hang(base, source, case, VICTIMS[case])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for case in sys.argv[1:] or ("hampered", "cut off", *VICTIMS):
        main(case)
