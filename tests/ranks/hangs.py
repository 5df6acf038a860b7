"""Two ranks train until one of them goes silent; a program that prints what came of it as JSON."""

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import torch

from glm46.data.tokenizer import load_tokenizer
from glm46.training import trainer
from tests.conftest import small_run, write_source
from tests.ranks.forked_ranks import await_ranks, start_ranks

HANGS = {
    "asleep": lambda: time.sleep(1000),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # Years of backtracking without giving the interpreter back; unlike a C sleep, no signal ends it.
    "blocked": lambda: re.match("(a+)+$", "a" * 60 + "b"),
}
SILENT_STEP = 30  # after the steps that are timed


def work(rank: int, run, hang: str, victim: int, moment: Path) -> int:
    torch.set_num_threads(1)
    step, original = 0, trainer.train_step

    def train_step(*arguments):
        nonlocal step
        step += 1
        if step == SILENT_STEP and rank == victim:
            moment.write_text(str(time.monotonic()))
            HANGS[hang]()
        return original(*arguments)

    trainer.train_step = train_step
    return trainer.train(run)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "source").mkdir()
        source = write_source(base / "source", load_tokenizer("builtin"))
        for hang, victim in (("asleep", 1), ("stopped", 0), ("blocked", 1)):
            folder, log, moment = base / hang, base / f"log-{hang}-", base / f"moment-{hang}"
            run = small_run(
                source, folder, training={"steps": 1000}, checkpoint={"enable": False}, comm={"hang_seconds": 2.0}
            )
            children = start_ranks(2, log, lambda rank, r=run, h=hang, v=victim, m=moment: work(rank, r, h, v, m))
            codes = await_ranks(children, 90)
            times = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            row = {
                "hang": hang,
                "victim": victim,
                "codes": codes,
                "seconds": time.monotonic() - float(moment.read_text()),
                "slowest_step": max(row["step_seconds"] for row in times[2:]),
                "said": "".join(log.with_name(f"{log.name}{rank}").read_text() for rank in range(2)),
                "files": {path.name: path.stat().st_size for path in (folder / "hang").iterdir()},
                "stacks": (folder / "hang" / f"stacks-rank{victim}.txt").read_text(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
