"""Rows of metrics to Weights & Biases or MLflow, in a thread: a tracker that is slow, fails or hangs costs no step."""

import contextlib
import importlib.util
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from glm46.config.checkpoint import MetricsConfig, TrackerName
from glm46.config.errors import UserError

ID_FILE = "tracker.json"
"""File in the dump folder with the tracker's id of the run, by which a restart continues it."""
_WAITING_ROWS = 1000
_END_SECONDS = 60.0
"""Time that the tracker has at the end of a run to send what is left."""


_Session = tuple[Callable[[dict[str, float]], object], Callable[[], object]]
"""What sends a row, and what ends the run."""


class Tracker:
    """Sends rows to a tracker from a thread of its own. If the tracker fails, or takes no rows for long, rows are
    dropped and this is reported once; training goes on.

    Args:
        metrics: with a tracker.
        folder: job.dump_folder; its name is the name of the run.
        config: the resolved configuration, a table of tables.
        is_new: whether this is a new run and not the continuation of one.
        report: takes one line.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(
        self,
        metrics: MetricsConfig,
        folder: Path,
        config: Mapping[str, object],
        *,
        is_new: bool,
        report: Callable[[str], None],
    ):
        name, keys = str(metrics.tracker), dict(_dotted(config))
        if fault := tracker_fault(metrics.tracker):
            raise UserError(fault)
        module = importlib.import_module(name)
        self._name, self._report, self._has_failed = name, report, False
        self._rows: queue.Queue[dict[str, float] | None] = queue.Queue(_WAITING_ROWS)
        known = folder / ID_FILE
        if is_new:
            known.unlink(missing_ok=True)
        opens = {"wandb": _open_wandb, "mlflow": _open_mlflow}[name]
        work = (lambda: opens(module, folder, keys),)
        self._thread = threading.Thread(target=self._send, args=work, name="tracker", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, float | None]) -> None:
        """Queue a row; columns without a value are left out. Never waits."""
        try:
            self._rows.put_nowait({key: value for key, value in row.items() if value is not None})
        except queue.Full:
            self._fail("takes no rows")

    def close(self) -> None:
        """Wait for the rows that are left, at most a minute."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._fail(f"did not end within {_END_SECONDS:.0f} s")

    def _send(self, opens: Callable[[], _Session]) -> None:
        is_done = False
        try:
            log, finish = opens()
            while (row := self._rows.get()) is not None:
                log(row)
            finish()
            is_done = True
        finally:
            if not is_done:  # an error of any kind ends this thread with its traceback, and nothing else
                self._fail("failed")

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"metrics.tracker = {self._name!r}: {reason}; rows are missing there, training continues")


def tracker_fault(name: TrackerName | None) -> str | None:
    """A message if the package of a tracker is not installed."""
    if name is None or importlib.util.find_spec(name) is not None:
        return None
    return f"metrics.tracker = {name!r}: this package is not installed; pip install {name}, or take the key out"


def _open_wandb(wandb: ModuleType, folder: Path, config: Mapping[str, object]) -> _Session:
    run = wandb.init(
        name=folder.name,
        id=_known_id(folder),
        resume="allow",
        dir=str(folder),
        config=dict(config),
        # Standard output is the report's; it is in log.txt.
        settings=wandb.Settings(console="off"),
    )
    run.define_metric("*", step_metric="step")
    _keep_id(folder, run.id)
    # Not wandb's own step, which must never fall: a resume goes back, and validation has the step of its row.
    return run.log, run.finish


def _open_mlflow(mlflow: ModuleType, folder: Path, config: Mapping[str, object]) -> _Session:
    known = _known_id(folder)
    run = mlflow.start_run(run_id=known, run_name=None if known else folder.name)
    if known is None:
        mlflow.log_params(dict(config))
    _keep_id(folder, run.info.run_id)

    def log(row: dict[str, float]) -> None:
        mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in row.items()}, step=int(row["step"]))

    return log, mlflow.end_run


def _dotted(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _known_id(folder: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / ID_FILE).read_text(encoding="utf-8"))["id"]
    return None


def _keep_id(folder: Path, identity: str) -> None:
    (folder / ID_FILE).write_text(json.dumps({"id": identity}) + "\n", encoding="utf-8")
