"""Process groups: each is made once, only those that are used, with the timeout of the job."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm46 import compat
from glm46.compute.distributed import groups, mesh
from glm46.config.loader import load_config
from glm46.run.layout import Layout, resolve_layout

TIMEOUT = timedelta(seconds=77)


@pytest.fixture
def world():
    """Begins a job of one rank of many, whose other ranks do nothing."""

    def begin(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield begin
    dist.destroy_process_group()


@pytest.fixture
def made(monkeypatch):
    """The divisions of the ranks for which groups were made, each as the ranks of its parts."""
    found, real = [], mesh.group_of_partition

    def recorded(parts):
        found.append(tuple(map(tuple, parts.tolist())))
        return real(parts) if len(parts) <= 64 else dist.new_group(list(found[-1][0]))  # those of rank 0 are enough

    monkeypatch.setattr(mesh, "group_of_partition", recorded)
    monkeypatch.setattr(groups.compat, "group_timeout", lambda group: TIMEOUT)
    monkeypatch.setattr(groups.compat, "set_group_timeout", lambda timeout, group: None)
    return found


def layout_of(size, **degrees):
    neutral = {"dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    degrees = neutral | degrees
    shard = size // (degrees["pp"] * degrees["dp_replicate"] * degrees["cp"] * degrees["tp"])
    return Layout(dp_shard=shard, **degrees)


@pytest.mark.parametrize(
    ("size", "degrees", "most"),
    [
        (64, {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4}, 7),  # pp, replicas, shards, tp; cp; efsdp, ep
        (64, {"dp_replicate": 2, "ep": 32}, 3),  # shards have the same ranks as experts, of which each rank has some
        (64, {"cp": 64}, 1),  # all ranks
        (64, {"tp": 8, "ep": 8}, 2),  # a node is both
    ],
)
def test_no_group_is_made_twice_and_none_without_use(world, made, size, degrees, most):
    layout = layout_of(size, **degrees)
    world(size)
    meshes = mesh.build_meshes(layout, "cpu")
    assert len(made) == len(set(made)) <= most + (("ep" in degrees or "tp" in degrees) and layout.expert_shards == 1)
    used = {dist.get_process_group_ranks(group)[-1] for group in meshes.groups().values()}
    assert used <= {parts[0][-1] for parts in made}
    assert meshes.dense.mesh_dim_names[-1] == "shard" and meshes.dense.size(-1) == layout.dense_shards


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_run_on_8192_ranks_makes_at_most_eight_groups(world, made, phase):
    config = load_config(Path("train_configs", f"glm46_phase{phase}.toml"))
    layout = resolve_layout(config.parallelism, 8192)
    world(8192)
    mesh.build_meshes(layout, "cpu")
    assert len(made) <= 7  # and the group of all ranks


def test_a_group_has_the_timeout_of_the_job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        of_torch = dist.new_group([0])
        assert compat.group_timeout(of_torch) != TIMEOUT, "the reason for this file"
        assert compat.group_timeout(groups.new_group([0])) == TIMEOUT
        compat.set_group_timeout(TIMEOUT, of_torch)
        assert compat.group_timeout(of_torch) == TIMEOUT
    finally:
        dist.destroy_process_group()


def test_all_ranks_are_the_group_that_exists(world):
    world(4)
    assert groups.group_of_partition(torch.arange(4).view(1, 4)) is dist.group.WORLD
