"""Checkpoints in an object store: saved, listed, read and removed as on a disk, whatever interrupts an upload."""

import shutil
from itertools import count

import pytest
import torch
import torch.distributed.checkpoint as dcp

from glm46.commands.checkpoint import checkpoint_command
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError
from glm46.files import store as store_module
from glm46.files.store import Store
from glm46.files.store_lease import LEASE
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.huggingface.stored_folder import fetch_folder
from tests.step_tensors import tensor_hashes
from tests.unit.storage.checkpoint.test_checkpoint_manager import make_tensors, same_bits

memory = pytest.importorskip("fsspec.implementations.memory", reason="not installed; pip install '.[cloud]'")
NUMBERS = count()
FILES = {"__0_0.distcp", ".metadata", "meta.json", "manifest.json"}


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0))


@pytest.fixture
def url() -> str:
    """A prefix without objects."""
    return f"memory://checkpoints/{next(NUMBERS)}"


@pytest.fixture
def host(url, tmp_path):
    """A function that starts a run on a host, by the host's name; at the end all of them have given the prefix back."""
    managers = []

    def start(name: str = "a", keep_latest_k: int = 0) -> CheckpointManager:
        for manager in managers:
            manager.release()
        folder = tmp_path / name
        staging = folder / "staging"
        manager = CheckpointManager(
            folder / "mirror", keep_latest_k=keep_latest_k, node_local_folder=staging, store_url=url
        )
        managers.append(manager)
        return manager

    yield start
    for manager in managers:
        manager.release()


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, make_tensors(step), {"step": step})


def load(manager: CheckpointManager, step: int) -> bool:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(step).items()}
    return manager.load(step, tensors) == {"step": step} and same_bits(tensors, make_tensors(step))


def objects(url: str) -> dict[str, set[str]]:
    """Names of the objects by step folder; those of the prefix itself by an empty name."""
    folders: dict[str, set[str]] = {}
    for name in Store(url).objects():
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, set()).add(file)
    return folders


def test_another_host_goes_on_bit_for_bit_and_old_steps_are_removed(url, host, tmp_path):
    save(host("a", keep_latest_k=2), 1, 2, 3)
    assert objects(url) == {"": {"latest", LEASE}, "step-000002": FILES, "step-000003": FILES}
    assert not list((tmp_path / "a" / "staging").glob("step-*")), "uploaded files are removed from the local disk"
    other = host("b", keep_latest_k=2)
    assert other.newest() == 3
    assert load(other, 3)
    assert (tmp_path / "b" / "mirror" / "step-000003" / "__0_0.distcp").is_symlink(), "the disk is free again"
    save(other, 4)
    assert objects(url) == {"": {"latest", LEASE}, "step-000003": FILES, "step-000004": FILES}


def test_a_background_save_is_published_and_read(url, host):
    manager = host()
    assert manager.save_in_background(5, make_tensors(5), {"step": 5})
    assert [outcome.step for outcome in manager.close()] == [5]
    assert load(host("b"), 5), "a step that was not listed before"


def test_a_second_run_in_a_prefix_is_refused(url, host, tmp_path):
    host()
    with pytest.raises(UserError, match=url):
        CheckpointManager(tmp_path / "b", keep_latest_k=1, node_local_folder=tmp_path / "c", store_url=url)


def test_a_run_that_has_lost_its_lease_publishes_nothing(url, host):
    manager = host()
    save(manager, 1)
    Store(url).write(LEASE, b"{}")
    with pytest.raises(CheckpointError, match="another run"):
        save(manager, 2)
    Store(url).remove([LEASE])
    assert host("b").newest() == 1


@pytest.mark.parametrize("last", sorted(FILES - {"manifest.json"}))
def test_an_interrupted_upload_is_invisible_and_removed_by_the_next_save(last, url, host):
    save(host(), 1, 2)
    store = Store(url)
    for name in sorted(FILES - {"manifest.json"}):
        store.write(f"step-000003/{name}", store.read(f"step-000002/{name}"))
        if name == last:
            break
    manager = host("b")
    assert manager.newest() == 2
    save(manager, 4)
    assert objects(url).keys() == {"", "step-000001", "step-000002", "step-000004"}


@pytest.mark.parametrize("file", sorted(FILES))
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(file, damage, url, host, caplog):
    save(host(), 1, 2)
    store = Store(url)
    name = f"step-000002/{file}"
    content = store.read(name)
    if damage == "missing":
        store.remove([name])
    else:
        store.write(name, content[:-1] if damage == "cut" else content[:-2] + bytes([content[-2] ^ 4]) + content[-1:])
    manager = host("b")
    assert manager.newest() == 1
    assert load(manager, 1)
    is_absent = file == "manifest.json" and damage == "missing"
    assert is_absent or file in caplog.text


def test_a_listing_that_lags_hides_no_checkpoint_and_removes_none(url, host, monkeypatch):
    save(host(), 1, 2)
    find = memory.MemoryFileSystem.find

    def stale(self, *arguments, **options):
        return {path: info for path, info in find(self, *arguments, **options).items() if "step-000002" not in path}

    monkeypatch.setattr(memory.MemoryFileSystem, "find", stale)
    manager = host("b")
    assert manager.newest() == 2
    assert load(manager, 2)

    def without_manifests(self, *arguments, **options):
        infos = find(self, *arguments, **options)
        return {path: info for path, info in infos.items() if not path.endswith("manifest.json")}

    monkeypatch.setattr(memory.MemoryFileSystem, "find", without_manifests)
    save(manager, 3)
    monkeypatch.undo()
    assert objects(url).keys() == {"", "step-000001", "step-000002", "step-000003"}


def test_a_failed_upload_leaves_the_save_on_the_local_disk_and_the_next_start_sends_it(
    url, host, monkeypatch, tmp_path
):
    manager = host()
    save(manager, 1)

    def unreachable(self, *_arguments, **_options):
        raise OSError("SlowDown")

    with monkeypatch.context() as patch:
        patch.setattr(memory.MemoryFileSystem, "put_file", unreachable)
        with pytest.raises(CheckpointError, match="SlowDown"):
            save(manager, 2)
    assert host("b").newest() == 1
    again = host("a")
    assert again.newest() == 2
    assert load(again, 2)
    assert host("b").newest() == 2


def test_a_step_that_is_saved_again_replaces_its_objects(url, host):
    manager = host()
    save(manager, 1)
    manager.save(1, make_tensors(9), {"step": 1})
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(9).items()}
    host("b").load(1, tensors)
    assert same_bits(tensors, make_tensors(9))


def test_later_steps_are_set_aside_when_a_run_leaves_their_branch(url, host):
    save(host(), 1, 2, 3)
    manager = host("b")
    assert load(manager, 1)
    save(manager, 2)
    assert objects(url).keys() == {"", "step-000001", "step-000002", "step-000002.abandoned", "step-000003.abandoned"}
    assert host("c").newest() == 2


def test_torch_reads_a_step_folder_of_the_store(url, host):
    reader = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem").FsspecReader
    save(host(), 7)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(7).items()}
    dcp.load(tensors, storage_reader=reader(f"{url}/step-000007"), no_dist=True)
    assert same_bits(tensors, make_tensors(7))


def test_the_verb_lists_verifies_shows_and_prunes(url, host, capsys):
    save(host(), 1, 2, 3)
    assert checkpoint_command(["list", url]) == 0
    assert capsys.readouterr().out.count("complete") == 3
    assert checkpoint_command(["verify", f"{url}/step-000002"]) == 0
    assert checkpoint_command(["show", f"{url}/step-000002"]) == 0
    assert "model.weight" in capsys.readouterr().out
    store = Store(url)
    name = "step-000001/__0_0.distcp"
    content = store.read(name)
    store.write(name, content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert checkpoint_command(["verify", url]) == 1
    output = capsys.readouterr().out
    assert "DAMAGED" in output and f"{url}/{name}" in output and output.count("verified") == 2
    with pytest.raises(UserError, match="is training"):
        checkpoint_command(["prune", url, "--keep-latest-k", "1", "--yes"])
    store.remove([LEASE])
    assert checkpoint_command(["prune", url, "--keep-latest-k", "1", "--yes"]) == 0
    assert f"{url}/step-000002" in capsys.readouterr().out
    assert objects(url) == {"": {"latest"}, "step-000003": FILES}


def test_the_verb_names_a_url_without_checkpoints(url):
    for address in (url, f"{url}/step-000001"):
        with pytest.raises(UserError) as raised:
            checkpoint_command(["list", address])
        assert url in str(raised.value) and "/tmp" not in str(raised.value)


@pytest.mark.slow
def test_a_run_that_goes_on_on_an_empty_host_changes_no_bit(url, make_config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = {"training": {"steps": 4, "global_batch_size": 4}}
    saves = {"interval": 1, "keep_latest_k": 0, "async_mode": "disabled"}
    local = make_config(job={"dump_folder": str(tmp_path / "local")}, checkpoint=saves, **settings)
    stored = make_config(job={"dump_folder": str(tmp_path / "host")}, checkpoint={**saves, "folder": url}, **settings)
    for config in (local, stored):
        torch.seed()  # as each process begins
        assert train(config) == 0
    steps = [f"step-{step:06d}" for step in range(1, 5)]
    blocks = {f"{step}/blocks": {"__0_0.distcp"} for step in steps}
    assert objects(url) == {"": {"latest"}, **dict.fromkeys(steps, FILES), **blocks}
    store = Store(url)
    for step in steps[2:]:
        store.remove_folder(step, first="manifest.json")
    shutil.rmtree(tmp_path / "host")
    torch.seed()
    assert train(stored) == 0
    last = fetch_folder(f"{url}/{steps[-1]}", "")
    assert tensor_hashes(last.parent, 4) == tensor_hashes(tmp_path / "local" / "checkpoint", 4)
    assert f"checkpoint   {url}/{steps[-1]}" in (tmp_path / "host" / "log.txt").read_text()


def test_a_run_names_a_prefix_of_another_run_and_a_store_that_cannot_be_read(url, make_config, monkeypatch, tmp_path):
    saves = {"interval": 1, "folder": url}
    assert train(make_config(checkpoint=saves, training={"steps": 1})) == 0
    other = make_config(job={"dump_folder": str(tmp_path / "other")}, checkpoint=saves)
    with pytest.raises(UserError, match="name another folder"):
        train(other)

    def refused(self, *_arguments, **_options):
        raise PermissionError(13, "Forbidden")

    monkeypatch.setattr(memory.MemoryFileSystem, "find", refused)
    with pytest.raises(UserError, match="Forbidden") as raised:
        train(other)
    assert f"checkpoint.folder = '{url}'" in str(raised.value)
