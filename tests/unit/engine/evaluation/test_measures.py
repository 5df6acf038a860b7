"""Loss by position and needle in a haystack equal plain computations on dense logits."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.errors import UserError
from glm46.engine.evaluation.loss import Loss
from glm46.engine.evaluation.needle import Needle
from glm46.engine.evaluation.position import Position, bucket_edges
from glm46.engine.evaluation.results import Results, measure_rows
from glm46.engine.evaluation.rows import build_batch, equal_lengths, held_out
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampling
from glm46.storage.data.batches import IGNORE
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.tokenizer import GLM_SPECIAL_TOKENS, Tokenizer
from tests.builders import tiny_shape, write_source

SLOW = pytest.mark.slow


def make_model(**changes) -> Transformer:
    """Random weights."""
    model = Transformer(tiny_shape(**changes))
    initialise(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


@pytest.fixture(scope="module")
def manifests(source_folder):
    return {"test": load_manifest(source_folder)}


def measured(model, measure, *, document_mask=True) -> dict:
    loaded = Loaded(model, None, ModelMesh())
    return measure_rows(loaded, measure, Results(None, {}), document_mask, lambda tokens: None)


@torch.no_grad()
def dense_logprobs(model, row) -> torch.Tensor:
    """FP64 log-probabilities of all tokens after each token of a row of one document, [S, V]."""
    return model(row["input_ids"])[0].double().log_softmax(-1)


def test_buckets_cover_each_position_once_and_begin_at_powers_of_two():
    known = {1: [0, 1], 16: [0, 16], 17: [0, 16, 17], 32: [0, 16, 32], 100: [0, 16, 32, 64, 100]}
    assert {length: bucket_edges(length) for length in known} == known
    edges = bucket_edges(196_608)
    assert edges[-2:] == [131_072, 196_608] and all(first < end for first, end in pairwise(edges))


def test_loss_by_position_equals_a_loop_over_dense_logits(model, manifests):
    length = 70
    measure = Position(manifests, lengths=[24, length, 10_000], samples=100, seed=0)
    result = measured(model, measure)
    stream = held_out(manifests["test"])
    starts = np.concatenate([[0], stream.doc_ends()])
    documents = [(start, end) for start, end in pairwise(starts.tolist()) if end - start > length]
    assert 1 < result["documents"] == len(documents) < len(starts) - 1 and result["length"] == length
    losses = []
    for start, _ in documents:
        tokens = np.empty(length + 1, np.int64)
        stream.read(start, tokens)
        logprobs = dense_logprobs(model, {"input_ids": torch.from_numpy(tokens[None, :-1])})
        losses.append([-logprobs[i, tokens[i + 1]].item() for i in range(length)])
    for bucket, (first, end) in zip(result["buckets"], pairwise([0, 16, 32, 64, 70]), strict=True):
        of_documents = [math.fsum(row[first:end]) / (end - first) for row in losses]
        assert (bucket["first"], bucket["last"], bucket["tokens"]) == (first, end - 1, len(losses) * (end - first))
        # FP32 logits of a model whose losses are about 9: the rounding of a few operations.
        assert bucket["loss"] == pytest.approx(np.mean(of_documents), rel=1e-6)
        error = np.std(of_documents, ddof=1) / math.sqrt(len(of_documents))
        assert bucket["standard_error"] == pytest.approx(error, rel=1e-4)
        assert result["columns"][f"position/{first}-{end - 1}"] == bucket["loss"]
    assert result["columns"]["position"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_the_seed_chooses_the_documents_and_no_more_than_asked(manifests):
    chosen = [
        {row.key for row in Position(manifests, lengths=[16], samples=2, seed=seed).rows} for seed in (0, 0, 1, 2)
    ]
    assert chosen[0] == chosen[1] and all(len(keys) == 2 for keys in chosen)
    assert len({frozenset(keys) for keys in chosen}) > 1


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_row_is_text_with_a_line_at_its_depth_and_the_question_at_its_end(manifests, tokenizer, depth):
    measure = Needle(manifests, tokenizer, lengths=[200], depths=[depth], samples=5, seed=3)
    everything = held_out(manifests["test"])
    source = np.empty(everything.length, np.int64)
    everything.read(0, source)
    text = tokenizer.decode(source[source != tokenizer.eos_id])
    for row in measure.rows:
        batch = row.build()
        ids, labels = batch["input_ids"][0].numpy(), batch["labels"][0].numpy()
        assert ids.shape == (200,) and tokenizer.eos_id not in ids
        assert batch["positions"][0].tolist() == list(range(200)) and not batch["document_ids"].any()
        value = labels[labels != IGNORE]
        assert (labels[:-1] == ids[1:])[labels[:-1] != IGNORE].all() and (labels[-len(value) :] != IGNORE).all()
        answer = tokenizer.decode(value)
        before, line, question = tokenizer.decode(np.append(ids, labels[-1])).split("\nThe secret words of ")
        name, rest = line.split(f" are{answer}.\n")
        assert question == f"{name} are{answer}"
        # Cut at tokens, which may be a part of a letter; the source is repeated from its begin.
        assert before in text * 2 and rest in text * 2
        haystack = len(tokenizer.encode(before)) + len(tokenizer.encode(rest))
        assert len(tokenizer.encode(before)) == pytest.approx(depth * haystack, abs=4)


def test_needle_figures_equal_dense_logits_and_a_random_model_knows_nothing(model, manifests, tokenizer):
    measure = Needle(manifests, tokenizer, lengths=[60, 100], depths=[0.0, 1.0], samples=3, seed=0)
    result = measured(model, measure)
    assert [(cell["length"], cell["depth"]) for cell in result["cells"]] == [(60, 0), (60, 1), (100, 0), (100, 1)]
    for cell in result["cells"]:
        loss = tokens = 0
        rows = [row for row in measure.rows if row.key.startswith(f"needle/{cell['length']}/{cell['depth']:g}/")]
        for row in [row.build() for row in rows]:
            logprobs, labels = dense_logprobs(model, row), row["labels"][0]
            for place in (labels != IGNORE).nonzero()[:, 0].tolist():
                loss -= logprobs[place, labels[place]].item()
                tokens += 1
        assert (cell["exact"], cell["samples"]) == (0.0, 3)
        assert cell["answer_loss"] == pytest.approx(loss / tokens, rel=1e-6)
    # Of 8,192 tokens; weights of a standard deviation of 0.02 give nearly equal logits.
    assert result["columns"]["needle_loss"] == pytest.approx(math.log(8192), abs=0.5)
    assert result["columns"]["needle"] == result["columns"]["needle/60"] == 0.0


def test_rows_are_the_same_for_other_lists_of_lengths_and_samples(manifests, tokenizer):
    few = Needle(manifests, tokenizer, lengths=[100], depths=[0.5], samples=2, seed=0)
    many = Needle(manifests, tokenizer, lengths=[60, 100], depths=[0.5, 0.25], samples=4, seed=0)
    other = Needle(manifests, tokenizer, lengths=[100], depths=[0.5], samples=2, seed=1)
    by_key = {row.key: row for row in many.rows}
    for row, changed in zip(few.rows, other.rows, strict=True):
        assert torch.equal(row.build()["input_ids"], by_key[row.key].build()["input_ids"])
        assert not torch.equal(row.build()["input_ids"], changed.build()["input_ids"])


def test_the_loss_of_each_source_and_over_all_is_a_mean_over_its_targets(model, manifests, tokenizer, tmp_path):
    write_source(tmp_path, tokenizer)
    sources = manifests | {"again": load_manifest(tmp_path)}
    measure = Loss(sources, tokenizer, length=16, samples=2, document_mask=False)
    assert [row.key.split("/")[2] for row in measure.rows] == ["test", "test", "again", "again"]
    result = measured(model, measure, document_mask=False)
    loss = targets = text = 0
    for row in [row.build() for row in measure.rows[:2]]:
        logprobs, labels = dense_logprobs(model, row), row["labels"][0]
        for place in (labels != IGNORE).nonzero()[:, 0].tolist():
            loss -= logprobs[place, labels[place]].item()
            targets += 1
            text += len(tokenizer.decode([int(labels[place])]).encode()) * (labels[place] != tokenizer.eos_id)
    assert result["sources"]["test"]["targets"] == targets
    columns = result["columns"]
    assert columns["loss/test"] == pytest.approx(loss / targets, rel=1e-6)
    assert result["sources"]["test"]["perplexity"] == pytest.approx(math.exp(loss / targets), rel=1e-5)
    assert columns["bits_per_byte/test"] == pytest.approx(loss / math.log(2) / int(text), rel=1e-6)
    assert columns["loss"] == pytest.approx(columns["loss/again"]) == pytest.approx(columns["loss/test"])


def test_document_masks_hide_earlier_documents_and_padding_counts_nothing(model, manifests, tokenizer):
    length = 4096  # all held-out documents and padding
    measure = Loss(manifests, tokenizer, length=length, samples=1, document_mask=True)
    stream = held_out(manifests["test"])
    assert stream.length < length
    loss = 0.0
    for start, end in pairwise([0, *stream.doc_ends().tolist()]):
        tokens = np.empty(end - start, np.int64)
        stream.read(start, tokens)
        logprobs = dense_logprobs(model, {"input_ids": torch.from_numpy(tokens[None, :-1])})
        loss -= sum(logprobs[i, token].item() for i, token in enumerate(tokens[1:]))
    masked, open_ = (measured(model, measure, document_mask=mask)["sources"]["test"] for mask in (True, False))
    assert masked["loss"] == pytest.approx(loss, rel=1e-6) and abs(open_["loss"] / loss - 1) > 1e-5


def test_rows_of_equal_length_share_batches_and_ranks_get_equal_numbers(manifests, tokenizer):
    rows = Needle(manifests, tokenizer, lengths=[60, 100], depths=[0.0], samples=5, seed=0).rows
    groups = [[row.length for row in group] for group in equal_lengths(rows, 200)]
    assert groups == [[60] * 3, [60] * 2, [100] * 2, [100] * 2, [100]]
    assert [len(group) for group in equal_lengths(rows, 60, ranks=4)] == [4, 1, 4, 1]
    assert build_batch(rows[:3])["labels"].shape == (3, 60)


@pytest.mark.parametrize("make, words", [
    (lambda given: Position(given[0], lengths=[5000, 4000], samples=1, seed=0), ("4000", "longest", "test")),
    (lambda given: Needle(*given, lengths=[20, 99], depths=[0], samples=1, seed=0), ("20", "at least")),
], ids=["no document is as long", "no room for the needle"])  # fmt: skip
def test_lengths_without_rows_are_refused(manifests, tokenizer, make, words):
    with pytest.raises(UserError) as error:
        make((manifests, tokenizer))
    assert all(word in str(error.value) for word in words)


@pytest.fixture(scope="module")
def small_vocabulary(tokenizer, tmp_path_factory):
    """The first thousand merges of the shipped vocabulary, and a source of it: a head that costs little."""
    ranks = {piece: rank for piece, rank in tokenizer.ranks.items() if rank < 1024}
    special = {name: 1024 + i for i, name in enumerate(GLM_SPECIAL_TOKENS)}
    small = Tokenizer("small", tokenizer.pattern, ranks, special)
    return small, {"test": load_manifest(write_source(tmp_path_factory.mktemp("small"), small))}


STEPS, BATCH, LENGTH, RATE = 480, 32, 64, 4e-3


def train_on_needles(model: Transformer, rows: list) -> None:
    """AdamW on the answers, each row once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(0).permutation(len(rows))[: STEPS * BATCH].reshape(STEPS, BATCH)
    for step, chosen in enumerate(order.tolist()):
        batch = build_batch([rows[i] for i in chosen])
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 40, 1.2 * (1 - step / STEPS))
        sums = model(batch["input_ids"], labels=batch["labels"])
        optimizer.zero_grad()
        (sums.loss / (batch["labels"] != IGNORE).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@SLOW
def test_a_model_that_is_trained_for_it_finds_the_needle_and_greedy_decoding_writes_it(small_vocabulary):
    small, sources = small_vocabulary
    model = make_model(
        vocab_size=small.vocab_size, first_k_dense_replace=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=4, num_nextn_predict_layers=0,
    )  # fmt: skip
    depths = [place / 16 for place in range(17)]
    training = Needle(sources, small, lengths=[LENGTH], depths=depths, samples=-(-STEPS * BATCH // 17), seed=1)
    unseen = Needle(sources, small, lengths=[LENGTH], depths=[0.0, 0.25, 0.5, 0.75, 1.0], samples=20, seed=2)
    before = measured(model, unseen)["columns"]
    assert before["needle"] == 0.0 and before["needle_loss"] == pytest.approx(math.log(small.vocab_size), abs=0.5)
    train_on_needles(model.train(), training.rows)
    results = Results(None, {})
    loaded = Loaded(model.eval(), None, ModelMesh())
    after = measure_rows(loaded, unseen, results, True, lambda tokens: None)["columns"]
    assert after["needle"] >= 0.9 and after["needle_loss"] < 0.2
    # What the figures call exact is what decoding writes.
    for row in unseen.rows[::5]:
        batch = row.build()
        answer = batch["labels"][0][batch["labels"][0] != IGNORE].tolist()
        prompt = batch["input_ids"][0][: LENGTH + 1 - len(answer)].tolist()
        (greedy,) = rows = [Continuation(prompt, len(answer))]
        settings = {"sampling": Sampling(), "stop": frozenset(), "vocab_size": small.vocab_size}
        Generation(decoder_for(model, rows), rows, **settings).run()
        written = greedy.tokens
        assert float(written == answer) == results.figures[row.key][0]


@pytest.mark.parametrize("exact", [0.0, 0.5])
def test_a_picture_of_no_exact_answer_shows_how_far_the_answers_are_from_it(exact, monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    from glm46.engine.evaluation import pictures

    drawn, real = [], figure.Figure
    monkeypatch.setattr(pictures, "Figure", lambda **options: drawn.append(real(**options)) or drawn[0])
    cells = [
        {"length": length, "depth": depth, "samples": 2, "exact": exact * depth, "answer_loss": 2.0 + depth + length}
        for length in (1, 2) for depth in (0.0, 1.0)
    ]  # fmt: skip
    pictures.draw({"needle": {"cells": cells, "columns": {}}}, "a model", None, tmp_path / "evaluation.png")
    (axes,) = drawn[0].axes
    shown = {text.get_text() for text in axes.texts}
    assert shown == ({"0.00", "0.50"} if exact else {"3.00", "4.00", "5.00"})
    assert ("no exact answer" in axes.get_title()) == (exact == 0)
