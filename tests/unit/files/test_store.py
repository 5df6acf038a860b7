"""Objects of a store over a connection with faults, its addresses, and the lease of a prefix."""

import json
import os
import time
from itertools import count
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from glm46.config.section import StoredRunFolder
from glm46.config.store_address import is_store_address, store_url
from glm46.files import store as store_module
from glm46.files import store_lease
from glm46.files.durable import hash_file
from glm46.files.store import Store, StoreError
from glm46.files.store_lease import LEASE, Lease
from tests.processes import wait_until

memory = pytest.importorskip("fsspec.implementations.memory", reason="not installed; pip install '.[cloud]'")
CONTENT = os.urandom(3000)
NUMBERS = count()


@pytest.fixture
def store(monkeypatch):
    """An empty store; pauses between attempts take no time, and a block has 1,000 bytes."""
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(store_module, "_BLOCK_BYTES", 1000)
    return Store(f"memory://bucket/{next(NUMBERS)}")


def plant(monkeypatch, method: str, times: int, fault) -> list:
    """Give a method of the connection a fault the first times; returns its calls."""
    calls = []
    original = getattr(memory.MemoryFileSystem, method)

    def faulty(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) <= times:
            return fault(lambda: original(self, *arguments, **options))
        return original(self, *arguments, **options)

    monkeypatch.setattr(memory.MemoryFileSystem, method, faulty)
    return calls


def raising(error):
    def fault(_call):
        raise error

    return fault


def flipped(call):
    return bytes([call()[0] ^ 1]) + call()[1:]


RAISED = {
    "timeout": TimeoutError("read timed out"),
    "500": OSError(5, "An error occurred (500): Internal Server Error"),
    "503": OSError(16, "Please reduce your request rate (SlowDown)"),
    "reset": ConnectionResetError("connection reset by peer"),
    "library": RuntimeError("EndpointConnectionError"),
}
ANSWERS = {**{name: raising(error) for name, error in RAISED.items()}, "truncated": lambda call: call()[:-1]}


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_read_is_repeated_until_it_is_whole(fault, store, tmp_path, monkeypatch):
    store.write("a", CONTENT)
    plant(monkeypatch, "cat_file", 2, ANSWERS[fault])
    store.fetch("a", tmp_path / "a", len(CONTENT), None)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("fault", RAISED)
def test_an_upload_is_repeated(fault, store, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(CONTENT)
    plant(monkeypatch, "put_file", 2, raising(RAISED[fault]))
    store.put(file, "folder/a", hash_file(file))
    assert store.read("folder/a") == CONTENT


def test_corrupted_bytes_are_fetched_and_sent_again(store, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(CONTENT)
    record = hash_file(file)
    calls = plant(monkeypatch, "cat_file", 1, flipped)
    store.put(file, "a", record)
    assert len(calls) == 6, "read back, sent again and read back"
    calls = plant(monkeypatch, "cat_file", 1, flipped)
    store.fetch("a", tmp_path / "b", record.bytes, record.sha256)
    assert (tmp_path / "b").read_bytes() == CONTENT


def test_an_equal_object_is_not_sent_again(store, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(CONTENT)
    store.put(file, "a", hash_file(file))
    calls = plant(monkeypatch, "put_file", 0, None)
    store.put(file, "a", hash_file(file))
    assert not calls


@pytest.mark.parametrize("fault", ["503", "truncated", "flipped"])
def test_a_fault_that_stays_is_named_and_leaves_no_file(fault, store, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(CONTENT)
    record = hash_file(file)
    store.put(file, "a", record)
    plant(monkeypatch, "cat_file", 1000, flipped if fault == "flipped" else ANSWERS[fault])
    with pytest.raises(StoreError) as raised:
        store.fetch("a", tmp_path / "b", record.bytes, record.sha256)
    assert raised.value.filename == store.url_of("a")
    expected = {"503": "SlowDown", "truncated": "999 of 1000 bytes", "flipped": record.sha256}
    assert expected[fault] in raised.value.strerror
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(StoreError):
        store.put(file, "c", record)


def test_what_cannot_change_is_not_tried_again(store, monkeypatch):
    for error in (PermissionError(13, "Forbidden"), FileNotFoundError(2, "NoSuchBucket")):
        calls = plant(monkeypatch, "cat_file", 1000, raising(error))
        with pytest.raises(type(error)):
            store.read("a")
        assert len(calls) == 1
        monkeypatch.undo()


def test_a_request_that_hangs_is_tried_again(store, monkeypatch):
    monkeypatch.setattr(store_module.Store._call, "__kwdefaults__", {"seconds": 0.2})
    store.write("a", CONTENT)
    plant(monkeypatch, "cat_file", 1, lambda call: time.sleep(5) or call())
    assert store.read("a") == CONTENT


def test_a_bug_is_no_fault_of_the_store(store, monkeypatch):
    calls = plant(monkeypatch, "cat_file", 1000, raising(TypeError("unexpected argument")))
    with pytest.raises(TypeError):
        store.read("a")
    assert len(calls) == 1


SECRET = "wJalrXUtnFEMIK7MDENG"


@pytest.mark.parametrize(
    "text",
    [
        f"AWSSecretAccessKey={SECRET} is not valid",
        f"GET https://bucket.example/a?X-Amz-Signature={SECRET}&X-Amz-Expires=1",
        f"{{'token': '{SECRET}'}}",
        f"account_key: {SECRET}",
    ],
)
def test_no_message_has_a_credential(text, store, monkeypatch):
    plant(monkeypatch, "cat_file", 1000, raising(OSError(text)))
    with pytest.raises(StoreError) as raised:
        store.read("a")
    assert SECRET not in str(raised.value) and store.url in str(raised.value)


def test_addresses():
    for address in ("s3://bucket/runs/a", "gs://b/c", "abfs://box@account.dfs.core.windows.net/a", "file:///tmp/a"):
        assert is_store_address(address) and store_url(address) == address
        assert store_url(str(Path(address))) == address, "`Path` merges two slashes to one"
        assert store_url(address + "/") == address
    for address in ("outputs/a", "/a/b", "C:/a", "hf://owner/name", "https://host/a", "s3:", "builtin:python_stdlib"):
        assert not is_store_address(address)
    for address in (f"s3://key:{SECRET}@host/a", "zip://a::s3://b/c", "s3://b/../c", "s3://b/a?versionId=1"):
        with pytest.raises(ValueError) as raised:
            store_url(address)
        assert SECRET not in str(raised.value)


def test_a_folder_of_a_run_may_be_a_url():
    check = TypeAdapter(StoredRunFolder).validate_python
    assert check("s3://bucket/run/") == "s3://bucket/run"
    assert check("checkpoint") == "checkpoint"
    for value in ("../a", "https://host/a", "hf://owner/name"):
        with pytest.raises(ValueError):
            check(value)


def test_objects_are_listed_moved_and_removed(store):
    for name in ("step/a", "step/b", "step/last", "other"):
        store.write(name, name.encode())
    assert store.objects("step/").keys() == {"step/a", "step/b", "step/last"}
    assert store.objects()["other"].bytes == 5
    assert store.size("step/a") == 6 and store.size("missing") is None
    store.move_folder("step", "aside", first="last")
    assert store.objects().keys() == {"aside/a", "aside/b", "aside/last", "other"}
    assert store.read("aside/b") == b"step/b"
    store.remove_folder("aside", first="last")
    store.remove(["missing"])
    assert store.objects().keys() == {"other"}


def test_one_run_has_the_lease_until_it_gives_it_back(store):
    first = Lease(store)
    assert first.acquire() is None and first.is_held()
    second = Lease(store)
    holder = second.acquire()
    assert holder is not None and str(os.getpid()) in holder
    assert first.is_held() and not second.is_held()
    second.release()
    assert first.is_held(), "only the holder gives it back"
    first.release()
    assert store.objects() == {}
    assert second.acquire() is None
    second.release()


def leased_by(store: Store, **fields) -> None:
    ours = Lease(store)._fields
    store.write(LEASE, json.dumps({**ours, "id": "other", **fields}).encode())


def test_the_lease_of_a_killed_process_of_this_machine_is_free_at_once(store):
    leased_by(store, started="1")  # another process with a number that is used again
    lease = Lease(store)
    assert lease.acquire() is None and lease.is_held()
    lease.release()


@pytest.mark.parametrize("content", [None, b"no JSON"])
def test_a_lease_of_another_machine_is_free_when_it_is_not_renewed(content, store, monkeypatch):
    monkeypatch.setattr(store_lease, "_FREE_SECONDS", 0.4)
    monkeypatch.setattr(store_lease, "_POLL_SECONDS", 0.1)
    if content is None:
        leased_by(store, host="other")
    else:
        store.write(LEASE, content)
    began = time.monotonic()
    lease = Lease(store)
    assert lease.acquire() is None
    assert time.monotonic() - began >= 0.4
    lease.release()


def test_a_lease_of_another_machine_that_is_renewed_is_kept(store, monkeypatch):
    monkeypatch.setattr(store_lease, "_POLL_SECONDS", 0.05)
    leased_by(store, host="other", written=1)
    pauses = iter([None])
    monkeypatch.setattr(time, "sleep", lambda _: next(pauses, None) or leased_by(store, host="other", written=2))
    holder = Lease(store).acquire()
    assert holder is not None and "other" in holder


def test_the_holder_writes_the_lease_again_and_notices_its_loss(store, monkeypatch):
    monkeypatch.setattr(store_lease, "_RENEW_SECONDS", 0.05)
    lease = Lease(store)
    assert lease.acquire() is None
    first = store.read(LEASE)
    wait_until(lambda: store.read(LEASE) != first)
    leased_by(store, host="other")
    taken = store.read(LEASE)
    assert not lease.is_held()
    lease.release()
    assert store.read(LEASE) == taken, "the lease of another run stays"
