"""How layers, experts and tokens are divided: stages of a pipeline, and levels in which tokens travel.

Schedules at 0, first, boundary - 1, boundary, last and beyond.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.errors import UserError
from glm46.config.optimizer import LRSchedulerConfig
from glm46.config.parallelism import PIPELINE_SCHEDULES, ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.run.flops import layer_flops, training_flops
from glm46.run.layout import expert_levels
from glm46.run.plan import places_of_token
from glm46.run.schedule import batch_sequences, learning_rate_factor, schedule_value
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


# One rounding of a double on values near one.
EXACT = 1e-12


SCHEDULES = {
    "a number": (0.3, {0: 0.3, 1: 0.3, 10**13: 0.3}),
    "points, joined by lines": (
        ((100, 1.0), (200, 3.0), (400, 2.0)),
        {0: 1.0, 99: 1.0, 100: 1.0, 101: 1.02, 150: 2.0, 199: 2.98, 200: 3.0, 300: 2.5, 400: 2.0, 10**12: 2.0},
    ),
    "a jump": (((0, 0.3), (15_000, 0.3), (15_000, 0.1)), {0: 0.3, 14_999: 0.3, 15_000: 0.1, 15_001: 0.1}),
    "a jump at zero": (((0, 1.0), (0, 2.0)), {0: 2.0}),
    "one point": (((5, 7.0),), {0: 7.0, 5: 7.0, 6: 7.0}),
}


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_has_these_values(schedule, expected):
    assert {tokens: schedule_value(schedule, tokens) for tokens in expected} == pytest.approx(expected, abs=EXACT)


WARM = {"warmup_tokens": 100}
MIDDLES = {"cosine": 0.55, "linear": 0.55, "sqrt": 1 - 0.9 * math.sqrt(0.5)}
RATES = {
    **{
        decay_type: (
            WARM | {"decay_type": decay_type, "min_lr_factor": 0.1}, 1000,
            {0: 0.0, 1: 0.01, 99: 0.99, 100: 1.0, 550: middle, 1000: 0.1, 1001: 0.1, 10**9: 0.1},
        )
        for decay_type, middle in MIDDLES.items()
    },
    "constant until the decay part": (
        WARM | {"decay_type": "linear", "decay_ratio": 0.2, "min_lr_factor": 0.0}, 1000,
        {0: 0.0, 99: 0.99, 100: 1.0, 799: 1.0, 800: 1.0, 801: 0.995, 900: 0.5, 999: 0.005, 1000: 0.0, 2000: 0.0},
    ),
    "no warm-up": ({}, 1000, {0: 1.0}),
    "total_tokens before the end of the run": (
        {"total_tokens": 2000, "decay_type": "linear", "min_lr_factor": 0.0}, 1000, {1000: 0.5}
    ),
    "a warm-up longer than the run": (WARM | {"min_lr_factor": 0.1}, 60, {50: 0.5, 99: 0.99, 100: 0.1}),
}  # fmt: skip
"""Keys of the table, tokens of the run, and factors by tokens."""


@pytest.mark.parametrize(("keys", "total", "expected"), RATES.values(), ids=RATES)
def test_the_learning_rate_has_these_factors(keys, total, expected):
    scheduler = LRSchedulerConfig(**keys)
    found = {tokens: learning_rate_factor(tokens, scheduler, total) for tokens in expected}
    assert found == pytest.approx(expected, abs=EXACT)


def test_the_first_step_has_its_share_of_the_warmup():
    scheduler = LRSchedulerConfig(warmup_tokens=100, decay_type="linear")
    assert [learning_rate_factor(t, scheduler, 1000, 30) for t in (0, 30, 60, 90, 120)] == pytest.approx(
        [0.3, 0.6, 0.9, 1.0, learning_rate_factor(120, scheduler, 1000)], abs=EXACT
    )


@given(
    st.integers(0, 5000),
    st.sampled_from(["cosine", "linear", "sqrt"]),
    st.one_of(st.none(), st.floats(0.01, 1.0)),
    st.floats(0.0, 1.0),
)
def test_factor_never_rises_after_warmup_nor_leaves_its_range(tokens, decay_type, ratio, least):
    scheduler = LRSchedulerConfig(warmup_tokens=300, decay_type=decay_type, decay_ratio=ratio, min_lr_factor=least)
    now, later = (learning_rate_factor(t, scheduler, 4000) for t in (tokens, tokens + 1))
    assert 0.0 <= now <= 1.0
    if tokens >= 300:
        assert least <= later + EXACT and later <= now + EXACT


@pytest.mark.parametrize(("schedule", "expected"), [
    (((0, 16.0), (1000, 64.0)), {0: 16, 166: 16, 167: 24, 500: 40, 999: 56, 1000: 64, 5000: 64}),  # rounded down
    (3.0, {0: 8}), (None, {123: 8}), (24.0, {0: 24}),  # at least one micro-batch, and that when absent
])  # fmt: skip
def test_a_batch_is_of_whole_micro_batches(schedule, expected):
    assert {tokens: batch_sequences(schedule, tokens, 8) for tokens in expected} == expected


@given(st.integers(0, 10**9), st.integers(1, 64), st.integers(1, 512), st.integers(1, 512))
def test_batch_is_a_multiple_and_never_above_the_schedule(tokens, multiple, first, last):
    ramp = ((0, float(first)), (10**8, float(last)))
    size = batch_sequences(ramp, tokens, multiple)
    assert size % multiple == 0
    assert size <= max(multiple, schedule_value(ramp, tokens) + 1e-6)
