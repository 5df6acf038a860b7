"""The hang report: finds the rank that blocks the others from the collectives that each rank has started."""

import json
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from glm46.compat import WAITING, flight_recorder_json

Answers = dict[int, dict[str, Any]]
"""By rank: operation, step, stack, and collectives: by process group [number of the last one started, its name]."""

_FRAMES_SHOWN = 3
_RANKS_SHOWN = 8
"""Of the culprits, and of the ranks that wait; verdict.json names all culprits."""


def collectives_here() -> tuple[dict[str, Any], str]:
    """This rank's last collective in each process group, and the flight recorder's content.

    Returns:
        ``{group name: [number, operation]}``, empty if the recorder has another format than that of torch 2.13, and
        JSON text ('' without a flight recorder).
    """
    text = flight_recorder_json()
    if not text:
        return {}, ""
    last: dict[str, Any] = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        for entry in json.loads(text).get("entries", []):
            group = entry["process_group"][0]
            if not entry.get("is_p2p") and entry["collective_seq_id"] >= last.get(group, [0])[0]:
                last[group] = [entry["collective_seq_id"], entry["profiling_name"]]
    return last, text


def innermost_frames(frame: FrameType | None) -> list[str]:
    """The innermost frames of a thread, ``file:line function``, innermost first."""
    frames = []
    while frame is not None and len(frames) < _FRAMES_SHOWN:
        code = frame.f_code
        if code is not WAITING:  # skip the frame of compat that wraps torch's
            frames.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return frames


def find_culprits(answers: Answers, world_size: int) -> list[int]:
    """The ranks that block the others.

    These are the ranks without an answer, if any. Otherwise, in each process group, the ranks that have started the
    most collectives wait for those that have started fewer; the culprits are ranks that others wait for and that wait
    for no rank. If there are none, the culprits are the ranks whose innermost frame is not torch's.
    """
    unanswered = sorted(set(range(world_size)) - answers.keys())
    if unanswered:
        return unanswered
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
    return culprits or sorted(rank for rank, a in answers.items() if a["stack"] and "torch/" not in a["stack"][0])


def describe_hang(
    answers: Answers, culprits: list[int], hosts: Mapping[int, str], stalled_seconds: float, folder: str
) -> str:
    """The message for the user: the culprits, and where the other ranks wait."""
    lines = [f"no progress for {stalled_seconds:.0f} s; the run is aborted. Stacks of all ranks: {folder}"]
    for rank in culprits[:_RANKS_SHOWN]:
        host = hosts.get(rank, "an unknown host")
        if rank not in answers:
            cause = "its process is stopped, its interpreter is blocked, or its host is unreachable"
            lines.append(f"  rank {rank} on {host} does not answer: {cause}")
            continue
        answer = answers[rank]
        lines.append(
            f"  rank {rank} on {host} is blocking the others: {answer['operation']}, step {answer['step']}, in "
            + " < ".join(answer["stack"])
        )
    if len(culprits) > _RANKS_SHOWN:
        lines.append(f"  and {len(culprits) - _RANKS_SHOWN} more like these")
    waiting = {rank: answers[rank] for rank in answers.keys() - set(culprits)}
    for rank, answer in sorted(waiting.items())[:_RANKS_SHOWN]:
        last = max(answer["collectives"].values(), default=None)
        known = f", after {last[1]} number {last[0]}" if last else ""
        host = hosts.get(rank, "an unknown host")
        lines.append(f"  rank {rank} on {host} waits: {answer['operation']}, step {answer['step']}{known}")
    if len(waiting) > _RANKS_SHOWN:
        lines.append(f"  and {len(waiting) - _RANKS_SHOWN} more")
    lines.append(
        "If it was only slow: raise comm.init_timeout_seconds, the limit of the first steps, or comm.hang_seconds, the "
        "least limit of later ones."
    )
    return "\n".join(lines)
