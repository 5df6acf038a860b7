"""Rounds of a benchmark: as many as asked for, or as fit into a minute, with rate and time left."""

import time
from collections.abc import Callable, Iterator

SECONDS = 60.0
"""Rounds of which the number is not stated take no longer, once there are the fewest."""
_FEWEST, _MOST = 3, 9
"""A median of fewer means little; more change it little."""


def timed_rounds(
    stated: int | None, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Numbers of the rounds from 0 on; after each, `report` is told how many are done, their rate and the time left.

    Args:
        stated: how many; None: those that fit into `SECONDS`, three to nine.
        clock: seconds; tests give their own.
    """
    started, done, total = clock(), 0, stated or _FEWEST
    while done < total:
        yield done
        done += 1
        seconds = (clock() - started) / done
        if stated is None:
            total = min(max(int(SECONDS / max(seconds, 1e-9)), _FEWEST, done), _MOST)
        report(f"round {done} of {total}, {seconds:.1f} s each, {(total - done) * seconds:.0f} s left")
