"""The trainer's view of checkpoints: save a step, find the newest good one, load it. All collective, all verified."""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.checkpoint.agreement import CheckpointError, Ranks
from glm46.checkpoint.dcp import read_tensors, write_tensors
from glm46.checkpoint.integrity import META, check_files, check_hash, read_manifest, records_of
from glm46.checkpoint.publish import (
    complete_steps,
    open_draft,
    publish,
    published_steps,
    remove,
    repair,
    step_folder,
    step_of,
)
from glm46.checkpoint.retention import steps_to_remove
from glm46.config.errors import UserError

_LOG = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints of one run, in ``folder/step-000123/``, seen by all ranks.

    A checkpoint is tensors (``name -> Tensor or DTensor``, written through DCP) and ``meta`` (JSON). Making a manager
    is collective, and so is every method that says so: all ranks call it, and all return or raise together.

    Args:
        folder: where the step folders live; made by the first save.
        keep_latest_k: how many of the newest complete checkpoints stay; 0 keeps all.
    """

    def __init__(self, folder: Path, *, keep_latest_k: int):
        self.folder = Path(folder)
        self._keep_latest_k = keep_latest_k
        self._ranks = Ranks.of_this_run()
        self._verified: set[int] = set()
        self._in_use: set[int] = set()

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Write and publish a checkpoint; afterwards remove those that are too old. Collective.

        Args:
            tensors: the ranks may hold different names. A plain tensor that several ranks hold under one name must be
                equal on all of them; what differs (an RNG state) carries the rank in its name.
            meta: JSON values; rank 0's are stored.

        Raises:
            CheckpointError: on all ranks, naming the ranks that failed. Earlier checkpoints are untouched.
        """
        started = time.time()
        with self._ranks.stage("making the checkpoint folder") as stage:
            if self._ranks.is_first:
                stage.value = open_draft(self.folder, step)
        draft = stage.values[0]
        try:
            files = write_tensors(draft, tensors, self._ranks)
            with self._ranks.stage("publishing"):
                if self._ranks.is_first:
                    facts = {"saved_at": started, "world_size": self._ranks.size, "torch": torch.__version__}
                    publish(draft, step, files, meta, facts)
        except CheckpointError:
            if self._ranks.is_first:  # the others have left the folder: a full disk gets its space back
                shutil.rmtree(draft, ignore_errors=True)
            raise
        with self._ranks.stage("removing old checkpoints"):
            if self._ranks.is_first:
                self._remove_old()

    def newest(self) -> int | None:
        """The newest step whose every file is whole, or None when nothing was ever saved. Collective.

        Damaged checkpoints are passed over, and a warning says what is wrong with each.

        Raises:
            UserError: when there are checkpoints but none is whole. Starting anew is then for a person to decide.
        """
        with self._ranks.stage("listing checkpoints") as stage:
            if self._ranks.is_first:
                if self.folder.is_dir():
                    repair(self.folder)
                stage.value = published_steps(self.folder)
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
        by some rank.

        Args:
            optional: prefixes of names that may be missing from the checkpoint, or from this run.
            ignored: prefixes of names in the checkpoint that this run may leave unread; "" allows all.

        Returns:
            The checkpoint's meta.

        Raises:
            UserError: on all ranks, with everything that is missing, unknown, damaged, or of another shape or dtype.
            CheckpointError: on all ranks, when reading failed on any of them.
        """
        meta = self._load(step_folder(self.folder, step), step, tensors, optional, ignored)
        self._in_use = {step}
        return meta

    def load_from(
        self, path: Path, tensors: Mapping[str, Tensor], *, optional: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Like ``load``, from any checkpoint folder, such as the last one of the phase before. Collective."""
        return self._load(Path(path), step_of(Path(path)), tensors, optional, ignored)

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

    def _load(
        self,
        path: Path,
        step: int | None,
        tensors: Mapping[str, Tensor],
        optional: Sequence[str],
        ignored: Sequence[str],
    ) -> dict[str, Any]:
        known = step is not None and step in self._verified and path == step_folder(self.folder, step)
        if not known and (faults := self._verify_folder(path, step)):
            raise UserError(*faults)
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

    def _verify(self, step: int) -> list[str]:
        if step in self._verified:
            return []
        faults = self._verify_folder(step_folder(self.folder, step), step)
        if not faults:
            self._verified.add(step)
        return faults

    def _verify_folder(self, path: Path, step: int | None) -> list[str]:
        """Everything wrong with a checkpoint; each rank hashes its share of the files. Collective."""
        with self._ranks.stage(f"verifying {path}") as stage:
            if self._ranks.is_first:
                stage.value = self._cheap_faults(path, step)
        body, faults = stage.values[0]
        if faults:
            return faults
        with self._ranks.stage(f"verifying {path}") as stage:
            largest_first = sorted(records_of(body).items(), key=lambda item: -item[1].bytes)
            mine = largest_first[self._ranks.rank :: self._ranks.size]
            stage.value = [fault for name, record in mine for fault in check_hash(path / name, record)]
        return [fault for faults in stage.values for fault in faults]

    def _cheap_faults(self, path: Path, step: int | None) -> tuple[dict[str, Any] | None, list[str]]:
        if not path.is_dir():
            there = ", ".join(str(known) for known in published_steps(path.parent)) or "none"
            return None, [f"{path}: no such checkpoint; steps in {path.parent}: {there}"]
        body, faults = read_manifest(path, step)
        return body, faults if body is None else check_files(path, body)

    def _remove_old(self) -> None:
        complete = complete_steps(self.folder)
        for step in steps_to_remove(complete, keep_latest_k=self._keep_latest_k, in_use=self._in_use):
            remove(step_folder(self.folder, step))
            self._verified.discard(step)
