"""Which tensors of an earlier checkpoint a new run takes: by patterns over the names that `checkpoint show` lists."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from glm46.config.checkpoint import Checkpoint
from glm46.config.errors import UserError


def names_left_out(ours: Iterable[str], theirs: Iterable[str], config: Checkpoint) -> frozenset[str]:
    """The names that are not loaded; each is this run's, the checkpoint's, or both.

    A state of the optimizer goes with its weight: one whose weight is not taken would push a weight it never saw.

    Args:
        ours: tensors of this run, of all ranks, generators left out.
        theirs: tensors of the checkpoint, likewise.

    Raises:
        UserError: a pattern that matches no name, or patterns that leave nothing to take.
    """
    names = {*ours, *theirs}
    faults = [
        f"checkpoint.{key}: {pattern!r} matches no tensor of this run or of {config.initial_load_path}; "
        "'python -m glm46 checkpoint show' lists the names"
        for key in ("initial_load_include", "initial_load_exclude")
        for pattern in getattr(config, key)
        if not _matching(names, [pattern])
    ]
    if faults:
        raise UserError(*faults)
    out = _matching(names, config.initial_load_exclude)
    if config.initial_load_include:
        out |= names - _matching(names, config.initial_load_include)
    if config.initial_load_model_only:
        out |= {name for name in names if not name.startswith("model.")}
    weights = tuple(f"optimizer.{name.removeprefix('model.')}." for name in out if name.startswith("model."))
    out |= {name for name in names if name.startswith(weights)}
    if out == names:
        raise UserError(
            f"checkpoint.initial_load_include, initial_load_exclude: nothing of {config.initial_load_path} is taken; "
            "loosen them, or take initial_load_path out"
        )
    return frozenset(out)


def _matching(names: set[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}
