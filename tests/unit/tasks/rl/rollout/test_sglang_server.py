"""The client of SGLang against the classes of its wheel, and against a stub that is made from them."""

import ast
import asyncio
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout import sglang_server, weight_group
from glm46.tasks.rl.rollout.event_loop import EventLoop, blocking
from glm46.tasks.rl.rollout.http_calls import CallError, ForgottenError
from glm46.tasks.rl.rollout.records import Request
from glm46.tasks.rl.rollout.served_policy import CHANGED, EngineError, Weights
from glm46.tasks.rl.rollout.sglang_server import SglangGroup, SglangServer
from glm46.tasks.rl.rollout.weight_group import WeightSender
from tests.unit.tasks.rl.rollout.sent_weights import (
    PROBE,
    REQUESTS,
    RULES,
    SOON,
    WAIT,
    SentWeights,
    set_waits,
)
from tests.unit.tasks.rl.rollout.sglang_contract import (
    WHEEL_SHA256,
    WHEEL_VARIABLE,
    read_table,
    read_wheel,
)
from tests.unit.tasks.rl.rollout.sglang_stub import contract_fault, received_bucket
from tests.unit.tasks.rl.rollout.stub_server import scores
from tests.unit.tasks.rl.rollout.waiting import asyncio_loop, run
from tests.wheels import download

ROUTED = RULES._replace(routes=True)


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    set_waits(monkeypatch)
    monkeypatch.setattr(sglang_server, "QUICK_SECONDS", SOON)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[Path]:
    """The wheel of the release that the client was written for: a named one, or by pip."""
    if path := os.environ.get(WHEEL_VARIABLE):
        yield Path(path)
        return
    got = download(f"sglang=={read_table()['version']}", WHEEL_SHA256, tmp_path_factory.mktemp("wheel"))
    yield got
    got.unlink()


def tensors(shift: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    """Tensors as in `sent_weights`, with the small types first and the one that is larger than a bucket last."""
    generator = torch.Generator().manual_seed(0)
    byte = ("byte", torch.randn(7, 9, generator=generator).to(torch.float8_e4m3fn))
    halves = [(f"half {n}", torch.randn(3, 5, generator=generator).bfloat16().t()) for n in range(5)]
    layers = [(f"layer {n}", shift + torch.randn(n % 5 + 1, 7, generator=generator)) for n in range(20)]
    bias = ("bias", torch.randn(3, generator=generator))
    return [byte, *halves, *layers, bias, ("large", torch.randn(40, 30, generator=generator))]


Sent = partial(SentWeights, SglangServer, weights=tensors)


def check_equal(found, expected) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.slow
def test_table_is_that_of_the_wheel(wheel):
    assert read_wheel(wheel) == read_table()


@pytest.mark.slow
def test_bucket_and_group_are_those_that_the_wheel_reads(wheel, monkeypatch):
    """Its own code, executed: the layout of a bucket, and the keys of a group in the store."""
    with zipfile.ZipFile(wheel) as content:
        names: dict = {"__name__": "tensor_bucket"}
        exec(content.read("sglang/srt/weight_sync/tensor_bucket.py"), names)
        common = ast.parse(content.read("sglang/srt/utils/common.py"))
    former = next(node for node in common.body if getattr(node, "name", "") == "init_custom_process_group")
    exec(compile(ast.Module([former], []), "common", "exec"), found := {"torch_release": (2, 14)})
    run_group(monkeypatch, found["init_custom_process_group"], names["FlattenedTensorBucket"].empty)


def of_torch(backend, init_method, world_size, rank, group_name):
    """A group as torch's helper for new groups makes it, behind a rendezvous at an address."""
    store, rank, size = next(dist.rendezvous(init_method, rank, world_size, timeout=timedelta(seconds=SOON)))
    store = dist.PrefixStore(group_name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        size, rank, [], distributed_c10d.Backend(backend), store, group_name=group_name, timeout=timedelta(seconds=SOON)
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


class Bucket:
    """As the wheel's class, of our own code."""

    def __init__(self, names, dtypes, shapes, device):
        (_, self.flat), *self.tensors = received_bucket(names, dtypes, shapes)

    def get_flattened_tensor(self):
        return self.flat

    def reconstruct_tensors(self):
        return self.tensors


def test_group_is_one_of_torchs_own(monkeypatch):
    run_group(monkeypatch, of_torch, Bucket)


def run_group(monkeypatch, form, empty) -> None:
    """Send tensors from a group to one worker that forms it and receives by functions of SGLang's."""
    asked, group = [], None

    async def answer(url, path, body, *, seconds):
        return await blocking(lambda: answered(path, body))

    def answered(path, body):
        asked.append((path, body))
        assert contract_fault(path, body) is None
        if path == "/init_weights_update_group":
            at = f"tcp://{body['master_address']}:{body['master_port']}"
            size, name = body["world_size"], body["group_name"]
            joined.append(form(backend=body["backend"], init_method=at, world_size=size, rank=1, group_name=name))
        if path == "/update_weights_from_distributed":
            bucket = empty(body["names"], body["dtypes"], body["shapes"], "cpu")
            dist.broadcast(bucket.get_flattened_tensor(), src=0, group=joined[0])
            loaded.extend(bucket.reconstruct_tensors())
        return {"success": True}

    joined, loaded = [], []
    monkeypatch.setattr("glm46.tasks.rl.rollout.sglang_server.call", answer)
    with torch.no_grad(), ThreadPoolExecutor(1) as threads:
        listener = threads.submit(dist.TCPStore, "127.0.0.1", 0, is_master=True, wait_for_workers=False).result()
        group = SglangGroup(f"http://127.0.0.1:{listener.port}", 1, "gloo", SOON, asyncio_loop())
        group.meet()
        sender = WeightSender([group])
        for name, tensor in tensors():
            sender.add(name, tensor)
        sender.end()
        assert group.fault is None
        group.result(SOON)
        dist.destroy_process_group(joined[0])
    check_equal(sorted(loaded, key=lambda pair: pair[0]), sorted(tensors(), key=lambda pair: pair[0]))
    paths = [path for path, _ in asked]
    assert paths[:2] == ["/init_weights_update_group", "/begin_weight_update"]
    assert paths[-2:] == ["/end_weight_update", "/destroy_weights_update_group"] and len(paths) > 6


def test_stub_refuses_what_the_wheel_does_not_know():
    assert contract_fault("/begin_weight_update", {"selector": "all"}) is None
    assert "unknown ['salt']" in contract_fault("/generate", {"salt": "1"})
    assert "unknown ['seed']" in contract_fault("/generate", {"sampling_params": {"seed": 1}})
    assert "missing ['new_version']" in contract_fault("/update_weight_version", {})


def test_all_workers_of_all_servers_get_all_tensors_between_begin_and_end(stubs):
    stubs[1].workers = 3
    sent = Sent(stubs)
    for version in (1, 2):
        sent.shift = version
        sent.update(version)
        for stub in stubs:
            assert len(stub.received) == stub.workers and stub.version == version and not stub._groups
            for found in stub.received:
                check_equal(sorted(found, key=lambda pair: pair[0]), sorted(tensors(version), key=lambda pair: pair[0]))
        sent.check_generates()
    paths = stubs[0].paths()
    order = [
        "/pause_generation", "/flush_cache", "/init_weights_update_group", "/begin_weight_update",
        "/update_weights_from_distributed", "/end_weight_update", "/destroy_weights_update_group", "/weights_checker",
        "/update_weight_version", "/continue_generation", "/generate",
    ]  # fmt: skip
    places = [paths.index(path) for path in order]
    assert places == sorted(places) and not stubs[0].refused


@pytest.mark.slow
def test_update_after_one_that_broke_in_a_bucket_succeeds(stubs):
    """The session of the server is still open, and its weights are neither old nor new."""
    stubs[0].workers, stubs[0].breaks_at = 2, 15
    sent, began = Sent(stubs[:1]), time.monotonic()
    sent.update(1)
    assert time.monotonic() - began < SOON
    assert "is excluded" in sent.lines[0] and "generates with version 1" in sent.lines[-1]
    check_equal(sorted(stubs[0].received[1], key=str), sorted(tensors(), key=str))
    assert stubs[0].paths().count("/end_weight_update") == 2
    sent.check_generates()


def test_server_whose_workers_do_not_join_does_not_hold_up_the_others(stubs):
    stubs[0].breaks_at = "called"
    sent = Sent(stubs)
    sent.update(1)
    assert stubs[0].url in "".join(line for line in sent.lines if "is excluded" in line) and stubs[1].version == 1
    assert "/begin_weight_update" not in stubs[0].paths() and stubs[0].paused
    sent.check_generates()
    sent.update(2)
    assert stubs[0].version == 2 and "generates with version 2" in sent.lines[-1]


@pytest.mark.slow
def test_server_that_takes_no_more_does_not_hold_up_the_others(stubs, monkeypatch):
    stubs[0].breaks_at, stubs[0].breaks_by = 15, "stall"
    sent, send, began = Sent(stubs), SentWeights.send, time.monotonic()

    async def bounded(self, groups) -> None:
        groups[0]._wait = WAIT
        await send(self, groups)

    monkeypatch.setattr(SentWeights, "send", bounded)
    sent.update(1)
    assert time.monotonic() - began < SOON and stubs[1].version == 1
    assert "/continue_generation" not in stubs[0].paths()
    sent.check_generates()
    monkeypatch.setattr(SentWeights, "send", send)
    stubs[0].stalls = False
    sent.update(2)
    assert stubs[0].version == 2, sent.lines


def test_a_run_that_ends_in_a_broadcast_leaves_no_group_at_the_server(stubs):
    sent = Sent(stubs[:1])
    sent.pool.loop = EventLoop()
    is_sending = threading.Event()

    async def send(groups) -> None:
        is_sending.set()
        await asyncio.Event().wait()

    sent.pool.send = send
    sent.pool.loop.begin(sent.pool.update(Weights(1, None, PROBE, scores(1, PROBE))))
    assert is_sending.wait(SOON) and stubs[0]._groups
    sent.pool.loop.stop()
    assert "/destroy_weights_update_group" in stubs[0].paths() and not stubs[0]._groups


def test_server_that_loses_a_bucket_is_found_out_by_the_probe(stubs):
    stubs[0].stale = True
    sent = Sent(stubs)
    sent.update(0)
    sent.update(1)
    assert "differ from the trainer's" in sent.lines[-1] and stubs[0].url in sent.lines[-1]


def test_same_version_has_the_same_bits_when_it_comes_again(stubs):
    sent = Sent(stubs[:1], restart=0.0)
    sent.update(1)
    sent.update(1)
    sent.shift = 1.0
    with pytest.raises(EngineError, match="other bits than when it loaded version 1"):
        sent.update(1)
    sent.update(2)


@pytest.mark.parametrize(("fact", "option"), [("dp_size", "--dp-size 2"), ("pp_size", "--pp-size 2")])
def test_replicas_and_stages_that_its_own_call_refuses_get_no_broadcast(stubs, fact, option):
    stubs[0].facts[fact] = 2
    with pytest.raises(UserError, match=f"{option}.*--attn-dp-size"):
        Sent(stubs[:1]).update(1)
    assert not stubs[0].paused


def test_paused_server_is_asked_again_and_taken(stubs, tmp_path):
    """Its /health, which generates a token, would not answer."""
    stubs[0].paused = True
    sent = Sent(stubs[:1])
    sent.update(1)
    assert "/health" not in stubs[0].paths() and not stubs[0].paused
    sent.check_generates()


def test_requests_have_a_salt_of_the_version_and_completions_the_version_of_each_token(stubs, monkeypatch):
    sent = Sent(stubs[:1])
    for version in (1, 2):
        sent.update(version)
        sent.check_generates()
    salts = [body["cache_salt"] for _, body in stubs[0].calls if body.get("cache_salt", "stop") != "stop"]
    assert len(set(salts)) == 2 and len(salts) == 2 * len(REQUESTS)
    meta = {"output_token_logprobs": [[-1.0, 3, None]] * 6, "finish_reason": {"type": "length"}}
    spans = [{"version": "2", "start": 0, "end": 4}, {"version": "default", "start": 4, "end": 6}]
    stubs[0]._generate = lambda body: {"meta_info": meta | {"weight_versions": spans}}
    found = run(sent.pool._servers[0].generate("name", REQUESTS[0], RULES, "salt", SOON))
    assert found.spans == [(0, 2), (4, -1)]


def test_routes_have_no_dense_layers_and_need_the_option(stubs):
    server = SglangServer(stubs[0].url, range(0), (2, 3))
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        run(server.check(routes=True))
    stubs[0].facts["enable_return_routed_experts"] = True
    stubs[0].all_layers = np.array([[0, 0, 0], [3, 1, 2], [300, 5, 4]])  # the first one is dense
    run(server.check(routes=True))
    found = run(server.generate("name", Request([3, 4], 1, 6), ROUTED, "salt", SOON))
    assert found.routes.shape == (7, 2, 3) and found.routes.dtype == np.uint16
    assert np.array_equal(found.routes[0], [[3, 1, 2], [300, 5, 4]])
    rest = run(server.generate("name", Request([3, 4, 5, 6], 1, 4, known=3), ROUTED, "salt", SOON))
    assert rest.routes.shape == (7, 2, 3) and np.array_equal(rest.routes[3:], found.routes[3:])
    assert stubs[0].calls[-1][1]["routed_experts_start_len"] == 3
    stubs[0].all_layers = -np.ones((3, 3))
    with pytest.raises(CallError, match="experts"):
        run(server.generate("name", Request([3, 4], 1, 6), ROUTED, "salt", SOON))


def test_adapters_have_a_name_of_their_version_and_replace_those_before(stubs, tmp_path):
    server = SglangServer(stubs[0].url, range(0))
    run(server.check(routes=False))

    def folder(version: int, rank: int) -> Path:
        made = tmp_path / str(version)
        made.mkdir()
        (made / "version.json").write_text(json.dumps({"version": version, "files": {}}))
        (made / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": ["q_proj"]}))
        return made

    with pytest.raises(UserError, match="--enable-lora --max-lora-rank 8"):
        run(server.load(folder(CHANGED, 8), CHANGED, SOON))
    stubs[0].facts |= {"enable_lora": True, "max_lora_rank": 8}
    run(server.check(routes=False))
    for version in (1, 2):
        run(server.load(folder(version, 8), version, SOON))
        assert stubs[0].adapters == [f"glm46-version-{version}"]
        assert run(server.generate("name", REQUESTS[0], RULES, "salt", SOON)).spans == [(0, version)]
    assert stubs[0].calls[-1][1]["lora_path"] == "glm46-version-2"
    stubs[0].adapters.clear()  # it was started again
    with pytest.raises(ForgottenError, match="not loaded"):
        run(server.generate("name", REQUESTS[0], RULES, "salt", SOON))


def test_note_of_a_server_says_its_release_and_that_samples_do_not_repeat(stubs):
    server = SglangServer(stubs[0].url, range(0))
    run(server.check(routes=False))
    assert server.note == ""
    stubs[0].facts["enable_deterministic_inference"] = False
    stubs[0]._server_info = lambda body: stubs[0].facts | {"dtype": "auto", "context_length": None, "version": "0.6.0"}
    run(server.check(routes=False))
    assert "0.6.0" in server.note and "--enable-deterministic-inference" in server.note
    assert server.dtype == "bfloat16"


@pytest.mark.slow
def test_workers_that_never_form_a_group_end_in_time(stubs, monkeypatch):
    monkeypatch.setattr(weight_group, "_LONGEST_WAIT", WAIT)
    ended = threading.Event()
    stubs[0]._init_weights_update_group = lambda body: {"success": ended.wait(SOON)}
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not join|no group for weights|no complete reply"):
        Sent(stubs[:1], restart=0.0).update(1)
    ended.set()
    assert time.monotonic() - began < SOON
