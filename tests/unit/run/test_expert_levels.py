"""The levels in which tokens travel to their experts, and the rows that they need."""

import pytest
import torch

from glm46.config.errors import UserError
from glm46.config.parallelism import ParallelismConfig
from glm46.config.presets import PRESETS
from glm46.run.layout import expert_levels
from glm46.run.plan import places_of_token


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
