"""The section [indexer]: training of the indexers of sparse attention."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import Needs
from glm46.config.section import Section

IndexerTraining = Literal["frozen", "alone", "joint"]
"""What a stage trains. frozen: everything except indexers; alone: only indexers; joint: both."""


class IndexerConfig(Section):
    """[indexer]: how the indexers of sparse attention learn, from a loss of their own."""

    train: IndexerTraining = "frozen"
    """frozen: indexers keep their weights. alone: nothing else is trained, and attention is dense, as in the warm-up of
    GLM-5 (arXiv 2602.15763, section 2.1). joint: everything is trained, and attention is sparse."""

    lr: Annotated[float | None, Needs("model.shape.index_topk")] = Field(None, gt=0.0)
    """Learning rate while indexers are trained alone, constant; GLM-5 uses up to 5e-3. Absent: the learning rate and
    the schedule of the other weights."""
