"""What every section of the TOML file has in common, and the one type that several sections share."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A table of the TOML file: frozen, strict, and it knows no key that it does not document.

    The string under each field is its documentation: ``python -m glm46 schema`` and ``train --help`` print it.
    A boolean is never a number, a string is never parsed into one, and no number is infinite or NaN, because a typing
    slip must not train for days.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Needs:
    """Metadata of a field: it has an effect only while another key has a certain value. A key that is stated without
    effect is refused (`rules_effect`)."""

    key: str
    """Key of the same section, or else of the run, dotted. ``[]`` stands for any entry of an array."""

    value: Any = None
    """What the key must be, or several that it may be. Absent: anything but absent, empty, false and 0."""

    above: int | None = None
    """What the key must be greater than, instead of a value."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return value


CountOrAll = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""How many of something, at least one; -1 is all that there are."""


def _no_url(path: str) -> str:
    if "://" in path:
        raise ValueError("is a URL; give a path of this machine: mount the storage, or copy what is there")
    return path


LocalPath = Annotated[str, AfterValidator(_no_url)]
"""A file or folder; as a path a URL would be cut, and name a folder that nobody meant."""


def _ascending(schedule: "float | tuple[tuple[int, float], ...]") -> "float | tuple[tuple[int, float], ...]":
    if isinstance(schedule, tuple):
        tokens = [point[0] for point in schedule]
        if not tokens or tokens != sorted(tokens) or tokens[0] < 0:
            raise ValueError("a schedule is a number, or points [tokens, value] with tokens >= 0 in ascending order")
    return schedule


Schedule = Annotated[float | tuple[tuple[int, float], ...], AfterValidator(_ascending)]
"""A number, or points ``[[tokens, value], ...]`` joined by straight lines over the tokens seen since the start of the
curriculum. Two points with the same token count make a jump; outside the points the nearest value holds."""
