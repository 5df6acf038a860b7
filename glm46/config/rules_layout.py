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
        if min(values_of(batch)) < divisor:
            yield fault(
                f"`{key}`: {min(values_of(batch)):g} sequences are less than one micro-batch, {divisor} "
                f"(`training.local_batch_size` {explained}); start the ramp higher or lower local_batch_size",
                "parallelism",
            )
    elif batch is not None and batch % divisor:
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
    """Rows that DeepEP sends have a width and number that it has kernels for, and stay on the device."""
    layout = config.parallelism
    if layout.expert_exchange != "deepep" or layout.expert_parallel_degree == 1:
        return
    text = '`parallelism.expert_exchange`: DeepEP {}, or set parallelism.expert_exchange = "two_level"'
    checkpointing = config.activation_checkpoint
    if checkpointing.cpu_checkpointing and not checkpointing.sends_again(checkpointing.mode):
        why = (
            "has rows that selective keeps in its buffer, and `activation_checkpoint.cpu_checkpointing` cannot move it"
        )
        yield fault(text.format(f'{why}; add "exchange" to activation_checkpoint.recompute'))
    if shape.hidden_size % 16:
        width = -(-shape.hidden_size // 16) * 16
        yield fault(
            text.format(f"sends rows of a multiple of 32 bytes, and `model.shape.hidden_size` is not one; take {width}")
        )
    if shape.num_experts_per_tok > 32:
        yield fault(text.format("sends a token to at most 32 experts; lower `model.shape.num_experts_per_tok`"))


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


@rule
def experts_borrow_whole_ranks(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The expert degree divides the ranks that it is borrowed from, over which FSDP2 shards experts evenly: whole
    experts, or equal parts of each expert."""
    layout = config.parallelism
    degree = data_parallel_degree(config, world_size)
    experts = shape.n_routed_experts
    expert = layout.expert_parallel_degree
    if degree is None or experts % expert:
        return  # unknown, or reported by the metadata of the degree
    shard = degree // layout.data_parallel_replicate_degree
    other_ranks = layout.context_parallel_degree * layout.tensor_parallel_degree
    ranks = shard * other_ranks
    if ranks % expert:
        near = near_values(expert, ranks, lambda number: ranks % number == experts % number == 0)
        yield fault(
            f"`parallelism.expert_parallel_degree`: must divide shard * context * tensor degrees = {ranks}, from which "
            f"it is borrowed; {near}",
            "parallelism",
        )
        return
    rows = [2 * shape.moe_intermediate_size, shape.hidden_size]
    if config.adapter is not None and "experts" in config.adapter.targets:
        rows.append(config.adapter.expert_rank or config.adapter.rank)  # rows of A

    def is_even(ranks: int, expert: int) -> bool:
        if ranks % expert or experts % expert:
            return False
        shards = ranks // expert
        return experts // expert % shards == 0 or not any(count % shards for count in rows)

    if not is_even(ranks, expert):
        largest = max(experts, expert * min(rows)) // other_ranks  # more ranks have fewer rows than shards
        near = near_values(shard, largest, lambda number: is_even(number * other_ranks, expert))
        degrees = [number for number in range(1, min(ranks, experts) + 1) if is_even(ranks, number)]
        also = f", or set parallelism.expert_parallel_degree = {' or '.join(map(str, degrees))}" if degrees else ""
        yield fault(
            f"parallelism.data_parallel_shard_degree = {shard}: {counted(experts // expert, 'expert')} of a layer "
            f"sharded over {ranks // expert} ranks, which divide neither their number nor an expert's "
            f"{' and '.join(map(str, rows))} rows; {near.replace('take', 'start processes for')}{also}",
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
