"""Measures the kernels of a model's layers on this device: the efficiencies that the planner takes.

Each rate is that of the model's own modules, forward and backward, at the sizes of one layer.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from datetime import date

import torch
from torch import Tensor

from glm46.compute.model.attention import attend
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.experts import Experts
from glm46.compute.model.layers import Linear, swiglu
from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.config.options import require_writable
from glm46.config.presets import PRESETS
from glm46.engine.observe.hardware import measured_matmul_flops
from glm46.engine.observe.peaks import Accelerator, find_accelerator
from glm46.operate.estimate.kernels import MOVED
from glm46.operate.estimate.machine import detect_machine
from glm46.run.flops import attention_flops

_ROUNDS = 7
_TINY_TOKENS = 16


def efficiencies(rates: Mapping[str, float], peaks: Accelerator, source: str) -> dict[str, float | str]:
    """Shares of the peaks that measured rates are, as `Efficiencies.read` takes them."""
    of = {"memory": peaks.memory_bandwidth, "launch_seconds": 1.0}
    return {name: rate / of.get(name, peaks.bf16_flops) for name, rate in rates.items()} | {"source": source}


def benchmark_rates(arguments: argparse.Namespace) -> None:
    """Measure what kernels reach of the peaks on a GPU, or on the CPU in FP32; print it, and write it to ``--json``.

    Raises:
        UserError: the GPU is unknown, or the file cannot be written.
    """
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    kind, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    device = torch.device(kind)
    peaks = device_peaks(device, dtype)
    if peaks is None:
        raise UserError(
            f"benchmark: the table of GPUs (glm46/engine/observe/peaks.py) lacks {torch.cuda.get_device_name()}"
        )
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    rates = measure_rates(PRESETS[arguments.flavor], arguments.tokens, device, dtype)
    source = f"{peaks.name}, {arguments.flavor}, {arguments.tokens:,} tokens, torch {torch.__version__}, {date.today()}"
    found = json.dumps(efficiencies(rates, peaks, source), indent=2)
    print(
        f"--gpu '{peaks.name}:bf16={peaks.bf16_flops / 1e12:.4g},memory={peaks.memory_bytes / 2**30:.4g},"
        f"bandwidth={peaks.memory_bandwidth / 1e9:.4g},link={peaks.link_bandwidth / 1e9:.4g}'"
    )
    print(found, flush=True)
    if arguments.json is not None:
        try:
            arguments.json.write_text(found + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"benchmark: --json {arguments.json}: {error.strerror}; name another file") from error


def measure_rates(shape: ModelShape, tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure one layer of a model on one row of tokens; the best of some rounds of each.

    Returns:
        ``products``, ``experts`` and ``attention`` in FLOP/s, ``memory`` in bytes per second, ``launch_seconds`` of one
        kernel.
    """
    with torch.device(device):
        D, F, A = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts_per_tok
        linear = Linear(D, shape.num_attention_heads * shape.head_dim, bias=False).to(dtype)
        x = torch.randn(tokens, D, dtype=dtype, requires_grad=True)
        products = _best(lambda: linear(x), [x, linear.weight], device)

        experts = Experts(shape).to(dtype)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        rows = torch.randn(tokens * A, D, dtype=dtype, requires_grad=True)
        hidden = torch.randn(tokens * A, F, dtype=dtype, requires_grad=True)
        ends = torch.arange(1, shape.n_routed_experts + 1) * (tokens * A) // shape.n_routed_experts
        offsets = ends.to(torch.int32)
        grouped = _best(lambda: experts.product(rows, experts.gate_up, offsets), [rows, experts.gate_up], device)
        grouped += _best(lambda: experts.product(hidden, experts.down, offsets), [hidden, experts.down], device)

        heads = (
            (shape.num_attention_heads, True),
            (shape.num_key_value_heads, True),
            (shape.num_key_value_heads, True),
        )
        q, k, v = (
            torch.randn(1, tokens, count, shape.head_dim, dtype=dtype, requires_grad=grad) for count, grad in heads
        )
        layout = attention_layout(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"), (1, tokens), None)
        layout = layout.to(device)
        attention = _best(lambda: attend(q, k, v, layout), [q, k, v], device)

        gate, up = (torch.randn(tokens, shape.intermediate_size, dtype=dtype, requires_grad=True) for _ in range(2))
        moving = _best(lambda: swiglu(gate, up), [gate, up], device)
    moved = sum(MOVED[str(dtype).removeprefix("torch."), False].inner) * gate.numel()
    return {
        "products": 6 * tokens * linear.weight.numel() / products,
        "experts": 6 * tokens * A * 3 * D * F / grouped,
        # One product more in backward than `attention_flops` counts.
        "attention": tokens * attention_flops(shape, tokens) * 3.5 / 3 / attention,
        "memory": moved / moving,
        "launch_seconds": _launch_seconds(shape, device, dtype),
    }


def _launch_seconds(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> float:
    """Time of a dense layer with hardly any work, by its kernels."""
    small = shape.model_copy(update={"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8})
    with torch.device(device):
        block = TransformerBlock(small, is_dense=True).to(dtype)
        x = torch.randn(1, _TINY_TOKENS, 64, dtype=dtype, requires_grad=True)
        rope = rotary_tables(torch.arange(_TINY_TOKENS).unsqueeze(0), small, dtype)
        seconds = _best(lambda: block(x, rope, None, None, RoutingOptions())[0], [x, *block.parameters()], device)
    kernels = MOVED[str(dtype).removeprefix("torch."), False].kernels
    parts = ["dense", *(["head_norms"] if small.use_qk_norm else [])]
    return seconds / sum(sum(kernels[part]) for part in parts)


def _best(forward: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> float:
    """Seconds of forward and of the gradients of ``leaves``."""
    grad, times = None, []
    for _ in range(_ROUNDS + 1):  # the first one compiles kernels and allocates
        _wait(device)
        started = time.perf_counter()
        y = forward()
        grad = torch.ones_like(y) if grad is None else grad
        torch.autograd.grad(y, leaves, grad)  # `backward` would add to the gradients of the round before
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_peaks(device: torch.device, dtype: torch.dtype) -> Accelerator | None:
    """The peaks that the shares are of: the table's for a GPU, None if it lacks the GPU; measured ones for a CPU."""
    if device.type == "cuda":
        return find_accelerator(torch.cuda.get_device_name(device))
    return cpu_peaks(dtype, detect_machine().free_bytes)


def cpu_peaks(dtype: torch.dtype, memory_bytes: int) -> Accelerator:
    """This CPU as the planner's accelerator: a square product, and copies of a tensor that no cache holds."""
    x = torch.ones(1 << 26, dtype=torch.uint8)
    out, times = torch.empty_like(x), []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        out.copy_(x)
        times.append(time.perf_counter() - started)
    copied = 2 * x.numel() / min(times)
    return Accelerator("CPU", measured_matmul_flops(dtype, torch.get_num_threads()), memory_bytes, 0.0, copied, copied)
