"""Which rank all others wait for: each rank's own time per step, compared over the ranks.

The duration of a step is the same on all ranks, because the fast ones wait for the slow one. What differs is the time
in which a rank does not wait for others: text, its part of forward and backward, anything else that holds it up.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from math import hypot, sqrt
from typing import NamedTuple

from glm46.compat import own_clock
from glm46.reliability.loss_spikes import median_and_sigma

_WINDOW = 32
"""Steps whose median is a rank's pace."""
_FEWEST_STEPS = 16
"""Steps before a rank has a pace."""
_WARM_UP_STEPS = 2
"""First steps, which compile and fill caches."""
_EXCHANGE_STEPS = 10
"""Steps between two looks at the paces of all ranks."""
_LEAST_EXCESS = 0.1
"""A rank is slow if it takes longer than the others by this share,"""
_ERRORS = 6.0
"""by this many standard errors of the medians,"""
_SPREADS = 4.0
"""and by this many deviations of the others from each other, in two looks one after the other."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normally distributed values: sqrt(pi / 2)."""


class Pace(NamedTuple):
    """A rank's own time per step, in seconds."""

    median: float
    error: float
    """Standard error of the median."""


class Slowest(NamedTuple):
    """The rank that is furthest behind others with the same layers."""

    rank: int
    seconds: float
    others: float
    """Median pace of the others, in seconds."""
    stands_out: bool
    """Whether that is more than chance."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.others


def find_slowest(paces: Sequence[Pace], stages: int) -> Slowest | None:
    """The slowest rank relative to the others of its pipeline stage, which have the same work; None if all are alone.

    Args:
        paces: of all ranks, in their order.
        stages: how many parts of the ranks, one after the other, hold different layers.
    """
    size, found = len(paces) // stages, []
    for first in range(0, len(paces), size) if size > 1 else ():
        members = paces[first : first + size]
        slowest = max(range(size), key=lambda i, members=members: members[i].median)
        others = [pace for i, pace in enumerate(members) if i != slowest]
        middle, spread = median_and_sigma([pace.median for pace in others])
        error = hypot(members[slowest].error, statistics.median(pace.error for pace in others) / sqrt(len(others)))
        excess = members[slowest].median - middle
        stands_out = excess > max(_LEAST_EXCESS * middle, _ERRORS * error, _SPREADS * spread)
        found.append(Slowest(first + slowest, members[slowest].median, max(middle, 1e-9), stands_out))
    return max(found, key=lambda slowest: slowest.ratio) if found else None


class Stragglers:
    """Times this rank's steps and compares them with those of the others; the same verdict on every rank.

    The paces travel in the collective that the ranks agree on a step by: `shared_paces` goes in, its sum over all ranks
    comes back to `update`.
    """

    def __init__(self, rank: int, world_size: int, stages: int):
        self._rank, self._world_size, self._stages = rank, world_size, stages
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._steps, self._began = 0, own_clock()
        self._slowest: Slowest | None = None
        self._suspect: int | None = None
        self._named: int | None = None

    def step_begins(self) -> None:
        """From here on this rank works for the step."""
        self._began = own_clock()

    def gradients_ready(self, own_time: float) -> None:
        """The gradients are there, since this time of `own_clock`."""
        self._steps += 1
        if self._steps > _WARM_UP_STEPS:
            self._times.append(own_time - self._began)

    def shared_paces(self) -> list[int]:
        """Two numbers for each rank, nanoseconds; those of others are 0. Empty when nothing is compared: alone, in
        most steps, and at the start."""
        if self._world_size == 1 or self._steps % _EXCHANGE_STEPS or len(self._times) < _FEWEST_STEPS:
            return []
        middle, sigma = median_and_sigma(self._times)
        shared = [0] * (2 * self._world_size)
        shared[2 * self._rank : 2 * self._rank + 2] = (
            round(1e9 * middle),
            round(1e9 * _MEDIAN_ERROR * sigma / sqrt(len(self._times))),
        )
        return shared

    def update(self, shared: Sequence[int]) -> str | None:
        """Take in the sum of what was shared; what to tell a person, if there is anything new."""
        if not shared:
            return None
        paces = [Pace(a / 1e9, b / 1e9) for a, b in zip(shared[::2], shared[1::2], strict=True)]
        self._slowest = slowest = find_slowest(paces, self._stages)
        suspect = slowest.rank if slowest is not None and slowest.stands_out else None
        is_sure, self._suspect = suspect == self._suspect, suspect
        if not is_sure or suspect == self._named:
            return None
        before, self._named = self._named, suspect
        if suspect is None:
            return f"rank {before} is as fast as the others again"
        return (
            f"rank {suspect} is slow: {slowest.seconds:.3g} s of its own per step, the others {slowest.others:.3g} s "
            f"({slowest.ratio:.2f} times as long); all wait for it"
        )

    def metrics(self) -> dict[str, float]:
        """Columns of metrics.jsonl, of the last comparison."""
        if self._slowest is None:
            return {}
        return {"slowest_rank": self._slowest.rank, "slowest_rank_ratio": self._slowest.ratio}
