"""Layers of each pipeline stage, and stages of each pipeline rank."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import inf
from operator import add

from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.run.flops import layer_flops


def stages_of_rank(parallelism: ParallelismConfig, rank: int) -> list[int]:
    """Return the stages of one pipeline rank, ascending."""
    ranks = parallelism.pipeline_parallel_degree
    if PIPELINE_SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + round_index * ranks for round_index in range(parallelism.stages_per_rank)]


def rank_of_stage(parallelism: ParallelismConfig, stage: int) -> int:
    """Return the pipeline rank that holds a stage; the inverse of `stages_of_rank`."""
    ranks = parallelism.pipeline_parallel_degree
    if PIPELINE_SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


@cache  # plans need the same split repeatedly; with many stages it takes a tenth of a second
def split_layers(shape: ModelShape, stages: int, seq_len: int) -> tuple[range, ...]:
    """Assign consecutive layers to each stage, at least one each, so that the most expensive stage is as cheap as
    possible, then the other stages are as even as possible. Under sparse attention a stage starts with a layer that has
    an indexer, so that no choice of keys is sent.

    The cost is the cost of the matrix products of a token. Dense, MoE and MTP layers and the head cost different
    amounts; MTP layers and the head are on the last stage.

    Args:
        stages: at most the number of layers, or of layers with an indexer.
        seq_len: tokens per sequence; the cost of attention depends on it.
    """
    costs = layer_flops(shape, seq_len)
    cumulative = [0.0, *accumulate(costs.per_layer)]
    layers = shape.num_hidden_layers

    def cost(start: int, stop: int) -> float:
        if shape.is_sparse and not shape.has_indexer(start):
            return inf
        return cumulative[stop] - cumulative[start] + (costs.head_and_mtp if stop == layers else 0.0)

    max_cost, _ = _cheapest_split(layers, stages, cost, max)
    # Among splits without a more expensive stage, the one with the least sum of squares is the most even one: the sum
    # of the costs is the same for all.
    limit = max_cost * (1.0 + 1e-9)
    _, ends = _cheapest_split(
        layers, stages, lambda start, stop: cost(start, stop) ** 2 if cost(start, stop) <= limit else inf, add
    )
    return tuple(range(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))


def _cheapest_split(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Minimise `join` of the costs of all stages; return it and the end of each stage. Dynamic programming from the
    end."""
    # For each start: cost and ends of the best split of the remaining layers into a growing number of stages.
    best = [(cost(start, layers), [layers]) for start in range(layers)]
    for count in range(2, stages + 1):
        best = [
            min(
                (join(cost(start, stop), best[stop][0]), [stop, *best[stop][1]])
                for stop in range(start + 1, layers - count + 2)
            )
            for start in range(layers - count + 1)
        ]
    return best[0]
