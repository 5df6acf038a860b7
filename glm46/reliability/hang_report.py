"""Who the others wait for: read from the collectives that each rank has started, as the flight recorder knows them."""

import json
from collections.abc import Mapping
from types import FrameType
from typing import Any

from glm46.compat import WAITING, flight_recorder_json

Answers = dict[int, dict[str, Any]]
"""By rank: operation, step, place, and collectives: by process group [number of the last one started, its name]."""

_FRAMES_SHOWN = 3


def collectives_here() -> tuple[dict[str, Any], str]:
    """This rank's last collective in each process group, and the whole flight recorder as JSON ('' if there is none).

    Returns:
        ``{group name: [number, operation, ranks of the group]}``.
    """
    text = flight_recorder_json()
    if not text:
        return {}, ""
    record = json.loads(text)
    last: dict[str, Any] = {}
    for entry in record.get("entries", []):
        group = entry["process_group"][0]
        if not entry.get("is_p2p") and entry["collective_seq_id"] >= last.get(group, [0])[0]:
            last[group] = [entry["collective_seq_id"], entry["profiling_name"]]
    return last, text


def place_of(frame: FrameType | None) -> list[str]:
    """The innermost frames of a thread, ``file:line function``, innermost first."""
    places = []
    while frame is not None and len(places) < _FRAMES_SHOWN:
        code = frame.f_code
        if code is not WAITING:  # torch's own frames follow
            places.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return places


def find_culprits(answers: Answers, world_size: int) -> list[int]:
    """The ranks that the others wait for, and that wait for nobody themselves.

    Ranks without an answer are. Else, in each process group, those that have started the most collectives wait for
    those that have started fewer; a rank that others wait for, and that is not waiting, is. Without such a rank, those
    whose innermost frame is not torch's are.
    """
    silent = sorted(set(range(world_size)) - answers.keys())
    if silent:
        return silent
    waits: dict[int, set[int]] = {rank: set() for rank in answers}
    groups = {name for answer in answers.values() for name in answer["collectives"]}
    for name in groups:
        started = {rank: a["collectives"][name][0] for rank, a in answers.items() if name in a["collectives"]}
        most = max(started.values())
        behind = {rank for rank, number in started.items() if number < most}
        for rank in started.keys() - behind:
            waits[rank] |= behind
    awaited = set().union(*waits.values())
    culprits = sorted(rank for rank in awaited if not waits[rank])
    return culprits or sorted(rank for rank, a in answers.items() if a["place"] and "torch/" not in a["place"][0])


def describe_hang(
    answers: Answers, culprits: list[int], hosts: Mapping[int, str], silent_seconds: float, folder: str
) -> str:
    """What a person needs to know, some lines."""
    lines = [f"training has stood still for {silent_seconds:.0f} s; the run is ended. Stacks of all ranks: {folder}"]
    for rank in culprits:
        host = hosts.get(rank, "an unknown host")
        if rank not in answers:
            cause = "its process is stopped, its interpreter is blocked, or its host is out of reach"
            lines.append(f"  rank {rank} on {host} does not answer: {cause}")
            continue
        answer = answers[rank]
        lines.append(
            f"  rank {rank} on {host} holds the others up: {answer['operation']}, step {answer['step']}, in "
            + " < ".join(answer["place"])
        )
    waiting = {rank: answer for rank, answer in answers.items() if rank not in culprits}
    for rank, answer in sorted(waiting.items())[:8]:
        last = max(answer["collectives"].values(), default=None)
        known = f", after {last[1]} number {last[0]}" if last else ""
        place = hosts.get(rank, "an unknown host")
        lines.append(f"  rank {rank} on {place} waits: {answer['operation']}, step {answer['step']}{known}")
    if len(waiting) > 8:
        lines.append(f"  and {len(waiting) - 8} more")
    return "\n".join(lines)
