"""``python -m glm46 ablate``: train the same run with different keys, one after the other, and compare them."""

import shlex
from collections.abc import Sequence

from glm46.config.command_line import module_command
from glm46.config.errors import UserError
from glm46.config.options import list_of, process_count, whole
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
    parser.add_argument(
        "--seeds",
        type=list_of(whole(0, 2**63 - 1)),
        metavar="N,N",
        help="train each variant with each of these values of debug.seed; default: its value in the file",
    )
    parser.add_argument(
        "--nproc", type=process_count, metavar="N", help="processes of each run; auto, the default, as launch has it"
    )
    arguments, overrides = parse_with_overrides(parser, argv)
    seeds = arguments.seeds or ()
    if len(set(seeds)) < len(seeds):
        written = ",".join(map(str, seeds))
        raise UserError(
            f"command line: --seeds {written}: a seed is there twice, and would be trained twice; remove one"
        )
    command = f"{module_command()} {shlex.join(['ablate', *argv])}"
    from glm46.operate.ablation.ablation import run_ablation  # --help takes half the time without it

    return run_ablation(arguments, overrides, command)
