"""The plan for a real layout: one pipeline stage of GLM-4.6 on 512 ranks, built on one machine without memory."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from glm46.compat import StridedShard
from glm46.compute.optim.muon_layout import tensor_layout
from glm46.compute.optim.muon_plan import PlannedParameter, make_plan
from glm46.config.presets import PRESETS
from glm46.operate.estimate.muon_cost import exchanged
from glm46.run.flops import newton_schulz_flops
from tests.unit.compute.optim.muon_reference import entries_per_rank, entries_received

WORLD, TP, EP, LAYERS = 512, 8, 32, 6
GLM = PRESETS["GLM-4.6"]


def meta(shape, mesh, placements):
    """A sharded tensor without memory; only its shape and placements matter."""
    local = list(shape)
    for size, placement in zip(mesh.shape, placements, strict=True):
        assert local[placement.dim] % size == 0
        local[placement.dim] //= size
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.empty(local, device="meta"), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def stage_requests():
    """The matrices of some sparse layers: attention under FSDP and TP, experts under EP with their rows cut."""
    dense = init_device_mesh("cpu", (WORLD // TP, TP))
    sparse = init_device_mesh("cpu", (WORLD // EP, EP))
    column, row, inside = (StridedShard(0, split_factor=TP), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))
    width, heads = GLM.hidden_size, GLM.num_attention_heads * GLM.head_dim
    keys, experts, narrow = GLM.num_key_value_heads * GLM.head_dim, GLM.n_routed_experts, GLM.moe_intermediate_size
    tensors = {
        "q": meta((heads, width), dense, column),
        "k": meta((keys, width), dense, column),
        "v": meta((keys, width), dense, column),
        "o": meta((width, heads), dense, row),
        "gate_up": meta((experts, 2 * narrow, width), sparse, inside),
        "down": meta((experts, width, narrow), sparse, inside),
    }
    layouts = {name: tensor_layout(tensor) for name, tensor in tensors.items()}  # the same in all layers
    blocks = {name: (tensor.shape[-2],) for name, tensor in tensors.items()} | {"gate_up": (narrow, narrow)}
    return [
        PlannedParameter(f"{layer}.{name}", layouts[name], blocks[name]) for layer in range(LAYERS) for name in tensors
    ]


def plan_of(rank):
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        return make_plan(stage_requests(), steps=5, width=2)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def plans():
    # Ranks 0 and 3 share all dense groups and differ in their experts; 0 and 32 share experts.
    return {rank: plan_of(rank) for rank in (0, 3, 32)}


def units(plan, kind):
    return [
        (b.ranks, u) for b in plan.buckets for u in b.units if (u.name.split(".")[1] in ("q", "k", "v", "o")) == kind
    ]


def test_each_matrix_has_one_owner_that_holds_a_part(plans):
    for plan in plans.values():
        count = Counter((unit.name, unit.matrix, unit.rows) for bucket in plan.buckets for unit in bucket.units)
        assert set(count.values()) == {1}
        assert len(count) == LAYERS * (4 + 3 * GLM.n_routed_experts // EP)
        assert not plan.local
        assert all(unit.parts[unit.owner] is not None for bucket in plan.buckets for unit in bucket.units)


def test_all_ranks_of_a_group_have_the_same_plan(plans):
    assert units(plans[0], True) == units(plans[3], True) == units(plans[32], True)
    assert units(plans[0], False) == units(plans[32], False)
    assert {ranks for ranks, _ in units(plans[0], False)} == {tuple(range(0, WORLD, EP))}
    assert {ranks for ranks, _ in units(plans[3], False)} == {tuple(range(3, WORLD, EP))}


def test_gate_and_up_of_one_expert_are_two_matrices_and_every_rank_receives(plans):
    narrow = GLM.moe_intermediate_size
    fused = [unit for _, unit in units(plans[0], False) if unit.name == "0.gate_up" and unit.matrix == 0]
    assert {unit.rows for unit in fused} == {(0, narrow), (narrow, 2 * narrow)}
    assert all(unit.shape == (narrow, GLM.hidden_size) for unit in fused)
    received = entries_per_rank(plans[0])
    assert len(received) == WORLD and min(received.values()) > 0


def test_total_bytes_are_the_lower_bound(plans):
    for bucket_ranks, dense in ((WORLD, True), (WORLD // EP, False)):
        chosen = [(ranks, unit) for ranks, unit in units(plans[0], dense)]
        assert {len(ranks) for ranks, _ in chosen} == {bucket_ranks}
        buckets = [bucket for bucket in plans[0].buckets if len(bucket.ranks) == bucket_ranks]
        total = sum(entries_received(bucket, member) for bucket in buckets for member in range(bucket_ranks))
        counted = [way for bucket in buckets for member in range(bucket_ranks) for way in exchanged(bucket, member)]
        assert sum(sent for sent, _ in counted) == sum(received for _, received in counted) == total
        held = sum(unit.size(unit.owner) for _, unit in chosen)
        whole = sum(unit.shape[0] * unit.shape[1] for _, unit in chosen)
        assert total == 2 * (whole - held)


def test_load_is_balanced_as_well_as_whole_matrices_allow(plans):
    loads = Counter()
    for ranks, unit in units(plans[0], False):
        loads[ranks[unit.owner]] += newton_schulz_flops(*unit.shape, 5)
    # Ninety expert matrices of one cost over sixteen ranks: six on the fullest.
    assert max(loads.values()) == 6 * newton_schulz_flops(GLM.moe_intermediate_size, GLM.hidden_size, 5)
