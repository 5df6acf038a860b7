"""What checkpointed layers keep, in host memory beside a CUDA device: bits, peak, and copies beside kernels."""

import gc

import pytest
import torch

from glm46.compute.distributed.process import use_deterministic_kernels
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import activation_checkpoint
from glm46.config.presets import PRESETS
from glm46.operate.estimate.activations import LayerBytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

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
