"""The work of ``python -m glm46 train``: training in this process, alone or as one rank of several."""

from collections.abc import Sequence
from pathlib import Path

from glm46.compute.distributed.environment import launched_world_size
from glm46.config.ablation import require_one_run
from glm46.config.command_line import Start, module_command
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import refuse_small_disk
from glm46.engine.reliability.stop import StopRequest
from glm46.operate.launch.fetched_config import load_fetched
from glm46.operate.launch.next_commands import describe_next
from glm46.operate.launch.start_checks import refuse_start
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.data.corpus import load_text


def train_here(file: Path, overrides: Sequence[str]) -> int:
    """Train a config in this process; see `train_command`. Collective."""
    stop = StopRequest()
    config = load_fetched(file, overrides, world_size=launched_world_size() or 1)
    require_one_run(config.ablation, file, module_command())
    typed = Start(file, tuple(overrides), verb="train")
    plan = _plan_alone(config, typed) if launched_world_size() is None else None
    # Torch takes seconds to import: only after the config, the folders and the text have passed.
    from glm46.operate.launch.train_rank import train

    code = train(config, stop)
    if code == 0 and plan is not None:
        print(describe_next(plan, typed))
    return code


def _plan_alone(config: RunConfig, typed: Start) -> Plan:
    """Raise the faults of a run of this process alone, and return its plan. Its text must have been prepared.

    Raises:
        UserError: a folder, the disk, the tokenizer or the text has a fault.
    """
    plan = resolve_plan(config, 1)
    refuse_small_disk(plan, 1)
    refuse_start(config, typed)
    load_text(plan)
    return plan
