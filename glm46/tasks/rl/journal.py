"""The journal of a run: the files of its rollouts, and which of them it reads, writes and removes.

A rollout is two files in the folder rollouts/ of a run, `step_XXXXXX.safetensors` with the arrays of its `Samples` and,
written after it, its manifest `step_XXXXXX.json`: without a manifest it does not exist. What networks computed for its
targets is in `step_XXXXXX.fields`.
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
from glm46.tasks.rl.rollout.records import LINES
from glm46.tasks.rl.samples import Samples
from glm46.tasks.rl.stepping import steps_per_rollout

FOLDER = "rollouts"
_REMEDY = "restore the folder of rollouts, or load another checkpoint with checkpoint.load_step"
_OTHER_REMEDY = "use that version; a run can load another checkpoint with checkpoint.load_step"
_FORMAT = 2
"""Of these files; a manifest without the number is of the first one, which had other arrays."""
_LARGE = 2**26
"""Bytes of a file of an environment's command that is not read to know it again."""
_FACTS = (
    "step", "first_prompt", "next_prompt", "part_names", "is_demonstration", "figures", "waiting", "stale", "about",
)  # fmt: skip
"""Fields of `Samples` in the manifest."""
_NOT_OF_ROLLOUTS: Any = {
    **dict.fromkeys(
        ("job", "metrics", "comm", "checkpoint", "profiling", "parallelism", "activation_checkpoint", "compile",
         "validation", "inference"), True,
    ),
    "rl": {"stop", "validation", "reference_offload"},
    "training": {"steps", "tokens", "local_batch_size"},
    "rollout": {
        "keep_latest_k", "speculative", "max_num_seqs", "tensor_parallel_degree", "pipeline_parallel_degree", "urls",
        "expert_parallel_degree", "max_staleness", "when_stale", "launch", "weights", "weights_folder", "send_adapters",
        "deadline_seconds",
    },
}  # fmt: skip
"""Sections and keys that do not decide what is generated, up to rounding. Samples that are too old are known by their
versions of the weights."""


class Journal:
    """The rollouts of a run, on its first rank. Writes are made in their order in a second thread, while steps are
    made: a disk may take as long for a sync as a step.

    Args:
        data: fingerprint of prompts, tokenizer and sizes.
        tokenizer: fingerprint of the tokenizer alone.
    """

    def __init__(self, plan: Plan, data: str, tokenizer: str):
        config, (rl, rollout) = plan.config, plan.config.reinforcement
        self.folder = Path(config.job.dump_folder) / FOLDER
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writes: list[Future[None]] = []
        self._plan, self._keep = plan, rollout.keep_latest_k
        self._oldest = rollout.max_staleness * steps_per_rollout(plan)
        self._about = {"tokenizer": tokenizer, "temperature": rollout.temperature}
        keys = config.model_dump(mode="json", exclude=_NOT_OF_ROLLOUTS)
        # The number of steps decides the rates, and so the weights that generate, if the schedule ends with the run.
        end = config.lr_scheduler.total_tokens or plan.end_tokens
        start = config.ids.get("checkpoint.initial_load_path", config.checkpoint.initial_load_path)
        words = () if (table := rl.environment) is None else (*table.command, *table.score_command)
        self._facts, self._files = [keys, end, start, data], [Path(word) for word in words if Path(word).is_file()]

    @cached_property
    def _identity(self) -> str:
        """Of what is generated. Read on the first rank alone: an index of passages beside a program may be large."""
        facts = [*self._facts, *map(_fingerprint, self._files)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def read(self, step: int, *, is_inside: bool, first_prompt: int) -> Samples | None:
        """The rollout that begins at a step; None if it has to be generated.

        Args:
            is_inside: weights have been trained on it, so that no other one can take its place.
            first_prompt: number of the next prompt.

        Raises:
            UserError: its files are damaged, or inside of it missing or of another format.
        """
        found = read_rollout(self.folder, step, None if is_inside else self._identity)
        if is_inside and found is None:
            raise missing_inside(self.folder / f"step_{step:06d}.json")
        if found is None or is_inside:
            return found
        is_new = found.is_demonstration or found.versions.min(initial=step) >= step - self._oldest
        return found if is_new and found.first_prompt == first_prompt else None

    def outlook(self, step: int, within: int, first_prompt: int) -> str:
        """A line on what a start takes: rollouts in a row, by their manifests, from the one that holds a step on,
        ``within`` of whose steps are made, and groups of others. Empty in a new run. On the first rank alone."""
        end, found, ahead = step - within, 0, []
        with suppress(UserError, KeyError):  # `read` says what is wrong with them
            while _paths(self.folder, end)[1].is_file():
                facts = _manifest(self.folder, end)
                is_same = facts.get("format") == _FORMAT and facts["identity"] == self._identity
                is_new = facts["figures"].get("staleness_max", 0) <= self._oldest
                if not (is_same and is_new and facts["first_prompt"] == first_prompt) and (found or not within):
                    break
                found, end, first_prompt = found + 1, end + steps_per_rollout(self._plan), facts["next_prompt"]
            waiting = dict(self.waiting_before(end))
            numbers = [int(path.name.partition("_")[2]) for path in self.ahead_folder.glob("prompt_*[0-9]")]
            ahead = [number for number in numbers if number >= first_prompt or number in waiting]
        line = f"rollout: steps {step + 1} to {end} are read from the journal {self.folder}, not generated again"
        if not found:
            line = f"rollout: none is read from the journal {self.folder}: it has none for step {step + 1} of these "
            line += "prompts, programs, keys and this format"
        if ahead:
            line += f"; {counted(len(ahead), 'group')} in {self.ahead_folder} go on, unless they are too old"
        return line if step or found or ahead or rollout_steps(self.folder) else ""

    def waiting_before(self, step: int) -> list[tuple[int, int]]:
        """`Samples.waiting` of the rollout before that of a step; empty if there is none."""
        before = [other for other in rollout_steps(self.folder) if other < step][-1:]
        return [tuple(pair) for other in before for pair in _manifest(self.folder, other)["waiting"]]

    @property
    def ahead_folder(self) -> Path:
        """Folder of the groups that are generated for later rollouts, of this identity."""
        return self.folder / "ahead" / f"{self._identity[:16]}-{LINES}"

    def write(self, samples: Samples, then: Callable[[], None] = lambda: None) -> None:
        """Begin to write a rollout, and to remove those that no longer matter, and groups of another configuration. It
        must not change before `finish`.

        Args:
            then: is called when it is written, on the first rank.
        """
        samples.about = self._about

        def work() -> None:
            write_rollout(self.folder, samples, self._identity)
            for other in set(self.ahead_folder.parent.glob("*")) - {self.ahead_folder}:
                shutil.rmtree(other)
            if self._keep:
                kept = published_steps(self._plan.config.checkpoint_folder)
                for step in removable(rollout_steps(self.folder), kept, self._keep):
                    remove_rollout(self.folder, step)
            then()

        self._start(work)

    def write_fields(self, step: int, fields: Mapping[str, Tensor]) -> None:
        """Begin to write the fields of the targets of a rollout."""
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
            UserError: on all ranks; the disk is full or not writable.
        """

        def wait() -> None:
            while self._writes:
                self._writes.pop(0).result()

        run_on_all_ranks(wait)

    def close(self) -> None:
        """Wait for the thread, whose errors `finish` alone reports."""
        self._thread.shutdown()


def removable(rollouts: Sequence[int], checkpoints: Sequence[int], keep: int) -> list[int]:
    """Steps of rollouts that neither a resume nor ``keep_latest_k`` needs. A resume from a checkpoint needs the rollout
    that it lies in or behind; one from the newest checkpoint also all later rollouts, so that none is generated twice.
    Both lists of steps ascend."""
    needed = set(rollouts[-keep:]) if keep else set(rollouts)
    for checkpoint in checkpoints:
        needed |= set([step for step in rollouts if step < checkpoint][-1:])
    newest = max(checkpoints, default=0)
    return [step for step in rollouts if step not in needed and step < newest]


def write_rollout(folder: Path, samples: Samples, identity: str) -> None:
    """Write a rollout so that after a kill at any moment it is complete or does not exist.

    Args:
        identity: of everything that decides its content; `read_rollout` asks for the same.

    Raises:
        OSError: the disk is full or not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, manifest = _paths(folder, samples.step)
    manifest.unlink(missing_ok=True)
    fields = {one.name: getattr(samples, one.name) for one in dataclasses.fields(samples)}
    record = _write(data, {name: value for name, value in fields.items() if isinstance(value, np.ndarray)})
    facts = {"format": _FORMAT, "identity": identity} | {name: fields[name] for name in _FACTS}
    facts |= {"bytes": record.bytes, "sha256": record.sha256}
    replace_durably(manifest, [json.dumps(facts, indent=1).encode()])


def read_rollout(folder: Path, step: int, identity: str | None = None) -> Samples | None:
    """A rollout of the journal; None if it does not exist, or not with this identity and in this format.

    Raises:
        UserError: its files are damaged, or without an identity of another format.
    """
    data, path = _paths(folder, step)
    if not path.is_file():
        return None
    facts = _manifest(folder, step)
    try:
        is_known = facts.get("format") == _FORMAT
        if identity is not None and not (is_known and facts["identity"] == identity):
            return None
        if not is_known:
            raise UserError(f"{data}: another version of glm46 wrote it; {_OTHER_REMEDY}")
        record = hash_file(data)
        if (record.bytes, record.sha256) != (facts["bytes"], facts["sha256"]):
            raise ValueError("its bytes are not those that were written")
        facts["waiting"] = [tuple(pair) for pair in facts["waiting"]]
        return Samples(**{**_read(data), **{name: facts[name] for name in _FACTS}})
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{data}: {error}; {_REMEDY}") from error


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    path = _paths(folder, step)[1]
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; {_REMEDY}") from error


def write_fields(folder: Path, step: int, fields: Mapping[str, Tensor]) -> None:
    """Write what networks computed for the targets of a rollout before its first step, FP32 [G] each."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"step_{step:06d}.fields", {name: values.numpy() for name, values in fields.items()})


def read_fields(folder: Path, step: int) -> dict[str, Tensor]:
    """Read what `write_fields` wrote.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = folder / f"step_{step:06d}.fields"
    if not path.is_file():
        raise missing_inside(path)
    return {name: torch.from_numpy(values) for name, values in _read(path).items()}


def missing_inside(path: Path) -> UserError:
    """The error to raise if a file is missing of a rollout that weights have been trained on."""
    return UserError(f"{path}: missing, and the run goes on inside of this rollout; {_REMEDY}")


def remove_rollout(folder: Path, step: int) -> None:
    """Remove the files of a rollout, the manifest first."""
    data, manifest = _paths(folder, step)
    for path in (manifest, data, data.with_suffix(".fields")):
        path.unlink(missing_ok=True)


def rollout_steps(folder: Path) -> list[int]:
    """Steps of all rollouts of a journal, ascending."""
    return sorted(int(path.stem.partition("_")[2]) for path in folder.glob("step_*.json"))


def _fingerprint(file: Path) -> str:
    """The hash of a program, or of a large file its size and time of change."""
    status = file.stat()
    return hash_file(file).sha256 if status.st_size < _LARGE else f"{status.st_size} {status.st_mtime_ns}"


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"step_{step:06d}.safetensors", folder / f"step_{step:06d}.json"


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> FileRecord:
    return write_arrays(path, dict(sorted(arrays.items(), key=lambda one: -one[1].itemsize)), {})


def _read(path: Path) -> dict[str, np.ndarray]:
    return {name: values.copy() for name, values in map_arrays(path, _REMEDY)[0].items()}  # to be written to
