"""Which steps must not be made: figures that are not finite, and spikes of the loss or the gradient norm.

A step is judged before the weights change, from figures that are equal on all ranks, so that all ranks skip it or none.
A spike is a distance from the median of the last good steps in units of their deviation, both robust: the median, and
the median distance from it. Bad steps never enter the window.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOT_FINITE = "loss or gradient norm is not finite"

_MAD_TO_SIGMA = 1.4826
"""Deviation of normally distributed values over the median distance from their median."""
_SMALLEST_LOSS_SIGMA = 0.01
"""Relative to the loss. On a plateau the deviation goes to nothing, and a harmless step would stand out."""
_SMALLEST_NORM_SIGMA = 0.1
"""Of the norm's logarithm: the same for a factor."""


@torch.no_grad()
def sum_and_share_norm(sums: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Sum figures over all ranks, and make the gradient norm the very same number on all of them; one collective.

    Ranks that hold copies of a gradient make its norm apart. If one of them alone has a NaN, all must know.

    Args:
        sums: FP64 [n] of this rank.
        grad_norm: FP32 scalar.

    Returns:
        The sums, and the norm in FP32.
    """
    together = torch.cat([sums, grad_norm.double().view(1)])
    dist.all_reduce(together)
    return together[:-1], (together[-1] / dist.get_world_size()).float()


class SpikeDetector:
    """Judges steps by those before them; the same on every rank.

    Args:
        sigmas: distance from the median, in deviations, that makes a spike; 0 finds none.
        window: good steps that a step is compared with. Nothing is judged before half of them were made.
    """

    def __init__(self, sigmas: float, window: int):
        self._sigmas, self._window = sigmas, window
        self._losses: deque[float] = deque(maxlen=window)
        self._log_norms: deque[float] = deque(maxlen=window)

    def check(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong with a step of this mean loss and norm, None if nothing; then it enters the window."""
        log_norm = math.log(max(grad_norm, 1e-30))
        if self._sigmas and 2 * len(self._losses) >= self._window:
            median, sigma = median_and_sigma(self._losses)
            limit = median + self._sigmas * max(sigma, _SMALLEST_LOSS_SIGMA * abs(median))
            if loss > limit:
                return f"loss {loss:.4g} spikes, the limit is {limit:.4g}"
            median, sigma = median_and_sigma(self._log_norms)
            limit = median + self._sigmas * max(sigma, _SMALLEST_NORM_SIGMA)
            if log_norm > limit:
                return f"gradient norm {grad_norm:.4g} spikes, the limit is {math.exp(limit):.4g}"
        self._losses.append(loss)
        self._log_norms.append(log_norm)
        return None

    def to_meta(self) -> dict[str, Any]:
        """For the checkpoint, as JSON."""
        return {"losses": list(self._losses), "log_norms": list(self._log_norms)}

    def restore(self, meta: dict[str, Any]) -> None:
        """Go on from what `to_meta` gave."""
        self._losses = deque(meta["losses"], maxlen=self._window)
        self._log_norms = deque(meta["log_norms"], maxlen=self._window)


def median_and_sigma(values: Collection[float]) -> tuple[float, float]:
    """The median, and the deviation that the median distance from it stands for, were the values normal."""
    median = statistics.median(values)
    return median, _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values)
