"""``python -m glm46 benchmark``: speed and memory of this machine, beside installed alternatives."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from glm46.config.options import VerbParser, above_zero, positive, verb_parser, whole
from glm46.config.presets import PRESETS
from glm46.operate.benchmark.rounds import CONTESTANTS, SECONDS
from glm46.storage.huggingface.hub import fetch_options

_FITTING = f"absent: as many as fit into {SECONDS:.0f} s, three to nine"


def benchmark_command(argv: Sequence[str]) -> int:
    """Run the verb; prints a report with machine, versions and workload.

    Returns:
        Exit code.
    """
    arguments = _parser().parse_args(argv or ["model"])
    fetch_options(arguments, *({"model"} & vars(arguments).keys()))
    resolve_name(f"glm46.operate.benchmark.benchmark_runs:{arguments.run}")(arguments)
    return 0


def _parser() -> VerbParser:
    parser = verb_parser("benchmark")
    kinds = parser.add_subparsers(title="what", metavar="model|finetune|generate|checkpoint|rates", required=True)
    model = kinds.add_parser("model", help="training step against transformers on the same weights")
    model.add_argument("--flavor", default="debug", choices=list(PRESETS), help="preset of the model")
    model.add_argument("--layers", type=positive, help="decoder layers; absent: the preset's")
    model.add_argument("--batch", type=positive, default=4, help="sequences")
    model.add_argument("--seq-len", type=positive, default=512, help="tokens of each")
    model.add_argument("--rounds", type=positive, help=f"timed steps of each contestant; {_FITTING}")
    model.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    model.add_argument("--device", choices=["cpu", "cuda"], help="absent: a GPU if there is one")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="absent: float32 on a CPU, bfloat16 on a GPU")
    model.add_argument(
        "--only",
        action="append",
        choices=CONTESTANTS,
        help="contestant, repeatable; absent: all installed; on a CPU not the compiled one; torchtitan's in bfloat16",
    )
    model.set_defaults(run="model")
    finetune = kinds.add_parser("finetune", help="steps of all weights, LoRA and DoRA, interleaved")
    finetune.add_argument("--flavor", default="15B", choices=list(PRESETS), help="preset of the layers")
    finetune.add_argument("--layers", type=positive, default=3, help="decoder layers")
    finetune.add_argument("--experts", type=positive, default=16, help="routed experts of each")
    finetune.add_argument("--vocabulary", type=positive, default=8192, help="its tokens")
    finetune.add_argument("--batch", type=positive, default=1, help="sequences")
    finetune.add_argument("--seq-len", type=positive, default=512, help="tokens of each")
    finetune.add_argument("--rank", type=positive, default=32, help="of the adapters")
    finetune.add_argument("--expert-rank", type=positive, default=8, help="of the adapters of routed experts")
    finetune.add_argument("--rounds", type=positive, help=f"timed steps of each; {_FITTING}")
    finetune.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    finetune.set_defaults(run="finetune")
    generate = kinds.add_parser("generate", help="greedy decoding, or samples, on a CPU against transformers")
    weights = generate.add_mutually_exclusive_group()
    weights.add_argument("--flavor", default="debug", choices=list(PRESETS), help="preset, with random weights")
    weights.add_argument("--model", type=Path, help="Hugging Face folder, hf://… or step folder; prompts are text then")
    generate.add_argument("--batch", type=positive, default=1, help="prompts")
    generate.add_argument("--prompt-tokens", type=positive, default=32, help="tokens of each prompt")
    generate.add_argument(
        "--new-tokens", type=whole(2), default=33, help="tokens of each answer, the first with the prompt"
    )
    generate.add_argument("--samples", type=positive, help="of each prompt, sampled as rollouts do; absent: greedy")
    generate.add_argument("--rounds", type=positive, help=f"timed runs of each contestant; {_FITTING}")
    generate.add_argument("--speculative", action="store_true", help="also with drafts, and how many are accepted")
    generate.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    generate.set_defaults(run="generate")
    checkpoint = kinds.add_parser("checkpoint", help="stall, save, verification and load")
    checkpoint.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure; absent: this folder")
    checkpoint.add_argument("--gib", type=above_zero, default=1.0, help="size of the state")
    checkpoint.add_argument("--rounds", type=positive, help=f"timed saves; {_FITTING}")
    checkpoint.set_defaults(run="checkpoint")
    rates = kinds.add_parser("rates", help="what kernels reach of the peaks, for plan --measured")
    rates.add_argument("--flavor", default="GLM-4.5-Air", choices=list(PRESETS), help="preset of the layer")
    rates.add_argument("--tokens", type=positive, default=4096, help="of a micro-batch on one GPU")
    rates.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    rates.add_argument("--json", type=Path, metavar="FILE", help="write the efficiencies there")
    rates.set_defaults(run="rates")
    return parser
