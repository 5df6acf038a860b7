"""Hang report: compares the collectives that each rank has started, and names the rank that blocks the others."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from glm46.compat import flight_recorders
from glm46.compute.distributed.agreement import awaited
from glm46.engine.reliability.hang_answers import Answers, GroupPosition, positions_by_group, resolve
from glm46.engine.reliability.stack_frames import is_waiting

_RANKS_SHOWN = 8
"""Limit for the culprits and for the waiting ranks in the message; verdict.json names all culprits."""
_EQUAL_SIZES = ("allreduce", "all_reduce", "_all_gather_base", "_reduce_scatter_base")
"""Endings of the names of collectives whose input sizes are equal on all ranks."""
_PEER = re.compile(r"send \d+->(\d+)|recv \d+<-(\d+)")


def collectives_here() -> tuple[dict[str, Any], str]:
    """Read the flight recorders of this rank.

    Returns:
        The part of this rank's answer that comes from them: all keys of `Answers` except operation, step and stack. A
        recorder whose format is not the one of torch 2.11 to 2.15 is skipped.
        The recorders themselves as JSON text, an object with a key for each backend; '' without a recorder.
    """
    recorders = flight_recorders()
    answer: dict[str, Any] = {"collectives": {}, "peers": list(awaited)}
    for backend, text in recorders.items():
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            _add_recorder(answer, backend, json.loads(text))
    parts = (f"{json.dumps(backend)}: {text}" for backend, text in recorders.items())
    return answer, "{" + ", ".join(parts) + "}" if recorders else ""


def _add_recorder(answer: dict[str, Any], backend: str, trace: dict[str, Any]) -> None:
    """Add the contents of one recorder to the answer of this rank.

    gloo records a collective when the rank enters it. NCCL records it when the host launches it, and the GPU enters it
    later. With timing the recorder shows whether the GPU has entered it; without timing, each launched collective
    counts as entered.
    """
    entries = trace.get("entries", [])
    is_timed = any(entry["time_discovered_started_ns"] for entry in entries)
    has_completed = any(entry["state"] == "completed" for entry in entries)
    launched, launched_peers = _positions_and_peers(backend, trace, is_timed=False)
    entered, entered_peers = _positions_and_peers(backend, trace, is_timed=True)
    # Either timing is off, or this GPU has not started anything: `resolve` decides by the answers of the other ranks.
    is_timing_unknown = backend == "nccl" and bool(entries) and not is_timed and not has_completed
    if is_timed:
        answer["is_timed"] = True
    if is_timing_unknown:
        answer["launched"] = {"collectives": launched, "peers": launched_peers}
    if is_timed or is_timing_unknown:
        answer["collectives"] |= entered
        answer["peers"] += entered_peers
    else:
        answer["collectives"] |= launched
        answer["peers"] += launched_peers


def _positions_and_peers(
    backend: str, trace: dict[str, Any], *, is_timed: bool
) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the position in each group, as fields of a `GroupPosition`, and the peers, from one recorder.

    Args:
        is_timed: if True, a collective counts as entered when the GPU has started it; else when the host has launched
            it.
    """
    ranks = {config["name"]: json.loads(config["ranks"]) for config in trace.get("pg_config", {}).values()}
    # A group that this rank has not used yet has no entry, but other ranks may already be in its first collective.
    # Only for NCCL: the recorder of gloo does not know the members of a group in all releases.
    unused = GroupPosition(0, "", 0)
    positions: dict[str, GroupPosition] = {}
    if backend == "nccl":
        positions = {_group_key(backend, name, members): unused for name, members in ranks.items() if members}
    batch_states: dict[tuple[str, int], str] = {}
    for entry in trace.get("entries", []):
        group = entry["process_group"][0]
        name = entry["profiling_name"]
        state = entry["state"]
        is_batch = name.endswith("coalesced") and not entry["input_sizes"]
        if is_batch:
            # The sends and receives of a batch are recorded before it, and their own state stays "scheduled".
            batch_states[group, entry["p2p_seq_id"]] = state
        if entry["is_p2p"]:
            continue
        number = entry["collective_seq_id"]
        key = _group_key(backend, group, ranks.get(group))
        position = positions.get(key, unused)
        if state == "completed" or (backend == "gloo" and entry["retired"]):
            position = position._replace(completed=max(position.completed or 0, number))
        # A batch has the number of the collective before it, and must not replace it.
        is_later = number > position.number if is_batch else number >= position.number
        if is_later and not (is_timed and state == "scheduled"):
            sizes = entry["input_sizes"] if name.endswith(_EQUAL_SIZES) else None
            position = position._replace(number=number, name=name, sizes=sizes)
        positions[key] = position
    peers: set[int] = set()
    for entry in trace.get("entries", []):
        group = entry["process_group"][0]
        if not entry["is_p2p"] or not ranks.get(group):
            continue
        state = batch_states.get((group, entry["p2p_seq_id"]), entry["state"])
        if state == "started" or (state == "scheduled" and not is_timed):
            for match in _PEER.finditer(entry["profiling_name"]):
                peers.add(ranks[group][int(match[1] or match[2])])
    return {key: list(position) for key, position in positions.items()}, sorted(peers)


def _group_key(backend: str, name: str, members: list[int] | None) -> str:
    """Return a unique name of a process group. The disjoint groups of one mesh axis may share their name, so their
    first rank is added; it is 0 if the recorder does not know the ranks of a group, like the one of gloo in torch
    2.13."""
    return f"{backend} {name} from rank {min(members or [0])}"


def find_culprits(answers: Answers, world_size: int) -> list[int]:
    """Return the ranks that block the others; an empty list if the answers do not show which ones.

    The first rule that names a rank decides:

    1. Ranks that did not answer.
    2. Ranks that others wait for, that wait for no rank themselves, and that are not inside a collective, a send or a
       receive: a rank inside one also waits, even if it is not known for which rank. But if all other ranks wait for
       it, there is no rank that it could wait for: it is inside a collective that the others never enter.
       `_waits_for` returns which ranks wait for which.
    3. If whole groups are inside one collective (`_stuck`): the ranks that run another collective than most of their
       group, otherwise the one rank that all these groups have in common.
    4. Without such groups: ranks whose innermost frame is not torch's and does not wait for the device.

    Rules 2 to 4 never name more than half of the ranks, except in a run of one rank.
    """
    unanswered = sorted(set(range(world_size)) - answers.keys())
    if unanswered:
        return unanswered
    answers, is_timed = resolve(answers)
    waits = _waits_for(answers)
    stuck = _stuck(answers)
    awaited_ranks = set().union(*waits.values())
    culprits = []
    for rank in sorted(awaited_ranks):
        may_wait = _is_inside_any(answers[rank]) and len(_blocked_by(rank, waits)) < world_size - 1
        if not waits[rank] and not may_wait:
            culprits.append(rank)
    if not culprits and stuck:
        culprits = _culprits_of_stuck(stuck, is_timed)
    elif not culprits:
        culprits = sorted(
            rank for rank, answer in answers.items() if answer["stack"] and not is_waiting(answer["stack"][0])
        )
    if 2 * len(culprits) > world_size > 1:
        return []
    return culprits


def _waits_for(answers: Answers) -> dict[int, set[int]]:
    """Return the ranks that each rank waits for.

    In a process group, the ranks that have entered the most collectives and may still be in the last one wait for the
    ranks that have entered fewer. A rank that sends or receives waits for its peer until the peer has also started.
    """
    waits: dict[int, set[int]] = {rank: set() for rank in answers}
    for positions in positions_by_group(answers).values():
        last_number = max(position.number for position in positions.values())
        late = {rank for rank, position in positions.items() if position.number < last_number}
        for rank, position in positions.items():
            if rank not in late and position.is_inside:
                waits[rank] |= late
    for rank, answer in answers.items():
        waits[rank] |= {peer for peer in answer.get("peers", []) if rank not in answers[peer].get("peers", [])}
    return waits


def _blocked_by(rank: int, waits: dict[int, set[int]]) -> set[int]:
    """Return the ranks that wait for a rank, directly or through others."""
    blocked: set[int] = set()
    newly_blocked = {rank}
    while newly_blocked:
        direct = {other for other, awaited_ranks in waits.items() if awaited_ranks & newly_blocked}
        newly_blocked = direct - blocked - {rank}
        blocked |= newly_blocked
    return blocked


def _is_inside_any(answer: dict[str, Any]) -> bool:
    """True if a rank is known to be inside a collective, a send or a receive."""
    positions = (GroupPosition(*fields) for fields in answer["collectives"].values())
    return bool(answer.get("peers")) or any(position.is_known_inside for position in positions)


def _stuck(answers: Answers) -> list[dict[int, GroupPosition]]:
    """Return the positions of each group whose ranks are all known to be inside the same collective.

    Two ranks that send to and receive from each other count as such a group.
    """
    groups = []
    for positions in positions_by_group(answers).values():
        numbers = {position.number for position in positions.values()}
        is_same = len(positions) > 1 and len(numbers) == 1
        if is_same and all(position.is_known_inside for position in positions.values()):
            groups.append(positions)
    pairs = set()
    for rank, answer in answers.items():
        for peer in answer.get("peers", []):
            if rank < peer and rank in answers[peer].get("peers", []):
                pairs.add((rank, peer))
    exchange = GroupPosition(0, "send and receive", completed=-1)  # below its number: known to be inside
    return groups + [dict.fromkeys(pair, exchange) for pair in sorted(pairs)]


def _culprits_of_stuck(stuck: list[dict[int, GroupPosition]], is_timed: bool) -> list[int]:
    """Return the ranks that run another collective than their peers; else the one rank that all stuck groups share.

    Without timing, a shared rank may itself wait for the rank whose GPU is stuck, so it is not named.
    """
    odd_ranks: set[int] = set()
    for members in stuck:
        odd_ranks |= _odd_ranks(members)
    if odd_ranks:
        return sorted(odd_ranks)
    if not is_timed or len(stuck) == 1:
        return []
    common_ranks = set.intersection(*map(set, stuck))
    return sorted(common_ranks) if len(common_ranks) == 1 else []


def _odd_ranks(members: dict[int, GroupPosition]) -> set[int]:
    """Return the ranks that run another collective than most ranks of their group, or the same with other sizes."""
    kinds = {rank: json.dumps([position.name, position.sizes]) for rank, position in members.items()}
    most_common_kind, count = Counter(kinds.values()).most_common(1)[0]
    if 2 * count <= len(kinds):
        return set()
    return {rank for rank, kind in kinds.items() if kind != most_common_kind}


def describe_hang(
    answers: Answers, culprits: list[int], hosts: Mapping[int, str], stalled_seconds: float, folder: str
) -> str:
    """Return the message for the user: the culprits, and where the other ranks wait."""
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
        for members in _stuck(resolve(answers)[0])[:_RANKS_SHOWN]:
            rank, position = next(iter(members.items()))
            lines.append(
                f"  {len(members)} ranks, the first is {rank}, are all in {position.name}, and it does not end: see "
                "the network between them, and the kernel messages of their hosts"
            )
    waiting = {rank: answers[rank] for rank in answers.keys() - set(culprits)}
    for rank, answer in sorted(waiting.items())[:_RANKS_SHOWN]:
        positions = [GroupPosition(*fields) for fields in answer["collectives"].values()]
        last = max(positions, key=lambda position: position.number, default=GroupPosition(0, ""))
        place = f", after {last.name} number {last.number}" if last.number else ""
        host = hosts.get(rank, "an unknown host")
        lines.append(f"  rank {rank} on {host} waits: {answer['operation']}, step {answer['step']}{place}")
    if len(waiting) > _RANKS_SHOWN:
        lines.append(f"  and {len(waiting) - _RANKS_SHOWN} more")
    lines.append(
        "If it was only slow: raise comm.init_timeout_seconds, the limit of the first steps, or comm.hang_seconds, the "
        "least limit of later ones."
    )
    return "\n".join(lines)
