"""Packing does not leak: loss and gradients of packed rows of chats are sums over documents, on every axis."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from glm46.compute.distributed.process import join, leave
from glm46.compute.model.transformer import Transformer
from glm46.config.moe import MoEConfig
from glm46.config.run_config import RunConfig
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.loader import BatchLayout, SampleSpan, TrainSource, build_train_loader
from glm46.storage.data.manifest import Manifest, Split
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.prepare.sharding import SplitWriter, save_manifest
from glm46.tasks.pretrain.next_token import next_token_loss
from tests.harness import differences
from tests.ranks.sharded_layouts import (
    DEPTHS,
    MTP_WEIGHT,
    SEQ_LEN,
    VOCABULARY,
    Layout,
    build_job,
    gradient_errors,
    held,
    make_config,
    new_model,
    squares,
)  # fmt: skip

LAYOUTS = {
    2: {"tensor": Layout(tensor=2), "context": Layout(context=2), "pipeline": Layout(pipeline=2, micro_batches=4)},
    4: {"triple": Layout(pipeline=2, context=2, experts_over=2, micro_batches=4)},
}
"""By number of ranks and name."""
ROWS = 2
"""Of a micro-batch."""
_DOCUMENTS = 24


def make_documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids, int64 [n], and which of them are targets, bool [n]: prompts and answers in turns, n at most SEQ_LEN."""
    generator = np.random.default_rng(0)
    documents = []
    for length in [SEQ_LEN, *generator.integers(3, 14, _DOCUMENTS).tolist()]:
        is_target = np.repeat(generator.random(length) < 0.5, 4)[:length]
        is_target[[0, -1]] = False, True
        documents.append((generator.integers(0, VOCABULARY - 1, length), is_target))
    return documents


def load_batches(folder: Path) -> list[Batch]:
    """All rows of the documents, from shards in the folder through the loader; the last batch may have padding rows."""
    writer = SplitWriter(folder, "train", {"tokenizer": "t"}, is_chat=True)
    for ids, is_target in make_documents():
        tokens = np.where(is_target, ids, ids + NOT_A_TARGET).astype(np.uint32)
        ends = np.array([len(ids)])
        writer.add({"tokens": tokens, "doc_ends": ends, "text_bytes": ends}, np.array([True]))
    splits = {"train": writer.finish(), "validation": Split.from_shards(())}
    manifest = Manifest(folder, "chats", "t", VOCABULARY, VOCABULARY - 1, splits)
    save_manifest(manifest)
    sources, layout = [TrainSource("chats", manifest, 1.0, "best_fit")], BatchLayout(SEQ_LEN, DEPTHS, ROWS, 0, 1, True)
    (rows,) = build_train_loader(sources, layout, seed=0, start_sample=0).dataset.rows_per_source
    loader = build_train_loader(sources, layout, seed=0, start_sample=0, span=SampleSpan(stop=rows))
    return [batch for batch, _ in zip(loader, range(-(-rows // ROWS)), strict=False)]


def run_config(layout: Layout) -> RunConfig:
    """Without losses that depend on the rows, and without clipping."""
    config = make_config(layout, layers=3)
    moe = MoEConfig(balance="none", sequence_aux_loss_weight=0.0)
    return config.model_copy(update={"moe": moe, "training": config.training.model_copy(update={"max_norm": 1e9})})


def run_alone(model: Transformer) -> tuple[float, dict, dict[str, Tensor]]:
    """Summed loss, counts and gradients of the documents, one after the other, by the rule itself: position i counts at
    depth k if token i + k + 1 is a target."""
    documents, loss = make_documents(), 0.0
    ahead = range(1, DEPTHS + 2)
    numbers = [sum(int(is_target[a:].sum()) for _, is_target in documents) for a in ahead]
    totals = {"targets": numbers[0], "mtp_targets": numbers[1:]}
    for ids, is_target in documents:
        labels, inputs = [], []
        for a in ahead:
            rest = np.where(is_target[a:], ids[a:], IGNORE)
            labels.append(np.append(rest, [IGNORE] * min(a, len(ids)))[: len(ids)])
            inputs.append(np.append(ids[a:], [0] * a)[: len(ids)])
        batch = {"labels": np.stack(labels[:1]), "mtp_labels": np.stack(labels[1:])[None]}
        batch |= {"input_ids": ids[None], "mtp_input_ids": np.stack(inputs[:-1])[None]}
        sums = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        next_token_loss(sums, totals, MTP_WEIGHT).backward()
        loss += sums.loss.item()
    return loss, totals, {name: p.grad for name, p in model.named_parameters()}


def run_documents_alone(names: list[str], ranks: int, folder: Path) -> tuple[float, dict, dict[str, Tensor]]:
    return run_alone(new_model(run_config(Layout())))


def compare_layouts(names: list[str], expected: tuple[float, dict, dict[str, Tensor]]) -> Iterator[dict]:
    """On each rank."""
    process = join(300)
    layouts = LAYOUTS[process.world_size]
    loss, totals, gradients = expected
    for name in names:
        job = build_job(run_config(layouts[name]), process)
        with tempfile.TemporaryDirectory() as folder:
            batches = load_batches(Path(folder))
        counted = count_step(job, batches)
        outcome = train_step(job, batches, counted, 0, 1.0).main
        ranks: list = [None] * process.world_size
        here = squares({name: held(p.grad) for name, p in job.network.parameters.items()}, gradients)
        torch.distributed.all_gather_object(ranks, here)
        yield {
            "targets_equal": all(counted.main[key] == totals[key] for key in totals),
            "loss_error": (abs(outcome.objective["loss"].item() - loss) / loss, "summed loss"),
            "gradient_error": max(gradient_errors(ranks, gradients)),
        }
    leave()


@pytest.mark.parametrize(("ranks", "case"), [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts])
def test_packed_rows_equal_their_documents_alone(case_row, ranks, case):
    row = case_row(compare_layouts, ranks, case=case, prepare=run_documents_alone, at_once=len(LAYOUTS[ranks]))
    assert row["targets_equal"]
    assert differences(row, {"loss_error": 1e-6, "gradient_error": 1e-5}) == []
