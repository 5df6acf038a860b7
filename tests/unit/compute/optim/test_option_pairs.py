"""Every pair of optimizer options trains a small model: finite weights, states and a falling loss."""

import itertools
import typing

import pytest
import torch
import torch.nn.functional as F

from glm46.compute.optim.compact_state import BLOCK, MIN_ENTRIES
from glm46.compute.optim.optimizers import build_optimizers
from glm46.config import rules_layout
from glm46.config.optimizer import OptimizerConfig

EXPERTS, WIDTH, VOCABULARY = 3, 64, 80
SHAPES = {
    "embed_tokens.weight": (VOCABULARY, WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),  # square, with 8-bit states
    "layers.0.mlp.router.weight": (EXPERTS, WIDTH),
    "layers.0.mlp.experts.gate_up": (EXPERTS, 2 * 24, WIDTH),
    "layers.0.mlp.experts.down": (EXPERTS, WIDTH, 24),
    "norm.weight": (WIDTH,),
    "lm_head.weight": (VOCABULARY, WIDTH),
}


def choices() -> dict[str, tuple]:
    """The values of every option that has a list of them, read from [optimizer], and the types of master weights."""
    found: dict[str, tuple] = {"weights": (torch.float32, torch.bfloat16)}
    for name, field in OptimizerConfig.model_fields.items():
        if field.annotation is bool:
            found[name] = (True, False)
        elif typing.get_origin(field.annotation) is typing.Literal:
            found[name] = typing.get_args(field.annotation)
    return found


def covering_rows() -> list[dict]:
    """Few rows of options in which every pair of values of two options occurs, found greedily."""
    options = choices()
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(options, 2)
        for a, b in itertools.product(options[one], options[other])
    }
    rows = []
    while missing:
        first = min(missing, key=str)
        row = dict(first)
        for name in options:
            if name not in row:
                row[name] = max(
                    options[name],
                    key=lambda value, name=name: sum(
                        tuple(sorted(((name, value), entry), key=lambda e: list(options).index(e[0]))) in missing
                        for entry in row.items()
                    ),
                )
        missing -= set(itertools.combinations([(name, row[name]) for name in options], 2))
        rows.append({name: row[name] for name in options})
    return rows


ROWS = covering_rows()


def loss_of(parameters, tokens) -> torch.Tensor:
    """A small mixture of experts that learns to repeat its input; the last expert gets no token."""
    p = {name: parameter.float() for name, parameter in parameters.items()}
    x = F.rms_norm(p["embed_tokens.weight"][tokens], (WIDTH,), p["norm.weight"])
    x = x + x @ p["layers.0.self_attn.o_proj.weight"].T
    weights = (x @ p["layers.0.mlp.router.weight"].T).sigmoid()
    for expert in range(EXPERTS - 1):
        gate, up = (x @ p["layers.0.mlp.experts.gate_up"][expert].T).chunk(2, -1)
        y = F.silu(gate) * up @ p["layers.0.mlp.experts.down"][expert].T
        x = x + weights[:, expert, None] * y
    return F.cross_entropy(x @ p["lm_head.weight"].T, tokens)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(str(value).removeprefix("torch.") for value in row.values())
)
def test_every_pair_of_options_trains(row, tmp_path):
    options = {name: value for name, value in row.items() if name != "weights"}
    if row["state_offload"] == "nvme":
        options["state_offload_folder"] = str(tmp_path)
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(
            (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)).to(
                row["weights"]
            )
        )
        for name, shape in SHAPES.items()
    }
    optimizer = build_optimizers(list(parameters.items()), OptimizerConfig(lr=0.01, **options))
    tokens = torch.randint(0, VOCABULARY, (64,), generator=generator)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_of(parameters, tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(1.0)
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    assert all(state.isfinite().all() for state in optimizer.state_tensors().values())
    assert losses[-1] < 0.9 * losses[0], losses


def test_limits_that_the_rules_state_are_those_of_the_code():
    assert (BLOCK, MIN_ENTRIES) == (rules_layout.STATE_BLOCK, rules_layout.STATE_MIN_ENTRIES)
