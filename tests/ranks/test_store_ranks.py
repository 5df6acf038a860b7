"""Ranks that share an object store and nothing else: what each host writes and reads of a checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from glm46.compute.distributed.process import join, leave
from glm46.files.store import Store
from glm46.storage.checkpoint.integrity import read_manifest, records_of
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.harness import run_ranks

pytest.importorskip("fsspec", reason="not installed; pip install '.[cloud]'")
ROWS = 4096
COLUMNS = 48
MANY_COLUMNS = 8 * COLUMNS


def full_tensors(step: int, columns: int = COLUMNS) -> dict[str, torch.Tensor]:
    values = torch.arange(ROWS * columns, dtype=torch.float32).reshape(ROWS, columns) + step
    return {f"model.{number}": values + number for number in range(3)}


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def on_hosts(
    base: str, ranks_of_host: int, steps: tuple[int, ...], name: str, columns: int = COLUMNS
) -> tuple[int | None, int, int, list[str]]:
    """Save steps, then load the newest one. Returns the step, the bytes that this rank has read, those of its
    tensors, and the files that stay on the local disk."""
    process = join(300)
    fetched = 0
    request = Store._call

    def counted(self, *arguments, **options):
        nonlocal fetched
        result = request(self, *arguments, **options)
        fetched += len(result) if isinstance(result, bytes) else 0
        return result

    host = Path(base, f"{name}{process.rank // ranks_of_host}")
    manager = CheckpointManager(
        host / "mirror", keep_latest_k=0, node_local_folder=host / "staging", store_url=f"file://{base}/store"
    )
    for step in steps:
        manager.save(step, sharded(full_tensors(step, columns)), {"step": step})
    Store._call = counted
    tensors = sharded(full_tensors(0, columns))
    size = sum(tensor.to_local().nbytes for tensor in tensors.values())
    newest = manager.newest(tensors=tensors)
    if newest is not None:
        assert manager.load(newest, tensors) == {"step": newest}
        expected = sharded(full_tensors(newest, columns))
        assert all(torch.equal(tensors[key].to_local(), expected[key].to_local()) for key in tensors)
    dist.barrier()
    manager.release()
    leave()
    return newest, fetched, size, sorted(path.name for path in (host / "staging").glob("*"))


def test_a_rank_reads_its_own_bytes_and_any_number_of_hosts_reads_what_four_wrote(tmp_path):
    saved = run_ranks(on_hosts, 4, str(tmp_path), 1, (1, 2), "a")
    for newest, fetched, size, staged in saved:
        assert newest == 2 and fetched <= 1.1 * size
        assert staged == ["latest"], "no host keeps files that were uploaded"
    body, _ = read_manifest(tmp_path / "store" / "step-000002", 2)
    total = sum(record.bytes for record in records_of(body).values())
    # Two ranks of one host share what they read; each of two hosts reads the files of its half.
    for ranks_of_host, name in ((2, "b"), (1, "c")):
        read = run_ranks(on_hosts, 2, str(tmp_path), ranks_of_host, (), name)
        assert all(newest == 2 for newest, *_ in read)
        assert sum(fetched for _, fetched, *_ in read) <= 1.1 * total


@pytest.mark.parametrize("savers", [1, 2])
def test_a_rank_of_another_mesh_reads_the_ranges_of_its_tensors(savers, tmp_path):
    run_ranks(on_hosts, savers, str(tmp_path), 1, (1,), "a", MANY_COLUMNS)
    read = run_ranks(on_hosts, 4, str(tmp_path), 1, (), "b", MANY_COLUMNS)
    for newest, fetched, size, _ in read:
        assert newest == 1
        # More than its values: the list of steps, the index, digests, and parts of blocks at the ends.
        assert size <= fetched <= 1.1 * size
    assert not list(tmp_path.glob("b*/mirror/.ranges/*")), "the disk is free again"


@pytest.mark.parametrize("damage", ["block", "digests"])
def test_damage_in_a_range_sends_all_ranks_to_the_checkpoint_before(damage, tmp_path):
    run_ranks(on_hosts, 1, str(tmp_path), 1, (1, 2), "a", MANY_COLUMNS)
    folder = tmp_path / "store" / "step-000002"
    file = folder / "__0_0.distcp"
    file = file if damage == "block" else folder / "blocks" / file.name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    read = run_ranks(on_hosts, 2, str(tmp_path), 1, (), "b", MANY_COLUMNS)
    # Without its digests a file is fetched whole and compared with the manifest.
    assert [newest for newest, *_ in read] == ([1, 1] if damage == "block" else [2, 2])


def test_damage_in_a_file_of_one_host_sends_all_of_them_to_the_checkpoint_before(tmp_path):
    run_ranks(on_hosts, 2, str(tmp_path), 1, (1, 2), "a")
    file = tmp_path / "store" / "step-000002" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    read = run_ranks(on_hosts, 2, str(tmp_path), 1, (), "b")
    assert [newest for newest, *_ in read] == [1, 1]
