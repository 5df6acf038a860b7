"""Folders of a run on the first rank: checked, locked, and released at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm46.compute.distributed.environment import launched_local_world_size, launched_rank, launched_world_size
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.run_lock import lock_run, refuse_small_disk, writing
from glm46.engine.training.origin import refuse_origin
from glm46.engine.training.weight_source import WeightSource
from glm46.run.plan import resolve_plan


class RunOutputs:
    """Output folders of a run. The first rank holds their locks inside `run_outputs`."""

    def __init__(self, config: RunConfig):
        self._config = config
        self.folder = Path(config.job.dump_folder)

    def write_config(self) -> None:
        """Write the resolved config into the dump folder. Call it on the first rank, once nothing can refuse the run.

        Raises:
            UserError: the folder cannot be written.
        """
        with writing(self.folder):
            (self.folder / "config.toml").write_text(dump_config(self._config), encoding="utf-8")


@contextmanager
def run_outputs(config: RunConfig, weights: WeightSource) -> Iterator[RunOutputs]:
    """Check and lock the folders of a run on the first rank, and release them. Not collective: call it before the
    process group is joined, so that other ranks do not wait for a refused run. If the run is refused later, unused
    folders are removed.

    Raises:
        UserError: the folders hold another run, are in use, or have too little space; or weights cannot be read.
    """
    outputs = RunOutputs(config)
    if launched_rank() != 0:
        yield outputs
        return
    refuse_origin(config)
    plan = resolve_plan(config, launched_world_size() or 1)
    weights.refuse(plan)
    refuse_small_disk(plan, launched_local_world_size())
    locks = lock_run(outputs.folder, config.folders_apart)
    is_refused = False
    try:
        yield outputs
    except UserError:
        is_refused = True
        raise
    finally:
        locks.close(is_refused=is_refused)
