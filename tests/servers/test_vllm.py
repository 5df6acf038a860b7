"""A real vLLM on a CPU draws rollouts: `pytest -m servers`, with the Python that GLM46_VLLM_PYTHON names.

Numbers are in FP32. Both sides round differently: 4e-6 was measured, and 2e-5 is allowed. Two versions of the weights
are 0.01 to 2 apart.
"""

import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from glm46.config.model import Model
from glm46.config.presets import resolve_shape
from glm46.config.rollout import Rollout
from glm46.data.tokenizer import load_tokenizer
from glm46.distributed.process import join, leave
from glm46.huggingface.config_json import config_of
from glm46.huggingface.export_weights import ExportOptions, export_weights
from glm46.huggingface.tokenizer_files import files_beside_weights, stop_ids
from glm46.inference.loading import load_for_inference
from glm46.model.init import fill_parameter
from glm46.model.router import Router
from glm46.model.transformer import Transformer
from glm46.rollout.http_calls import call
from glm46.rollout.records import Request, SamplingRules
from glm46.rollout.server_engine import ServerEngine
from glm46.rollout.server_state import EngineError
from glm46.rollout.vllm_server import VllmServer
from tests.servers.vllm_process import VllmProcess, reason_to_skip

_REASON = reason_to_skip()
pytestmark = [pytest.mark.servers, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]
CLOSE, FAR = 2e-5, 1e-2


class Policy:
    """A small GLM that changes when told, the engine, and the server."""

    def __init__(self, folder: Path):
        self.tokenizer, self.shape = load_tokenizer("builtin"), resolve_shape(Model(flavor="debug"))
        self.model = Transformer(self.shape).eval()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                places = [torch.arange(size) for size in tensor.shape]
                fill_parameter(tensor, places, tensor.shape, seed=0, name=name, std=0.02)
            self.model.lm_head.weight.mul_(6)  # an initial model finds all tokens about equally likely
        self.generator, self.version, self.folder = torch.Generator().manual_seed(0), 0, folder
        self.rules = SamplingRules(1.0, frozenset({self.tokenizer.eos_id, 7}), self.tokenizer.vocab_size)
        self.requests = [Request([3 + n, 50, 1000 + n, 9], seed, 32) for n in range(4) for seed in range(n, n + 4)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.lines: list[str] = []
        config = Rollout(kind="vllm", max_new_tokens=32, urls=[f"http://127.0.0.1:{self.port}"])
        self.engine = ServerEngine(
            config,
            folder=folder / "weights",
            export=self.export,
            score=lambda sequences: [log_probabilities(self.model, row[:1], row[1:]).tolist() for row in sequences],
            probe=[request.prompt * 8 for request in self.requests[::4]],
            padding=range(self.tokenizer.vocab_size, self.shape.vocab_size),
            say=self.lines.append,
        )

    def export(self, folder: Path) -> None:
        config = config_of(self.shape, None, eos_ids=stop_ids(self.tokenizer), dtype="float32")
        files = files_beside_weights(self.tokenizer, max_length=self.shape.max_position_embeddings)
        options = ExportOptions(dtype=torch.float32, other_files=files)
        export_weights(folder, self.shape, config, self.model.state_dict(), options=options)

    def step(self) -> None:
        """Change all weights, and have the server load them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                spread = parameter.std() if parameter.numel() > 1 else 0.0
                parameter.add_(torch.randn(parameter.shape, generator=self.generator) * 0.1 * spread)
        self.version += 1
        self.engine.update(self.version)

    def serve(self, *options: str) -> VllmProcess:
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        self.server = VllmProcess(self.folder / "start", self.port, log, *options)
        return self.server

    def on_disk(self) -> Transformer:
        """The weights that the server has been told to load, read back."""
        found = list((self.folder / "weights").glob("version-*"))
        assert [path.name for path in found] == [f"version-{self.version:08d}"]
        return load_for_inference(found[0], tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[0]


@torch.no_grad()
def distributions(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of all tokens at each place of a completion [T, V]."""
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1)


def log_probabilities(model, prompt, tokens, temperature=1.0):
    """Of the tokens of a completion [T]."""
    return distributions(model, prompt, tokens, temperature)[range(len(tokens)), tokens]


def gap(model, requests, completions, temperature=1.0):
    """The largest difference of a log-probability from the model's."""
    return max(
        (log_probabilities(model, request.prompt, one.tokens, temperature) - torch.tensor(one.logprobs))
        .abs()
        .max()
        .item()
        for request, one in zip(requests, completions, strict=True)
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    join(600)
    made = Policy(tmp_path_factory.mktemp("vllm"))
    made.export(made.folder / "start")
    print(f"vLLM answers after {made.serve().wait():.1f} s")
    made.step()
    yield made
    made.server.kill()
    made.engine.close()
    leave()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_trainer(policy, temperature):
    rules = policy.rules._replace(temperature=temperature)
    completions = policy.engine.generate(policy.requests, rules)
    model = policy.on_disk()
    assert gap(model, policy.requests, completions, temperature) < CLOSE
    # A log-probability is minus the entropy on average, if tokens come from the distribution that it belongs to.
    surprises, variances = [], []
    for request, one in zip(policy.requests, completions, strict=True):
        assert one.spans == [(0, policy.version)] and (one.finish == "stop") == (one.tokens[-1] in rules.stop)
        logp = distributions(model, request.prompt, one.tokens, temperature)
        entropy = -(logp.exp() * logp).sum(-1)
        surprises += (torch.tensor(one.logprobs) + entropy).tolist()
        variances += ((logp.exp() * logp**2).sum(-1) - entropy**2).tolist()
    assert abs(sum(surprises)) < 4 * sum(variances) ** 0.5
    tokens = [one.tokens for one in completions]
    assert len({tuple(row) for row in tokens}) > 12  # other seeds draw other tokens
    again = policy.engine.generate(policy.requests[5:8], rules)
    assert [one.tokens for one in again] == tokens[5:8]  # whatever is in the batch


def test_update_loads_the_new_weights_and_no_cached_prefix(policy):
    old = policy.on_disk()
    policy.engine.generate(policy.requests, policy.rules)  # fills the prefix cache
    began = time.monotonic()
    policy.step()
    print(f"update: {time.monotonic() - began:.2f} s")
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.on_disk(), policy.requests, completions) < CLOSE
    assert gap(old, policy.requests, completions) > FAR


def test_reload_of_vllm_itself_is_found_out(policy, monkeypatch):
    """It answers 200 and leaves experts that are neither old nor new; the probe tells, and a whole load repairs it."""
    load = VllmServer._extension

    def reload(self, method, *arguments, seconds=60.0):
        if method != "glm46_load":
            return load(self, method, *arguments, seconds=seconds)
        kwargs = {"weights_path": arguments[0]}
        call(self.url, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}, seconds=seconds)
        return {"version": int(arguments[0][-8:])}

    monkeypatch.setattr(policy.engine._pool, "_restart", 0.0)
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="differ from the trainer's"):
        patch.setattr(VllmServer, "_extension", reload)
        policy.step()
    policy.engine.update(policy.version)
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.on_disk(), policy.requests, completions) < CLOSE


def test_completion_is_aborted_at_its_deadline(policy, monkeypatch):
    monkeypatch.setattr(policy.engine._pool, "deadline", 0.5)
    requests = [Request([5, 6, 7], seed, 500) for seed in range(3)]
    completions = policy.engine.generate(requests, policy.rules._replace(stop=frozenset()))
    assert {one.finish for one in completions} == {"abort"} and all(0 < len(one.tokens) < 500 for one in completions)
    assert gap(policy.on_disk(), requests, completions) < CLOSE


def test_killed_server_comes_back_with_the_latest_weights_and_routes(policy):
    policy.server.kill()
    began = time.monotonic()
    policy.serve("--no-enable-prefix-caching")
    completions = policy.engine.generate(policy.requests, policy.rules)
    print(f"draws again {time.monotonic() - began:.1f} s after it was killed")
    model = policy.on_disk()
    assert gap(model, policy.requests, completions) < CLOSE
    assert f"draws with version {policy.version}" in policy.lines[-1]

    chosen: dict[int, torch.Tensor] = {}
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for number, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, routing, number=number: chosen.update({number: routing.experts}))
    for one, request in zip(
        policy.engine.generate(policy.requests, policy.rules._replace(routes=True)), policy.requests, strict=True
    ):
        distributions(model, request.prompt, one.tokens)
        ours = np.stack([chosen[number][: len(one.routes)].numpy() for number in sorted(chosen)], 1)  # not those of MTP
        assert one.routes.shape == ours.shape and len(ours) == len(request.prompt) + len(one.tokens) - 1
        assert (np.sort(one.routes, -1) == np.sort(ours, -1)).all(-1).mean() > 0.999
