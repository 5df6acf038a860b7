"""Hangs of random programs on simulated ranks: the hang report names the rank that is stuck, or no rank.

A simulated rank has a host that launches operations in order, and a GPU that runs them on two streams, as NCCL does.
One rank is stuck: its host does not launch an operation, or its GPU does not start one. The others run until they wait.
The final state is written as flight recorders write it, with timing and without, and the hang report judges it.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from glm46.engine.reliability import hang_report
from glm46.engine.reliability.hang_report import Answers, collectives_here, describe_hang, find_culprits

WAITING_STACK = ["glm46/engine/training/rank_sums.py:57 to_host waits for the device"]
MAIN, SIDE = "main", "side"


@dataclass
class Operation:
    """A collective, a send or receive, or a wait of the host for the device."""

    axis: str = ""
    """Axis of the mesh whose group runs it; "" for a wait of the host."""
    stream: str = MAIN
    peer: int = -1
    """Rank to send to or to receive from; -1 for a collective."""
    is_send: bool = False
    key: str = ""
    """Equal for a send and its receive; "" for a collective."""


@dataclass
class Fault:
    """The rank that is stuck."""

    rank: int
    index: int
    """Index of the operation that is not launched, or whose kernel does not start."""
    is_on_host: bool
    """True: the host does not launch it. False: the GPU does not start it, nor later ones of the main stream."""


@dataclass
class Simulation:
    """All ranks; after `run`, in the state in which no rank can continue."""

    groups: dict[str, list[list[int]]]
    """Axis -> the ranks of each group."""
    programs: dict[int, list[Operation]]
    """Rank -> its operations, in the order in which its host launches them."""
    fault: Fault
    launched: dict[int, int] = field(default_factory=dict)
    """Rank -> number of operations that its host has launched or waited for."""
    started: set[tuple[int, int]] = field(default_factory=set)
    """(rank, index) of the operations that a GPU has started; the same for `completed`."""
    completed: set[tuple[int, int]] = field(default_factory=set)

    def members(self, rank: int, axis: str) -> list[int]:
        return next(members for members in self.groups[axis] if rank in members)

    def run(self) -> None:
        """Launch, start and complete operations until nothing changes."""
        self.launched = dict.fromkeys(self.programs, 0)
        is_running = True
        while is_running:
            is_running = False
            for rank, program in self.programs.items():
                while self._can_launch(rank):
                    self.launched[rank] += 1
                    is_running = True
                for index in range(self.launched[rank]):
                    if program[index].axis and (rank, index) not in self.started and self._can_start(rank, index):
                        self.started.add((rank, index))
                        is_running = True
            for rank, index in sorted(self.started - self.completed):
                if self._partners(rank, index) <= self.started:
                    self.completed.add((rank, index))
                    is_running = True

    def _can_launch(self, rank: int) -> bool:
        index = self.launched[rank]
        if index == len(self.programs[rank]):
            return False
        if self.fault.is_on_host and (rank, index) == (self.fault.rank, self.fault.index):
            return False
        if self.programs[rank][index].axis:
            return True
        # The host waits for all operations before.
        before = [i for i, operation in enumerate(self.programs[rank][:index]) if operation.axis]
        return all((rank, i) in self.completed for i in before)

    def _can_start(self, rank: int, index: int) -> bool:
        program = self.programs[rank]
        stream = program[index].stream
        is_faulty_gpu = rank == self.fault.rank and not self.fault.is_on_host
        if is_faulty_gpu and stream == MAIN and index >= self.fault.index:
            return False
        before = [i for i in range(index) if program[i].axis and program[i].stream == stream]
        return all((rank, i) in self.completed for i in before)

    def _partners(self, rank: int, index: int) -> set[tuple[int, int]]:
        """(rank, index) of the operations that must have started before this one completes."""
        operation = self.programs[rank][index]
        if operation.key:
            program = self.programs[operation.peer]
            return {(operation.peer, i) for i, other in enumerate(program) if other.key == operation.key}
        number = self._number(rank, index)
        partners = set()
        for member in self.members(rank, operation.axis):
            program = self.programs[member]
            same = [i for i, other in enumerate(program) if other.axis == operation.axis and not other.key]
            partners.add((member, same[number - 1]))
        return partners

    def _number(self, rank: int, index: int) -> int:
        """Number of a collective among those of its axis, from 1; a send or receive has that of the last collective."""
        program = self.programs[rank][: index + 1]
        axis = program[-1].axis
        return sum(operation.axis == axis and not operation.key for operation in program)

    def recorder(self, rank: int, *, is_timed: bool, used_groups: bool) -> dict:
        """The NCCL flight recorder of one rank.

        Args:
            is_timed: True if the recorder knows which operations the GPU has started.
            used_groups: True if each group has completed a collective before the program.
        """
        config = {}
        entries = []
        for number, axis in enumerate(self.groups):
            members = self.members(rank, axis)
            config[str(number)] = {"name": axis, "desc": "mesh", "ranks": json.dumps(members)}
            if used_groups:
                entries.append(self._entry(axis, "nccl:all_reduce", 1, "completed", is_timed))
        for index in range(self.launched[rank]):
            operation = self.programs[rank][index]
            if not operation.axis:
                continue
            state = "scheduled"
            if (rank, index) in self.completed:
                state = "completed"
            elif is_timed and (rank, index) in self.started:
                state = "started"
            name = "nccl:all_reduce"
            if operation.key:
                members = self.members(rank, operation.axis)
                arrow = "send {}->{}" if operation.is_send else "recv {}<-{}"
                name = "nccl:" + arrow.format(members.index(rank), members.index(operation.peer))
            number = self._number(rank, index) + used_groups
            entries.append(self._entry(operation.axis, name, number, state, is_timed) | {"p2p_seq_id": index})
        return {"pg_config": config, "entries": entries, "version": "2.10"}

    @staticmethod
    def _entry(axis: str, name: str, number: int, state: str, is_timed: bool) -> dict:
        return {
            "collective_seq_id": number,
            "input_sizes": [[8]],
            "is_p2p": "->" in name or "<-" in name,
            "p2p_seq_id": 0,
            "process_group": [axis, "mesh"],
            "profiling_name": name,
            "retired": state == "completed",
            "state": state,
            "time_discovered_started_ns": 5 * (is_timed and state != "scheduled"),
        }

    def answers(self, monkeypatch: pytest.MonkeyPatch, *, is_timed: bool, used_groups: bool) -> Answers:
        """What each rank answers at the alarm."""
        answers = {}
        for rank in self.programs:
            trace = {"nccl": json.dumps(self.recorder(rank, is_timed=is_timed, used_groups=used_groups))}
            monkeypatch.setattr(hang_report, "flight_recorders", lambda trace=trace: trace)
            answer = {"operation": "training step", "step": 1, "stack": WAITING_STACK} | collectives_here()[0]
            answers[rank] = json.loads(json.dumps(answer))  # as it goes through the store
        return answers


def mesh(size: int, inner: int) -> dict[str, list[list[int]]]:
    """Groups of an inner axis (neighbouring ranks), an outer axis, and all ranks."""
    rows = [list(range(start, start + inner)) for start in range(0, size, inner)]
    columns = [list(range(start, size, inner)) for start in range(inner)]
    return {"inner": rows, "outer": columns, "all": [list(range(size))]}


def random_program(generator: random.Random) -> list[Operation]:
    """Collectives of tensor parallelism ("inner") and of FSDP ("outer"), which may run ahead on a stream of its own."""
    # All collectives of a group run on one stream, as those of an NCCL communicator do.
    outer_stream = generator.choice([MAIN, SIDE])
    program = []
    for _ in range(generator.randint(4, 14)):
        axis = generator.choice(["inner", "inner", "outer", "all"])
        program.append(Operation(axis, outer_stream if axis == "outer" else MAIN))
        if generator.random() < 0.15:
            program.append(Operation())
    return [*program, Operation()]


def pipeline_programs(stages: int, width: int, batches: int) -> dict[int, list[Operation]]:
    """GPipe with stages of `width` ranks: each micro-batch forward, then backward, with a collective in each stage; a
    collective of all ranks at the end."""
    programs: dict[int, list[Operation]] = {}
    for rank in range(stages * width):
        program: list[Operation] = []
        before = rank - width
        after = rank + width
        for direction, source, target in (("forward", before, after), ("backward", after, before)):
            for batch in range(batches):
                if 0 <= source < stages * width:
                    key = f"{direction} {batch} {source} {rank}"
                    program.append(Operation("outer", peer=source, key=key))
                program.append(Operation("inner"))
                if 0 <= target < stages * width:
                    key = f"{direction} {batch} {rank} {target}"
                    program.append(Operation("outer", peer=target, is_send=True, key=key))
        programs[rank] = [*program, Operation("all"), Operation()]
    return programs


def verdicts(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[bool, bool], list[int]]:
    """The ranks that the hang report names, by (is_timed, used_groups). They are the stuck rank or nobody."""
    simulation.run()
    size = len(simulation.programs)
    named = {}
    for is_timed in (True, False):
        for used_groups in (True, False):
            answers = simulation.answers(monkeypatch, is_timed=is_timed, used_groups=used_groups)
            culprits = find_culprits(answers, size)
            assert culprits in ([simulation.fault.rank], []), (simulation.fault, is_timed)
            describe_hang(answers, culprits, {}, 9.0, "hang")  # does not raise
            named[is_timed, used_groups] = culprits
    return named


@pytest.mark.parametrize(("size", "inner", "count"), [(8, 2, 150), (8, 4, 50), (64, 8, 12)])
def test_a_stuck_rank_of_a_random_program_is_named_or_nobody(size, inner, count, monkeypatch):
    generator = random.Random(size + inner)
    named_by_case = Counter()
    on_host = 0
    for _ in range(count):
        program = random_program(generator)
        collectives = [index for index, operation in enumerate(program) if operation.axis]
        is_on_host = generator.random() < 0.5
        on_main = [index for index in collectives if program[index].stream == MAIN]
        candidates = collectives if is_on_host else on_main
        if not candidates:
            continue
        fault = Fault(generator.randrange(size), generator.choice(candidates), is_on_host)
        simulation = Simulation(mesh(size, inner), dict.fromkeys(range(size), program), fault)
        for case, culprits in verdicts(simulation, monkeypatch).items():
            named_by_case[case] += bool(culprits)
            # A stuck host is named with timing and without.
            assert culprits or not is_on_host, (program, fault, case)
        on_host += is_on_host
    assert named_by_case[False, True] == on_host, "without timing, a stuck kernel is not named"
    assert named_by_case[False, False] == on_host, "without timing, a stuck kernel is not named"


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize(("stages", "width"), [(4, 2), (8, 8)])
def test_a_stuck_rank_of_a_pipeline_is_named_or_nobody(stages, width, is_on_host, monkeypatch):
    size = stages * width
    generator = random.Random(size)
    programs = pipeline_programs(stages, width, batches=3)
    named = 0
    count = 30 if size == 8 else 4
    for _ in range(count):
        rank = generator.randrange(size)
        index = generator.randrange(len(programs[rank]) - 1)
        simulation = Simulation(mesh(size, width), programs, Fault(rank, index, is_on_host))
        named += bool(verdicts(simulation, monkeypatch)[True, False])
    assert named >= count // 2


def test_a_rank_that_hangs_before_its_first_collective_of_a_group_is_named(monkeypatch):
    """FSDP x TP, first step: rank 51 of 64 compiles for ever before its first collective of tensor parallelism."""
    program = [Operation("outer"), Operation("inner"), Operation("inner"), Operation("all"), Operation()]
    simulation = Simulation(mesh(64, 8), dict.fromkeys(range(64), program), Fault(51, 1, is_on_host=True))
    assert set(map(tuple, verdicts(simulation, monkeypatch).values())) == {(51,)}


def test_a_gpu_that_has_started_nothing_is_named(monkeypatch):
    """Shards in groups of 8 ranks, first step: the first kernel of rank 51 of 64 does not end."""
    program = [Operation("outer"), Operation("outer"), Operation("all"), Operation()]
    simulation = Simulation(mesh(64, 8), dict.fromkeys(range(64), program), Fault(51, 0, is_on_host=False))
    named = verdicts(simulation, monkeypatch)
    assert named[True, False] == named[True, True] == [51]
