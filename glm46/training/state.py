"""How far a run has come: the few numbers that, with weights and optimizer states, are everything a resume needs."""

from dataclasses import dataclass, field, replace


@dataclass
class Progress:
    """Counters of a run; all of them are the same on every rank. A checkpoint holds them as they are."""

    step: int = 0
    """Optimizer steps made, skipped ones included."""
    tokens: int = 0
    """Tokens of this run that were trained on, padding and skipped steps included: the clock of its budget."""
    curriculum_tokens: int = 0
    """Tokens since the start of the curriculum, earlier phases included: the clock of every schedule."""
    samples: int = 0
    """Global number of the next sample to read."""
    skipped_steps: int = 0
    """Steps skipped for a spike, or a loss or gradient that is not finite."""
    skipped_in_a_row: int = 0
    """Of these, the last ones without a good step between."""
    bad_since_step: int = 0
    """The first step of this row."""
    bad_since_sample: int = 0
    """The first sample of that step."""
    window_loss_sum: float = 0.0
    """Loss of the good steps since the last row of metrics, summed over their targets."""
    window_targets: int = 0
    """Targets of these steps."""
    rollbacks: int = 0
    """How often the run went back to a checkpoint."""
    left_out: list[list[int]] = field(default_factory=list)
    """Ranges of sample numbers that are not read: first, and the one behind the last."""
    read_before: list[list] = field(default_factory=list)
    """What earlier phases have read of sources, as `Feed.read` gives it."""

    def advance(self, *, sequences: int, seq_len: int, was_skipped: bool) -> None:
        """Count one optimizer step."""
        if was_skipped and not self.skipped_in_a_row:
            self.bad_since_step, self.bad_since_sample = self.step + 1, self.samples
        self.step += 1
        self.samples += sequences
        self.tokens += sequences * seq_len
        self.curriculum_tokens += sequences * seq_len
        self.skipped_steps += was_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0

    def add_loss(self, loss_sum: float, targets: int) -> None:
        """Count the loss of a good step towards the mean of the next row of metrics."""
        self.window_loss_sum += loss_sum
        self.window_targets += targets

    def take_mean_loss(self) -> float | None:
        """Mean loss per target since the last call, which starts the next window; None without a good step."""
        loss_sum, targets = self.window_loss_sum, self.window_targets
        self.window_loss_sum, self.window_targets = 0.0, 0
        return loss_sum / targets if targets else None

    def pass_over(self, sequences: int) -> None:
        """Go on behind any range that is left out and that the next `sequences` would touch."""
        for first, end in sorted(self.left_out):
            if self.samples < end and first < self.samples + sequences:
                self.samples = end

    def roll_back(self, earlier: "Progress", first_bad_sample: int) -> "Progress":
        """The progress of an earlier checkpoint, with the samples from the first bad one to here left out."""
        bad = [first_bad_sample, self.samples]
        return replace(
            earlier,
            skipped_steps=self.skipped_steps,
            skipped_in_a_row=0,
            rollbacks=self.rollbacks + 1,
            left_out=[*self.left_out, bad],
        )
