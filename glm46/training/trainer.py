"""The loop: one step after another until the budget is spent or somebody asks to stop."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.loader import dump_run
from glm46.config.run import Run
from glm46.data.loader import build_train_loader
from glm46.distributed.process import join, leave
from glm46.observe.report import Report
from glm46.optim.schedule import batch_sequences, learning_rate_factor
from glm46.training import resume
from glm46.training.build import Parts, build
from glm46.training.evaluate import evaluate
from glm46.training.farewell import farewell
from glm46.training.figures import Figures, describe_start
from glm46.training.huggingface import save_weights
from glm46.training.loss import TokenCounts, count_tokens
from glm46.training.saving import Saver
from glm46.training.state import Progress
from glm46.training.step import train_step
from glm46.training.stop import StopRequest
from glm46.training.text import budget_tokens


class Agreement(NamedTuple):
    """What all ranks know before a step."""

    counts: TokenCounts
    """Tokens of the step over all ranks."""
    stop: bool
    """Some rank was asked to stop."""


def train(run: Run) -> int:
    """Train as `run` says, on this rank of however many there are; collective.

    Returns:
        Exit code: 0 when the budget is spent or a signal stopped the run after a save.
    """
    process = join(run.comm.init_timeout_seconds)
    stop = StopRequest()
    try:
        parts = build(run, process)
        dump_folder = Path(run.job.dump_folder)
        if process.is_main:
            dump_folder.mkdir(parents=True, exist_ok=True)
            (dump_folder / "config.toml").write_text(dump_run(run), encoding="utf-8")
        progress, meta = resume.start(parts)
        report = Report(
            dump_folder,
            is_main=process.is_main,
            enable_tensorboard=run.metrics.enable_tensorboard,
            total_tokens=budget_tokens(run, parts.rows_per_micro_batch),
            resumed_step=progress.step or None,
        )
        try:
            if run.job.print_config:
                report.message(dump_run(run))
            report.message(describe_start(parts, progress, meta))
            return _train(parts, progress, stop, report)
        finally:
            report.close()
    finally:
        stop.restore()
        leave()


def _train(parts: Parts, progress: Progress, stop: StopRequest, report: Report) -> int:
    run = parts.run
    budget = budget_tokens(run, parts.rows_per_micro_batch)
    loader = _open_loader(parts, progress)
    validation: dict[str, float] = {}
    if run.validation.enable and progress.step == 0:
        validation = _validate(parts, progress, report)
    figures = Figures(parts)
    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait: collect on all at once instead
    saver = Saver(parts, report, progress)
    while progress.tokens < budget:
        sequences = batch_sequences(
            run.training.global_batch_size, progress.curriculum_tokens, parts.rows_per_micro_batch
        )
        fetched = time.perf_counter()
        micro_batches = [next(loader) for _ in range(sequences // parts.rows_per_micro_batch)]
        data_seconds = time.perf_counter() - fetched
        agreement = agree(count_tokens(micro_batches), stop, parts.readers_of_a_batch)
        if agreement.stop:
            break
        clock = progress.curriculum_tokens
        lr_factor = learning_rate_factor(clock, run.lr_scheduler, run.lr_scheduler.start_tokens + budget)

        # single training step
        outcome = train_step(parts, micro_batches, agreement.counts, clock, lr_factor)
        progress.advance(sequences=sequences, seq_len=run.training.seq_len, was_skipped=outcome.was_skipped)
        figures.meter.add_step(sequences * run.training.seq_len, data_seconds)

        is_last = progress.tokens >= budget
        if outcome.was_skipped:
            _report_skip(progress, micro_batches, report, run.training.max_skipped_steps)
        if progress.step % run.metrics.log_freq == 0 or progress.step == 1 or is_last:
            report.train(figures.training_row(progress, outcome, agreement.counts, lr_factor))
        if progress.step % run.training.gc_freq == 0:
            gc.collect()
        with figures.meter.left_out():
            if run.validation.enable and (progress.step % run.validation.freq == 0 or is_last):
                validation = _validate(parts, progress, report)
            saver.after_step(progress, validation)
    gc.enable()
    saver.finish(progress, validation)
    if run.checkpoint.last_save_in_hf and progress.tokens >= budget:
        report.message(f"Hugging Face folder: {save_weights(parts, progress)}")
    report.message(farewell(parts, progress, stop.signal_name, is_finished=progress.tokens >= budget))
    return 0


def agree(counts: TokenCounts, stop: StopRequest, readers_of_a_batch: int) -> Agreement:
    """Sum the token counts over all ranks, and stop everywhere if anyone was asked to; collective.

    On CPU tensors, through gloo: no rank waits for its GPU.

    Args:
        readers_of_a_batch: ranks that read, and have counted, the same sequences.
    """
    flat = torch.tensor(
        [stop.signal_name is not None, counts.targets, counts.real, *counts.mtp_targets, *counts.drafts],
        dtype=torch.int64,
    )
    dist.all_reduce(flat)
    wishes = int(flat[0])
    targets, real, *rest = (flat[1:] // readers_of_a_batch).tolist()
    depths = len(counts.mtp_targets)
    return Agreement(TokenCounts(targets, tuple(rest[:depths]), tuple(rest[depths:]), real), wishes > 0)


def _open_loader(parts: Parts, progress: Progress) -> Iterator[dict[str, Tensor]]:
    run = parts.run
    return iter(
        build_train_loader(
            [(source.name, source.path, source.weight, source.packing) for source in run.data.sources],
            seq_len=run.training.seq_len,
            mtp_depth=parts.shape.num_nextn_predict_layers,
            local_batch_size=run.training.local_batch_size,
            dp_rank=parts.batch_rank,
            dp_degree=parts.layout.batch_ranks,
            seed=run.debug.seed,
            document_mask=run.data.document_mask,
            start_sample=progress.samples,
            num_workers=run.data.num_workers,
            prefetch_factor=run.data.prefetch_factor,
        )
    )


def _validate(parts: Parts, progress: Progress, report: Report) -> dict[str, float]:
    started = time.perf_counter()
    row = evaluate(parts)
    seconds = time.perf_counter() - started
    report.validation({"step": progress.step, "tokens": progress.tokens, **row, "validation_seconds": seconds})
    return row


def _report_skip(progress: Progress, micro_batches: list[dict], report: Report, limit: int) -> None:
    numbers = torch.cat([batch["sample_numbers"] for batch in micro_batches])
    report.message(
        f"step {progress.step} skipped: loss or gradient norm is not finite; samples from {int(numbers.min())} on"
    )
    if progress.skipped_in_a_row > limit:
        raise UserError(
            f"training.max_skipped_steps = {limit}: {progress.skipped_in_a_row} steps in a row had a non-finite loss "
            f"or gradient norm, up to step {progress.step}; lower optimizer.lr, or look at the samples named in log.txt"
        )
