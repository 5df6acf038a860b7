"""Stochastic rounding of BF16 weights gives the same bits on two processes as on one."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from glm46.compute.optim.optimizers import OptimizerGroup, build_optimizers
from glm46.config.optimizer import OptimizerConfig
from tests.harness import run_ranks

STEPS = 3
TOKENS_PER_STEP = 1000

SHAPES = {
    "embed_tokens.weight": (256, 128),
    "layers.0.self_attn.o_proj.weight": (64, 128),
    "layers.0.self_attn.k_proj.weight": (33, 256),
    "layers.0.mlp.experts.down": (4, 32, 128),
    "layers.0.input_layernorm.weight": (128,),
}
"""Muon's matrices have different shapes: a product of several stacked matrices may sum in another order."""

PLACEMENTS: dict[str, Placement] = {"first": Shard(0), "last": Shard(-1), "replicated": Replicate()}

CASES = {
    f"{optimizer} {state_dtype} {placement}": (optimizer, state_dtype, placement)
    for optimizer, state_dtype, placement in product(("AdamW", "Muon"), ("float32", "bfloat16", "8bit"), PLACEMENTS)
}
"""Optimizer, type of its states and dimension that is sharded, by the name of the case."""


def random_tensors(number: int, size: float) -> dict[str, Tensor]:
    """The same BF16 tensors on every rank."""
    generator = torch.Generator().manual_seed(number)
    return {name: (size * torch.randn(shape, generator=generator)).bfloat16() for name, shape in SHAPES.items()}


def place(whole: Tensor, mesh: DeviceMesh | None, placement: Placement) -> Tensor:
    """A tensor on the mesh; without a mesh the tensor itself."""
    if mesh is None:
        return whole
    if isinstance(placement, Shard):
        placement = Shard(placement.dim % whole.ndim)
    return distribute_tensor(whole, mesh, [placement])


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(optimizer: str, state_dtype: str, placement: Placement, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Whole weights and states after some steps. Collective on a mesh."""
    config = OptimizerConfig(name=optimizer, lr=2.5e-4, state_dtype=state_dtype)
    weights = {
        name: nn.Parameter(place(whole, mesh, placement)) for name, whole in random_tensors(0, size=0.02).items()
    }
    group: OptimizerGroup = build_optimizers(list(weights.items()), config, ns_dtype=torch.float32)
    for step in range(1, STEPS + 1):
        for name, gradient in random_tensors(step, size=1.0).items():
            weights[name].grad = place(gradient, mesh, placement)
        group.step(1.0, number=step * TOKENS_PER_STEP)
    tensors = {name: weight.detach() for name, weight in weights.items()} | group.state_tensors()
    return {name: whole_tensor(tensor) for name, tensor in tensors.items()}


def compare_cases() -> dict[str, dict]:
    """On each rank: all cases."""
    dist.init_process_group("gloo")
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name, (optimizer, state_dtype, placement) in CASES.items():
        expected = train(optimizer, state_dtype, PLACEMENTS[placement], None)
        actual = train(optimizer, state_dtype, PLACEMENTS[placement], mesh)
        assert actual.keys() == expected.keys()
        differing = [key for key, tensor in actual.items() if not torch.equal(tensor, expected[key])]
        start = random_tensors(0, size=0.02)
        idle = [key for key, tensor in start.items() if torch.equal(tensor, expected[key])]
        rows[name] = {"differing": differing, "idle": idle}
    dist.destroy_process_group()
    return rows


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return run_ranks(compare_cases, 2)[0]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_round_as_one(rows, case):
    assert rows[case]["differing"] == []
    assert rows[case]["idle"] == []  # every weight was rounded
