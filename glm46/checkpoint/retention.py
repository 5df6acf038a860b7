"""Which checkpoints may go. A pure function, so that its promise can be tested over any history."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Which of the complete checkpoints stay. The newest one always does."""

    keep_latest_k: int
    """How many of the newest; 0 keeps all."""
    keep_every: int = 0
    """Every step that is a multiple of it, in steps; 0: none for that reason."""
    keep_best_k: int = 0
    """How many of those with the lowest validation loss; 0: none for that reason."""


def steps_to_remove(
    complete: Mapping[int, float | None], rule: Retention, in_use: Collection[int] = (), doubtful: Collection[int] = ()
) -> list[int]:
    """The steps to delete after a save, oldest first.

    Args:
        complete: step to validation loss (None: not measured) of the complete checkpoints. Others are not to be given:
            they are neither counted nor removed.
        in_use: steps that stay whatever their age, such as the one the run started from.
        doubtful: steps saved while steps were being skipped. The newest of the others stays, whatever its age.
    """
    if rule.keep_latest_k == 0:
        return []
    steps = sorted(complete)
    # A loss that is not a number compares false with everything: such a step is never among the best.
    measured = sorted((loss, -step) for step, loss in complete.items() if loss is not None and loss == loss)
    stay = {*steps[-rule.keep_latest_k :], *in_use}
    stay |= {-negative for _, negative in measured[: rule.keep_best_k]}
    stay |= set([step for step in steps if step not in doubtful][-1:])
    if rule.keep_every:
        stay |= {step for step in steps if step % rule.keep_every == 0}
    return [step for step in steps if step not in stay]
