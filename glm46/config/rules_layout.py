"""Rules about the mesh: divisibility, number of processes, batch size, blocks of optimizer states.

A world size of None means that the number of processes is not known yet; rules that need it yield nothing then.
"""

import math

from glm46.config.faults import counted, near_values
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.section import values_of

STATE_BLOCK, STATE_LEAST_ENTRIES = 64, 4096
"""Columns that share a scale in 8-bit states, and entries of the smallest tensor with such states; a test holds both
equal to `compute/optim/compact_state.py`."""


def data_parallel_degree(config: RunConfig, world_size: int | None) -> int | None:
    """Ranks that read different sequences; None if it depends on a world size that is not known or does not fit."""
    layout = config.parallelism
    shard = layout.data_parallel_shard_degree
    if shard == -1:
        if world_size is None or world_size % layout.stated_ranks:
            return None
        shard = world_size // layout.stated_ranks
    return layout.data_parallel_replicate_degree * shard


@rule
def layout_divides_the_model(config: RunConfig, shape: ModelShape) -> Faults:
    """Each axis splits its dimension evenly."""
    layout = config.parallelism
    tensor, context = layout.tensor_parallel_degree, layout.context_parallel_degree
    rules = (
        ("tensor_parallel_degree", tensor, "model.num_attention_heads", shape.num_attention_heads, 1),
        ("tensor_parallel_degree", tensor, "model.vocab_size", shape.vocab_size, 1),
        # Tensor parallelism splits the part of a sequence that context parallelism leaves to a rank.
        ("tensor_parallel_degree", tensor, "training.seq_len", config.training.seq_len, context),
        # A rank takes a piece of the head and one of the tail, so that causal attention costs each rank the same.
        ("context_parallel_degree", context, "training.seq_len", config.training.seq_len, 2),
        ("expert_parallel_degree", layout.expert_parallel_degree, "model.n_routed_experts", shape.n_routed_experts, 1),
    )
    for degree_key, degree, key, size, factor in rules:
        if degree > 1 and size % (degree * factor):
            wanted = "must divide" if factor == 1 else f"{factor} times it must divide"
            alike = [(of[3], of[4]) for of in rules if of[0] == degree_key]
            remedy = near_values(degree, size, lambda n: n == 1 or not any(s % (n * f) for s, f in alike))  # noqa: B023
            yield fault(f"`parallelism.{degree_key}`: {wanted} `{key}`; {remedy}")


@rule
def experts_of_the_layout_exist(config: RunConfig, shape: ModelShape) -> Faults:
    """Keys that spread or recompute experts have a layer with experts."""
    if shape.first_k_dense_replace < shape.num_hidden_layers + shape.num_nextn_predict_layers:
        return
    why = "no layer has experts with `model.first_k_dense_replace`"
    if config.parallelism.expert_parallel_degree > 1:
        yield fault(f"`parallelism.expert_parallel_degree`: {why}; take 1")
    if "experts" in config.activation_checkpoint.recompute:
        yield fault(f'`activation_checkpoint.recompute`: {why}; remove "experts"')


@rule
def tensor_parallel_ranks_share_key_heads(config: RunConfig, shape: ModelShape) -> Faults:
    """A tensor-parallel rank has whole key heads, or an equal part of one."""
    degree, heads = config.parallelism.tensor_parallel_degree, shape.num_key_value_heads
    if shape.is_latent:  # as many as query heads
        return
    if heads % degree == 0 or (degree % heads == 0 and shape.head_dim % (degree // heads) == 0):
        return
    key = "num_key_value_heads" if degree % heads else "head_dim"
    wanted = "divide it or be a multiple of it" if degree % heads else f"leave equal parts of {heads} key heads"
    fitting = math.gcd(degree, heads) if degree % heads else heads * math.gcd(degree // heads, shape.head_dim)
    yield fault(f"`parallelism.tensor_parallel_degree` with `model.{key}`: must {wanted}; take {fitting}")


@rule
def a_replica_can_be_lost(config: RunConfig) -> Faults:
    """The least number of replicas is below their number."""
    least, replicas = config.fault_tolerance.min_replicas, config.parallelism.data_parallel_replicate_degree
    if least and least >= replicas > 1:
        yield fault(
            "`fault_tolerance.min_replicas`: must be below `parallelism.data_parallel_replicate_degree`; take at most "
            f"{replicas - 1}, or 0 to never go on with fewer"
        )


@rule
def batch_divides(config: RunConfig, world_size: int | None) -> Faults:
    """The global batch is a multiple of one micro-batch over all data-parallel ranks, as far as these are known."""
    local, batch = config.training.local_batch_size, config.training.global_batch_size
    degree = data_parallel_degree(config, world_size)
    # Without the number of processes, the known divisor of the true degree must divide the batch already.
    divisor = local * (degree or config.parallelism.data_parallel_replicate_degree)
    key, explained = "training.global_batch_size", f"times {counted(divisor // local, 'data-parallel rank')}"
    if isinstance(batch, tuple):
        # A ramp is rounded down to a multiple, so only values below the smallest multiple are faults.
        if 1 <= min(values_of(batch)) < divisor:
            yield fault(
                f"`{key}`: {min(values_of(batch)):g} sequences are less than one micro-batch, {divisor} "
                f"(`training.local_batch_size` {explained}); start the ramp higher or lower local_batch_size",
                "parallelism",
            )
    elif batch is not None and batch >= 1 and batch % divisor:
        below = int(batch // divisor) * divisor
        yield fault(
            f"{key} = {batch:g}: must be a multiple of {divisor} (`training.local_batch_size` {explained}); take "
            f"{f'{below} or ' if below else ''}{below + divisor}", key, "parallelism",
        )  # fmt: skip


@rule
def deferred_sums_are_of_several(config: RunConfig, world_size: int | None) -> Faults:
    """Gradients that are summed over ranks once per step are those of several micro-batches, and sums of FP32."""
    key, training = "parallelism.defer_gradient_sync", config.training
    if not config.parallelism.defer_gradient_sync:
        return
    if config.parallelism.pipeline_parallel_degree > 1:
        other = "parallelism.pipeline_parallel_degree"
        yield fault(f"`{key}`: a pipeline sums gradients once per step in any case; remove {key}", other)
    if training.mixed_precision_reduce != "float32":
        other = "training.mixed_precision_reduce"
        yield fault(
            f'`{key}`: `{other}` would lose small gradients in sums over micro-batches; set {other} = "float32", or '
            f"remove {key}"
        )
    degree, batch = data_parallel_degree(config, world_size), training.global_batch_size
    micro_batch = training.local_batch_size * (degree or 0)
    if micro_batch and config.rl is None and max(values_of(batch), default=0) < 2 * micro_batch:
        other, rows = "training.global_batch_size", counted(micro_batch, "sequence")
        why = f"a step has one micro-batch, {rows} of all ranks, so that it only holds whole gradients in memory"
        yield fault(f"`{key}`: {why}; set {other} = {2 * micro_batch} or more, or remove {key}", other)


@rule
def chunks_have_tokens(config: RunConfig) -> Faults:
    """Tokens of a rank that travel in two chunks are at least two."""
    layout, key = config.parallelism, "parallelism.expert_exchange_chunks"
    rows, ranks = config.training.local_batch_size, layout.context_parallel_degree * layout.tensor_parallel_degree
    shortest = min(
        [config.training.seq_len, *(stage.seq_len or config.training.seq_len for stage in config.data.stages)]
    )
    if (layout.expert_exchange_chunks or 1) > max(tokens := rows * shortest // ranks, 1):
        yield fault(f"`{key}`: a rank has {counted(tokens, 'token')} per micro-batch; take 1")


@rule
def deepep_takes_the_rows(config: RunConfig, shape: ModelShape) -> Faults:
    """Rows that DeepEP sends are of a type, width and number that it has kernels for, all tokens at once."""
    key, remedy = "parallelism.expert_exchange", 'or set parallelism.expert_exchange = "two_level"'
    if config.parallelism.expert_exchange != "deepep" or config.parallelism.expert_parallel_degree == 1:
        return
    if config.training.mixed_precision_param != "bfloat16":
        other = "training.mixed_precision_param"
        yield fault(f'`{key}`: DeepEP sends BF16; set {other} = "bfloat16", {remedy}', other)
    if config.parallelism.expert_exchange_chunks == 2:
        other = "parallelism.expert_exchange_chunks"
        yield fault(f"`{key}`: DeepEP sends all tokens at once; remove {other}, {remedy}", other)
    checkpointing, other = config.activation_checkpoint, "activation_checkpoint.cpu_checkpointing"
    if checkpointing.cpu_checkpointing and not checkpointing.sends_again(checkpointing.mode):
        why = f"DeepEP's buffer has the rows that selective keeps, which {other} cannot move"
        yield fault(f'`{key}`: {why}; add "exchange" to activation_checkpoint.recompute, {remedy}', other)
    if width := shape.hidden_size % 16:
        other, below = "model.hidden_size", shape.hidden_size - width
        why = f"DeepEP sends rows of a multiple of 32 bytes, and {other} is {shape.hidden_size}"
        yield fault(f"`{key}`: {why}; take {below + 16}, {remedy}", other)
    if shape.num_experts_per_tok > 32:
        other = "model.num_experts_per_tok"
        yield fault(f"`{key}`: DeepEP sends a token to at most 32 experts; lower {other}, {remedy}", other)
    if config.rl is not None:
        why = "DeepEP needs to know the most tokens of a micro-batch, and those of samples vary"
        yield fault(f"`{key}`: {why}; {remedy.removeprefix('or ')}", "rl")


@rule
def degrees_multiply_to_the_processes(config: RunConfig, world_size: int | None) -> Faults:
    """The degrees multiply to the number of processes."""
    if world_size is None:
        return
    layout = config.parallelism
    fixed, shard = layout.stated_ranks, layout.data_parallel_shard_degree
    spelled = "replicate * tensor * pipeline * context"
    if shard == -1 and world_size % fixed:
        yield fault(
            f"parallelism: {spelled} degrees multiply to {fixed}, which does not divide "
            f"{counted(world_size, 'process')}; start a multiple of {fixed} processes, or lower a degree",
            "parallelism",
        )
    elif shard > 0 and fixed * shard != world_size:
        more = "more" if world_size > fixed * shard else "fewer"
        other = "lower another degree" if world_size % fixed else "set data_parallel_shard_degree = -1"
        yield fault(
            f"parallelism: shard * {spelled} degrees multiply to {fixed * shard} processes, and {world_size} is "
            f"{more}; start {fixed * shard} processes (NGPU={fixed * shard}), or {other}", "parallelism",
        )  # fmt: skip


def _ranks_to_borrow(config: RunConfig, world_size: int | None) -> int | None:
    """Ranks that the expert axis borrows from; None if `data_parallel_degree` is None."""
    layout, degree = config.parallelism, data_parallel_degree(config, world_size)
    if degree is None:
        return None
    shard = degree // layout.data_parallel_replicate_degree
    return shard * layout.context_parallel_degree * layout.tensor_parallel_degree


@rule
def experts_borrow_whole_ranks(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The expert degree divides the ranks that it is borrowed from."""
    degree, ranks = config.parallelism.expert_parallel_degree, _ranks_to_borrow(config, world_size)
    if ranks is not None and ranks % degree:
        near = near_values(degree, ranks, lambda n: ranks % n == shape.n_routed_experts % n == 0)
        yield fault(
            f"`parallelism.expert_parallel_degree`: must divide shard * context * tensor degrees = {ranks}, from which "
            f"it is borrowed; {near}", "parallelism",
        )  # fmt: skip


@rule
def expert_shards_are_even(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """FSDP2 shards experts evenly: whole experts, or equal parts of each expert."""
    ranks, ep = _ranks_to_borrow(config, world_size), config.parallelism.expert_parallel_degree
    rows, adapter = [2 * shape.moe_intermediate_size, shape.hidden_size], config.adapter
    if adapter is not None and "experts" in adapter.targets:
        rows.append(adapter.expert_rank or adapter.rank)  # of A
    if not ranks or ranks % ep or shape.n_routed_experts % ep:
        return  # not known, or reported by the rules above

    def is_even(ranks: int, degree: int) -> bool:
        shards = ranks // degree
        whole = shape.n_routed_experts // degree % shards == 0
        return whole or not any(count % shards for count in rows)

    most = max(shape.n_routed_experts, ep * min(rows))  # more ranks have fewer rows than shards

    if is_even(ranks, ep):
        return
    layout, key = config.parallelism, "parallelism.expert_parallel_degree"
    both = range(1, min(ranks, shape.n_routed_experts) + 1)
    degrees = [d for d in both if ranks % d == 0 and shape.n_routed_experts % d == 0 and is_even(ranks, d)]
    remedies = [f"set {key} = {' or '.join(map(str, degrees))}"] if degrees else ["take another number of ranks"]
    # The message names what the config sets: the degree, the shards, or the number of processes.
    subject = f"{key} = {ep}"
    if "expert_parallel_degree" not in layout.model_fields_set:
        key, shard = "parallelism.data_parallel_shard_degree", layout.data_parallel_shard_degree
        subject = f"{key} = {shard}"
        if shard == -1 and world_size is not None:
            subject = counted(world_size, "process")
            step, each = layout.stated_ranks, ranks * layout.stated_ranks // world_size
            here, last = world_size // step, most // each
            counts = [
                next((n * step for n in numbers if n * each % ep == 0 and is_even(n * each, ep)), None)
                for numbers in (range(min(here - 1, last), 0, -1), range(here + 1, last + 1))
            ]
            if any(counts):
                remedies.insert(0, f"start {' or '.join(str(count) for count in counts if count)} processes")
    yield fault(
        f"{subject}: {counted(shape.n_routed_experts // ep, 'expert')} of a layer sharded over {ranks // ep} ranks, "
        f"which divide neither their number nor an expert's {' and '.join(map(str, rows))} rows; "
        f"{', or '.join(remedies)}", "parallelism",
    )  # fmt: skip


@rule
def state_blocks_are_not_cut(config: RunConfig, shape: ModelShape) -> Faults:
    """Tensor parallelism shards columns between the blocks of 8-bit states."""
    tensor, key = config.parallelism.tensor_parallel_degree, "parallelism.tensor_parallel_degree"
    if config.optimizer.state_dtype != "8bit" or tensor == 1:
        return
    cut = [("model.num_attention_heads * head_dim", shape.num_attention_heads * shape.head_dim)]
    if shape.first_k_dense_replace:
        cut.append(("model.intermediate_size", shape.intermediate_size))
    if shape.n_shared_experts:
        width = shape.n_shared_experts * shape.moe_intermediate_size
        cut.append(("model.n_shared_experts * moe_intermediate_size", width))
    cut = [(name, columns) for name, columns in cut if columns * shape.hidden_size >= STATE_LEAST_ENTRIES]
    for name, columns in cut:
        if columns % (STATE_BLOCK * tensor):
            near = near_values(tensor, tensor, lambda n: all(of % (STATE_BLOCK * n) == 0 or n == 1 for _, of in cut))
            yield fault(
                f"`optimizer.state_dtype`: `{key}` shards {columns} columns ({name}), which must leave multiples of "
                f"{STATE_BLOCK} on each rank; {near} for the degree, or another state_dtype"
            )
