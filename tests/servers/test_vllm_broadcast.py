"""A real vLLM on a CPU gets the weights of a policy over a process group (gloo), its drafting layer included."""

import copy
import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from glm46.tasks.rl.rollout import servers, weight_group
from tests.servers.policy import CLOSE, FAR, MARKS, Policy, gap, served
from tests.unit.tasks.rl.rollout.waiting import call

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
    assert {version for one in completions for version in one.versions} == {policy.version}
    assert not list((policy.folder / "weights").glob("version-*"))
    layer = policy.shape.num_hidden_layers
    body = {"method": "read_draft", "args": [f"model.layers.{layer}.eh_proj.weight"]}
    values = call(policy.server.url, "/collective_rpc", body, seconds=10)["results"][0]["values"]
    assert torch.equal(torch.tensor(values), policy.model.mtp["0"].eh_proj.weight.flatten()[:64])


@pytest.mark.parametrize("broken", [1, 12, 30])
def test_update_that_broke_in_its_middle_is_made_good_by_the_next(policy, monkeypatch, broken):
    """vLLM counts what a failed load brought as a part of the next load, unless the extension puts it back."""
    block, numbers = weight_group._block, itertools.count()

    def damaged(*arguments):
        text, found = block(*arguments)
        found[text + 3] ^= next(numbers) == broken
        return text, found

    monkeypatch.setattr(weight_group, "_block", damaged)
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.5)
    began = time.monotonic()
    policy.step()
    print(f"two updates: {time.monotonic() - began:.2f} s, {next(numbers)} buckets, {policy.lines[-3:]}")
    assert next(numbers) > broken + 30 and any("checksum" in line for line in policy.lines[-3:])
    assert any(line.endswith(f"generates with version {policy.version}") for line in policy.lines[-2:])
    assert gap(policy.model, policy.requests, policy.engine.generate(policy.requests, policy.rules)) < CLOSE


def test_server_that_comes_back_gets_the_weights_in_the_rollout(policy, monkeypatch):
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.5)
    policy.server.kill()
    policy.serve()
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.model, policy.requests, completions) < CLOSE
    assert f"generates with version {policy.version}" in policy.lines[-1]
