"""What a run with [rl] must say about prompts, rewards and completions: each fault with key, value and remedy."""

import shlex
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config

RECIPE = Path("train_configs/rl_debug_labels.toml")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--rl="], ["[rollout]", "[rl]"]),
        (["--rollout="], ["[rollout] is absent", "max_new_tokens"]),
        (["--rl.prompts="], ["rl.prompts", "file"]),
        (["--rl.rewards="], ["rl.rewards", "name"]),
        (["--rl.warm_up_rollouts", "0"], ["checkpoint.initial_load_path", "warm_up_rollouts"]),
        (["--rollout.max_new_tokens", "256"], ["rollout.max_new_tokens = 256", "training.seq_len = 256", "lower"]),
        (["--data.document_mask", "false"], ["data.document_mask = false", "set it to true"]),
        (["--rl.rewards[0].name", "maths"], ['rl.rewards[0].name = "maths"', "package.module:function", "'math'?"]),
        (["--rl.rewards[0].name", "remote"], ["rl.rewards[0].name", "url"]),
        (
            ["--rl.rewards[0].name", "code", "--rl.rewards[0].options.seconds", "20"],
            ["rl.rewards[0].options.seconds = 20", "rl.rewards[0].timeout_seconds = 10", "raise that"],
        ),
        (["--inference.prompt", "Hello"], ["inference.prompt", "remove"]),
        (
            ["--validation.enable", "false"],
            ["1 set of prompts in rl.validation", "validation.enable = true", "--rl.validation="],
        ),
        (["--rl.validation="], ["validation.enable = true", "rl.validation is empty", "set it to false"]),
        (["--moe.sequence_aux_loss_weight", "1e-4"], ["moe.sequence_aux_loss_weight", "0.0"]),
        (["--moe.capacity_factor", "1.5"], ["moe.capacity_factor = 1.5", "remove"]),
        (["--training.max_rollbacks", "2"], ["training.max_rollbacks = 2", "remove"]),
        (["--training.spike_sigmas", "8.0"], ["training.spike_sigmas = 8.0", "remove"]),
        (["--rl.prompts.thinking", "true"], ["rl.warm_up_rollouts", "rl.prompts.thinking = false"]),
        (["--training.global_batch_size", "128"], ["rl.warm_up_rollouts", "training.global_batch_size = 256"]),
        (["--rl.kl.weight", "0.1"], ["rl.warm_up_rollouts", "rl.kl.weight = 0.0"]),
        (
            ["--rl.prompts.label_key", "gold", "--rl.rewards[0].name", "format", "--rl.warm_up_rollouts", "0"],
            ['rl.prompts.label_key = "gold"', "format", "math or exact"],
        ),
        (["--rollout.speculative", "true"], ["rollout.speculative = true", "num_nextn_predict_layers = 0", "remove"]),
        (["--rollout.top_p", "0.9"], ["rollout.top_p: unknown key", "trainer would not know", "remove it"]),
        (["--rollout.top_k", "40"], ["rollout.top_k: unknown key", "trainer would not know", "remove it"]),
        (["--rollout.kind", "vllm"], ["rollout.urls", "http://"]),
        (["--rollout.tensor_parallel_degree", "3"], ["rollout.tensor_parallel_degree = 3", "num_attention_heads = 4"]),
        (["--rollout.expert_parallel_degree", "3"], ["rollout.expert_parallel_degree = 3", "n_routed_experts = 8"]),
        (["--rollout.tensor_parallel_degree", "2"], ["rollout.tensor_parallel_degree = 2", "1 process", "take 1"]),
        (["--rollout.max_staleness", "1"], ["rollout.max_staleness = 1", "rollout.kind", "vllm"]),
        (
            ["--rollout.max_staleness", "1", "--rollout.kind", "vllm", "--rl.algorithm", "grpo"],
            ["rollout.max_staleness = 1", 'rl.correction.level = "token"', 'rl.old_policy = "rollout"'],
        ),
        (
            ["--rollout.when_stale", "drop", "--rollout.kind", "vllm"],
            ['rollout.when_stale = "drop"', "rollout.max_staleness = 0", "nothing is ever stale"],
        ),
        (["--rollout.send_adapters", "true"], ["rollout.send_adapters = true", "rollout.kind", "vllm"]),
        (
            ["--rollout.send_adapters", "true", "--rollout.kind", "vllm", "--rollout.urls", '["http://a:1"]'],
            ["rollout.send_adapters = true", "adapter.name", "lora"],
        ),
        (["--rollout.weights", "broadcast"], ['rollout.weights = "broadcast"', "rollout.kind", "vllm"]),
        (
            ["--rollout.send_adapters", "true", "--rollout.weights", "broadcast", "--rollout.kind", "vllm"],
            ["rollout.send_adapters = true", 'rollout.weights = "broadcast"', "remove"],
        ),
        (
            ["--rollout.send_adapters", "true", "--rollout.weights_dtype", "fp8-block", "--rollout.kind", "vllm"],
            ["rollout.send_adapters = true", 'rollout.weights_dtype = "fp8-block"', "remove"],
        ),
    ],
)
def test_a_fault_names_key_value_and_remedy(overrides, said):
    with pytest.raises(UserError) as error:
        load_config(RECIPE, overrides, world_size=1)
    assert any(all(part in fault for part in said) for fault in error.value.faults), error.value.faults


def test_the_recipe_has_no_fault():
    assert load_config(RECIPE, (), world_size=2).rl.resolved().ratio == "sequence"


def test_the_resolved_recipe_runs_again(tmp_path):
    """The dump folder has it, with every default stated."""
    config = load_config(RECIPE)
    (tmp_path / "config.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == config


def test_the_debug_run_takes_servers_by_the_line_of_the_docs():
    """Its file has the number of samples that are generated at once, which holds for servers too."""
    guide = Path("docs/rl.md").read_text().replace("\\\n", "")
    (line,) = [line for line in guide.splitlines() if "--rollout.kind vllm" in line and line.startswith("CONFIG_FILE=")]
    words = shlex.split(line)
    file = Path(words[0].partition("=")[2])
    config = load_config(file, words[words.index("./run_train.sh") + 1 :])
    assert config.rollout.kind == "vllm" and config.rollout.urls and config.rollout.samples_at_once == 256
    config = load_config(file, ["--rollout.kind", "sglang", "--rollout.urls", '["http://a:1"]'])
    assert config.rollout.kind == "sglang"
