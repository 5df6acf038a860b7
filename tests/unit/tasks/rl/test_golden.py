"""Advantages, losses and gradients equal those of verl 0.9.1, TRL 1.16 and slime (August 2026) on the same samples."""

import json
from pathlib import Path

import pytest
import torch

from glm46.config.rl import ResolvedRL, RLConfig
from glm46.tasks.rl.fields import overlong_penalty
from tests.unit.tasks.rl.samples import batch_of, policy_step, prepared, value_step

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
# What the peers were told, in our keys.
CASES = {
    "grpo": {"algorithm": "grpo", "kl": {"weight": 0.1}},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dapo": {"algorithm": "dapo", "overlong_share": 0.0},
    "gspo": {"algorithm": "gspo", "clip": {"low": 0.01, "high": 0.02}, "correction": {"high": 1.5}},
    "cispo": {"algorithm": "cispo", "clip": {"low": 0.3, "high": 0.2}},
    "ppo": {
        "algorithm": "ppo",
        "kl": {"weight": 0.1, "where": "reward", "estimator": "k2"},
    },
    "reinforce++": {
        "algorithm": "reinforce++", "kl": {"weight": 0.1, "where": "reward", "estimator": "k1"},
    },
    "reinforce++_baseline": {"algorithm": "reinforce++_baseline"},
    "rloo": {"algorithm": "rloo", "kl": {"weight": 0.2, "where": "reward"}},
    "tv": {"algorithm": "tv", "old_policy": "trainer", "clip": {"low": 0.05, "high": 0.05}},
    "icepop": {"algorithm": "grpo", "correction": {"level": "token", "mode": "mask", "low": 0.7, "high": 1.4}},
    "trl_gspo": {
        "algorithm": "gspo", "clip": {"low": 0.01, "high": 0.28}, "kl": {"weight": 0.1},
        "correction": {"level": "none"},
    },
    "trl_dapo": {"algorithm": "dapo", "overlong_share": 0.0},
    "trl_dr_grpo": {"algorithm": "dr_grpo", "clip": {"high": 0.28}},
    "trl_cispo": {"algorithm": "cispo", "clip": {"low": 1.0, "high": 0.2}},
    "mis": {
        "algorithm": "grpo",
        "correction": {
            "level": "sequence", "high": 2.0, "reject_level": "geometric", "reject_high": 1.25,
        },
    },
    "reject_token": {
        "algorithm": "grpo",
        "correction": {
            "level": "token", "high": 1.5, "reject_level": "token", "reject_low": 0.6, "reject_high": 1.8,
        },
    },
    "reject_sequence": {
        "algorithm": "grpo",
        "correction": {
            "level": "token", "high": 1.5, "reject_level": "sequence", "reject_low": 0.3, "reject_high": 1.2,
        },
    },
    "slime_clip": {
        "algorithm": "grpo", "correction": {"level": "geometric", "mode": "clip", "low": 0.75, "high": 1.0},
    },
    "slime_mask": {
        "algorithm": "grpo",
        "correction": {
            "level": "sequence", "mode": "mask", "low": 0.3, "high": 1.2,
            "reject_level": "token", "reject_low": 0.6, "reject_high": 2.5,
        },
    },
    "slime_sequence": {
        "algorithm": "grpo",
        "correction": {
            "level": "geometric", "high": 1.0, "reject_level": "sequence", "reject_low": 0.25, "reject_high": 1.2,
        },
    },
}  # fmt: skip
TOLERANCE = {"rtol": 2e-6, "atol": 2e-7}
"""Fields are FP32, the inputs of the peers were FP64."""


def table(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def resolved(name: str) -> ResolvedRL:
    """The config of a case. verl was told another discount than that of the presets, and for PPO another weight of
    later differences."""
    config = RLConfig.model_validate({"prompts_per_rollout": 1} | CASES[name]).resolved()
    told = {"ppo": {"gamma": 0.9, "gae_lambda": 0.8}, "reinforce++": {"gamma": 0.9}}
    return config.model_copy(update=told.get(name, {}))


def golden_batch(config: RLConfig) -> dict[str, torch.Tensor]:
    of = {name: table(values) for name, values in GOLDEN["inputs"].items()}
    sample = torch.where(of["mask"] > 0, torch.arange(len(of["mask"])).unsqueeze(1), -1)
    tokens = {
        "old_logprobs": of["old"], "rollout_logprobs": of["rollout"], "reference_logprobs": of["reference"],
        "old_values": of["values"], "new": of["new"], "new_values": of["new_values"],
    }  # fmt: skip
    return prepared([batch_of(tokens, sample)], of["rewards"], torch.tensor(GOLDEN["groups"]), config)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_that_of_the_peer(name):
    config = resolved(name)
    batch, expected = golden_batch(config), GOLDEN["cases"][name]
    _, metrics, (gradient,) = policy_step([batch], config, seq_len=batch["labels"].shape[1])
    if name == "mis":  # verl divided the weights by their mean
        mean = batch["correction"].double().sum() / table(expected["correction"]).sum()
        batch["correction"], gradient = batch["correction"] / mean, gradient / mean
    if name == "ppo":  # verl bounded the loss of tokens with a negative advantage (dual clip)
        ratio = (table(GOLDEN["inputs"]["new"]) - table(GOLDEN["inputs"]["old"])).exp()
        is_bounded = (batch["advantages"] < 0) & (ratio > 1.3)
        assert is_bounded.any() and not is_bounded.all()
        gradient = gradient.where(~is_bounded, 0.0)
    for field in ("advantages", "returns", "correction"):
        if field in expected:
            torch.testing.assert_close(batch[field].double(), table(expected[field]), **TOLERANCE)
    torch.testing.assert_close(gradient, table(expected["gradient"]), **TOLERANCE)
    assert gradient.abs().max() > 1e-3
    if config.correction.reject_level != "none":
        is_left = table(expected["correction"])[table(GOLDEN["inputs"]["mask"]) > 0] > 0
        assert 4 < is_left.sum() < len(is_left) - 4, "some tokens leave the loss, others stay"
    # verl counts the bound of the dual clip apart.
    if name != "ppo" and "clipped" in expected:
        assert metrics["clip_fraction"] == pytest.approx(expected["clipped"], abs=1e-6)
        assert 0 < expected["clipped"] < 1


def test_a_step_of_the_critic_equals_that_of_verl():
    config = resolved("ppo")
    loss, metrics, gradient = value_step(golden_batch(config), config)
    expected = GOLDEN["cases"]["value"]
    torch.testing.assert_close(gradient, table(expected["gradient"]), **TOLERANCE)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(expected["clipped"], abs=1e-6) and expected["clipped"] > 0


def test_the_overlong_penalty_equals_that_of_trl():
    of = GOLDEN["overlong"]
    found = overlong_penalty(table(of["lengths"]), of["longest"], of["buffer"])
    assert found.tolist() == of["penalty"] and min(of["penalty"]) == -1
