"""Starts of all ranks after failed ones, from the newest checkpoint, while the storage of the run comes and goes."""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Event

from glm46.compute.distributed.environment import variables_that_are_set
from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_HANG, EXIT_STOPPED
from glm46.engine.reliability.verdict import HANG_FOLDER, VERDICT_FILE
from glm46.files.threads import meanwhile
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK, End
from glm46.storage.checkpoint.integrity import published_steps

_FRUITLESS_STARTS = 3
"""Number of starts in a row without a new checkpoint after which the launcher gives up."""


def keep_running(start: Callable[[int, StartTimes], End], newest_step: Callable[[], int], max_restarts: int) -> End:
    """Start all ranks, and restart them after a failure, or if they request it, as after failed saves.

    Gives up after `_FRUITLESS_STARTS` starts in a row without a new checkpoint. Torchrun's own restarts are not used:
    its restarted ranks connected to addresses of the previous start and hung. Here each start has a new store and port.
    The launchers of several nodes count the same starts, because a failed rank ends the ranks of all nodes.

    Args:
        start: starts all ranks for the n-th time, counted from 0, and waits for their end. It takes the times of this
            start, too.
        newest_step: returns the step of the newest checkpoint, 0 if there is none.
        max_restarts: starts after the first.

    Returns:
        The end of the last start.
    """
    best = newest_step()
    fruitless = 0
    times = StartTimes("the command")
    for number in range(max_restarts + 1):
        end = start(number, times)
        if end.code not in (EXIT_FAILED_RANK, EXIT_HANG, EXIT_STOPPED) or end.is_final:
            return end
        times = StartTimes("the failure", end.failed_at)
        newest = newest_step()
        if newest > best:
            fruitless = 0
            best = newest
        else:
            fruitless += 1
        where = f"the checkpoint of step {newest}" if newest else "step 0, there is no checkpoint"
        if fruitless == _FRUITLESS_STARTS:
            print(
                f"error: giving up after {fruitless} starts in a row without a new checkpoint; the last one: "
                f"{end.cause.rstrip('.')}. The same command goes on from {where}; a smaller checkpoint.interval saves "
                "more of a run that fails often.",
                file=sys.stderr,
            )
            return end
        if number < max_restarts:
            print(f"restart {number + 1} of {max_restarts}, from {where}", file=sys.stderr, flush=True)
    beginning = f"error: no restart is left of {max_restarts}; the" if max_restarts else "The"
    continuation = f"goes on from {where}" if newest else "begins anew: there is no checkpoint"
    print(f"{beginning} same command {continuation}.", file=sys.stderr)
    return end


MAX_ABSENCE_SECONDS = 480.0
"""Seconds for the storage of a run to return; the launchers of other nodes wait longer for this one."""
_STATE = "GLM46_STATE"
"""Variable with the path of the file that tells a job script, and the next start of the job, the newest checkpoint. The
file holds variables of a shell."""
_FIRST_SECONDS = 2.0
_LOOK_SECONDS = 30.0
"""Time between two listings of the folder while ranks train, before the first checkpoint and later. Each node lists
the folder, on shared storage."""
_WAIT_SECONDS = 1.0
_REPORT_SECONDS = 30.0


class StorageLost(UserError):
    """Raised if a folder that had checkpoints or text of this run is empty or cannot be read. On this exit code job
    systems start the run again, perhaps on nodes that reach the folder."""

    exit_code = EXIT_STOPPED


class SavedSteps:
    """Remembers the newest checkpoint: an unmounted folder is empty, and a start from it would begin at step 0.

    Args:
        earlier_step: step of the newest checkpoint of earlier starts of the same run; 0 without one.
    """

    def __init__(self, config: RunConfig, earlier_step: int = 0):
        self._folder = config.checkpoint_folder
        self._sources = [Path(source.path) for source in config.data.sources]
        self._newest = earlier_step

    def newest(self) -> int:
        """Return the step of the newest checkpoint, or the last known one if the folder is empty; 0 without one."""
        self._newest = max(_steps(self._folder), default=self._newest)
        return self._newest

    def watched(self) -> AbstractContextManager[None]:
        """Look for new checkpoints in a thread during this context: storage may be lost before the ranks end."""

        def look(end: Event) -> None:
            while not end.wait(_LOOK_SECONDS if self._newest else _FIRST_SECONDS):
                self.newest()

        return meanwhile(look)

    def wait_for_storage(self, seconds: float, report: Callable[[str], None]) -> None:
        """Wait until the folders of a run that has saved a checkpoint hold checkpoints and text again.

        Raises:
            StorageLost: they do not within this many seconds.
        """
        began = time.monotonic()
        reported = float("-inf")
        while self._newest:
            missing = self._missing()
            if not missing:
                return
            now = time.monotonic()
            if now - began > seconds:
                raise StorageLost(
                    f"{missing}, for {now - began:.0f} s; mount it on this node. If it was removed on purpose, start a "
                    "new job"
                )
            if now - reported > _REPORT_SECONDS:
                report(f"waiting for storage, {now - began:.0f} s so far: {missing}")
                reported = now
            time.sleep(_WAIT_SECONDS)

    def write_job_state(self, hosts: Sequence[str]) -> None:
        """Write the newest checkpoint, and the hosts on which another start would fail, as variables of a shell for the
        script of this job, if that script has set the file."""
        with suppress(OSError, KeyError):
            state = f"newest_step={self.newest()}\nlost_hosts={shlex.quote(' '.join(hosts))}\n"
            Path(variables_that_are_set([_STATE])[_STATE]).write_text(state)

    def _missing(self) -> str:
        if not _steps(self._folder):
            return f"{self._folder} has no checkpoint now, and step {self._newest} was saved there"
        absent = (source for source in self._sources if not _is_folder(source))
        return next((f"{source} cannot be read, and the run has trained on it" for source in absent), "")


def known_step() -> int:
    """Return the step of the newest checkpoint of earlier starts of this job; 0 without one or without a job script."""
    with suppress(OSError, KeyError):
        state = Path(variables_that_are_set([_STATE])[_STATE]).read_text()
        match = re.search(r"^newest_step=(\d+)$", state, re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def _steps(folder: Path) -> list[int]:
    with suppress(OSError):
        return published_steps(folder)
    return []


def _is_folder(path: Path) -> bool:
    """Return True if this is a folder that can be read and is not empty."""
    with suppress(OSError):
        return any(path.iterdir())
    return False


def hung_hosts(dump_folder: Path) -> list[str]:
    """Read the hosts that the verdict of the last start names, each once, without domains, as Slurm names them. Empty
    without a verdict, and hosts without a name are skipped."""
    try:
        names = json.loads((dump_folder / HANG_FOLDER / VERDICT_FILE).read_text())["hosts"]
    except (OSError, ValueError):
        return []
    return [host for host in dict.fromkeys(name.partition(".")[0] for name in names) if host]
