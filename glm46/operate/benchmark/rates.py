"""Measures the kernels of a model's layers on this device: the efficiencies that the planner uses.

Each rate is measured with the model's own modules, forward and backward, at the sizes of one layer.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

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
from glm46.files.file_content import read_json_object
from glm46.operate.estimate.kernels import KERNELS, MOVED, form
from glm46.operate.estimate.machine import detect_machine
from glm46.run.flops import attention_flops

_ROUNDS = 7
TOKENS = 4096
"""Tokens of a micro-batch on one GPU, as many as one sequence of pre-training has."""
_TINY_TOKENS = 16
_ROWS = (32, 128, 512, 2048, 8192)
"""Rows per expert, and tokens per document, at which speeds are measured."""


def efficiencies(rates: Mapping[str, float], peaks: Accelerator, source: str) -> dict[str, float | str]:
    """Convert measured rates to shares of the peaks, in the form of `Efficiencies.read`."""
    peak_by_name = {"memory": peaks.memory_bandwidth, "launch_seconds": 1.0, "experts_rows": 1.0, "attention_rows": 1.0}
    return {name: rate / peak_by_name.get(name, peaks.bf16_flops) for name, rate in rates.items()} | {"source": source}


def benchmark_rates(arguments: argparse.Namespace) -> None:
    """Measure the rates of kernels on a GPU, or on the CPU in FP32; print them, and write them to ``--json``.

    Raises:
        UserError: the GPU is unknown, or the file cannot be written.
    """
    kind, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    device = torch.device(kind)
    peaks = device_peaks(device, dtype)
    if peaks is None:
        raise UserError(
            f"benchmark: the table of GPUs (glm46/engine/observe/peaks.py) lacks {torch.cuda.get_device_name()}"
        )
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    rates, grid = measure_rates(PRESETS[arguments.flavor], TOKENS, device, dtype)
    if device.type == "cpu":  # the peaks were measured too, while another program may have used the cores
        flops = max(peaks.bf16_flops, rates["products"], rates["experts"], rates["attention"])
        peaks = replace(peaks, bf16_flops=flops, memory_bandwidth=max(peaks.memory_bandwidth, rates["memory"]))
    source = f"{peaks.name}, {arguments.flavor}, {TOKENS:,} tokens, torch {torch.__version__}, {date.today()}"
    print(
        f"--gpu '{peaks.name}:bf16={peaks.bf16_flops / 1e12:.4g},memory={peaks.memory_bytes / 2**30:.4g},"
        f"bandwidth={peaks.memory_bandwidth / 1e9:.4g},link={peaks.link_bandwidth / 1e9:.4g}'"
    )
    for name, speeds in grid.items():
        print(f"{name}: " + ", ".join(f"{rows:,} rows {rate / 1e12:.4g} TFLOP/s" for rows, rate in speeds.items()))
    write_shares(efficiencies(rates, peaks, source), arguments.json)


def write_shares(shares: dict[str, float | str], file: Path | None) -> None:
    """Print shares, and add them to those in a file; the file then names the sources of both.

    Raises:
        UserError: the file is not JSON of such shares, or cannot be written.
    """
    print(json.dumps(shares, indent=2), flush=True)
    if file is None:
        return
    stored = read_json_object(file, "remove it, or name another file") if file.exists() else {}
    sources = dict.fromkeys(str(values["source"]) for values in (stored, shares) if "source" in values)
    try:
        file.write_text(json.dumps(stored | shares | {"source": "; ".join(sources)}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"benchmark: --json {file}: {error.strerror}; name another file") from error


def fit_rows(speeds: Mapping[int, float]) -> tuple[float, float]:
    """Fit the speed with infinitely many rows, and the rows at which half of it is reached: speed = max_speed * rows /
    (rows + half), as the planner assumes. Uses least squares of 1 / speed, which is linear in 1 / rows. A single speed
    is taken as independent of rows."""
    xs = [1 / rows for rows in speeds]
    ys = [1 / rate for rate in speeds.values()]
    slope = 0.0
    if len(speeds) > 1:
        # Weighting by the squared speeds makes the errors relative.
        weights = [rate * rate for rate in speeds.values()]
        x_mean, y_mean = (sum(w * v for w, v in zip(weights, vs, strict=True)) / sum(weights) for vs in (xs, ys))
        spread = sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
        points = zip(weights, xs, ys, strict=True)
        slope = max(sum(w * (x - x_mean) * (y - y_mean) for w, x, y in points) / spread, 0.0)
        max_speed = 1 / max(y_mean - slope * x_mean, min(ys) / 2)
    else:
        max_speed = 1 / ys[0]
    return max_speed, slope * max_speed


def measure_rates(
    shape: ModelShape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Measure one layer of a model, with the best of several rounds for each kernel.

    Returns:
        ``products``, ``experts`` and ``attention`` in FLOP/s with endless rows, ``experts_rows`` and ``attention_rows``
        at which half of it is reached, ``memory`` in bytes per second, ``launch_seconds`` of one kernel; and the speeds
        of ``experts`` by rows of an expert and of ``attention`` by length, of at most ``tokens``.
    """
    with torch.device(device):
        linear = Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim, bias=False).to(dtype)
        x = torch.randn(tokens, shape.hidden_size, dtype=dtype, requires_grad=True)
        products = _best(lambda: linear(x), [x, linear.weight], device)
        experts = Experts(shape).to(dtype)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        gate, up = (torch.randn(tokens, shape.intermediate_size, dtype=dtype, requires_grad=True) for _ in range(2))
        moving = _best(lambda: swiglu(gate, up), [gate, up], device)
    sizes = [rows for rows in _ROWS if rows <= tokens] or [tokens]
    grid = {
        "experts": {rows: _expert_flops(experts, rows, tokens, device, dtype) for rows in sizes},
        "attention": {rows: _attention_flops(shape, rows, tokens, device, dtype) for rows in sizes if rows >= 128}
        or {tokens: _attention_flops(shape, tokens, tokens, device, dtype)},
    }
    rates = {"products": 6 * tokens * linear.weight.numel() / products}
    for name, speeds in grid.items():
        rates[name], rates[f"{name}_rows"] = fit_rows(speeds)
    moved = sum(MOVED["inner"][form(str(dtype).removeprefix("torch."), is_compiled=False)]) * gate.numel()
    return rates | {"memory": moved / moving, "launch_seconds": _launch_seconds(shape, device, dtype)}, grid


def _expert_flops(experts: Experts, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of both products with this many rows per expert: over all experts, or over as many (at least
    two) as the assignments of the tokens fill."""
    number, width, hidden_size = experts.gate_up.shape  # experts, both projections, hidden size
    used = max(min(number, 8 * tokens // rows), min(2, number))
    ends = torch.arange(1, number + 1).clamp(max=used) * rows
    with torch.device(device):
        offsets = ends.to(device, torch.int32)
        x = torch.randn(used * rows, hidden_size, dtype=dtype, requires_grad=True)
        inner = torch.randn(used * rows, width // 2, dtype=dtype, requires_grad=True)
        seconds = _best(lambda: experts.product(x, experts.gate_up, offsets), [x, experts.gate_up], device)
        seconds += _best(lambda: experts.product(inner, experts.down, offsets), [inner, experts.down], device)
    return 6 * used * rows * (width + width // 2) * hidden_size / seconds


def _attention_flops(shape: ModelShape, length: int, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of attention over rows of this length, with all tokens together."""
    count = max(tokens // length, 1)
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    with torch.device(device):
        q, k, v = (
            torch.randn(count, length, head_count, shape.head_dim, dtype=dtype, requires_grad=True)
            for head_count in heads
        )
        documents = torch.zeros(count, length, dtype=torch.int64, device="cpu")
        full_layout = attention_layout(documents, (count, length), None)
        layout = None if full_layout is None else full_layout.to(device)
        seconds = _best(lambda: attend(q, k, v, layout), [q, k, v], device)
    # Backward has one product more than `attention_flops` counts.
    return count * length * attention_flops(shape, length) * 3.5 / 3 / seconds


def _launch_seconds(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> float:
    """Return the time of a dense layer with minimal work, divided by its number of kernels."""
    small = shape.model_copy(update={"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8})
    with torch.device(device):
        block = TransformerBlock(small, is_dense=True).to(dtype)
        x = torch.randn(1, _TINY_TOKENS, 64, dtype=dtype, requires_grad=True)
        rope = rotary_tables(torch.arange(_TINY_TOKENS).unsqueeze(0), small, dtype)
        seconds = _best(lambda: block(x, rope, None, None, RoutingOptions())[0], [x, *block.parameters()], device)
    form_index = form(str(dtype).removeprefix("torch."), is_compiled=False)
    parts = ["dense", "head_norms"]
    return seconds / sum(sum(KERNELS[part][form_index]) for part in parts[: 1 + small.use_qk_norm])


def _best(forward: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> float:
    """Return the seconds of forward and of the gradients of ``leaves``."""
    grad = None
    times = []
    for _ in range(_ROUNDS + 1):  # the first one compiles kernels and allocates
        _wait(device)
        started = time.perf_counter()
        y = forward()
        grad = torch.ones_like(y) if grad is None else grad
        torch.autograd.grad(y, leaves, grad)  # `backward` would accumulate gradients over rounds
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_peaks(device: torch.device, dtype: torch.dtype) -> Accelerator | None:
    """Return the peaks that shares refer to: for a GPU from the table (None if it is not listed), for a CPU
    measured."""
    if device.type == "cuda":
        return find_accelerator(torch.cuda.get_device_name(device))
    return cpu_peaks(dtype, detect_machine().free_bytes)


def cpu_peaks(dtype: torch.dtype, memory_bytes: int) -> Accelerator:
    """Describe this CPU as an accelerator: measures a square product, and copies of a tensor larger than the caches."""
    x = torch.ones(1 << 26, dtype=torch.uint8)
    out = torch.empty_like(x)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        out.copy_(x)
        times.append(time.perf_counter() - started)
    copied = 2 * x.numel() / min(times)
    return Accelerator("CPU", measured_matmul_flops(dtype, torch.get_num_threads()), memory_bytes, 0.0, copied, copied)
