"""``python -m glm46 train``: train in this process; launch and torchrun start one process for each rank."""

from collections.abc import Sequence

from glm46.compute.distributed.environment import ranks_of_another_launcher
from glm46.config.command_line import module_command
from glm46.config.errors import UserError
from glm46.operate.launch.config_options import config_parser, parse_with_overrides


def train_command(argv: Sequence[str]) -> int:
    """Train the config; returns the exit code. Collective.

    Raises:
        UserError: the config has faults, or another launcher than torchrun has started several processes.
        Diverged: too many steps in a row were bad, or weights are not finite, and the run cannot roll back.
    """
    parser = config_parser("train")
    arguments, overrides = parse_with_overrides(parser, argv, is_start=True)
    if others := ranks_of_another_launcher():
        raise UserError(
            f"environment: {', '.join(f'{name} = {value}' for name, value in others.items())}: not set by torchrun, so "
            f"this process would train alone beside the others; start each node with {module_command()} launch, or "
            f"unset {' '.join(others)} to train in one process"
        )
    from glm46.operate.launch.one_process import train_here  # --help takes less time without it

    return train_here(arguments.config, overrides)
