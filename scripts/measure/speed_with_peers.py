#!/usr/bin/env python
"""Speed and memory of a training step and of decoding beside `transformers` and TorchTitan, of fine-tuning beside all
weights, and of checkpoints beside plain copies.

    python scripts/measure/speed_with_peers.py model --flavor debug --rounds 11
    python scripts/measure/speed_with_peers.py finetune --rounds 4
    python scripts/measure/speed_with_peers.py generate --flavor 100M --batch 8 --threads 1
    python scripts/measure/speed_with_peers.py checkpoint --gib 2 --folder /mnt/disk

Peers that are not installed are left out.
"""

import argparse
import platform
import statistics
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.presets import PRESETS
from glm46.operate.launch.environment import describe_version
from glm46.storage.huggingface.hub import fetch_options
from scripts.measure.checkpoint_speed import checkpoint_speed
from scripts.measure.finetune_speed import finetune_speed
from scripts.measure.generation_speed import Decoding, generation_speed
from scripts.measure.model_speed import (
    OWN,
    Build,
    Contestant,
    Workload,
    contestant_of,
    peak_bytes_on_cpu,
    race,
    speed_table,
)
from scripts.measure.peer import build_peer
from scripts.measure.titan import with_titan_moe

PEERS = "transformers", "torchtitan"
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
    return torch.device(kind), torch.bfloat16 if kind == "cuda" else torch.float32


def device_line(device: torch.device) -> str:
    """Versions and the device, for a report."""
    if device.type == "cuda":
        return f"{describe_version()}, {torch.cuda.get_device_name(device)}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()  # ARM lists no names
    return f"{describe_version()}, {cpu}, {torch.get_num_threads()} threads"


def build_transformers(name: str, work: Workload, ours: Transformer) -> Contestant:
    """The model of `transformers`, its experts as one grouped product or in its default loop."""
    peer = build_peer(ours, "grouped_mm" if name.endswith("grouped_mm") else "eager").train()
    return contestant_of(name, work, peer, lambda inputs, labels: peer(inputs, labels=inputs, shift_labels=labels).loss)


def build_titan(name: str, work: Workload, ours: Transformer) -> Contestant:
    """Our model with TorchTitan's MoE layers."""
    model = with_titan_moe(ours)
    return contestant_of(name, work, model, lambda inputs, labels: model(inputs, labels=labels).loss / work.tokens)


CONTESTANTS: dict[str, Build] = OWN | {
    "transformers grouped_mm": build_transformers,
    "transformers default": build_transformers,
    "torchtitan MoE": build_titan,
}


def model(arguments: argparse.Namespace) -> None:
    """Race a training step."""
    device, dtype = default_device(arguments.threads, arguments.device)
    dtype = dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
    work = Workload(
        arguments.flavor, arguments.batch, arguments.seq_len, device, dtype, arguments.layers,
        experts=arguments.experts, vocabulary=arguments.vocabulary,
    )  # fmt: skip
    missing = [peer for peer in PEERS if find_spec(peer) is None]
    missing += [] if work.device.type == "cuda" else ["ours compiled"]  # compilation takes minutes on a CPU
    missing += [] if work.dtype == torch.bfloat16 else ["torchtitan"]  # its experts compute in BF16
    names = arguments.only or [name for name in CONTESTANTS if not name.startswith(tuple(missing))]
    contestants = race(work, {name: CONTESTANTS[name] for name in names}, arguments.rounds, progress)
    for one in contestants if device.type == "cpu" else ():
        progress(f"measuring the memory of {one.name}")
        one.peak_bytes = peak_bytes_on_cpu(one.name, CONTESTANTS[one.name], work, torch.get_num_threads())
    peers = [contestant for contestant in contestants if contestant.name.startswith(PEERS)]
    base = min(peers, key=lambda peer: statistics.median(peer.seconds)) if peers else contestants[0]
    versions = ", ".join(f"{peer} {metadata.version(peer)}" for peer in PEERS if find_spec(peer))
    print(f"{device_line(work.device)}, {versions}", *speed_table(work, contestants, base), sep="\n")


def finetune(arguments: argparse.Namespace) -> None:
    """Race steps of all weights and of adapters."""
    device, dtype = default_device(arguments.threads)
    work = Workload(
        arguments.flavor, arguments.batch, arguments.seq_len, device, dtype, arguments.layers,
        experts=arguments.experts, vocabulary=arguments.vocabulary,
    )  # fmt: skip
    print(
        f"step (forward, backward, AdamW) of {work.flavor}, {counted(work.layers, 'layer')} of "
        f"{counted(work.experts, 'expert')}, {work.vocabulary} tokens in the vocabulary, without MTP, "
        f"{work.batch} x {work.seq_len} tokens, rank {arguments.rank}, of experts {arguments.expert_rank}, "
        f"{str(dtype).removeprefix('torch.')}\n{device_line(device)}"
    )
    adapter = AdapterConfig(rank=arguments.rank, expert_rank=arguments.expert_rank)
    print(finetune_speed(work, adapter, arguments.rounds, progress))


def generate(arguments: argparse.Namespace) -> None:
    """Race decoding."""
    default_device(arguments.threads)
    fetch_options(arguments, "model")
    work = Decoding(
        arguments.flavor, arguments.batch, arguments.prompt_tokens, arguments.new_tokens, arguments.model,
        arguments.samples,
    )  # fmt: skip
    options = {"speculative": arguments.speculative, "with_peers": find_spec("transformers") is not None}
    print(generation_speed(work, rounds=arguments.rounds, **options, report=progress))


def checkpoint(arguments: argparse.Namespace) -> None:
    """Measure saves and loads."""
    device, _ = default_device(arguments.threads)
    print(checkpoint_speed(arguments.folder, arguments.gib, arguments.rounds, device, progress))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    of_kind = {}
    for run in (model, finetune, generate, checkpoint):
        of_kind[run] = kind = kinds.add_parser(run.__name__, help=run.__doc__)
        kind.set_defaults(run=run)
        kind.add_argument("--rounds", type=int, help="timed rounds; absent: three to nine, about a minute")
        kind.add_argument("--threads", type=int, help="threads of torch; absent: its own choice")
    for run, flavor, batch in ((model, "debug", 4), (finetune, "15B", 1), (generate, "debug", 1)):
        of_kind[run].add_argument("--flavor", default=flavor, choices=list(PRESETS), help="preset of the model")
        of_kind[run].add_argument("--batch", type=int, default=batch, help="sequences")
    saves = of_kind[checkpoint]
    saves.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure; absent: this folder")
    saves.add_argument("--gib", type=float, default=1.0, help="size of the state")
    for run in (model, finetune):
        of_kind[run].add_argument("--layers", type=int, default={finetune: 3}.get(run), help="decoder layers")
        of_kind[run].add_argument("--seq-len", type=int, default=512, help="tokens of each sequence")
        for option, default in {"experts": 16, "vocabulary": 8192}.items():
            of_kind[run].add_argument(f"--{option}", type=int, default={finetune: default}.get(run))
    of_kind[model].add_argument("--device", choices=["cpu", "cuda"], help="absent: a GPU if there is one")
    of_kind[model].add_argument("--dtype", choices=["float32", "bfloat16"], help="absent: that of the device")
    of_kind[model].add_argument("--only", action="append", choices=CONTESTANTS, help="contestant; again for more")
    for option, default in {"rank": 32, "expert-rank": 8}.items():
        of_kind[finetune].add_argument(f"--{option}", type=int, default=default)
    decoding = of_kind[generate]
    decoding.add_argument("--model", type=Path, help="Hugging Face folder, hf://… or step folder; with prompts of text")
    decoding.add_argument("--prompt-tokens", type=int, default=32, help="of each prompt")
    decoding.add_argument("--new-tokens", type=int, default=33, help="of each answer, the first with the prompt")
    decoding.add_argument("--samples", type=int, help="of each prompt, sampled as rollouts do; absent: greedy")
    decoding.add_argument("--speculative", action="store_true", help="also with drafts, and how many are accepted")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one of the races; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(*(f"error: {fault}" for fault in error.faults), sep="\n", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
