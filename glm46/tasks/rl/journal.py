"""The journal of a run: which rollouts it reads, writes and removes."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.engine.reliability.run_lock import writing
from glm46.files.durable import hash_file
from glm46.run.plan import Plan
from glm46.storage.checkpoint.integrity import published_steps
from glm46.tasks.rl.rollouts import (
    FOLDER,
    Rollout,
    missing_inside,
    read_fields,
    read_rollout,
    remove_rollout,
    rollout_steps,
    write_fields,
    write_rollout,
)
from glm46.tasks.rl.stepping import steps_per_rollout

_NOT_OF_ROLLOUTS = {
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
        config = plan.config
        self.folder = Path(config.job.dump_folder) / FOLDER
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._writes: list[Future[None]] = []
        self._plan = plan
        self._oldest = config.rollout.max_staleness * steps_per_rollout(plan)
        self._about = {"tokenizer": tokenizer, "temperature": config.rollout.temperature}
        table = config.model_dump(mode="json", exclude=_NOT_OF_ROLLOUTS)
        # The number of steps decides the rates, and so the weights that generate, if the schedule ends with the run.
        end = config.lr_scheduler.total_tokens or plan.end_tokens
        start = config.ids.get("checkpoint.initial_load_path", config.checkpoint.initial_load_path)
        environment = config.rl.environment
        words = () if environment is None else (*environment.command, *environment.score_command)
        programs = [hash_file(Path(word)).sha256 for word in words if Path(word).is_file()]
        facts = [table, end, start, data, *programs]
        self._identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def read(self, step: int, *, is_inside: bool, first_prompt: int) -> Rollout | None:
        """The rollout that begins at a step; None if it has to be generated.

        Args:
            is_inside: weights have been trained on it, so that no other one can take its place.
            first_prompt: number of the next prompt.

        Raises:
            UserError: its files are damaged, or missing inside of it.
        """
        found = read_rollout(self.folder, step, None if is_inside else self._identity)
        if is_inside and found is None:
            raise missing_inside(self.folder / f"step_{step:06d}.json")
        if found is None or is_inside:
            return found
        is_new = found.is_demonstration or found.arrays["versions"].min(initial=step) >= step - self._oldest
        return found if is_new and found.first_prompt == first_prompt else None

    def waiting_before(self, step: int) -> list[list[int]]:
        """`Rollout.waiting` of the rollout before that of a step; empty if there is none."""
        before = [other for other in rollout_steps(self.folder) if other < step][-1:]
        found = read_rollout(self.folder, before[0]) if before else None
        return found.waiting if found is not None else []

    @property
    def ahead_folder(self) -> Path:
        """Folder of the groups that are generated for later rollouts, of this identity."""
        return self.folder / "ahead" / self._identity[:16]

    def write(self, rollout: Rollout, then: Callable[[], None] = lambda: None) -> None:
        """Begin to write a rollout, and to remove those that no longer matter, and groups of another configuration. It
        must not change before `finish`.

        Args:
            then: is called when it is written, on the first rank.
        """
        rollout.about = self._about

        def work() -> None:
            write_rollout(self.folder, rollout, self._identity)
            for other in set(self.ahead_folder.parent.glob("*")) - {self.ahead_folder}:
                shutil.rmtree(other)
            if keep := self._plan.config.rollout.keep_latest_k:
                kept = published_steps(self._plan.config.checkpoint_folder)
                for step in removable(rollout_steps(self.folder), kept, keep):
                    remove_rollout(self.folder, step)
            then()

        self._start(work)

    def write_fields(self, step: int, fields: Mapping[str, Tensor]) -> None:
        """Begin to write the fields of the tokens of a rollout."""
        self._start(lambda: write_fields(self.folder, step, fields))

    def read_fields(self, step: int) -> dict[str, Tensor]:
        """See `rollouts.read_fields`."""
        return read_fields(self.folder, step)

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

    Args:
        rollouts: ascending.
        checkpoints: ascending.
    """
    needed = set(rollouts[-keep:]) if keep else set(rollouts)
    for checkpoint in checkpoints:
        needed |= set([step for step in rollouts if step < checkpoint][-1:])
    newest = max(checkpoints, default=0)
    return [step for step in rollouts if step not in needed and step < newest]
