"""All ranks get what servers generate, however long it takes, and the same errors."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import join, leave
from glm46.config.rollout import RolloutConfig
from glm46.tasks.rl.rollout import first_rank, server_engine, servers
from glm46.tasks.rl.rollout.records import Request, SamplingRules
from glm46.tasks.rl.rollout.served_policy import EngineError, ServedPolicy
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from tests.harness import run_ranks
from tests.unit.tasks.rl.rollout.stub_server import STOP, StubServer, generate, logprob, scores

TIMEOUT, DEADLINE = 8, 10.0
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
RULES = SamplingRules(0.7, frozenset({STOP}), 50)
REQUESTS = [Request([prompt, 4], seed, 6) for prompt in (3, 5) for seed in range(1, 4)]


def generate_on_rank(folder: Path) -> dict:
    """What a rank gets and sees."""
    rank = join(TIMEOUT).rank
    first_rank._SIGN_OF_LIFE_SECONDS = servers._RESTART_TICK_SECONDS = 0.2
    stub = StubServer() if rank == 0 else None
    port = torch.tensor([stub.port if stub else 0])
    dist.broadcast(port, 0)
    version, lines, entropy, temperatures = 0, [], 1.5, set()

    def export(path: Path) -> None:
        if rank == 0:
            path.mkdir(parents=True)
            (path / "model.safetensors").write_bytes(b"weights %d" % version)
        dist.barrier()

    def score(sequences: list[list[int]], temperature: float) -> tuple[list[list[float]], list[list[float]]]:
        temperatures.add(round(temperature, 2))
        logprobs = scores(version, sequences)
        return logprobs, [[entropy] * len(row) for row in logprobs]

    def routed_score(sequences, routes, temperature):
        raise AssertionError("no server returned routes")

    @contextmanager
    def changed() -> Iterator[None]:
        nonlocal version
        before, version = version, -1
        try:
            yield
        finally:
            version = before

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            gathered = torch.full((2, 3), float(10 * version + number))
            dist.all_reduce(gathered)  # as of shards
            yield f"tensor {number}", gathered

    config = RolloutConfig(
        kind="vllm",
        max_new_tokens=6,
        urls=[f"http://127.0.0.1:{port.item()}"],
        deadline_seconds=DEADLINE,
    )
    server_engine._RESTART_SECONDS = 0.0
    engine = ServerEngine(
        config,
        folder=folder,
        policy=ServedPolicy(export, tensors, score, routed_score, changed),
        prompts=PROMPTS,
        rules=RULES,
        padding=range(0),
        say=lines.append,
    )
    found = {}
    if stub:
        stub.stale = True  # it was started with the weights of the first update
    try:
        engine.update(version)
    except EngineError as error:
        found["unchanged"] = str(error)
    if stub:
        stub.stale, stub.raw = False, -1.0
    try:
        engine.update(version)
    except EngineError as error:
        found["mismatch"] = str(error)
    if stub:
        stub.raw = 0.0
    entropy = 5.0  # the trainer expects other samples, of the same log-probabilities
    try:
        engine.update(version)
    except EngineError as error:
        found["sampler"] = str(error)
    entropy = 1.5
    for version in (1, 2):
        engine.update(version)
        found[f"version {version}"] = engine.generate(REQUESTS, RULES)
    found["temperatures"] = sorted(temperatures)
    found["folders"] = sorted(path.name for path in folder.iterdir())
    found["manifest"] = json.loads((folder / "version-00000002/version.json").read_text())
    if stub:
        stub.fault = "hang"
    found["slow"] = engine.generate(REQUESTS[:1], RULES)
    if stub:
        stub.stop()
    try:
        engine.generate(REQUESTS, RULES)
    except EngineError as error:
        found["error"] = str(error)
    if rank == 0:
        stub = StubServer(port=port.item())
        stub.raw = -1.0
    try:
        engine.generate(REQUESTS, RULES)
    except EngineError as error:
        found["came back"] = str(error)
    if stub:
        stub.stop()
    engine.close()
    if rank == 0:
        stub = StubServer(port=port.item())
    server_engine._RESTART_SECONDS = 20.0
    sent = ServerEngine(
        config.model_copy(update={"weights": "broadcast"}),
        folder=folder,
        policy=ServedPolicy(export, tensors, score, routed_score, changed),
        prompts=PROMPTS,
        rules=RULES,
        padding=range(0),
        say=lines.append,
    )
    sent.update(version)
    if stub:
        stub.stop()
        stub = StubServer(port=port.item())  # it was started again, with other weights
    sent.generate_ahead(folder.with_name("ahead"), goes_on=False)
    if stub:
        sent.background.add(0, REQUESTS, version)
    found["broadcast"] = [end.samples[0] for end in sent.take(1, {0}, lambda: False)[0]]
    version = 3
    sent.update(version)
    if stub:
        stub.fault = "hang"
        sent.background.add(1, REQUESTS[:1], version)
    found["stopped"] = sent.take(1, {1}, lambda: True)
    found["generates on"] = stub is not None and sent.background.halt()
    if stub:
        found["received"] = [(name, tensor.tolist()) for name, tensor in stub.received[0]]
        stub.stop()
    sent.close()
    found |= {"left": len(list(folder.iterdir())), "lines": lines}
    dist.barrier()
    leave()
    return found


def test_ranks_get_completions_and_errors_of_the_first_rank(tmp_path):
    assert DEADLINE > TIMEOUT  # a rank waits longer than its process group would
    first, second = run_ranks(generate_on_rank, 2, tmp_path / "weights")
    assert "one changed tensor of each kind" in first["unchanged"] and second["unchanged"] == ""
    assert not any("version -1" in line for line in first["lines"]) and "generates with version 0" in first["lines"][0]
    assert first["temperatures"] == [0.67, 0.7, 0.73, 1.0]  # 1 of the probe
    assert "KL divergence" in first["mismatch"] and "rollout.urls" in first["mismatch"] and second["mismatch"] == ""
    assert "entropy" in first["sampler"] and "rollout.urls" in first["sampler"] and second["sampler"] == ""
    for name, version in (("version 1", 1), ("version 2", 2), ("broadcast", 2)):
        assert first[name] == second[name]
        for request, completion in zip(REQUESTS, first[name], strict=True):
            tokens, logprobs, _, versions, *_ = completion
            assert tokens == generate(*request) and set(versions) == {version}
            assert logprobs == [logprob(version, token) for token in tokens]
    assert first["folders"] == ["version-00000002"] and first["left"] == 0
    files = {"model.safetensors": {"bytes": 9, "sha256": hashlib.sha256(b"weights 2").hexdigest()}}
    assert first["manifest"] == {"version": 2, "files": files}
    assert first["slow"] == second["slow"] and first["slow"][0][2] == "abort"
    assert "rollout.urls" in first["error"] and second["error"] == ""
    # Started again with other options, it generates nothing more.
    assert "KL divergence" in first["came back"] and second["came back"] == ""
    assert any("is excluded" in line and "KL divergence" in line for line in first["lines"])
    assert second["lines"] == [] and any("is excluded" in line for line in first["lines"])
    # The server was started again between update and rollout: all ranks sent the weights in the middle of the rollout.
    assert first["stopped"] is None and second["stopped"] is None and not first["generates on"]
    assert "generates with version 2" in first["lines"][-2] and "a KL divergence of 0" in first["lines"][-1]
    assert first["received"] == [(f"tensor {number}", [[2 * (30.0 + number)] * 3] * 2) for number in range(3)]
