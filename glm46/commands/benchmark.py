"""``python -m glm46 benchmark``: measure the speed of this machine, for plans."""

from collections.abc import Sequence
from pathlib import Path

from glm46.config.options import above_zero, verb_parser
from glm46.config.presets import PRESETS


def benchmark_command(argv: Sequence[str]) -> int:
    """Run the verb; prints which share of the machine's peaks the kernels of a model's layers, or collectives, reach.

    Returns:
        Exit code.
    """
    parser = verb_parser("benchmark")
    kinds = parser.add_subparsers(title="what", metavar="rates | links", required=True)
    rates_parser = kinds.add_parser("rates", help="what kernels reach of the peaks, for plan --measured; the default")
    rates_parser.add_argument("--flavor", default="GLM-4.5-Air", choices=list(PRESETS), help="preset of the layer")
    rates_parser.add_argument("--json", type=Path, metavar="FILE", help="write the efficiencies there")
    links_help = "what collectives reach of the links, for the same file; under torchrun"
    links_parser = kinds.add_parser("links", help=links_help)
    links_parser.add_argument("--gpu", metavar="NAME", help="as plan takes it; default: the one that is found")
    links_parser.add_argument(
        "--network", type=above_zero, default=400.0, metavar="GBIT", help="of each GPU's own port; default 400"
    )
    links_parser.add_argument("--json", type=Path, metavar="FILE", help="add the shares to the file of benchmark rates")
    arguments = parser.parse_args(argv or ["rates"])
    from glm46.operate.benchmark import links, rates  # torch: --help needs none

    if "network" in arguments:
        links.benchmark_links(arguments)
    else:
        rates.benchmark_rates(arguments)
    return 0
