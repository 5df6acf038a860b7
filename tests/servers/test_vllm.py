"""A real vLLM on a CPU generates rollouts: `pytest -m servers`, with the Python that GLM46_VLLM_PYTHON names."""

import time

import numpy as np
import pytest
import torch

from glm46.compute.model.router import Router
from glm46.tasks.rl.rollout.http_calls import call
from glm46.tasks.rl.rollout.records import Request
from glm46.tasks.rl.rollout.served_policy import EngineError
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from tests.servers.policy import CLOSE, FAR, MARKS, Policy, distributions, gap, served

pytestmark = MARKS


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with served(Policy, tmp_path_factory.mktemp("vllm")) as made:
        yield made


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
    assert len({tuple(row) for row in tokens}) > 12  # other seeds generate other tokens
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

    async def reload(self, method, *arguments, seconds=60.0):
        if method != "glm46_load":
            return await load(self, method, *arguments, seconds=seconds)
        kwargs = {"weights_path": arguments[0]}
        await call(self.url, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}, seconds=seconds)
        return {"version": int(arguments[0][-8:])}

    monkeypatch.setattr(policy.engine._servers, "_restart", 0.0)
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="differ from the trainer's"):
        patch.setattr(VllmServer, "_extension", reload)
        policy.step()
    policy.engine.update(policy.version)
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.on_disk(), policy.requests, completions) < CLOSE


def test_completion_is_aborted_at_its_deadline(policy, monkeypatch):
    monkeypatch.setattr(policy.engine._servers, "deadline", 0.5)
    requests = [Request([5, 6, 7], seed, 500) for seed in range(3)]
    completions = policy.engine.generate(requests, policy.rules._replace(stop=frozenset()))
    assert {one.finish for one in completions} == {"abort"} and all(0 < len(one.tokens) < 500 for one in completions)
    assert gap(policy.on_disk(), requests, completions) < CLOSE


def test_killed_server_comes_back_with_the_latest_weights_and_routes(policy, monkeypatch):
    routed = policy.rules._replace(routes=True)
    for state in policy.engine._servers._servers:
        monkeypatch.setattr(state, "rules", routed)  # what a server is asked for when it joins
    policy.server.kill()
    began = time.monotonic()
    policy.serve("--no-enable-prefix-caching")
    completions = policy.engine.generate(policy.requests, policy.rules)
    print(f"generates again {time.monotonic() - began:.1f} s after it was killed")
    model = policy.on_disk()
    assert gap(model, policy.requests, completions) < CLOSE
    assert f"generates with version {policy.version}" in policy.lines[-1]

    chosen: dict[int, torch.Tensor] = {}
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for number, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, routing, number=number: chosen.update({number: routing.experts}))
    for one, request in zip(policy.engine.generate(policy.requests, routed), policy.requests, strict=True):
        distributions(model, request.prompt, one.tokens)
        ours = np.stack([chosen[number][: len(one.routes)].numpy() for number in sorted(chosen)], 1)  # not those of MTP
        assert one.routes.shape == ours.shape and len(ours) == len(request.prompt) + len(one.tokens) - 1
        assert (np.sort(one.routes, -1) == np.sort(ours, -1)).all(-1).mean() > 0.999
