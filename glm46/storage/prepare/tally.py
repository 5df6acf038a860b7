"""Counts of the documents that a preparation skips, by reason, with the first places of each reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm46.storage.prepare.readers import with_line

# Places shown per reason in the summary.
MAX_PLACES = 3


@dataclass
class Tally:
    """Counts of unreadable (``bad``) and filtered documents or conversations by reason, and of other events in
    conversations (``noted``), with the first places of each reason."""

    bad: dict[str, list[Any]] = field(default_factory=dict)
    filtered: dict[str, list[Any]] = field(default_factory=dict)
    noted: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def total(cls, tallies: "Mapping[int, Tally]") -> "Tally":
        """Add tallies by the number of their part, so that the sum does not depend on which part finished first."""
        total = cls()
        for _, tally in sorted(tallies.items()):
            total.add(tally)
        return total

    @staticmethod
    def count(table: dict[str, list[Any]], reason: str, places: list[str], number: int = 1) -> None:
        """Add a count to one of the tables."""
        entry = table.setdefault(reason, [0, []])
        entry[0] += number
        entry[1] = (entry[1] + places)[:MAX_PLACES]

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        for name, table in vars(other).items():
            for reason, (number, places) in table.items():
                self.count(getattr(self, name), reason, places, number)

    def skipped(self) -> list[str]:
        """Return a line for each reason for which documents were skipped."""
        return ["skipped, " + line for table in (self.bad, self.filtered) for line in _lines(table)]

    def summary(self) -> str:
        """Return all tables as text, one line for each reason."""
        return "\n".join([*self.skipped(), *_lines(self.noted)])


def _lines(table: dict[str, list[Any]]) -> list[str]:
    return [
        f"{reason}: {number}" + (f", such as {named(places)}" if places else "")
        for reason, (number, places) in table.items()
    ]


def named(places: Sequence[str]) -> str:
    """Return places as text, with line numbers."""
    return ", ".join(map(with_line, places))


def amount(count: float, unit: str) -> str:
    """Format a count with the largest prefix that it reaches: 12 tokens, 3.4 kB, 1.25 M tokens."""
    size, prefix = next(((size, name) for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= size), (1, ""))
    return f"{count / size:.3g} {prefix}{' ' if prefix and unit != 'B' else ''}{unit}"
