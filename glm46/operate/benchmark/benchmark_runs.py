"""The measurements of ``python -m glm46 benchmark`` and their reports."""

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.options import require_writable
from glm46.config.presets import PRESETS
from glm46.engine.observe.hardware import device_peak_flops
from glm46.operate.benchmark.model_speed import Contestant, Workload, median_ratio, peak_bytes_on_cpu, race
from glm46.operate.benchmark.rounds import CONTESTANTS
from glm46.operate.launch.environment import describe_version
from glm46.run.flops import training_flops_per_token

_PEERS = "transformers", "torchtitan"
_SECONDS_BETWEEN_LINES = 15.0


def _print(text: str) -> None:
    print(text, flush=True)


class _Lines:
    """Prints lines of progress to stderr: all on a terminal, elsewhere at most one in 15 seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() or now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(text, file=sys.stderr, flush=True)


_progress = _Lines()


def model(arguments: argparse.Namespace) -> None:
    """Measure a training step against transformers."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("benchmark: --device cuda, but torch finds no GPU; use --device cpu")
    device = torch.device(kind)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if kind == "cuda" else "float32"))
    work = Workload(arguments.flavor, arguments.batch, arguments.seq_len, device, dtype, arguments.layers)
    left_out = () if kind == "cuda" else ("ours compiled",)  # compilation takes minutes on a CPU
    left_out += () if dtype == torch.bfloat16 else ("torchtitan MoE",)
    names = tuple(arguments.only or (name for name in _installed() if name not in left_out))
    contestants = race(work, names, arguments.rounds, _progress)
    if kind == "cpu":
        for contestant in contestants:
            _progress(f"measuring the memory of {contestant.name}")
            contestant.peak_bytes = peak_bytes_on_cpu(contestant.name, work, torch.get_num_threads())
    _print(_report(work, contestants))


def finetune(arguments: argparse.Namespace) -> None:
    """Measure steps of all weights and of adapters."""
    from glm46.operate.benchmark.finetune_speed import finetune_speed

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    has_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if has_gpu else "cpu"), torch.bfloat16 if has_gpu else torch.float32
    work = Workload(
        arguments.flavor, arguments.batch, arguments.seq_len, device, dtype, arguments.layers,
        experts=arguments.experts, vocabulary=arguments.vocabulary,
    )  # fmt: skip
    _print(
        f"step (forward, backward, AdamW) of {work.flavor}, "
        f"{counted(work.layers, 'layer')} of {counted(work.experts, 'expert')}, "
        f"{work.vocabulary} tokens in the vocabulary, without MTP, {work.batch} x {work.seq_len} tokens, "
        f"rank {arguments.rank}, of experts {arguments.expert_rank}, "
        f"{str(dtype).removeprefix('torch.')}\n{_environment(work)}"
    )
    adapter = AdapterConfig(rank=arguments.rank, expert_rank=arguments.expert_rank)
    _print(finetune_speed(work, adapter, arguments.rounds, _progress))


def rates(arguments: argparse.Namespace) -> None:
    """Measure what kernels reach of the peaks."""
    from glm46.operate.benchmark.rates import device_peaks, measure_rates

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    has_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if has_gpu else "cpu"), torch.bfloat16 if has_gpu else torch.float32
    peaks = device_peaks(device, dtype)
    if peaks is None:
        raise UserError(f"benchmark: the table of GPUs (glm46/run/peaks.py) lacks {torch.cuda.get_device_name()}")
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    rates = measure_rates(PRESETS[arguments.flavor], arguments.tokens, device, dtype)
    source = f"{peaks.name}, {arguments.flavor}, {arguments.tokens:,} tokens, torch {torch.__version__}, {date.today()}"
    found = rates.efficiencies(peaks, source)
    _print(
        f"--gpu '{peaks.name}:bf16={peaks.bf16_flops / 1e12:.4g},memory={peaks.memory_bytes / 2**30:.4g},"
        f"bandwidth={peaks.memory_bandwidth / 1e9:.4g},link={peaks.link_bandwidth / 1e9:.4g}'"
    )
    _print(json.dumps(found, indent=2))
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"benchmark: --json {arguments.json}: {error.strerror}; name another file") from error


def checkpoint(arguments: argparse.Namespace) -> None:
    """Measure saves and loads."""
    from glm46.operate.benchmark.checkpoint_speed import checkpoint_speed

    if not arguments.folder.is_dir():
        raise UserError(f"benchmark: --folder {arguments.folder}: no such folder; name an existing one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _print(checkpoint_speed(arguments.folder, arguments.gib, arguments.rounds, device, _progress))


def generate(arguments: argparse.Namespace) -> None:
    """Measure decoding."""
    from glm46.operate.benchmark.generation_speed import Decoding, generation_speed

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    work = Decoding(
        arguments.flavor, arguments.batch, arguments.prompt_tokens, arguments.new_tokens, arguments.model,
        arguments.samples,
    )  # fmt: skip
    options = {"speculative": arguments.speculative, "with_peers": "transformers default" in _installed()}
    _print(generation_speed(work, rounds=arguments.rounds, **options, report=_progress))


def _installed() -> tuple[str, ...]:
    missing = tuple(peer for peer in _PEERS if find_spec(peer) is None)
    if "transformers" in missing:
        _print("transformers is not installed, so it is not measured; pip install 'glm46[hf]' adds it")
    return tuple(name for name in CONTESTANTS if not name.startswith(missing))


def _report(work: Workload, contestants: list[Contestant]) -> str:
    flops = training_flops_per_token(work.shape(), work.seq_len) * work.tokens
    peak = device_peak_flops(work.device, work.dtype)
    peers = [contestant for contestant in contestants if contestant.name.startswith(_PEERS)]
    base = min(peers, key=lambda peer: statistics.median(peer.seconds)) if peers else contestants[0]
    lines = [
        f"training step (forward, backward) of {work.flavor}, {counted(work.shape().num_hidden_layers, 'layer')}, "
        f"without MTP, "
        f"{work.batch} x {work.seq_len} tokens, {str(work.dtype).removeprefix('torch.')}",
        _environment(work),
        f"{flops / 1e9:,.1f} GFLOP per step; peak "
        + (f"{peak / 1e9:,.0f} GFLOP/s" if peak else "unknown")
        + (" (measured: square product of this type)" if work.device.type == "cpu" else " (table)"),
        f"speed against {base.name}: median over {len(base.seconds)} interleaved rounds of the ratio in each",
        "",
        f"  {'':<24} {'ms/step':>9} {'tokens/s':>10} {'GFLOP/s':>9} {'of peak':>8} {'speed':>7} {'peak GiB':>9}",
    ]
    for contestant in contestants:
        seconds = statistics.median(contestant.seconds)
        speed = flops / seconds
        share = f"{speed / peak:.1%}" if peak else "?"
        memory = f"{contestant.peak_bytes / 2**30:.2f}" if contestant.peak_bytes is not None else "?"
        lines.append(
            f"  {contestant.name:<24} {seconds * 1e3:9.1f} {work.tokens / seconds:10,.0f} {speed / 1e9:9,.0f} "
            f"{share:>8} {median_ratio(contestant, base):7.3f} {memory:>9}"
        )
    return "\n".join(lines)


def _environment(work: Workload) -> str:
    peers = [f"{peer} {metadata.version(peer)}" for peer in _PEERS if find_spec(peer)] or ["no transformers"]
    is_gpu = work.device.type == "cuda"
    device = torch.cuda.get_device_name(work.device) if is_gpu else f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return f"{describe_version()}, {', '.join(peers)}, {device}"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()  # ARM lists no names
