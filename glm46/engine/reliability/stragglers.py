"""Detection of a slow rank: compares the own time of each rank per step with the other ranks.

A step takes equally long on all ranks, because the fast ones wait for the slow one. A rank's own time is the time in
which it does not wait for others: reading data, its part of forward and backward, and any delay of its own. With a GPU
it is the time to read data, and the device time of the forward of its layers in one micro-batch (`OwnDeviceTime`).
"""

import statistics
from collections import deque
from collections.abc import Sequence
from math import hypot, sqrt
from typing import NamedTuple

from glm46.compat import own_clock
from glm46.compute.distributed.device_time import OwnDeviceTime
from glm46.engine.reliability.loss_spikes import median_and_sigma

_WINDOW = 32
"""Number of steps whose median is a rank's pace."""
_FEWEST_STEPS = 16
"""Number of steps before a rank has a pace."""
_WARM_UP_STEPS = 2
"""Number of first steps that are not timed: they compile and fill caches."""
_EXCHANGE_STEPS = 10
"""Number of steps between two comparisons."""
_LEAST_EXCESS = 0.1
"""Fraction by which the pace of a slow rank exceeds the pace of the others; `_ERRORS` and `_SPREADS` apply too."""
_ERRORS = 6.0
"""Standard errors of the medians by which the pace of a slow rank exceeds the pace of the others."""
_SPREADS = 4.0
"""Deviations of the others from each other by which a slow rank exceeds them, in two comparisons in a row."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normally distributed values: sqrt(pi / 2)."""


class Pace(NamedTuple):
    """A rank's own time per step, in seconds."""

    median: float
    error: float
    """Standard error of the median."""


class Slowest(NamedTuple):
    """Slowest rank relative to others with the same layers."""

    rank: int
    seconds: float
    others: float
    """Median pace of the others, in seconds."""
    stands_out: bool
    """True if the difference is significant."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.others


def find_slowest(paces: Sequence[Pace], stages: int) -> Slowest | None:
    """Find the slowest rank relative to the others of its pipeline stage, which have the same work.

    Args:
        paces: paces of all ranks, in rank order.
        stages: number of pipeline stages; the ranks of a stage are consecutive.

    Returns:
        None if every stage has one rank.
    """
    ranks_per_stage = len(paces) // stages
    if ranks_per_stage < 2:
        return None
    candidates = []
    for first in range(0, len(paces), ranks_per_stage):
        members = paces[first : first + ranks_per_stage]
        medians = [pace.median for pace in members]
        slowest = medians.index(max(medians))
        others = [pace for i, pace in enumerate(members) if i != slowest]
        median, spread = median_and_sigma([pace.median for pace in others])
        error = hypot(members[slowest].error, statistics.median(pace.error for pace in others) / sqrt(len(others)))
        excess = members[slowest].median - median
        stands_out = excess > max(_LEAST_EXCESS * median, _ERRORS * error, _SPREADS * spread)
        candidates.append(Slowest(first + slowest, members[slowest].median, max(median, 1e-9), stands_out))
    return max(candidates, key=lambda slowest: slowest.ratio)


class Stragglers:
    """Timing of this rank's steps, compared with the other ranks; the result is equal on every rank.

    The paces are part of the all-reduce before each step: the caller sums `shared_paces` over all ranks and passes the
    sum to `update`.

    Args:
        device_time: None measures the time of the host only.
    """

    def __init__(self, rank: int, world_size: int, stages: int, device_time: OwnDeviceTime | None = None):
        self._rank = rank
        self._world_size = world_size
        self._stages = stages
        self._device_time = device_time
        self._data_seconds = 0.0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._began = own_clock()
        self._slowest: Slowest | None = None
        self._suspect: int | None = None  # slow in the last comparison
        self._named: int | None = None  # slow by the last message

    def step_begins(self) -> None:
        """Start timing this rank's part of a step."""
        self._began = own_clock()
        if self._device_time is not None:
            self._device_time.step_begins()

    def gradients_ready(self, ready_at: float, *, is_typical: bool = True) -> None:
        """End timing: the gradients were complete at this time of `own_clock`.

        Args:
            is_typical: False to ignore the time of this step; equal on all ranks.
        """
        self._steps += 1
        seconds = ready_at - self._began
        if self._device_time is not None:
            seconds = self._data_seconds + self._device_time.seconds()
        if self._steps > _WARM_UP_STEPS and is_typical:
            self._times.append(seconds)

    def shared_paces(self) -> list[int]:
        """Return median and error of each rank in nanoseconds; the values of other ranks are 0.

        Empty if this step has no comparison: with one rank, in most steps, and at the start.
        """
        if self._world_size == 1 or self._steps % _EXCHANGE_STEPS or len(self._times) < _FEWEST_STEPS:
            return []
        median, sigma = median_and_sigma(self._times)
        shared = [0] * (2 * self._world_size)
        shared[2 * self._rank : 2 * self._rank + 2] = (
            round(1e9 * median),
            round(1e9 * _MEDIAN_ERROR * sigma / sqrt(len(self._times))),
        )
        return shared

    def update(self, shared: Sequence[int]) -> str | None:
        """Compare the paces. Call it in every step, before the work on the device.

        Args:
            shared: the sum of `shared_paces` over all ranks.

        Returns:
            A message if the slow rank has changed.
        """
        self._data_seconds = own_clock() - self._began
        if not shared:
            return None
        paces = [Pace(median / 1e9, error / 1e9) for median, error in zip(shared[::2], shared[1::2], strict=True)]
        self._slowest = slowest = find_slowest(paces, self._stages)
        suspect = slowest.rank if slowest is not None and slowest.stands_out else None
        is_sure = suspect == self._suspect  # in two comparisons in a row
        self._suspect = suspect
        if not is_sure or suspect == self._named:
            return None
        previous = self._named
        self._named = suspect
        if slowest is None or suspect is None:
            return f"rank {previous} is as fast as the others again"
        what = "of its own per step" if self._device_time is None else "to read and compute forward of a micro-batch"
        return (
            f"rank {suspect} is slow: {slowest.seconds:.3g} s {what}, the others {slowest.others:.3g} s "
            f"({slowest.ratio:.2f} times as long); all wait for it"
        )

    def metrics(self) -> dict[str, float]:
        """Return columns of metrics.jsonl from the last comparison."""
        if self._slowest is None:
            return {}
        return {"slowest_rank": self._slowest.rank, "slowest_rank_ratio": self._slowest.ratio}
