"""Stages of a pipeline: who holds which, and that their cost is even."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.run.flops import layer_flops, training_flops
from glm46.run.stages import rank_of_stage, split_layers, stages_of_rank


def costs_of(shape, split, seq_len):
    costs = layer_flops(shape, seq_len)
    stages = [sum(costs.per_layer[layer] for layer in layers) for layers in split]
    stages[-1] += costs.head_and_mtp
    return stages


def test_costs_of_the_layers_add_up_to_the_model():
    shape = PRESETS["GLM-4.6"]
    costs = layer_flops(shape, 4096)
    assert sum(costs.per_layer) + costs.head_and_mtp == pytest.approx(training_flops(shape, 4096).total, rel=1e-12)


def test_92_layers_on_16_stages():
    """The last stage has head and prediction layer, which cost as much as six layers; dense layers are cheaper."""
    split = split_layers(PRESETS["GLM-4.6"], 16, 4096)
    assert [layers.start for layers in split[1:]] == [layers.stop for layers in split[:-1]]
    assert (split[0].start, split[-1].stop) == (0, 92)
    costs = costs_of(PRESETS["GLM-4.6"], split, 4096)
    # 15 stages of six layers and one on the last are 91: one stage must hold a seventh.
    assert sorted(map(len, split)) == [1, *[6] * 14, 7] and max(costs) / (sum(costs) / 16) < 1.13


@settings(max_examples=40)
@given(layers=st.integers(1, 9), dense=st.integers(0, 3), stages=st.integers(1, 9), vocab=st.sampled_from([64, 4096]))
def test_no_split_has_a_cheaper_dearest_stage(layers, dense, stages, vocab):
    """Against all splits, one by one."""
    if stages > layers:
        return
    shape = PRESETS["debug"].model_copy(
        update={"num_hidden_layers": layers, "first_k_dense_replace": min(dense, layers), "vocab_size": vocab}
    )
    found = split_layers(shape, stages, 128)
    assert [layer for part in found for layer in part] == list(range(layers)) and all(len(part) for part in found)

    def all_splits(start, count):
        if count == 1:
            yield [range(start, layers)]
            return
        for stop in range(start + 1, layers - count + 2):
            for rest in all_splits(stop, count - 1):
                yield [range(start, stop), *rest]

    best = min(max(costs_of(shape, split, 128)) for split in all_splits(0, stages))
    assert max(costs_of(shape, found, 128)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_stage_has_one_rank(schedule, ranks):
    parallelism = ParallelismConfig(pipeline_parallel_degree=ranks, pipeline_parallel_schedule=schedule)
    held = {stage: rank for rank in range(ranks) for stage in stages_of_rank(parallelism, rank)}
    assert sorted(held) == list(range(parallelism.stages))
    assert all(rank_of_stage(parallelism, stage) == rank for stage, rank in held.items())
