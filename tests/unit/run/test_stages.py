"""How layers, experts and tokens are divided: stages of a pipeline, and levels in which tokens travel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.run.flops import layer_flops, training_flops
from glm46.run.layout import expert_levels
from glm46.run.plan import places_of_token
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


def levels(exchange: str, ranks: int, host_ranks: int | None):
    return expert_levels(ParallelismConfig(expert_parallel_degree=ranks, expert_exchange=exchange), host_ranks)


@pytest.mark.parametrize(
    ("exchange", "ranks", "host_ranks", "expected"),
    [
        ("auto", 8, 8, (1, 8)), ("auto", 4, 8, (1, 4)), ("auto", 16, 8, (2, 8)), ("auto", 16, 1, (16, 1)),
        ("auto", 32, None, None), ("auto", 32, 0, None), ("auto", 12, 8, None), ("auto", 6, 8, None),
        ("two_level", 8, 8, (1, 8)), ("two_level", 4, 8, (1, 4)), ("two_level", 16, 8, (2, 8)),
        ("two_level", 16, None, (1, 16)), ("deepep", 16, 8, (2, 8)), ("deepep", 16, None, (1, 16)),
        ("all_to_all", 16, 8, None), ("auto", 1, 8, None),
    ],
)  # fmt: skip
def test_levels_are_whole_hosts_or_one(exchange, ranks, host_ranks, expected):
    assert levels(exchange, ranks, host_ranks) == expected


@pytest.mark.parametrize("exchange", ["two_level", "deepep"])
@pytest.mark.parametrize(
    ("ranks", "host_ranks", "named"),
    [(12, 8, "each host has 8 ranks"), (6, 8, "each host has 8 ranks"), (8, 0, "unequal")],
)
def test_two_levels_on_other_hosts_are_refused(exchange, ranks, host_ranks, named):
    with pytest.raises(UserError) as refused:
        levels(exchange, ranks, host_ranks)
    text = str(refused.value)
    assert (
        f'parallelism.expert_exchange = "{exchange}"' in text
        and f"{ranks} ranks" in text
        and named in text
        and "all_to_all" in text
    )


@pytest.mark.parametrize("flavor", ["GLM-4.5-Air", "GLM-4.6"])
@pytest.mark.parametrize("parts", [2, 4, 8, 32])
def test_places_of_a_token_are_those_of_random_choices(flavor, parts):
    shape, tokens = PRESETS[flavor], 4096
    choices = torch.rand(tokens, shape.n_routed_experts, generator=torch.Generator().manual_seed(0)).argsort(1)
    places = choices[:, : shape.num_experts_per_tok] // (shape.n_routed_experts // parts)
    counted = torch.zeros(tokens, parts).scatter_(1, places, 1.0).sum(1).mean()
    assert places_of_token(shape, parts) == pytest.approx(counted.item(), rel=0.02)
    assert places_of_token(shape, 1) == 1
