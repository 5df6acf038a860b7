"""The section [adapter]."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from glm46.config.section import ModelFolder, Needs, OnHub, Section

AdapterTarget = Literal["attention", "dense", "shared_experts", "experts"]


class BaseFormat(NamedTuple):
    """The storage of weights of a frozen base: some bits each, and a scale for some columns of a row."""

    bits: int
    columns: int
    """With one scale, of which the inputs of a projection are a multiple."""
    rows: int
    """Its outputs are a multiple of so many."""
    scale_bytes: int


BASE_FORMATS = {
    "float8": BaseFormat(8, 128, 128, 4), "int4": BaseFormat(4, 32, 1, 2), "nf4": BaseFormat(4, 64, 1, 1)
}  # fmt: skip
"""By `AdapterConfig.base_dtype`."""


class AdapterConfig(Section):
    """[adapter]: fine-tuning by low-rank adapters, ``W + scale * B A`` in place of each weight W that ``targets`` name.
    All weights of the base are frozen, in training.mixed_precision_param or ``base_dtype``; adapters are trained in
    training.dtype."""

    name: Literal["lora", "dora"] = "lora"
    """lora: arXiv 2106.09685. dora: each row of ``W + scale * B A`` is scaled to a trained magnitude (arXiv
    2402.09353)."""

    rank: int = Field(32, ge=1)
    """Rows of A and columns of B."""

    expert_rank: int | None = Field(None, ge=1)
    """Rank in the routed experts. A token uses num_experts_per_tok of them, so ``rank`` divided by that many gives them
    their share of the active parameters. Absent: ``rank``."""

    alpha: float = Field(32.0, gt=0.0)
    """The scale of all adapters, those of experts too, is alpha / rank."""

    rank_stabilized: bool = False
    """The scale is alpha / sqrt(rank) (arXiv 2312.03732)."""

    targets: tuple[AdapterTarget, ...] = ("attention", "dense", "shared_experts", "experts")
    """What is adapted: the query, key, value and output projections of attention; the feed-forward networks of dense
    layers; the shared experts; the routed experts. Router, embedding and output head never are."""

    layers: tuple[int, int] | None = None
    """First and last layer with adapters, counted from 0. Absent: all."""

    b_lr_ratio: float = Field(1.0, gt=0.0)
    """Learning rate of B relative to that of A (LoRA+, arXiv 2402.12354)."""

    base_dtype: Annotated[Literal["float8", "int4", "nf4"] | None, Needs("checkpoint.initial_load_in_hf")] = None
    """Projections of the base are held in 8 or 4 bits, and each layer converts its own where it computes with them.
    float8: as a Hugging Face folder with FP8 weights has them; those with a size that is not a multiple of 128 are not.
    int4: as a folder with INT4 weights has them, or quantised from one with other weights, in groups of 32 inputs. nf4:
    QLoRA's levels (arXiv 2305.14314), quantised in blocks of 64. Projections whose inputs are not a multiple of that
    stay in training.mixed_precision_param, as all do if the key is absent."""

    initial_load_path: Annotated[ModelFolder | None, OnHub("model")] = None
    """A PEFT folder, or ``hf://owner/name`` of the hub, whose adapters training goes on from, with a new optimizer: of
    the same kind, targets and layers, and of these ranks. Its alpha may differ; B is then scaled. Absent: new adapters,
    which change nothing."""

    save_merged: Annotated[bool, Needs("checkpoint.last_save_in_hf"), Needs("checkpoint.initial_load_in_hf")] = False
    """At the end of training also write the base with the adapters added, in the types of the base."""

    @property
    def scale(self) -> float:
        """Factor on ``B A``."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def layers_of(self, num_hidden_layers: int) -> range:
        """The layers with adapters in a model of this many layers."""
        first, last = self.layers or (0, num_hidden_layers - 1)
        return range(first, last + 1)
