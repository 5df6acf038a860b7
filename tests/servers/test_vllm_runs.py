"""Whole runs of reinforcement learning beside a real vLLM on a CPU."""

import json
from pathlib import Path

import torch

from glm46.operate.launch.train_rank import train
from glm46.tasks.rl.journal import read_rollout
from glm46.tasks.rl.stepping import StepBuilder
from tests.processes import free_port
from tests.servers.policy import MARKS
from tests.servers.test_vllm_adapters import OPTIONS

pytestmark = MARKS
MODEL = {"head_dim": 32}  # vLLM's least on a CPU


def served(*options: str) -> dict:
    """Keys of [rollout] of a run that starts a server."""
    port = free_port()
    launch = ["deploy/vllm/serve_cpu.sh", "{folder}", "{port}", "--max-model-len", "64", *options]
    return {"kind": "vllm", "urls": [f"http://127.0.0.1:{port}"], "launch": launch}


def rows(config) -> list[dict]:
    lines = Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_experts_that_the_server_chose_are_replayed_in_training(make_run, tmp_path, monkeypatch):
    """A trainer with other selection biases than the server agrees with it by the server's routes alone."""
    evaluate = StepBuilder.evaluate

    def biased(self, *arguments, **options):
        for name, tensor in self._networks["policy"].weights().items():
            if name.endswith("correction_bias"):
                tensor.add_(torch.linspace(-1, 1, len(tensor)))
        return evaluate(self, *arguments, **options)

    monkeypatch.setattr(StepBuilder, "evaluate", biased)
    frozen = {"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0}
    mismatch = {}
    for is_replayed in (True, False):
        rl, name = {"routing_replay": is_replayed}, f"replayed {is_replayed}"
        config = make_run(name, 1, rl, served("--no-enable-prefix-caching"), model=MODEL, moe=frozen)
        assert train(config) == 0
        mismatch[is_replayed] = rows(config)[0]["mismatch_kl"]
        found = read_rollout(tmp_path / name / "rollouts", 0)
        assert not is_replayed or found.routes.shape == (len(found.tokens) - len(found), 1, 2)
    print(mismatch)
    assert abs(mismatch[True]) < 1e-10 and mismatch[False] > 1e-8


def test_adapters_of_a_policy_are_trained_on_what_they_drew(make_run, tmp_path):
    frozen = {"moe": {"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0}, "model": MODEL}
    checkpoint = {"interval": 1, "keep_latest_k": 2, "async_mode": "disabled"}
    assert train(make_run("base", 1, **frozen)) == 0
    start = {"initial_load_path": str(tmp_path / "base/checkpoint/step-000001"), "initial_load_model_only": True}
    targets = {"name": "lora", "rank": 4, "targets": ["attention", "dense", "shared_experts"]}
    adapted = frozen | {"adapter": targets, "checkpoint": checkpoint | start, "optimizer": {"lr": 0.05}}
    config = make_run("adapted", 3, None, served(*OPTIONS) | {"send_adapters": True}, **adapted)
    assert train(config) == 0
    found = rows(config)
    print([row["mismatch_kl"] for row in found])
    assert len(found) == 3 and all(abs(row["mismatch_kl"]) < 1e-9 for row in found)
    assert [path.name for path in Path(config.job.dump_folder, "rollout_weights").iterdir() if path.is_dir()] == [
        "base"
    ]


def test_policy_is_broadcast_to_a_server_that_the_run_starts(make_run):
    config = make_run("broadcast", 3, None, served() | {"weights": "broadcast"}, model=MODEL, optimizer={"lr": 0.05})
    assert train(config) == 0
    found = rows(config)
    print([row["mismatch_kl"] for row in found])
    assert len(found) == 3 and all(abs(row["mismatch_kl"]) < 1e-9 for row in found)
    assert not [path for path in Path(config.job.dump_folder, "rollout_weights").iterdir() if path.is_dir()]


def test_mismatch_in_bf16_stays_below_the_goal(make_run):
    """Of policies whose logits differ as those of a trained one; each side rounds by kernels of its own."""
    training = {"steps": 5, "global_batch_size": 32, "local_batch_size": 4, "seq_len": 64}
    config = make_run(
        "bf16", 5, {"prompts_per_rollout": 8}, served("--dtype", "bfloat16") | {"max_new_tokens": 40},
        model=MODEL | {"initializer_range": 0.1}, optimizer={"lr": 1e-3},
        training=training | {"mixed_precision_param": "bfloat16"},
    )  # fmt: skip
    assert train(config) == 0
    found = [row["mismatch_kl"] for row in rows(config)]
    print(found)
    assert len(found) == 5 and 0 < sum(found) / 5 < 2e-4  # a step of 32 samples gave 3e-5 to 1.8e-4
