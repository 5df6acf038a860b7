"""Rules in the metadata of a field, given with `Annotated`. `rules_fields` checks them.

Each rule is between the field and another key: a dotted key of the same section, or else of the whole config. ``[]`` in
it stands for any entry of an array. Both have the values of presets. A key without effect (`Needs`) is not checked, and
counts as absent for the rules of other keys.

A value is *on* if it is anything except absent, empty, false and 0. A schedule is on if one of its values is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from glm46.config.faults import near_values, show

Values: TypeAlias = Any
"""The values that a rule asks for: one, or a tuple. An array matches if one of its entries does. None asks for any
value that is on."""


class Place(NamedTuple):
    """A field in a config, for its rules."""

    key: str
    """Dotted key."""
    value: Any
    rules: Sequence["FieldRule"]
    """All rules of the field."""
    whole_key: Callable[[str], str]
    """Returns the dotted key from the root that the key of a rule stands for."""
    find: Callable[[str], list[Any]]
    """Returns the values of a dotted key from the root; an empty list if the key has no effect by its own `Needs`. Keys
    with ``[]``, and keys inside a table without effect, count as having one."""

    def values(self, key: str) -> list[Any]:
        """Return the values of the key of a rule."""
        return self.find(self.whole_key(key))

    def has(self, key: str, values: Values = None) -> bool:
        """Return True if the key of a rule has one of some values."""
        return any(has_value(value, values) for value in self.values(key))


class FieldRule:
    """A rule of a field. As text it is a sentence for the documentation of the field."""

    key: str

    def broken(self, place: Place) -> str | None:
        """Return rule and remedy, for the message about a field that breaks it; None if it does not. See
        `rules.fault`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Needs(FieldRule):
    """The field has an effect only if another key has one of some values. All `Needs` of a field must hold. They look
    at the value of the other key, not at whether it has an effect: a key behind two switches names both.

    A key that is set without effect is refused, except where the command line changes the other key: `load_config` then
    gives it its default. `dump_config` skips keys without effect.
    """

    key: str
    value: Values = None

    above: int | None = None
    """Lower bound of the key, exclusive, instead of values."""

    unless: str = ""
    """Key that, if it is on, gives the field an effect in any case."""

    absent: str = ""
    """Instead of values: the key must be absent. The text is the reason, written after the name of the key."""

    def __str__(self) -> str:
        if self.absent:
            return f"Not with {self.key}."
        bound = "" if self.above is None else f" above {self.above}"
        return f"Only with {self.key}{bound}{_equal(self.value)}{f' or {self.unless}' if self.unless else ''}."

    def suffices(self, value: object) -> bool:
        """Return True if a value of the other key gives the field an effect."""
        if self.absent:
            return value is None
        if self.above is not None:
            return isinstance(value, int) and value > self.above
        return has_value(value, self.value)

    def remedy(self, key: str, values: Sequence[Any]) -> str:
        """Return the other key with a value that gives the field an effect; empty if the key must be absent.

        Args:
            key: the other key from the root.
            values: what it has.
        """
        if self.absent:
            return ""
        if self.value is not None:
            return f"{key}{_equal(self.value)}{f' or {self.unless}' if self.unless else ''}"
        if values and values[0] is False:
            return f"{key} = true"
        return f"{key} above {self.above or 0}" if self.above is not None or 0 in values else key

    def broken(self, place: Place) -> None:
        """Return None: `rules_fields.idle_keys` finds the keys without effect."""


@dataclass(frozen=True)
class Excludes(FieldRule):
    """The field is not possible where another key has one of some values."""

    key: str
    value: Values = None

    when: Values = None
    """Values of the field that are not possible."""

    unless: str = ""
    """Key that, if it is on, makes them possible."""

    reason: str = ""

    remedy: str = ""
    """Absent: switch the field off."""

    def __str__(self) -> str:
        subject = "Not possible" if self.when is None else f"{_listed(self.when)} is not possible"
        return f"{subject} with {self.key}{_equal(self.value)}{f' without {self.unless}' if self.unless else ''}."

    def broken(self, place: Place) -> str | None:
        """Return the fault of a value that another key makes impossible."""
        is_possible = not has_value(place.value, self.when) or not place.has(self.key, self.value)
        if is_possible or (self.unless and place.has(self.unless)):
            return None
        because = f", {self.reason}" if self.reason else ""
        return f"is not possible with `{place.whole_key(self.key)}`{because}; {self.remedy or _opposite(place)}"


@dataclass(frozen=True)
class Requires(FieldRule):
    """The field needs another key that is on."""

    key: str

    when: Values = None
    """Values of the field that need it."""

    unless: tuple[str, ...] = ()
    """Keys of which one that is on is enough."""

    remedy: str = ""
    """Absent: set the key."""

    def __str__(self) -> str:
        subject = "Requires" if self.when is None else f"{_listed(self.when)} requires"
        return f"{subject} {' or '.join((self.key, *self.unless))}."

    def broken(self, place: Place) -> str | None:
        """Return the fault of a missing key."""
        if not has_value(place.value, self.when) or any(map(place.has, (self.key, *self.unless))):
            return None
        other = place.whole_key(self.key)
        return f"needs {other}, which is absent or has no effect; {self.remedy or f'set {other}'}"


@dataclass(frozen=True)
class AtMost(FieldRule):
    """The field is at most as large as another key, in an array as its smallest entry. Both are integers."""

    key: str

    is_exclusive: bool = False
    """True if it must be smaller."""

    remedy: str = ""
    """Absent: lower the field, or raise the other key."""

    def __str__(self) -> str:
        return f"{'Less than' if self.is_exclusive else 'At most'} {self.key}."

    def broken(self, place: Place) -> str | None:
        """Return the fault of a larger value."""
        margin = 1 if self.is_exclusive else 0
        limit = min((value - margin for value in place.values(self.key) if value is not None), default=None)
        if place.value is None or limit is None or place.value <= limit:
            return None
        other = place.whole_key(self.key)
        bound = "less than" if self.is_exclusive else "at most"
        return f"must be {bound} `{other}`; {self.remedy or f'take {limit}, or raise {other}'}"


@dataclass(frozen=True)
class Divides(FieldRule):
    """The field, a number of ranks, divides another key. One rank divides nothing, so 1 is always possible."""

    key: str

    times: int | str = 1
    """Factor of the field, or a key that has it: the product divides the other key, unless the field is 1."""

    def __str__(self) -> str:
        return f"{'Divides' if self.times == 1 else f'Its product with {self.times} divides'} {self.key}."

    def is_kept(self, place: Place, number: int) -> bool:
        """Return True if a number divides the other key."""
        factor = place.values(self.times)[0] if isinstance(self.times, str) else self.times
        return number == 1 or all(size % (number * factor) == 0 for size in place.values(self.key) if size)

    def broken(self, place: Place) -> str | None:
        """Return the fault of a number that does not divide the other key, with the nearest ones that do."""
        if self.is_kept(place, place.value):
            return None
        most = place.values(self.key)[0]
        divisors = [rule for rule in place.rules if isinstance(rule, Divides)]
        near = near_values(place.value, most, lambda number: all(rule.is_kept(place, number) for rule in divisors))
        verb = "must divide" if self.times == 1 else f"{self.times} times it must divide"
        return f"{verb} `{place.whole_key(self.key)}`; {near}"


OF_TEXT = Needs("rl", absent=", which reads prompts")
"""Marks keys about text, which [rl] does not read."""


def choices(values: Values) -> tuple[Any, ...]:
    """Return values as a tuple."""
    return values if isinstance(values, tuple) else (values,)


def has_value(value: object, values: Values) -> bool:
    """Return True if a value, or an entry of an array, is one of some values; if ``values`` is None, if it is on."""
    if values is not None:
        return any(entry in choices(values) for entry in choices(value))
    return any(number for _, number in value) if _has_points(value) else bool(value)


def _has_points(value: object) -> TypeGuard[tuple[tuple[int, float], ...]]:
    """Return True if a value is a schedule of points."""
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)


def _opposite(place: Place) -> str:
    """Return the remedy that switches a field off, or on if it is false."""
    if isinstance(place.value, bool):
        return f"set {place.key} = {show(not place.value)}"
    is_number = isinstance(place.value, (int, float)) or _has_points(place.value)
    return f"set {place.key} = 0" if is_number else f"remove {place.key}"


def _listed(values: Values) -> str:
    return " or ".join(map(show, choices(values)))


def _equal(values: Values) -> str:
    return "" if values is None else f" = {_listed(values)}"
