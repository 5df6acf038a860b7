"""Parallelism degrees of the mesh, with -1 resolved."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.config.generation_degrees import Degrees
from glm46.config.parallelism import ParallelismConfig


class ExpertLevels(NamedTuple):
    """Ranks that share the experts of a layer, by host: tokens are sent to hosts first, then inside each host."""

    hosts: int
    ranks_per_host: int
    """Ranks on each host."""


@dataclass(frozen=True)
class Layout:
    """Resolved degrees. Their product, without the expert degree, is the number of processes."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dense_shards(self) -> int:
        """Ranks that FSDP shards a dense parameter over."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP shards an expert over."""
        return max(self.dp_shard * self.cp * self.tp // self.ep, 1)

    @property
    def dp_degree(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def non_dp_degree(self) -> int:
        """Ranks that read the same sequences, over all pipeline stages."""
        return self.pp * self.cp * self.tp

    @property
    def ranks_per_dp_rank(self) -> int:
        """Ranks of one pipeline stage that read the same sequences."""
        return self.cp * self.tp

    @property
    def sequence_pieces(self) -> int:
        """Equal pieces that context and tensor parallelism split a sequence into."""
        return (2 * self.cp if self.cp > 1 else 1) * self.tp

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a rank: ranks with the same number read the same sequences.

        See `build_meshes` for the order of the ranks.
        """
        return rank % (self.world_size // self.pp) // self.ranks_per_dp_rank


def generation_layout(degrees: Degrees, world_size: int) -> Layout:
    """Return the layout of ranks that generate; ``dp_shard`` is the number of ranks with different samples. A rule of
    the config has checked the degrees."""
    replicas = world_size // degrees.ranks
    return Layout(degrees.pipeline_parallel, 1, replicas, 1, degrees.tensor_parallel, degrees.expert_parallel)


def fixed_processes(parallelism: ParallelismConfig) -> int:
    """Return the product of the degrees set by the config: the number of processes, or a divisor of it if
    ``data_parallel_shard_degree`` is -1."""
    return max(parallelism.data_parallel_shard_degree, 1) * parallelism.stated_ranks


def smallest_world(parallelism: ParallelismConfig) -> int:
    """Return the smallest number of processes for the config: the expert degree must divide the product of the
    sharding, context and tensor degrees."""
    fixed = fixed_processes(parallelism)
    if parallelism.data_parallel_shard_degree != -1:
        return fixed
    cp_times_tp = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    least_dp_shard = math.lcm(cp_times_tp, parallelism.expert_parallel_degree) // cp_times_tp
    return fixed * least_dp_shard


def resolve_layout(parallelism: ParallelismConfig, world_size: int) -> Layout:
    """Resolve the degrees on this many processes; a rule of the config has checked that their product is this
    number."""
    fixed = fixed_processes(parallelism)
    is_open = parallelism.data_parallel_shard_degree == -1
    assert world_size % fixed == 0 and (is_open or world_size == fixed), f"{world_size} processes, degrees of {fixed}"
    return Layout(
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=world_size // fixed if is_open else parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
    )


def expert_levels(parallelism: ParallelismConfig, host_ranks: int | None) -> ExpertLevels | None:
    """Return the levels of the exchange of tokens with experts; None for one exchange among all ranks that share them.

    Args:
        host_ranks: ranks of this run on each host; 0 if hosts have unequal numbers; None if unknown. Unknown ranks are
            assumed to be on one host if two levels or DeepEP are configured.

    Raises:
        UserError: two levels or DeepEP are configured, and the ranks that share experts are neither whole hosts nor
            inside one.
    """
    ranks = parallelism.expert_parallel_degree
    exchange = parallelism.expert_exchange
    if ranks == 1 or exchange == "all_to_all" or (host_ranks is None and exchange == "auto"):
        return None
    if (reason := why_not_in_levels(ranks, host_ranks)) is None:
        ranks_per_host = min(host_ranks or ranks, ranks)
        return ExpertLevels(ranks // ranks_per_host, ranks_per_host)
    if exchange == "auto":
        return None
    raise UserError(f'parallelism.expert_exchange = "{exchange}": {reason}; use "all_to_all"')


def why_not_in_levels(ranks: int, host_ranks: int | None) -> str | None:
    """Explain why the ranks that share experts cannot exchange tokens in two levels; None if they can. Arguments as in
    `expert_levels`."""
    ranks_per_host = ranks if host_ranks is None else min(host_ranks, ranks)
    if ranks_per_host:  # 0: hosts have unequal numbers
        are_whole_hosts = ranks % ranks_per_host == 0
        divides_a_host = (host_ranks or ranks) % ranks_per_host == 0
        if are_whole_hosts and divides_a_host:
            return None
    actual = f"each host has {host_ranks} ranks" if host_ranks else "hosts have unequal numbers of ranks"
    problem = (
        f"the {ranks} ranks that share experts (parallelism.expert_parallel_degree) are not whole hosts, or on one"
    )
    return f"{problem}: {actual}"
