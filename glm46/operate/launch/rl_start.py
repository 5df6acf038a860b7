"""Checks of what a run of reinforcement learning reads at its start, once, before its ranks start; without torch."""

from collections.abc import Callable

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import show
from glm46.config.rl import ResolvedRL
from glm46.tasks.rl.rewards.function_pool import FunctionPool, environment_pool, filter_pool, reward_pool


def refuse_rl(rl: ResolvedRL) -> None:
    """Raise the faults of prompts, rewards, environment and filter that every rank would raise at its start. Functions
    of the user's are imported in processes of their own.

    Raises:
        UserError: files cannot be read, or functions cannot be loaded.
    """
    faults: list[str] = []
    files = {} if rl.prompts is None else {"rl.prompts.file": rl.prompts.file}
    files |= {f"rl.validation[{number}].file": table.file for number, table in enumerate(rl.validation)}
    for key, file in files.items():
        try:
            open(file, "rb").close()
        except OSError as error:
            faults.append(f"{key} = {show(file)}: {error.strerror}; state a file of prompts that can be read")
    loads: list[Callable[[], FunctionPool]] = [lambda: reward_pool(rl)]
    if (table := rl.environment) is not None:
        loads.append(lambda: environment_pool(table))
    if (name := rl.filter) is not None:
        loads.append(lambda: filter_pool(name))
    for load in loads:
        try:
            load().close()
        except UserError as error:
            faults += error.faults
    raise_if(faults)
