"""``python -m glm46 train``: train in this process; launch and torchrun start one process for each rank."""

import argparse
from collections.abc import Sequence
from importlib import import_module

from glm46.compute.distributed.environment import launched_rank, launched_world_size, ranks_of_another_launcher
from glm46.config.command_line import Start, module_command
from glm46.config.errors import UserError
from glm46.engine.reliability.stop import StopRequest
from glm46.operate.launch.config_options import config_parser, load_fetched, parse_with_overrides, task_module


def train_command(argv: Sequence[str]) -> int:
    """Train the config; returns the exit code. Collective.

    Raises:
        UserError: the config has faults, or another launcher than torchrun has started several processes.
        Diverged: steps or weights went bad.
    """
    parser = config_parser("train")
    parser.add_argument("--exported", action="store_true", help=argparse.SUPPRESS)  # the launcher exports the metrics
    arguments, overrides = parse_with_overrides(parser, argv, is_start=True)
    if others := ranks_of_another_launcher():
        raise UserError(
            f"environment: {', '.join(f'{name} = {value}' for name, value in others.items())}: not set by torchrun, so "
            f"this process would train alone beside the others; start each node with {module_command()} launch, or "
            f"unset {' '.join(others)} to train in one process"
        )
    # Imported here: --help takes less time without them.
    from glm46.config.ablation import require_one_run
    from glm46.operate.launch.exporting import exporting

    stop = StopRequest()
    config = load_fetched(arguments.config, overrides, world_size=launched_world_size() or 1)
    require_one_run(config.ablation, arguments.config, module_command())
    # Torch takes seconds to import: only after the config has passed.
    train = import_module(task_module(config)).train
    is_exporter = launched_rank() == 0 and not arguments.exported
    with exporting(config if is_exporter else None) as exporter:
        exporter.starts(0)
        code = exporter.ends(train(config, stop))
    if code == 0 and launched_world_size() is None:
        from glm46.operate.launch.one_node import describe_next
        from glm46.run.plan import resolve_plan

        print(describe_next(resolve_plan(config, 1), Start(arguments.config, overrides, verb="train")))
    return code
