"""The hang report: finds the rank that blocks the others from the collectives that each rank has started."""

import dis
import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from glm46.compat import WAITING, flight_recorders
from glm46.compute.distributed.agreement import awaited

Answers = dict[int, dict[str, Any]]
"""By rank: operation, step, stack, collectives (by process group a `Position`), and peers: the ranks with which a send
or receive has started and not ended; the last two may be absent."""
Position = list[Any]
"""Number of the last collective that this rank has entered, its name, the number of the last one that it has left, and
its sizes where they must be equal; the last two may be absent."""

_FRAMES_SHOWN = 3
_RANKS_SHOWN = 8
"""Of the culprits, and of the ranks that wait; verdict.json names all culprits."""
_WAITS_FOR_DEVICE = " waits for the device"
_DEVICE_WAITS = {"cpu", "item", "tolist", "synchronize"}
"""Methods without arguments that block in C, without a frame of torch, until the GPU has computed their result."""
_EQUAL_SIZES = ("allreduce", "all_reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives whose inputs are alike on all ranks."""
_PEERS = re.compile(r"send \d+->(\d+)|recv \d+<-(\d+)")


def collectives_here() -> tuple[dict[str, Any], str]:
    """The place of this rank in its collectives, and the entries of the flight recorders.

    Returns:
        ``{"collectives": {group: Position}, "peers": [rank]}`` (see `Answers`), without what a recorder holds whose
        format is not that of torch 2.11 to 2.14; and JSON text: an object by backend ('' without a recorder).
    """
    recorders = flight_recorders()
    here: dict[str, Any] = {"collectives": {}, "peers": list(awaited)}
    for backend, text in recorders.items():
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            collectives, peers = _read(backend, json.loads(text))
            here["collectives"] |= collectives
            here["peers"] += peers
    parts = (f"{json.dumps(backend)}: {text}" for backend, text in recorders.items())
    return here, "{" + ", ".join(parts) + "}" if recorders else ""


def _read(backend: str, trace: dict[str, Any]) -> tuple[dict[str, Position], list[int]]:
    """The position in each group and the peers, from one recorder.

    gloo's entries are entered when they are recorded and left when they are retired. NCCL records when the host
    launches; the GPU enters later, which its timing tells: without timing each launched collective counts as entered.
    """
    ranks = {config["name"]: json.loads(config["ranks"]) for config in trace.get("pg_config", {}).values()}
    entries = trace.get("entries", [])
    is_timed = any(entry["time_discovered_started_ns"] for entry in entries)
    last: dict[str, Position] = {}
    batches: dict[tuple[str, int], str] = {}
    for entry in entries:
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        name, state = entry["profiling_name"], entry["state"]
        is_batch = name.endswith("coalesced") and not entry["input_sizes"]
        if is_batch:  # its sends, recorded before it, stay "scheduled"; its number is that of the last collective
            batches[group, entry["p2p_seq_id"]] = state
        if not entry["is_p2p"]:
            # Disjoint groups of a mesh may share a name. The recorder of gloo in torch 2.13 knows no group's ranks.
            key = f"{backend} {group} from rank {min(ranks.get(group) or [0])}"
            of_group = last.setdefault(key, [0, "", 0, None])
            if state == "completed" or (backend == "gloo" and entry["retired"]):
                of_group[2] = max(of_group[2], number)
            if number >= of_group[0] + is_batch and not (is_timed and state == "scheduled"):
                sizes = entry["input_sizes"] if name.endswith(_EQUAL_SIZES) else None
                of_group[:2], of_group[3] = [number, name], sizes
    peers = []
    for entry in (entry for entry in entries if entry["is_p2p"] and ranks.get(entry["process_group"][0])):
        group = entry["process_group"][0]
        state = batches.get((group, entry["p2p_seq_id"]), entry["state"])
        if state == "started" or (state == "scheduled" and not is_timed):
            named = _PEERS.finditer(entry["profiling_name"])
            peers += [ranks[group][int(found[1] or found[2])] for found in named]
    return last, sorted(set(peers))


def innermost_frames(frame: FrameType | None) -> list[str]:
    """The innermost frames of a thread, ``file:line function``, innermost first; the first one says if it waits for the
    device."""
    frames: list[str] = []
    while frame is not None and len(frames) < _FRAMES_SHOWN:
        code = frame.f_code
        if code is not WAITING:  # skip the frame of compat that wraps torch's
            mark = _WAITS_FOR_DEVICE if not frames and _calls(frame) in _DEVICE_WAITS else ""
            frames.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_name}{mark}")
        frame = frame.f_back
    return frames


def _calls(frame: FrameType) -> str | None:
    """The method without arguments that a frame is calling, from its code: its file may be on a disk that hangs."""
    done = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    while done and done[-1].opname in ("CALL", "PRECALL", "CALL_METHOD", "CALL_FUNCTION"):
        done.pop()
    return done[-1].argval if done and done[-1].opname in ("LOAD_METHOD", "LOAD_ATTR") else None


def find_culprits(answers: Answers, world_size: int) -> list[int]:
    """The ranks that block the others; none if what is known cannot tell them from others.

    These are the ranks without an answer, if any. Otherwise, in each process group, the ranks that have entered the
    most collectives and have not left the last one wait for those that have entered fewer, and a rank that sends or
    receives waits for its peer until that has started too. The culprits are ranks that others wait for and that wait
    for no rank. In a collective that all ranks of a group have entered and none has left (`_stuck`), these are the
    few that run another one; else the one rank that is common to all such groups. Without any of these, the culprits
    are the ranks whose innermost frame is neither torch's nor waits for the device. More than half are not accused.
    """
    unanswered = sorted(set(range(world_size)) - answers.keys())
    if unanswered:
        return unanswered
    waits: dict[int, set[int]] = {rank: set() for rank in answers}
    for positions in _groups(answers).values():
        most = max(position[0] for position in positions.values())
        behind = {rank for rank, position in positions.items() if position[0] < most}
        for rank in positions.keys() - behind:
            if _is_inside(positions[rank]):
                waits[rank] |= behind
    for rank, answer in answers.items():
        waits[rank] |= {peer for peer in answer.get("peers", []) if rank not in answers[peer].get("peers", [])}
    stuck = _stuck(answers)
    within = set().union(*stuck)
    awaited = set().union(*waits.values())
    culprits = sorted(rank for rank in awaited - within if not waits[rank])
    if not culprits and stuck:
        odd = {rank for members in stuck for rank in _odd_ones(members)}
        common = set.intersection(*map(set, stuck)) if len(stuck) > 1 else set()
        culprits = sorted(odd) or (sorted(common) if len(common) == 1 else [])
    elif not culprits:
        culprits = sorted(rank for rank, a in answers.items() if a["stack"] and not _waits(a["stack"][0]))
    return culprits if 2 * len(culprits) <= world_size or world_size == 1 else []


def _groups(answers: Answers) -> dict[str, dict[int, Position]]:
    """By process group the positions of its ranks."""
    found: dict[str, dict[int, Position]] = {}
    for rank, answer in answers.items():
        for name, position in answer["collectives"].items():
            found.setdefault(name, {})[rank] = position
    return found


def _is_inside(position: Position) -> bool:
    """True if the last collective is not known to be left."""
    return len(position) < 3 or position[2] < position[0]


def _stuck(answers: Answers) -> list[dict[int, Position]]:
    """The positions of each group whose ranks are known to be all inside the same collective; pairs of ranks that send
    to each other are such groups."""
    groups = [
        positions
        for positions in _groups(answers).values()
        if len(positions) > 1 and len({position[0] for position in positions.values()}) == 1
        if all(len(position) > 2 and _is_inside(position) for position in positions.values())
    ]
    pairs = {
        (rank, peer)
        for rank, answer in answers.items()
        for peer in answer.get("peers", [])
        if rank < peer and rank in answers[peer].get("peers", [])
    }
    return [*groups, *({rank: [0, "send and receive", -1, None] for rank in pair} for pair in sorted(pairs))]


def _odd_ones(members: dict[int, Position]) -> set[int]:
    """The ranks that run another collective than most ranks of a group, or one of other sizes."""
    kinds = {rank: json.dumps([position[1], position[3:]]) for rank, position in members.items()}
    kind, count = Counter(kinds.values()).most_common(1)[0]
    return {rank for rank in kinds if kinds[rank] != kind} if 2 * count > len(kinds) else set()


def _waits(frame: str) -> bool:
    return frame.endswith(_WAITS_FOR_DEVICE) or any(place in frame for place in ("torch/", "distributed/agreement.py"))


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
    if not culprits:
        lines.append("  no rank can be told from the others as the one that blocks them")
        for members in _stuck(answers)[:_RANKS_SHOWN]:
            rank, position = next(iter(members.items()))
            lines.append(
                f"  {len(members)} ranks, the first is {rank}, are all in {position[1]}, and it does not end: see the "
                "network between them, and the kernel messages of their hosts"
            )
    waiting = {rank: answers[rank] for rank in answers.keys() - set(culprits)}
    for rank, answer in sorted(waiting.items())[:_RANKS_SHOWN]:
        last = max(answer["collectives"].values(), key=lambda position: position[0], default=None)
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
