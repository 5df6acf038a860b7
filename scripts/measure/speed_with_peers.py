#!/usr/bin/env python
"""Speed beside `transformers` and TorchTitan, of fine-tuning beside all weights, and of decoding.

    python scripts/measure/speed_with_peers.py model --flavor debug --rounds 11
    python scripts/measure/speed_with_peers.py finetune --rounds 4
    python scripts/measure/speed_with_peers.py generate --flavor 100M --batch 8 --threads 1

`model` has the contestants of `python -m glm46 benchmark model` and the peers that are installed.
"""

import argparse
import statistics
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from glm46.compute.model.transformer import Transformer  # noqa: E402
from glm46.config.adapter import AdapterConfig  # noqa: E402
from glm46.config.errors import UserError  # noqa: E402
from glm46.config.faults import counted  # noqa: E402
from glm46.config.presets import PRESETS  # noqa: E402
from glm46.operate.benchmark.benchmark_runs import (  # noqa: E402
    default_device,
    device_line,
    progress,
    race_on,
    workload,
)
from glm46.operate.benchmark.model_speed import (  # noqa: E402
    OWN,
    Build,
    Contestant,
    Workload,
    contestant_of,
    speed_table,
)
from glm46.storage.huggingface.hub import fetch_options  # noqa: E402
from scripts.measure.finetune_speed import finetune_speed  # noqa: E402
from scripts.measure.generation_speed import Decoding, generation_speed  # noqa: E402
from scripts.measure.peer import build_peer  # noqa: E402
from scripts.measure.titan import with_titan_moe  # noqa: E402

PEERS = "transformers", "torchtitan"


def build_transformers(name: str, work: Workload, ours: Transformer) -> Contestant:
    """`Glm4MoeForCausalLM`, its experts as one grouped product or in its default loop."""
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
    work = workload(arguments)
    missing = [peer for peer in PEERS if find_spec(peer) is None]
    missing += [] if work.device.type == "cuda" else ["ours compiled"]  # compilation takes minutes on a CPU
    missing += [] if work.dtype == torch.bfloat16 else ["torchtitan"]  # its experts compute in BF16
    names = arguments.only or [name for name in CONTESTANTS if not name.startswith(tuple(missing))]
    contestants = race_on(work, {name: CONTESTANTS[name] for name in names}, arguments.rounds)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    of_kind = {}
    for run, flavor in ((model, "debug"), (finetune, "15B"), (generate, "debug")):
        of_kind[run] = kind = kinds.add_parser(run.__name__, help=run.__doc__)
        kind.set_defaults(run=run)
        kind.add_argument("--flavor", default=flavor, choices=list(PRESETS), help="preset of the model")
        kind.add_argument("--rounds", type=int, help="timed rounds; absent: three to nine, about a minute")
        kind.add_argument("--threads", type=int, help="threads of torch; absent: its own choice")
        kind.add_argument("--batch", type=int, default={model: 4}.get(run, 1), help="sequences")
    for run in (model, finetune):
        of_kind[run].add_argument("--layers", type=int, default={finetune: 3}.get(run), help="decoder layers")
        of_kind[run].add_argument("--seq-len", type=int, default=512, help="tokens of each sequence")
    of_kind[model].add_argument("--device", choices=["cpu", "cuda"], help="absent: a GPU if there is one")
    of_kind[model].add_argument("--dtype", choices=["float32", "bfloat16"], help="absent: that of the device")
    of_kind[model].add_argument("--only", action="append", choices=CONTESTANTS, help="contestant; again for more")
    for option, default in {"experts": 16, "vocabulary": 8192, "rank": 32, "expert-rank": 8}.items():
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
