"""Rules about [rl]: which keys fit together, after the preset has filled in absent keys."""

from glm46.config.adapter import AdapterConfig
from glm46.config.finetune import FineTuneConfig
from glm46.config.rl import ResolvedRL, RLConfig
from glm46.config.rollout import RolloutConfig
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig

_WIDEST_OF_SEQUENCE = 0.05
_NARROWEST_OF_TOKEN = 0.01
"""Clips: a sequence's ratio is a mean over its tokens and stays within some 1e-4 of 1, a token's ratio does not."""


@rule
def one_task_is_chosen(rl: RLConfig, finetune: FineTuneConfig) -> Faults:
    """A run has [finetune] or [rl], not both."""
    yield fault("`rl`, `finetune`: both given, and a run has one task; remove one of them")


@rule
def rollout_is_whole_steps(config: RunConfig, rl: RLConfig) -> Faults:
    """A rollout is one or several optimizer steps of equal size."""
    size = config.training.global_batch_size
    samples = rl.samples_per_rollout
    if not isinstance(size, (int, float)) or size < 1 or samples % size:
        key = "training.global_batch_size"
        setting = f"{key} = {size:g}" if isinstance(size, (int, float)) else f"`{key}`"
        yield fault(
            f"{setting}: [rl] needs the samples of an optimizer step, a divisor of rl.prompts_per_rollout * "
            f"rl.group_size = {samples}; set it to {samples}, or to a part of it",
            key,
            "rl.prompts_per_rollout",
            "rl.group_size",
        )


@rule
def ratio_fits_its_clip(algorithm: ResolvedRL) -> Faults:
    """The bounds of the clip fit the scale of the ratio."""
    clip = algorithm.clip
    if algorithm.policy_loss == "tv":  # bounds on probabilities
        return
    # From 1 on there is no lower bound.
    for key, value in (("high", clip.high), *([("low", clip.low)] if clip.low < 1 else [])):
        if algorithm.ratio == "sequence" and value > _WIDEST_OF_SEQUENCE:
            remedy = "the ratio of a sequence never gets there; take about 3e-4, or an algorithm with ratios of tokens"
        elif algorithm.ratio == "token" and value < _NARROWEST_OF_TOKEN:
            remedy = 'almost every token would be clipped; take about 0.2, or rl.algorithm = "gspo"'
        else:
            continue
        yield fault(f"`rl.clip.{key}`, `rl.algorithm`: {remedy}")


@rule
def group_has_a_baseline(algorithm: ResolvedRL) -> Faults:
    """A baseline over a group needs a group."""
    has_baseline = algorithm.advantage in ("group_std", "group_mean", "leave_one_out")
    if algorithm.group_size == 1 and (has_baseline or algorithm.dynamic_sampling):
        key = "rl.dynamic_sampling" if algorithm.dynamic_sampling else "rl.advantage"
        yield fault(
            f"`rl.group_size`, `{key}`: a group of one has no baseline, and every advantage would be 0; raise "
            "rl.group_size"
        )


@rule
def over_sampling_saves_a_round(config: RunConfig, algorithm: ResolvedRL) -> Faults:
    """Over-sampling is useful only if groups may be skipped and replaced."""
    if algorithm.over_sampling > 1 and not algorithm.dynamic_sampling:
        yield fault(
            "`rl.over_sampling`: no group is dropped, and others are not needed; set rl.dynamic_sampling = true, or "
            "remove rl.over_sampling"
        )
    if algorithm.over_sampling > 1 and config.rollout is not None and config.rollout.max_staleness:
        yield fault(
            "`rl.over_sampling`, `rollout.max_staleness`: groups of later rollouts are generated meanwhile; remove "
            "rl.over_sampling"
        )


@rule
def penalty_has_a_gradient(algorithm: ResolvedRL) -> Faults:
    """The KL penalty has an effect on the policy."""
    kl = algorithm.kl
    if kl.weight and kl.where == "loss" and kl.estimator == "k1":
        yield fault(
            '`rl.kl.estimator`, `rl.kl.where`: the gradient of k1 has the mean 0; take "k2" or "k3", or set '
            'rl.kl.where = "reward"'
        )
    if kl.weight and kl.where == "reward" and kl.to == "old":
        yield fault(
            "`rl.kl.where`, `rl.algorithm`: the penalty is for the distance from the old policy, which generated the "
            'samples; set rl.kl.where = "loss"'
        )


@rule
def correction_has_other_weights(algorithm: ResolvedRL) -> Faults:
    """Correction weights need an old policy other than that of the rollout, and their lower bounds are at most 1."""
    correction = algorithm.correction
    if correction.is_used and algorithm.old_policy == "rollout":
        yield fault(
            "`rl.old_policy`: then no weights are left for `rl.correction`, all would be 1; set rl.old_policy = "
            '"trainer", or rl.correction.level = "none" and no rejection'
        )
    for name in ("low", "reject_low"):
        if (getattr(correction, name) or 0.0) > 1:
            yield fault(f"`rl.correction.{name}`: must be at most 1, the weight of equal policies; lower it")


@rule
def samples_of_older_weights_are_corrected(algorithm: ResolvedRL, rollout: RolloutConfig) -> Faults:
    """Samples that are generated ahead of training are corrected by weights, or the old policy is that of the
    rollout."""
    if not rollout.max_staleness:
        if rollout.when_stale == "drop":
            yield fault(
                "`rollout.when_stale`, `rollout.max_staleness`: nothing is ever stale; raise it, or remove that"
            )
        return
    if not algorithm.correction.is_used and algorithm.old_policy == "trainer":
        yield fault(
            "`rollout.max_staleness`: samples come from older weights, and `rl.correction.level` takes them for "
            'samples of the old policy; set rl.correction.level = "token", or rl.old_policy = "rollout"',
            "rl.old_policy",
        )


@rule
def environment_has_its_program(rl: RLConfig) -> Faults:
    """The environment has the function or command that its kind needs, and a reward reads its score."""
    table = rl.environment
    key = "function" if table is None or table.kind == "function" else "command"
    if table is not None and not getattr(table, key):
        key = f"rl.environment.{key}"
        yield fault(f'`{key}`: absent, and `rl.environment.kind` = "{table.kind}" needs it; add it')
    has_score = bool(table and table.score_command)
    reads = any(reward.name == "score" for reward in rl.rewards)
    if has_score and not reads:
        yield fault('`rl.rewards`, `rl.environment.score_command`: no reward reads it; add one with name = "score"')
    if reads and (table is None or table.kind == "function"):
        yield fault(
            '`rl.rewards`: score is a number of the program of `rl.environment` with kind = "command" or "worker"; '
            "add that"
        )


@rule
def reference_teaches(config: RunConfig, algorithm: ResolvedRL) -> Faults:
    """The reference has weights to read at every start, a penalty reads it, and a teacher is not the policy."""
    checkpoint = config.checkpoint
    key = "checkpoint.initial_load_path"
    is_absent = algorithm.has_reference and algorithm.reference is None and checkpoint.initial_load_path is None
    if is_absent and (
        checkpoint.load_path or algorithm.warm_up_rollouts
    ):  # without either, other rules require the key
        yield fault(
            f"{key}: absent, but with `rl.kl.weight` the reference is read from it at every start; name the weights "
            "that the first start had, or add [rl.reference]",
            key,
        )
    if algorithm.reference is not None and algorithm.kl.to == "old":
        yield fault(
            "`rl.reference`, `rl.algorithm`: the penalty is for the distance from the old policy; remove [rl.reference]"
        )
    if algorithm.algorithm == "distillation" and algorithm.reference is None:
        yield fault(
            "`rl.algorithm`: [rl.reference] is absent, and the policy would be its own teacher; add [rl.reference] "
            "with load_path",
            "rl.reference",
        )


@rule
def adapters_fit_the_algorithm(algorithm: ResolvedRL, adapter: AdapterConfig) -> Faults:
    """A critic, which trains all weights, is not combined with adapters, and earlier adapters are not missing in the
    reference."""
    if algorithm.has_critic:
        yield fault(
            "`rl.advantage`: not possible with `adapter`, because the critic trains all weights; take an advantage "
            'over groups, such as that of rl.algorithm = "gspo"'
        )
    if algorithm.has_reference and algorithm.reference is None and adapter.initial_load_path is not None:
        yield fault(
            "`adapter.initial_load_path`: the reference would be the base without these adapters; merge them with "
            "'convert merge' and name the merged folder in [rl.reference]",
            "rl.kl.weight",
        )
