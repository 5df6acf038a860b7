"""Progress of a run: the counters that a resume needs in addition to tensors."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Progress:
    """Counters of a run, equal on all ranks. A checkpoint stores all fields under these names."""

    step: int = 0
    """Optimizer steps made, skipped ones included."""
    tokens: int = 0
    """Tokens of this run, padding and skipped steps included: the clock of the budget."""
    curriculum_tokens: int = 0
    """Tokens since the start of the curriculum, earlier phases included: the clock of every schedule."""
    samples: int = 0
    """Global number of the next sample to read."""
    prompts: int = 0
    """Prompts used so far, with [rl]."""
    skipped_steps: int = 0
    """Steps skipped because of a spike or a non-finite loss or gradient norm."""
    skipped_in_a_row: int = 0
    """Consecutive skipped steps so far."""
    bad_since_step: int = 0
    """First step of the last series of skipped steps."""
    bad_since_sample: int = 0
    """First sample of that step."""
    window_loss_sum: float = 0.0
    """Loss of the good steps since the last row of metrics, summed over targets."""
    window_targets: int = 0
    """Targets of these steps."""
    rollbacks: int = 0
    """Number of rollbacks to an earlier checkpoint."""
    excluded_samples: list[list[int]] = field(default_factory=list)
    """Ranges [first, end) of sample numbers to skip."""
    read_before: list[list[Any]] = field(default_factory=list)
    """Rows of each source that earlier phases have read, see `data_stream.rows_read`."""

    def advance(self, *, sequences: int, seq_len: int, was_skipped: bool) -> None:
        """Count one optimizer step."""
        if was_skipped and not self.skipped_in_a_row:
            self.bad_since_step = self.step + 1
            self.bad_since_sample = self.samples
        self.step += 1
        self.samples += sequences
        self.tokens += sequences * seq_len
        self.curriculum_tokens += sequences * seq_len
        self.skipped_steps += was_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0

    def add_loss(self, loss_sum: float, targets: int) -> None:
        """Add the loss of a good step to the mean of the next row of metrics."""
        self.window_loss_sum += loss_sum
        self.window_targets += targets

    def take_mean_loss(self) -> float | None:
        """Return the mean loss per target since the last call, or None without a good step, and restart it."""
        loss_sum = self.window_loss_sum
        targets = self.window_targets
        self.window_loss_sum = 0.0
        self.window_targets = 0
        return loss_sum / targets if targets else None

    def skip_excluded(self, sequences: int) -> None:
        """Advance past all excluded ranges that the next `sequences` samples overlap."""
        for first, end in sorted(self.excluded_samples):
            if self.samples < end and first < self.samples + sequences:
                self.samples = end

    def rolled_back_to(self, earlier: "Progress", first_bad_sample: int) -> "Progress":
        """Return the progress of an earlier checkpoint, with the samples from the first bad one on excluded."""
        return replace(
            earlier,
            skipped_steps=self.skipped_steps,
            skipped_in_a_row=0,
            rollbacks=self.rollbacks + 1,
            excluded_samples=[*self.excluded_samples, [first_bad_sample, self.samples]],
        )
