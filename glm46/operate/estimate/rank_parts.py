"""Parts of the model on each pipeline rank, and of its parameters under FSDP2: facts that memory and traffic share.

A rank here is the first one of its stage: under uneven shards FSDP2, like torch's chunks, gives the first ranks most.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, repeat
from math import prod
from typing import Literal, NamedTuple

from glm46.config.model import ModelShape
from glm46.config.parallelism import ActivationCheckpointConfig, ParallelismConfig
from glm46.operate.estimate.activations import Frozen
from glm46.operate.estimate.plan_sizes import batches_of, experts_have_own_mesh
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import Layout
from glm46.run.parameters import Parameter, adapter_layer, in_base_dtype, layer_rows, part_rows
from glm46.run.plan import Plan, unsharded_kinds
from glm46.run.stages import split_layers, stages_of_rank

Block = Literal["dense", "moe", "mtp"]
"""A decoder layer with a dense feed-forward network or with experts, or a prediction layer."""


class BlockRun(NamedTuple):
    """A layer of a stage as a step runs it."""

    block: Block
    frozen: Frozen | None
    """With its adapters; None: its own weights are trained."""
    has_backward: bool
    mode: str
    """Of activation checkpointing."""
    is_first: bool
    """Its input has no gradient, for it is the first layer with adapters."""


@dataclass(frozen=True)
class StagePart:
    """A pipeline stage, or the whole model."""

    index: int
    blocks: tuple[Block, ...]
    """In the order of forward."""
    has_embedding: bool
    has_head: bool
    first_layer: int
    """Number of the first decoder layer."""
    frozen: tuple[Frozen, ...] | None = None
    """Each block with its adapters, under [adapter]; all other parameters are frozen then."""
    unsharded: frozenset[tuple[bool, bool]] = frozenset()
    """See `unsharded_kinds`."""

    @property
    def backward_from(self) -> int:
        """The first block that has a backward: a gradient comes in where adapters are, or from a stage before."""
        if self.frozen is None or self.index:
            return 0
        return next((index for index, frozen in enumerate(self.frozen) if frozen.adapters), len(self.blocks))

    def runs(self, checkpointing: ActivationCheckpointConfig) -> Iterator[BlockRun]:
        """The blocks as a step runs them."""
        first, is_adapted = self.backward_from, self.frozen is not None and not self.index
        for index, (block, frozen) in enumerate(zip(self.blocks, self.frozen or repeat(None), strict=False)):
            mode = checkpointing.mode_of(index)
            yield BlockRun(block, frozen, index >= first, mode, is_adapted and index == first)

    @property
    def prefixes(self) -> list[str]:
        """The prefix of the names of the parameters of each block."""
        layers = len(self.blocks) - self.blocks.count("mtp")
        names = [f"layers.{self.first_layer + index}." for index in range(layers)]
        return names + [f"mtp.{index}." for index in range(len(self.blocks) - layers)]

    def block_rows(self, shape: ModelShape) -> list[list[Parameter]]:
        """The parameters and buffers of each block, and its adapters; one list for all equal blocks."""
        kinds = list(zip(self.blocks, self.frozen or (Frozen(),) * len(self.blocks), strict=True))
        rows = {
            kind: [*self._of_run(layer_rows(shape, kind[0]), shape), *kind[1].adapters] for kind in dict.fromkeys(kinds)
        }
        return [rows[kind] for kind in kinds]

    def root_rows(self, shape: ModelShape) -> list[Parameter]:
        """Those outside of blocks: of the embedding, and of norm and head."""
        names = [name for name, has in (("embedding", self.has_embedding), ("head", self.has_head)) if has]
        return self._of_run(part_rows(shape, *names), shape)

    def rows(self, shape: ModelShape) -> list[Parameter]:
        """All parameters and buffers of the stage."""
        return [row for rows in self.block_rows(shape) for row in rows] + self.root_rows(shape)

    def _of_run(self, rows: list[Parameter], shape: ModelShape) -> list[Parameter]:
        if self.frozen is None:
            return rows
        rows = in_base_dtype(rows, shape, self.frozen[0].base_dtype)
        return [replace(row, is_frozen=True) if row.optimizer else row for row in rows]


def parts_of_ranks(plan: Plan) -> list[list[StagePart]]:
    """The stages of each pipeline rank, ascending; without a pipeline one rank with the whole model. `split_layers`
    balances them for rows of [training] seq_len."""
    parallelism, shape, adapter = plan.config.parallelism, plan.shape, plan.config.adapter
    kinds: list[Block] = ["dense" if i < shape.first_k_dense_replace else "moe" for i in range(shape.num_hidden_layers)]
    is_whole = parallelism.pipeline_parallel_degree == 1
    split = [range(len(kinds))] if is_whole else split_layers(shape, parallelism.stages, plan.config.training.seq_len)
    stages = [
        StagePart(
            index, tuple(kinds[layers.start : layers.stop]), not index, layers.stop == len(kinds), layers.start,
            None if adapter is None else tuple(
                Frozen(tuple(adapter_layer(shape, adapter, layer)), adapter.base_dtype, plan.config.compile.enable)
                for layer in layers
            ),
            unsharded_kinds(plan),
        )
        for index, layers in enumerate(split)
    ]  # fmt: skip
    prediction: Block = "mtp"
    blocks = (*stages[-1].blocks, *[prediction] * shape.num_nextn_predict_layers)
    stages[-1] = replace(stages[-1], blocks=blocks, has_head=True)
    ranks = range(parallelism.pipeline_parallel_degree)
    return [stages] if is_whole else [[stages[each] for each in stages_of_rank(parallelism, rank)] for rank in ranks]


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together."""

    rows: tuple[Parameter, ...]
    prefix: str
    """What the names of its parameters begin with; empty for the root."""
    has_own_mesh: bool = False
    """True for experts whose shards are not those of other parameters."""


class HeldRows(NamedTuple):
    """Equal parameters or buffers of a pipeline rank."""

    row: Parameter
    number: int
    sizes: tuple[int, ...]
    """`held_shape` of each."""

    @property
    def elements(self) -> int:
        """Of all of them."""
        return self.number * prod(self.sizes)


def held_rows(parts: Sequence[StagePart], shape: ModelShape, layout: Layout) -> tuple[HeldRows, ...]:
    """The parameters and buffers of a pipeline rank, equal ones together."""
    return _held_rows(alike(parts), shape, mesh_of_stage(layout))


@lru_cache(maxsize=4096)
def _held_rows(parts: Sequence[StagePart], shape: ModelShape, layout: Layout) -> tuple[HeldRows, ...]:
    counts = Counter(row for part in parts for row in part.rows(shape))
    return tuple(HeldRows(row, count, held_shape(row, shape, layout)) for row, count in counts.items())


def alike(parts: Sequence[StagePart]) -> tuple[StagePart, ...]:
    """Stages as if they were the first ones: equal for all pipeline ranks with as many layers of each kind."""
    firsts = accumulate((len(part.blocks) for part in parts), initial=0)
    return tuple(replace(part, index=0, first_layer=first) for part, first in zip(parts, firsts, strict=False))


def mesh_of_stage(layout: Layout) -> Layout:
    """The degrees that decide what a rank holds of its stage: equal for all layouts that hold the same."""
    return Layout(1, 1, layout.dense_shards, 1, layout.tp, layout.ep)


def fsdp_units(part: StagePart, shape: ModelShape, layout: Layout) -> list[FsdpUnit]:
    """The units of a stage that `compute/parallelize/fsdp.py` makes, in the order of forward, the root last. Those of
    equal blocks have one tuple of rows."""
    units, of_kinds = [], {}

    def sharded(rows: Sequence[Parameter]) -> list[Parameter]:
        return [row for row in rows if row.optimizer and (row.is_expert, row.is_trained) not in part.unsharded]

    for block, prefix in zip(part.block_rows(shape), part.prefixes, strict=True):
        if id(block) not in of_kinds:
            rows = sharded(block)
            experts = tuple(row for row in rows if row.is_expert) if experts_have_own_mesh(layout) else ()
            of_kinds[id(block)] = tuple(row for row in rows if row not in experts), experts
        others, experts = of_kinds[id(block)]
        units.append(FsdpUnit(others, prefix))
        units += [FsdpUnit(experts, prefix, True)] if experts else []
    root = sharded(part.root_rows(shape))
    return [*units, FsdpUnit(tuple(root), "")] if root else units


def local_shape(row: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Shape of a tensor on the first rank of its tensor or expert group: what FSDP2 shards."""
    sizes = list(row.shape(shape))
    if row.is_expert:
        sizes[0] //= layout.ep
    elif row.tensor_dim is not None:
        sizes[row.tensor_dim] = -(-sizes[row.tensor_dim] // layout.tp)
    return tuple(sizes)


def sharded_dim(row: Parameter, shape: ModelShape, layout: Layout) -> int:
    """The dimension that FSDP2 shards, as `expert_placement` chooses it: whole experts, or a part of each."""
    local = local_shape(row, shape, layout)
    return 1 if row.is_expert and len(local) == 3 and local[0] % layout.expert_shards else 0


def held_shape(row: Parameter, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Shape of what the first rank holds of a tensor between steps: FSDP2's largest shard. Buffers are not sharded."""
    sizes = list(local_shape(row, shape, layout))
    if row.optimizer is not None:
        shards = layout.expert_shards if row.is_expert else layout.dense_shards
        dim = sharded_dim(row, shape, layout)
        sizes[dim] = -(-sizes[dim] // shards)
    return tuple(sizes)


class StepFacts:
    """The numbers that memory and traffic of a step in one stage of text follow from."""

    def __init__(self, plan: Plan, stage_index: int, micro_batches: int | None = None):
        """``micro_batches``: of the step; None: of the largest one of the stage."""
        stage, training = plan.text_stages[stage_index], plan.config.training
        self.plan, self.config, self.layout = plan, plan.config, plan.layout
        self.shape, self.length, self.rows = stage.shape, stage.seq_len, training.local_batch_size
        self.micro_batches = micro_batches or batches_of(plan, stage_index)[1] // plan.rows_per_micro_batch
        types = training.mixed_precision_param, training.dtype, training.mixed_precision_reduce
        self.width, self.master, self.reduce = (WIDTHS[each] for each in types)
        # Without a cast FSDP2 gathers the masters as they are.
        self.gathered = self.width if training.mixed_precision_param != "float32" else self.master
        self.tokens = self.rows * self.length // (self.layout.cp * self.layout.tp)
        """Of a micro-batch, of one rank of a tensor-parallel group."""

    def held(self, parts: Sequence[StagePart]) -> tuple[HeldRows, ...]:
        """`held_rows` of this model."""
        return held_rows(parts, self.shape, self.layout)

    def units(self, part: StagePart) -> list[FsdpUnit]:
        """`fsdp_units` of a stage."""
        return fsdp_units(part, self.shape, self.layout)

    def elements(self, row: Parameter, *, is_shard: bool = False) -> int:
        """Elements of `local_shape`, or of a shard's `held_shape`."""
        return prod((held_shape if is_shard else local_shape)(row, self.shape, self.layout))


def in_flight(
    parallelism: ParallelismConfig, rank: int, micro_batches: int, weights: Mapping[int, float], *, whole_backward: bool
) -> tuple[dict[int, int], int]:
    """For each stage of a pipeline rank, the micro-batches whose activations it holds, when the rank holds most: those
    whose forward has run and whose backward, of the weights too, has not. And how many of them wait for the gradients
    of weights alone, under InterleavedZeroBubble.

    Their number is that of the orders of torch's schedules, and they weigh at most 5 % more than ever in them: a test.
    Source: Narayanan et al. (arXiv 2104.04473); Qi et al. (arXiv 2401.10241).

    Args:
        weights: by stage, what a micro-batch takes.
        whole_backward: of schedules that split it, the first half does all of it, as with recomputation.
    """
    ranks, each = parallelism.pipeline_parallel_degree, parallelism.stages_per_rank
    if ranks == 1:
        return dict.fromkeys(weights, 1), 0
    stages, name = stages_of_rank(parallelism, rank), parallelism.pipeline_parallel_schedule
    ahead = ranks - rank - 1  # ranks after this one
    # The most of all stages together, and of each.
    match name:
        case "GPipe":
            total, most = micro_batches, [micro_batches]
        case "1F1B":
            total, most = ahead + 1, [ahead + 1]
        case "ZBVZeroBubble" | "DualPipeV":
            total, most = 2 * ranks + (name == "DualPipeV"), [ranks + ahead + 1, rank + 1]
        case _:
            # Stages run in turns of so many micro-batches; a rank begins with backward after some turns.
            turn = micro_batches // max(micro_batches // ranks, 1)
            total = (each - 1) * turn + (2 * ahead + 1 if name == "Interleaved1F1B" else ranks - whole_backward * rank)
            last = max(min(total, each * turn) - (each - 1) * turn, 0)
            most = [2 * turn, *[max(turn, total - 2 * turn)] * (each - 2), last] if each > 1 else [total]
    counts = dict.fromkeys(stages, 0)
    for stage, count in sorted(zip(stages, most, strict=True), key=lambda pair: -weights[pair[0]]):
        counts[stage] = min(count, micro_batches, total - sum(counts.values()))
    return counts, rank if name == "InterleavedZeroBubble" and not whole_backward else 0
