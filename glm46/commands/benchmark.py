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
    rates = kinds.add_parser("rates", help="what kernels reach of the peaks, for plan --measured; the default")
    rates.add_argument("--flavor", default="GLM-4.5-Air", choices=list(PRESETS), help="preset of the layer")
    rates.add_argument("--json", type=Path, metavar="FILE", help="write the efficiencies there")
    links = kinds.add_parser("links", help="what collectives reach of the links, for the same file; under torchrun")
    links.add_argument("--gpu", metavar="NAME", help="as plan takes it; default: the one that is found")
    links.add_argument(
        "--network", type=above_zero, default=400.0, metavar="GBIT", help="of each GPU's own port; default 400"
    )
    links.add_argument("--json", type=Path, metavar="FILE", help="add the shares to the file of benchmark rates")
    arguments = parser.parse_args(argv or ["rates"])
    from glm46.operate.benchmark.links import benchmark_links
    from glm46.operate.benchmark.rates import benchmark_rates

    (benchmark_links if "network" in arguments else benchmark_rates)(arguments)
    return 0
