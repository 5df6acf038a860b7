"""The example of a mixture: four sources of real text, made by their recipes, trained on and judged one by one."""

import dataclasses
import json
from pathlib import Path

import pytest

from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.operate.launch.train_rank import train
from glm46.run.plan import resolve_plan
from glm46.storage.prepare import input_files
from glm46.storage.prepare.pipeline import prepare_run
from tests.builders import call_here

EXAMPLE = Path(__file__).parents[4] / "train_configs" / "data_example.toml"
TINY = {
    "model.shape.num_hidden_layers": 2, "model.shape.hidden_size": 32, "model.shape.intermediate_size": 48,
    "model.shape.moe_intermediate_size": 16, "model.shape.n_routed_experts": 4, "model.shape.num_experts_per_tok": 2,
    "model.shape.num_attention_heads": 2, "model.shape.num_key_value_heads": 1, "model.shape.head_dim": 16,
    "training.seq_len": 64, "optimizer.name": "AdamW", "training.steps": 4, "training.global_batch_size": 4,
    "validation.freq": 4, "validation.steps": 2, "data.stages[1].start_tokens": 512,
}  # fmt: skip


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A function that loads the example with less text and a small model; it takes further overrides."""
    # Less of the same text, and no processes, which cost a second each to start.
    some = {n: dataclasses.replace(s, max_bytes=400_000) for n, s in input_files.EMBEDDED_SOURCES.items()}
    monkeypatch.setattr(input_files, "EMBEDDED_SOURCES", some)
    monkeypatch.setattr("glm46.storage.prepare.pipeline.call_in_workers", call_here)
    places = {"job.dump_folder": tmp_path / "out"} | {
        f"data.sources[{i}].path": tmp_path / f"source{i}" for i in range(4)
    }
    tokens = [f"--{key}={value}" for key, value in (TINY | places).items()]
    return lambda *overrides: load_config(EXAMPLE, [*tokens, *overrides])


@pytest.mark.slow
def test_four_sources_of_real_text_are_made_mixed_and_judged_one_by_one(example, tmp_path):
    config, lines = example(), []
    manifests = prepare_run(resolve_plan(config), report=lines.append)
    assert list(manifests) == ["library", "packages", "headers", "prose"]
    assert all(manifest.splits["validation"].documents for manifest in manifests.values())
    # Real text holds duplicates, and not all package documentation is prose.
    skipped = [line for line in "\n".join(lines).splitlines() if line.startswith("skipped, ")]
    assert {"duplicate" in line for line in skipped} == {True, False}, skipped
    assert train(config) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    judged = [row for row in rows if "validation_loss" in row][-1]
    # Four steps teach nothing, so each source is near the ln(8192) = 9.01 of a model that knows nothing.
    assert all(8.5 < judged[f"validation_loss/{name}"] < 9.5 for name in manifests)
    assert all(judged[f"validation_bits_per_byte/{name}"] > 1 for name in manifests)

    again = []
    assert prepare_run(resolve_plan(config), report=again.append) == manifests and again == []
    with pytest.raises(UserError, match="made with filter = 'prose', the recipe says 'none'; remove the folder"):
        prepare_run(resolve_plan(example("--data.sources[3].recipe.filter", "none")), report=print)
    with pytest.raises(
        UserError, match=r"source3: made with input = \['builtin:package_docs'\], the recipe says \['mine/"
    ):
        prepare_run(resolve_plan(example("--data.sources[3].recipe.input", '["mine/*.txt"]')), report=print)
