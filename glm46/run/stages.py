"""The layers of each pipeline stage, and the stages of each pipeline rank."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import inf
from operator import add

from glm46.config.model import ModelShape
from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.run.flops import layer_flops


def stages_of_rank(parallelism: ParallelismConfig, rank: int) -> list[int]:
    """The stages of one pipeline rank, ascending."""
    ranks = parallelism.pipeline_parallel_degree
    if PIPELINE_SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(parallelism.stages_per_rank)]


def rank_of_stage(parallelism: ParallelismConfig, stage: int) -> int:
    """The pipeline rank that holds a stage; the inverse of `stages_of_rank`."""
    ranks = parallelism.pipeline_parallel_degree
    if PIPELINE_SCHEDULES[parallelism.pipeline_parallel_schedule].is_v_shaped:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


@cache  # plans ask for the same split again and again; with many stages it takes a tenth of a second
def split_layers(shape: ModelShape, stages: int, seq_len: int) -> tuple[range, ...]:
    """Consecutive layers for each stage, at least one each: the most expensive stage as cheap as possible, then the
    other stages as even as possible.

    The cost is that of the matrix products of a token. Dense, MoE and MTP layers and the head cost different amounts;
    the last two are on the last stage.

    Args:
        stages: at most the number of layers.
        seq_len: tokens per sequence; the cost of attention depends on it.
    """
    costs = layer_flops(shape, seq_len)
    before = [0.0, *accumulate(costs.of_layer)]
    layers = shape.num_hidden_layers

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start] + (costs.head_and_mtp if stop == layers else 0.0)

    highest, _ = _cheapest_split(layers, stages, cost, max)
    # Below this limit, the split with the least sum of squares is the most even one.
    limit = highest * (1.0 + 1e-9)
    _, ends = _cheapest_split(
        layers, stages, lambda start, stop: cost(start, stop) ** 2 if cost(start, stop) <= limit else inf, add
    )
    return tuple(range(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True))


def _cheapest_split(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least `join` of the costs of all stages, and the end of each stage; dynamic programming from the end."""
    # For each start: the cost of the best split of the layers from there on into a growing number of stages.
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
