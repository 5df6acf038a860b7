"""Calls and bytes of a rank in one optimizer step, by collective and mesh axis; without torch.

It follows the code call by call: `parallelize/`, `compute/distributed/collectives.py`, torch's FSDP2 and pipelines, and
`engine/training/step.py`. A test counts the calls and bytes of real steps on a fake process group and holds both equal.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from glm46.config.float8_layers import linear_layers
from glm46.operate.estimate.activations import FP32, INDEX, Frozen
from glm46.operate.estimate.micro_batch_traffic import FP64, Call, Kind, MicroBatchTraffic
from glm46.operate.estimate.muon_cost import muon_cost
from glm46.operate.estimate.plan_sizes import batches_of, experts_have_own_mesh
from glm46.operate.estimate.rank_parts import FsdpUnit, StagePart, alike, parts_of_ranks, sharded_dim
from glm46.operate.estimate.target_cluster import groups
from glm46.run.parameters import Parameter, layer_counts
from glm46.run.plan import Plan, gradients_are_summed_once, replicas_reduce_once

MUON = "matrices of Muon"
"""`Traffic.what` of the exchange of sharded matrices; ranks send nothing to themselves in it."""


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind over one axis, for one purpose, in one optimizer step of one rank."""

    axis: str
    """Mesh axis as `compute/distributed/mesh.py` names it: shard (FSDP2, dp_shard x cp ranks), dp_replicate, efsdp, ep,
    cp, tp, pp; "ep_hosts" and "ep_host" for ep ranks with equal numbers on their hosts and for ep ranks of one host;
    "tp_head" for the ranks of tp that share a key head; "stage" for all ranks of a pipeline stage,
    "stage_experts" for those that share experts; "world" for all ranks."""
    kind: Kind
    ranks: int
    """Ranks of the group."""
    calls: int
    nbytes: int
    """Bytes of all calls together: the larger of the input and output tensors, this rank's share included. So an
    all_gather counts the gathered tensor, a reduce_scatter the unreduced one, an all_reduce its tensor once, an
    all_to_all what the rank sends to all, a send what it sends; a receive is another rank's send and is not counted."""
    what: str
    """Purpose, such as `MUON` or one of `TOKENS`."""


def step_traffic(plan: Plan, stage_index: int = 0, micro_batches: int | None = None) -> list[list[Traffic]]:
    """Compute the calls and bytes of each pipeline rank's first rank in `train_step`.

    Tokens are spread evenly over experts, and no token is padding. Groups of one rank are omitted, and so is the
    agreement on a step before it. Calls and bytes are exact, except for the keys that context-parallel ranks exchange
    under a sliding window, which assume that each row is one document.

    Args:
        stage_index: index into `Plan.text_stages`.
        micro_batches: micro-batches of the step; None for the largest step of the stage.
    """
    step = _Step(plan, stage_index, micro_batches)
    by_key = dict[tuple[Any, ...], list[Traffic]]()
    by_rank = []
    for rank, parts in enumerate(parts_of_ranks(plan)):
        key = step.alike(rank, parts)
        if key not in by_key:
            by_key[key] = traffic_of_rank(step, rank, parts)
        by_rank.append(by_key[key])
    return by_rank


def traffic_of_rank(step: "_Step", rank: int, parts: list[StagePart]) -> list[Traffic]:
    """Compute the traffic of one pipeline rank. The last entries send sharded matrices to their owners, and updates
    back."""
    plan = step.plan
    exchanges = muon_cost(parts, plan.shape, plan.layout, plan.config).exchanges
    ranks = {axis: groups(plan)[axis][1] for axis in exchanges}
    return _merged(plan, step.of_rank(rank, parts)) + [
        Traffic(axis, "all_to_all", ranks[axis], 2 * buckets, nbytes, MUON)
        for axis, (buckets, nbytes) in exchanges.items()
    ]


def reference_traffic(plan: Plan, stage_index: int = 0, micro_batches: int | None = None) -> list[list[Traffic]]:
    """Compute the traffic of the forward passes before a step of preference training, like `step_traffic`: passes of
    the reference (the policy without adapters, or a frozen network), and for KTO passes of both networks on completions
    of other prompts. Empty without a reference."""
    if not plan.config.has_preference_reference:
        return [[] for _ in range(plan.layout.pp)]
    has_kl = plan.config.preference is not None and plan.config.preference.loss_type == "kto"
    count = micro_batches or batches_of(plan, stage_index)[1] // plan.rows_per_micro_batch
    reference = _Step(plan, stage_index, count * (1 + has_kl), has_backward=False)
    policy = _Step(plan, stage_index, count, has_backward=False)
    traffic = []
    for rank, parts in enumerate(parts_of_ranks(plan)):
        frozen = [replace(part, frozen=part.frozen or (Frozen(),) * len(part.blocks)) for part in parts]
        calls = [*reference.of_rank(rank, frozen)]
        if has_kl:
            calls += [*policy.of_rank(rank, parts), Call("world", "all_reduce", "divergence", 1, 2 * FP64)]
        traffic.append(_merged(plan, calls))
    return traffic


def _merged(plan: Plan, calls: Iterable[Call]) -> list[Traffic]:
    counts = Counter[Any]()
    sizes = Counter[Any]()
    ranks = {axis: size for axis, (_, size) in groups(plan).items()}
    for axis, kind, what, number, size in calls:
        if ranks[axis] > 1 and number:
            counts[axis, kind, what] += number
            sizes[axis, kind, what] += number * size
    return [
        Traffic(axis, kind, ranks[axis], number, sizes[axis, kind, what], what)
        for (axis, kind, what), number in counts.items()
    ]


class _Step(MicroBatchTraffic):
    """One optimizer step of a plan in one stage of text, or forward passes over its micro-batches: adds the traffic of
    weights and gradients to that of the micro-batches."""

    def alike(self, rank: int, parts: list[StagePart]) -> tuple[Any, ...]:
        """Return a key that is equal for pipeline ranks with the same calls."""
        names = [part.first_layer for part in parts if self._in_fp8]
        return alike(parts), *((not part.index, *self.borders(rank, part)) for part in parts), *names

    def of_rank(self, rank: int, parts: list[StagePart]) -> Iterator[Call]:
        """Yield all calls of a pipeline rank."""
        for part in parts:
            yield from self._fsdp(part)
            yield from self._replicated_gradients(part) if self.has_backward else ()
            for call in self.of_micro_batch(rank, part):
                yield call._replace(calls=call.calls * self.micro_batches)
            yield from self._norms(part) if self.has_backward else ()
        if self.has_backward:
            units = (unit for part in parts for unit in self.units(part))
            nbytes = sum(len(self._gathered_in_fp8(unit)) for unit in units) * self.master if self._in_fp8 else 0
            yield Call("shard", "all_reduce", "scales of weights", nbytes > 0, nbytes)
            yield from self._step_sums(parts)

    @cached_property
    def _in_fp8(self) -> set[str]:
        float8 = self.config.float8
        layers = linear_layers(self.shape, float8, self.layout.tp) if float8.enable_fsdp_float8_all_gather else ()
        return {f"{layer.name}.weight" for layer in layers if layer.excluded_by is None}

    def _fsdp(self, part: StagePart) -> Iterator[Call]:
        """Yield the gathers of weights in the compute type and the reductions of gradients in the reduce type; both are
        padded to equal shards."""
        layout = self.layout
        count = self.micro_batches
        parallelism = self.config.parallelism
        # The first block with a backward prefetches the previous one, as all blocks do.
        forward_only = part.prefixes[: max(part.backward_from - 1, 0)] if self.has_backward else part.prefixes
        passes = Counter(part.prefixes + [part.prefixes[index] for index in part.repeats])
        units = Counter[tuple[int, bool, int, tuple[Parameter, ...]]]()
        firsts = dict[int, FsdpUnit]()
        for unit in self.units(part):  # equal blocks share one tuple of rows
            uses = max(passes[unit.prefix], 1)  # the root is in no block
            units[id(unit.rows), unit.prefix in forward_only, uses, tuple(self._gathered_in_fp8(unit))] += 1
            firsts.setdefault(id(unit.rows), unit)
        for (rows, is_forward_only, uses, in_fp8), number in units.items():
            unit = firsts[rows]
            held = {row: self.elements(row, is_shard=True) for row in firsts[rows].rows}
            axis = "efsdp" if unit.has_own_mesh else "shard"
            shards = layout.expert_shards if unit.has_own_mesh else layout.dense_shards
            frees = unit.prefix != "" and not parallelism.keeps_gathered
            gathers = (2 * count if frees and not is_forward_only else count) * (uses if frees else 1)
            reduces = count  # autograd adds the gradients of all uses first
            if not self.has_backward:
                # Released after the last micro-batch.
                gathers = count * uses if frees else 1
                reduces = 0
            elif layout.pp > 1:
                # Forward frees the weights; backward keeps them for the next forward or backward. So, in any order,
                # there is one gather after each forward, and one before the first.
                gathers = count * uses + 1 if frees else 1
                reduces = 1
            elif gradients_are_summed_once(self.plan):
                reduces = 1
            widths = {row: 1 if row in in_fp8 else row.stored_bytes or self.gathered for row in held}
            nbytes = sum(int(size * widths[row]) for row, size in held.items())
            yield Call(axis, "all_gather", "weights", number * gathers, shards * nbytes)
            if not self.has_backward:  # a step computes all scales at once
                calls = number * gathers * len(in_fp8)
                yield Call(axis, "all_reduce", "scales of weights", calls, self.master)
            reduced = sum(size for row, size in held.items() if row.is_trained) * self.reduce
            reduces *= reduced > 0
            yield Call(axis, "reduce_scatter", "gradients", number * reduces, shards * reduced)
            if replicas_reduce_once(self.plan):
                reduces = min(reduces, 1)
            yield Call("dp_replicate", "all_reduce", "gradients", number * reduces, reduced)

    def _norms(self, part: StagePart) -> Iterator[Call]:
        """Yield the calls for DoRA's norms, once per step (`compute/parallelize/magnitudes.py`): A and the magnitude
        are gathered, and each rank sums over its part of the weight."""
        if part.frozen is None:
            return
        layout = self.layout
        expert_axes = ("efsdp" if experts_have_own_mesh(layout) else "shard", layout.expert_shards), ("ep", layout.ep)
        other_axes = ("shard", layout.dense_shards), ("tp", layout.tp)
        blocks = [row for block in part.block_rows(self.shape) for row in block]
        rows = [row for row in blocks if row.rank is not None]
        has_norms = {row.name.rpartition("magnitude")[0] for row in rows if row.group == "magnitude"}
        is_whole = {row.name.removesuffix("weight") for row in blocks if row.tensor_dim is None}
        for row in rows:
            if row.name.removesuffix("lora_A").removesuffix("magnitude") not in has_norms:
                continue
            axes = expert_axes if row.is_expert else other_axes
            if row.group == "magnitude":
                for axis, _ in axes[: 1 if row.name.removesuffix("magnitude") in is_whole else 2]:
                    yield Call(axis, "all_reduce", "norms of adapted rows", 1, row.numel(self.shape) * FP32)
            (axis, shards), (inner_axis, inner) = axes
            held = self.elements(row, is_shard=True)
            whole = self.elements(row)
            dim = 0 if row.is_expert else row.tensor_dim
            sizes = shards * held, inner * whole
            if dim is None:
                sizes = shards * held, 0
            elif dim != sharded_dim(row, self.shape, layout):  # then DTensor gathers over the inner axis first
                sizes = inner * shards * held, inner * held
            yield Call(axis, "all_gather", "adapters of norms", 1, sizes[0] * self.master)
            yield Call(inner_axis, "all_gather", "adapters of norms", sizes[1] > 0, sizes[1] * self.master)

    def _gathered_in_fp8(self, unit: FsdpUnit) -> list[Parameter]:
        """Return the rows of a unit whose weights FSDP2 gathers in FP8, with one scale for all shards."""
        if not self._in_fp8:
            return []
        is_prediction = unit.prefix.startswith("mtp.")
        inner = {row: "block." if is_prediction and row.part != "mtp" else "" for row in unit.rows}
        return [row for row in unit.rows if f"{unit.prefix}{inner[row]}{row.name}" in self._in_fp8]

    def _replicated_gradients(self, part: StagePart) -> Iterator[Call]:
        """Yield the sums of gradients over tensor-parallel ranks, for parameters that each of them holds unsharded."""
        calls = 1 if gradients_are_summed_once(self.plan) else self.micro_batches
        for row, count, _ in self.held([part]):
            if row.tensor_dim is None and not row.is_expert and row.is_trained:
                size = row.numel(self.shape) * self.reduce  # compute type before torch 2.15, except in a pipeline
                yield Call("tp", "all_reduce", "gradients of whole parameters", calls * count, size)

    def _step_sums(self, parts: list[StagePart]) -> Iterator[Call]:
        """Yield the gradient norm, and the sums of the step over all ranks."""
        layout = self.layout
        # Squares are summed once for each set of axes that shard a parameter.
        expert_axes = (
            (("efsdp", "ep") if layout.ep > 1 else ("efsdp",)) if experts_have_own_mesh(layout) else ("shard",)
        )
        trained = [held_row.row for held_row in self.held(parts) if held_row.row.is_trained]
        other_axes = {True: ("shard",), False: ("shard", "tp") if layout.tp > 1 else ("shard",)}
        axes_of = dict.fromkeys(expert_axes if row.is_expert else other_axes[row.tensor_dim is None] for row in trained)
        for axis in (axis for axes in axes_of for axis in axes):
            yield Call(axis, "all_reduce", "gradient norm", 1, FP32)
        yield Call("pp", "all_reduce", "gradient norm", 1, FP32)
        # Without preferences: loss, and of each prediction depth loss, accepted drafts and accepted runs. With
        # preferences: loss, correct order or divergence, sum of chosen halves, and two values of each half. Both: four
        # auxiliary losses, the norms of the gradients of indexers and of the rest.
        loss_sums = 1 + 3 * self.depths if self.config.preference is None else 7
        sums = (loss_sums + 6) * FP64
        routers = sum(layer_counts(self.shape)[1:])
        counts = routers * (self.shape.n_routed_experts + 1) * INDEX
        for what, size in (("sums of the step", sums), ("tokens of each expert", counts)):
            yield Call("world", "all_reduce", what, 1, size)
