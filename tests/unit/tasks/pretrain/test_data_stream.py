"""Stages of sequence length and mixture inside one run: each sample once, under any layout, batch and resume.

The example of a mixture: four sources of real text, made by their recipes, trained on and judged one by one.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.loader import load_config
from glm46.engine.training import services
from glm46.engine.training.state import Progress
from glm46.operate.estimate.plan_sizes import step_tokens
from glm46.operate.launch.train_rank import train
from glm46.run.plan import resolve_plan
from glm46.storage.data.corpus import load_text, plan_sources
from glm46.storage.data.manifest import Manifest, load_manifest
from glm46.storage.prepare import input_files
from glm46.storage.prepare.pipeline import prepare_run
from glm46.storage.prepare.sharding import SplitWriter, save_manifest
from glm46.tasks.pretrain.data_stream import DataStream, rows_read
from tests.builders import call_here, metric_rows

STAGES = [
    {"start_tokens": 0, "seq_len": 16, "documents": [0.0, 0.6]},
    {"start_tokens": 500, "seq_len": 16, "weights": [1.0, 0.0], "documents": [0.0, 0.6]},
    {"start_tokens": 900, "seq_len": 32, "weights": [0.25, 0.75], "documents": [0.6, 1.0]},
    {"start_tokens": 2_000, "seq_len": 16, "weights": [0.0, 2.0], "documents": [0.0, 0.6]},
]


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory, tokenizer):
    """Documents of tokens that come once each; their parity is their source."""
    sources = []
    for which in range(2):
        folder = tmp_path_factory.mktemp(f"source{which}")
        splits, first = {}, 0
        for name, documents in (("train", range(120)), ("validation", range(5))):
            writer = SplitWriter(folder, name, {"tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)})
            for number in documents:
                tokens = 2 * np.arange(first, first + 9 + number % 40, dtype=np.uint32) + which
                first += len(tokens)
                tokens[-1] = tokenizer.eos_id
                ends = np.array([len(tokens)])
                writer.add({"tokens": tokens, "doc_ends": ends, "text_bytes": ends}, np.array([True]))
            splits[name] = writer.finish()
        save_manifest(Manifest(folder, "test", tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id, splits))
        sources.append({"name": "ab"[which], "path": str(folder), "packing": ("concatenate", "best_fit")[which]})
    return sources


@pytest.fixture
def staged_run(make_config, two_sources):
    """A function that makes a run of the stages above."""

    def make(**tables):
        tables = {"data": {"sources": two_sources, "stages": STAGES, "document_mask": True}} | tables
        tables["training"] = {"seq_len": 32, "steps": None, "tokens": 4_000} | tables.get("training", {})
        return make_config(**tables)

    return make


def stream_of(config, manifests, ranks=1, rank=0, rows=1) -> DataStream:
    """The stream of one rank, without a process group."""
    config = config.model_copy(update={"training": config.training.model_copy(update={"local_batch_size": rows})})
    cluster = SimpleNamespace(dp_rank=rank, meshes=SimpleNamespace(pipeline=None))
    return DataStream(resolve_plan(config, ranks), cluster, manifests)


def samples(batches):
    """The rows of batches by sample number, as lists; each number at most once."""
    found = {}
    for batch in batches:
        for j, number in enumerate(batch["sample_numbers"].tolist()):
            if number >= 0:
                assert number not in found
                row = {key: batch[key][j].tolist() for key in ("input_ids", "labels", "mtp_labels", "document_ids")}
                found[number] = row
    return found


def stream(config, manifests, plan):
    """All samples of a run whose steps are (ranks, rows, micro-batches, resumes) in turn, and its progress."""
    progress, found, streams, last, step = Progress(), {}, [], None, 0
    while progress.tokens < config.training.tokens:
        ranks, rows, micro_batches, resumes = plan[step % len(plan)]
        if resumes or (ranks, rows) != last:
            streams = [stream_of(config, manifests, ranks, r, rows) for r in range(ranks)]
        last = (ranks, rows)
        batches_of_ranks = [stream_of_rank.next(progress, ranks * rows * micro_batches) for stream_of_rank in streams]
        here = samples(batch for batches in batches_of_ranks for batch in batches.micro_batches)
        first = progress.samples
        progress.advance(
            sequences=batches_of_ranks[0].sequences, seq_len=batches_of_ranks[0].seq_len, was_skipped=False
        )
        assert sorted(here) == list(range(first, progress.samples)), "each sample of a step on one rank"
        found |= here
        step += 1
    return found, progress


@pytest.fixture
def reference(staged_run):
    """The run, its manifests, and its samples one by one."""
    config = staged_run()
    assert check_config(config, world_size=1) == []
    manifests = load_text(resolve_plan(config, 1))[1]
    return config, manifests, stream(config, manifests, [(1, 1, 1, False)])[0]


@pytest.mark.slow
def test_samples_do_not_depend_on_ranks_batches_or_resumes(reference):
    config, manifests, expected = reference
    steps = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 5), st.booleans())

    @settings(max_examples=6)
    @given(plan=st.lists(steps, min_size=1, max_size=4))
    def same(plan):
        found, _ = stream(config, manifests, plan)
        assert all(found[g] == expected[g] for g in found if g in expected)
        assert set(expected) - set(found) == set()

    same()


def test_stages_have_their_length_mixture_and_documents(reference, tokenizer):
    config, manifests, expected = reference
    stages = resolve_plan(config, 1).text_stages
    # 500 tokens are 31.25 samples of 16, so the next stage begins at 512; its 388 tokens are 24.25 samples; and so on.
    assert [(s.first, s.stop) for s in stages] == [(0, 32), (32, 57), (57, 91), (91, None)]
    seen: list[dict[str, set]] = []
    for stage in stages:
        rows = [expected[g] for g in expected if g >= stage.first and (stage.stop is None or g < stage.stop)]
        assert {len(row["input_ids"]) for row in rows} == {stage.seq_len}
        ids = {i for row in rows for i, d in zip(row["input_ids"], row["document_ids"], strict=True) if d >= 0}
        seen.append(ids - {tokenizer.eos_id})
    assert {i % 2 for i in seen[0]} == {0, 1} and {i % 2 for i in seen[1]} == {0} and {i % 2 for i in seen[3]} == {1}
    short, long = seen[0] | seen[1] | seen[3], seen[2]
    assert long and not short & long, "no document is cut in two ways"


def test_a_stage_goes_on_where_an_earlier_one_of_its_kind_stopped(reference, tokenizer):
    config, manifests, expected = reference
    ids = [i for g in expected if g < 57 for i in expected[g]["input_ids"] if i % 2 == 0 and i != tokenizer.eos_id]
    assert plan_sources(resolve_plan(config, 1), manifests)[0].epochs < 1
    # Both stages read a for a part of a pass: no token of it comes twice.
    assert len(ids) > 600 and len(set(ids)) == len(ids)


def test_planned_tokens_are_those_that_are_read(reference):
    config, manifests, expected = reference
    planned = {plan.name: plan.tokens for plan in plan_sources(resolve_plan(config, 1), manifests)}
    # Stage by stage the mixture is exact to two samples.
    assert sum(planned.values()) == 4_000
    first, second, third, fourth = 32 * 16, 25 * 16, 34 * 32, 4_000 - 512 - 400 - 1_088
    assert planned["a"] == pytest.approx(first / 2 + second + third / 4)
    assert planned["b"] == pytest.approx(first / 2 + third * 3 / 4 + fourth)
    steps = config.model_copy(update={"training": config.training.model_copy(update={"tokens": None, "steps": 20})})
    # Steps of ten samples: 32, 25 and 34 are cut into 4, 3 and 4 steps, and nine are left for the last stage.
    batches = steps.model_copy(update={"training": steps.training.model_copy(update={"global_batch_size": 10.0})})
    plan = resolve_plan(batches, 1)
    assert plan.budget_tokens == first + second + third + 9 * 10 * 16
    assert step_tokens(plan) is None and resolve_plan(config, 1).budget_tokens == 4_000


def test_the_next_phase_continues_after_what_was_read(reference, two_sources):
    config, manifests, expected = reference
    plan = resolve_plan(config, 1)
    _, progress = stream(config, manifests, [(1, 2, 2, False)])
    entries = rows_read(plan, manifests, progress)
    assert len(json.dumps(entries)) <= 1_024 * len(two_sources)
    kinds = {(name.split(":")[0], length): rows for name, length, _, _, rows in entries}
    assert set(kinds) == {("a", 16), ("b", 16), ("a", 32), ("b", 32)} and sum(kinds.values()) == progress.samples
    later = Progress(read_before=entries)
    one = stream_of(config, manifests).next(later, 1).micro_batches[0]
    assert one["input_ids"][0].tolist() != expected[0]["input_ids"]
    # Counted on from there, whatever comes after.
    later.samples = 10
    assert sum(entry[-1] for entry in rows_read(plan, manifests, later)) == progress.samples + 10


def last_step(dump_folder):
    """The newest step folder of a run."""
    return max((dump_folder / "checkpoint").glob("step-*"))


@pytest.mark.slow
def test_a_staged_run_trains_resumes_bit_for_bit_and_hands_its_place_on(staged_run, tmp_path):
    common = {
        "lr_scheduler": {"total_tokens": 10_000},
        "training": {"global_batch_size": [[0, 10], [2_000, 20]], "tokens": 2_300},
        "checkpoint": {"interval": 100, "async_mode": "disabled", "keep_latest_k": 1},
    }
    figures = []
    for name in ("whole", "halves"):
        config = staged_run(job={"dump_folder": str(tmp_path / name)}, **common)
        if name == "halves":
            part = staged_run(
                job={"dump_folder": str(tmp_path / name)},
                **common | {"training": common["training"] | {"tokens": 1_200}},
            )
            assert train(part) == 0
        assert train(config) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        figures.append([(row["step"], row["tokens"], row["batch_tokens"], row["loss"]) for row in rows])
    assert figures[0][-1][1] >= 2_300 and figures[0] == figures[1]
    assert (
        "stage 3 of 4: 32 tokens per sequence, a 25.0%, b 75.0%; samples 57 to 90"
        in (tmp_path / "whole" / "log.txt").read_text()
    )
    step = last_step(tmp_path / "whole")
    following = staged_run(
        job={"dump_folder": str(tmp_path / "next")}, checkpoint={"initial_load_path": str(step)},
        training={"tokens": 64, "local_batch_size": 2},
    )  # fmt: skip
    assert train(following) == 0
    earlier, later = (json.loads((folder / "meta.json").read_text()) for folder in (step, last_step(tmp_path / "next")))
    rows_of_both = later["progress"]["samples"] + sum(entry[-1] for entry in earlier["read"])
    assert sum(entry[-1] for entry in later["read"]) == rows_of_both


@pytest.mark.parametrize("stages, fault", [
    ([{"start_tokens": 5}], "data.stages[0].start_tokens = 5: the run begins at"),
    ([{"start_tokens": 0}, {"start_tokens": 0}], "data.stages[1].start_tokens = 0: must be above 0"),
    ([{"start_tokens": 0, "weights": [1.0]}], "must have one weight for each of the 2 sources"),
    ([{"start_tokens": 0, "seq_len": 64}], "must be at most training.seq_len = 32"),
    ([{"start_tokens": 0}, {"start_tokens": 9, "seq_len": 16}], "both read a, b with different"),
])  # fmt: skip
def test_stages_that_make_no_sense_are_refused(staged_run, two_sources, stages, fault):
    config = staged_run(data={"sources": two_sources, "stages": stages})
    assert any(fault in message for message in check_config(config, world_size=1))


def test_stages_of_other_sources_may_differ_in_length(staged_run, two_sources):
    stages = [
        {"start_tokens": 0, "weights": [1.0, 0.0]}, {"start_tokens": 99, "seq_len": 16, "weights": [0.0, 1.0]},
    ]  # fmt: skip
    assert check_config(staged_run(data={"sources": two_sources, "stages": stages}), world_size=1) == []
    assert load_manifest(Path(two_sources[0]["path"])).splits["train"].documents == 120


@pytest.mark.slow
def test_a_new_stage_with_a_higher_loss_is_no_spike(make_config, source_folder, two_sources, monkeypatch, tmp_path):
    """The first stage learns repeated sentences, the second one meets tokens that come once."""
    stages = [
        {"start_tokens": 0, "weights": [1.0, 0.0]}, {"start_tokens": 16 * 64 * 36, "weights": [0.0, 1.0]},
    ]  # fmt: skip
    config = make_config(
        data={"sources": [{"name": "test", "path": str(source_folder)}, two_sources[0]], "stages": stages},
        training={
            "seq_len": 64, "steps": 39, "global_batch_size": 16, "local_batch_size": 16, "max_skipped_steps": 0,
        },
    )  # fmt: skip
    monkeypatch.setattr(services, "SPIKE_WINDOW", 16)
    assert train(config) == 0
    rows = metric_rows(tmp_path / "out")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 39 and losses[36] > 2 * losses[35] and rows[-1]["skipped_steps"] == 0


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
    rows = metric_rows(tmp_path / "out")
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
