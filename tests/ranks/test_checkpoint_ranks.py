"""Several gloo ranks: a sharded state comes back bit for bit on another mesh; a fault of one rank is known to all."""

import os
import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from glm46.compute.distributed.process import join, leave
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError
from glm46.storage.checkpoint import save as save_module
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.harness import run_ranks

WIDTH = 10  # not divisible by 4, so shards are uneven


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)  # fewer rows than ranks: one shard of four is empty
        self.down = nn.Linear(3, WIDTH)
        self.wide = nn.Linear(WIDTH, 16)
        self.narrow = nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.narrow(self.wide(x + self.down(self.up(x).relu())).relu())


def reference(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


def parallel(model: nn.Module, world: int, tensor_parallel: int, replicas: int = 1) -> nn.Module:
    """FSDP2, alone or over tensor parallelism or with replicas."""
    shards = world // tensor_parallel // replicas
    mesh = init_device_mesh("cpu", (replicas, shards, tensor_parallel), mesh_dim_names=("replica", "shard", "tensor"))
    if tensor_parallel > 1:
        for block in model:
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    data_mesh = mesh["replica", "shard"] if replicas > 1 else mesh["shard"]
    for block in model:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return model


def state_of(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    tensors |= {f"optimizer.{name}": torch.full_like(p, 0.5) * p.detach() for name, p in model.named_parameters()}
    tensors["bias"] = torch.arange(4.0)
    tensors[f"rng.rank{rank}"] = torch.full((5,), rank, dtype=torch.uint8)
    return tensors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equals_reference(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    expected = dict(reference().named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[name]), name
        assert torch.equal(whole(tensors[f"optimizer.{name}"]), 0.5 * expected[name]), name


def save_parallel(folder: Path, rank: int, world: int, step: int, tensor_parallel: int, replicas: int = 1) -> None:
    model = parallel(reference(), world, tensor_parallel, replicas)
    CheckpointManager(folder, keep_latest_k=0).save(step, state_of(model, rank), {"step": step})


def load_parallel(folder: Path, rank: int, world: int, step: int, tensor_parallel: int, replicas: int = 1) -> None:
    model = parallel(reference(seed=1), world, tensor_parallel, replicas)
    manager = CheckpointManager(folder, keep_latest_k=0)
    tensors = state_of(model, rank)
    tensors[f"rng.rank{rank}"].fill_(99)
    assert manager.load(step, tensors, optional=["rng."]) == {"step": step}
    check_equals_reference(model, tensors)
    assert tensors["bias"].tolist() == [0, 1, 2, 3]
    assert tensors[f"rng.rank{rank}"].tolist() == [rank] * 5


def save_stages(folder: Path, rank: int) -> None:
    """Pipeline ranks hold different names, experts are sharded on one axis only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "expert"))
    stage = rank // 2
    local = distribute_tensor(torch.arange(12.0).view(6, 2) + 100 * stage, mesh["expert"], [Shard(0)])
    across = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Replicate(), Shard(1)])
    tensors = {f"stage{stage}.experts": local, "shared": across}
    manager = CheckpointManager(folder, keep_latest_k=0)
    manager.save(50, tensors, {})
    for tensor in tensors.values():
        tensor.to_local().zero_()
    manager.load(50, tensors)
    assert torch.equal(whole(local), torch.arange(12.0).view(6, 2) + 100 * stage)
    assert torch.equal(whole(across), torch.arange(8.0).view(2, 4))


def load_stages(folder: Path, world: int) -> None:
    """What pipeline and expert ranks saved, on one or two ranks that hold everything, sharded another way."""
    tensors = {"stage0.experts": torch.zeros(6, 2), "stage1.experts": torch.zeros(6, 2), "shared": torch.zeros(2, 4)}
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(1)]) for name, tensor in tensors.items()}
    CheckpointManager(folder, keep_latest_k=0).load(50, tensors)
    for stage in range(2):
        assert torch.equal(whole(tensors[f"stage{stage}.experts"]), torch.arange(12.0).view(6, 2) + 100 * stage)
    assert torch.equal(whole(tensors["shared"]), torch.arange(8.0).view(2, 4))


def fault_of(action) -> Exception | None:
    try:
        action()
    except (CheckpointError, UserError) as error:
        return error
    return None


def one_rank_fails(folder: Path, rank: int) -> None:
    manager = CheckpointManager(folder, keep_latest_k=0)
    manager.save(1, {"w": torch.ones(3)}, {})
    # Integers, because the values of floats are looked at before anything is written.
    unwritable = torch.ones(3, dtype=torch.int64, device="meta" if rank == 2 else "cpu")
    broken = {"w": torch.ones(3), f"only{rank}": unwritable}
    error = fault_of(lambda: manager.save(2, broken, {}))
    assert isinstance(error, CheckpointError) and len(error.faults) == 1 and "rank 2, writing tensors" in str(error)
    error = fault_of(lambda: manager.save(2, {"w": torch.full((3,), float(rank == 3))}, {}))
    assert isinstance(error, CheckpointError) and "w differs from the one of rank 0" in str(error)
    error = fault_of(lambda: manager.save(2, {"w": torch.ones(3)}, {"not json": object()}))
    assert (
        isinstance(error, CheckpointError)
        and len(error.faults) == 4
        and "rank 0, encoding meta as JSON: TypeError" in str(error)
    )
    assert manager.newest() == 1
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000001"]
    target = {"w": torch.zeros(3)} | ({"absent": torch.zeros(1)} if rank == 3 else {})
    error = fault_of(lambda: manager.load(1, target))
    assert isinstance(error, UserError) and "lacks absent" in str(error)
    assert target["w"].tolist() == [0, 0, 0]  # no rank loads anything when one cannot


def background_saves(folder: Path, rank: int) -> None:
    """Training changes the tensors at once; a rank that fails is known to all and the next save works."""
    manager = CheckpointManager(folder, keep_latest_k=0)
    model = parallel(reference(), 4, tensor_parallel=2)
    assert manager.save_in_background(1, state_of(model, rank), {"step": 1})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
        whole(model(torch.ones(2, WIDTH)))  # collectives of training beside those of the save
    outcome = take(manager)
    assert [one.step for one in outcome] == [1] and outcome[0].stall_seconds < outcome[0].save_seconds
    load_parallel(folder, rank, 4, step=1, tensor_parallel=1)
    unequal = {"w": torch.full((3,), float(rank == 3))}
    assert manager.save_in_background(2, unequal, {})
    assert "w differs from the one of rank 0" in str(fault_of(lambda: take(manager)))
    assert manager.save_in_background(3, {"w": torch.ones(3)}, {})
    assert [one.step for one in manager.close()] == [3]
    assert manager.newest() == 3


def node_local_saves(folder: Path, rank: int) -> None:
    """Two nodes of two ranks: files go to the node's disk, from there to the shared folder; a cut gathering goes on."""
    local, shared = folder / f"node{rank // 2}", folder / "shared"
    manager = CheckpointManager(shared, keep_latest_k=0, node_local_folder=local)
    assert manager.newest() is None
    model = parallel(reference(), 4, tensor_parallel=1)
    assert manager.save_in_background(4, state_of(model, rank), {"step": 4})
    assert [one.step for one in take(manager)] == [4]
    load_parallel(shared, rank, 4, step=4, tensor_parallel=2)
    assert not list(local.glob("step-*"))
    # The shared storage is away: the save stays on the nodes, and the next start brings it over.
    dist.barrier()
    if rank == 0:
        shared.rename(folder / "away")
        shared.write_text("no folder")
    dist.barrier()
    assert manager.save_in_background(8, state_of(model, rank), {"step": 8})
    assert "shared storage" in str(fault_of(lambda: take(manager)))
    assert sorted(path.name for path in (local / "step-000008").glob("*.distcp")) == [
        f"__{one}_0.distcp" for one in range(4) if one // 2 == rank // 2
    ]
    dist.barrier()
    if rank == 0:
        shared.unlink()
        (folder / "away").rename(shared)
    dist.barrier()
    assert CheckpointManager(shared, keep_latest_k=0, node_local_folder=local).newest() == 8
    load_parallel(shared, rank, 4, step=8, tensor_parallel=1)
    assert not list(local.glob("step-*"))


def writer_threads_raise(folder: Path, rank: int) -> None:
    """An error in the thread of one rank, between two stages or in one: all ranks report it, the next save works."""
    manager = CheckpointManager(folder, keep_latest_k=0)
    tensors = {f"own{rank}": torch.full((3,), float(rank)), "all": torch.ones(5)}
    cases = (
        (2, "write_tensors", SystemExit(3)),
        (0, "write_tensors", KeyboardInterrupt()),
        (0, "publish", SystemExit(3)),
        (1, "write_tensors", RuntimeError("no thread")),
    )
    for number, (victim, name, error) in enumerate(cases):
        step, original = 2 * number + 1, getattr(save_module, name)

        def failing(*arguments, victim=victim, error=error, original=original):
            if rank == victim:
                raise error
            return original(*arguments)

        setattr(save_module, name, failing)
        assert manager.save_in_background(step, tensors, {})
        fault = str(fault_of(lambda: take(manager)))
        dist.barrier()
        setattr(save_module, name, original)
        assert f"rank {victim}, " in fault and type(error).__name__ in fault, fault
        assert manager.poll() == [] and manager.newest() == (step - 1 if number else None)
        assert manager.save_in_background(step + 1, tensors, {})
        assert [one.step for one in take(manager)] == [step + 1]
    assert manager.close() == [] and manager.newest() == 2 * len(cases)


def take(manager: CheckpointManager) -> list:
    while not (ended := manager.poll()):
        time.sleep(0.002)
    return ended


def exchanges_do_not_grow(folder: Path, rank: int) -> None:
    """What each rank gets from each other has no record of each tensor: on thousands of ranks these are gigabytes."""
    exchange, sent = dist.all_gather_object, {}

    def counted(values, value, group=None):
        sent[blocks] = sent.get(blocks, 0) + len(pickle.dumps(value))
        exchange(values, value, group=group)

    for blocks in (1, 20):
        model = parallel(nn.Sequential(*[Block() for _ in range(blocks)]), 4, tensor_parallel=1)
        tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
        tensors[f"rng.rank{rank}"] = torch.zeros(5, dtype=torch.uint8)
        manager = CheckpointManager(folder, keep_latest_k=0)
        dist.all_gather_object = counted
        manager.save(blocks, tensors, {})
        manager.load(blocks, tensors)
        dist.all_gather_object = exchange
    assert sent[20] < sent[1] + 50, sent  # digits of sizes in the record of a file


def damage_is_agreed(folder: Path, rank: int) -> None:
    manager = CheckpointManager(folder, keep_latest_k=0)
    for step in (1, 2):
        manager.save(step, {f"rank{rank}": torch.full((4,), step * 10.0 + rank)}, {})
    if rank == 1:
        path = folder / "step-000002" / "__3_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    dist.barrier()
    assert manager.newest() == 1
    error = fault_of(lambda: manager.load(2, {f"rank{rank}": torch.zeros(4)}))
    assert isinstance(error, UserError) and "__3_0.distcp: SHA-256" in str(error)


def run_four(rank: int, folder: Path) -> None:
    save_parallel(folder / "fsdp", rank, 4, step=4, tensor_parallel=1)
    load_parallel(folder / "fsdp", rank, 4, step=4, tensor_parallel=1)
    load_parallel(folder / "fsdp", rank, 4, step=4, tensor_parallel=2)
    save_parallel(folder / "tensor", rank, 4, step=4, tensor_parallel=2)
    load_parallel(folder / "tensor", rank, 4, step=4, tensor_parallel=4)
    load_parallel(folder / "tensor", rank, 4, step=4, tensor_parallel=1, replicas=2)
    save_parallel(folder / "hybrid", rank, 4, step=4, tensor_parallel=1, replicas=2)
    load_parallel(folder / "hybrid", rank, 4, step=4, tensor_parallel=1)
    save_stages(folder / "stages", rank)
    exchanges_do_not_grow(folder / "exchanges", rank)
    one_rank_fails(folder / "faults", rank)
    damage_is_agreed(folder / "damage", rank)
    background_saves(folder / "background", rank)
    writer_threads_raise(folder / "threads", rank)
    node_local_saves(folder / "nodes", rank)


def run_two(rank: int, folder: Path) -> None:
    load_parallel(folder / "fsdp", rank, 2, step=4, tensor_parallel=1)
    load_parallel(folder / "tensor", rank, 2, step=4, tensor_parallel=2)
    load_parallel(folder / "tensor", rank, 2, step=4, tensor_parallel=1)
    load_parallel(folder / "hybrid", rank, 2, step=4, tensor_parallel=2)
    load_stages(folder / "stages", 2)
    save_parallel(folder / "fsdp", rank, 2, step=5, tensor_parallel=1)
    assert CheckpointManager(folder / "fsdp", keep_latest_k=0).newest() == 5


def on_rank(folder: Path) -> None:
    """All cases of this number of ranks."""
    process = join(300)
    {4: run_four, 2: run_two}[process.world_size](process.rank, folder)
    dist.barrier()
    leave()


def test_round_trips_across_meshes_from_four_ranks_to_two_to_one_and_faults_known_to_all(tmp_path):
    for world in (4, 2):
        run_ranks(on_rank, world, tmp_path)
    for name, step in (("fsdp", 4), ("fsdp", 5), ("tensor", 4), ("hybrid", 4)):
        model = reference(seed=1)
        tensors = state_of(model, rank=0)
        CheckpointManager(tmp_path / name, keep_latest_k=0).load(step, tensors, optional=["rng."])
        check_equals_reference(model, tensors)
    load_stages(tmp_path / "stages", 1)
    stored = sum(path.stat().st_size for path in (tmp_path / "hybrid" / "step-000004").iterdir())
    assert stored < 2 * sum(path.stat().st_size for path in (tmp_path / "fsdp" / "step-000004").iterdir())
    assert os.listdir(tmp_path / "stages") and not list(tmp_path.glob("*/*.tmp"))
