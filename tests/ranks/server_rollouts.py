"""Two ranks generate from one stub of a server, for longer than their process group waits; print JSON per rank.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/server_rollouts.py
"""

import json
import tempfile
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
from tests.ranks.forked_ranks import run_whole
from tests.unit.tasks.rl.rollout.stub_server import STOP, StubServer, scores

TIMEOUT, DEADLINE = 8, 10.0
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
RULES = SamplingRules(0.7, frozenset({STOP}), 50)
REQUESTS = [Request([prompt, 4], seed, 6) for prompt in (3, 5) for seed in range(1, 4)]


def generate(rank: int, folder: Path) -> dict:
    """What a rank gets and sees."""
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
    return found | {"rank": rank, "left": len(list(folder.iterdir())), "lines": lines}


def main() -> None:
    """Print what each rank found."""
    with tempfile.TemporaryDirectory() as name:
        log, folder = Path(name, "log-"), Path(name, "weights")

        def work(rank: int) -> int:
            join(TIMEOUT)
            Path(name, f"{rank}.json").write_text(json.dumps(generate(rank, folder)))
            dist.barrier()
            leave()
            return 0

        run_whole(2, log, work)
        for rank in range(2):
            print(Path(name, f"{rank}.json").read_text(), flush=True)


if __name__ == "__main__":
    main()
