"""Detection of spikes of the loss or the gradient norm. The caller passes finite values only.

A step is checked before the weights change, with values that are equal on all ranks, so that either all ranks skip it
or no rank does. A spike is a large distance from the median of the last good steps, in units of a robust deviation (the
median distance from the median). Bad steps never enter the window.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import Any

NOT_FINITE = "loss or gradient norm is not finite"
"""Fault of a step that the caller finds, without a call of `SpikeDetector.check`."""

_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normally distributed values over their median distance from the median."""
_SMALLEST_LOSS_SIGMA = 0.01
"""Lower bound of the deviation, relative to the loss. On a plateau the deviation approaches zero, and a harmless step
would count as a spike."""
_SMALLEST_NORM_SIGMA = 0.1
"""Lower bound of the deviation of the logarithm of the norm."""


class SpikeDetector:
    """Comparison of each step with the previous good steps; the result is the same on every rank.

    Args:
        sigmas: distance from the median, in deviations, above which a step is a spike; 0 disables detection.
        window: number of good steps to compare with. Detection starts after half of this number.
    """

    def __init__(self, sigmas: float, window: int):
        self._sigmas = sigmas
        self._window = window
        self._losses: deque[float] = deque(maxlen=window)
        self._log_norms: deque[float] = deque(maxlen=window)

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Return the fault of a step with this mean loss and norm; None for a good step, which then enters the
        window."""
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

    def restart(self) -> None:
        """Forget all steps. For changes after which their losses predict nothing about the next ones."""
        self._losses.clear()
        self._log_norms.clear()

    def to_meta(self) -> dict[str, Any]:
        """Return the window as JSON values for the checkpoint."""
        return {"losses": list(self._losses), "log_norms": list(self._log_norms)}

    def restore(self, meta: dict[str, Any]) -> None:
        """Restore the window from a result of `to_meta`."""
        self._losses = deque(meta["losses"], maxlen=self._window)
        self._log_norms = deque(meta["log_norms"], maxlen=self._window)


def median_and_sigma(values: Collection[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation estimated from the median distance to it."""
    median = statistics.median(values)
    return median, _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values)
