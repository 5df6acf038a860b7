"""Stages that train indexers alone, then with everything else, then not at all.

Each stage changes what it trains and nothing else. A run that stops at any step, also where a stage begins, and is
started again computes what an uninterrupted run does.
"""

import shutil
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.operate.launch.train_rank import train
from tests.builders import computed_rows, small_config
from tests.harness import run_ranks
from tests.step_tensors import tensor_hashes

SPARSE = {
    "flavor": "debug-glm5", "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "index_head_dim": 16, "index_topk": 4,
    "indexer_types": ["full", "shared", "full"],
}  # fmt: skip
STEPS = 6
STEP_TOKENS = 64
TRAINED = ["alone", "alone", "joint", "joint", "frozen", "frozen"]
"""By step."""


def staged(source: Path, folder: Path) -> RunConfig:
    """A run of three stages of two steps each, which saves every step."""
    stages = [
        {"start_tokens": TRAINED.index(training) * STEP_TOKENS, "indexer": training}
        for training in ("alone", "joint", "frozen")
    ]
    return small_config(
        source,
        folder,
        model=SPARSE,
        data={"stages": stages},
        indexer={"lr": 5e-3},
        training={"steps": STEPS, "global_batch_size": 4, "seq_len": STEP_TOKENS // 4},
        optimizer={"name": "Muon", "lr": 1e-2},
        moe={"balance": "proportional", "bias_update_rate": 0.01},
        validation={"enable": True, "freq": 1, "steps": 1},
        # Not in the background, where a save that is due during the previous one is skipped: each step is needed.
        checkpoint={"interval": 1, "keep_latest_k": 0, "async_mode": "disabled"},
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def whole(ranks, source_folder, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(train, ranks, staged(source_folder, folder)) == [0] * ranks
    return folder


def hashes(folder: Path, step: int) -> dict[str, str]:
    """Hashes of all tensors of a step: weights, biases, states of the optimizer."""
    return tensor_hashes(folder / "checkpoint", step)


def test_a_stage_changes_what_it_trains_and_nothing_else(whole):
    """Also of the states of the optimizer, and of the balance of experts."""
    rows = {row["step"]: row for row in computed_rows(whole) if "loss" in row}
    for step, training in enumerate(TRAINED, 1):
        assert ("index_loss" in rows[step], "index_mass" in rows[step]) == (training != "frozen", training == "alone")
        if step == 1:  # no checkpoint has what was before
            continue
        before, after = hashes(whole, step - 1), hashes(whole, step)
        changed = {name for name in after if after[name] != before[name]}
        ours = {name for name in after if not name.startswith("rng.")}
        of_indexers = {name for name in ours if ".self_attn.indexer." in name}
        assert (
            of_indexers
            and changed
            == {
                "alone": of_indexers,
                "joint": ours,
                "frozen": ours - of_indexers,
            }[training]
        )


@pytest.mark.parametrize("stop_after", [2, 1, 3, 4, 5])
def test_a_run_that_stops_in_any_stage_changes_no_bit(ranks, whole, source_folder, tmp_path, stop_after):
    """Steps 2 and 4 are the last ones of their stages. The rows of later steps are those of a run that was killed."""
    for step in range(1, stop_after + 1):
        name = f"checkpoint/step-{step:06d}"
        shutil.copytree(whole / name, tmp_path / name)
    shutil.copy(whole / "metrics.jsonl", tmp_path)
    assert run_ranks(train, ranks, staged(source_folder, tmp_path)) == [0] * ranks
    assert f"resumed after step {stop_after}," in (tmp_path / "log.txt").read_text()
    assert computed_rows(tmp_path) == computed_rows(whole)
    for step in range(stop_after + 1, STEPS + 1):
        assert hashes(tmp_path, step) == hashes(whole, step)


def test_states_of_weights_that_an_earlier_run_had_frozen_are_refused_with_the_remedy(source_folder, tmp_path):
    def run(name: str, training: str, **checkpoint: object) -> int:
        tables = {"model": SPARSE, "indexer": {"train": training}, "training": {"steps": 1}}
        return train(small_config(source_folder, tmp_path / name, checkpoint=checkpoint, **tables))

    assert run("first", "frozen") == 0
    step = {"initial_load_path": str(tmp_path / "first/checkpoint/step-000001")}
    with pytest.raises(
        UserError, match=r"lacks optimizer\.\S+indexer\S+ .* set checkpoint.initial_load_model_only = true"
    ):
        run("second", "joint", **step)
    assert run("second", "joint", **step, initial_load_model_only=True) == 0
