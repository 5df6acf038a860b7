"""``python -m glm46 train``: train in this process; launch and torchrun start one process for each rank."""

from collections.abc import Sequence

from glm46.compute.distributed.environment import launched_world_size, ranks_of_another_launcher
from glm46.config.command_line import Start, module_command
from glm46.config.errors import UserError
from glm46.engine.reliability.stop import StopRequest
from glm46.operate.launch.config_options import config_parser, load_fetched, parse_with_overrides


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
    # Imported here: --help takes less time without them.
    from glm46.config.ablation import require_one_run

    stop = StopRequest()
    config = load_fetched(arguments.config, overrides, world_size=launched_world_size() or 1)
    require_one_run(config.ablation, arguments.config, module_command())
    typed = Start(arguments.config, overrides, verb="train")
    # Torch takes seconds to import: only after the config, the folders and the data have passed.
    plan = None
    if launched_world_size() is None:
        from glm46.operate.launch.start_checks import refuse_alone

        plan = refuse_alone(config, typed)
    from glm46.operate.launch.train_rank import train

    code = train(config, stop)
    if code == 0 and plan is not None:
        from glm46.operate.launch.one_node import describe_next

        print(describe_next(plan, typed))
    return code
