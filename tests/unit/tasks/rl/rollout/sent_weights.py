"""Weights that a pool of servers gets by broadcast, for the tests of the clients of vLLM and SGLang."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from glm46.tasks.rl.rollout import servers, weight_group
from glm46.tasks.rl.rollout.event_loop import blocking
from glm46.tasks.rl.rollout.open_requests import answers
from glm46.tasks.rl.rollout.records import Request, SamplingRules
from glm46.tasks.rl.rollout.served_policy import Weights
from glm46.tasks.rl.rollout.server import Server
from glm46.tasks.rl.rollout.weight_group import WeightGroup, WeightSender
from tests.unit.tasks.rl.rollout.stub_server import STOP, generate, scores
from tests.unit.tasks.rl.rollout.waiting import run, servers_of

PROBE = [[5, 6, 7, 8], [9, 10, 11]]
REQUESTS = [Request([prompt, 4], seed, 6) for prompt in (3, 5) for seed in range(1, 4)]
RULES = SamplingRules(1.0, frozenset({STOP}), vocab_size=50)
WAIT = 2.0
"""Seconds, where a wait is to be exhausted."""
SOON = 60.0
"""Seconds, also on a busy machine; a wait that no test wants to be exhausted is ten times as long."""


def set_waits(monkeypatch) -> None:
    """Make waits long on a busy machine, ticks short, and buckets small."""
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.05)
    monkeypatch.setattr(weight_group, "_LONGEST_WAIT", 10 * SOON)
    monkeypatch.setattr(weight_group, "_FOR_A_REASON", 0.5)
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", 1000)


def tensors(shift: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    """Of several types, odd lengths and one larger than a bucket; some are views."""
    generator = torch.Generator().manual_seed(0)
    layers = [(f"layer {n}", shift + torch.randn(n % 5 + 1, 7, generator=generator)) for n in range(20)]
    halves = [(f"half {n}", torch.randn(3, 5, generator=generator).bfloat16().t()) for n in range(5)]
    others = [("bias", torch.randn(3, generator=generator)), ("large", torch.randn(40, 30, generator=generator))]
    byte = ("byte", torch.randn(7, 9, generator=generator).to(torch.float8_e4m3fn))
    return [*layers, *halves, *others, byte]


def broadcast(groups: Sequence[WeightGroup], weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Send weights to groups."""
    sender = WeightSender(groups)
    for name, tensor in weights:
        sender.add(name, tensor)
    sender.end()


class SentWeights:
    """A pool whose servers get the tensors, as `ServerEngine` sends them.

    Args:
        weights: returns the tensors, in the order in which they are sent, plus a number.
    """

    def __init__(
        self,
        server: Callable[[str, range], Server],
        stubs: Sequence,
        *,
        weights: Callable[[float], Sequence[tuple[str, torch.Tensor]]] = tensors,
        deadline: float = 10 * SOON,
        restart: float = 10 * SOON,
    ):
        self.lines: list[str] = []
        self.shift = 0.0
        self._weights = weights
        self.pool = servers_of(
            [server(stub.url, range(0)) for stub in stubs],
            rules=RULES,
            max_tokens=8,
            max_running=1024,
            say=self.lines.append,
            deadline=deadline,
            restart=restart,
        )

    def update(self, version: int) -> None:
        self.pool.send = self.send
        run(self.pool.update(Weights(version, None, PROBE, scores(version, PROBE))))
        self.pool.send = None

    async def send(self, groups) -> None:
        await blocking(partial(broadcast, groups, self._weights(self.shift)))

    def check_generates(self) -> None:
        completions = run(answers(self.pool, REQUESTS, RULES))
        assert [completion.tokens for completion in completions] == [generate(*request) for request in REQUESTS]
        assert all(completion.spans == [(0, self.pool.version)] for completion in completions)
