"""``python -m glm46 benchmark``: the speed of this machine, as a plan takes it, and of fine-tuning beside TRL."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import above_zero, positive, verb_parser, whole
from glm46.config.presets import PRESETS


def benchmark_command(argv: Sequence[str]) -> int:
    """Run the verb; prints what the kernels of a model's layers reach of the peaks of this machine, or how
    fast two trainers are.

    Returns:
        Exit code.
    """
    parser = verb_parser("benchmark")
    kinds = parser.add_subparsers(title="what", metavar="rates | links | finetune", required=True)
    rates = kinds.add_parser("rates", help="what kernels reach of the peaks, for plan --measured; the default")
    rates.add_argument("--flavor", default="GLM-4.5-Air", choices=list(PRESETS), help="preset of the layer")
    rates.add_argument("--tokens", type=positive, default=4096, help="of a micro-batch on one GPU")
    rates.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    rates.add_argument("--json", type=Path, metavar="FILE", help="write the efficiencies there")
    links = kinds.add_parser("links", help="what collectives reach of the links, for the same file; under torchrun")
    links.add_argument("--gpu", metavar="NAME", help="as plan takes it; default: the one that is found")
    links.add_argument(
        "--network", type=above_zero, default=400.0, metavar="GBIT", help="of each GPU's own port; default 400"
    )
    links.add_argument("--json", type=Path, metavar="FILE", help="add the shares to the file of benchmark rates")
    finetune = kinds.add_parser("finetune", help="LoRA beside TRL with PEFT on the same model, adapters and chats")
    finetune.add_argument("--peer", default="trl", choices=["trl"], help="trainer to compare with")
    finetune.add_argument("--flavor", default="100M", choices=list(PRESETS), help="preset of the model")
    finetune.add_argument("--rank", type=positive, default=16, help="of all adapters")
    finetune.add_argument("--rows", type=positive, default=4, help="of a step")
    finetune.add_argument("--seq-len", type=whole(64), default=1024, help="tokens of a row")
    finetune.add_argument("--steps", type=positive, default=3, help="timed steps of a round, behind one that is not")
    finetune.add_argument("--rounds", type=positive, default=3, help="of both trainers, in alternating order")
    finetune.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    arguments = parser.parse_args(argv or ["rates"])
    if "peer" in arguments:
        from glm46.operate.benchmark.finetune import benchmark_finetune

        benchmark_finetune(arguments)
        return 0
    from glm46.operate.benchmark.links import benchmark_links
    from glm46.operate.benchmark.rates import benchmark_rates

    (benchmark_links if "network" in arguments else benchmark_rates)(arguments)
    return 0
