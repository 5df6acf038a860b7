"""RL on the rewards of a network that was trained on pairs: its numbers, and bad tables."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.config.text_recipe import TextRecipe
from glm46.operate.launch.train_rank import train
from glm46.storage.prepare.pipeline import prepare_text
from glm46.tasks.rl import task as rl_task
from tests.builders import call_here, metric_rows
from tests.step_tensors import step_tensors

TOKENIZER = "train_configs/bytes.tiktoken"


@pytest.fixture
def reward_model(make_run, tmp_path, monkeypatch) -> Path:
    """The step folder of a reward model that has learned to prefer one letter, and the policy that it began as."""
    assert train(make_run("policy", 1)) == 0
    policy = tmp_path / "policy/checkpoint/step-000001"
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    rows = [{"prompt": f"{n} is", "chosen": "b" * (1 + n % 4), "rejected": "a" * (1 + n % 3)} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"input": (str(tmp_path / "pairs.jsonl"),), "output": str(tmp_path / "pairs"), "format": "preference"}
    prepare_text(
        TextRecipe(**recipe, max_tokens=64, name="pairs", processes=1, tokenizer=TOKENIZER), report=lambda line: None
    )
    run = make_run("reward", 4)
    table = run.model_dump(exclude_unset=True) | {"rl": None, "rollout": None}
    table |= {
        "data": {"sources": [{"name": "pairs", "path": str(tmp_path / "pairs"), "packing": "best_fit"}]},
        "finetune": {"preference": {"loss_type": "reward"}},
        "training": table["training"] | {"seq_len": 64, "global_batch_size": 2},
    }
    table["data"]["document_mask"] = True
    table["checkpoint"] |= {"initial_load_path": str(policy), "initial_load_model_only": True}
    assert train(type(run).model_validate(table)) == 0
    return tmp_path / "reward/checkpoint/step-000004"


@pytest.mark.slow
def test_rl_gets_the_values_of_the_network_for_answers_without_their_end(make_run, reward_model, monkeypatch, tmp_path):
    seen = []

    def recorded(network, rows):
        seen.append((rows, found := last_values(network, rows)))
        return found

    last_values = rl_task.last_values
    monkeypatch.setattr(rl_task, "last_values", recorded)
    table = {"name": "model", "weight": 2.0, "options": {"load_path": str(reward_model)}}
    start = {"initial_load_path": str(tmp_path / "policy/checkpoint/step-000001"), "initial_load_model_only": True}
    checkpoint = {"interval": 1, "keep_latest_k": 2, "async_mode": "disabled"} | start
    config = make_run("rl", 3, {"rewards": [table, {"name": "format"}]}, checkpoint=checkpoint)
    assert train(config) == 0
    with torch.device("cpu"):
        model = Transformer(resolve_shape(config.model), head="value")
    tensors = {name: tensor for name, tensor in step_tensors(reward_model).items() if name in model.state_dict()}
    model.load_state_dict(tensors)
    with torch.no_grad():
        for rows, values in seen:
            wanted = [model(torch.tensor([row]), labels=torch.tensor([row])).values[0, -1].item() for row in rows]
            assert values == pytest.approx(wanted, abs=1e-5)
    assert len(seen) >= 3 and len({round(value, 4) for value in seen[0][1]}) > 1
    lines = metric_rows(tmp_path / "rl")
    rows = [row for row in lines if "reward_part/model" in row]
    rollouts = [values for _, values in seen if len(values) == 8]  # the others are of answers that are shown
    assert len(rows) == 3
    for row, values in zip(rows, rollouts, strict=True):
        assert row["reward_part/model"] == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert row["reward"] == pytest.approx(2 * row["reward_part/model"] + row["reward_part/format"], abs=1e-5)
    step = tmp_path / "rl/checkpoint/step-000003"
    saved = step_tensors(step)
    assert not any("reward" in name for name in saved)
    shutil.rmtree(step)
    assert train(config) == 0
    assert all(torch.equal(tensor, saved[name]) for name, tensor in step_tensors(step).items())


@pytest.mark.slow
def test_a_language_model_is_no_reward_model(make_run, tmp_path):
    assert train(make_run("policy", 1)) == 0
    table = {"name": "model", "options": {"load_path": str(tmp_path / "policy/checkpoint/step-000001")}}
    with pytest.raises(UserError, match="lacks value_head.weight"):
        train(make_run("rl", 1, {"rewards": [table]}))


def test_tables_of_a_reward_model_that_cannot_be_are_refused(make_run):
    said = check_config(make_run("rl", 1, {"rewards": [{"name": "model"}]}), world_size=1)
    assert any('must be {load_path = "..."}' in one and "rl.rewards[0].options" in one for one in said), said
    away = {"rewards": [{"name": "model", "options": {"load_path": "nowhere"}}]}
    with pytest.raises(UserError, match=r"rl.rewards.options.load_path = 'nowhere': no such folder"):
        train(make_run("rl", 1, away))
