"""Optimizer states, weights and gradients in host memory beside a CUDA device: streams and pinned memory.

What checkpointed layers keep, in host memory: bits, peak, and copies beside kernels.
"""

import gc

import pytest
import torch

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.distributed.process import use_deterministic_kernels
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.parallelize import activation_checkpoint
from glm46.config.optimizer import OptimizerConfig
from glm46.config.presets import PRESETS
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.operate.estimate.activations import LayerBytes
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


ROWS, LENGTH = 16, 1024
SHAPE = PRESETS["debug"].model_copy(
    update={
        "num_hidden_layers": 8, "num_nextn_predict_layers": 0, "vocab_size": 512, "hidden_size": 4096,
        "intermediate_size": 8192, "moe_intermediate_size": 1024, "num_attention_heads": 32, "head_dim": 128,
    }
)  # fmt: skip
"""Layers so wide that the host is ahead of the device: beside a device that waits for its host, no copy costs time."""


def run(mode: str, *, on_host: bool) -> tuple[dict, int, torch.profiler.profile]:
    """Gradients of the second of two passes, its peak of memory above what lasts, and its profile. Gradients last: they
    would grow, in the layers of the backward, by as much as what the layers keep falls."""
    model = Transformer(SHAPE).cuda()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        indices = [torch.arange(n) for n in tensor.shape]
        fill_parameter(tensor.data, indices, tuple(tensor.shape), seed=1, name=name, std=SHAPE.initializer_range)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    activation_checkpoint.apply(model, mode, cpu_checkpointing=on_host)
    ids = torch.randint(0, SHAPE.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(input_ids=ids, labels=ids).loss.backward()

    step()  # allocates pinned memory, for which the host waits
    torch.cuda.synchronize()
    gc.collect()  # checkpointed layers of an earlier run refer to each other
    torch.cuda.reset_peak_memory_stats()
    lasting = torch.cuda.memory_allocated()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return gradients, torch.cuda.max_memory_allocated() - lasting, profile


def overlap(profile: torch.profiler.profile) -> tuple[float, float]:
    """Microseconds of copies between host and device, and of those beside kernels."""
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in events if "Memcpy HtoD" in e.name or "Memcpy DtoH" in e.name]
    kernels = [e.time_range for e in events if "Memcpy" not in e.name and "Memset" not in e.name]
    beside = sum(max(0.0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels)
    return sum(c.end - c.start for c in copies), beside


@pytest.mark.usefixtures("nondeterministic_afterwards")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_host_memory_changes_no_bit_lowers_the_peak_and_costs_no_wait(mode):
    use_deterministic_kernels()
    plain, peak, before = run(mode, on_host=False)
    found, lower, profile = run(mode, on_host=True)
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())
    layer = ROWS * LENGTH * sum(LayerBytes(SHAPE, 2).kept_tensors("moe", mode))
    # The layer that computes, the one before it, and the one that comes back ahead are on the device.
    assert peak - lower > 0.8 * (SHAPE.num_hidden_layers - 3) * layer
    copied, beside = overlap(profile)
    assert beside > 0.5 * copied > 0
    waits = [sum(e.count for e in p.key_averages() if "Synchronize" in e.key) for p in (before, profile)]
    assert waits[1] <= waits[0]  # the host waits for no copy
