"""When a run saves, and what it does when a save fails: training is worth more than one checkpoint."""

from typing import Any

from glm46.checkpoint.finite import NotFiniteError
from glm46.checkpoint.integrity import complete_steps
from glm46.checkpoint.save import SaveOutcome
from glm46.config.errors import UserError
from glm46.distributed.collective_errors import on_first_rank
from glm46.distributed.ranks import CheckpointError
from glm46.observe.report import Report
from glm46.reliability.loss_spikes import SpikeDetector
from glm46.reliability.stop import Diverged
from glm46.training.build import Parts
from glm46.training.resume import checkpoint_meta, checkpoint_tensors
from glm46.training.state import Progress


class SaveFailed(UserError):
    """The last state of a run is not on the disk. Another start may find more space, so it is no refusal."""

    exit_code = 1


class Saver:
    """Saves every `[checkpoint] interval` steps, behind training if so configured, and once at the end."""

    def __init__(self, parts: Parts, report: Report, progress: Progress, spikes: SpikeDetector):
        self._parts, self._report, self._config = parts, report, parts.config.checkpoint
        self._spikes = spikes
        self._saved_step = progress.step
        self._failed_saves = 0
        self._last: SaveOutcome | None = None
        self.found_ruin = False
        """Whether a save on this rank found values that are not finite; the ranks agree on it every step."""

    def figures(self) -> dict[str, float]:
        """Columns of metrics.jsonl."""
        if not self._config.enable:
            return {}
        row: dict[str, float] = {"failed_saves": self._failed_saves}
        if self._last is not None:
            row["checkpoint_seconds"] = self._last.stall_seconds
            row["checkpoint_save_seconds"] = self._last.save_seconds
            row["checkpoint_gib"] = self._last.bytes / 2**30
        return row

    def after_step(self, progress: Progress, validation: dict[str, float]) -> None:
        """Save if a save is due, and tell how earlier ones ended; collective. A save that fails is reported and the
        next one tried: the checkpoints before it are untouched."""
        if not self._config.enable:
            return
        self._hear_of_saves(progress)
        if progress.step % self._config.interval:
            return
        if progress.skipped_in_a_row:
            self._report.message(
                f"step {progress.step}: not saved, {progress.skipped_in_a_row} steps in a row were skipped"
            )
        else:
            try:
                self._save(progress, validation)
            except CheckpointError as error:
                self._tell_failure(progress, error)

    def finish(self, progress: Progress, validation: dict[str, float]) -> None:
        """Save the last step, unless that is done, and wait for all saves; collective. A state within a row of skipped
        steps is saved too, if it is finite: who starts again finds the row as it was.

        Raises:
            SaveFailed: the last state of the run is not on the disk.
            Diverged: it holds values that are not finite.
        """
        if not self._config.enable:
            return
        try:
            if self._saved_step != progress.step:
                self._save_now(progress, validation)
            try:
                self._tell(self._parts.checkpoints.close())
            except CheckpointError as error:
                self._report.message(f"a checkpoint could not be saved in the background, saving again. {error}")
                self._save_now(progress, validation)
                self._tell(self._parts.checkpoints.close())
        except NotFiniteError as error:
            fault = f"step {progress.step} is not saved: {error}; {Diverged.remedy}; {self._way_on()}"
            raise Diverged(*on_first_rank(fault)) from None
        except CheckpointError as error:
            raise SaveFailed(*on_first_rank(f"step {progress.step} is not saved. {error}; {self._way_on()}")) from None

    def _way_on(self) -> str:
        folder = self._parts.checkpoints.folder
        newest = max(complete_steps(folder), default=0)
        where = f"goes on from the checkpoint of step {newest}" if newest else "starts anew, no step is saved"
        return f"job.dump_folder = {self._parts.config.job.dump_folder!r}: the same command {where}"

    def _hear_of_saves(self, progress: Progress) -> None:
        # Ranks may learn of an ended save a step apart: what it says must not keep one of them from the next, which is
        # collective, or the others wait for it for ever.
        try:
            self._tell(self._parts.checkpoints.poll())
        except CheckpointError as error:
            self._tell_failure(progress, error)

    def _save(self, progress: Progress, validation: dict[str, float]) -> None:
        if self._config.async_mode == "disabled":
            self._save_now(progress, validation)
        elif self._parts.checkpoints.save_in_background(**self._content(progress, validation)):
            self._saved_step = progress.step
        else:
            self._report.message(
                f"step {progress.step}: not saved, the save before is still being written; a larger "
                "checkpoint.interval, or a faster disk, avoids this"
            )

    def _save_now(self, progress: Progress, validation: dict[str, float]) -> None:
        self._tell([self._parts.checkpoints.save(**self._content(progress, validation))])
        self._saved_step = progress.step

    def _content(self, progress: Progress, validation: dict[str, float]) -> dict[str, Any]:
        return {
            "step": progress.step,
            "tensors": checkpoint_tensors(self._parts),
            "meta": checkpoint_meta(self._parts, progress, validation) | {"spikes": self._spikes.to_meta()},
            "validation_loss": validation.get("validation_loss"),
            "is_good": not progress.skipped_in_a_row,
        }

    def _tell_failure(self, progress: Progress, error: CheckpointError) -> None:
        self._failed_saves += 1
        self.found_ruin |= isinstance(error, NotFiniteError)
        self._report.message(f"step {progress.step}: a checkpoint could not be saved. {error}")

    def _tell(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._last = outcome
            self._report.log(
                f"checkpoint of step {outcome.step}: {outcome.bytes / 2**20:,.1f} MiB in {outcome.save_seconds:.1f} s, "
                f"training waited {outcome.stall_seconds:.2f} s"
            )
