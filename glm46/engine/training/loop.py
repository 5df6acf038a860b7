"""Training loop: steps until the budget is spent or a signal requests a stop."""

import gc
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glm46.compute.distributed.collective_errors import catch_user_error, raise_on_all_ranks
from glm46.engine.reliability.loss_spikes import NOT_FINITE
from glm46.engine.reliability.stop import EXIT_SIGNAL, EXIT_STOPPED, StopRequest
from glm46.engine.training.rank_sums import sum_on_host
from glm46.engine.training.services import Services
from glm46.engine.training.state import Progress
from glm46.engine.training.step import StepOutcome, train_step
from glm46.engine.training.task import StepBatches, Task, trained_networks
from glm46.engine.training.totals import StepTotals, count_step
from glm46.engine.training.weight_source import WeightSource
from glm46.run.curriculum import TextStage, stage_at
from glm46.run.flops import batch_flops
from glm46.run.schedule import batch_sequences
from glm46.storage.checkpoint.integrity import step_folder
from glm46.storage.checkpoint.store_mirror import shown

# Steps between two collections of Python garbage, on all ranks at the same step, so that no rank delays the others.
_GC_STEPS = 50


class NextStep(NamedTuple):
    """Input of a step. All fields except `batches` are equal on all ranks."""

    batches: StepBatches
    totals: StepTotals
    must_stop: bool
    """True if some rank has received a stop signal."""
    stage: TextStage


class RollbackNeeded(Exception):
    """Raised on all ranks after more consecutive skipped steps than [training] max_skipped_steps, or if weights or
    states are not finite."""


def train(task: Task, services: Services, progress: Progress, weights: WeightSource) -> int:
    """Train until the budget is spent or a stop is requested; save, export and report the end. Collective.

    Args:
        weights: exports the main network.

    Returns:
        Exit code: 0 if the budget is spent, EXIT_STOPPED if a signal stopped the run and it was saved, 128 + n if
        signal n stopped it and nothing was saved.

    Raises:
        RollbackNeeded: to continue from an earlier checkpoint.
    """
    plan = task.plan
    config = task.plan.config
    metrics = services.metrics
    observer = services.observer
    # Metrics of the current step only: a save must not record the loss of an earlier step.
    validation: dict[str, float] = {}
    with metrics.throughput.excluded():
        if config.validation.enable and progress.step == 0:
            validation = validate(task, services, progress)
        if progress.step == 0 and (lines := task.sample(services.stop, progress)):
            observer.message("\n".join(lines))
        gc.collect()
        observer.step_begins(progress.step + 1)
    with _collecting_on_all_ranks_at_once():
        while progress.tokens < plan.budget_tokens:
            # Not watched: the watchdog of steps cannot know how long completions take.
            with services.watchdog.unwatched("preparing the step"), observer.phase("prepare"):
                columns = task.prepare(progress, services.stop)
            step = begin_step(task, services, progress)
            if step.must_stop:
                break
            batches = step.batches
            totals = step.totals
            if batches.note:
                observer.message(batches.note)
            clock = progress.curriculum_tokens
            step_tokens = batches.sequences * batches.seq_len
            lr_factor = plan.learning_rate_factor(step.stage, clock, step_tokens)

            # single training step
            services.watchdog.operation("training step", size=(batches.sequences, batches.seq_len))
            micro_batches = task.complete(batches.micro_batches)
            outcome = train_step(task, micro_batches, totals, clock, lr_factor, services.spikes.check)
            progress.advance(sequences=batches.sequences, seq_len=batches.seq_len, was_skipped=outcome.is_bad)
            flops = batch_flops(
                plan.unrolled(plan.shape),
                batches.computed_tokens,
                totals.half_pairs,
                plan.config.adapter,
                only_drafts=plan.config.trains_only_drafts,
            )
            model_seconds = batches.model_seconds + outcome.gradient_seconds
            metrics.throughput.add_step(
                batches.computed_tokens, batches.read_seconds, flops, step_tokens, model_seconds
            )

            validation = end_step(task, services, progress, step, outcome, lr_factor, columns)
    observer.steps_end()
    services.watchdog.close()
    services.saver.finish(progress, validation)
    return _end(task, services, progress, weights)


@contextmanager
def _collecting_on_all_ranks_at_once() -> Iterator[None]:
    """Disable automatic garbage collection, which on one rank makes all others wait: `end_step` collects on all ranks
    at the same step."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def begin_step(task: Task, services: Services, progress: Progress) -> NextStep:
    """Read the micro-batches of the next step, and sum token counts, stop requests and faults over all ranks.
    Collective. The numbers are on the CPU, so that no rank waits for its GPU.

    Raises:
        UserError: on all ranks, if a rank failed to read its batches, or if several saves in a row have failed.
        RollbackNeeded: a save on some rank found non-finite values.
    """
    services.watchdog.step_begins(progress.step + 1)
    batch_size = task.plan.config.training.global_batch_size
    sequences = batch_sequences(batch_size, progress.curriculum_tokens, task.plan.rows_per_micro_batch)
    previous_stage = task.plan.stage_after(progress.samples)
    progress.skip_excluded(sequences)
    stage = stage_at(task.plan.text_stages, progress.samples)
    for network in trained_networks(task).values():
        network.parts.train(stage.indexer)
    if previous_stage != stage:
        services.spikes.restart()  # other text, lengths or positions change the loss
    batches, error = catch_user_error(lambda: task.next(progress, sequences))
    services.watchdog.operation("agreeing on the step")
    micro_batches = batches.micro_batches if batches else []  # none were read after an error
    local_totals = count_step(task, micro_batches)
    with services.stop.exchange():
        totals, requests = sum_on_host((local_totals, services.requests(has_failed=error is not None)))
    if requests.failed:
        raise_on_all_ranks(error)
    if requests.non_finite:
        raise RollbackNeeded
    if requests.saves_fail:
        raise services.saver.saves_fail(progress)
    if requests.lost_folder:
        with services.watchdog.unwatched("saving before the end"):
            raise services.saver.folder_lost(progress)
    if requests.profile:
        services.observer.profile_after(progress.step + 1)
    totals = totals.divided_by(task.plan.layout.non_dp_degree)
    return NextStep(batches, totals, must_stop=requests.stop > 0, stage=stage)


def end_step(
    task: Task,
    services: Services,
    progress: Progress,
    step: NextStep,
    outcome: StepOutcome,
    lr_factor: float,
    columns: dict[str, float],
) -> dict[str, float]:
    """Report a step; validate and save if due. Collective.

    Args:
        columns: columns that `Task.prepare` adds to the row of metrics.

    Returns:
        Validation metrics; empty if the step was not validated.

    Raises:
        RollbackNeeded: too many steps in a row were skipped.
    """
    config = task.plan.config
    validation = {}
    loss_sum = outcome.main.objective["loss"].item()
    targets = step.totals.main["targets"]
    loss = loss_sum / max(targets, 1) if task.has_loss_level else None
    is_bad = outcome.is_bad
    is_finite = outcome.fault != NOT_FINITE
    if not is_bad:
        progress.add_loss(loss_sum, targets)
    if outcome.fault is not None:
        samples = f"samples {progress.samples - step.batches.sequences} to {progress.samples - 1}"
        services.observer.message(f"step {progress.step} skipped: {outcome.fault}; {samples}")
    services.observer.step_trained(progress.step, progress.tokens, was_skipped=is_bad, is_finite=is_finite, loss=loss)
    is_last = progress.tokens >= task.plan.budget_tokens
    is_measured = services.bandwidth.is_due(progress.step)
    if progress.step % config.metrics.log_freq == 0 or progress.step == 1 or is_last or is_measured:
        row = services.metrics.training_row(progress, outcome, step.totals, lr_factor)
        if is_measured:  # the row has waited for the device, so the step's work does not disturb the measurement
            services.watchdog.operation("measuring bandwidth")
            with services.metrics.throughput.excluded():
                columns = columns | services.bandwidth.measure()
        services.observer.row("train", row | columns | services.saver.metrics())
    else:
        row = services.metrics.objective_columns(outcome, step.totals, progress.curriculum_tokens) | columns
        services.observer.row("step", {"step": progress.step, "tokens": progress.tokens} | row)
    if progress.skipped_in_a_row > config.training.max_skipped_steps:
        raise RollbackNeeded
    if progress.step % _GC_STEPS == 0:
        gc.collect()
    with services.metrics.throughput.excluded(), services.watchdog.unwatched("profiles, validation and saves"):
        services.observer.step_ends(progress.step, step.batches.computed_tokens, step.totals.half_pairs)
        if config.validation.enable and (progress.step % config.validation.freq == 0 or is_last):
            validation = validate(task, services, progress)
        services.saver.after_step(progress, validation)
        if not is_last:
            services.observer.step_begins(progress.step + 1)
    return validation


def validate(task: Task, services: Services, progress: Progress) -> dict[str, float]:
    """Validate and report. Collective."""
    started = time.perf_counter()
    with services.observer.phase("validate"):
        row = task.validate(progress)
    seconds = time.perf_counter() - started
    columns = {"step": progress.step, "tokens": progress.tokens, **row, "validation_seconds": seconds}
    services.observer.row("validation", columns)
    return row


def _end(task: Task, services: Services, progress: Progress, weights: WeightSource) -> int:
    """Export and report the end of a run, and return its exit code. Collective."""
    config = task.plan.config
    stop = services.stop
    is_finished = progress.tokens >= task.plan.budget_tokens
    stop.has_ended = not is_finished  # when a stopped rank exits, torchrun signals the others
    if config.checkpoint.last_save_in_hf and is_finished:
        main = next(iter(task.networks.values()))
        main.attend_as(task.plan.stage_after(progress.samples).shape)  # not yet set if no step was trained
        services.observer.message(f"Hugging Face {weights.export(main, task.tokenizer, progress)}")
    services.observer.message(final_report(task, progress, stop, is_finished=is_finished))
    if is_finished:
        return 0
    if config.checkpoint.enable:
        return EXIT_STOPPED
    signal_name = stop.signal_name or "SIGTERM"  # perhaps only another rank has received one
    return EXIT_SIGNAL + signal.Signals[signal_name]


def final_report(task: Task, progress: Progress, stop: StopRequest, *, is_finished: bool) -> str:
    """Return the last message of a run. Collective: all ranks compute the sample."""
    config = task.plan.config
    folder = Path(config.job.dump_folder)
    checkpoint = shown(step_folder(config.checkpoint_folder, progress.step))
    saved = (
        f"checkpoint   {checkpoint}" if config.checkpoint.enable else "checkpoint   none (checkpoint.enable = false)"
    )
    if is_finished:
        lines = task.sample(stop, progress)
    else:
        reason = f"{stop.signal_name} " if stop.signal_name else ""
        lines = [f"Stopped by {reason}after step {progress.step}. The same command continues from here."]
    lines += [saved, f"metrics      {folder / 'metrics.jsonl'}", f"log          {folder / 'log.txt'}"]
    if config.metrics.enable_tensorboard:
        lines.append(f"TensorBoard  {shlex.join(['tensorboard', '--logdir', str(config.tensorboard_folder)])}")
    return "\n".join(lines)
