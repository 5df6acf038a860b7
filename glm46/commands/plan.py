"""``python -m glm46 plan``: estimate parameters, memory and time of a config on any number of any GPU."""

from collections.abc import Sequence

from glm46.commands.options import config_parser, parse_with_overrides, positive, process_count
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.distributed.environment import visible_gpus
from glm46.planner.machine import detect_machine
from glm46.planner.report import plan_text


def plan_command(argv: Sequence[str]) -> int:
    """Print the plan of a config; returns the exit code.

    Raises:
        UserError: the config has faults, or an option is wrong.
    """
    parser = config_parser("plan")
    parser.add_argument("--nproc", type=process_count, metavar="N", help="processes; the fewest that the degrees allow")
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU to compare with, such as H200; H100 and this machine, if not given"
    )
    parser.add_argument("--mfu", type=float, metavar="SHARE", help="share of its peak that the run is assumed to reach")
    parser.add_argument(
        "--document-tokens", type=positive, metavar="N",
        help="mean tokens of a document, whose lengths are taken as exponential; absent: each row is one document",
    )  # fmt: skip
    arguments, overrides = parse_with_overrides(parser, argv)
    config = load_config(arguments.config, overrides, world_size=arguments.nproc)
    options = {"gpu": arguments.gpu, "mfu": arguments.mfu, "world_size": arguments.nproc}
    options["document_tokens"] = arguments.document_tokens
    if arguments.gpu is None:
        options["machine"] = detect_machine(visible_gpus())
    try:
        print(plan_text(config, **{name: value for name, value in options.items() if value is not None}))
    except ValueError as error:
        raise UserError(f"command line: {error}") from error
    return 0
