"""Which checkpoints may go. A pure function, so that its promise can be tested over any history."""

from collections.abc import Collection, Sequence


def steps_to_remove(complete: Sequence[int], *, keep_latest_k: int, in_use: Collection[int] = ()) -> list[int]:
    """The steps to delete after a save, oldest first.

    Args:
        complete: steps of the complete checkpoints; others are neither counted nor removed here.
        keep_latest_k: how many of the newest stay; 0 keeps all.
        in_use: steps that must stay whatever their age, such as the one the run started from.
    """
    if keep_latest_k == 0:
        return []
    return [step for step in sorted(complete)[:-keep_latest_k] if step not in in_use]
