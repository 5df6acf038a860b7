"""Faults of a config, and the format of TOML values in their messages."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Fault:
    """One broken rule and its keys. The loader adds the file or "command line"."""

    keys: tuple[str, ...]
    """Dotted keys that the message is about; a section's name stands for all of its keys. Empty: the command line."""

    message: str
    """``key = value: rule; remedy``, one line."""

    doubtful: tuple[str, ...] = ()
    """More keys whose value is uncertain: an unknown key may be a misspelling of any other key of its section."""


Faults = Iterator[Fault]
"""Faults with their complete messages."""


def nearest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """Return the name most similar to a word, ignoring case; None if no name is similar."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")


def near_values(value: int, most: int, fits: Callable[[int], bool]) -> str:
    """Return a remedy with the nearest numbers below and above a value, from 1 to ``most``, that fit: ``take 2 or 4``.
    It tries each number in turn; where a fitting one can be far away, compute it."""
    sides = range(min(value - 1, most), 0, -1), range(value + 1, most + 1)
    nearest_fitting = [next(filter(fits, side), None) for side in sides]
    fitting = [str(number) for number in nearest_fitting if number]
    return f"take {' or '.join(fitting) or 'another value'}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 step``, ``1,000 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def show(value: object) -> str:
    """Format a value as TOML writes it, truncated to fit into a message, without the password of a URL."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = json.dumps(_PASSWORD.sub("://...@", value), ensure_ascii=False)
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
