"""A dense model becomes a sparse one in two stages of one run, as GLM-5 did: indexers alone, then everything.

Each document repeats its first 32 symbols, so what follows is known from the token 31 places back and from no other: an
indexer that does not choose it among its 12 keys costs most of what the model has learned.
"""

from pathlib import Path

import numpy as np
import pytest

from glm46.operate.launch.train_rank import train
from glm46.storage.data.tokenizer import load_tokenizer
from tests.builders import metric_rows, small_config, write_tokens

TOKENIZER = "train_configs/bytes.tiktoken"
SYMBOLS, PERIOD, LENGTH, ROWS = 32, 32, 96, 16
TOP_K = 12
DENSE_STEPS, ALONE_STEPS, JOINT_STEPS = 320, 40, 100
STEP_TOKENS = ROWS * LENGTH
MODEL = {
    "flavor": "debug-glm5", "tokenizer_path": TOKENIZER, "vocab_size": 292, "num_hidden_layers": 3, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_nextn_predict_layers": 0,
    "indexer_types": ["full", "full", "shared"],
}  # fmt: skip


def write_repeats(folder: Path, seed: int) -> Path:
    """A prepared source of documents that repeat their beginning."""
    generator = np.random.default_rng(seed)
    tokenizer = load_tokenizer(TOKENIZER)

    def document() -> np.ndarray:
        symbols = np.resize(generator.integers(0, SYMBOLS, PERIOD), LENGTH - 1)
        return np.append(symbols, tokenizer.eos_id).astype(np.uint32)

    rows = {"train": ROWS * (DENSE_STEPS + ALONE_STEPS + JOINT_STEPS + 1), "validation": 8 * ROWS + 1}
    return write_tokens(folder, tokenizer, {name: [document() for _ in range(count)] for name, count in rows.items()})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sparse_model_ends_as_good_as_a_dense_one(tmp_path, seed):
    """Its validation loss is within 1 % of that of a run that is dense instead: with the same weights before, the same
    text and the same learning rates."""
    (tmp_path / "source").mkdir()
    source = write_repeats(tmp_path / "source", seed)

    def run(name: str, steps: int, top_k: int, start: int = 0, checkpoint: dict | None = None, **tables):
        config = small_config(
            source,
            tmp_path / name,
            model=MODEL | {"index_topk": top_k},
            training={"steps": steps, "seq_len": LENGTH, "local_batch_size": ROWS},
            optimizer={"name": "Muon", "lr": 5e-3},
            lr_scheduler={"warmup_tokens": 20 * STEP_TOKENS, "start_tokens": start * STEP_TOKENS},
            validation={"enable": True, "freq": ALONE_STEPS, "steps": 8},
            checkpoint={"interval": ALONE_STEPS, "keep_latest_k": 0, "async_mode": "disabled"} | (checkpoint or {}),
            metrics={"log_freq": ALONE_STEPS},
            debug={"seed": seed},
            **tables,
        )
        assert train(config) == 0
        rows = metric_rows(tmp_path / name)
        return {
            column: {row["step"]: row[column] for row in rows if column in row}
            for column in ("validation_loss", "index_loss")
        }

    def weights_of(name: str, step: int) -> dict:
        folder = tmp_path / name / f"checkpoint/step-{step:06d}"
        return {"initial_load_path": str(folder), "initial_load_model_only": True}

    stages = [
        {"start_tokens": 0, "indexer": "alone"},
        {"start_tokens": ALONE_STEPS * STEP_TOKENS, "indexer": "joint"},
    ]
    end = ALONE_STEPS + JOINT_STEPS
    before = run("before", DENSE_STEPS, LENGTH)
    sparse = run(
        "sparse",
        end,
        TOP_K,
        checkpoint=weights_of("before", DENSE_STEPS),
        data={"stages": stages},
        indexer={"lr": 5e-3},
    )
    dense = run("dense", JOINT_STEPS, LENGTH, start=ALONE_STEPS, checkpoint=weights_of("sparse", ALONE_STEPS))
    first, last = (sparse["index_loss"][step] for step in (1, ALONE_STEPS))
    losses = sparse["validation_loss"]
    ends = losses[end], dense["validation_loss"][JOINT_STEPS]
    print(f"index loss {first:.4f} to {last:.4f}; sparse {losses}; dense {dense['validation_loss']}")
    assert last < first / 5
    # Keys that are chosen by chance are of no use: the choice has been learned.
    assert losses[0] > 2 * before["validation_loss"][DENSE_STEPS] and losses[ALONE_STEPS] < losses[0] / 2
    assert abs(ends[0] / ends[1] - 1) < 0.01, ends
