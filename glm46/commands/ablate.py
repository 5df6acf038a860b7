"""``python -m glm46 ablate``: train the same run with different keys, one after the other, and compare them."""

import re
import shlex
from collections.abc import Sequence

from glm46.config.command_line import module_command
from glm46.config.errors import UserError
from glm46.config.options import process_count
from glm46.operate.launch.config_options import config_parser, parse_with_overrides


def ablate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code: 0 all runs finished, 1 a run failed, or the launcher's code if it was
    stopped.

    Raises:
        UserError: the config or a variant has faults, or this machine cannot train one.
    """
    parser = config_parser("ablate")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help="train with each of these values of section.key; again for more keys: all combinations",
    )
    parser.add_argument("--seeds", metavar="N,N", help="train each variant with each of these values of debug.seed")
    parser.add_argument(
        "--nproc", type=process_count, metavar="N", help="processes of each run; auto, the default, as launch has it"
    )
    arguments, overrides = parse_with_overrides(parser, argv)
    if arguments.seeds is not None:
        if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", arguments.seeds):
            raise UserError(
                f"command line: --seeds {arguments.seeds}: expected whole numbers with commas, such as --seeds 1,2,3"
            )
        overrides = (*overrides, f"--ablation.seeds=[{arguments.seeds}]")
    command = f"{module_command()} {shlex.join(['ablate', *argv])}"
    from glm46.operate.ablation.ablation import run_ablation  # --help takes half the time without it

    return run_ablation(arguments, overrides, command)
