"""The interface of a task, and of the objectives that its networks train on.

A task is a folder beside `training`: it says which networks exist, what they read, and what they minimise. The engine
counts, computes gradients, updates, saves and resumes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import HeadForm
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.hf_weights import load_weights
from glm46.engine.training.network import Network, TrainedNetwork
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch

Counts = Mapping[str, Any]
"""Integers, or lists of integers, by name."""


class StepBatches(NamedTuple):
    """Micro-batches of this rank for one optimizer step."""

    micro_batches: list[Batch]
    """Of equal shape on all ranks, with ``mtp_input_ids`` and ``mtp_labels`` to train prediction layers, and the fields
    of the objectives."""
    sequences: int
    """Samples over all ranks. Fewer than requested at the end of a stage; the rest is padding."""
    seq_len: int
    read_seconds: float
    """Time to read them."""
    note: str = ""
    """Message for the log, such as the begin of a stage."""
    model_seconds: float = 0.0
    """Time in which `Task.prepare` generated samples for this step, and computed with networks."""
    packed_tokens: int | None = None
    """`computed_tokens`, if rows hold several sequences; None if each is a row."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of all rows over all ranks, padding included."""
        return self.sequences * self.seq_len if self.packed_tokens is None else self.packed_tokens


class Objective(Protocol):
    """The objective that a network minimises."""

    form: HeadForm
    """Form of the head; `LossSums` says which fields of the output it fills in."""
    fields: tuple[str, ...]
    """Fields of the batch that `loss` and `sums` read, [B, S] or [B, K, S]. With ``routes`` among them, see
    `compute/model/routes.py`, the network computes with the experts of this field."""

    def count(self, micro_batches: list[Batch]) -> Counts:
        """Count this rank's micro-batches. The engine sums the counts over all ranks by name. ``targets`` is what the
        sum ``loss`` is divided by to report its mean. Without micro-batches all counts are 0."""

    def loss(self, output: LossSums, batch: Fields, totals: Counts, clock: int) -> Tensor:
        """The part of the step's loss from one micro-batch.

        Args:
            batch: `fields` of this micro-batch, this rank's part of the sequences, on its device.
            totals: `count` of the whole step over all ranks. A sum that is divided by a total adds up to the mean,
                however the tokens are distributed.
            clock: tokens of the curriculum before the step: the argument of all schedules.
        """

    def empty_sums(self) -> dict[str, Tensor]:
        """The result of `sums` without any token; ``loss`` is one of its names."""

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """Values to sum over the micro-batches and ranks of a step for its metrics, without gradient; any number type.
        Ranks of tensor parallelism hold equal log-probabilities and values: each returns its share of their sums.

        Args:
            batch: of the loader, on the CPU: whole rows.
        """

    def metrics(self, sums: dict[str, Tensor], totals: Counts, clock: int) -> dict[str, float]:
        """Columns of metrics.jsonl, from the sums over all ranks (FP64 on the CPU)."""


class Task(ABC):
    """The networks of a job, their objectives, and the batches of each step. The engine asks nothing else about what a
    job trains. A task sets `plan`, `cluster`, `networks` and `objectives`, and has `next`, `fingerprint` and
    `validate`; the other methods do nothing unless a task has its own."""

    plan: Plan
    cluster: Cluster
    networks: Mapping[str, Network]
    """All networks by name; the first one is the main one."""
    objectives: Mapping[str, Objective]
    """Of the networks that train, by the same names; the main one first."""
    name: ClassVar[str] = "task"
    """In metrics and heartbeat."""
    identity_keys: ClassVar[tuple[str, ...]] = ()
    """Keys and tables of the config that map sample numbers to what is read; they explain another `fingerprint`."""
    other_text: ClassVar[str] = "data.sources: the shards hold other text than before"
    has_loss_level: ClassVar[bool] = True
    """True if losses of good steps are near each other, so that one far above is a spike. The loss of a policy is
    not."""
    keeps_prediction_layers: ClassVar[bool] = False
    """True if the prediction layers of the weights that the run began with are left out, and a checkpoint may hold
    them."""

    def prepare(self, progress: Progress, stop: StopRequest) -> dict[str, float]:
        """Do what the next step needs of all ranks before its batches are read, such as generating samples. It may be
        skipped if a stop is requested on some rank: no step follows then. Collective.

        Returns:
            Columns of the step's row of metrics.
        """
        return {}

    @abstractmethod
    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """Read the micro-batches of a step of ``sequences`` samples over all ranks. Not collective: a rank that fails
        raises UserError alone."""

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """Add fields that networks compute, when all ranks have agreed to make the step. Collective."""
        return micro_batches

    def fault(self, row: Mapping[str, float]) -> str | None:
        """The reason to end a run after a step, with the remedy, from the step's row of metrics, which is equal on all
        ranks; None if it continues."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of everything that maps sample numbers to what is read. A resume requires an equal one."""

    def state(self, progress: Progress) -> dict[str, Any]:
        """JSON that a checkpoint holds for this task. Collective."""
        return {}

    @abstractmethod
    def validate(self, progress: Progress) -> dict[str, float]:
        """Validation metrics after these steps. Collective."""

    def describe(self) -> list[str]:
        """Lines of the first message of a run."""
        return []

    def export(self, progress: Progress) -> str:
        """Save the result in the format of Hugging Face; returns its place. Collective."""
        raise NotImplementedError(f"{self.name} exports nothing")

    def load_exported(self, folder: Path) -> None:
        """Load the main network from a Hugging Face folder. Collective.

        Raises:
            UserError: the folder is corrupt or belongs to another model.
        """
        load_weights(next(iter(self.networks.values())), folder)

    def close(self) -> None:
        """End what the task has started, such as processes. Not collective."""
        return None

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """Lines that show what the model does: before the first step, and in the final report. Collective."""
        return []


def trained_networks(task: Task) -> dict[str, TrainedNetwork]:
    """The networks that have an objective, by name, the main one first."""
    networks = ((name, task.networks[name]) for name in task.objectives)
    return {name: network for name, network in networks if isinstance(network, TrainedNetwork)}
