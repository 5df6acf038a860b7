"""Schedule of checkpoints, and handling of failed saves, after which training continues."""

from typing import Any

from glm46.compute.distributed.collective_errors import on_first_rank
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.engine.reliability.loss_spikes import SpikeDetector
from glm46.engine.reliability.stop import EXIT_STOPPED, Diverged
from glm46.engine.training.checkpoint_content import checkpoint_meta, checkpoint_tensors
from glm46.engine.training.observer import Observer
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task
from glm46.storage.checkpoint.finite import NotFiniteError
from glm46.storage.checkpoint.integrity import complete_steps, step_folder
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.save import SaveOutcome


class SaveFailed(UserError):
    """Raised if the last state of a run could not be saved. The exit code allows a restart, which may find more
    space."""

    exit_code = 1


class SavesFail(UserError):
    """Raised if several saves in a row have failed. On this exit code job systems restart the run, perhaps on nodes
    that can reach the folder."""

    exit_code = EXIT_STOPPED


class FolderLost(UserError):
    """Raised if the dump folder was deleted or renamed while the run used it."""


_MOST_FAILED_IN_A_ROW = 3
"""Failed saves in a row that end a run: an outage may pass, but each failed save adds an interval that can be lost."""


class Saver:
    """Saver of checkpoints: every `[checkpoint] interval` steps, in the background if configured, and once at the
    end."""

    def __init__(
        self,
        task: Task,
        checkpoints: CheckpointManager,
        observer: Observer,
        spikes: SpikeDetector,
    ):
        self._task = task
        self._checkpoints = checkpoints
        self._observer = observer
        self._config = task.plan.config.checkpoint
        # Rows up to this step must be on disk before the checkpoint: a resume from it does not write them again.
        checkpoints.before_publishing = observer.flush
        self._spikes = spikes
        self._saved_step = checkpoints.loaded_step or 0
        self._failed_saves = self._failed_in_a_row = 0
        self._last_outcome: SaveOutcome | None = None
        self._last_error: CheckpointError | None = None
        self.found_non_finite = False
        """True if a save on this rank found non-finite values. All ranks agree on it in every step."""

    def metrics(self) -> dict[str, float]:
        """Return columns of metrics.jsonl."""
        if not self._config.enable:
            return {}
        row: dict[str, float] = {"failed_saves": self._failed_saves}
        if self._last_outcome is not None:
            row["checkpoint_seconds"] = self._last_outcome.stall_seconds
            row["checkpoint_save_seconds"] = self._last_outcome.save_seconds
            row["checkpoint_gib"] = self._last_outcome.bytes / 2**30
        return row

    def after_step(self, progress: Progress, validation: dict[str, float]) -> None:
        """Save if a save is due, and report the results of earlier saves. Collective. A failed save is reported, and
        affects neither earlier checkpoints nor the next save.

        Args:
            validation: metrics of this step; empty if the step was not validated.
        """
        if not self._config.enable:
            return
        self._poll_saves(progress)
        if progress.step % self._config.interval:
            return
        if progress.skipped_in_a_row:
            self._observer.message(
                f"step {progress.step}: not saved, skipped {counted(progress.skipped_in_a_row, 'step')} in a row"
            )
        else:
            try:
                with self._observer.phase("save"):
                    self._save(progress, validation)
            except CheckpointError as error:
                self._report_failure(progress, error)

    @property
    def must_end(self) -> bool:
        """True if too many saves in a row have failed on this rank. All ranks agree on it in every step."""
        return self._failed_in_a_row >= _MOST_FAILED_IN_A_ROW

    def saves_fail(self, progress: Progress) -> SavesFail:
        """Return the error of a run whose saves fail on some rank."""
        cause = f" The last error: {self._last_error}" if self._last_error else ""
        fault = f"step {progress.step}: the run ends, {_MOST_FAILED_IN_A_ROW} saves in a row have failed.{cause}"
        return SavesFail(*on_first_rank(f"{fault}; {self._remedy()}"))

    def folder_lost(self, progress: Progress) -> FolderLost:
        """Save the current step, because earlier checkpoints may be lost with the dump folder, and return the error of
        a run that must end. Collective.

        Raises:
            SaveFailed, Diverged: see `finish`.
        """
        saved = "no step is saved"
        if self._config.enable and progress.step:
            self._saved_step = -1  # a save of this step may be lost too
            self.finish(progress, {})
            saved = f"this step is saved as {step_folder(self._checkpoints.folder, progress.step)}"
        dump_folder = self._task.plan.config.job.dump_folder
        return FolderLost(
            *on_first_rank(
                f"job.dump_folder = {dump_folder!r}: was deleted or renamed during the run, which ends after step "
                f"{progress.step}; {saved}; start the same command again"
            )
        )

    def finish(self, progress: Progress, validation: dict[str, float]) -> None:
        """Save the last step if needed, and wait for all saves. Collective. A finite state is also saved
        during a series of skipped steps, so that a restart continues to count them.

        Args:
            validation: see `after_step`.

        Raises:
            SaveFailed: the last state could not be saved.
            Diverged: it contains non-finite values.
        """
        if not self._config.enable:
            return
        try:
            with self._observer.phase("save"):
                self._finish(progress, validation)
        except NotFiniteError as error:
            fault = f"step {progress.step} is not saved: {error}; {Diverged.remedy}; {self._remedy()}"
            raise Diverged(*on_first_rank(fault)) from None
        except CheckpointError as error:
            raise SaveFailed(*on_first_rank(f"step {progress.step} is not saved. {error}; {self._remedy()}")) from None

    def _finish(self, progress: Progress, validation: dict[str, float]) -> None:
        if self._saved_step != progress.step:
            self._save_now(progress, validation)
        try:
            self._report_saves(self._checkpoints.close())
        except CheckpointError as error:
            self._observer.message(f"a checkpoint could not be saved in the background, saving again. {error}")
            self._save_now(progress, validation)
            self._report_saves(self._checkpoints.close())

    def _remedy(self) -> str:
        folder = self._checkpoints.folder
        try:
            newest = max(complete_steps(folder), default=0)
        except OSError as error:  # the storage on which the saves failed
            return f"checkpoint.folder = {str(folder)!r} cannot be read: {error.strerror}; mount it, or free its server"
        start = f"starts from {self._config.load_path or 'step 0'}, no step is saved"
        where = f"continues from the checkpoint of step {newest}" if newest else start
        return f"job.dump_folder = {self._task.plan.config.job.dump_folder!r}: the same command {where}"

    def _poll_saves(self, progress: Progress) -> None:
        # Ranks may notice the end of a save one step apart. Its failure must not keep a rank from the next save, which
        # is collective: the other ranks would hang.
        try:
            self._report_saves(self._checkpoints.poll())
        except CheckpointError as error:
            self._report_failure(progress, error)

    def _save(self, progress: Progress, validation: dict[str, float]) -> None:
        if self._config.async_mode == "disabled":
            self._save_now(progress, validation)
        elif self._checkpoints.save_in_background(**self._snapshot(progress, validation)):
            self._saved_step = progress.step
        else:
            self._observer.message(
                f"step {progress.step}: not saved, the previous save is still being written; "
                "raise checkpoint.interval, or use a faster disk"
            )

    def _save_now(self, progress: Progress, validation: dict[str, float]) -> None:
        self._report_saves([self._checkpoints.save(**self._snapshot(progress, validation))])
        self._saved_step = progress.step

    def _snapshot(self, progress: Progress, validation: dict[str, float]) -> dict[str, Any]:
        return {
            "step": progress.step,
            "tensors": checkpoint_tensors(self._task),
            "meta": checkpoint_meta(self._task, progress, validation) | {"spikes": self._spikes.to_meta()},
            "validation_loss": validation.get("validation_loss"),
            "is_good": not progress.skipped_in_a_row,
        }

    def _report_failure(self, progress: Progress, error: CheckpointError) -> None:
        self._failed_saves += 1
        self._failed_in_a_row += 1
        self._last_error = error
        self._observer.save_failed()
        self.found_non_finite |= isinstance(error, NotFiniteError)
        self._observer.message(f"step {progress.step}: a checkpoint could not be saved. {error}")

    def _report_saves(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._last_outcome = outcome
            self._failed_in_a_row = 0
            self._observer.saved(outcome.step)
            self._observer.log(
                f"checkpoint of step {outcome.step}: {outcome.bytes / 2**20:,.1f} MiB in {outcome.save_seconds:.1f} s, "
                f"training waited {outcome.stall_seconds:.2f} s"
            )
