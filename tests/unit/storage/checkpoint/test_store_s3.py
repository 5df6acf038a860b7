"""The protocol of S3 on the loopback address: a server of moto, read and written through s3fs."""

import logging
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.distributed.checkpoint as dcp

from glm46.commands.checkpoint import checkpoint_command
from glm46.config.errors import UserError
from glm46.files import store as store_module
from glm46.files.durable import hash_file
from glm46.files.store import Store
from glm46.files.store_lease import LEASE, Lease
from glm46.files.threads import map_in_threads
from glm46.storage.checkpoint.manager import CheckpointManager
from tests.unit.storage.checkpoint.test_checkpoint_manager import make_tensors, same_bits

pytest.importorskip("s3fs", reason="not installed; pip install '.[cloud]'")
moto_server = pytest.importorskip("moto.server", reason="not installed; pip install '.[test]'")
SECRET = "wJalrXUtnFEMIK7MDENG"
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket; variables of the environment name its server and the credentials."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(VARIABLES, ("key", SECRET, "us-east-1", f"http://{host}:{port}"), strict=True):
            patch.setenv(name, value)
        Store("s3://checkpoints")._files.mkdir("checkpoints")
        yield "s3://checkpoints"
    server.stop()


def manager_of(folder: Path, url: str, keep_latest_k: int = 2) -> CheckpointManager:
    mirror = folder / "mirror"
    staging = folder / "staging"
    return CheckpointManager(mirror, keep_latest_k=keep_latest_k, node_local_folder=staging, store_url=url)


def test_checkpoints_are_saved_pruned_and_read_on_another_host(bucket, tmp_path, capsys):
    url = f"{bucket}/runs/one"
    manager = manager_of(tmp_path / "a", url)
    for step in (1, 2, 3):
        manager.save(step, make_tensors(step), {"step": step})
    with pytest.raises(UserError, match="is training"):
        manager_of(tmp_path / "b", url)
    manager.release()
    other = manager_of(tmp_path / "b", url)
    assert other.newest() == 3
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(3).items()}
    assert other.load(3, tensors) == {"step": 3} and same_bits(tensors, make_tensors(3))
    other.release()
    names = Store(url).objects()
    assert {name.partition("/")[0] for name in names} == {"latest", "step-000002", "step-000003"}
    assert checkpoint_command(["verify", url]) == 0
    assert capsys.readouterr().out.count("verified") == 2


def test_torch_reads_a_step_folder_of_the_bucket(bucket, tmp_path):
    reader = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem").FsspecReader
    url = f"{bucket}/runs/foreign"
    manager = manager_of(tmp_path, url)
    manager.save(1, make_tensors(1), {})
    manager.release()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(1).items()}
    dcp.load(tensors, storage_reader=reader(f"{url}/step-000001"), no_dist=True)
    assert same_bits(tensors, make_tensors(1))


def test_a_large_file_is_sent_in_parts_and_read_in_ranges(bucket, tmp_path):
    file = tmp_path / "large"
    file.write_bytes(torch.randint(0, 256, (130 << 20,), dtype=torch.uint8).numpy().tobytes())
    store = Store(f"{bucket}/files")
    store.put(file, "large", hash_file(file))
    store.fetch("large", tmp_path / "back", 130 << 20, None)
    assert hash_file(tmp_path / "back") == hash_file(file)


def test_one_of_several_runs_gets_the_lease_at_the_same_moment(bucket, monkeypatch):
    store = Store(f"{bucket}/leases")
    meet = Barrier(4)
    create = Store.create

    def create_together(self, name, content):
        meet.wait(30)
        create(self, name, content)

    monkeypatch.setattr(Store, "create", create_together)
    leases = [Lease(store) for _ in range(4)]
    holders = map_in_threads(Lease.acquire, leases, 4)
    assert sum(holder is None for holder in holders) == 1
    assert sum(lease.is_held() for lease in leases) == 1
    for lease in leases:
        lease.release()
    assert LEASE not in store.objects()


def test_a_refusal_of_the_server_is_one_message_without_credentials(bucket, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as raised:
        Store("s3://no-such-bucket/run").read("a")
    assert "s3://no-such-bucket/run/a" in str(raised.value) and SECRET not in str(raised.value)
    monkeypatch.setattr(store_module, "_PAUSES", (0.0,))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    Store("s3://checkpoints")._files.clear_instance_cache()
    with pytest.raises(OSError) as raised:
        Store("s3://checkpoints/a").read("b")
    assert SECRET not in str(raised.value)
    Store("s3://checkpoints")._files.clear_instance_cache()
