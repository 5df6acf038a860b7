"""Training loop: steps until the budget is spent or a signal requests a stop."""

import gc
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.distributed.collective_errors import catch_user_error, raise_on_all_ranks
from glm46.distributed.process import die_with_parent, join, launched_rank, leave
from glm46.observe.report import Report
from glm46.planner.budget import budget_tokens
from glm46.planner.flops import batch_flops
from glm46.planner.schedule import batch_sequences, learning_rate_factor
from glm46.reliability.loss_spikes import SpikeDetector
from glm46.reliability.run_lock import lock_run, writing
from glm46.reliability.stop import EXIT_SIGNAL, EXIT_STOPPED, StopRequest
from glm46.reliability.stragglers import Stragglers
from glm46.reliability.watchdog import Watchdog
from glm46.training import resume
from glm46.training.build import Parts, build
from glm46.training.data_stream import DataStream, StepBatches
from glm46.training.evaluate import evaluate
from glm46.training.final_report import final_report
from glm46.training.hf_weights import save_weights
from glm46.training.loss import TokenCounts, count_half_pairs, count_tokens
from glm46.training.named_sums import sum_over_all_ranks
from glm46.training.origin import refuse_origin
from glm46.training.saving import Saver
from glm46.training.state import Progress
from glm46.training.step import train_step
from glm46.training.step_metrics import StepMetrics, start_report


class NextStep(NamedTuple):
    """Input of a step. All fields except `batches` are equal on all ranks."""

    batches: StepBatches
    counts: TokenCounts
    """Tokens of the step over all ranks."""
    stop: bool
    """Some rank has received a stop signal."""
    found_non_finite: bool
    """A save on some rank found non-finite values."""
    paces: list[int]
    """Times of all ranks, see `Stragglers.shared_paces`."""


class _RollbackNeeded(Exception):
    """More consecutive skipped steps than [training] max_skipped_steps, or non-finite weights or states. Raised on all
    ranks."""


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Train as configured, on this rank. Collective.

    Args:
        stop: created earlier to receive signals from then on; None to create it here.

    Returns:
        Exit code: 0 if the budget is spent, EXIT_STOPPED if a signal stopped the run and it was saved, 128 + n if
        signal n stopped it and nothing was saved.
    """
    die_with_parent()
    stop = stop or StopRequest()
    dump_folder = Path(config.job.dump_folder)
    lock = None
    if launched_rank() == 0:  # before joining the process group, so that other ranks do not wait for a refused run
        refuse_origin(config)
        lock = lock_run(dump_folder)
    process = join(config.comm.init_timeout_seconds)
    with writing(dump_folder):
        watchdog = Watchdog(
            process,
            dump_folder / "hang",
            shortest_seconds=config.comm.hang_seconds,
            start_seconds=config.comm.init_timeout_seconds,
        )
    try:
        parts = build(config, process)
        progress, meta = resume.start(parts)
        if process.is_main:
            with writing(dump_folder):
                (dump_folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
        while True:
            try:
                return _train_from(parts, progress, meta, stop, watchdog)
            except _RollbackNeeded:
                progress, meta = resume.roll_back(parts, progress)
    except RuntimeError:  # of torch.distributed, perhaps
        watchdog.check_store()
        raise
    finally:
        watchdog.close()
        stop.restore()
        leave()
        if lock is not None:
            lock.release()


def _train_from(
    parts: Parts, progress: Progress, meta: dict[str, Any] | None, stop: StopRequest, watchdog: Watchdog
) -> int:
    """Train from the current state of the parts. Metrics of later steps are removed from the files. Collective."""
    config = parts.config
    with writing(Path(config.job.dump_folder)):
        report = Report(
            Path(config.job.dump_folder),
            is_main=parts.process.is_main,
            enable_tensorboard=config.metrics.enable_tensorboard,
            total_tokens=budget_tokens(config, parts.rows_per_micro_batch),
            resumed_step=progress.step or None,
        )
    try:
        if config.job.print_config:
            report.message(dump_config(config))
        report.config(dump_config(config))
        report.message(start_report(parts, progress, meta))
        spikes = SpikeDetector(config.training.spike_sigmas, config.training.spike_window)
        if meta is not None and progress.step:
            spikes.restore(meta["spikes"])
        return _train(parts, progress, stop, report, spikes, watchdog)
    except UserError as error:
        report.log("\n".join(error.faults))
        raise
    finally:
        report.close()


def _train(
    parts: Parts, progress: Progress, stop: StopRequest, report: Report, spikes: SpikeDetector, watchdog: Watchdog
) -> int:
    config = parts.config
    budget = budget_tokens(config, parts.rows_per_micro_batch)
    stream = DataStream(parts, report)
    validation: dict[str, float] = {}
    if config.validation.enable and progress.step == 0:
        validation = _validate(parts, progress, report)
    metrics = StepMetrics(parts)
    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait: collect on all ranks at once instead
    saver = Saver(parts, report, progress, spikes)
    stragglers = Stragglers(parts.process.rank, parts.process.world_size, parts.layout.pp)
    while progress.tokens < budget:
        watchdog.step_begins(progress.step + 1)
        stragglers.step_begins()
        next_step = prepare_step(parts, progress, stream, stop, saver, stragglers, watchdog)
        if not stop.has_started:  # after the first exchange of all ranks: before it there is nothing to save
            stop.has_started = True
        if next_step.found_non_finite:
            raise _RollbackNeeded
        if slow := stragglers.update(next_step.paces):
            report.message(f"step {progress.step}: {slow}")
        if next_step.stop:
            break
        batches, counts, clock = next_step.batches, next_step.counts, progress.curriculum_tokens
        end, size = config.lr_scheduler.start_tokens + budget, batches.sequences * batches.seq_len
        lr_factor = learning_rate_factor(clock, config.lr_scheduler, end, size)

        # single training step
        watchdog.operation("training step", size=(batches.sequences, batches.seq_len))
        outcome = train_step(parts, batches.micro_batches, counts, clock, lr_factor, spikes.check)
        progress.advance(sequences=batches.sequences, seq_len=batches.seq_len, was_skipped=outcome.fault is not None)
        stragglers.gradients_ready(outcome.ready_at)
        flops = batch_flops(parts.shape, size, counts.half_pairs)
        metrics.throughput.add_step(size, batches.read_seconds, flops)

        is_last = progress.tokens >= budget
        if outcome.fault is None:
            progress.add_loss(outcome.loss_sum, counts.targets)
        else:
            _report_skip(progress, outcome.fault, batches.sequences, report)
        if progress.step % config.metrics.log_freq == 0 or progress.step == 1 or is_last:
            row = metrics.training_row(progress, outcome, counts, lr_factor)
            report.train(row | saver.metrics() | stragglers.metrics())
        if progress.skipped_in_a_row > config.training.max_skipped_steps:
            raise _RollbackNeeded
        if progress.step % config.training.gc_freq == 0:
            gc.collect()
        with metrics.throughput.excluded(), watchdog.unwatched("validation and saves"):
            if config.validation.enable and (progress.step % config.validation.freq == 0 or is_last):
                validation = _validate(parts, progress, report)
            saver.after_step(progress, validation)
    gc.enable()
    watchdog.close()
    saver.finish(progress, validation)
    return _end(parts, progress, stop, report, is_finished=progress.tokens >= budget)


def _end(parts: Parts, progress: Progress, stop: StopRequest, report: Report, *, is_finished: bool) -> int:
    """Export and report the end of a run, and return its exit code. Collective."""
    config = parts.config
    stop.has_ended = not is_finished
    if config.checkpoint.last_save_in_hf and is_finished:
        report.message(f"Hugging Face folder: {save_weights(parts, progress)}")
    report.message(final_report(parts, progress, stop, is_finished=is_finished))
    if is_finished:
        return 0
    return EXIT_STOPPED if config.checkpoint.enable else EXIT_SIGNAL + signal.Signals[stop.signal_name or "SIGTERM"]


def prepare_step(
    parts: Parts,
    progress: Progress,
    stream: DataStream,
    stop: StopRequest,
    saver: Saver,
    stragglers: Stragglers,
    watchdog: Watchdog,
) -> NextStep:
    """Read the micro-batches of the next step, and sum token counts, stop requests and faults over all ranks in one
    all-reduce. Collective. The tensors are on the CPU, so that no rank waits for its GPU.

    Raises:
        UserError: on all ranks, if a rank failed to read its text.
    """
    wanted = batch_sequences(
        parts.config.training.global_batch_size, progress.curriculum_tokens, parts.rows_per_micro_batch
    )
    progress.skip_excluded(wanted)
    batches, error = catch_user_error(lambda: stream.next(progress, wanted))
    watchdog.operation("agreeing on the step")
    micro_batches = batches.micro_batches if batches else []
    counts = count_tokens(micro_batches)
    window, document_mask = parts.shape.sliding_window, parts.config.data.document_mask
    no_counts = [0] * parts.shape.num_nextn_predict_layers  # of a rank that has read nothing
    local = {
        "stop": stop.signal_name is not None,
        "non_finite": saver.found_non_finite,
        "errors": error is not None,
        "targets": counts.targets,
        "mtp_targets": counts.mtp_targets or no_counts,
        "drafts": counts.drafts or no_counts,
        "real": counts.real,
        "half_pairs": count_half_pairs(micro_batches, window, document_mask=document_mask),
        "paces": stragglers.shared_paces(),
    }
    sums = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.int64) for name, value in local.items()})
    if sums["errors"]:
        raise_on_all_ranks(error)
    # All ranks that read the same sequences have counted them.
    tokens = {name: (sums[name] // parts.layout.non_dp_degree).tolist() for name in TokenCounts._fields}
    summed = TokenCounts(**tokens)
    return NextStep(batches, summed, bool(sums["stop"]), bool(sums["non_finite"]), sums["paces"].tolist())


def _validate(parts: Parts, progress: Progress, report: Report) -> dict[str, float]:
    started = time.perf_counter()
    row = evaluate(parts)
    seconds = time.perf_counter() - started
    report.validation({"step": progress.step, "tokens": progress.tokens, **row, "validation_seconds": seconds})
    return row


def _report_skip(progress: Progress, fault: str, sequences: int, report: Report) -> None:
    first = progress.samples - sequences
    report.message(f"step {progress.step} skipped: {fault}; samples {first} to {progress.samples - 1}")
