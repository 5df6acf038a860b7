"""A checkpoint states the validation loss of its own step, or none."""

import json
from pathlib import Path

from glm46.operate.launch.train_rank import train


def test_a_checkpoint_has_the_loss_of_its_step_or_none(make_config):
    config = make_config(
        training={"steps": 4},
        checkpoint={"interval": 1, "keep_latest_k": 1, "keep_best_k": 4, "keep_every": 1, "async_mode": "disabled"},
        validation={"enable": True, "freq": 3, "steps": 1},
    )
    assert train(config) == 0

    rows = [json.loads(line) for line in (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["validation_loss"] for row in rows if row["kind"] == "validation"}
    assert sorted(measured) == [0, 3, 4]

    for step in range(1, 5):
        folder = config.checkpoint_folder / f"step-{step:06d}"
        manifest = json.loads((folder / "manifest.json").read_text())["body"]
        meta = json.loads((folder / "meta.json").read_text())
        assert manifest["validation_loss"] == measured.get(step)
        assert manifest["validation_step"] == (step if step in measured else None)
        assert meta["validation"].get("validation_loss") == measured.get(step)
