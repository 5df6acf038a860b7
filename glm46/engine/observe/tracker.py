"""Upload of metrics to Weights & Biases in a thread: a service that is slow, fails or hangs delays no step."""

import contextlib
import importlib
import importlib.util
import json
import queue
from collections.abc import Callable, Mapping
from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.threads import start_daemon

ID_FILE = "tracker.json"
"""File in the dump folder with the id of the run at Weights & Biases, by which a restart continues it."""
_WAITING_ROWS = 1000
_END_SECONDS = 60.0
"""Maximum time at the end of a run to send the waiting rows."""


class Tracker:
    """Sender of rows to Weights & Biases in its own thread. If the service fails, or accepts no rows for long, rows are
    dropped, which is reported once; training continues.

    Args:
        folder: job.dump_folder; its name is the name of the run.
        config: the resolved configuration, a table of tables.
        is_new: True for a new run, False for a resumed one.
        report: receives one line.

    Raises:
        UserError: the package is not installed.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], *, is_new: bool, report: Callable[[str], None]):
        fault = wandb_fault()
        if fault:
            raise UserError(fault)
        self._folder = folder
        self._config = config
        self._report = report
        self._has_failed = False
        self._rows: queue.Queue[dict[str, float] | None] = queue.Queue(_WAITING_ROWS)
        if is_new:
            (folder / ID_FILE).unlink(missing_ok=True)
        self._thread = start_daemon(self._send, "tracker")

    def write(self, row: Mapping[str, float | None]) -> None:
        """Queue a row; columns without a value are skipped. Never waits."""
        try:
            self._rows.put_nowait({key: value for key, value in row.items() if value is not None})
        except queue.Full:
            self._fail("takes no rows")

    def close(self) -> None:
        """Wait for the rows that are not sent yet, at most a minute."""
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._fail(f"did not end within {_END_SECONDS:.0f} s")

    def _send(self) -> None:
        is_done = False
        try:
            wandb = importlib.import_module("wandb")
            run = wandb.init(
                name=self._folder.name,
                id=self._stored_id(),
                resume="allow",
                dir=str(self._folder),
                config=dict(self._config),
                # The report writes standard output, which is also in log.txt.
                settings=wandb.Settings(console="off"),
            )
            # Instead of the step of the package, which must never decrease: a resume goes back to an earlier step.
            run.define_metric("*", step_metric="step")
            (self._folder / ID_FILE).write_text(json.dumps({"id": run.id}) + "\n", encoding="utf-8")
            while (row := self._rows.get()) is not None:
                run.log(row)
            run.finish()
            is_done = True
        finally:
            if not is_done:  # any error ends only this thread, with its traceback
                self._fail("failed")

    def _stored_id(self) -> str | None:
        with contextlib.suppress(OSError, ValueError):
            run_id: str = json.loads((self._folder / ID_FILE).read_text(encoding="utf-8"))["id"]
            return run_id
        return None

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"metrics.enable_wandb: {reason}; rows are missing there, training continues")


def wandb_fault() -> str | None:
    """Return a message if the package that metrics.enable_wandb needs is not installed, else None."""
    if importlib.util.find_spec("wandb") is not None:
        return None
    return "metrics.enable_wandb = true: the package wandb is not installed; pip install wandb, or remove the key"
