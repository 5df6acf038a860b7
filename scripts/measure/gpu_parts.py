"""Parts of `scripts/gpu_report.py` that call rooms directly: kernels, decoding, adapters, a killed run."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glm46 import compat
from glm46.compute.distributed.host_memory import host_tensor
from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.compute.model.cross_entropy import summed_loss
from glm46.compute.model.dispatch import Sum, sort_assignments
from glm46.compute.model.experts import grouped_mm
from glm46.compute.model.layers import RMSNorm
from glm46.compute.model.transformer import Transformer
from glm46.compute.optim.newton_schulz import orthogonalize
from glm46.compute.parallelize.float8_experts import experts_kernels
from glm46.compute.parallelize.plan import initialise
from glm46.config.adapter import AdapterConfig
from glm46.config.float8 import Float8Config
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling
from glm46.engine.training.network import build_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.run.plan import resolve_plan
from glm46.tasks.pretrain.next_token import NextToken
from tests.ranks.sharded_layouts import Job

Result = dict[str, Any]


def _seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """The shortest of some runs, after one that loads the kernel."""
    work()
    found = []
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def measure_kernels(is_dry: bool) -> Result:
    """Single kernels of a step of GLM-4.5-Air beside their bounds: bytes over the bandwidth of a copy on the device,
    and FLOPs over the rate of one large product, both measured here."""
    device = torch.device("cpu" if is_dry else "cuda")
    shape, T, size = (PRESETS["debug"], 64, 256) if is_dry else (PRESETS["GLM-4.5-Air"], 4096, 8192)
    D, E, A, width = shape.hidden_size, shape.n_routed_experts, shape.num_experts_per_tok, shape.moe_intermediate_size

    def values(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).bfloat16()

    square, large = values(size, size), torch.empty(size * size * 8, dtype=torch.uint8, device=device)
    flops = 2 * size**3 / _seconds(lambda: square @ square, device, 5)
    bandwidth = 2 * large.numel() / _seconds(lambda: large.clone(), device, 5)
    x, rows, scores = values(T, D), values(T * A, D), torch.rand(T, E, device=device)
    chosen = scores.topk(A).indices
    order, place, _ = sort_assignments(chosen.flatten(), E)
    norm, weight = RMSNorm(D, 1e-5).to(device, torch.bfloat16), values(shape.vocab_size, D)
    gradients, pinned = values(8, width, D), not is_dry
    head = weight.detach().requires_grad_()
    host = {name: torch.empty(large.numel(), dtype=torch.uint8, pin_memory=pinned) for name in ("torch",)}
    host["slab"] = host_tensor((large.numel(),), torch.uint8, pin=pinned)
    work: dict[str, tuple[Callable[[], object], float, float]] = {
        "sort int64": (lambda: chosen.flatten().argsort(stable=True), 16.0 * T * A, 0),
        "sort int16": (lambda: chosen.flatten().short().argsort(stable=True), 10.0 * T * A, 0),
        "top k": (lambda: scores.topk(A), 4.0 * T * E, 0),
        "RMSNorm": (lambda: norm(x), 4.0 * T * D, 0),
        "gather of rows": (lambda: x.index_select(0, order // A), 4.0 * T * A * D, 0),
        "combine": (lambda: Sum.apply(rows, order // A, place.view(T, A), None), 2.0 * T * (A + 1) * D, 0),
        "Newton-Schulz": (
            lambda: orthogonalize(gradients, 5, torch.bfloat16), 0, 5 * 8 * (4.0 * width**2 * D + 2.0 * width**3)
        ),
    }  # fmt: skip
    for tokens in (1024, 2048, 4096):
        hidden = values(min(tokens, T), D).requires_grad_()
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=device)
        loss = lambda hidden=hidden, labels=labels, tokens=tokens: summed_loss(hidden, head, labels, None, tokens)  # noqa: E731
        work[f"head, chunk of {tokens}"] = loss, 0, 6.0 * len(hidden) * D * shape.vocab_size
    experts = values(E, 2 * width, D).transpose(1, 2)
    for of_expert in (64, 256, 1024, 2048):
        count = 2 if is_dry else of_expert
        given = values(count * E, D)
        offsets = torch.arange(1, E + 1, device=device, dtype=torch.int32) * count
        product = lambda given=given, offsets=offsets: grouped_mm(given, experts, offsets)  # noqa: E731
        moved = 2.0 * (given.numel() + experts.numel() + 2 * width * len(given))
        work[f"grouped product, {of_expert} rows of an expert"] = product, moved, 4.0 * len(given) * D * width
        if is_dry or torch.cuda.get_device_capability()[0] in (9, 10):
            kernels = experts_kernels(
                Float8Config(recipe_name="rowwise", experts_recipe_name="rowwise", emulate=is_dry)
            )
            assert kernels is not None
            of_weight = partial(kernels.forms, experts.transpose(1, 2), for_backward=False)
            in_fp8 = partial(kernels.multiply, given, of_weight(), offsets)
            moved = 3.0 * given.numel() + experts.numel() + 4.0 * width * len(given)
            work[f"the same in FP8, {of_expert} rows"] = in_fp8, moved, 2.0 * len(given) * D * width
            work["weights rounded to FP8"] = of_weight, 3.0 * experts.numel(), 0
    work |= _attention(shape, T, device)
    for name, memory in host.items():
        copy = lambda memory=memory: large.copy_(memory, non_blocking=True)  # noqa: E731
        work[f"copy from the host, {name}"] = copy, 0, 0
    table = []
    for name, (call, moved, products) in work.items():
        seconds, bound = _seconds(call, device, 2 if is_dry else 10), max(moved / bandwidth, products / flops)
        table.append({
            "kernel": name, "ms": seconds * 1e3, "bound ms": bound * 1e3 or None, "share": bound / seconds or None,
            "GB/s": (large.numel() if "host" in name else moved) / seconds / 1e9 or None,
        })  # fmt: skip
    return {"copy_gb_per_second": bandwidth / 1e9, "product_tflops": flops / 1e12, "rows": table}


def _attention(shape: ModelShape, tokens: int, device: torch.device) -> dict[str, tuple[Callable, float, float]]:
    """Causal attention of one sequence by each kernel that takes it: that of documents, and those of SDPA."""
    heads, groups, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    q, k, v = (torch.randn(tokens, n, width, device=device).bfloat16() for n in (heads, groups, groups))
    products, work = 2.0 * tokens**2 * heads * width, {}
    if device.type == "cuda":
        ends = torch.tensor([0, tokens], device=device, dtype=torch.int32)
        varlen = lambda: compat.varlen_attention(q, k, v, ends, ends, tokens, tokens, (-1, 0))  # noqa: E731
        work["attention of documents"] = varlen, 0.0, products
    whole = [x.transpose(0, 1).unsqueeze(0) for x in (q, *(x.repeat_interleave(heads // groups, 1) for x in (k, v)))]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*whole, is_causal=True)

        with suppress(RuntimeError):  # not on this device
            attend()
            work[f"attention, {backend.name}"] = attend, 0.0, products
    return work


def _model(is_dry: bool, depths: int) -> Transformer:
    shape = PRESETS["debug" if is_dry else "GLM-4.5-Air"]
    shape = shape.model_copy(update={"num_hidden_layers": 3, "num_nextn_predict_layers": depths})
    with torch.device("meta"):
        model = Transformer(shape).cast(torch.float32 if is_dry else torch.bfloat16)
    model.to_empty(device="cpu" if is_dry else "cuda")
    initialise(model, 0)
    return model.requires_grad_(False).eval()


def measure_generation(is_dry: bool) -> Result:
    """Decoding of four prompts of different lengths, with and without drafts. A token that takes far longer than the
    others has had a kernel chosen or built for its shape."""
    model, tokens, table = _model(is_dry, 1), 8 if is_dry else 200, []
    shape: ModelShape = model.shape
    for drafts in (False, True):
        for attempt in ("first", "again"):
            prompts = [[(7 * i + n) % shape.vocab_size for i in range(n)] for n in (5, 9, 33, 120)]
            continuations = [Continuation(prompt, tokens, seed=n) for n, prompt in enumerate(prompts)]
            keys: set[tuple] = set()
            decoder = decoder_for(model, continuations, cpu_kernels=False, drafts=drafts)
            writing = Generation(
                decoder, continuations, sampling=Sampling(1.0), stop=frozenset(), vocab_size=shape.vocab_size
            )
            rounds, before = [], time.perf_counter()
            attend = F.scaled_dot_product_attention

            def counted(q: Tensor, k: Tensor, *rest: Any, _keys: set = keys, _attend: Callable = attend, **named: Any):
                _keys.add((q.shape, q.stride(), k.shape, k.stride(), named.get("attn_mask") is not None))
                return _attend(q, k, *rest, **named)

            F.scaled_dot_product_attention = counted
            try:
                for _ in writing:
                    rounds.append(time.perf_counter() - before)
                    before = time.perf_counter()
            finally:
                F.scaled_dot_product_attention = attend
            assert all(len(one.tokens) == tokens for one in continuations)
            table.append({
                "drafts": drafts, "run": attempt, "tokens_per_second": 4 * tokens / sum(rounds), "rounds": len(rounds),
                "median_ms": statistics.median(rounds) * 1e3, "slowest_ms": max(rounds) * 1e3, "shapes": len(keys),
            })  # fmt: skip
    return {"rows": table}


def train_adapters(config: RunConfig) -> Result:
    """Three steps of LoRA on every linear layer and expert of a frozen base with initial weights."""
    adapter = AdapterConfig(name="lora", rank=16, expert_rank=16, alpha=32.0)
    plan = resolve_plan(config.model_copy(update={"adapter": adapter}), 1)
    process = join(60)
    try:
        network = build_network(plan, build_cluster(plan, process))
        job = Job(plan, network.cluster, {"model": network}, {"model": NextToken(network)})
        generator, rows = torch.Generator().manual_seed(0), []
        for step in range(3):
            size = plan.rows_per_micro_batch, config.training.seq_len
            ids = torch.randint(0, plan.shape.vocab_size, size, generator=generator)
            places = torch.arange(size[1]).expand(size)
            batch = {"input_ids": ids, "labels": ids, "positions": places, "document_ids": torch.zeros_like(ids)}
            began = time.perf_counter()
            outcome = train_step(job, [batch], count_step(job, [batch]), step, 1.0).main
            loss, ms = outcome.objective["loss"].item() / ids.numel(), (time.perf_counter() - began) * 1e3
            rows.append({"step": step, "ms": ms, "loss": loss, "grad_norm": outcome.grad_norm.item()})
        trained = sum(parameter.numel() for parameter in network.parameters.values())
        return {"trained_parameters": trained, "rows": rows}
    finally:
        leave()


def _rows(file: Path) -> list[Result]:
    lines: Iterable[str] = file.read_text().splitlines() if file.exists() else ()
    return [row for row in (json.loads(line) for line in lines if line.endswith("}")) if "loss" in row]


def kill_and_resume(file: Path, dump: Path, steps: int, kill_after: int, seconds: float) -> Result:
    """A run of the launcher that is killed after a checkpoint of some step or a later one, and the same command once
    more.

    Raises:
        RuntimeError: a run ends with another code, or the second one does not go on from the last checkpoint.
    """
    # Not `sys.executable`, which under the tests of this script is a file whose processes no signal reaches.
    command = [sys.orig_argv[0], "-m", "glm46", "launch", "--config", str(file), "--nproc", "1"]
    metrics, end = dump / "metrics.jsonl", time.monotonic() + seconds

    def goes_beyond() -> bool:
        """True once a step is done that the last checkpoint does not have: both runs compute it."""
        saved = max((int(folder.name[5:]) for folder in dump.glob("checkpoint/step-??????")), default=0)
        return saved >= kill_after and any(row["step"] > saved for row in _rows(metrics))

    first = subprocess.Popen(command, start_new_session=True)
    try:
        while not goes_beyond():
            if first.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no checkpoint of step {kill_after}; exit code {first.poll()}")
            time.sleep(0.02)
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    before = {row["step"]: row["loss"] for row in _rows(metrics)}
    began = time.monotonic()
    if code := subprocess.run(command, timeout=max(end - began, 1)).returncode:
        raise RuntimeError(f"the second run ended with {code}")
    after = _rows(metrics)
    if [row["step"] for row in after][-1] != steps or len({row["step"] for row in after}) != steps:
        raise RuntimeError(f"steps {[row['step'] for row in after]} instead of 1 to {steps}")
    apart = max(abs(row["loss"] / before[row["step"]] - 1) for row in after if row["step"] in before)
    keys = [key for key in after[-1] if "checkpoint" in key or "stall" in key]
    saved = {key: after[-1][key] for key in keys if isinstance(after[-1][key], float)}
    return {"killed_after_step": max(before), "seconds_of_the_second_run": time.monotonic() - began,
            "largest_difference_of_a_loss": apart, **saved}  # fmt: skip
