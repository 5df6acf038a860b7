"""Weights by broadcast, from the pool of servers to the receiver of ``deploy/vllm``: equal bytes, and each fault ends
in bounded time and leaves out one server alone."""

import time

import pytest
import torch

from glm46.rollout import server_pool, weight_group
from glm46.rollout.records import Request, SamplingRules
from glm46.rollout.server_pool import ServerPool
from glm46.rollout.server_state import EngineError, Weights
from glm46.rollout.vllm_server import VllmServer
from glm46.rollout.weight_group import WeightSender
from tests.unit.rollout.stub_server import STOP, StubServer, draw, scores

PROBE = [[5, 6, 7, 8], [9, 10, 11]]
REQUESTS = [Request([prompt, 4], seed, 6) for prompt in (3, 5) for seed in range(1, 4)]
RULES = SamplingRules(1.0, frozenset({STOP}), vocab_size=50)
WAIT = 0.4


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(server_pool, "_RESTART_TICK_SECONDS", 0.05)
    monkeypatch.setattr(weight_group, "_LONGEST_WAIT", WAIT)
    monkeypatch.setattr(weight_group, "_FOR_A_REASON", 0.2)
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", 1000)


def tensors() -> list[tuple[str, torch.Tensor]]:
    """Of several types, odd lengths and one larger than a bucket; some are views."""
    generator = torch.Generator().manual_seed(0)
    found = [(f"layer {n}", torch.randn(n % 5 + 1, 7, generator=generator)) for n in range(20)]
    found += [(f"half {n}", torch.randn(3, 5, generator=generator).bfloat16().t()) for n in range(5)]
    found += [("bias", torch.randn(3, generator=generator)), ("large", torch.randn(40, 30, generator=generator))]
    return [*found, ("byte", torch.randn(7, 9, generator=generator).to(torch.float8_e4m3fn))]


class Sent:
    """A pool whose servers get the tensors, as `ServerEngine` sends them."""

    def __init__(self, stubs, *, deadline=5.0, restart=0.2):
        self.lines: list[str] = []
        servers = [VllmServer(stub.url, range(0)) for stub in stubs]
        waits = {"deadline": deadline, "restart": restart}
        self.pool = ServerPool(servers, rules=RULES, longest=8, most_running=1024, say=self.lines.append, **waits)

    def update(self, version: int) -> None:
        self.pool.send = self.send
        self.pool.update(Weights(version, None, PROBE, scores(version, PROBE)))
        self.pool.send = None

    @staticmethod
    def send(groups) -> None:
        sender = WeightSender(groups)
        for name, tensor in tensors():
            sender.add(name, tensor)
        sender.end()

    def draws(self) -> None:
        found = self.pool.generate(REQUESTS, RULES)
        assert [one.tokens for one in found] == [draw(*request) for request in REQUESTS]
        assert all(one.spans == [(0, self.pool.version)] for one in found)


def test_all_workers_of_all_servers_get_all_tensors(stubs):
    stubs[1].workers = 3
    sent = Sent(stubs)
    for version in (1, 2):
        sent.update(version)
        for stub in stubs:
            assert len(stub.received) == stub.workers and stub.version == version
            for found in stub.received:
                for (name, tensor), (expected, value) in zip(found, tensors(), strict=True):
                    assert name == expected and tensor.dtype == value.dtype and tensor.shape == value.shape
                    assert torch.equal(tensor.view(torch.uint8), value.contiguous().view(torch.uint8))
            paths = stub.paths()
            assert paths.index("/pause?mode=keep") < paths.index("/resume")
        sent.draws()


@pytest.mark.parametrize(("stops_after", "stalls"), [(0, 0.0), (15, 0.0), (15, 1.0)])
def test_server_that_takes_no_more_is_left_out_and_comes_back(stubs, stops_after, stalls):
    stubs[0].stops_after, stubs[0].stalls = stops_after, stalls
    sent, began = Sent(stubs), time.monotonic()
    sent.update(1)
    assert time.monotonic() - began < 2.5
    assert len(sent.lines) == 2 and stubs[0].url in sent.lines[0] + sent.lines[1]
    assert "/resume" not in stubs[0].paths() and stubs[1].version == 1  # its weights are neither old nor new
    stubs[0].stops_after = None
    sent.draws()
    assert not stubs[0].drawn  # outside of an update nobody broadcasts
    sent.update(2)
    assert stubs[0].version == 2 and "draws with version 2" in sent.lines[-1]


def test_damaged_bucket_is_found_out_by_the_server(stubs, monkeypatch):
    block = weight_group._block

    def damaged(*arguments):
        text, found = block(*arguments)
        found[text + 3] ^= 1
        return text, found

    monkeypatch.setattr(weight_group, "_block", damaged)
    with pytest.raises(EngineError, match=r"rollout.urls.*500"):
        Sent(stubs[:1], restart=0.0).update(1)
    assert "checksum" in stubs[0].errors[0]


def test_server_that_joins_no_group_or_has_gone(stubs):
    stubs[0].workers = 0
    stubs[0].answer = lambda path, body: time.sleep(2 * WAIT) if "receive" in str(body) else answer(path, body)
    answer = StubServer.answer.__get__(stubs[0])
    stubs[1].stop()
    stubs[0].workers = 1
    began = time.monotonic()
    with pytest.raises(EngineError, match="did not join") as raised:
        Sent(stubs, restart=0.0).update(1)
    assert stubs[1].url in str(raised.value) and time.monotonic() - began < 2.5


def test_server_with_other_weights_than_those_sent_is_found_out(stubs):
    stubs[0].stale = True
    sent = Sent(stubs)
    sent.update(0)
    sent.update(1)
    assert "differ from the trainer's" in sent.lines[-1] and stubs[0].url in sent.lines[-1]
    sent.draws()
