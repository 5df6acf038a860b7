"""Optimizer states, weights and gradients in host memory beside a CUDA device: streams and pinned memory."""

import pytest
import torch

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.process import join, leave
from glm46.compute.optim.optimizers import build_optimizers
from glm46.config.optimizer import OptimizerConfig
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.ranks.sharded_layouts import LAYOUTS, build_job, make_batch, make_config, micro_batches, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SHAPES = {
    "layers.0.self_attn.o_proj.weight": (512, 384), "layers.0.mlp.experts.gate_up": (8, 512, 256),
    "layers.0.mlp.experts.down": (8, 256, 256), "lm_head.weight": (4096, 256), "norm.weight": (256,),
}  # fmt: skip


def updated(device: str, steps: int = 4, **options) -> tuple[dict, dict]:
    """Weights and states after some steps on the GPU, on the CPU; weights are on ``device``."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    if device == "cpu":
        weights = {name: weight.pin_memory() for name, weight in weights.items()}
    weights = {name: torch.nn.Parameter(weight.to(device)) for name, weight in weights.items()}
    group = build_optimizers(list(weights.items()), OptimizerConfig(lr=0.01, **options), torch.device("cuda", 0))
    for _ in range(steps):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator).to(device)
        group.step(1.0)
    torch.cuda.synchronize()
    states = group.state_tensors()
    return tuple({name: tensor.detach().cpu() for name, tensor in named.items()} for named in (weights, states))


@pytest.mark.parametrize("state_dtype", ["float32", "8bit"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_states_in_host_memory_change_no_bit(place, state_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("glm46.compute.optim.adamw.OFFLOADED_ITEM_BYTES", 1)  # every parameter is an item of its own
    folder = {"state_offload_folder": str(tmp_path)} if place == "nvme" else {}
    plain = updated("cuda", state_dtype=state_dtype)
    offloaded = updated("cuda", state_dtype=state_dtype, state_offload=place, **folder)
    for ours, other in zip(plain, offloaded, strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[name], other[name]) for name in ours)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_weights_in_host_memory_get_the_same_updates(place, tmp_path):
    """Muon computes them on the GPU and adds them on the CPU, AdamW runs on the CPU: FP32 sums in another order."""
    folder = {"state_offload_folder": str(tmp_path)} if place == "nvme" else {}
    start = updated("cuda", steps=0)[0]
    on_gpu, on_host = updated("cuda")[0], updated("cpu", state_offload=place, **folder)[0]
    for name in SHAPES:
        update = (on_gpu[name] - start[name]).norm()
        assert (on_host[name] - on_gpu[name]).norm() < 1e-4 * update, name


@pytest.fixture
def process():
    yield join(60)
    leave()


def test_steps_with_weights_in_host_memory_equal_steps_without(process):
    """One rank, by the engine's own building and steps. Forward and backward run the same kernels, updates differ as
    above, and the norm is summed on the CPU."""
    plain, offloaded = (trained(process, LAYOUTS[1][name]) for name in ("fsdp", "fsdp-offload"))
    for (loss, norm), (of_loss, of_norm) in zip(plain[0], offloaded[0], strict=True):
        assert of_loss == pytest.approx(loss, rel=1e-5) and of_norm == pytest.approx(norm, rel=1e-4)
    for name, weight in plain[1].items():
        assert (offloaded[1][name] - weight).norm() < 1e-4 * weight.norm(), name


def trained(process, layout) -> tuple[list, dict]:
    """Loss and gradient norm of each step, and the last weights on the CPU."""
    job = build_job(make_config(layout), process)
    devices = {local_tensor(parameter).device.type for parameter in job.network.parameters.values()}
    assert devices == {"cpu" if layout.offload else "cuda"}
    if layout.offload:
        assert all(local_tensor(parameter).is_pinned() for parameter in job.network.parameters.values())
    figures = []
    for step in range(layout.steps):
        totals = count_step(job, [make_batch(step)])
        outcome = train_step(job, micro_batches(job, step, layout.micro_batches), totals, 0, 1.0).main
        figures.append((outcome.objective["loss"].item(), outcome.grad_norm.item()))
    return figures, {name: whole(parameter).detach().cpu() for name, parameter in job.network.parameters.items()}
