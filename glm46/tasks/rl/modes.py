"""Runs that only answer validation prompts or only draw rollouts, and bounds that end a run."""

from collections.abc import Mapping

from glm46.config.rl import StopConfig
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.training.loop import validate
from glm46.engine.training.named_sums import sum_on_host
from glm46.engine.training.services import Services
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task
from glm46.run.plan import Plan


def evaluate_only(task: Task, services: Services, progress: Progress) -> int:
    """Answer the prompts of [[rl.validation]] by the weights that the run starts from; returns the exit code.
    Collective."""
    services.stop.has_started = True
    validate(task, services, progress)
    return EXIT_STOPPED if _must_stop(services) else 0


def roll_out_only(task: Task, services: Services, progress: Progress) -> int:
    """Draw the rollouts of all steps of the budget by the weights that the run starts from; returns the exit code. A
    run that was stopped or killed goes on behind its last whole rollout. Collective."""
    services.stop.has_started = True
    training, steps = task.plan.config.training, steps_per_rollout(task.plan)
    while progress.tokens < task.plan.budget_tokens:
        with services.watchdog.unwatched("drawing a rollout"):
            figures = task.prepare(progress, services.stop)
        if figures:
            services.report.train({"step": progress.step, "tokens": progress.tokens} | figures)
        if not figures or _must_stop(services):
            services.report.close_bar()
            services.report.message(f"Stopped before step {progress.step}. The same command continues from here.")
            return EXIT_STOPPED
        for _ in range(steps):
            progress.advance(sequences=int(training.global_batch_size), seq_len=training.seq_len, was_skipped=False)
    return 0


def steps_per_rollout(plan: Plan) -> int:
    """Optimizer steps of one rollout."""
    return plan.config.rl.samples_per_rollout // int(plan.config.training.global_batch_size)


def broken_bound(stop: StopConfig, row: Mapping[str, float], equal_rollouts: int) -> str | None:
    """The bound of [rl.stop] that a step breaks, with the remedy; None if none.

    Args:
        row: of metrics.
        equal_rollouts: in a row up to now, whose groups all have equal rewards.
    """
    if stop.max_mismatch_kl and row["mismatch_kl"] > stop.max_mismatch_kl:
        return (
            f"mismatch_kl = {row['mismatch_kl']:.3g} is above rl.stop.max_mismatch_kl = {stop.max_mismatch_kl:g}: the "
            "engine draws from another policy than the trainer's; compare its type, version and options, or raise it"
        )
    if row["entropy"] < stop.min_entropy:
        return (
            f"entropy = {row['entropy']:.3g} is below rl.stop.min_entropy = {stop.min_entropy:g}: the policy hardly "
            "explores; set rl.entropy_weight or lower optimizer.lr and load an earlier checkpoint, or lower it"
        )
    if stop.equal_rollouts and equal_rollouts >= stop.equal_rollouts:
        return (
            f"in {equal_rollouts} rollouts in a row the rewards of each group are equal (rl.stop.equal_rollouts = "
            f"{stop.equal_rollouts}): there is nothing to learn; look at samples with python -m glm46 rl inspect, and "
            "correct rewards or prompts"
        )
    return None


def _must_stop(services: Services) -> bool:
    """True if some rank was asked to stop. Collective."""
    return bool(sum_on_host(services.requests(has_failed=False))["stop"])
