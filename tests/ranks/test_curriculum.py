"""The debug curriculum by its own files: three phases on three layouts, each from the checkpoint of the one before."""

import json
from pathlib import Path

import pytest

from glm46.config.loader import dump_config, load_config
from glm46.config.run_config import RunConfig
from glm46.run.schedule import learning_rate_factor
from tests.builders import TINY, metric_rows, model_table, write_source
from tests.harness import start
from tests.ranks.forked_launch import launch

FOLDER = Path(__file__).parents[2] / "train_configs"
STEPS = {1: 2, 2: 2, 3: 8}
"""Steps of each phase; those of the third are two of each stage."""


def small_phase(number: int, sources: Path, outputs: Path) -> RunConfig:
    """A phase with a smaller model, less text and fewer steps. Its lengths, its batches and its layout stay."""
    config = load_config(FOLDER / f"debug_phase{number}.toml")
    content = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    content["model"] = model_table(**content["model"]["shape"], **TINY)
    content["job"]["dump_folder"] = str(outputs / f"phase{number}")
    for source in content["data"]["sources"]:
        source["path"] = str(sources / source["name"])
        del source["recipe"]
    training = content["training"]
    if number < 3:
        del training["tokens"]
        training["steps"] = STEPS[number]
    else:  # from five steps of each stage to two
        start = content["lr_scheduler"]["start_tokens"]
        training["tokens"] = training["tokens"] * 2 // 5
        points = [[start + (tokens - start) * 2 // 5, rows] for tokens, rows in training["global_batch_size"]]
        training["global_batch_size"] = points
        for stage in content["data"]["stages"]:
            stage["start_tokens"] = start + (stage["start_tokens"] - start) * 2 // 5
    if number > 1:
        folder = outputs / f"phase{number - 1}" / "checkpoint"
        content["checkpoint"]["initial_load_path"] = str(folder / f"step-{STEPS[number - 1]:06d}")
    del content["validation"], content["inference"]
    content["metrics"] |= {"log_freq": 1, "enable_tensorboard": False}
    return RunConfig.model_validate_json(json.dumps(content))


def test_the_debug_curriculum_trains_from_end_to_end(tokenizer, tmp_path):
    for name in ("library", "packages", "headers", "prose"):
        (tmp_path / name).mkdir()
        write_source(tmp_path / name, tokenizer, documents=200, factor=8)
    rows = {}
    for number, ranks in ((1, "1 on cpu"), (2, "2 = dp_shard 2"), (3, "2 = cp 2")):
        config = small_phase(number, tmp_path, tmp_path)
        file = tmp_path / f"phase{number}.toml"
        file.write_text(dump_config(config))
        said = start(launch, "--config", str(file), "--nproc", "auto").text()
        assert ranks in next(line for line in said.splitlines() if line.startswith("ranks ")), said
        origin = f"phase{number - 1}/checkpoint/step-" if number > 1 else "initial weights"
        assert origin in next(line for line in said.splitlines() if line.startswith("start ")), said
        folder = Path(config.job.dump_folder)
        assert (folder / "checkpoint" / f"step-{STEPS[number]:06d}").is_dir()
        rows[number] = [row for row in metric_rows(folder) if row["kind"] == "train"]
        assert [row["step"] for row in rows[number]] == list(range(1, STEPS[number] + 1))
        # One clock: the rate of each step is that of the whole curriculum, at the tokens before the step.
        clocks = [config.lr_scheduler.start_tokens, *(row["curriculum_tokens"] for row in rows[number])]
        for row, before, after in zip(rows[number], clocks, clocks[1:], strict=False):
            factor = learning_rate_factor(before, config.lr_scheduler, 1, after - before)
            assert row["lr"] == pytest.approx(config.optimizer.lr * factor, rel=1e-6)
    assert [row["curriculum_tokens"] for row in rows[3]] == [245_760 + 6144 * step for step in range(1, 9)]
    # Each phase goes on from the loss of the one before, and the last one learns in all four stages.
    means = [sum(row["loss"] for row in part) / len(part) for part in (
        rows[1], rows[2], *(rows[3][step : step + 2] for step in range(0, 8, 2)),
    )]  # fmt: skip
    assert means == sorted(means, reverse=True) and len(set(means)) == 6, means
