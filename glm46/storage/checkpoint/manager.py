"""Checkpoints for the trainer: save a step, find the newest complete one, load it. Loads are verified.

`engine.training.resume` finds and loads; `engine.training.saving` saves.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError
from glm46.storage.checkpoint.background import BackgroundSaver
from glm46.storage.checkpoint.dcp import read_tensors
from glm46.storage.checkpoint.finite import NotFiniteError, refuse_not_finite, stored_not_finite
from glm46.storage.checkpoint.gathering import Destination, NodeFolder, gather
from glm46.storage.checkpoint.integrity import (
    published_steps,
    read_meta,
    records_of,
    step_folder,
)
from glm46.storage.checkpoint.publish import Retention, repair, set_aside
from glm46.storage.checkpoint.save import SaveOutcome, SaveTarget, Snapshot, encode_meta, save_now
from glm46.storage.checkpoint.store_destination import StoreDestination

_LOG = logging.getLogger(__name__)

_WAIT_SECONDS = 1.0
"""Interval at which ranks that wait for a save exchange its state."""


class CheckpointManager:
    """Checkpoints of one run, in ``folder/step-000123/``, seen by all ranks.

    A checkpoint is tensors (``name -> Tensor or DTensor``, written through DCP) and ``meta`` (JSON). The constructor is
    collective, and so is every method marked as such: all ranks call it, and all return or all raise.

    Args:
        folder: holds the step folders; the first save makes it.
        keep_latest_k, keep_every, keep_best_k: see `Retention`.
        node_local_folder: a folder on the node's own disk; saves go there first, and from there to ``folder``.
        store_url: prefix of an object store that holds the checkpoints. ``folder`` is then its mirror, and
            ``node_local_folder`` is required.

    Raises:
        UserError: on all ranks: another run writes to the prefix, or the store cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_latest_k: int,
        keep_every: int = 0,
        keep_best_k: int = 0,
        node_local_folder: Path | None = None,
        store_url: str | None = None,
    ):
        self.folder = Path(folder)
        rule = Retention(keep_latest_k=keep_latest_k, keep_every=keep_every, keep_best_k=keep_best_k)
        self._ranks = Ranks.of_this_run()
        node = None if node_local_folder is None else NodeFolder.of_this_rank(node_local_folder, self._ranks)
        self._destination = StoreDestination(self.folder, store_url) if store_url else Destination(self.folder)
        self._target = SaveTarget(self._destination, rule, node)
        self._background = BackgroundSaver()
        self._verified: dict[Path, dict[str, Any]] = {}
        self.before_publishing: Callable[[], None] = lambda: None
        """Called on the first rank, by the thread that saves, just before the checkpoint gets its name. The trainer
        writes its metrics up to the step: a run that resumes from it does not write them again."""
        self._loaded_step: int | None = None
        self._branch_point: int | None = None
        """The loaded step, until the next save sets aside the checkpoints after it."""
        self._destination.open(self._ranks)

    def release(self) -> None:
        """Let other runs use the prefix of the store. Not collective."""
        self._destination.close()

    @property
    def loaded_step(self) -> int | None:
        """The step in ``folder`` that was loaded last, if any. Saves do not remove it."""
        return self._loaded_step

    @property
    def _steps_in_use(self) -> tuple[int, ...]:
        return () if self._loaded_step is None else (self._loaded_step,)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        *,
        validation_loss: float | None = None,
        is_good: bool = True,
    ) -> SaveOutcome:
        """Write and publish a checkpoint, then remove old ones. Collective.

        Waits for a background save first; if that one failed, the next ``poll`` raises.

        Args:
            tensors: the ranks may hold different names. A plain tensor that several ranks hold under one name must be
                equal on all of them; a value that differs (an RNG state) carries the rank in its name.
            meta: JSON values; rank 0's are stored.
            validation_loss, is_good: see `Snapshot`; rank 0's are used.

        Raises:
            CheckpointError: on all ranks, naming the ranks that failed. Earlier checkpoints are untouched.
            NotFiniteError: the tensors hold values that are not finite.
        """
        started = time.perf_counter()
        self._wait_for_save()
        snapshot = self._begin(step, tensors, meta, validation_loss, is_good)
        size = save_now(self._target, snapshot, self._ranks, self._steps_in_use)
        seconds = time.perf_counter() - started
        return SaveOutcome(step, size, save_seconds=seconds, stall_seconds=seconds)

    def save_in_background(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        *,
        validation_loss: float | None = None,
        is_good: bool = True,
    ) -> bool:
        """Copy the tensors to host memory and return; a thread saves the copies. Arguments as in ``save``. Collective.
        Raises CheckpointError on all ranks when copying failed on some rank, for example for lack of memory.

        Returns:
            Whether the save was started. No rank starts one while the previous one is running on some rank, so a slow
            disk costs checkpoints, not training time.
        """
        if self._is_any_rank_saving():
            return False
        snapshot = self._begin(step, tensors, meta, validation_loss, is_good)
        with self._ranks.stage("copying tensors to host memory"):
            self._background.stage(tensors)
        self._background.start(self._target, snapshot, self._steps_in_use)
        return True

    def poll(self) -> list[SaveOutcome]:
        """Return the background saves that ended since the last call. Call it every step; it costs nothing. Not
        collective.

        All ranks get the same outcomes, but perhaps a step apart, because their threads do not end at the same time:
        report them, and base no decision on them.

        Raises:
            CheckpointError: one of them failed. The next save can be started.
        """
        return self._background.take_ended()

    def drain_saves(self) -> None:
        """Wait for the background save and drop its outcome, even an error. Collective."""
        self._wait_for_save()
        self._background.forget_ended()

    def describe_not_finite(self, tensors: Mapping[str, Tensor]) -> str:
        """Return one line naming the tensors that hold NaN or infinity on any rank; empty if all are finite.
        Collective."""
        try:
            refuse_not_finite(tensors, self._ranks)
        except NotFiniteError as error:
            return str(error)
        return ""

    def close(self) -> list[SaveOutcome]:
        """Wait for the background save; returns and raises as ``poll``. Collective.

        Call it before the process group is destroyed.
        """
        self._wait_for_save()
        return self._background.take_ended()

    def newest(self, *, before: int | None = None, tensors: Mapping[str, Tensor] | None = None) -> int | None:
        """Return the newest complete and undamaged step, or None if there is no checkpoint. Collective.

        Gathers node-local saves first. Skips damaged checkpoints with a warning for each fault.

        Args:
            before: look only at smaller steps than this.
            tensors: those that will be loaded; from an object store only their files are read. None: all files.

        Raises:
            UserError: every checkpoint is damaged. Starting from step 0 is then the user's decision.
        """
        self._wait_for_save()
        if self._target.node is not None:
            gather(self._target.node, self._destination, self._ranks)
        with self._ranks.stage("listing checkpoints") as stage:
            if self._ranks.is_first:
                if self.folder.is_dir():
                    repair(self.folder)
                stage.value = [step for step in published_steps(self.folder) if before is None or step < before]
        steps_of_first_rank: list[int] = stage.values[0]
        bad: list[str] = []
        for step in reversed(steps_of_first_rank):
            _, faults = self._verify(step_folder(self.folder, step), tensors)
            if not faults:
                return step
            bad += faults
            if self._ranks.is_first:
                for fault in faults:
                    _LOG.warning("checkpoint of step %d is not used: %s", step, fault)
        if bad:
            remedy = "move the folder away to start from step 0"
            raise UserError(*bad, f"{self.folder}: every checkpoint is damaged; {remedy}")
        return None

    def load(
        self,
        source: int | Path,
        tensors: Mapping[str, Tensor],
        *,
        optional: Sequence[str] = (),
        ignored: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Fill tensors in place from a checkpoint, on any mesh and world size. Collective.

        Strict: the checkpoint must hold each name with the same shape and dtype, and some rank must request each name
        of the checkpoint.

        Args:
            source: a step of this run, or another step folder, such as the last one of the previous phase. After
                loading a step of this run, the next save sets aside later checkpoints, because the run has left their
                branch.
            optional: prefixes of names that may be missing from the checkpoint, or from this run.
            ignored: prefixes of names in the checkpoint that may stay unread; "" allows all.

        Returns:
            The checkpoint's meta.

        Raises:
            UserError: on all ranks, with every name that is missing, unknown, damaged, or of another shape or dtype.
            CheckpointError: on all ranks, when reading failed on any of them.
        """
        self._wait_for_save()
        path = step_folder(self.folder, source) if isinstance(source, int) else Path(source)
        manifest, faults = self._verify(path, tensors)
        if manifest is None:
            raise UserError(*faults)
        files = records_of(manifest)
        if faults := read_tensors(path, tensors, files, optional=optional, ranks=self._ranks, ignored=ignored):
            raise UserError(*faults)
        with self._ranks.stage("reading meta") as stage:
            if self._ranks.is_first:
                stage.value = read_meta(path)
        if isinstance(source, int):
            self._loaded_step = source
            self._branch_point = source
        meta_of_first_rank: dict[str, Any] = stage.values[0]
        self._destination.free(path, self._target.node, self._ranks)
        return meta_of_first_rank

    def _begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        validation_loss: float | None,
        is_good: bool,
    ) -> Snapshot:
        """Return the content of a save that starts now. Collective."""
        self._set_aside_newer()
        self._verified.pop(step_folder(self.folder, step), None)  # the save replaces what was verified
        with self._ranks.stage("encoding meta as JSON"):
            return Snapshot(step, dict(tensors), encode_meta(meta), validation_loss, is_good, self.before_publishing)

    def _is_any_rank_saving(self) -> bool:
        """Return True if a background save is running on some rank. Collective."""
        return any(self._ranks.all_gather(self._background.is_busy))

    def _wait_for_save(self) -> None:
        """Wait until no background save is running on any rank; its outcome stays for ``poll``. Collective."""
        while True:
            self._background.wait(_WAIT_SECONDS)
            # All ranks learn the same, so that they leave this loop together.
            if not self._is_any_rank_saving():
                return

    def _set_aside_newer(self) -> None:
        """Set aside later checkpoints after a load: they belong to the branch that the run left. Collective."""
        if self._branch_point is None:
            return
        with self._ranks.stage("setting aside later checkpoints"):
            if self._ranks.is_first:
                for step in published_steps(self.folder):
                    if step > self._branch_point:
                        aside = set_aside(step_folder(self.folder, step))
                        _LOG.warning("%s: belongs to a branch that this run has left; it can be deleted", aside)
        self._branch_point = None

    def _verify(self, path: Path, tensors: Mapping[str, Tensor] | None) -> tuple[dict[str, Any] | None, list[str]]:
        """Return the manifest, None if there are faults, and the faults of a checkpoint. Checks its values too, unless
        the manifest records that the save checked them. Collective."""
        if path in self._verified:
            return self._verified[path], []
        node = self._target.node
        manifest, faults = self._destination.verify(path, node, tensors, self._ranks)
        if manifest is not None and not manifest.get("finite", False):
            if self._destination.is_partial:
                _, faults = self._destination.verify(path, node, None, self._ranks)
            faults = faults or stored_not_finite(path, records_of(manifest), self._ranks)
        if manifest is None or faults:
            return None, faults
        if not self._destination.is_partial:
            self._verified[path] = manifest
        return manifest, []
