"""What [rl] refuses, with key, value and remedy; what the presets set."""

import re
from pathlib import Path

import pytest
import tomli

from glm46.config import rules_effect, rules_rl
from glm46.config.faults import Fault
from glm46.config.loader import dump_config
from glm46.config.rl import PRESETS, RLConfig
from glm46.config.rules import broken_rules
from glm46.config.run_config import RunConfig
from glm46.config.validation import validate_table

SOUND = """
[model]
flavor = "debug"
[training]
steps = 10
seq_len = 128
global_batch_size = 8
[rl]
prompts_per_rollout = 4
group_size = 4
{}
"""
# Lines of [rl], and parts of the message.
BAD = {
    "the clip of a token's ratio for a sequence's": (
        'algorithm = "gspo"\nclip.high = 0.2',
        ["rl.clip.high = 0.2", 'rl.algorithm = "gspo"', "ratio of a sequence", "3e-4"],
    ),
    "the clip of a sequence's ratio for a token's": (
        'algorithm = "grpo"\nclip = { low = 1e-4, high = 2e-4 }',
        ["rl.clip.low = 0.0001", 'rl.algorithm = "grpo"', "every token", "0.2", '"gspo"'],
    ),
    "an environment without a function": ("environment.max_turns = 2", ["rl.environment.function", "needs it"]),
    "an environment without a command": ('environment.kind = "command"', ["rl.environment.command", "needs it"]),
    "a command of a function": (
        'environment = { function = "a:b", command = ["c"] }', ["rl.environment.command", '"command"'],
    ),
    "a score that nothing reads": (
        'environment = { kind = "command", command = ["c"], score_command = ["d"] }', ['name = "score"', "add"],
    ),
    "a score that nothing gives": ('rewards = [{ name = "score" }]', ["rl.environment", "add"]),
    "over-sampling without a choice": ("over_sampling = 2.0", ["rl.over_sampling = 2.0", "no group is dropped"]),
    "a group of one": ("group_size = 1", ["rl.group_size = 1", "no baseline", "raise rl.group_size"]),
    "half a rollout": ("prompts_per_rollout = 3", ["training.global_batch_size = 8: ", "= 12", "divisor"]),
    "a penalty without weight": ('kl.estimator = "k2"', ['rl.kl.estimator = "k2"', "rl.kl.weight above 0"]),
    "k1 as a loss": ('kl = { weight = 0.1, estimator = "k1" }', ['rl.kl.estimator = "k1"', '"k2" or "k3"']),
    "the old policy in the reward": (
        'algorithm = "tv"\nkl.where = "reward"', ['rl.kl.where = "reward"', 'algorithm = "tv"', '"loss"'],
    ),
    "weights of a policy against itself": ('old_policy = "rollout"', ['rl.old_policy = "rollout"', '"trainer"']),
    "bounds without weights": (
        'algorithm = "grpo"\ncorrection.high = 3.0\ncorrection.low = 0.5', ["rl.correction.low = 0.5", '"token"'],
    ),
    "a lower bound that truncation ignores": ("correction.low = 0.5", ["rl.correction.low = 0.5", '"clip" or "mask"']),
    "a lower bound above 1": (
        'correction = { mode = "mask", low = 1.5 }', ["rl.correction.low = 1.5", "at most 1", "lower it"],
    ),
    "bounds without rejection": (
        "correction.reject_high = 3.0", ["rl.correction.reject_high = 3.0", "rl.correction.reject_level"],
    ),
    "a critic without values": ("critic.lr = 0.1", ["[rl.critic]", '"gae"', "remove [rl.critic]"]),
    "a teacher that is the policy": (
        'algorithm = "distillation"', ['rl.algorithm = "distillation"', "[rl.reference]", "load_path"],
    ),
    "a key of a reference that earlier versions had": (
        'kl.weight = 0.1\nreference = { load_path = "here", load_in_hf = false }',
        ["rl.reference.load_in_hf: unknown key; the folder itself tells its format; remove it"],
    ),
    "a reference that nothing reads": (
        'reference.load_path = "here"', ["[rl.reference]", "rl.kl.weight = 0.0", "remove [rl.reference]"],
    ),
    "a reference of a penalty for the old policy": (
        'algorithm = "tv"\nreference.load_path = "here"',
        ["[rl.reference]", 'algorithm = "tv"', "remove [rl.reference]"],
    ),
    "a reference before any labels are learned": (
        "kl.weight = 0.1\nwarm_up_rollouts = 2", ["checkpoint.initial_load_path: absent", "[rl.reference]"],
    ),
    "a reference that later starts lack": (
        'kl.weight = 0.1\n[checkpoint]\nload_path = "there"',
        ["checkpoint.initial_load_path: absent", "[rl.reference]"],
    ),
    "a critic beside adapters": ('algorithm = "ppo"\n[adapter]', ['rl.advantage = "gae"', "[adapter]", '"gspo"']),
    "adapters that the reference lacks": (
        'kl.weight = 0.1\n[adapter]\ninitial_load_path = "peft"',
        ["adapter.initial_load_path", "convert merge", "[rl.reference]"],
    ),
    "an unknown algorithm": ('algorithm = "grp0"', ['rl.algorithm = "grp0"', "grpo"]),
    "two tasks": ("[finetune]", ["[rl], [finetune]", "remove one"]),
}  # fmt: skip


def read(text: str) -> tuple[RunConfig, list[Fault]]:
    """A config and its faults by the rules of this page; what a run needs beside is none of them."""
    config, faults = validate_table(tomli.loads(text))
    return config, faults + broken_rules(config, None, (rules_rl, rules_effect))


def with_lines(lines: str) -> str:
    text = SOUND.format(lines)
    for key in ("group_size", "prompts_per_rollout"):
        if lines.startswith(f"{key} = "):  # once in a table
            text = text.replace(f"{key} = 4\n", "", 1)
    return text


@pytest.mark.parametrize("name", BAD)
def test_bad_keys_are_refused_with_the_remedy(name):
    lines, parts = BAD[name]
    messages = [fault.message for fault in read(with_lines(lines))[1]]
    assert any(all(part in message for part in parts) for message in messages), messages


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_preset_is_sound_and_its_dump_runs_again(algorithm):
    teacher = '\n[rl.reference]\nload_path = "teacher"' if algorithm == "distillation" else ""
    config, faults = read(with_lines(f'algorithm = "{algorithm}"{teacher}'))
    assert faults == []
    rl = config.rl.resolved()
    assert None not in [getattr(rl, name) for name in ("ratio", "advantage", "whiten", "gamma", "reduction", "critic")]
    again, faults = read(dump_config(config))
    assert faults == [] and again.rl.resolved() == rl


def test_a_stated_key_is_stronger_than_the_preset():
    rl = RLConfig.model_validate(
        {"algorithm": "dapo", "prompts_per_rollout": 1, "clip": {"low": 0.1}, "overlong_share": 0.0}
    )
    assert (rl.resolved().clip.low, rl.resolved().clip.high, rl.resolved().overlong_share) == (0.1, 0.28, 0.0)
    assert rl.resolved().resolved() == rl.resolved()


def test_the_page_states_what_each_preset_sets():
    page = Path(__file__).parents[3].joinpath("docs", "rl_algorithms.md").read_text()
    header = page.index("| `algorithm` | ratio |")
    rows = [line.split("|")[1:7] for line in page[header:].split("\n\n")[0].splitlines()[2:]]
    row_by_name = {re.match(r" `(\S+)`", row[0])[1]: row for row in rows}
    assert row_by_name.keys() == PRESETS.keys()
    for name, row in row_by_name.items():
        rl = RLConfig(algorithm=name, prompts_per_rollout=1).resolved()
        assert row[1].strip() == rl.ratio
        low, high = re.match(r" (\S+), ([\d.e-]+)", row[2]).groups()
        # CISPO's lower bound of 1 bounds nothing.
        assert (0.0 if rl.clip.low == 1 else rl.clip.low) == (0.0 if low == "none" else float(low))
        assert rl.clip.high == float(high)
        assert row[3].split(",")[0].strip(" `") == rl.advantage
        assert row[4].strip(" `") == rl.reduction
