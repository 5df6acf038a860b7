"""The loop: one step after another until the budget is spent or somebody asks to stop."""

import gc
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
from glm46.training.data_stream import Feed, Portion
from glm46.training.evaluate import evaluate
from glm46.training.final_report import farewell
from glm46.training.hf_weights import save_weights
from glm46.training.loss import TokenCounts, count_half_pairs, count_tokens
from glm46.training.origin import refuse_origin
from glm46.training.saving import Saver
from glm46.training.state import Progress
from glm46.training.step import train_step
from glm46.training.step_metrics import Figures, describe_start


class NextStep(NamedTuple):
    """What a rank knows before a step; all but the text is the same on all ranks."""

    text: Portion
    counts: TokenCounts
    """Tokens of the step over all ranks."""
    stop: bool
    """Some rank was asked to stop."""
    is_ruined: bool
    """A save on some rank found values that are not finite."""
    paces: list[int]
    """What each rank has shared of its own times."""


class _WentBad(Exception):
    """A row of skipped steps is longer than [training] max_skipped_steps, or weights or states hold values that are not
    finite; raised on all ranks together."""


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Train as `run` says, on this rank of however many there are; collective.

    Args:
        stop: made earlier, so that signals are heard from then on.

    Returns:
        Exit code: 0 when the budget is spent, EXIT_STOPPED when a signal stopped the run after a save, 128 + n when
        signal n stopped it and nothing was saved.
    """
    die_with_parent()
    stop = stop or StopRequest()
    dump_folder = Path(config.job.dump_folder)
    lock = None
    if launched_rank() == 0:  # before the ranks meet: the others do not wait for one that is refused then
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
            except _WentBad:
                progress, meta = resume.roll_back(parts, progress)
    finally:
        watchdog.close()
        stop.restore()
        leave()
        if lock is not None:
            lock.release()


def _train_from(
    parts: Parts, progress: Progress, meta: dict[str, Any] | None, stop: StopRequest, watchdog: Watchdog
) -> int:
    """Train from where the parts are; what the files say of later steps is cut."""
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
        report.message(describe_start(parts, progress, meta))
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
    parts: Parts,
    progress: Progress,
    stop: StopRequest,
    report: Report,
    spikes: SpikeDetector,
    watchdog: Watchdog,
) -> int:
    config = parts.config
    budget = budget_tokens(config, parts.rows_per_micro_batch)
    feed = Feed(parts, report)
    validation: dict[str, float] = {}
    if config.validation.enable and progress.step == 0:
        validation = _validate(parts, progress, report)
    figures = Figures(parts)
    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait: collect on all at once instead
    saver = Saver(parts, report, progress, spikes)
    stragglers = Stragglers(parts.process.rank, parts.process.world_size, parts.layout.pp)
    while progress.tokens < budget:
        watchdog.step_begins(progress.step + 1)
        stragglers.step_begins()
        coming = prepare_step(parts, progress, feed, stop, saver, stragglers, watchdog)
        if not stop.has_started:  # not before all ranks are here: who has to wait for another one has nothing to save
            stop.has_started = True
        if coming.is_ruined:
            raise _WentBad
        if slow := stragglers.update(coming.paces):
            report.message(f"step {progress.step}: {slow}")
        if coming.stop:
            break
        text, counts, clock = coming.text, coming.counts, progress.curriculum_tokens
        end, size = config.lr_scheduler.start_tokens + budget, text.sequences * text.seq_len
        lr_factor = learning_rate_factor(clock, config.lr_scheduler, end, size)

        # single training step
        watchdog.operation("training step", size=(text.sequences, text.seq_len))
        outcome = train_step(parts, text.micro_batches, counts, clock, lr_factor, spikes.check)
        progress.advance(sequences=text.sequences, seq_len=text.seq_len, was_skipped=outcome.fault is not None)
        stragglers.gradients_ready(outcome.judged_at)
        flops = batch_flops(parts.shape, size, counts.half_pairs)
        figures.meter.add_step(size, text.read_seconds, flops)

        is_last = progress.tokens >= budget
        if outcome.fault is None:
            progress.add_loss(outcome.loss_sum, counts.targets)
        else:
            _report_skip(progress, outcome.fault, text.sequences, report)
        if progress.step % config.metrics.log_freq == 0 or progress.step == 1 or is_last:
            row = figures.training_row(progress, outcome, counts, lr_factor)
            report.train(row | saver.figures() | stragglers.metrics())
        if progress.skipped_in_a_row > config.training.max_skipped_steps:
            raise _WentBad
        if progress.step % config.training.gc_freq == 0:
            gc.collect()
        with figures.meter.left_out(), watchdog.unwatched("validation and saves"):
            if config.validation.enable and (progress.step % config.validation.freq == 0 or is_last):
                validation = _validate(parts, progress, report)
            saver.after_step(progress, validation)
    gc.enable()
    watchdog.close()
    saver.finish(progress, validation)
    return _end(parts, progress, stop, report, is_finished=progress.tokens >= budget)


def _end(parts: Parts, progress: Progress, stop: StopRequest, report: Report, *, is_finished: bool) -> int:
    """What a run leaves behind its last save, and its exit code; collective."""
    config = parts.config
    stop.has_ended = not is_finished
    if config.checkpoint.last_save_in_hf and is_finished:
        report.message(f"Hugging Face folder: {save_weights(parts, progress)}")
    report.message(farewell(parts, progress, stop, is_finished=is_finished))
    if is_finished:
        return 0
    return EXIT_STOPPED if config.checkpoint.enable else EXIT_SIGNAL + signal.Signals[stop.signal_name or "SIGTERM"]


def prepare_step(
    parts: Parts,
    progress: Progress,
    feed: Feed,
    stop: StopRequest,
    saver: Saver,
    stragglers: Stragglers,
    watchdog: Watchdog,
) -> NextStep:
    """Read the text of the next step, sum its token counts over all ranks, and stop everywhere if anyone was asked to;
    collective. The sum is one of CPU tensors, through gloo: no rank waits for its GPU.

    Raises:
        UserError: some rank could not read its part of the text; on all ranks.
    """
    wanted = batch_sequences(
        parts.config.training.global_batch_size, progress.curriculum_tokens, parts.rows_per_micro_batch
    )
    progress.pass_over(wanted)
    text, damage = catch_user_error(lambda: feed.take(progress, wanted))
    watchdog.operation("agreeing on the step")
    counts = count_tokens(text.micro_batches if text else [])
    window, document_mask = parts.shape.sliding_window, parts.config.data.document_mask
    half_pairs = count_half_pairs(text.micro_batches if text else [], window, document_mask=document_mask)
    depths, readers = parts.shape.num_nextn_predict_layers, parts.layout.non_dp_degree
    # Nothing is counted where nothing was read.
    per_depth = [*counts.mtp_targets, *counts.drafts] or [0] * (2 * depths)
    flat = torch.tensor(
        [
            *(stop.signal_name is not None, saver.found_ruin, damage is not None),
            *(counts.targets, counts.real, half_pairs, *per_depth),
            *stragglers.shared_paces(),
        ],
        dtype=torch.int64,
    )
    dist.all_reduce(flat)
    wishes, ruins, damages = flat[:3].tolist()
    if damages:
        raise_on_all_ranks(damage)
    tokens, paces = flat[3:].tensor_split([3 + 2 * depths])
    # Ranks that read the same sequences have counted them each.
    targets, real, half_pairs, *rest = (tokens // readers).tolist()
    summed = TokenCounts(targets, tuple(rest[:depths]), tuple(rest[depths:]), real, half_pairs)
    return NextStep(text, summed, wishes > 0, ruins > 0, paces.tolist())


def _validate(parts: Parts, progress: Progress, report: Report) -> dict[str, float]:
    started = time.perf_counter()
    row = evaluate(parts)
    seconds = time.perf_counter() - started
    report.validation({"step": progress.step, "tokens": progress.tokens, **row, "validation_seconds": seconds})
    return row


def _report_skip(progress: Progress, fault: str, sequences: int, report: Report) -> None:
    first = progress.samples - sequences
    report.message(f"step {progress.step} skipped: {fault}; samples {first} to {progress.samples - 1}")
