"""Describes the part of the model on each pipeline rank and its parameters under FSDP2, for memory and traffic.

A rank here is the first one of its stage: with uneven shards FSDP2, like `torch.chunk`, gives the first ranks most.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, repeat
from math import prod
from typing import Literal, NamedTuple

from glm46.config.indexer import IndexerTraining
from glm46.config.model import ModelShape
from glm46.config.parallelism import ActivationCheckpointConfig, ParallelismConfig
from glm46.operate.estimate.activations import Frozen, rows_of_run
from glm46.operate.estimate.plan_sizes import batches_of, experts_have_own_mesh, longest_form
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout
from glm46.run.parameters import Parameter, adapter_layer, layer_rows, part_rows
from glm46.run.plan import Plan, unsharded_kinds
from glm46.run.stages import split_layers, stages_of_rank

Block = Literal["dense", "moe", "mtp"]
"""A decoder layer with a dense feed-forward network or with experts, or a prediction layer."""


class BlockRun(NamedTuple):
    """A layer of a stage as a step runs it."""

    block: Block
    frozen: Frozen | None
    """The layer with its adapters; None if its own weights are trained."""
    has_backward: bool
    mode: str
    """Mode of activation checkpointing."""
    is_first: bool
    """True if its input has no gradient, because it is the first layer with adapters."""


@dataclass(frozen=True)
class StagePart:
    """A pipeline stage, or the complete model."""

    index: int
    blocks: tuple[Block, ...]
    """Blocks in the order of forward."""
    has_embedding: bool
    has_head: bool
    first_layer: int
    """Number of the first decoder layer."""
    frozen: tuple[Frozen | None, ...] | None = None
    """With [adapter] or `finetune.train_only`: each block with its adapters, or None for a block that is trained; all
    other parameters are frozen. None: all parameters are trained."""
    unsharded: frozenset[tuple[bool, bool]] = frozenset()
    """See `unsharded_kinds`."""
    indexers: IndexerTraining = "frozen"
    """`Plan.indexer_training`, for weights that are neither adapters nor their base."""
    repeats: tuple[int, ...] = ()
    """Indices of the prediction layers that further depths run again, in the order of forward."""

    @property
    def backward_from(self) -> int:
        """Index of the first block with a backward: the first with adapters, or the first that is trained; 0 if a
        previous stage needs a gradient."""
        if self.frozen is None or self.index:
            return 0
        learns = (frozen is None or bool(frozen.adapters) for frozen in self.frozen)
        return next((index for index, has_backward in enumerate(learns) if has_backward), len(self.blocks))

    def runs(self, checkpointing: ActivationCheckpointConfig) -> Iterator[BlockRun]:
        """Yield the blocks as a step runs them."""
        first = self.backward_from
        is_adapted = self.frozen is not None and not self.index
        for index, (block, frozen) in enumerate(zip(self.blocks, self.frozen or repeat(None), strict=False)):
            mode = checkpointing.mode_of(index)
            is_first = is_adapted and frozen is not None and index == first
            yield BlockRun(block, frozen, index >= first, mode, is_first)
        for index in self.repeats:
            yield BlockRun(self.blocks[index], None, True, checkpointing.mode_of(index), False)

    def has_indexer(self, index: int, shape: ModelShape) -> bool:
        """Return whether the block of this index, in the order of `runs`, chooses keys itself."""
        is_prediction = index >= len(self.blocks) or self.blocks[index] == "mtp"
        return shape.is_sparse if is_prediction else shape.has_indexer(self.first_layer + index)

    @property
    def prefixes(self) -> list[str]:
        """Prefix of the parameter names of each block."""
        layers = len(self.blocks) - self.blocks.count("mtp")
        names = [f"layers.{self.first_layer + index}." for index in range(layers)]
        return names + [f"mtp.{index}." for index in range(len(self.blocks) - layers)]

    def block_rows(self, shape: ModelShape) -> list[list[Parameter]]:
        """Return the parameters, buffers and adapters of each block; equal blocks share one list."""
        has_indexer = [self.has_indexer(index, shape) for index in range(len(self.blocks))]
        kinds = list(zip(self.blocks, has_indexer, self.frozen or (None,) * len(self.blocks), strict=True))
        rows = {
            kind: rows_of_run(layer_rows(shape, kind[0], has_indexer=kind[1]), shape, kind[2], self.indexers)
            for kind in dict.fromkeys(kinds)
        }
        return [rows[kind] for kind in kinds]

    def root_rows(self, shape: ModelShape) -> list[Parameter]:
        """Return the parameters outside of blocks: embedding, last norm and head."""
        names = [name for name, has in (("embedding", self.has_embedding), ("head", self.has_head)) if has]
        first = self.frozen[0] if self.frozen else None
        # In the base of adapters, as the layers are; the adapters themselves belong to layers.
        base = None if first is None else replace(first, adapters=())
        return rows_of_run(part_rows(shape, *names), shape, base, self.indexers)

    def rows(self, shape: ModelShape) -> list[Parameter]:
        """Return all parameters and buffers of the stage."""
        return [row for rows in self.block_rows(shape) for row in rows] + self.root_rows(shape)


def parts_of_ranks(plan: Plan) -> list[list[StagePart]]:
    """Return the stages of each pipeline rank in ascending order; without a pipeline, one rank with the complete model.
    `split_layers` balances stages for rows of [training] seq_len."""
    parallelism = plan.config.parallelism
    shape = plan.shape
    adapter = plan.config.adapter
    kinds: list[Block] = ["dense" if i < shape.first_k_dense_replace else "moe" for i in range(shape.num_hidden_layers)]
    is_whole = parallelism.pipeline_parallel_degree == 1
    seq_len = plan.config.training.seq_len
    split = [range(len(kinds))] if is_whole else split_layers(plan.unrolled(shape), parallelism.stages, seq_len)
    stages = [
        StagePart(
            index,
            tuple(kinds[layers.start : layers.stop]),
            not index,
            layers.stop == len(kinds),
            layers.start,
            None
            if adapter is None
            else tuple(
                Frozen(tuple(adapter_layer(shape, adapter, layer)), adapter.base_dtype, plan.config.compile.enable)
                for layer in layers
            ),
            unsharded_kinds(plan),
            plan.indexer_training,
        )
        for index, layers in enumerate(split)
    ]
    prediction: Block = "mtp"
    layers = shape.num_nextn_predict_layers
    blocks = (*stages[-1].blocks, *[prediction] * layers)
    first = len(blocks) - layers
    repeats = tuple(first + depth % layers for depth in range(layers, plan.mtp_depths))
    stages[-1] = replace(stages[-1], blocks=blocks, has_head=True, repeats=repeats)
    if plan.config.trains_only_drafts:
        stages[-1] = replace(stages[-1], frozen=(Frozen(),) * first + (None,) * layers)
    ranks = range(parallelism.pipeline_parallel_degree)
    return (
        [stages]
        if is_whole
        else [[stages[stage_index] for stage_index in stages_of_rank(parallelism, rank)] for rank in ranks]
    )


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together."""

    rows: tuple[Parameter, ...]
    prefix: str
    """Prefix of its parameters' names; empty for the root unit."""
    has_own_mesh: bool = False
    """True for experts that are sharded over other ranks than the other parameters."""


class HeldRows(NamedTuple):
    """Equal parameters or buffers of a pipeline rank."""

    row: Parameter
    number: int
    sizes: tuple[int, ...]
    """`held_shape` of one of them."""

    @property
    def elements(self) -> int:
        """Number of elements of all of them together."""
        return self.number * prod(self.sizes)


def held_rows(parts: Sequence[StagePart], shape: ModelShape, layout: Layout) -> tuple[HeldRows, ...]:
    """Return the parameters and buffers of a pipeline rank, equal ones grouped."""
    return _held_rows(alike(parts), shape, mesh_of_stage(layout))


@lru_cache(maxsize=4096)
def _held_rows(parts: Sequence[StagePart], shape: ModelShape, layout: Layout) -> tuple[HeldRows, ...]:
    counts = Counter(row for part in parts for row in part.rows(shape))
    return tuple(HeldRows(row, count, held_shape(row, shape, layout)) for row, count in counts.items())


def alike(parts: Sequence[StagePart]) -> tuple[StagePart, ...]:
    """Renumber stages as if they were the first ones, so that pipeline ranks with equal layers compare equal."""
    firsts = accumulate((len(part.blocks) for part in parts), initial=0)
    return tuple(replace(part, index=0, first_layer=first) for part, first in zip(parts, firsts, strict=False))


def mesh_of_stage(layout: Layout) -> Layout:
    """Reduce a layout to the degrees that decide what a rank holds of its stage, so that equivalent layouts are
    equal."""
    return Layout(1, 1, layout.dense_shards, 1, layout.tp, layout.ep)


def fsdp_units(part: StagePart, shape: ModelShape, layout: Layout) -> list[FsdpUnit]:
    """Return the FSDP units of a stage, as `compute/parallelize/fsdp.py` makes them: in the order of forward, the root
    last. Units of equal blocks share one tuple of rows."""
    units = []
    unit_rows = {}

    def sharded(rows: Sequence[Parameter]) -> list[Parameter]:
        return [row for row in rows if row.optimizer and (row.is_expert, row.is_trained) not in part.unsharded]

    for block, prefix in zip(part.block_rows(shape), part.prefixes, strict=True):
        if id(block) not in unit_rows:
            rows = sharded(block)
            experts = tuple(row for row in rows if row.is_expert) if experts_have_own_mesh(layout) else ()
            unit_rows[id(block)] = tuple(row for row in rows if row not in experts), experts
        others, experts = unit_rows[id(block)]
        units.append(FsdpUnit(others, prefix))
        units += [FsdpUnit(experts, prefix, True)] if experts else []
    root = sharded(part.root_rows(shape))
    return [*units, FsdpUnit(tuple(root), "")] if root else units


def local_shape(row: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the shape of a tensor on the first rank of its tensor or expert group, before FSDP2 shards it."""
    sizes = list(row.shape(shape))
    if row.is_expert:
        sizes[0] //= layout.ep
    elif row.tensor_dim is not None:
        sizes[row.tensor_dim] = -(-sizes[row.tensor_dim] // layout.tp)
    return tuple(sizes)


def sharded_dim(row: Parameter, shape: ModelShape, layout: Layout) -> int:
    """Return the dimension that FSDP2 shards, as `expert_placement` chooses it: complete experts, or a part of each."""
    local = local_shape(row, shape, layout)
    return 1 if row.is_expert and len(local) == 3 and local[0] % layout.expert_shards else 0


def held_shape(row: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the shape that the first rank holds between steps: FSDP2's largest shard. Buffers are not sharded."""
    sizes = list(local_shape(row, shape, layout))
    if row.optimizer is not None:
        shards = layout.expert_shards if row.is_expert else layout.dense_shards
        dim = sharded_dim(row, shape, layout)
        sizes[dim] = -(-sizes[dim] // shards)
    return tuple(sizes)


class StepFacts:
    """Sizes from which memory and traffic of a step in one stage of text are computed."""

    def __init__(self, plan: Plan, stage_index: int, micro_batches: int | None = None):
        """``micro_batches``: micro-batches of the step; None for the largest step of the stage."""
        stage = plan.text_stages[stage_index]
        training = plan.config.training
        self.plan = plan
        self.config = plan.config
        self.layout = plan.layout
        self.shape = stage.shape
        self.length = stage.seq_len
        self.form = longest_form(plan, stage_index)
        self.rows = training.local_batch_size
        self.micro_batches = micro_batches or batches_of(plan, stage_index)[1] // plan.rows_per_micro_batch
        types = training.mixed_precision_param, training.dtype, training.mixed_precision_reduce
        self.width, self.master, self.reduce = (WIDTHS[dtype] for dtype in types)
        # Without mixed precision FSDP2 gathers the master weights as they are.
        self.gathered = self.width if training.mixed_precision_param != "float32" else self.master
        self.depths = plan.mtp_depths
        self.gradient_heads = self.depths + (not plan.config.trains_only_drafts)
        """Uses of the head whose input has a gradient."""
        self.is_head_trained = plan.config.adapter is None and not plan.config.trains_only_drafts
        self.tokens = self.rows * self.length // (self.layout.cp * self.layout.tp)
        """Tokens of a micro-batch on one rank of a tensor-parallel group."""

    def held(self, parts: Sequence[StagePart]) -> tuple[HeldRows, ...]:
        """Return `held_rows` of this model."""
        return held_rows(parts, self.shape, self.layout)

    def units(self, part: StagePart) -> list[FsdpUnit]:
        """Return `fsdp_units` of a stage."""
        return fsdp_units(part, self.shape, self.layout)

    def elements(self, row: Parameter, *, is_shard: bool = False) -> int:
        """Return the number of elements of `local_shape`, or of a shard's `held_shape`."""
        return prod((held_shape if is_shard else local_shape)(row, self.shape, self.layout))


def in_flight(
    parallelism: ParallelismConfig, rank: int, micro_batches: int, weights: Mapping[int, float], *, whole_backward: bool
) -> tuple[dict[int, int], int]:
    """Count the micro-batches whose activations a pipeline rank holds at its peak, for each of its stages: those whose
    forward has run, and whose backward, including weight gradients, has not. The second result is the number of them
    that wait only for weight gradients, with InterleavedZeroBubble.

    The counts follow the orders of torch's schedules; a test checks that they weigh at most 5 % more than the true
    peak. Source: Narayanan et al. (arXiv 2104.04473); Qi et al. (arXiv 2401.10241).

    Args:
        weights: by stage, the size of one micro-batch's activations.
        whole_backward: True if the first half of a split backward does all of it, as with recomputation.
    """
    ranks = parallelism.pipeline_parallel_degree
    stages_per_rank = parallelism.stages_per_rank
    if ranks == 1:
        return dict.fromkeys(weights, 1), 0
    stages = stages_of_rank(parallelism, rank)
    name = parallelism.pipeline_parallel_schedule
    ahead = ranks - rank - 1  # ranks after this one
    # Maximum over all stages together (`total`), and for each stage.
    match name:
        case "GPipe":
            total = micro_batches
            max_counts = [micro_batches]
        case "1F1B":
            total = ahead + 1
            max_counts = [ahead + 1]
        case "ZBVZeroBubble" | "DualPipeV":
            total = 2 * ranks + (name == "DualPipeV")
            max_counts = [ranks + ahead + 1, rank + 1]
        case _:
            # Stages alternate every `turn` micro-batches; a rank starts with backward after some turns.
            turn = micro_batches // max(micro_batches // ranks, 1)
            total = (stages_per_rank - 1) * turn + (
                2 * ahead + 1 if name == "Interleaved1F1B" else ranks - whole_backward * rank
            )
            last = max(min(total, stages_per_rank * turn) - (stages_per_rank - 1) * turn, 0)
            max_counts = (
                [2 * turn, *[max(turn, total - 2 * turn)] * (stages_per_rank - 2), last]
                if stages_per_rank > 1
                else [total]
            )
    counts = dict.fromkeys(stages, 0)
    for stage, count in sorted(zip(stages, max_counts, strict=True), key=lambda pair: -weights[pair[0]]):
        counts[stage] = min(count, micro_batches, total - sum(counts.values()))
    return counts, rank if name == "InterleavedZeroBubble" and not whole_backward else 0
