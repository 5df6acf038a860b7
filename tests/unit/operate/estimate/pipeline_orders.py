"""The orders in which torch's schedules run micro-batches, and a simulation of them: what bubbles and micro-batches in
flight are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Literal, NamedTuple

from glm46.config.parallelism import ParallelismConfig

Kind = Literal["forward", "backward", "input gradient", "weight gradient"]


class Action(NamedTuple):
    """Work of one micro-batch in one stage; "backward" computes both gradients together."""

    kind: Kind
    stage: int
    micro_batch: int


Order = Sequence[Sequence[tuple[Action, ...]]]
"""For each pipeline rank, its consecutive actions; actions in one tuple overlap, and count as one block."""


class Block(NamedTuple):
    """A time span in which a rank computes."""

    rank: int
    start: float
    stop: float
    actions: tuple[Action, ...]


_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input gradient",
    "BACKWARD_WEIGHT": "weight gradient",
}


def pipeline_order(parallelism: ParallelismConfig, micro_batches: int) -> Order:
    """Return the actions of each rank of the pipeline.

    Raises:
        ValueError: the schedule does not support this number of micro-batches.
    """
    ranks = parallelism.pipeline_parallel_degree
    return _order(parallelism.pipeline_parallel_schedule, ranks, parallelism.stages_per_rank, micro_batches)


@cache
def _order(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Order:
    if name in ("GPipe", "1F1B"):
        return [
            _of_one_stage(rank, micro_batches, micro_batches if name == "GPipe" else ranks - rank)
            for rank in range(ranks)
        ]
    # Imported here: only these schedules need torch.
    from torch.distributed.pipelining.schedules import get_schedule_class

    # What the schedule reads of the stages of a rank; it does not run them.
    stages = [
        SimpleNamespace(
            stage_index=turn * ranks,
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            group=None,
            is_first=not turn,
            is_last=False,
            has_backward=False,
            submod=None,
            device="cpu",
            stage_index_to_group_rank={},
        )
        for turn in range(stages_per_rank)
    ]
    order = get_schedule_class(name)(stages, micro_batches, loss_fn=lambda x, y: x).pipeline_order
    return [
        [
            tuple(
                Action(_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            )
            for action in order[rank]
            if action is not None
        ]
        for rank in range(ranks)
    ]


def _of_one_stage(rank: int, micro_batches: int, ahead: int) -> list[tuple[Action, ...]]:
    """List the actions of GPipe and 1F1B, which have no table: some forwards, then backward and forward in turn."""
    ahead = min(ahead, micro_batches)
    actions: list[tuple[Kind, int]] = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        actions.append(("backward", number))
        if ahead + number < micro_batches:
            actions.append(("forward", ahead + number))
    return [(Action(kind, rank, number),) for kind, number in actions]


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks of a pipeline, in seconds from its start."""

    blocks: list[Block]
    ranks: int

    @property
    def seconds(self) -> float:
        """End of the last rank."""
        return max(block.stop for block in self.blocks)

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(block.stop - block.start for block in self.blocks if block.rank == rank)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks wait, averaged over the ranks."""
        return 1 - sum(map(self.busy, range(self.ranks))) / self.ranks / self.seconds


def simulate(order: Order, cost: Callable[[Kind, int], float], sending: Callable[[int], float] = lambda _: 0.0):
    """Simulate an order of actions: each starts when its rank is free and its input has arrived.

    Args:
        cost: returns the seconds of an action of a stage.
        sending: returns the seconds from the end of a stage's action until the next stage (in backward the previous
            one) has its result, by the lower of the two stages; transfers within a rank take 0.

    Returns:
        A `Timeline`.
    """
    last = max(action.stage for rank in order for block in rank for action in block)
    ready: dict[Action, float] = {}  # when all inputs of the action have arrived
    clocks = [0.0] * len(order)
    next_block = [0] * len(order)
    blocks = []
    done = False
    while not done:
        progress = False
        done = True
        for rank, actions in enumerate(order):
            while next_block[rank] < len(actions):
                block = actions[next_block[rank]]
                if any(not _is_first(action, last) and action not in ready for action in block):
                    done = False
                    break
                start = max(clocks[rank], *(ready.get(action, 0.0) for action in block))
                clocks[rank] = start + sum(cost(action.kind, action.stage) for action in block)
                blocks.append(Block(rank, start, clocks[rank], block))
                for action in block:
                    for following, stage in _enabled(action, last):
                        away = 0.0 if following.stage == action.stage else sending(stage)
                        ready[following] = clocks[rank] + away
                next_block[rank] += 1
                progress = True
        assert progress or done, "the order waits for itself"
    return Timeline(blocks, len(order))


def _is_first(action: Action, last: int) -> bool:
    """True if an action needs no result of another stage."""
    if action.kind == "forward":
        return action.stage == 0
    # Orders run the forward of a stage before its backward, and input gradients before weight gradients.
    return action.kind == "weight gradient" or action.stage == last


def _enabled(action: Action, last: int) -> list[tuple[Action, int]]:
    """Return the actions of other stages that need the result of this one, with the lower of the two stages."""
    kind, stage, micro_batch = action
    if kind == "forward":
        return [(Action(kind, stage + 1, micro_batch), stage)] if stage < last else []
    if kind == "weight gradient" or stage == 0:
        return []
    return [(Action(gradient, stage - 1, micro_batch), stage - 1) for gradient in ("backward", "input gradient")]
