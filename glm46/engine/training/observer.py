"""Interface to everything that shows or stores what a run does."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task

RowKind = Literal["train", "validation", "step"]
"""Kinds of rows of metrics. A ``step`` row belongs to a step without a ``train`` row, and is only shown."""
Phase = Literal["start", "prepare", "train", "validate", "save", "stop"]


class Observer(Protocol):
    """Receiver of the messages, metrics and events of a run. The trainer knows nothing else about consoles, files,
    exporters and profilers.

    Each rank has one, from before the process group exists to the exit code. All ranks call all methods at the same
    points, so that outputs may be collective; usually only the first rank writes.
    """

    def training(
        self, task: Task, progress: Progress, meta: dict[str, Any] | None, *, resumed_step: int | None
    ) -> AbstractContextManager[object]:
        """Open the outputs of a run that continues from `progress`, until the end or the next rollback. Collective.

        Args:
            meta: metadata of the checkpoint or the weights that were loaded, if any.
            resumed_step: step of the checkpoint that the run resumes from, whose later rows are removed; None for a new
                run.

        Raises:
            UserError: an output cannot be opened.
        """
        ...

    def message(self, text: str) -> None:
        """Show a message, and store it."""
        ...

    def log(self, text: str) -> None:
        """Store a message without showing it."""
        ...

    def row(self, kind: RowKind, row: Mapping[str, float]) -> None:
        """Write a row of metrics with columns of `glm46.engine.observe.metrics`. Collective for the kind ``train``, to
        which an observer may add columns."""
        ...

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Set the phase of the run inside the context."""
        ...

    def step_begins(self, step: int) -> None:
        """Prepare to profile the next step, if it is due."""
        ...

    def requests_profile(self) -> bool:
        """True once on a rank where a user has requested a profile."""
        ...

    def profile_after(self, step: int) -> None:
        """Profile the steps after this one, because some rank has a request."""
        ...

    def step_trained(self, step: int, tokens: int, *, was_skipped: bool, is_finite: bool, loss: float | None) -> None:
        """Count a step.

        Args:
            tokens: tokens since the start of the run.
            is_finite: True if loss and gradient are finite.
            loss: mean loss; None if the task's loss has no level.
        """
        ...

    def step_ends(self, step: int, tokens: int, half_pairs: int) -> None:
        """Write the profile of a step of this many tokens and pairs, see `batch_flops`, if it was due. Collective."""
        ...

    def steps_end(self) -> None:
        """Prepare for the last messages: no further step follows."""
        ...

    def saved(self, step: int) -> None:
        """Record that the checkpoint of a step is complete."""
        ...

    def save_failed(self) -> None:
        """Record that a checkpoint could not be saved."""
        ...

    def has_lost_folder(self) -> bool:
        """True on a rank that has found its dump folder deleted or renamed."""
        ...

    def flush(self) -> None:
        """Wait until all rows and messages so far are in their files."""
        ...
