"""Checks of files and functions that reinforcement learning reads at its start, once, before ranks start; without
torch."""

from collections.abc import Callable

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import show
from glm46.config.rl import ResolvedRL
from glm46.config.rollout import RolloutConfig
from glm46.tasks.rl.rewards.function_pool import FunctionPool, environment_pool, reward_pool
from glm46.tasks.rl.rollout.http_calls import require_http_client


def refuse_rl(rl: ResolvedRL, rollout: RolloutConfig | None) -> None:
    """Raise the faults of prompts, rewards, environment and packages that ranks would raise at their start. The
    functions of the user are imported in separate processes.

    Raises:
        UserError: files cannot be read, functions cannot be loaded, or the package that calls servers is missing.
    """
    faults: list[str] = []
    if rollout is not None and rollout.kind != "local":
        try:
            require_http_client()
        except UserError as error:
            faults += error.faults
    files = {} if rl.prompts is None else {"rl.prompts.file": rl.prompts.file}
    files |= {f"rl.validation[{number}].file": table.file for number, table in enumerate(rl.validation)}
    for key, file in files.items():
        try:
            open(file, "rb").close()
        except OSError as error:
            faults.append(f"{key} = {show(file)}: {error.strerror}; state a file of prompts that can be read")
    loads: list[Callable[[], FunctionPool]] = [lambda: reward_pool(rl)]
    environment = rl.environment
    if environment is not None:
        loads.append(lambda: environment_pool(environment))
    for load in loads:
        try:
            load().close()
        except UserError as error:
            faults += error.faults
    raise_if(faults)
