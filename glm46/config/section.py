"""The base class of all sections of the TOML file, and the types that several sections share."""

import ast
import inspect
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from glm46.config.faults import show
from glm46.config.hub_address import HubKind, OnHub, is_hub_address
from glm46.config.store_address import is_store_address, store_url


class Removed(NamedTuple):
    """A key that an earlier version had."""

    instead: str
    """What to do instead, at the end of the message about the key."""

    value: Any = ...
    """In the sections that determine what a model computes: the only value that this version computes. Absent: the key
    did not matter for this."""


class Section(BaseModel):
    """A table of the TOML file: frozen, strict, without unknown keys.

    The string under each field is its documentation: ``python -m glm46 schema`` and ``train --help keys`` print it.
    A boolean is never a number, a string is never parsed into a number, and no number is infinite or NaN, so that a
    typing mistake does not start a long run.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    refused: ClassVar[dict[str, str]] = {}
    """Keys that users of other software expect here, and why this section does not have them."""

    removed: ClassVar[dict[str, Removed]] = {}
    """Keys of earlier versions. A TOML file with one is refused, and a stored config is read without it."""

    moved: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions -> their places in this section. A TOML file with one is refused, and a stored config is
    read with the key in its new place."""

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: object) -> None:
        # `python -OO` drops docstrings, which are the documentation of a table here.
        if not cls.__doc__:
            nodes = ast.parse(inspect.getsource(cls)).body
            cls.__doc__ = next(ast.get_docstring(node) for node in nodes if isinstance(node, ast.ClassDef))

    @field_validator("*", mode="before")
    @classmethod
    def _freeze(cls, value: object) -> object:
        return _tuples(value)


def _tuples(value: object) -> object:
    """Convert arrays to tuples: frozen sections hold tuples, and strict mode does not accept a list for one. Refuse
    integers beyond 64 bits, the range of TOML and of counting tensors."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("does not fit into 64 bits; give a smaller number")
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


FORMAT_IS_FOUND = {"load_in_hf": "the folder itself tells its format; remove it"}
"""Value of `Section.refused` for sections with a folder of weights."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return value


CountOrAll = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""A count of at least one; -1 stands for all."""


def is_huggingface(weights: str) -> bool:
    """Return True if weights are in Hugging Face's format: an id of the hub, or a folder with a config.json."""
    return is_hub_address(weights) or Path(weights, "config.json").is_file()


def _no_url(path: str) -> str:
    if "://" in path or is_hub_address(path):
        raise ValueError("is a URL; give a path of this machine: mount the storage, or copy the data")
    return path


LocalPath = Annotated[str, AfterValidator(_no_url)]
"""A file or folder. A URL is refused, because it would be read as the name of a local folder."""


def _path_or_url(path: str) -> str:
    return store_url(path) if is_store_address(path) else _no_url(path)


StoredPath = Annotated[str, AfterValidator(_path_or_url)]
"""A file or folder of this machine, or a URL of an object store."""


def _inside(path: str) -> str:
    if not path or path.startswith("~") or ".." in path.replace("\\", "/").split("/"):
        raise ValueError("must be an absolute path, or one inside job.dump_folder, without ~ or ..; correct it")
    return path


RunFolder = Annotated[LocalPath, AfterValidator(_inside)]
"""A folder of one run: an absolute path, or one under job.dump_folder. Retention deletes step folders in it."""


def _run_folder_or_url(path: str) -> str:
    return store_url(path) if is_store_address(path) else _inside(_no_url(path))


StoredRunFolder = Annotated[str, AfterValidator(_run_folder_or_url)]
"""A folder of one run like `RunFolder`, or the URL of a prefix of an object store."""


def _distinct(entries: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    for entry in entries:
        if entries.count(entry) > 1:
            raise ValueError(f"{show(entry)} is there twice; remove one")
    return entries


DISTINCT = AfterValidator(_distinct)
"""Metadata of an array whose entries differ."""


def real_folder(path: str | None) -> Path | None:
    """Return the absolute path of a folder without links, so that `step-000100` has its name where `latest` links to
    it; None for None. A loop of links stays in the path, and the first use of the folder reports it."""
    return None if path is None else Path(os.path.realpath(path))


def _on_hub(kind: HubKind) -> AfterValidator:
    def check(path: str) -> str:
        if is_store_address(path) and kind != "dataset":
            return store_url(path)
        if not is_hub_address(path):
            return _no_url(path)
        if OnHub(kind).parse(path) is None:
            raise ValueError(f"not an id of the hub; give {OnHub(kind).form}")
        return path

    return AfterValidator(check)


ModelFolder = Annotated[str, _on_hub("model")]
"""A folder of this machine, a model of the hub, or a URL of an object store. The field also has `OnHub`."""
DataFile = Annotated[str, _on_hub("dataset")]
"""A file of this machine, or a file of a data set of the hub. The field also has `OnHub`, or its reader takes ids."""

_NumberOrPoints: TypeAlias = float | tuple[tuple[int, float], ...]


def _check_schedule(value: object, validate: ValidatorFunctionWrapHandler) -> _NumberOrPoints:
    # One message instead of one for each branch of the union.
    try:
        schedule: _NumberOrPoints = validate(value)
        tokens = [point[0] for point in schedule] if isinstance(schedule, tuple) else [0]
        if tokens and tokens == sorted(tokens) and tokens[0] >= 0:
            return schedule
    except ValidationError:
        pass
    raise ValueError(
        "a schedule is a finite number, or points [[tokens, value], ...] with integer tokens >= 0 in ascending order"
    )


Schedule = Annotated[_NumberOrPoints, WrapValidator(_check_schedule)]
"""A number, or points ``[[tokens, value], ...]`` joined by straight lines over the tokens seen since the start of the
curriculum. Two points with the same token count make a jump; outside the points the nearest value holds."""


def every_value(minimum: float, *, is_exclusive: bool = False) -> AfterValidator:
    """Return the metadata of a schedule whose values are at least, or greater than, a minimum."""

    def check(schedule: Schedule) -> Schedule:
        for value in values_of(schedule):
            if value < minimum or (is_exclusive and value == minimum):
                point = f"value {show(value)} " if isinstance(schedule, tuple) else ""
                raise ValueError(f"{point}must be {'greater than' if is_exclusive else 'at least'} {minimum}; raise it")
        return schedule

    return AfterValidator(check)


def values_of(schedule: Schedule | None) -> tuple[float, ...]:
    """Return all values of a schedule."""
    if schedule is None:
        return ()
    return tuple(value for _, value in schedule) if isinstance(schedule, tuple) else (schedule,)
