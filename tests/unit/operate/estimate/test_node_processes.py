"""Processes of each node."""

import pytest

from glm46.config.parallelism import ParallelismConfig
from glm46.operate.estimate.machine import Gpu, Machine, processes_of_node

GIB = 2**30


def machine(gpus: int, nodes: int, cores: int = 8) -> Machine:
    return Machine(cores, 999 * GIB, 900 * GIB, (Gpu("NVIDIA H100", 79 * GIB),) * gpus, nodes)


@pytest.mark.parametrize(("gpus", "nodes", "degrees", "processes"), [
    (0, 1, {}, 2), (0, 3, {}, 2), (8, 1, {}, 8), (8, 2, {}, 8), (8, 16, {}, 8),
    (8, 1, {"data_parallel_replicate_degree": 3}, 6), (8, 2, {"data_parallel_replicate_degree": 3}, 6),
    (8, 3, {"data_parallel_replicate_degree": 3}, 8), (8, 3, {"data_parallel_replicate_degree": 6}, 8),
    (0, 1, {"data_parallel_replicate_degree": 3}, 3), (0, 2, {"data_parallel_replicate_degree": 4}, 2),
    (8, 2, {"expert_parallel_degree": 16}, 8), (8, 2, {"data_parallel_shard_degree": 16}, 8),
    (8, 2, {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}, 4),
    (0, 2, {"data_parallel_shard_degree": 1}, 1),
])  # fmt: skip
def test_processes_of_each_node_follow_its_gpus_and_the_degrees_over_all_nodes(gpus, nodes, degrees, processes):
    assert processes_of_node(ParallelismConfig(**degrees), machine(gpus, nodes)) == processes


def test_a_node_of_one_core_has_one_process():
    assert processes_of_node(ParallelismConfig(), machine(0, 2, cores=1)) == 1
