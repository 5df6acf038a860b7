"""Measure how long episodes that end at once wait for the disk, and how long other threads wait for them.

    PYTHONPATH=. OMP_NUM_THREADS=1 python scripts/measure/episode_journal.py --episodes 256 --tokens 30000 --folder DISK

Groups of eight episodes of so many tokens end at the same time, in eight threads, without an engine.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm46.tasks.rl.rollout.background import BackgroundGeneration, Member
from glm46.tasks.rl.rollout.records import Completion, Episode, Request

GROUP = 8


class _Idle:
    """See `OpenRequests`: generates nothing."""

    goes_on, error = True, None

    def start(self) -> None:
        pass


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--folder", help="on the disk to measure")
    given = parser.parse_args()
    members: list[Member] = []

    def begin(requests: object, of: Sequence[Member]) -> None:
        members.extend(of)

    numbers, n = range(given.episodes // GROUP), given.tokens
    end = Episode([Completion([5] * n, [-1.0] * n, "stop", [1] * n, None, prompt=[1] * 300)])
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        generating = BackgroundGeneration(_Idle(), Path(name) / "ahead", begin)
        for number in numbers:
            generating.add(number, [Request([1] * 300, seed, n) for seed in range(GROUP)], 0)
        generating.start()
        waits, is_over = [], threading.Event()

        def ask() -> None:
            while not is_over.wait(0.005):
                began = time.perf_counter()
                generating.unfinished(numbers)
                waits.append(time.perf_counter() - began)

        other = threading.Thread(target=ask)
        other.start()
        began, spent = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(GROUP) as threads:
            list(threads.map(lambda member: member.finish(end), members))
        returned = time.perf_counter() - began
        while generating.unfinished(numbers):
            time.sleep(0.005)
        written, spent = time.perf_counter() - began, time.process_time() - spent
        is_over.set()
        other.join()
        size = sum(path.stat().st_size for path in (Path(name) / "ahead").iterdir())
    print(
        f"{len(members)} episodes of {n:,} tokens: {size / 1e6:.0f} MB on the disk after {written:.2f} s, the calls "
        f"returned after {returned:.2f} s, {spent:.2f} s of the processor; another thread waited up to "
        f"{1e3 * max(waits):.0f} ms"
    )


if __name__ == "__main__":
    main()
