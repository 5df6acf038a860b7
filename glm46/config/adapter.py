"""The section [adapter]."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from glm46.config.field_rules import Excludes, Needs
from glm46.config.finetune import WITH_REFERENCE
from glm46.config.hub_address import OnHub
from glm46.config.section import DISTINCT, ModelFolder, Removed, Section, real_folder

AdapterTarget = Literal["attention", "dense", "shared_experts", "experts"]


class BaseFormat(NamedTuple):
    """Storage format of the weights of a frozen base: bits of a weight, and how many columns share a scale."""

    bits: int
    columns: int
    """Columns that share a scale; the inputs of a projection must be a multiple of it."""
    rows: int
    """The outputs of a projection must be a multiple of this."""
    scale_bytes: int


BASE_FORMATS = {"float8": BaseFormat(8, 128, 128, 4), "int4": BaseFormat(4, 32, 1, 2), "nf4": BaseFormat(4, 64, 1, 1)}
"""`AdapterConfig.base_dtype` -> storage format."""


class AdapterConfig(Section):
    """[adapter]: fine-tuning by low-rank adapters, ``W + scale * B A`` instead of each weight W that ``targets``
    select. All weights of the base are frozen, in training.mixed_precision_param or ``base_dtype``; adapters are
    trained in training.dtype."""

    removed = {
        "b_lr_ratio": Removed("A and B have one learning rate, optimizer.lr; remove it"),
        "rank_stabilized": Removed("multiply alpha by sqrt(rank) for the same scale"),
        "save_merged": Removed("merge the exported folder with 'convert merge'; remove it"),
    }

    name: Literal["lora", "dora"] = "lora"
    """lora: arXiv 2106.09685. dora: each row of ``W + scale * B A`` is scaled to a trained magnitude (arXiv
    2402.09353)."""

    rank: int = Field(32, ge=1)
    """Rows of A and columns of B."""

    expert_rank: Annotated[int | None, Needs("targets", "experts")] = Field(None, ge=1)
    """Rank in the routed experts. A token uses num_experts_per_tok of them, so ``rank`` divided by that number gives
    experts their share of the active parameters. Absent: ``rank``."""

    alpha: float = Field(32.0, gt=0.0)
    """The scale of all adapters, including those of experts, is alpha / rank. For the scale of rank-stabilised adapters
    (arXiv 2312.03732) multiply alpha by sqrt(rank)."""

    targets: Annotated[tuple[AdapterTarget, ...], DISTINCT] = Field(
        ("attention", "dense", "shared_experts", "experts"), min_length=1
    )
    """What is adapted: the query, key, value and output projections of attention; the feed-forward networks of dense
    layers; the shared experts; the routed experts. Router, embedding and output head are never adapted."""

    layers: tuple[int, int] | None = None
    """First and last layer with adapters, counted from 0. Absent: all."""

    base_dtype: Annotated[Literal["float8", "int4", "nf4"] | None, Needs("checkpoint.initial_load_in_hf")] = None
    """Projections of the base are held in 8 or 4 bits, and each layer converts its weights when it computes. float8: as
    in a Hugging Face folder with FP8 weights; projections with a size that is not a multiple of 128 are excluded. int4:
    as in a folder with INT4 weights, or quantised from other weights, in groups of 32 inputs. nf4: QLoRA's levels
    (arXiv 2305.14314), quantised in blocks of 64. Projections whose inputs are not a multiple of the group or block
    stay in training.mixed_precision_param, as all do if the key is absent."""

    initial_load_path: Annotated[
        ModelFolder | None,
        OnHub("model"),
        Excludes(
            "finetune.preference.loss_type",
            WITH_REFERENCE,
            reason="whose reference is the base without adapters",
            remedy="merge them with 'convert merge' and start from the merged folder",
        ),
    ] = None
    """A PEFT folder, or ``hf://owner/name`` of the hub, from whose adapters training continues, with a new optimizer.
    Kind, targets, layers and ranks must be the same. Its alpha may differ; B is then scaled. Absent: new adapters,
    which change nothing."""

    @property
    def initial_load_folder(self) -> Path | None:
        """``initial_load_path``, absolute and without links; see `real_folder`."""
        return real_folder(self.initial_load_path)

    @property
    def scale(self) -> float:
        """Factor on ``B A``."""
        return self.alpha / self.rank

    def layers_of(self, num_hidden_layers: int) -> range:
        """Return the layers with adapters in a model of this many layers."""
        first, last = self.layers or (0, num_hidden_layers - 1)
        return range(first, last + 1)
