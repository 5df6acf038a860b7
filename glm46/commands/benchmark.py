"""``python -m glm46 benchmark``: speed and memory of this machine."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from glm46.config.options import VerbParser, above_zero, positive, verb_parser
from glm46.config.presets import PRESETS
from glm46.operate.benchmark.rounds import CONTESTANTS, SECONDS

_FITTING = f"absent: as many as fit into {SECONDS:.0f} s, three to nine"


def benchmark_command(argv: Sequence[str]) -> int:
    """Run the verb; prints a report with machine, versions and workload.

    Returns:
        Exit code.
    """
    arguments = _parser().parse_args(argv or ["model"])
    resolve_name(f"glm46.operate.benchmark.benchmark_runs:{arguments.run}")(arguments)
    return 0


def _parser() -> VerbParser:
    parser = verb_parser("benchmark")
    kinds = parser.add_subparsers(title="what", metavar="model|checkpoint|rates", required=True)
    model = kinds.add_parser("model", help="training step")
    model.add_argument("--flavor", default="debug", choices=list(PRESETS), help="preset of the model")
    model.add_argument("--layers", type=positive, help="decoder layers; absent: the preset's")
    model.add_argument("--batch", type=positive, default=4, help="sequences")
    model.add_argument("--seq-len", type=positive, default=512, help="tokens of each")
    model.add_argument("--rounds", type=positive, help=f"timed steps of each contestant; {_FITTING}")
    model.add_argument("--threads", type=positive, help="threads of torch; absent: its own choice")
    model.add_argument("--device", choices=["cpu", "cuda"], help="absent: a GPU if there is one")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="absent: float32 on a CPU, bfloat16 on a GPU")
    model.add_argument("--only", action="append", choices=CONTESTANTS, help="default: both; on a CPU ours alone")
    model.set_defaults(run="model")
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
