"""Tokens per second and the share of the hardware's peak that the model's own work reaches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThroughputMeter:
    """Counts tokens and time between two rows of metrics; validation and saving can be left out of the time."""

    def __init__(
        self,
        peak_flops: float | None,
        num_ranks: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start counting.

        Args:
            peak_flops: FLOP/s of one rank's device; None when unknown, then no MFU is reported.
            clock: seconds; tests give their own.
        """
        self._peak_flops, self._num_ranks = peak_flops, num_ranks
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._tokens = self._steps = 0
        self._flops = 0.0
        self._left_out_seconds = self._data_seconds = 0.0
        self._start = self._clock()

    def add_step(self, tokens: int, data_seconds: float, flops: float) -> None:
        """Count a finished step: its tokens over all ranks, the time it waited for the loader, and the FLOPs that
        they need, forward and backward."""
        self._tokens += tokens
        self._flops += flops
        self._steps += 1
        self._data_seconds += data_seconds

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the time inside out of the rate: validation and checkpoints are no training."""
        start = self._clock()
        yield
        self._left_out_seconds += self._clock() - start

    def read(self) -> dict[str, float]:
        """Columns of metrics.jsonl since the last reading, and start anew. At least one step must have been added.

        The caller reads a value from the device first: work that is only queued has not been done.
        """
        assert self._steps > 0, "no step since the last reading"
        # A clock of coarse resolution may not move within a tiny step.
        seconds = max(self._clock() - self._start - self._left_out_seconds, 1e-9)
        rate = self._tokens / seconds
        flops = self._flops / seconds / self._num_ranks
        row = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._num_ranks,
            "tflops_per_device": flops / 1e12,
            "step_seconds": seconds / self._steps,
            "data_seconds": self._data_seconds / self._steps,
        }
        if self._peak_flops is not None:
            row["mfu"] = flops / self._peak_flops
        self._restart()
        return row
