"""Parts of a model that a stage trains: the indexers of sparse attention, and everything else."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from glm46.compute.model.indexer import is_index_weight
from glm46.compute.model.transformer import Transformer
from glm46.config.indexer import IndexerTraining
from glm46.run.plan import Plan


def freeze_parts(model: Transformer, plan: Plan, *, is_trained: bool) -> None:
    """Freeze what a run trains at no point, in place: indexers, or everything else."""
    if not (is_trained and plan.trains_indexers):
        model.freeze_indexers()
    elif plan.trains_only_indexers:
        model.train_only_indexers()


@dataclass(frozen=True)
class TrainedParts:
    """This rank's shards of the weights that a run trains at some point."""

    indexers: list[nn.Parameter]
    others: list[nn.Parameter]

    @classmethod
    def of(cls, parameters: dict[str, nn.Parameter]) -> "TrainedParts":
        """Divide parameters by their names."""
        return cls(
            [parameter for name, parameter in parameters.items() if is_index_weight(name)],
            [parameter for name, parameter in parameters.items() if not is_index_weight(name)],
        )

    @property
    def trains_indexers(self) -> bool:
        """True if the current stage trains indexers. Equal on all ranks: each pipeline stage has one."""
        return any(parameter.requires_grad for parameter in self.indexers)

    @property
    def trains_only_indexers(self) -> bool:
        """True if the current stage trains nothing else."""
        return self.trains_indexers and not any(parameter.requires_grad for parameter in self.others)

    @property
    def index_loss(self) -> Literal["none", "dense", "sparse"]:
        """Loss of the current stage, see `RoutingOptions.index_loss`."""
        if self.trains_only_indexers:
            return "dense"
        return "sparse" if self.trains_indexers else "none"

    def train(self, training: IndexerTraining) -> None:
        """Train what a stage asks for from the next batch on. Weights that are not trained get no gradient, and so the
        optimizer changes neither them nor their states. Without indexers among the weights nothing changes."""
        if not self.indexers:
            return
        for parameter in self.indexers:
            parameter.requires_grad_(training != "frozen")
        for parameter in self.others:
            parameter.requires_grad_(training != "alone")
