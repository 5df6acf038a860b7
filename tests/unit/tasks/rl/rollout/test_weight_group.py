"""Weights by broadcast, from the pool of servers to the receiver of ``deploy/vllm``: equal bytes, and each fault ends
in bounded time and leaves out one server alone.

The parts of the worker extension of vLLM that need no vLLM; the others run in tests/servers.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from glm46.config.errors import UserError
from glm46.files.threads import in_thread
from glm46.tasks.rl.rollout import vllm_server, weight_group
from glm46.tasks.rl.rollout.http_calls import CallError
from glm46.tasks.rl.rollout.served_policy import EngineError
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from glm46.tasks.rl.rollout.weight_group import WeightGroup
from tests.processes import wait_until
from tests.unit.tasks.rl.rollout.sent_weights import (
    SOON,
    WAIT,
    SentWeights,
    broadcast,
    set_waits,
    tensors,
)
from tests.unit.tasks.rl.rollout.stub_server import JoinedReceiver, digest, glm_weights
from tests.unit.tasks.rl.rollout.waiting import call, run

ROOT = Path(__file__).parents[5]


Sent = partial(SentWeights, VllmServer)


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    set_waits(monkeypatch)
    monkeypatch.setattr(vllm_server, "QUICK_SECONDS", SOON)
    monkeypatch.setitem(VllmServer._extension.__kwdefaults__, "seconds", SOON)


def test_all_workers_of_all_replicas_of_all_servers_get_all_tensors(stubs):
    stubs[1].workers, stubs[1].replicas = 3, 2
    sent = Sent(stubs)
    for version in (1, 2):
        sent.update(version)
        for stub in stubs:
            assert len(stub.received) == stub.workers * stub.replicas and stub.version == version
            for found in stub.received:
                for (name, tensor), (expected, value) in zip(found, tensors(), strict=True):
                    assert name == expected and tensor.dtype == value.dtype and tensor.shape == value.shape
                    assert torch.equal(tensor.view(torch.uint8), value.contiguous().view(torch.uint8))
            paths = stub.paths()
            assert paths.index("/pause?mode=keep") < paths.index("/resume")
        sent.check_generates()


@pytest.mark.parametrize("where", [15, "loaded"])
def test_a_worker_of_a_replica_that_does_not_answer_is_seen(stubs, where):
    """It fails in the broadcast, or behind it, when only its word in the store says so."""
    stubs[0].replicas, stubs[0].breaks_at, stubs[0].breaks_by = 2, where, "error"
    sent = Sent(stubs)
    sent.update(1)
    (line,) = (line for line in sent.lines if stubs[0].url in line)
    assert "is excluded" in line and "a worker has" in line
    sent.update(2)
    assert stubs[0].version == stubs[1].version == 2 and "generates with version 2" in sent.lines[-1]


def test_a_worker_that_fails_behind_the_answer_of_another_replica_is_seen(stubs):
    group, looked = WeightGroup(stubs[0].url, 2, "gloo", 10 * SOON), threading.Event()

    def receive(invitation: str, worker: int) -> None:
        with suppress(InterruptedError), glm_weights.Receiver(invitation, worker, torch.device("cpu")) as found:
            assert len(list(found)) == len(tensors())
            if worker == 1:
                looked.wait()
                raise InterruptedError

    def load(invitation: str) -> str:
        threads = [threading.Thread(target=receive, args=(invitation, worker)) for worker in (0, 1)]
        for thread in threads:
            thread.start()
        threads[0].join()
        return "loaded"

    group.join(1, lambda invitation: in_thread(partial(load, invitation)))
    broadcast([group], tensors())
    check = group._store.check

    def check_and_tell(names: list[str]) -> bool:
        found = check(names)
        if names == ["left"]:  # the other one fails behind the first look
            looked.set()
        return found

    group._store = SimpleNamespace(check=check_and_tell)
    with pytest.raises(CallError, match="a worker has not loaded"):
        group.result(SOON)


@pytest.fixture(scope="module")
def apart():
    """A server in a process of its own, so that it can stop and end as a whole."""
    made = Apart()
    yield made
    made.process.kill()


class Apart:
    """Its process and port; ends with the test's."""

    def __init__(self, *port: str):
        command = [sys.executable, "-m", "tests.unit.tasks.rl.rollout.stub_server", *port]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.port = self.process.stdout.readline().strip()
        self.url = f"http://127.0.0.1:{self.port}"

    def set(self, **attributes) -> dict:
        return call(self.url, "/stub", attributes, seconds=SOON)


BREAKS = [(where, how) for where in ("called", "joined", 0, 15, len(tensors()), "answer") for how in ("error", "stall")]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "how"), [*BREAKS, (0, "stop"), (15, "stop"), (len(tensors()), "stop")])
def test_update_after_one_that_broke_anywhere_succeeds(apart, monkeypatch, where, how):
    """One of two workers breaks once; the pool tries again at once, because no other server is left."""
    if how != "error" or where in ("called", "joined"):  # any other one is seen at once
        monkeypatch.setattr(weight_group, "_LONGEST_WAIT", WAIT)
    apart.set(workers=2, breaks_at=where, breaks_by=how, stalls=True)
    # A stopped process takes the last bucket into the buffers of its sockets, so that only its answer is missing then.
    waits_for_answer = (where, how) in (("answer", "stall"), (len(tensors()), "stop"))
    sent, began = Sent([apart], deadline=WAIT if waits_for_answer else 10 * SOON), time.monotonic()

    def say(line: str) -> None:
        sent.lines.append(line)
        os.kill(apart.process.pid, signal.SIGCONT)
        apart.set(stalls=False)

    sent.pool._say = say
    sent.update(1)
    assert time.monotonic() - began < SOON
    *excluded, last = sent.lines  # a busy machine exhausts a wait once more
    assert "is excluded" in excluded[0] and "generates with version 1" in last
    assert all("is excluded" in line or "waiting for" in line for line in excluded)
    assert apart.set() == {"version": 1, "digests": [digest(tensors())] * 2}
    sent.check_generates()
    sent.update(2)  # in step
    assert apart.set()["version"] == 2


@pytest.mark.slow
def test_server_that_is_killed_in_the_broadcast_is_excluded_at_once_and_comes_back(stubs):
    apart = Apart()
    sent, began = Sent([apart, stubs[0]]), time.monotonic()
    apart.set(breaks_at=15, breaks_by="kill")
    sent.update(1)
    assert time.monotonic() - began < SOON and stubs[0].version == 1
    assert len(sent.lines) == 2 and apart.url in "".join(line for line in sent.lines if "is excluded" in line)
    sent.check_generates()
    apart.process.wait()
    back = Apart(apart.port)
    sent.update(2)
    assert back.set()["version"] == 2 and "generates with version 2" in sent.lines[-1]
    back.process.kill()


@pytest.mark.slow
def test_server_that_takes_no_more_does_not_hold_up_the_others(stubs):
    stubs[0].breaks_at, stubs[0].breaks_by = 15, "stall"
    sent, began = Sent(stubs), time.monotonic()

    async def send(groups) -> None:
        groups[0]._wait = WAIT
        await SentWeights.send(sent, groups)

    sent.send = send
    sent.update(1)
    assert time.monotonic() - began < SOON
    assert len(sent.lines) == 2 and stubs[0].url in sent.lines[0] + sent.lines[1]
    assert "/resume" not in stubs[0].paths() and stubs[1].version == 1  # its weights are neither old nor new
    sent.check_generates()
    assert not stubs[0].generated  # outside of an update nobody broadcasts
    stubs[0].stalls = False
    del sent.send
    sent.update(2)
    assert stubs[0].version == 2 and "generates with version 2" in sent.lines[-1]


def test_servers_are_free_again_when_the_trainer_fails_in_a_broadcast(stubs, monkeypatch):
    stubs[0].workers = 2
    sent = Sent(stubs)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(weight_group.WeightSender, "end", lambda self: (_ for _ in ()).throw(MemoryError))
        sent.update(1)
    began = time.monotonic()
    sent.update(2)
    assert time.monotonic() - began < SOON and [stub.version for stub in stubs] == [2, 2]
    assert all("the trainer has ended this update" in error or "closed" in error for error in stubs[0].errors)


@pytest.mark.slow
def test_invitation_to_an_update_that_has_ended_takes_part_in_no_other(stubs, monkeypatch):
    """As that of a request that waited in the server until the trainer had given up."""
    monkeypatch.setattr(glm_weights, "_QUICK", timedelta(seconds=10 * SOON))
    invitations, ended = [], threading.Event()
    for _ in range(2):
        group = WeightGroup(stubs[0].url, 1, "gloo", 0.1)
        with pytest.raises(CallError, match="did not join"):
            group.join(1, lambda invitation: in_thread(lambda: invitations.append(invitation) or ended.wait()))
    ended.set()
    began, stale = time.monotonic(), json.loads(invitations[0])
    with pytest.raises(OSError, match="refused"):
        glm_weights.Receiver(json.dumps(stale), 0, torch.device("cpu"))
    group = WeightGroup(stubs[0].url, 1, "gloo", 10 * SOON)
    stale["port"] = group._at["port"]  # the system has given it to the next one
    with pytest.raises(RuntimeError, match="has ended this update"):
        glm_weights.Receiver(json.dumps(stale), 0, torch.device("cpu"))
    assert time.monotonic() - began < SOON and not group._store.check(["worker 0"])
    group.close()


TRAINER = """
from datetime import timedelta
from functools import partial
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
update, wait = dist.PrefixStore("update", store), timedelta(seconds=600)
update.set("open", "")
print(store.port, flush=True)
group = dist.ProcessGroupGloo(dist.PrefixStore("group", update), 0, 2, wait)
input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["called", "joined", "bucket"])
def test_worker_waits_no_longer_for_a_trainer_that_is_stopped(monkeypatch, where):
    monkeypatch.setattr(glm_weights, "_QUICK", timedelta(seconds=WAIT))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    trainer, ends = subprocess.Popen([sys.executable, "-c", TRAINER], text=True, **pipes), []
    at = {"address": "127.0.0.1", "port": int(trainer.stdout.readline()), "update": "update", "size": 2}
    invitation = json.dumps({**at, "seconds": WAIT, "backend": "gloo", "version": 1})

    def stop(now: str) -> None:
        if now == where:
            os.kill(trainer.pid, signal.SIGSTOP)

    def receive() -> None:
        try:
            stop("called")
            with JoinedReceiver(stop, invitation, 0, torch.device("cpu")) as tensors:
                stop("bucket")
                next(iter(tensors))
        except RuntimeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=receive, daemon=True)  # it would wait as long as the trainer is there
    thread.start()
    thread.join(SOON)
    trainer.kill()
    assert len(ends) == 1 and ("does not answer" in ends[0] or "no weights came" in ends[0]), ends


def test_server_whose_store_does_not_start_in_time_is_excluded_and_comes_back(stubs, monkeypatch):
    """As on a machine under load: the client of the trainer's own store waits in vain for its server."""
    store, failures = weight_group.TCPStore, iter([True])

    def start(*arguments, **keywords):
        if next(failures, False):
            os.close(keywords["master_listen_fd"])
            raise weight_group.dist.DistNetworkError("The client socket has timed out after 500ms")
        return store(*arguments, **keywords)

    monkeypatch.setattr(weight_group, "TCPStore", start)
    sent = Sent(stubs[:1])
    sent.update(1)
    assert "timed out after 500ms" in sent.lines[0] and "generates with version 1" in sent.lines[-1]
    sent.check_generates()


@pytest.mark.slow
def test_server_that_is_busy_at_the_start_is_waited_for(stubs, monkeypatch):
    """As with the broadcast of a run that was killed; it has the extension."""
    monkeypatch.setitem(VllmServer._extension.__kwdefaults__, "seconds", 0.5)
    stubs[0]._engine.acquire()
    sent = Sent(stubs[:1])

    def say(line: str) -> None:
        sent.lines.append(line)
        if stubs[0]._engine.locked():
            monkeypatch.setitem(VllmServer._extension.__kwdefaults__, "seconds", SOON)
            stubs[0]._engine.release()

    sent.pool._say = say
    sent.update(1)
    assert stubs[0].version == 1 and "no complete reply" in sent.lines[0]


class StuckGroup:
    """Its broadcast and its abort wait in C for a worker that does not come, as those of NCCL."""

    def broadcast(self, values, root):
        time.sleep(10 * SOON)

    def abort(self):
        time.sleep(10 * SOON)


def test_an_abort_that_fails_is_logged(stubs, caplog):
    def fail() -> None:
        raise RuntimeError("the communicator is damaged")

    group = WeightGroup(stubs[0].url, 1, "gloo", SOON)
    group._group = [SimpleNamespace(abort=fail)]
    group.close()
    wait_until(lambda: "the communicator is damaged" in caplog.text)


@pytest.mark.slow
def test_first_broadcast_that_does_not_begin_ends_in_time_and_says_what_it_waited_for(stubs, monkeypatch):
    group, began = WeightGroup(stubs[0].url, 1, "gloo", 10 * SOON), time.monotonic()

    def join(*_) -> StuckGroup:
        group._wait = 0.5
        return StuckGroup()

    monkeypatch.setattr(weight_group, "_join", join)
    with pytest.raises(CallError) as raised:
        group.join(1, lambda invitation: in_thread(lambda: stubs[0]._receive(invitation)["results"][0]["failed"]))
    assert time.monotonic() - began < SOON
    at = f"{group._at['address']} port {group._at['port']}"
    assert all(part in str(raised.value) for part in ("first gloo broadcast", "1 workers", at, "rollout.weights"))
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_worker_whose_first_broadcast_does_not_begin_ends_in_time(monkeypatch):
    store = weight_group.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weight_group.dist.PrefixStore("update", store).set("open", "")
    monkeypatch.setattr(glm_weights.Receiver, "_form", lambda *_: StuckGroup())
    said = {"address": "127.0.0.1", "port": store.port, "update": "update", "size": 2, "seconds": 0.5}
    receiver = glm_weights.Receiver(json.dumps({**said, "backend": "gloo", "version": 1}), 0, torch.device("cpu"))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="does not answer") as raised:
        receiver.__enter__()
    assert time.monotonic() - began < SOON
    assert f"127.0.0.1 port {store.port}" in str(raised.value) and "rollout.weights" in str(raised.value)


def test_two_versions_of_nccl_make_no_group(stubs, monkeypatch):
    stubs[0].device = "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = VllmServer(stubs[0].url, range(0))
    run(server.check(routes=False))
    monkeypatch.setattr(vllm_server, "nccl_version", lambda: "2.30.7")
    with pytest.raises(UserError, match=r"2\.27\.5.*2\.30\.7.*rollout\.weights"):
        run(server.join(1, SOON))
    assert not any("pause" in path for path in stubs[0].paths())


def test_damaged_bucket_is_found_out_by_the_server(stubs, monkeypatch):
    block = weight_group._block

    def damaged(*arguments):
        text, found = block(*arguments)
        found[text + 3] ^= 1
        return text, found

    monkeypatch.setattr(weight_group, "_block", damaged)
    with pytest.raises(EngineError, match=r"rollout.urls.*checksum"):
        Sent(stubs[:1], restart=0.0).update(1)
    assert "checksum" in stubs[0].errors[0]


@pytest.mark.slow
def test_server_that_joins_no_group_or_has_gone(stubs, monkeypatch):
    monkeypatch.setattr(weight_group, "_LONGEST_WAIT", 0.5)
    answer, ended = stubs[0].answer, threading.Event()
    stubs[0].answer = lambda path, body: ended.wait() if "receive" in str(body) else answer(path, body)
    stubs[1].stop()
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not join") as raised:
        Sent(stubs, restart=0.0).update(1)
    assert stubs[1].url in str(raised.value) and time.monotonic() - began < SOON
    ended.set()


def test_server_with_other_weights_than_those_sent_is_found_out(stubs):
    stubs[0].stale = True
    sent = Sent(stubs)
    sent.update(0)
    sent.update(1)
    assert "differ from the trainer's" in sent.lines[-1] and stubs[0].url in sent.lines[-1]
    sent.check_generates()


FOLDER = Path(__file__).parents[5] / "deploy/vllm"


@pytest.fixture
def extension(monkeypatch):
    source = (FOLDER / "glm_ext.py").read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import vllm", "from vllm"))}
    for name in imported:
        monkeypatch.setitem(sys.modules, name, MagicMock(__version__="0.32.0"))
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("glm_ext", FOLDER / "glm_ext.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_routes_are_those_of_the_request_and_not_of_one_whose_name_begins_alike(extension):
    recorder = extension._RouteRecorder(MagicMock())
    for number in (10, 1, 11):
        rows = {place: np.full((2, 2), number, np.int16) for place in (1, 0)}
        recorder.rows[f"generate-tokens-18a0-{number}-0123abcd"] = rows
    assert recorder.take("generate-tokens-18a0-1").tolist() == [[[1, 1]] * 2] * 2
    assert recorder.take("generate-tokens-18a0-1") is None
    assert list(recorder.rows) == [f"generate-tokens-18a0-{number}-0123abcd" for number in (10, 11)]


def test_workers_are_numbered_over_all_replicas(extension, monkeypatch):
    numbers = []
    monkeypatch.setattr(extension, "Receiver", lambda said, worker, device: numbers.append(worker) or MagicMock())
    for replica in (0, 1):
        for rank in (0, 1):
            worker = MagicMock(rank=rank)
            worker.vllm_config.parallel_config = SimpleNamespace(world_size=2, data_parallel_index=replica)
            assert "version" in extension.Extension.glm46_receive(worker, "{}")
    assert numbers == [0, 1, 2, 3]
