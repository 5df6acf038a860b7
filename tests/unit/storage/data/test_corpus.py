"""Checks of a run's text before anything is built."""

from dataclasses import replace

import pytest

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.run.plan import resolve_plan
from glm46.storage.data import corpus
from glm46.storage.data.corpus import check_epochs, describe_sources, load_text, plan_sources
from glm46.storage.data.manifest import Split, load_manifest
from tests.builders import with_shape


def test_budget_in_steps_follows_the_ramp(make_config):
    config = make_config(training={"steps": 3, "seq_len": 16, "global_batch_size": [[0, 2], [64, 4]]})
    # Clocks 0, 32 and 80 ask for 2, 3 and 4 sequences, rounded down to whole micro-batches of 2 rows.
    assert resolve_plan(config).budget_tokens == (2 + 2 + 4) * 16
    assert resolve_plan(make_config(training={"steps": None, "tokens": 77})).budget_tokens == 77


def test_source_may_not_be_read_more_often_than_it_allows(make_config, source_folder):
    source = {"name": "test", "path": str(source_folder)}
    manifests = load_text(resolve_plan(make_config(data={"sources": [source]})))[1]
    tokens = manifests["test"].splits["train"].tokens
    rows = (tokens - 1 - 1) // 16  # one target beyond the row, and one more for the MTP layer
    training = {"steps": None, "tokens": 2 * rows * 16}

    def plan_with(limit: float):
        return resolve_plan(make_config(data={"sources": [source | {"max_epochs": limit}]}, training=training))

    for limit in (2.0, 2.5):
        check_epochs(plan_with(limit), manifests)
    with pytest.raises(UserError, match=r"max_epochs = 1\.9: test would be read 2 times in"):
        check_epochs(plan_with(1.9), manifests)


def test_planned_tokens_and_epochs_are_shown_per_source(make_config, source_folder):
    source = {"name": "test", "path": str(source_folder)}
    config = make_config(data={"sources": [source, source | {"name": "more", "weight": 3.0}]}, training={"steps": 10})
    plan = resolve_plan(config)
    manifests = load_text(plan)[1]
    plans = plan_sources(plan, manifests)
    assert [plan.tokens for plan in plans] == [
        10 * 2 * config.training.seq_len / 4,
        10 * 2 * config.training.seq_len * 3 / 4,
    ]
    assert plans[1].epochs == pytest.approx(3 * plans[0].epochs, rel=1e-12)
    line = describe_sources(plan, manifests)[1]
    assert "source       more: " in line and f"{plans[1].tokens:,.0f} planned, {plans[1].epochs:.3g} epochs" in line


@pytest.mark.slow
def test_launch_shows_the_plan_and_refuses_too_many_epochs(make_config, source_folder, tmp_path, capfd):
    source = {"name": "test", "path": str(source_folder), "max_epochs": 0.01}
    file = tmp_path / "run.toml"
    file.write_text(dump_config(make_config(data={"sources": [source]})))
    assert main(["launch", "--config", str(file), "--nproc", "1"]) == 2
    shown = capfd.readouterr()
    assert "tokens in 60 documents; 128 planned, " in shown.out
    assert (
        "max_epochs = 0.01: test would be read" in shown.err and "train on fewer tokens, lower its weight" in shown.err
    )


def test_another_tokenizer_and_no_held_out_documents_are_refused(make_config, source_folder, monkeypatch):
    source = {"name": "test", "path": str(source_folder)}
    config, manifest = (
        make_config(data={"sources": [source]}, validation={"enable": True}),
        load_manifest(source_folder),
    )
    nothing_held = replace(manifest, splits=manifest.splits | {"validation": Split.from_shards(())})
    no_targets = replace(manifest.splits["validation"], documents=3, tokens=3)
    no_targets = replace(manifest, splits=manifest.splits | {"validation": no_targets})
    for found, reason in (
        (replace(manifest, tokenizer="other"), "its tokens were made with another tokenizer"),
        (nothing_held, "validation.enable = true.*held_out"),
        (no_targets, "validation.enable = true.*held_out"),
    ):
        monkeypatch.setattr(corpus, "load_manifest", lambda _, found=found: found)
        with pytest.raises(UserError, match=reason):
            load_text(resolve_plan(config))


def test_a_small_vocabulary_and_a_missing_source_are_reported_together(make_config, tmp_path):
    config = make_config(data={"sources": [{"name": "none", "path": str(tmp_path / "none")}]})
    config = with_shape(config, vocab_size=8191)
    with pytest.raises(UserError) as caught:
        load_text(resolve_plan(config))
    assert len(caught.value.faults) == 2
    assert caught.value.faults[0].startswith(
        "model.shape.vocab_size = 8191: the tokenizer 'builtin' has ids up to 8191;"
    )


def test_a_prompt_without_room_for_a_continuation_is_refused_before_training(make_config, tokenizer):
    prompt = "def function_1(" * 40
    tokens = len(tokenizer.encode(prompt))
    keys = {"model": {"max_position_embeddings": tokens}, "inference": {"prompt": prompt}}
    with pytest.raises(UserError, match=f"inference.prompt: its {tokens} tokens leave none of .* = {tokens}.*shorten"):
        load_text(resolve_plan(make_config(**keys)))
    keys["model"]["max_position_embeddings"] += 1
    assert load_text(resolve_plan(make_config(**keys)))
