"""The journal of a run: stores its rollouts, so that a resume does not generate them again.

A rollout is two files in the folder rollouts/ of a run: `step_XXXXXX.safetensors` with the arrays of its `Samples`, and
its manifest `step_XXXXXX.json`, which is written last. A rollout without a manifest does not exist. The network outputs
for its targets are in `step_XXXXXX.fields`.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.engine.reliability.run_lock import writing
from glm46.files.array_file import map_arrays, write_arrays
from glm46.files.durable import FileRecord, hash_file, replace_durably
from glm46.run.plan import Plan
from glm46.storage.checkpoint.integrity import published_steps
from glm46.storage.judge.equal_results import math_verify_version
from glm46.tasks.rl.journal_files import FOLDER, remove_rollout, rollout_paths, rollout_steps
from glm46.tasks.rl.rollout.records import LINES
from glm46.tasks.rl.samples import Samples
from glm46.tasks.rl.source_files import source_fingerprints
from glm46.tasks.rl.stepping import steps_per_rollout

_REMEDY = "restore the folder of rollouts, or load another checkpoint with checkpoint.load_step"
_OTHER_REMEDY = "use that version; a run can load another checkpoint with checkpoint.load_step"
_FORMAT = 2
"""Version of the file format. A manifest without the number has format 1, which had other arrays."""
_FACTS = (
    "step",
    "first_prompt",
    "next_prompt",
    "part_names",
    "is_demonstration",
    "figures",
    "waiting",
    "stale",
    "about",
)
"""Fields of `Samples` that the manifest holds."""
_NOT_OF_ROLLOUTS: Any = {
    **dict.fromkeys(
        (
            "job",
            "metrics",
            "comm",
            "checkpoint",
            "profiling",
            "parallelism",
            "activation_checkpoint",
            "compile",
            "validation",
            "inference",
        ),
        True,
    ),
    "rl": {"validation"},
    "training": {"steps", "tokens", "local_batch_size"},
    "rollout": {
        "speculative",
        "max_num_seqs",
        "tensor_parallel_degree",
        "urls",
        "expert_parallel_degree",
        "max_staleness",
        "when_stale",
        "launch",
        "weights",
        "weights_folder",
        "send_adapters",
        "deadline_seconds",
    },
}
"""Sections and keys that do not change what is generated, up to rounding. The staleness bound is among them because
samples record the version of their weights."""
NEWEST_KEPT = 10
"""Newest rollouts that stay, for `rl inspect` and a look at what a run has learned."""


class Journal:
    """Reads and writes the rollouts of a run, on its first rank.

    A second thread does the writes, in order, while the run trains: syncing a disk may take as long as a step.

    Args:
        data: fingerprint of prompts, tokenizer and sizes.
        tokenizer: fingerprint of the tokenizer alone.
    """

    def __init__(self, plan: Plan, data: str, tokenizer: str):
        config = plan.config
        rl, rollout = config.reinforcement
        self.folder = Path(config.job.dump_folder) / FOLDER
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writes: list[Future[None]] = []
        self._plan = plan
        self._keep = NEWEST_KEPT if config.checkpoint.keep_latest_k else 0
        self._oldest = rollout.max_staleness * steps_per_rollout(plan)
        self._about = {"tokenizer": tokenizer, "temperature": rollout.temperature}
        keys = config.model_dump(mode="json", exclude=_NOT_OF_ROLLOUTS)
        # If the schedule ends with the run, its length changes learning rates and so the weights that generate.
        end = config.lr_scheduler.total_tokens or plan.end_tokens
        start = config.ids.get("checkpoint.initial_load_path", config.checkpoint.initial_load_path)
        self._facts = [keys, end, start, data]
        self._rl = rl

    @cached_property
    def _identity(self) -> str:
        """Fingerprint of everything that decides which samples are generated, and their rewards.

        Used on the first rank only, because it hashes files of programs, such as a large index of passages.
        """
        judges_mathematics = any(reward.name == "math" for reward in self._rl.rewards)
        version = math_verify_version() if judges_mathematics else None
        facts = [*self._facts, version, source_fingerprints(self._rl)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def read(self, step: int, *, is_inside: bool, first_prompt: int) -> Samples | None:
        """Read the rollout that begins at a step; None if it has to be generated.

        Args:
            is_inside: steps of this rollout have been made, so no other rollout can replace it.
            first_prompt: number of the next prompt.

        Raises:
            UserError: if its files are damaged; with ``is_inside`` also if they are missing or have another format.
        """
        samples = read_rollout(self.folder, step, None if is_inside else self._identity)
        if is_inside and samples is None:
            raise missing_inside(self.folder / f"step_{step:06d}.json")
        if samples is None or is_inside:
            return samples
        is_new = samples.is_demonstration or samples.versions.min(initial=step) >= step - self._oldest
        return samples if is_new and samples.first_prompt == first_prompt else None

    def outlook(self, step: int, steps_done: int, first_prompt: int) -> str:
        """Describe in one line what a start reuses: the consecutive rollouts from the one that contains ``step``, by
        their manifests, and groups of later ones. Empty in a new run. Call it on the first rank only.

        Args:
            steps_done: steps of the first of these rollouts that have been made.
        """
        end = step - steps_done
        count = 0
        waiting_groups = []
        with suppress(UserError, KeyError):  # `read` reports damaged files
            while rollout_paths(self.folder, end)[1].is_file():
                facts = _manifest(self.folder, end)
                is_same = facts.get("format") == _FORMAT and facts["identity"] == self._identity
                is_new = facts["figures"].get("staleness_max", 0) <= self._oldest
                if not (is_same and is_new and facts["first_prompt"] == first_prompt) and (count or not steps_done):
                    break
                count = count + 1
                end = end + steps_per_rollout(self._plan)
                first_prompt = facts["next_prompt"]
            waiting = dict(self.waiting_before(end))
            numbers = [int(path.name.partition("_")[2]) for path in self.ahead_folder.glob("prompt_*[0-9]")]
            waiting_groups = [number for number in numbers if number >= first_prompt or number in waiting]
        line = f"rollout: steps {step + 1} to {end} are read from the journal {self.folder}, not generated again"
        if not count:
            line = f"rollout: none is read from the journal {self.folder}: it has none for step {step + 1} of these "
            line += "prompts, programs, functions, keys and this format; samples and rewards are made anew"
        if waiting_groups:
            line += f"; {counted(len(waiting_groups), 'group')} in {self.ahead_folder} go on, unless they are too old"
        return line if step or count or waiting_groups or rollout_steps(self.folder) else ""

    def waiting_before(self, step: int) -> list[tuple[int, int]]:
        """Read `Samples.waiting` of the last rollout before a step; empty if there is no such rollout."""
        earlier_steps = [other for other in rollout_steps(self.folder) if other < step][-1:]
        return [tuple(pair) for other in earlier_steps for pair in _manifest(self.folder, other)["waiting"]]

    @property
    def ahead_folder(self) -> Path:
        """Folder of groups that are generated for later rollouts; its name depends on the identity."""
        return self.folder / "ahead" / f"{self._identity[:16]}-{LINES}"

    def write(self, samples: Samples, on_written: Callable[[], None] = lambda: None) -> None:
        """Start writing a rollout; then remove rollouts that are no longer needed, and groups of other identities.

        Args:
            samples: must not change before `finish`.
            on_written: called on the first rank once the rollout is written.
        """
        samples.about = self._about

        def work() -> None:
            write_rollout(self.folder, samples, self._identity)
            for other in set(self.ahead_folder.parent.glob("*")) - {self.ahead_folder}:
                shutil.rmtree(other)
            if self._keep:
                checkpoints = published_steps(self._plan.config.checkpoint_folder)
                for step in removable(rollout_steps(self.folder), checkpoints, self._keep):
                    remove_rollout(self.folder, step)
            on_written()

        self._start(work)

    def write_fields(self, step: int, fields: Mapping[str, Tensor]) -> None:
        """Start writing the fields of the targets of a rollout."""
        self._start(lambda: write_fields(self.folder, step, fields))

    def _start(self, write: Callable[[], None]) -> None:
        def work() -> None:
            with writing(self.folder):
                write()

        if dist.get_rank() == 0:
            self._writes.append(self._thread.submit(work))

    def finish(self) -> None:
        """Wait for all writes. Collective.

        Raises:
            UserError: on all ranks, if the disk is full or not writable.
        """

        def wait() -> None:
            while self._writes:
                self._writes.pop(0).result()

        run_on_all_ranks(wait)

    def close(self) -> None:
        """Wait for the thread. Its errors are not raised here, only by `finish`."""
        self._thread.shutdown()


def removable(rollouts: Sequence[int], checkpoints: Sequence[int], keep: int) -> list[int]:
    """Find the steps of rollouts that a resume does not need and that are not among the newest.

    Args:
        keep: number of newest rollouts that stay; 0 keeps all.

    A resume from a checkpoint needs the rollout that contains its step or ends there. A resume from the newest
    checkpoint also needs all later rollouts, so that none is generated twice. Both lists of steps are ascending.
    """
    needed = set(rollouts[-keep:]) if keep else set(rollouts)
    for checkpoint in checkpoints:
        needed |= set([step for step in rollouts if step < checkpoint][-1:])
    newest = max(checkpoints, default=0)
    return [step for step in rollouts if step not in needed and step < newest]


def write_rollout(folder: Path, samples: Samples, identity: str) -> None:
    """Write a rollout atomically: after a kill at any moment it is complete or does not exist.

    Args:
        identity: fingerprint of everything that decides the content; `read_rollout` compares it.

    Raises:
        OSError: if the disk is full or not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, manifest = rollout_paths(folder, samples.step)
    manifest.unlink(missing_ok=True)
    fields = {field.name: getattr(samples, field.name) for field in dataclasses.fields(samples)}
    record = _write(data, {name: value for name, value in fields.items() if isinstance(value, np.ndarray)})
    facts = {"format": _FORMAT, "identity": identity} | {name: fields[name] for name in _FACTS}
    facts |= {"bytes": record.bytes, "sha256": record.sha256}
    replace_durably(manifest, [json.dumps(facts, indent=1).encode()])


def read_rollout(folder: Path, step: int, identity: str | None = None) -> Samples | None:
    """Read a rollout; None if it does not exist or, with ``identity``, has another identity or format.

    Raises:
        UserError: if its files are damaged; without ``identity`` also if it has another format.
    """
    data, path = rollout_paths(folder, step)
    if not path.is_file():
        return None
    facts = _manifest(folder, step)
    try:
        has_format = facts.get("format") == _FORMAT
        if identity is not None and not (has_format and facts["identity"] == identity):
            return None
        if not has_format:
            raise UserError(f"{data}: another version of glm46 wrote it; {_OTHER_REMEDY}")
        record = hash_file(data)
        if (record.bytes, record.sha256) != (facts["bytes"], facts["sha256"]):
            raise ValueError("its bytes are not those that were written")
        facts["waiting"] = [tuple(pair) for pair in facts["waiting"]]
        return Samples(**{**_read(data), **{name: facts[name] for name in _FACTS}})
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{data}: {error}; {_REMEDY}") from error


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    path = rollout_paths(folder, step)[1]
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return manifest
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; {_REMEDY}") from error


def write_fields(folder: Path, step: int, fields: Mapping[str, Tensor]) -> None:
    """Write the fields of a rollout's targets, network outputs from before its first step included, FP32 [G] each."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"step_{step:06d}.fields", {name: values.numpy() for name, values in fields.items()})


def read_fields(folder: Path, step: int) -> dict[str, Tensor]:
    """Read the fields that `write_fields` wrote.

    Raises:
        UserError: if the file is missing or damaged.
    """
    path = folder / f"step_{step:06d}.fields"
    if not path.is_file():
        raise missing_inside(path)
    return {name: torch.from_numpy(values) for name, values in _read(path).items()}


def missing_inside(path: Path) -> UserError:
    """Return the error for a missing file of a rollout that weights have been trained on."""
    return UserError(f"{path}: missing, and the run goes on inside of this rollout; {_REMEDY}")


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> FileRecord:
    return write_arrays(path, dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize)), {})


def _read(path: Path) -> dict[str, np.ndarray]:
    return {
        name: values.copy() for name, values in map_arrays(path, _REMEDY)[0].items()
    }  # copies, because mapped arrays are read-only
