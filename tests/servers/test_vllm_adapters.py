"""A real vLLM on a CPU gets the adapters of a policy alone, beside the base that it was started with."""

import json
import time
from pathlib import Path

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.engine.inference.loading import load_for_inference
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter, is_adaptable
from glm46.tasks.rl.rollout import servers
from tests.servers.policy import CLOSE, FAR, MARKS, Policy, gap, served

pytestmark = MARKS
RANK, SCALE = 4, 2.0
OPTIONS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")
OPTIONS += ("gate_proj", "up_proj", "down_proj")  # without the experts: vLLM has no kernel for theirs on a CPU


class AdaptedPolicy(Policy):
    """Its base never changes; attention, the dense layer and shared experts have adapters."""

    def __init__(self, folder: Path):
        self.base = folder / "start"
        super().__init__(folder)
        entries = HFNames(self.shape, repeat_shared=False).entries.items()
        names = [name for name, entry in entries if is_adaptable(entry) and ".experts." not in name]
        self.weights = {name: self.model.get_parameter(name).detach().clone() for name in names}
        self.adapters = {}

    def write(self, folder: Path) -> None:
        export_adapter(folder, self.shape, self.adapters, scale=SCALE, base=str(self.base))

    @torch.no_grad()
    def change(self) -> None:
        for name, weight in self.weights.items():
            a, b = (
                torch.randn(size, generator=self.generator) for size in ((RANK, weight.shape[1]), (len(weight), RANK))
            )
            a, b = a / weight.shape[1] ** 0.5, b * 0.05
            module = name.removesuffix(".weight")
            self.adapters |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
            self.model.get_parameter(name).copy_(weight + SCALE * b @ a)

    def on_disk(self) -> Transformer:
        folder, merged = (
            self.folder / f"weights/version-{self.version:08d}",
            self.folder / f"merged-{time.monotonic_ns()}",
        )
        merge_adapter(self.base, folder, merged)
        return load_for_inference(merged, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[0]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with served(AdaptedPolicy, tmp_path_factory.mktemp("vllm"), *OPTIONS) as made:
        yield made


def test_each_update_sends_the_adapters_alone(policy):
    first = policy.on_disk()
    assert gap(first, policy.requests, policy.engine.generate(policy.requests, policy.rules)) < CLOSE
    began = time.monotonic()
    policy.step()
    print(f"update: {time.monotonic() - began:.2f} s")
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.on_disk(), policy.requests, completions) < CLOSE
    assert gap(first, policy.requests, completions) > FAR
    assert {version for one in completions for version in one.versions} == {policy.version}
    folder = policy.folder / f"weights/version-{policy.version:08d}"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == RANK
    assert not list(folder.glob("model*.safetensors"))


def test_server_that_comes_back_gets_the_latest_adapters(policy, monkeypatch):
    monkeypatch.setattr(servers, "_RESTART_TICK_SECONDS", 0.5)
    policy.server.kill()
    policy.serve(*OPTIONS).wait()  # with the base alone, and nobody has told the pool
    completions = policy.engine.generate(policy.requests, policy.rules)
    assert gap(policy.on_disk(), policy.requests, completions) < CLOSE
    assert "glm46-version-" in policy.lines[-2] and f"generates with version {policy.version}" in policy.lines[-1]
