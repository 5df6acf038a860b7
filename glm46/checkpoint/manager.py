"""The trainer's view of checkpoints: save a step, find the newest good one, load it. All collective, all verified."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from glm46.checkpoint.background import BackgroundSaver
from glm46.checkpoint.dcp import read_tensors
from glm46.checkpoint.finite import NotFiniteError, refuse_not_finite, stored_not_finite
from glm46.checkpoint.integrity import META, check_hash, read_manifest, records_of
from glm46.checkpoint.node_local import NodeFolder, gather
from glm46.checkpoint.publish import published_steps, repair, set_aside, step_folder, step_of
from glm46.checkpoint.retention import Retention
from glm46.checkpoint.saving import Place, SaveOutcome, save_now
from glm46.checkpoint.snapshot import Snapshot
from glm46.checkpoint.verification import verify_folder
from glm46.config.errors import UserError
from glm46.distributed.ranks import Ranks

_LOG = logging.getLogger(__name__)

_SETTLE_SECONDS = 1.0
"""Between two exchanges of ranks that wait for a save."""


class CheckpointManager:
    """Checkpoints of one run, in ``folder/step-000123/``, seen by all ranks.

    A checkpoint is tensors (``name -> Tensor or DTensor``, written through DCP) and ``meta`` (JSON). Making a manager
    is collective, and so is every method that says so: all ranks call it, and all return or raise together.

    Args:
        folder: where the step folders live; made by the first save.
        keep_latest_k: how many of the newest complete checkpoints stay; 0 keeps all.
        keep_every: steps that are a multiple of it stay too; 0: none for that reason.
        keep_best_k: how many of those with the lowest validation loss stay too.
        node_local_folder: a folder on the node's own disk; saves go there first, and from there to ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_latest_k: int,
        keep_every: int = 0,
        keep_best_k: int = 0,
        node_local_folder: Path | None = None,
    ):
        self.folder = Path(folder)
        rule = Retention(keep_latest_k=keep_latest_k, keep_every=keep_every, keep_best_k=keep_best_k)
        self._ranks = Ranks.of_this_run()
        node = None if node_local_folder is None else NodeFolder.of_this_rank(node_local_folder, self._ranks)
        self._place = Place(self.folder, rule, node)
        self._background = BackgroundSaver()
        self._verified: set[int] = set()
        self._in_use: set[int] = set()
        self._branch_point: int | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        *,
        validation_loss: float | None = None,
        is_good: bool = True,
    ) -> SaveOutcome:
        """Write and publish a checkpoint; afterwards remove those that are too old. Collective.

        Waits for a save in the background first; when that one failed, ``poll`` still says so.

        Args:
            tensors: the ranks may hold different names. A plain tensor that several ranks hold under one name must be
                equal on all of them; what differs (an RNG state) carries the rank in its name.
            meta: JSON values; rank 0's are stored.
            validation_loss: what ``keep_best_k`` compares; rank 0's counts.
            is_good: whether the step before was made, not skipped; the newest such checkpoint is never removed.

        Raises:
            CheckpointError: on all ranks, naming the ranks that failed. Earlier checkpoints are untouched.
            NotFiniteError: the tensors hold values that are not finite.
        """
        started = time.perf_counter()
        self._settle()
        self._set_aside_newer()
        with self._ranks.stage("writing meta as JSON"):
            content = Snapshot.of(step, tensors, meta, validation_loss, is_good)
        self._verified.discard(step)
        size = save_now(self._place, content, self._ranks, self._in_use)
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
        """Copy the tensors to host memory and return; a thread does the rest. Arguments as ``save``. Collective.

        Returns:
            Whether the save was started. It is not, on any rank, while the one before is under way on some rank: a slow
            disk then costs checkpoints, never training time.

        Raises:
            CheckpointError: on all ranks, when copying failed on some rank, such as for lack of memory.
        """
        if self._look_after_saver():
            return False
        self._set_aside_newer()
        with self._ranks.stage("copying tensors to host memory"):
            content = Snapshot.of(step, tensors, meta, validation_loss, is_good)
            self._background.stage(tensors)
        self._verified.discard(step)
        self._background.start(self._place, content, frozenset(self._in_use))
        return True

    def poll(self) -> list[SaveOutcome]:
        """The saves in the background that ended since the last call. Call it every step; it costs nothing.

        All ranks get the same outcomes, but perhaps not in the same step: report them, decide nothing by them.

        Raises:
            CheckpointError: one of them failed. The next may be started all the same.
        """
        return self._background.take_ended()

    @property
    def saver_has_died(self) -> bool:
        """Whether the thread of this rank's save in the background has ended without a word. Ask every step, and when
        some rank says yes call ``start_saver_again`` on all: the threads of the others wait for it."""
        return self._background.has_died

    def start_saver_again(self) -> None:
        """Give up the save under way, because its thread has died on some rank; ``poll`` then says so on all of them.
        Collective. The next save finds everything new."""
        self._look_after_saver()

    def abandon_saves(self) -> None:
        """Wait for the save in the background and forget how saves have ended. Collective."""
        self._settle()
        self._background.forget_ended()

    def not_finite(self, tensors: Mapping[str, Tensor]) -> str:
        """Which tensors hold values that are not finite, on any rank, in words; empty when none does. Collective."""
        try:
            refuse_not_finite(tensors, self._ranks)
        except NotFiniteError as error:
            return str(error)
        return ""

    def close(self) -> list[SaveOutcome]:
        """Wait for the save in the background; returns and raises what ``poll`` does. Collective.

        Call it before the process group is destroyed.
        """
        self._settle()
        return self._background.take_ended()

    def newest(self, *, before: int | None = None) -> int | None:
        """The newest step whose every file is whole, or None when nothing was ever saved. Collective.

        Node-local saves that were not gathered yet are gathered first. Damaged checkpoints are passed over, and a
        warning says what is wrong with each.

        Args:
            before: look only at smaller steps than this.

        Raises:
            UserError: when there are checkpoints but none is whole. Starting anew is then for a person to decide.
        """
        self._settle()
        if self._place.node is not None:
            gather(self._place.node, self.folder, self._ranks)
        with self._ranks.stage("listing checkpoints") as stage:
            if self._ranks.is_first:
                if self.folder.is_dir():
                    repair(self.folder)
                stage.value = [step for step in published_steps(self.folder) if before is None or step < before]
        bad: list[str] = []
        for step in reversed(stage.values[0]):
            faults = self._verify(step)
            if not faults:
                return step
            bad += faults
            if self._ranks.is_first:
                for fault in faults:
                    _LOG.warning("checkpoint of step %d is not used: %s", step, fault)
        if bad:
            raise UserError(*bad, f"{self.folder}: no checkpoint is whole; move the folder away to start from step 0")
        return None

    def load(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        optional: Sequence[str] = (),
        ignored: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Fill tensors in place from the checkpoint of a step, on any mesh and world size. Collective.

        Strict: each name must be there with the same shape and dtype, and each name of the checkpoint must be asked for
        by some rank. The first save afterwards sets aside later checkpoints: the run has left their branch.

        Args:
            optional: prefixes of names that may be missing from the checkpoint, or from this run.
            ignored: prefixes of names in the checkpoint that this run may leave unread; "" allows all.

        Returns:
            The checkpoint's meta.

        Raises:
            UserError: on all ranks, with everything that is missing, unknown, damaged, or of another shape or dtype.
            CheckpointError: on all ranks, when reading failed on any of them.
        """
        self._settle()
        if faults := self._verify(step):
            raise UserError(*faults)
        meta = self._fill(step_folder(self.folder, step), step, tensors, optional, ignored)
        self._in_use = {step}
        self._branch_point = step
        return meta

    def load_from(
        self, path: Path, tensors: Mapping[str, Tensor], *, optional: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Like ``load``, from any checkpoint folder, such as the last one of the phase before. Collective."""
        path = Path(path)
        if faults := self._faults(path, step_of(path)):
            raise UserError(*faults)
        return self._fill(path, step_of(path), tensors, optional, ignored)

    def read_meta(self, step: int) -> dict[str, Any]:
        """The meta of a checkpoint, checked against its manifest. Not collective.

        Raises:
            UserError: when the checkpoint is absent or the meta is damaged.
        """
        path = step_folder(self.folder, step)
        body, faults = read_manifest(path, step)
        if body is not None:
            faults = check_hash(path / META, records_of(body)[META])
        if faults:
            raise UserError(*faults)
        return json.loads((path / META).read_bytes())

    def _fill(
        self,
        path: Path,
        step: int | None,
        tensors: Mapping[str, Tensor],
        optional: Sequence[str],
        ignored: Sequence[str],
    ) -> dict[str, Any]:
        with self._ranks.stage("reading the manifest") as stage:
            if self._ranks.is_first:
                stage.value = read_manifest(path, step)
        body, faults = stage.values[0]
        if body is not None:
            faults = read_tensors(
                path, tensors, records_of(body), optional=optional, ranks=self._ranks, ignored=ignored
            )
        if faults:
            raise UserError(*faults)
        with self._ranks.stage("reading meta") as stage:
            if self._ranks.is_first:
                stage.value = json.loads((path / META).read_bytes())
        return stage.values[0]

    def _look_after_saver(self) -> bool:
        """Whether a save is under way on some rank; one that has died somewhere is given up everywhere. Collective."""
        background = self._background
        busy, died = zip(*self._ranks.all_gather((background.is_busy, background.has_died)), strict=True)
        if any(died):
            background.start_again([rank for rank, has_died in enumerate(died) if has_died])
            return False
        return any(busy)

    def _settle(self) -> None:
        """Wait until no save is under way on any rank; what came of it is still to be taken. Collective."""
        self._background.wait(_SETTLE_SECONDS)
        while self._look_after_saver():
            self._background.wait(_SETTLE_SECONDS)

    def _set_aside_newer(self) -> None:
        """Without this, a run that went back to an earlier step would resume on the branch it left. Collective."""
        if self._branch_point is None:
            return
        with self._ranks.stage("setting aside later checkpoints"):
            if self._ranks.is_first:
                for step in published_steps(self.folder):
                    if step > self._branch_point:
                        aside = set_aside(step_folder(self.folder, step))
                        _LOG.warning("%s: of a branch that this run has left; delete it when you like", aside)
        self._branch_point = None

    def _verify(self, step: int) -> list[str]:
        if step in self._verified:
            return []
        faults = self._faults(step_folder(self.folder, step), step)
        if not faults:
            self._verified.add(step)
        return faults

    def _faults(self, path: Path, step: int | None) -> list[str]:
        """What keeps a checkpoint from being trained on. Its values are read where the save did not look at them."""
        faults = verify_folder(path, step, self._ranks)
        with self._ranks.stage("reading the manifest") as stage:
            if self._ranks.is_first and not faults:
                stage.value = read_manifest(path, step)[0]
        body = stage.values[0]
        if faults or body.get("finite", False):
            return faults
        return stored_not_finite(path, records_of(body), self._ranks)
