"""A real vLLM on a CPU gets the weights of a policy over a process group (gloo), its drafting layer included."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch

from glm46.rollout import server_pool
from glm46.rollout.http_calls import call
from tests.servers.policy import CLOSE, FAR, MARKS, Policy, gap, served

pytestmark = MARKS
DRAFTS = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
DRAFTS += ("--worker-extension-cls", "draft_reader.Extension")


class BroadcastPolicy(Policy):
    """Nothing of it is on a disk behind the start."""

    weights = "broadcast"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with served(BroadcastPolicy, tmp_path_factory.mktemp("vllm"), *DRAFTS) as made:
            yield made


def test_each_update_reaches_model_and_draft(policy):
    old = copy.deepcopy(policy.model)
    policy.engine.generate(policy.requests, policy.rules)  # fills the prefix cache
    began = time.monotonic()
    policy.step()
    print(f"update: {time.monotonic() - began:.2f} s")
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.model, policy.requests, completions) < CLOSE
    assert gap(old, policy.requests, completions) > FAR
    assert {span.version for one in completions for span in one.spans} == {policy.version}
    assert not list((policy.folder / "weights").glob("version-*"))
    layer = policy.shape.num_hidden_layers
    body = {"method": "read_draft", "args": [f"model.layers.{layer}.eh_proj.weight"]}
    values = call(policy.server.url, "/collective_rpc", body, seconds=10)["results"][0]["values"]
    assert torch.equal(torch.tensor(values), policy.model.mtp["0"].eh_proj.weight.flatten()[:64])


def test_server_that_comes_back_gets_the_weights_in_the_rollout(policy, monkeypatch):
    monkeypatch.setattr(server_pool, "_RESTART_TICK_SECONDS", 0.5)
    policy.server.kill()
    policy.serve()
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.model, policy.requests, completions) < CLOSE
    assert f"draws with version {policy.version}" in policy.lines[-1]
