"""Answers of the ranks at an alarm of the watchdog: where each one is in the collectives of its process groups."""

from typing import Any, NamedTuple

Answers = dict[int, dict[str, Any]]
"""The answer of each rank at an alarm. Its keys:

* operation, step: where the rank is;
* stack: its frames, the innermost first;
* collectives: by process group, the fields of a `GroupPosition`;
* peers (optional): the ranks with which a send or receive has started and not ended;
* is_timed (optional): True if the recorder holds the time at which the GPU started a collective;
* launched (optional): collectives and peers that the host has launched, if the recorder has neither times nor completed
  collectives. Then either timing is off, or the GPU has not started anything; the answers of other ranks show which.
"""


class GroupPosition(NamedTuple):
    """The last collectives of one process group that a rank has entered and completed."""

    number: int
    """Number of the last collective that this rank has entered; 0 if it has not entered any."""
    name: str
    """Name of that collective."""
    completed: int | None = None
    """Number of the last collective that this rank has completed; None if unknown."""
    sizes: list[list[int]] | None = None
    """Input sizes of that collective; None if they may differ between ranks."""

    @property
    def is_inside(self) -> bool:
        """True if this rank is, or may be, in the last collective that it entered: its completion is not recorded."""
        return self.completed is None or self.completed < self.number

    @property
    def is_known_inside(self) -> bool:
        """True if the recorder shows that this rank has not completed the last collective that it entered."""
        return self.completed is not None and self.completed < self.number


def positions_by_group(answers: Answers) -> dict[str, dict[int, GroupPosition]]:
    """Return the positions of the ranks of each process group."""
    groups: dict[str, dict[int, GroupPosition]] = {}
    for rank, answer in answers.items():
        for name, fields in answer["collectives"].items():
            groups.setdefault(name, {})[rank] = GroupPosition(*fields)
    return groups


def resolve(answers: Answers) -> tuple[Answers, bool]:
    """Resolve `launched` in the answers that have it.

    If any rank's collectives are timed, timing is on, and the GPUs of these ranks have not started anything. Otherwise
    timing is off, and the launched collectives count as entered.

    Returns:
        The answers, and True if the collectives of this run are timed.
    """
    is_timed = any(answer.get("is_timed") for answer in answers.values())
    if is_timed:
        return answers, True
    resolved = {}
    for rank, answer in answers.items():
        launched = answer.get("launched", {"collectives": {}, "peers": []})
        collectives = answer["collectives"] | launched["collectives"]
        peers = [*answer.get("peers", []), *launched["peers"]]
        resolved[rank] = answer | {"collectives": collectives, "peers": peers}
    return resolved, False
