"""Tokens, FLOPs and time between two rows of metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThroughputMeter:
    """Meter of tokens and time between two rows of metrics. Validation and saves can be excluded from the time."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.perf_counter):
        """Start counting.

        Args:
            clock: returns seconds; for tests.
        """
        self._num_ranks = num_ranks
        self._clock = clock
        self._restart()

    def _restart(self) -> None:
        self._tokens = self._budget_tokens = self._steps = 0
        self._flops = 0.0
        self._excluded_seconds = self._data_seconds = self._model_seconds = 0.0
        self._start = self._clock()

    def add_step(
        self, tokens: int, data_seconds: float, flops: float, budget_tokens: int, model_seconds: float
    ) -> None:
        """Count a finished step.

        Args:
            tokens: computed tokens over all ranks.
            data_seconds: wait for the loader.
            flops: FLOPs of forward and backward over all ranks.
            budget_tokens: tokens of the step that count towards ``training.tokens``; differs from `tokens` if rows
                hold several samples.
            model_seconds: host time in generation of samples (RL), forward and backward; the rest is overhead.
        """
        self._tokens += tokens
        self._budget_tokens += budget_tokens
        self._flops += flops
        self._steps += 1
        self._data_seconds += data_seconds
        self._model_seconds += model_seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time inside this context from the throughput."""
        start = self._clock()
        yield
        self._excluded_seconds += self._clock() - start

    def read(self) -> dict[str, float]:
        """Return columns of metrics.jsonl since the last call, and restart the counts. At least one step must be added
        first.

        The caller must first read a value from the device, so that queued work is done.
        """
        assert self._steps > 0, "no step since the last reading"
        # A coarse clock may not advance within a tiny step.
        seconds = max(self._clock() - self._start - self._excluded_seconds, 1e-9)
        rate = self._tokens / seconds
        flops_per_second_per_device = self._flops / seconds / self._num_ranks
        row = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self._num_ranks,
            "tflops_per_device": flops_per_second_per_device / 1e12,
            "step_seconds": seconds / self._steps,
            "data_seconds": self._data_seconds / self._steps,
            "overhead_ratio": 1 - self._model_seconds / seconds,
        }
        if self._budget_tokens != self._tokens:
            row["budget_tokens_per_second"] = self._budget_tokens / seconds
        self._restart()
        return row
