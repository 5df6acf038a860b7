"""Micro-batches in flight against the orders of torch's own schedule objects."""

from collections import Counter

import pytest

from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.operate.estimate.rank_parts import in_flight
from glm46.run.stages import stages_of_rank
from tests.unit.operate.estimate.pipeline_orders import pipeline_order

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
