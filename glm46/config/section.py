"""The base class of all sections of the TOML file, and the types that several sections share."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A table of the TOML file: frozen, strict, without unknown keys.

    The string under each field is its documentation: ``python -m glm46 schema`` and ``train --help`` print it.
    A boolean is never a number, a string is never parsed into a number, and no number is infinite or NaN, so that a
    typing mistake does not start a long run.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Needs:
    """Metadata of a field that has an effect only if another key has a certain value. A key that is set without effect
    is refused (`rules_effect`)."""

    key: str
    """Dotted key of the same section, or else of the run. ``[]`` stands for any entry of an array."""

    value: Any = None
    """The value that the key must have, or a tuple of allowed values. Absent: anything but absent, empty, false and
    0."""

    above: int | None = None
    """Lower bound of the key, exclusive, instead of a value."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return value


CountOrAll = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""A count of at least one; -1 stands for all."""


def _no_url(path: str) -> str:
    if "://" in path:
        raise ValueError("is a URL; give a path of this machine: mount the storage, or copy the data")
    return path


LocalPath = Annotated[str, AfterValidator(_no_url)]
"""A file or folder. A URL is refused, because it would be read as the name of a local folder."""


def _ascending(schedule: "float | tuple[tuple[int, float], ...]") -> "float | tuple[tuple[int, float], ...]":
    if isinstance(schedule, tuple):
        tokens = [point[0] for point in schedule]
        if not tokens or tokens != sorted(tokens) or tokens[0] < 0:
            raise ValueError("a schedule is a number, or points [tokens, value] with tokens >= 0 in ascending order")
    return schedule


Schedule = Annotated[float | tuple[tuple[int, float], ...], AfterValidator(_ascending)]
"""A number, or points ``[[tokens, value], ...]`` joined by straight lines over the tokens seen since the start of the
curriculum. Two points with the same token count make a jump; outside the points the nearest value holds."""
