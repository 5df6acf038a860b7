"""The table of pipeline stages against the orders of torch's own schedule objects."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Literal, NamedTuple

import pytest

from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import plan_memory, stage_memory, step_text
from glm46.operate.estimate.plan_sizes import batches_of, bubble, run_flops
from glm46.operate.estimate.rank_parts import in_flight
from glm46.operate.estimate.report import plan_run, plan_text
from glm46.operate.estimate.requirement import describe_requirement, stage_table
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.flops import training_flops
from glm46.run.plan import Plan, resolve_plan
from glm46.run.stages import stages_of_rank

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


CASES = [
    (name, ranks, each, micro_batches)
    for name, schedule in PIPELINE_SCHEDULES.items()
    for ranks in (2, 4, 8)
    for each in ((1,) if schedule.has_one_stage else (2, 3) if name.startswith("Interleaved") else (2,))
    for micro_batches in (ranks, 2 * ranks, 4 * ranks)
    if name != "DualPipeV" or micro_batches >= 2 * ranks
]


def held_by(order, rank: int, weights: dict[int, float], ends: str) -> tuple[int, float]:
    """Of a rank: the most micro-batches in flight, and the most that they weigh."""
    held, most, weight = Counter(), 0, 0.0
    for action in (action for block in order[rank] for action in block):
        held[action.stage] += action.kind == "forward"
        most = max(most, held.total())
        weight = max(weight, sum(weights[stage] * count for stage, count in held.items()))
        held[action.stage] -= action.kind in ("backward", ends)
    return most, weight


@pytest.mark.parametrize(("name", "ranks", "each", "micro_batches"), CASES)
@pytest.mark.parametrize("whole", [False, True])
def test_micro_batches_in_flight_are_those_of_the_order(name, ranks, each, micro_batches, whole):
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=ranks, pipeline_parallel_schedule=name, pipeline_parallel_stages_per_rank=each
    )
    order = pipeline_order(parallelism, micro_batches)
    for rank in range(ranks):
        stages = stages_of_rank(parallelism, rank)
        for weights in (dict.fromkeys(stages, 1.0), {stage: 1.0 + 0.2 * i for i, stage in enumerate(stages)}):
            counts, _ = in_flight(parallelism, rank, micro_batches, weights, whole_backward=whole)
            most, weight = held_by(order, rank, weights, "input gradient" if whole else "weight gradient")
            assert sum(counts.values()) == most, (rank, counts)
            planned = sum(weights[stage] * count for stage, count in counts.items())
            assert weight <= planned * (1 + 1e-9) and planned <= 1.05 * weight, (rank, counts)


B, T = 10**9, 10**12
LENGTHS = [32_768, 65_536, 131_072, 196_608]
ROPE = [
    None, {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    {"rope_type": "linear", "factor": 6.0},
]  # fmt: skip
STAGES = [
    {"start_tokens": 22 * T + index * 250 * B, "seq_len": length, "sliding_window": 65_536 if index == 3 else None}
    | ({} if rope is None else {"rope_scaling": rope})
    for index, (length, rope) in enumerate(zip(LENGTHS, ROPE, strict=True))
]
BATCHES = [[22 * T, 4096], [22 * T + 250 * B, 4096], [22 * T + 250 * B, 2048]]


def table(plan: Plan) -> list[str]:
    return stage_table(plan, stage_memory(plan))


def run(tokens=T, **tables) -> RunConfig:
    """GLM-4.6 on 8,192 GPUs with four stages of 250B tokens."""
    parallelism = {
        "tensor_parallel_degree": 8, "pipeline_parallel_degree": 16, "expert_parallel_degree": 32,
        "data_parallel_shard_degree": 64,
    }  # fmt: skip
    sections = {
        "model": {"flavor": "GLM-4.6"}, "data": {"stages": STAGES},
        "training": {"seq_len": LENGTHS[-1], "tokens": tokens, "local_batch_size": 1, "global_batch_size": BATCHES},
        "lr_scheduler": {"start_tokens": 22 * T}, "activation_checkpoint": {"mode": "full"}, "parallelism": parallelism,
    }  # fmt: skip
    return RunConfig.model_validate(sections | tables)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_plan_of_four_stages_is_one_screen():
    text = plan_text(plan_run(resolve_plan(run()), TargetCluster(accelerator_of("H100"), 8192)))
    assert len(text.splitlines()) <= 65 and max(map(len, text.splitlines())) <= 140
    rows = text.split("stages of text\n")[1].splitlines()[1:5]
    assert [cells(row)[:6] for row in rows] == [
        ["1", "22T", "250B", "32,768", "none", "none"],
        ["2", "22.25T", "250B", "65,536", "none", "linear x 2"],
        ["3", "22.5T", "250B", "131,072", "none", "yarn x 4 of 32,768"],
        ["4", "22.75T", "250B", "196,608", "65,536", "linear x 6"],
    ]
    # Micro-batches of one sequence on 64 ranks; idle 15 of 64 + 15 and of 32 + 15 times.
    assert [cells(row)[6:9] for row in rows] == [["4,096", "64", "19%"]] + [["2,048", "32", "32%"]] * 3
    assert "at 196,608 tokens" in text


def test_each_stage_has_its_flops_and_memory():
    config = run()
    plan = resolve_plan(config)
    shape = PRESETS["GLM-4.6"].model_copy(update={"sliding_window": 65_536})
    assert plan.text_stages[3].shape.sliding_window == 65_536
    flops = [training_flops(shape if length == LENGTHS[3] else PRESETS["GLM-4.6"], length).total for length in LENGTHS]
    of_stages = zip(flops, plan.stage_tokens, strict=True)
    assert run_flops(plan) == pytest.approx(sum(each * tokens for each, tokens in of_stages))
    shown = [float(cells(line)[9].replace(",", "")) for line in table(plan)[1:]]
    assert shown == pytest.approx([each / 1e9 for each in flops], rel=1e-3)
    memory = stage_memory(plan)
    assert [each.total for each in memory] == sorted(each.total for each in memory)
    assert plan_memory(config, 8192) == memory[3]
    # Like runs of one stage each, but that a pipeline divides the layers once, for the longest sequence.
    alone = run(data={}, training=config.training.model_dump() | {"seq_len": 32_768}, parallelism={})
    staged = run(
        data={"stages": [{"start_tokens": 22 * T, "seq_len": 32_768}]},
        parallelism={},
        training=config.training.model_dump(),
    )
    assert plan_memory(staged, 64) == plan_memory(alone, 64)
    # 4,096 sequences of 32,768 tokens are fewer than 2,048 of 196,608.
    assert step_text(plan) == 2_048 / 64 * 196_608 * 8 * 6


def test_fits_is_said_of_each_stage():
    plan = resolve_plan(run())
    first, *_, last = (each.total for each in stage_memory(plan))
    lines = stage_table(plan, stage_memory(plan), (first + last) / 2)
    assert cells(lines[1])[-1] == "yes" and cells(lines[4])[-1] == "no"
    gpu = Machine(1, 2**50, 2**50, (Gpu("H100", 80 * 2**30),) * 8192)
    assert describe_requirement(run(), gpu)[0]
    assert cells(table(plan)[1])[-1] == "unknown"


def test_stages_after_the_end_of_a_run_are_named():
    lines = table(resolve_plan(run(tokens=300 * B)))
    assert len(lines) == 4 and lines[-1] == "stages 3 to 4 begin after the end of this run"
    assert cells(lines[2])[2] == "50B"


def test_the_batches_of_a_stage():
    """The smallest and the largest step, at the edges of the stage and at each point of a ramp inside it."""
    ramp = [[22 * T, 128], [22 * T + 100 * B, 1024], [22 * T + 100 * B, 64], [22 * T + 300 * B, 64]]
    config = run()
    plan = resolve_plan(run(training=config.training.model_dump() | {"global_batch_size": ramp}))
    assert batches_of(plan, 0) == (64, 1_024)
    assert [batches_of(plan, index) for index in (1, 2, 3)] == [(64, 64)] * 3
    assert cells(table(plan)[1])[6:9] == ["64 to 1,024", "1 to 16", "94% to 48%"]


COSTS = {"forward": 1, "backward": 2, "input gradient": 1, "weight gradient": 1}


@pytest.mark.parametrize("name, each", [
    ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_bubble_is_that_of_torchs_order(name, each, ranks):
    layout = ParallelismConfig(
        pipeline_parallel_degree=ranks, pipeline_parallel_schedule=name, pipeline_parallel_stages_per_rank=each
    )
    for micro_batches in (1, ranks // 2, ranks, ranks * 3 // 2, 2 * ranks, 4 * ranks, 8 * ranks):
        try:
            expected = simulate(pipeline_order(layout, micro_batches), lambda kind, stage: COSTS[kind]).bubble
        except ValueError:  # the schedule takes no such number
            assert name == "DualPipeV" and micro_batches < 2 * ranks
            continue
        found = bubble(layout, micro_batches)
        if name == "InterleavedZeroBubble" and micro_batches < ranks:
            assert expected - 1e-9 <= found <= expected + 0.1
        else:
            assert found == pytest.approx(expected, abs=1e-9), micro_batches


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_bubble_of_one_stage_per_rank(name):
    """(p - 1) / (m + p - 1): Narayanan et al., arXiv 2104.04473."""
    layout = ParallelismConfig(pipeline_parallel_degree=16, pipeline_parallel_schedule=name)
    assert bubble(layout, 16) == pytest.approx(15 / 31) and bubble(layout, 64) == pytest.approx(15 / 79)
    assert bubble(ParallelismConfig(), 4) == 0
