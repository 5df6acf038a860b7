"""How far a run has come: the few numbers that, with weights and optimizer states, are everything a resume needs."""

from dataclasses import asdict, dataclass


@dataclass
class Progress:
    """Counters of a run; all of them are the same on every rank."""

    step: int = 0
    """Optimizer steps made, skipped ones included."""
    tokens: int = 0
    """Tokens of this run that were trained on, padding and skipped steps included: the clock of its budget."""
    curriculum_tokens: int = 0
    """Tokens since the start of the curriculum, earlier phases included: the clock of every schedule."""
    samples: int = 0
    """Global number of the next sample to read."""
    skipped_steps: int = 0
    """Steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """Of these, the last ones without a good step between."""

    def advance(self, *, sequences: int, seq_len: int, was_skipped: bool) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.samples += sequences
        self.tokens += sequences * seq_len
        self.curriculum_tokens += sequences * seq_len
        self.skipped_steps += was_skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if was_skipped else 0

    def to_meta(self) -> dict[str, int]:
        """For the checkpoint, as JSON."""
        return asdict(self)

    @classmethod
    def from_meta(cls, meta: dict[str, int]) -> "Progress":
        """From the checkpoint."""
        return cls(**meta)
