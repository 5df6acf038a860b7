"""On each of eight ranks: the groups it asks torch for while it builds a network whose first stage has no experts.

All ranks must ask for the same ones in one order: with NCCL torch splits each off the communicator of all ranks, and
waits for a rank that does not ask. Gloo does not wait, so what they ask for is compared; rank 0 prints one row.
"""

import json
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from glm46.compute.distributed.mesh import build_cluster
from glm46.compute.distributed.process import join, leave
from glm46.engine.training.network import build_network
from glm46.run.plan import resolve_plan
from tests.ranks.sharded_layouts import Layout, make_config
from tests.small_run import with_shape


def main(key_heads: int) -> None:
    """Two stages, two shards and tensor parallelism over two ranks, with so many key heads."""
    process, asked, make = join(300), [], distributed_c10d._new_group_with_tag

    def record(ranks, *arguments, **options):
        asked.append(["members" if options.get("use_local_synchronization") else "all", ranks])
        return make(ranks, *arguments, **options)

    config = make_config(Layout(pipeline=2, tensor=2, key_heads=key_heads), layers=2)
    plan = resolve_plan(with_shape(config, num_nextn_predict_layers=0), process.world_size)
    cluster = build_cluster(plan, process)
    with mock.patch.object(distributed_c10d, "_new_group_with_tag", record):
        network = build_network(plan, cluster)
    found = [None] * process.world_size
    is_dense = [block.is_dense for model in network.models for block in model.layers.values()]
    dist.all_gather_object(found, (is_dense, asked))
    if process.is_main:
        print(json.dumps(dict(zip(("dense", "asked"), zip(*found, strict=True), strict=True))))
    leave()
