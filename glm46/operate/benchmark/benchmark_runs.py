"""The measurements of ``python -m glm46 benchmark`` and their reports."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

from glm46.config.errors import UserError
from glm46.config.options import require_writable
from glm46.config.presets import PRESETS
from glm46.operate.benchmark.model_speed import OWN, Build, Contestant, Workload, peak_bytes_on_cpu, race, speed_table
from glm46.operate.launch.environment import describe_version

_SECONDS_BETWEEN_LINES = 15.0


class _Lines:
    """Prints lines of progress to stderr: all on a terminal, elsewhere at most one in 15 seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() or now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(text, file=sys.stderr, flush=True)


progress = _Lines()


def default_device(threads: int | None, kind: str | None = None) -> tuple[torch.device, torch.dtype]:
    """A GPU and BF16 where there is one, else the CPU and FP32; torch takes so many threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("benchmark: --device cuda, but torch finds no GPU; use --device cpu")
    return torch.device(kind), torch.bfloat16 if kind == "cuda" else torch.float32


def model(arguments: argparse.Namespace) -> None:
    """Measure a training step."""
    work = workload(arguments)
    # Compilation takes minutes on a CPU.
    names = arguments.only or [name for name in OWN if work.device.type == "cuda" or name != "ours compiled"]
    contestants = race_on(work, {name: OWN[name] for name in names}, arguments.rounds)
    print(device_line(work.device), *speed_table(work, contestants, contestants[0]), sep="\n", flush=True)


def workload(arguments: argparse.Namespace) -> Workload:
    """The work that the options of ``benchmark model`` describe."""
    device, dtype = default_device(arguments.threads, arguments.device)
    dtype = dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
    return Workload(arguments.flavor, arguments.batch, arguments.seq_len, device, dtype, arguments.layers)


def race_on(work: Workload, builders: Mapping[str, Build], rounds: int | None) -> list[Contestant]:
    """`race`, with the peak memory on a CPU too."""
    contestants = race(work, builders, rounds, progress)
    for contestant in contestants if work.device.type == "cpu" else ():
        progress(f"measuring the memory of {contestant.name}")
        build = builders[contestant.name]
        contestant.peak_bytes = peak_bytes_on_cpu(contestant.name, build, work, torch.get_num_threads())
    return contestants


def rates(arguments: argparse.Namespace) -> None:
    """Measure what kernels reach of the peaks."""
    from glm46.operate.benchmark.rates import device_peaks, measure_rates

    device, dtype = default_device(arguments.threads)
    peaks = device_peaks(device, dtype)
    if peaks is None:
        raise UserError(f"benchmark: the table of GPUs (glm46/run/peaks.py) lacks {torch.cuda.get_device_name()}")
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    rates = measure_rates(PRESETS[arguments.flavor], arguments.tokens, device, dtype)
    source = f"{peaks.name}, {arguments.flavor}, {arguments.tokens:,} tokens, torch {torch.__version__}, {date.today()}"
    found = json.dumps(rates.efficiencies(peaks, source), indent=2)
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


def checkpoint(arguments: argparse.Namespace) -> None:
    """Measure saves and loads."""
    from glm46.operate.benchmark.checkpoint_speed import checkpoint_speed

    if not arguments.folder.is_dir():
        raise UserError(f"benchmark: --folder {arguments.folder}: no such folder; name an existing one")
    device, _ = default_device(None)
    print(checkpoint_speed(arguments.folder, arguments.gib, arguments.rounds, device, progress), flush=True)


def device_line(device: torch.device) -> str:
    """Versions and the device, for a report."""
    if device.type == "cuda":
        return f"{describe_version()}, {torch.cuda.get_device_name(device)}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()  # ARM lists no names
    return f"{describe_version()}, {cpu}, {torch.get_num_threads()} threads"
