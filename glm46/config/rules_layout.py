"""Rules about the mesh: divisibility, number of processes, batch size, blocks of optimizer states.

A world size of None means that the number of processes is not known yet; rules that need it yield nothing then.
"""

import math

from glm46.config.faults import counted, near_values
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.section import values_of

STATE_BLOCK = 64
STATE_MIN_ENTRIES = 4096
"""Columns that share a scale in 8-bit states, and entries of the smallest tensor with such states; a test keeps both
equal to `compute/optim/compact_state.py`."""


def data_parallel_degree(config: RunConfig, world_size: int | None) -> int | None:
    """Return the number of ranks that read different sequences; None if it depends on a world size that is unknown or
    does not fit."""
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
    tensor = layout.tensor_parallel_degree
    context = layout.context_parallel_degree
    expert = layout.expert_parallel_degree
    rules = (
        ("tensor_parallel_degree", tensor, "model.shape.num_attention_heads", shape.num_attention_heads, 1),
        ("tensor_parallel_degree", tensor, "model.shape.vocab_size", shape.vocab_size, 1),
        # Tensor parallelism splits the part of a sequence that context parallelism leaves to a rank.
        ("tensor_parallel_degree", tensor, "training.seq_len", config.training.seq_len, context),
        # A rank takes a piece of the head and one of the tail, so that causal attention costs each rank the same.
        ("context_parallel_degree", context, "training.seq_len", config.training.seq_len, 2),
        ("expert_parallel_degree", expert, "model.shape.n_routed_experts", shape.n_routed_experts, 1),
    )
    for degree_key, degree, key, size, factor in rules:
        if degree > 1 and size % (degree * factor):
            requirement = "must divide" if factor == 1 else f"{factor} times it must divide"
            sizes = [(entry[3], entry[4]) for entry in rules if entry[0] == degree_key]
            remedy = near_values(degree, size, lambda n: n == 1 or not any(s % (n * f) for s, f in sizes))  # noqa: B023
            yield fault(f"`parallelism.{degree_key}`: {requirement} `{key}`; {remedy}")


@rule
def experts_of_the_layout_exist(config: RunConfig, shape: ModelShape) -> Faults:
    """Keys that shard or recompute experts need a layer with experts."""
    if shape.first_k_dense_replace < shape.num_hidden_layers + shape.num_nextn_predict_layers:
        return
    why = "no layer has experts with `model.shape.first_k_dense_replace`"
    if config.parallelism.expert_parallel_degree > 1:
        yield fault(f"`parallelism.expert_parallel_degree`: {why}; take 1")
    if "experts" in config.activation_checkpoint.recompute:
        yield fault(f'`activation_checkpoint.recompute`: {why}; remove "experts"')


@rule
def tensor_parallel_ranks_share_key_heads(config: RunConfig, shape: ModelShape) -> Faults:
    """A tensor-parallel rank has whole key heads, or an equal part of one."""
    degree = config.parallelism.tensor_parallel_degree
    heads = shape.num_key_value_heads
    if shape.is_latent:  # has as many key heads as query heads
        return
    if heads % degree == 0 or (degree % heads == 0 and shape.head_dim % (degree // heads) == 0):
        return
    key = "num_key_value_heads" if degree % heads else "head_dim"
    requirement = "divide it or be a multiple of it" if degree % heads else f"leave equal parts of {heads} key heads"
    fitting = math.gcd(degree, heads) if degree % heads else heads * math.gcd(degree // heads, shape.head_dim)
    yield fault(f"`parallelism.tensor_parallel_degree` with `model.shape.{key}`: must {requirement}; take {fitting}")


@rule
def batch_divides(config: RunConfig, world_size: int | None) -> Faults:
    """The global batch is a multiple of one micro-batch over all data-parallel ranks, if their number is known."""
    local = config.training.local_batch_size
    batch = config.training.global_batch_size
    degree = data_parallel_degree(config, world_size)
    # Without the number of processes, the known divisor of the true degree must divide the batch already.
    divisor = local * (degree or config.parallelism.data_parallel_replicate_degree)
    key = "training.global_batch_size"
    explained = f"times {counted(divisor // local, 'data-parallel rank')}"
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
            f"{f'{below} or ' if below else ''}{below + divisor}",
            key,
            "parallelism",
        )


@rule
def chunks_have_tokens(config: RunConfig) -> Faults:
    """A rank has at least two tokens if they travel in two chunks."""
    layout = config.parallelism
    key = "parallelism.expert_exchange_chunks"
    rows = config.training.local_batch_size
    ranks = layout.context_parallel_degree * layout.tensor_parallel_degree
    shortest = min(
        [config.training.seq_len, *(stage.seq_len or config.training.seq_len for stage in config.data.stages)]
    )
    if (layout.expert_exchange_chunks or 1) > max(tokens := rows * shortest // ranks, 1):
        yield fault(f"`{key}`: a rank has {counted(tokens, 'token')} per micro-batch; take 1")


@rule
def deepep_takes_the_rows(config: RunConfig, shape: ModelShape) -> Faults:
    """Rows that DeepEP sends have a dtype, width and number that it has kernels for, and all tokens are sent at
    once."""
    key = "parallelism.expert_exchange"
    remedy = 'or set parallelism.expert_exchange = "two_level"'
    if config.parallelism.expert_exchange != "deepep" or config.parallelism.expert_parallel_degree == 1:
        return
    if config.training.mixed_precision_param != "bfloat16":
        other = "training.mixed_precision_param"
        yield fault(f'`{key}`: DeepEP sends BF16; set {other} = "bfloat16", {remedy}', other)
    if config.parallelism.expert_exchange_chunks == 2:
        other = "parallelism.expert_exchange_chunks"
        yield fault(f"`{key}`: DeepEP sends all tokens at once; remove {other}, {remedy}", other)
    checkpointing = config.activation_checkpoint
    other = "activation_checkpoint.cpu_checkpointing"
    if checkpointing.cpu_checkpointing and not checkpointing.sends_again(checkpointing.mode):
        why = f"DeepEP's buffer has the rows that selective keeps, which {other} cannot move"
        yield fault(f'`{key}`: {why}; add "exchange" to activation_checkpoint.recompute, {remedy}', other)
    if width := shape.hidden_size % 16:
        other = "model.shape.hidden_size"
        below = shape.hidden_size - width
        why = f"DeepEP sends rows of a multiple of 32 bytes, and {other} is {shape.hidden_size}"
        yield fault(f"`{key}`: {why}; take {below + 16}, {remedy}", other)
    if shape.num_experts_per_tok > 32:
        other = "model.shape.num_experts_per_tok"
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
    fixed = layout.stated_ranks
    shard = layout.data_parallel_shard_degree
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
            f"{more}; start {fixed * shard} processes (NGPU={fixed * shard}), or {other}",
            "parallelism",
        )


def _ranks_to_borrow(config: RunConfig, world_size: int | None) -> int | None:
    """Return the number of ranks that the expert axis borrows from; None if `data_parallel_degree` is None."""
    layout = config.parallelism
    degree = data_parallel_degree(config, world_size)
    if degree is None:
        return None
    shard = degree // layout.data_parallel_replicate_degree
    return shard * layout.context_parallel_degree * layout.tensor_parallel_degree


@rule
def experts_borrow_whole_ranks(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The expert degree divides the ranks that it is borrowed from."""
    degree = config.parallelism.expert_parallel_degree
    ranks = _ranks_to_borrow(config, world_size)
    if ranks is not None and ranks % degree:
        near = near_values(degree, ranks, lambda n: ranks % n == shape.n_routed_experts % n == 0)
        yield fault(
            f"`parallelism.expert_parallel_degree`: must divide shard * context * tensor degrees = {ranks}, from which "
            f"it is borrowed; {near}",
            "parallelism",
        )


@rule
def expert_shards_are_even(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """FSDP2 shards experts evenly: whole experts, or equal parts of each expert."""
    ranks = _ranks_to_borrow(config, world_size)
    ep = config.parallelism.expert_parallel_degree
    rows = [2 * shape.moe_intermediate_size, shape.hidden_size]
    adapter = config.adapter
    if adapter is not None and "experts" in adapter.targets:
        rows.append(adapter.expert_rank or adapter.rank)  # rows of A
    if not ranks or ranks % ep or shape.n_routed_experts % ep:
        return  # unknown, or reported by the rules above

    def is_even(ranks: int, degree: int) -> bool:
        shards = ranks // degree
        whole = shape.n_routed_experts // degree % shards == 0
        return whole or not any(count % shards for count in rows)

    max_ranks = max(shape.n_routed_experts, ep * min(rows))  # more ranks have fewer rows than shards

    if is_even(ranks, ep):
        return
    layout = config.parallelism
    key = "parallelism.expert_parallel_degree"
    candidates = range(1, min(ranks, shape.n_routed_experts) + 1)
    degrees = [d for d in candidates if ranks % d == 0 and shape.n_routed_experts % d == 0 and is_even(ranks, d)]
    remedies = [f"set {key} = {' or '.join(map(str, degrees))}"] if degrees else ["take another number of ranks"]
    # The message names what the config sets: the degree, the shards, or the number of processes.
    subject = f"{key} = {ep}"
    if "expert_parallel_degree" not in layout.model_fields_set:
        key = "parallelism.data_parallel_shard_degree"
        shard = layout.data_parallel_shard_degree
        subject = f"{key} = {shard}"
        if shard == -1 and world_size is not None:
            subject = counted(world_size, "process")
            step = layout.stated_ranks
            ranks_per_step = ranks * layout.stated_ranks // world_size
            current = world_size // step
            max_number = max_ranks // ranks_per_step
            counts = [
                next(
                    (n * step for n in numbers if n * ranks_per_step % ep == 0 and is_even(n * ranks_per_step, ep)),
                    None,
                )
                for numbers in (range(min(current - 1, max_number), 0, -1), range(current + 1, max_number + 1))
            ]
            if any(counts):
                remedies.insert(0, f"start {' or '.join(str(count) for count in counts if count)} processes")
    yield fault(
        f"{subject}: {counted(shape.n_routed_experts // ep, 'expert')} of a layer sharded over {ranks // ep} ranks, "
        f"which divide neither their number nor an expert's {' and '.join(map(str, rows))} rows; "
        f"{', or '.join(remedies)}",
        "parallelism",
    )


@rule
def state_blocks_are_not_cut(config: RunConfig, shape: ModelShape) -> Faults:
    """Tensor parallelism does not split a block of 8-bit states."""
    tensor = config.parallelism.tensor_parallel_degree
    key = "parallelism.tensor_parallel_degree"
    if config.optimizer.state_dtype != "8bit" or tensor == 1:
        return
    cut = [("model.shape.num_attention_heads * head_dim", shape.num_attention_heads * shape.head_dim)]
    if shape.first_k_dense_replace:
        cut.append(("model.shape.intermediate_size", shape.intermediate_size))
    if shape.n_shared_experts:
        width = shape.n_shared_experts * shape.moe_intermediate_size
        cut.append(("model.shape.n_shared_experts * moe_intermediate_size", width))
    cut = [(name, columns) for name, columns in cut if columns * shape.hidden_size >= STATE_MIN_ENTRIES]
    for name, columns in cut:
        if columns % (STATE_BLOCK * tensor):
            near = near_values(
                tensor, tensor, lambda n: all(size % (STATE_BLOCK * n) == 0 or n == 1 for _, size in cut)
            )
            yield fault(
                f"`optimizer.state_dtype`: `{key}` shards {columns} columns ({name}), which must leave multiples of "
                f"{STATE_BLOCK} on each rank; {near} for the degree, or another state_dtype"
            )
