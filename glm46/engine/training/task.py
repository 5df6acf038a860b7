"""Interface of a task.

A task defines which networks exist, what they read, and what they minimise. The engine counts, computes gradients,
updates, saves and resumes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from glm46.compute.distributed.mesh import Cluster
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.network import Network, TrainedNetwork
from glm46.engine.training.objective import Objective
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.storage.data.tokenizer import Tokenizer


class StepBatches(NamedTuple):
    """Micro-batches of this rank for one optimizer step."""

    micro_batches: list[Batch]
    """Batches of equal shape on all ranks, with ``mtp_input_ids`` and ``mtp_labels`` to train prediction layers, and
    the fields of the objectives."""
    sequences: int
    """Samples over all ranks. Fewer than requested at the end of a stage; the rest is padding."""
    seq_len: int
    read_seconds: float
    """Time to read the micro-batches."""
    note: str = ""
    """Message for the log, such as the start of a stage."""
    model_seconds: float = 0.0
    """Time that `Task.prepare` took to generate samples for this step and to run networks on them."""
    packed_tokens: int | None = None
    """`computed_tokens`, if rows hold several sequences; None if each is a row."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of all rows over all ranks, padding included."""
        return self.sequences * self.seq_len if self.packed_tokens is None else self.packed_tokens


class Task(ABC):
    """Networks of a job, their objectives, and the batches of each step. The engine knows nothing else about what a job
    trains. A task sets `plan`, `cluster`, `tokenizer`, `networks` and `objectives`, and has `next`, `fingerprint` and
    `validate`; the other methods do nothing unless a task overrides them."""

    plan: Plan
    cluster: Cluster
    tokenizer: Tokenizer
    networks: Mapping[str, Network]
    """All networks by name; the first one is the main one."""
    objectives: Mapping[str, Objective]
    """Objectives of the trained networks, by the same names; the main one first."""
    name: ClassVar[str] = "task"
    """Name in metrics."""
    identity_keys: ClassVar[tuple[str, ...]] = ()
    """Keys and tables of the config that map sample numbers to what is read; they explain a changed `fingerprint`."""
    other_text: ClassVar[str] = "data.sources: the shards hold other text than before"
    has_loss_level: ClassVar[bool] = True
    """True if a jump of the loss means a bad step; false for policy losses."""
    keeps_prediction_layers: ClassVar[bool] = False
    """True if the task does not load the prediction layers of its initial weights, which a checkpoint may hold."""

    def prepare(self, progress: Progress, stop: StopRequest) -> dict[str, float]:
        """Prepare the next step on all ranks before its batches are read, such as by generating samples. The work may
        be skipped if a stop is requested on some rank: then no step follows. Collective.

        Returns:
            Columns of the step's row of metrics.
        """
        return {}

    @abstractmethod
    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """Read the micro-batches of a step of ``sequences`` samples over all ranks. Not collective: a rank that fails
        raises UserError alone."""

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """Add fields that networks compute, after all ranks have agreed to make the step. Collective."""
        return micro_batches

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of everything that maps sample numbers to what is read. A resume requires an equal one."""

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the JSON that a checkpoint holds for this task. Collective."""
        return {}

    @abstractmethod
    def validate(self, progress: Progress) -> dict[str, float]:
        """Compute validation metrics after the steps so far. Collective."""

    def describe(self) -> list[str]:
        """Return lines for the first message of a run."""
        return []

    def close(self) -> None:
        """Stop what the task has started, such as processes. Not collective."""
        return None

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """Return lines that show what the model does, before the first step and in the final report. Collective."""
        return []


def trained_networks(task: Task) -> dict[str, TrainedNetwork]:
    """Return the networks that have an objective, by name, the main one first."""
    networks = ((name, task.networks[name]) for name in task.objectives)
    return {name: network for name, network in networks if isinstance(network, TrainedNetwork)}
