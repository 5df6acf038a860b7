"""A step of a pipeline in simulated time: the schedule's real order of actions, with the times of each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from glm46.config.parallelism import ParallelismConfig

Kind = Literal["forward", "backward", "input gradient", "weight gradient"]


class Action(NamedTuple):
    """Part of the work of one micro-batch in one stage; "backward" is both of its gradients at once."""

    kind: Kind
    stage: int
    micro_batch: int


Order = Sequence[Sequence[tuple[Action, ...]]]
"""For each pipeline rank, its actions one after the other; those of one tuple overlap, and are counted as one block."""


class Block(NamedTuple):
    """A time in which a rank computes."""

    rank: int
    start: float
    stop: float
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks of a pipeline, in seconds from its start."""

    blocks: list[Block]
    ranks: int

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max(block.stop for block in self.blocks)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(block.stop - block.start for block in self.blocks if block.rank == rank)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks wait, averaged over them."""
        return 1 - sum(map(self.busy, range(self.ranks))) / self.ranks / self.seconds


def simulate(order: Order, cost: Callable[[Kind, int], float], sending: Callable[[int], float] = lambda _: 0.0):
    """Run an order of actions: each begins when its rank is free and its input is there.

    Args:
        cost: seconds of an action of a stage.
        sending: seconds from the end of a stage's action until the next, or in backward the previous, stage has its
            result, by the lower of the two stages; 0 inside a rank.

    Returns:
        A `Timeline`.
    """
    last = max(action.stage for rank in order for block in rank for action in block)
    ready: dict[Action, float] = {}  # when the stage of an action has all that the action reads
    clocks, next_block, blocks = [0.0] * len(order), [0] * len(order), []
    done = False
    while not done:
        progress, done = False, True
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
    """True if an action reads nothing of another stage."""
    if action.kind == "forward":
        return action.stage == 0
    # Orders keep the forward of a stage before its backward, and the gradient of inputs before that of weights.
    return action.kind == "weight gradient" or action.stage == last


def _enabled(action: Action, last: int) -> list[tuple[Action, int]]:
    """The actions of other stages that read the result of this one, and the lower of the two stages."""
    kind, stage, micro_batch = action
    if kind == "forward":
        return [(Action(kind, stage + 1, micro_batch), stage)] if stage < last else []
    if kind == "weight gradient" or stage == 0:
        return []
    return [(Action(each, stage - 1, micro_batch), stage - 1) for each in ("backward", "input gradient")]


def bubble(parallelism: ParallelismConfig, micro_batches: int) -> float:
    """Share of a step in which the ranks of a pipeline wait for each other.

    All stages cost the same, and backward twice as much as forward. Exact for these schedules, except
    InterleavedZeroBubble with fewer micro-batches than ranks, for which it is an upper bound.
    """
    ranks, each = parallelism.pipeline_parallel_degree, parallelism.stages_per_rank
    missing = max(ranks - micro_batches, 0) * (each - 1)
    # Idle time of a rank in forwards of a stage.
    idle = {
        "InterleavedZeroBubble": ranks - 1 + 3 * missing,
        "ZBVZeroBubble": max(ranks - 1, 4 * ranks - 2 - 2 * micro_batches),
        "DualPipeV": 2 * (ranks - 1),
    }.get(parallelism.pipeline_parallel_schedule, 3 * (ranks - 1 + missing))
    return idle / (3 * micro_batches * each + idle) if ranks > 1 else 0.0
