"""Calls and bytes of a rank in one optimizer step, by collective and mesh axis; without torch.

It follows the code call by call: `parallelize/`, `compute/distributed/collectives.py`, torch's FSDP2 and pipelines, and
`engine/training/step.py`. A test counts the calls and bytes of real steps on a fake process group and holds both equal.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from glm46.config.float8_layers import linear_layers
from glm46.config.model import ModelShape
from glm46.config.section import values_of
from glm46.operate.estimate.activations import EXPERT_NUMBER, FP32, INDEX
from glm46.operate.estimate.muon_cost import muon_cost
from glm46.operate.estimate.other_networks import frozen_plan
from glm46.operate.estimate.rank_parts import (
    Block,
    FsdpUnit,
    StagePart,
    alike,
    fsdp_units,
    held_elements,
    held_rows,
    local_shape,
    parts_of_ranks,
    sharded_dim,
)
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.context_keys import attended_keys, sent_of_key
from glm46.run.parameters import Parameter
from glm46.run.plan import Plan, gradients_are_summed_once, replicas_reduce_once
from glm46.run.sizes import loss_chunk_tokens
from glm46.run.stages import rank_of_stage

_FP64 = 8

MUON = "matrices of Muon"
"""`Traffic.what` of the exchange of sharded matrices, of which no rank sends itself a part."""

TOKENS = "experts of tokens", "weights of tokens", "tokens to experts", "tokens from experts"
"""`Traffic.what` of the exchanges of a layer with its experts, beside their numbers."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind over one axis, for one purpose, in one optimizer step of one rank."""

    axis: str
    """Mesh axis as `compute/distributed/mesh.py` names it: shard (FSDP2, dp_shard x cp ranks), dp_replicate, efsdp, ep,
    cp, tp, pp; "ep_hosts" and "ep_host" for the ranks of ep with one number on their hosts and for those of one host;
    "tp_head" for the ranks of tp that share a key head; "stage" for all ranks of a pipeline stage,
    "stage_experts" for those that share experts; "world" for all ranks."""
    kind: Kind
    ranks: int
    """Ranks of the group."""
    calls: int
    nbytes: int
    """Of all calls together: bytes of the larger of the tensors that the rank passes in and gets, its own share
    included. So an all_gather counts the gathered tensor, a reduce_scatter the one that is not reduced yet, an
    all_reduce its tensor once, an all_to_all what the rank sends to all, a send what it sends; a receive is the send of
    another rank and not counted."""
    what: str


class _Call(NamedTuple):
    """Calls of equal size."""

    axis: str
    kind: Kind
    ranks: int
    what: str
    calls: int
    size: int
    """Bytes of one call."""


def exchanges(plan: Plan, shape: ModelShape, tokens: float) -> list[tuple[str, int, int, int, int, int]]:
    """Axis, ranks and bytes of each of `TOKENS`, of the hops of so many tokens of a rank to their experts."""
    chosen, width = shape.num_experts_per_tok, WIDTHS[plan.config.training.mixed_precision_param]
    hops: list[tuple[str, int, float, int]] = [("ep", plan.layout.ep, tokens * chosen, 1)]
    if (levels := plan.expert_levels) is not None:
        axes = [axis for axis in (("ep_hosts", levels.hosts), ("ep_host", levels.of_host)) if axis[1] > 1]
        hops = [(*axis, tokens * rows, chosen) for axis, rows in zip(axes, plan.hops(shape), strict=True)]
    found = []
    for axis, ranks, rows, of_row in hops:
        row = round(rows * shape.hidden_size * width)
        found.append((axis, ranks, round(rows * of_row * EXPERT_NUMBER), round(rows * of_row * FP32), row, row))
    return found


def step_traffic(plan: Plan, stage_index: int = 0, micro_batches: int | None = None) -> list[list[Traffic]]:
    """Calls and bytes of the first rank of each pipeline rank in `train_step`.

    Tokens are spread evenly over experts, and no token is padding. Groups of one rank are left out, as is the agreement
    on a step before it. Calls and bytes are exact, but for the keys that context-parallel ranks exchange under a
    sliding window: those are of rows that are one document.

    Args:
        stage_index: of `Plan.text_stages`.
        micro_batches: of the step; absent: those of the largest step of the stage.
    """
    step, known = _Step(plan, stage_index, micro_batches), dict[tuple, list[Traffic]]()
    found = []
    for rank, parts in enumerate(parts_of_ranks(plan)):
        key = step.alike(rank, parts)
        if key not in known:
            known[key] = [*_merged(step.of_rank(rank, parts)), *_of_muon(plan, parts)]
        found.append(known[key])
    return found


def reference_traffic(plan: Plan, stage_index: int = 0, micro_batches: int | None = None) -> list[list[Traffic]]:
    """As `step_traffic`, of the forward passes that precede a step of preferences or of a student: those of reference
    or teacher, which is the policy without its adapters or a frozen network, and of KTO also both networks on
    completions of other prompts. Nothing without one."""
    distillation = plan.config.distillation
    if not plan.config.has_preference_reference and distillation is None:
        return [[] for _ in range(plan.layout.pp)]
    has_kl = plan.config.preference is not None and plan.config.preference.loss_type == "kto"
    count = micro_batches or plan.batches_of(stage_index)[1] // plan.rows_per_micro_batch
    of, top_k = frozen_plan(plan) or plan, 0 if distillation is None else distillation.top_k
    of_reference = _Step(of, stage_index, count * (1 + has_kl), has_backward=False, top_k=top_k)
    of_policy, found = _Step(plan, stage_index, count, has_backward=False), []
    for rank, parts in enumerate(parts_of_ranks(of)):
        frozen = [replace(part, adapters=part.adapters or ((),) * len(part.blocks)) for part in parts]
        calls = [*of_reference.of_rank(rank, frozen)]
        if has_kl:
            calls += of_policy.of_rank(rank, parts)
            calls.append(_Call("world", "all_reduce", plan.layout.world_size, "divergence", 1, 2 * _FP64))
        found.append(_merged(calls))
    return found


def _of_muon(plan: Plan, parts: list[StagePart]) -> list[Traffic]:
    """Sharded matrices to their owners, and their updates back."""
    exchanges = muon_cost(parts, plan.shape, plan.layout, plan.config.optimizer).exchanges
    return [Traffic(each.axis, "all_to_all", each.ranks, 2 * each.buckets, each.nbytes, MUON) for each in exchanges]


def _merged(calls: Iterable[_Call]) -> list[Traffic]:
    counts, sizes = Counter[tuple](), Counter[tuple]()
    for call in calls:
        if call.ranks > 1 and call.calls:
            key = call.axis, call.kind, call.ranks, call.what
            counts[key] += call.calls
            sizes[key] += call.calls * call.size
    return [
        Traffic(axis, kind, ranks, calls, sizes[axis, kind, ranks, what], what)
        for (axis, kind, ranks, what), calls in counts.items()
    ]


class _Runs(NamedTuple):
    """The number of times that a block runs for a micro-batch, forwards with those of recomputation."""

    forward: int
    backward: int


class _Step:
    """One optimizer step of a plan in one stage of text, or forward passes over its micro-batches."""

    def __init__(
        self, plan: Plan, stage_index: int, micro_batches: int | None, has_backward: bool = True, top_k: int = 0
    ):
        """``top_k``: tokens of each position that a forward pass looks for, or a step learns from."""
        stage, training, self._layout = plan.text_stages[stage_index], plan.config.training, plan.layout
        self._plan, self._has_backward, self._rows = plan, has_backward, training.local_batch_size
        self._shape, self._length = shape, length = stage.shape, stage.seq_len
        self._micro_batches = micro_batches or plan.batches_of(stage_index)[1] // plan.rows_per_micro_batch
        self._width, self._master = WIDTHS[training.mixed_precision_param], WIDTHS[training.dtype]
        self._reduce = WIDTHS[training.mixed_precision_reduce]
        # Without a cast FSDP2 gathers the masters as they are.
        self._gathered = self._width if training.mixed_precision_param != "float32" else self._master
        float8 = plan.config.float8
        layers = linear_layers(shape, float8, plan.layout.tp) if float8.enable_fsdp_float8_all_gather else ()
        self._in_fp8 = {f"{layer.name}.weight" for layer in layers if layer.excluded_by is None}
        learned = 0 if plan.config.distillation is None else plan.config.distillation.top_k
        self._depths, self._top_k = shape.num_nextn_predict_layers, top_k or learned
        self._tokens = self._rows * length // (self._layout.cp * self._layout.tp)
        self._hidden = self._tokens * shape.hidden_size * self._width

    def alike(self, rank: int, parts: list[StagePart]) -> tuple:
        """A key that is equal for pipeline ranks with the same calls."""
        names = [part.first_layer for part in parts if self._in_fp8]
        return alike(parts), *((not part.index, *self._borders(rank, part)) for part in parts), *names

    def of_rank(self, rank: int, parts: list[StagePart]) -> Iterator[_Call]:
        """All calls of a pipeline rank."""
        for part in parts:
            yield from self._fsdp(part)
            if self._has_backward and self._layout.tp > 1:
                yield from self._replicated_gradients(part)
            for call in self._of_micro_batch(rank, part):
                yield call._replace(calls=call.calls * self._micro_batches)
            yield from self._norms(part) if self._has_backward else ()
        if self._has_backward:
            units = (unit for part in parts for unit in fsdp_units(part, self._shape, self._layout))
            nbytes = sum(len(self._gathered_in_fp8(unit)) for unit in units) * self._master if self._in_fp8 else 0
            yield _Call("shard", "all_reduce", self._layout.dense_shards, "scales of weights", nbytes > 0, nbytes)
            yield from self._step_sums(parts)

    def _of_micro_batch(self, rank: int, part: StagePart) -> Iterator[_Call]:
        layout, blocks = self._layout, Counter[tuple[Block, bool, str, bool]]()
        for index, block in enumerate(part.blocks):
            has_backward = self._has_backward and index >= part.backward_from
            mode = self._plan.config.activation_checkpoint.mode_of(index) if has_backward else "none"
            # The input of the first adapters has no gradient.
            is_first = has_backward and part.adapters is not None and not part.index and index == part.backward_from
            blocks[block, has_backward, mode, is_first] += 1
        for each, number in blocks.items():
            for call in self._of_block(*each):
                yield call._replace(calls=call.calls * number)
        if layout.tp > 1:
            yield from self._vocabulary(part)
        if part.has_head and layout.cp > 1:
            yield from self._whole_rows()
        yield from self._pipeline(rank, part)

    def _of_block(self, block: Block, has_backward: bool, mode: str, is_first: bool) -> Iterator[_Call]:
        layout, runs = self._layout, _Runs(1 + (mode != "none"), int(has_backward))
        if layout.cp > 1:
            yield from self._keys(runs)
        if layout.tp > 1:
            yield from self._around_block(block, runs, is_first)
            yield from self._key_heads(runs)
        if block != "dense":
            yield from self._balance(runs) if self._has_backward else ()
            if layout.ep > 1:
                yield from self._tokens_to_experts(block, runs, mode)

    def _whole_rows(self) -> Iterator[_Call]:
        """Sums over whole rows: accepted drafts, or the halves of pairs."""
        cp, tokens = self._layout.cp, self._rows * self._length
        if self._top_k:
            of_all = [(1 + self._top_k) * FP32] if self._has_backward else [self._top_k * FP32, self._top_k * INDEX]
            for width in of_all:
                yield _Call("cp", "all_gather", cp, "likely tokens", 1, tokens * width)
            return
        if self._plan.config.preference is None:
            yield _Call("cp", "all_gather", cp, "predictions", 1, (1 + self._depths) * tokens * INDEX)
            return
        yield _Call("cp", "all_gather", cp, "log-probabilities", 1, tokens * FP32)
        # Three sums of as many halves as a row has tokens, at most; and their gradients.
        yield _Call("cp", "all_reduce", cp, "sums of pairs", 2 * self._has_backward, 3 * 2 * tokens * _FP64)

    def _fsdp(self, part: StagePart) -> Iterator[_Call]:
        """Weights in the compute type and gradients in the reduce type, both padded to equal shards."""
        layout, count, parallelism = self._layout, self._micro_batches, self._plan.config.parallelism
        # The first block with a backward prefetches the one before it, as all blocks do.
        forward_only = part.prefixes[: max(part.backward_from - 1, 0)] if self._has_backward else part.prefixes
        units = Counter[tuple[int, bool, tuple[Parameter, ...]]]()
        firsts = dict[int, FsdpUnit]()
        for unit in fsdp_units(part, self._shape, layout):  # equal blocks have one tuple of rows
            units[id(unit.rows), unit.prefix in forward_only, tuple(self._gathered_in_fp8(unit))] += 1
            firsts.setdefault(id(unit.rows), unit)
        for (rows, is_forward_only, in_fp8), number in units.items():
            unit, held = firsts[rows], {row: held_elements(row, self._shape, layout) for row in firsts[rows].rows}
            axis = "efsdp" if unit.has_own_mesh else "shard"
            shards = layout.expert_shards if unit.has_own_mesh else layout.dense_shards
            frees = not unit.is_root and not parallelism.keeps_gathered
            gathers, reduces = (2 * count if frees and not is_forward_only else count), count
            if not self._has_backward:
                gathers, reduces = (count if frees else 1), 0  # released after the last one
            elif layout.pp > 1:
                # Forward frees the weights, and backward leaves them for what follows. So each forward is followed by a
                # gather, whatever the order, and the first one preceded by one.
                gathers, reduces = (count + 1 if frees else 1), 1
            elif gradients_are_summed_once(self._plan):
                reduces = 1
            widths = {row: 1 if row in in_fp8 else row.stored_bytes or self._gathered for row in held}
            nbytes = sum(int(size * widths[row]) for row, size in held.items())
            yield _Call(axis, "all_gather", shards, "weights", number * gathers, shards * nbytes)
            if not self._has_backward:  # a step computes them at once
                calls = number * gathers * len(in_fp8)
                yield _Call(axis, "all_reduce", shards, "scales of weights", calls, self._master)
            reduced = sum(size for row, size in held.items() if row.is_trained) * self._reduce
            reduces *= reduced > 0
            yield _Call(axis, "reduce_scatter", shards, "gradients", number * reduces, shards * reduced)
            if replicas_reduce_once(self._plan):
                reduces = min(reduces, 1)
            yield _Call("dp_replicate", "all_reduce", layout.dp_replicate, "gradients", number * reduces, reduced)

    def _norms(self, part: StagePart) -> Iterator[_Call]:
        """DoRA's norms, once per step (`compute/parallelize/magnitudes.py`): A and the magnitude are gathered, and each
        rank sums over its part of the weight."""
        if part.adapters is None:
            return
        layout = self._layout
        of_experts = ("efsdp" if layout.experts_have_own_mesh else "shard", layout.expert_shards), ("ep", layout.ep)
        of_others = ("shard", layout.dense_shards), ("tp", layout.tp)
        blocks = [row for block in part.block_rows(self._shape) for row in block]
        rows = [row for row in blocks if row.rank is not None]
        has_norms = {row.name.rpartition("magnitude")[0] for row in rows if row.group == "magnitude"}
        is_whole = {row.name.removesuffix("weight") for row in blocks if row.tensor_dim is None}
        for row in rows:
            if row.name.removesuffix("lora_A").removesuffix("magnitude") not in has_norms:
                continue
            axes = of_experts if row.is_expert else of_others
            if row.group == "magnitude":
                for axis, ranks in axes[: 1 if row.name.removesuffix("magnitude") in is_whole else 2]:
                    yield _Call(axis, "all_reduce", ranks, "norms of adapted rows", 1, row.numel(self._shape) * FP32)
            (axis, shards), (inner_axis, inner) = axes
            held, whole = held_elements(row, self._shape, layout), prod(local_shape(row, self._shape, layout))
            dim = 0 if row.is_expert else row.tensor_dim
            sizes = shards * held, inner * whole
            if dim is None:
                sizes = shards * held, 0
            elif dim != sharded_dim(row, self._shape, layout):  # DTensor begins with the inner axis then
                sizes = inner * shards * held, inner * held
            yield _Call(axis, "all_gather", shards, "adapters of norms", 1, sizes[0] * self._master)
            yield _Call(inner_axis, "all_gather", inner, "adapters of norms", sizes[1] > 0, sizes[1] * self._master)

    def _gathered_in_fp8(self, unit: FsdpUnit) -> list[Parameter]:
        """The rows of a unit whose weights FSDP2 gathers in FP8, with one scale for all shards."""
        if not self._in_fp8:
            return []
        is_prediction = unit.prefix.startswith("mtp.")
        inner = {row: "block." if is_prediction and row.part != "mtp" else "" for row in unit.rows}
        return [row for row in unit.rows if f"{unit.prefix}{inner[row]}{row.name}" in self._in_fp8]

    def _replicated_gradients(self, part: StagePart) -> Iterator[_Call]:
        """Gradients of parameters that tensor-parallel ranks hold whole are parts of a sum."""
        calls = 1 if gradients_are_summed_once(self._plan) else self._micro_batches
        for row, count, _ in held_rows([part], self._shape, self._layout):
            if row.tensor_dim is None and not row.is_expert and row.is_trained:
                size = row.numel(self._shape) * self._reduce  # before torch 2.15 the compute type, but in a pipeline
                yield _Call("tp", "all_reduce", self._layout.tp, "gradients of whole parameters", calls * count, size)

    def _around_block(self, block: Block, runs: _Runs, is_first: bool) -> Iterator[_Call]:
        """Attention, and a dense network or the shared experts: gather before, reduce-scatter after."""
        networks, tp = 2 if block == "dense" or self._shape.n_shared_experts else 1, self._layout.tp
        # Recomputation of a dense layer ends before its last reduce-scatter, whose result backward does not need.
        spared = (block == "dense" and runs.forward > 1) + is_first
        calls = networks * (runs.forward + runs.backward)
        yield _Call("tp", "all_gather", tp, "rows of the sequence", calls, self._hidden * tp)
        yield _Call("tp", "reduce_scatter", tp, "rows of the sequence", calls - spared, self._hidden * tp)

    def _key_heads(self, runs: _Runs) -> Iterator[_Call]:
        """Beyond the number of key heads: the parts of a head's keys and values, and their gradients."""
        ranks = self._layout.tp // self._shape.num_key_value_heads
        size = self._tokens * self._layout.tp * self._shape.head_dim * self._width
        yield _Call("tp_head", "all_gather", ranks, "parts of a key head", 2 * runs.forward, size)
        yield _Call("tp_head", "reduce_scatter", ranks, "parts of a key head", 2 * runs.backward, size)

    def _vocabulary(self, part: StagePart) -> Iterator[_Call]:
        """Embedding and head, each for the main model and every prediction depth."""
        tp, calls = self._layout.tp, 1 + self._depths
        if part.has_embedding:
            has_gradient = self._has_backward and part.adapters is None
            yield _Call("tp", "all_gather", tp, "embeddings", calls * has_gradient, self._hidden * tp)
            yield _Call("tp", "reduce_scatter", tp, "embeddings", calls, self._hidden * tp)
        if part.has_head:
            name = "rows of the sequence for the head"
            yield _Call("tp", "all_gather", tp, name, calls, self._hidden * tp)
            yield _Call("tp", "reduce_scatter", tp, name, calls * self._has_backward, self._hidden * tp)
            is_trained = self._has_backward and part.adapters is None
            tokens, chunk = self._tokens * tp, loss_chunk_tokens(is_trained=is_trained)
            runs_twice = (of := self._plan.config.distillation) is not None and of.runs_head_twice
            for start in range(0, tokens, chunk):
                # Largest logit, logarithm of the sum, log-probability of the label and prediction of each token.
                # A student has the last of more tokens, a teacher of these alone, and looks for them by their logits.
                first = 4 * runs_twice if self._has_backward else 2 * self._top_k
                for figures in (first, 3 + self._top_k) if first else (4 + self._top_k,):
                    size = min(chunk, tokens - start) * figures * _FP64 * tp
                    yield _Call("tp", "all_gather", tp, "softmax over parts of the vocabulary", calls, size)

    def _balance(self, runs: _Runs) -> Iterator[_Call]:
        """Sums of the balance loss over the ranks that share a sequence."""
        if max(values_of(self._plan.config.moe.sequence_aux_loss_weight), default=0.0) > 0.0:
            size = self._rows * (2 * self._shape.n_routed_experts + 1) * FP32
            for axis, ranks in (("cp", self._layout.cp), ("tp", self._layout.tp)):
                yield _Call(axis, "all_reduce", ranks, "balance of experts", runs.forward + 1, size)

    def _tokens_to_experts(self, block: Block, runs: _Runs, mode: str) -> Iterator[_Call]:
        """Sizes, rows and weights to the experts, rows back; in backward the gradients of all but the sizes. A
        recomputation has the numbers, and selective checkpointing keeps what was received."""
        ep, chunks = self._layout.ep, self._plan.exchange_chunks
        again = int(self._plan.config.activation_checkpoint.sends_again(mode))
        # Recomputation needs the rows that come back only where a norm follows, which "selective" does not recompute.
        back = 1 + runs.backward + (block == "mtp" and mode == "full")
        sizes, numbers = self._shape.n_routed_experts, 0
        if (levels := self._plan.expert_levels) is not None:
            sizes, numbers = ep * (levels.hosts + 2 * ep), 1 + again
        yield _Call("ep", "all_to_all", ep, "numbers of tokens", 1, sizes * chunks * INDEX)
        there = 1 + runs.backward + again
        for axis, ranks, *sizes_of_chunk in exchanges(self._plan, self._shape, self._tokens / chunks):
            for what, calls, size in zip(TOKENS, (numbers, there, there, back), sizes_of_chunk, strict=True):
                yield _Call(axis, "all_to_all", ranks, what, calls * chunks, size)

    def _keys(self, runs: _Runs) -> Iterator[_Call]:
        """Keys and values of one layer, and their gradients."""
        layout, shape, cp = self._layout, self._shape, self._layout.cp
        of_token, calls = int(sent_of_key(shape, layout.tp)), 1 if shape.is_latent else 2
        if self._plan.keys_travel(shape, (self._rows, self._length)):
            part = 2 * self._rows * self._length // cp * of_token
            sends = (runs.forward + runs.backward) * (cp - 1)
            yield _Call("cp", "send", cp, "keys", sends, part * self._width)
            yield _Call("cp", "send", cp, "gradients of keys", runs.backward * cp, part * FP32)
        elif shape.sliding_window is not None:
            _, received = attended_keys(shape.sliding_window, self._length, cp)
            size = int(self._rows * received) * of_token * self._width
            yield _Call("cp", "all_to_all", cp, "keys", calls * runs.forward, size)
            yield _Call("cp", "all_to_all", cp, "gradients of keys", calls * runs.backward, size)
        else:
            size = self._rows * self._length * of_token * self._width
            yield _Call("cp", "all_gather", cp, "keys", calls * runs.forward, size)
            yield _Call("cp", "reduce_scatter", cp, "gradients of keys", calls * runs.backward, size)

    def _pipeline(self, rank: int, part: StagePart) -> Iterator[_Call]:
        """Hidden states and embeddings for prediction depths to the next stage, gradients to the one before."""
        for what in self._borders(rank, part):
            for copies in filter(None, (1, self._depths)):
                yield _Call("pp", "send", self._layout.pp, what, 1, copies * self._hidden)

    def _borders(self, rank: int, part: StagePart) -> list[str]:
        """Tensors that a stage sends to other ranks."""
        parallelism = self._plan.config.parallelism
        borders = [(part.index + 1, "hidden states")] * (part.index + 1 < parallelism.stages)
        borders += [(part.index - 1, "gradients of hidden states")] * (self._has_backward and part.index > 0)
        return [what for other, what in borders if rank_of_stage(parallelism, other) != rank]

    def _step_sums(self, parts: list[StagePart]) -> Iterator[_Call]:
        """The gradient norm, and the sums of the step over all ranks."""
        layout = self._layout
        # Squares are summed once for each set of axes that shard a parameter.
        of_experts = (("efsdp", "ep") if layout.ep > 1 else ("efsdp",)) if layout.experts_have_own_mesh else ("shard",)
        trained = [each.row for each in held_rows(parts, self._shape, layout) if each.row.is_trained]
        of_others = {True: ("shard",), False: ("shard", "tp") if layout.tp > 1 else ("shard",)}
        axes_of = dict.fromkeys(of_experts if row.is_expert else of_others[row.tensor_dim is None] for row in trained)
        sizes = {"shard": layout.dense_shards, "efsdp": layout.expert_shards, "ep": layout.ep, "tp": layout.tp}
        for axis in (axis for axes in axes_of for axis in axes):
            yield _Call(axis, "all_reduce", sizes[axis], "gradient norm", 1, FP32)
        yield _Call("pp", "all_reduce", layout.pp, "gradient norm", 1, FP32)
        # Loss, and of each prediction depth loss and accepted drafts; two auxiliary losses and the norm.
        # Of pairs loss, correct order or divergence, a sum of chosen halves, and two of each half.
        # Of a student loss, divergence and cross-entropy.
        own = 1 + 2 * self._depths if self._plan.config.preference is None else 7
        own = 3 if self._top_k else own
        sums = (own + 3) * _FP64
        routers = self._shape.num_hidden_layers - self._shape.first_k_dense_replace + self._depths
        counts = routers * (self._shape.n_routed_experts + 1) * INDEX
        for what, size in (("sums of the step", sums), ("tokens of each expert", counts)):
            yield _Call("world", "all_reduce", layout.world_size, what, 1, size)
