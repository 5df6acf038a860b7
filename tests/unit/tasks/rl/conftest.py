"""A small policy that is reinforced in this process."""

import json

import pytest

from glm46.tasks.rl.rewards import function_pool
from tests.builders import TINY

VOCABULARY = {"tokenizer_path": "train_configs/bytes.tiktoken", "vocab_size": 292, "num_nextn_predict_layers": 0}


def brightness(answer, options) -> float:
    """The share of characters with an even code: a reward that random weights get some of."""
    return sum(ord(letter) % 2 == 0 for letter in answer.text) / max(len(answer.text), 1)


@pytest.fixture
def make_run(make_config, tmp_path, monkeypatch):
    """A function that makes a run with this reward; keyword arguments are keys of the tables or whole tables."""
    monkeypatch.setitem(function_pool._HERE, "format", brightness)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} is"}) + "\n" for number in range(20)))

    def make(name: str, steps: int, rl: dict | None = None, rollout: dict | None = None, **tables):
        return make_config(
            job={"dump_folder": str(tmp_path / name)},
            model=TINY | VOCABULARY | tables.pop("model", {}),
            data={"document_mask": True, "sources": []},
            rl={
                "algorithm": "gspo", "prompts_per_rollout": 2, "group_size": 4, "prompts": {"file": str(prompts)},
                "rewards": [{"name": "format"}],
            } | (rl or {}),
            rollout={"max_new_tokens": 6} | (rollout or {}),
            **{
                "training": {"steps": steps, "global_batch_size": 8, "local_batch_size": 1, "seq_len": 32},
                "moe": {"sequence_aux_loss_weight": 0.0},
                "checkpoint": {"interval": 1, "keep_latest_k": 2, "async_mode": "disabled"},
            } | tables,
        )  # fmt: skip

    return make
