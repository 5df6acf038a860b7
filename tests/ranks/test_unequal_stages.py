"""Ranks of unequal pipeline stages make process groups together.

All ranks must ask for the same ones in one order: with NCCL torch splits each off the communicator of all ranks, and
waits for a rank that does not ask. Gloo does not wait, so what they ask for is compared.
"""

from unittest import mock

import pytest
from torch.distributed import distributed_c10d

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.engine.training.network import build_network
from glm46.run.plan import resolve_plan
from tests.builders import with_shape
from tests.harness import run_ranks
from tests.ranks.sharded_layouts import Layout, make_config


def groups_asked_for(key_heads: int) -> tuple[list[bool], list]:
    """On each rank: which blocks are dense, and the groups.

    Two stages, two shards and tensor parallelism over two ranks, with so many key heads.
    """
    process, asked, make = join(300), [], distributed_c10d._new_group_with_tag

    def record(ranks, *arguments, **options):
        asked.append(["members" if options.get("use_local_synchronization") else "all", list(ranks)])
        return make(ranks, *arguments, **options)

    config = make_config(Layout(pipeline=2, tensor=2, key_heads=key_heads), layers=2)
    plan = resolve_plan(with_shape(config, num_nextn_predict_layers=0), process.world_size)
    cluster = build_cluster(plan, process)
    with mock.patch.object(distributed_c10d, "_new_group_with_tag", record):
        network = build_network(plan, cluster)
    leave()
    is_dense = [block.is_dense for model in network.models for block in model.layers.values()]
    return is_dense, asked


@pytest.mark.parametrize("key_heads", [4, 1])
def test_every_rank_asks_for_the_same_groups_in_one_order(key_heads):
    dense, asked = zip(*run_ranks(groups_asked_for, 8, key_heads), strict=True)
    assert [*dense] == [[True]] * 4 + [[False]] * 4
    assert [*asked] == [asked[0]] * 8
    # Muon's for the matrices of the dense stage, which its four ranks share; beside them those that share a key head.
    assert ["all", [0, 1, 2, 3]] in asked[0] and (["all", [6, 7]] in asked[0]) == (key_heads == 1)
