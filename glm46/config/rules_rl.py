"""Rules about [rl] and [rollout], after the preset has filled in absent keys."""

from glm46.config.generation_degrees import degree_faults
from glm46.config.model import ModelShape
from glm46.config.rl import ResolvedRL, RLConfig
from glm46.config.rl_data import WITHOUT_LABELS
from glm46.config.rollout import RolloutConfig
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig

_WIDEST_OF_SEQUENCE = 0.05
_NARROWEST_OF_TOKEN = 0.01
"""Clips: a sequence's ratio is a mean over its tokens and stays within some 1e-4 of 1, a token's ratio does not."""


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
def samples_of_older_weights_are_corrected(algorithm: ResolvedRL, rollout: RolloutConfig) -> Faults:
    """Samples that are generated ahead of training are corrected, or the old policy is the one of the rollout."""
    if rollout.max_staleness and not algorithm.correction.is_used and algorithm.old_policy == "trainer":
        yield fault(
            "`rollout.max_staleness`: samples come from older weights, and `rl.correction.level` takes them for "
            'samples of the old policy; set rl.correction.level = "token", or rl.old_policy = "rollout"',
            "rl.old_policy",
        )


@rule
def reference_can_be_read(config: RunConfig, algorithm: ResolvedRL) -> Faults:
    """The reference has weights to read at every start, and no adapters of an earlier run are missing in it."""
    checkpoint = config.checkpoint
    adapter = config.adapter
    if not algorithm.has_reference or algorithm.reference is not None:
        return
    if checkpoint.initial_load_path is None and (checkpoint.load_path or algorithm.warm_up_rollouts):
        key = "checkpoint.initial_load_path"
        yield fault(
            f"{key}: absent, but with `rl.kl.weight` the reference is read from it at every start; name the weights "
            "that the first start had, or add [rl.reference]",
            key,
        )
    if adapter is not None and adapter.initial_load_path is not None:
        yield fault(
            "`adapter.initial_load_path`: the reference would be the base without these adapters; merge them with "
            "'convert merge' and name the merged folder in [rl.reference]",
            "rl.kl.weight",
        )


@rule
def kept_tokens_are_known(algorithm: ResolvedRL, rollout: RolloutConfig) -> Faults:
    """Samples of a part of the vocabulary come with the tokens that they were sampled from."""
    keys = [key for key, is_set in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k is not None)) if is_set]
    for key in keys:
        if rollout.kind != "local":
            yield fault(
                f"`rollout.{key}`, `rollout.kind`: the trainer would not know which tokens the servers exclude, "
                f'whose replies are read without them; remove rollout.{key}, or set rollout.kind = "local"'
            )
        if algorithm.algorithm == "distillation":
            yield fault(
                f"`rollout.{key}`, `rl.algorithm`: policy and teacher would be compared on the kept tokens alone; "
                f"remove rollout.{key}"
            )


@rule
def generating_ranks_split_the_model(rollout: RolloutConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The ranks that generate with one model split it evenly."""
    for key, broken in degree_faults(
        rollout.degrees, shape, world_size, lambda name, degree: f"rollout.{name}_degree = {degree}"
    ):
        yield fault(broken, f"rollout.{key}_degree")


@rule
def rewards_have_their_options(rl: RLConfig) -> Faults:
    """Each reward is listed once, because metrics are named after it, and has its options."""
    for index, reward in enumerate(rl.rewards):
        place = f"rl.rewards[{index}]"
        options = reward.options
        seconds = options.get("seconds", 0)
        if reward.name in [other.name for other in rl.rewards[:index]]:
            yield fault(f"`{place}.name`: given twice; put what you need into one function")
        if reward.name == "model" and options.keys() != {"load_path"}:
            yield fault(
                f'`{place}.options`: must be {{load_path = "..."}}, the step folder of a reward model; state that alone'
            )
        if reward.name == "code" and options.get("sandbox", "auto") not in ("auto", "required"):
            yield fault(f'`{place}.options.sandbox`: neither "auto" nor "required"; correct it')
        if reward.name == "remote" and "url" not in options:
            yield fault(f'`{place}.name`: needs options = {{url = "http://..."}}; add it')
        if reward.name in ("code", "remote") and isinstance(seconds, int | float) and seconds > reward.timeout_seconds:
            yield fault(
                f"`{place}.options.seconds`: must be at most `{place}.timeout_seconds`, which holds all runs or tries; "
                "lower it, or raise that"
            )


@rule
def labels_are_read(rl: RLConfig) -> Faults:
    """If label_key is set, a reward reads the labels."""
    if rl.prompts is None or not rl.rewards or rl.warm_up_rollouts:
        return
    key = rl.prompts.label_key
    names = [reward.name for reward in rl.rewards]
    if key != type(rl.prompts).model_fields["label_key"].default and WITHOUT_LABELS.issuperset(names):
        yield fault(
            f"`rl.prompts.label_key`: none of the rewards ({', '.join(names)}) reads labels; add one such as math or "
            "exact, or remove rl.prompts.label_key",
            "rl.rewards",
        )


@rule
def warm_up_is_one_step(config: RunConfig, rl: RLConfig) -> Faults:
    """Labels are learned in rollouts of one step."""
    key = "training.global_batch_size"
    if rl.warm_up_rollouts and config.training.global_batch_size != rl.samples_per_rollout:
        yield fault(
            "`rl.warm_up_rollouts`: labels are learned in rollouts of one optimizer step; set "
            f"{key} = {rl.samples_per_rollout}",
            key,
        )


@rule
def validation_has_prompts(config: RunConfig, rl: RLConfig) -> Faults:
    """Validation of a policy has prompts, and prompts of validation are used."""
    if config.validation.enable == bool(rl.validation):
        return
    if config.validation.enable:
        why = "rl.validation is empty; add [[rl.validation]] tables, or set validation.enable = false"
    else:
        why = "no prompt of rl.validation is answered; set validation.enable = true, or remove them by --rl.validation="
    yield fault(f"`validation.enable`: {why}", "rl.validation")
