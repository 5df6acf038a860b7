"""One fault of a configuration, and how values of TOML are shown in its message."""

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Fault:
    """What is wrong with some keys, without saying where they were written: the loader knows that."""

    keys: tuple[str, ...]
    """Dotted keys that the message is about; a section's name stands for all of its keys. Empty: the command line."""

    message: str
    """``key = value: rule; remedy``, one line."""

    doubtful: tuple[str, ...] = ()
    """More keys whose value is in doubt by it: an unknown key may have been meant as any other of its section."""


Faults = Iterator[Fault]
"""What a rule yields."""


def nearest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """The name that a word was probably meant to be, whatever its case; None if none is near."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 step``, ``1,000 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def show(value: Any) -> str:
    """A value as TOML writes it, cut to a length that fits in a message."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def show_type(value: Any) -> str:
    """The name that TOML gives to the type of a value, with its article."""
    # bool before int and datetime before date: Python derives one from the other.
    for kind, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a float"),
        (str, "a string"),
        ((list, tuple), "an array"),
        (dict, "a table"),
        ((datetime, date, time), "a date or time"),
    ):
        if isinstance(value, kind):
            return name
    raise AssertionError(f"TOML has no type {type(value).__name__}")
