"""Rounds of a benchmark: a stated number, or as many as fit into a minute."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

SECONDS = 60.0
"""Time of all rounds if their number is not stated; at least `_FEWEST` rounds run."""
_FEWEST, _MOST = 3, 9
"""A median of fewer is not reliable; more change it little."""


def timed_rounds(
    stated: int | None, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Yield the numbers of the rounds, from 0 on.

    Args:
        stated: number of rounds; None: as many as fit into `SECONDS`, three to nine.
        report: called after each round with a line of progress, rate and remaining time.
        clock: seconds; tests pass their own.
    """
    started, done, total = clock(), 0, stated or _FEWEST
    while done < total:
        yield done
        done += 1
        seconds = (clock() - started) / done
        if stated is None:
            total = min(max(int(SECONDS / max(seconds, 1e-9)), _FEWEST, done), _MOST)
        report(f"round {done} of {total}, {seconds:.1f} s each, {(total - done) * seconds:.0f} s left")


def interleaved(contestants: list[T], stated: int | None, report: Callable[[str], None]) -> Iterator[T]:
    """Yield every contestant once per round of `timed_rounds`, in an order that rotates from round to round."""
    for number in timed_rounds(stated, report):
        turn = number % len(contestants)
        yield from contestants[turn:] + contestants[:turn]
