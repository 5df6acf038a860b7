"""Steps of a rollout, and bounds that end a run."""

from collections.abc import Mapping

from glm46.config.rl import StopConfig
from glm46.run.plan import Plan


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
