"""Rules about [rl]: keys that fit together, after the preset has filled in the absent ones."""

from typing import Any

from glm46.config.faults import Fault, Faults, show
from glm46.config.rl import RLConfig
from glm46.config.run_config import RunConfig
from glm46.config.section import Section

_WIDEST_OF_SEQUENCE, _NARROWEST_OF_TOKEN = 0.05, 0.01
"""Clips: a sequence's ratio is a mean over its tokens and stays within some 1e-4 of 1, a token's ratio does not."""


def _stated(section: Section) -> set[str]:
    """Keys that a file has: TOML has no absent value."""
    return {name for name in section.model_fields_set if getattr(section, name) is not None}


def _value(rl: RLConfig, key: str) -> str:
    """``rl.key = value``, with its origin if the preset gave it."""
    *tables, name = key.split(".")
    stated, found = rl, rl.resolved()
    for table in tables:
        stated, found = getattr(stated, table), getattr(found, table)
    of_preset = "" if name in _stated(stated) else f' (of rl.algorithm = "{rl.algorithm}")'
    return f"rl.{key} = {show(getattr(found, name))}{of_preset}"


def one_task_is_chosen(config: RunConfig) -> Faults:
    """A run fine-tunes, or it reinforces."""
    if config.rl is not None and config.finetune is not None:
        yield Fault(("rl", "finetune"), "[rl], [finetune]: both given, and a run has one task; remove one of them")


def ratio_fits_its_clip(config: RunConfig) -> Faults:
    """The clip has the scale of the ratio."""
    if config.rl is None:
        return
    rl = config.rl.resolved()
    low, high, ratio = ("rl.clip.low", rl.clip.low), ("rl.clip.high", rl.clip.high), _value(config.rl, "ratio")
    if rl.clip.kind == "tv":
        if rl.ratio == "sequence":
            yield Fault(
                ("rl.ratio", "rl.clip.kind"),
                f'{ratio}, {_value(config.rl, "clip.kind")}: the bounds of "tv" are on probabilities of tokens; set '
                'rl.ratio = "token"',
            )
        return
    # From 1 on there is no lower bound.
    for key, value in (high, *([low] if rl.clip.low < 1 else [])):
        if rl.ratio == "sequence" and value > _WIDEST_OF_SEQUENCE:
            remedy = f'a sequence\'s ratio never gets there; take about 3e-4, or set rl.ratio = "token" with {value}'
        elif rl.ratio == "token" and value < _NARROWEST_OF_TOKEN:
            remedy = 'almost every token would be clipped; take about 0.2, or set rl.ratio = "sequence"'
        else:
            continue
        yield Fault((key, "rl.ratio"), f"{_value(config.rl, key[3:])}, {ratio}: {remedy}")
    if rl.clip.dual and (rl.clip.kind != "ppo" or rl.clip.dual <= 1 + rl.clip.high):
        yield Fault(
            ("rl.clip.dual", "rl.clip.kind"),
            f"rl.clip.dual = {rl.clip.dual}: must be above 1 + rl.clip.high, with rl.clip.kind = \"ppo\"; take 3.0, or "
            "remove it",
        )  # fmt: skip


def group_has_a_baseline(config: RunConfig) -> Faults:
    """A baseline over a group needs a group."""
    if config.rl is None or config.rl.group_size > 1:
        return
    rl = config.rl.resolved()
    if rl.advantage in ("group_std", "group_mean", "leave_one_out") or rl.dynamic_sampling:
        key = "dynamic_sampling" if rl.dynamic_sampling else "advantage"
        yield Fault(
            ("rl.group_size", f"rl.{key}"),
            f"rl.group_size = 1, {_value(config.rl, key)}: a group of one has no baseline, and every advantage would "
            "be 0; raise rl.group_size",
        )


def penalty_has_an_effect(config: RunConfig) -> Faults:
    """The keys of the KL penalty are given together, and the penalty changes the policy."""
    if config.rl is None:
        return
    stated, kl = config.rl.kl, config.rl.resolved().kl
    others = sorted(_stated(stated) - {"weight"})
    if kl.weight == 0 and others:
        yield Fault(
            ("rl.kl.weight", *(f"rl.kl.{name}" for name in others)),
            f"rl.kl.{others[0]} = {show(getattr(stated, others[0]))}: has no effect without rl.kl.weight above 0; set "
            f"that, or remove rl.kl.{others[0]}",
        )
    if kl.weight and kl.where == "loss" and kl.estimator == "k1":
        yield Fault(
            ("rl.kl.estimator", "rl.kl.where"),
            f"{_value(config.rl, 'kl.estimator')}, {_value(config.rl, 'kl.where')}: the gradient of k1 has the mean 0; "
            'take "k2" or "k3", or set rl.kl.where = "reward"',
        )
    if kl.weight and kl.where == "reward" and kl.to == "old":
        yield Fault(
            ("rl.kl.to", "rl.kl.where"),
            f"{_value(config.rl, 'kl.to')}, {_value(config.rl, 'kl.where')}: samples come from the old policy itself; "
            'set rl.kl.to = "reference", or rl.kl.where = "loss"',
        )


def correction_has_an_effect(config: RunConfig) -> Faults:
    """Weights need another old policy than that of the rollout, bounds need weights."""
    if config.rl is None:
        return
    rl, stated = config.rl.resolved(), config.rl.correction
    of = rl.correction
    if of.is_used and rl.old_policy == "rollout":
        yield Fault(
            ("rl.old_policy", "rl.correction"),
            f"{_value(config.rl, 'old_policy')}: then no weights are left for [rl.correction], all would be 1; set "
            'rl.old_policy = "trainer", or rl.correction.level = "none" and no rejection',
        )
    if not of.is_used and rl.old_policy == "trainer" and config.rollout is not None and config.rollout.max_staleness:
        yield Fault(
            ("rollout.max_staleness", "rl.correction.level", "rl.old_policy"),
            f"rollout.max_staleness = {config.rollout.max_staleness}: samples come from older weights, and "
            f"{_value(config.rl, 'correction.level')} takes them for samples of the old policy; set "
            'rl.correction.level = "token", or rl.old_policy = "rollout"',
        )
    if config.rl.environment is not None and config.rollout is not None and config.rollout.max_staleness:
        yield Fault(
            ("rollout.max_staleness", "rl.environment"),
            f"rollout.max_staleness = {config.rollout.max_staleness}: conversations with [rl.environment] are not "
            "generated ahead of training; set it to 0",
        )
    idle = [name for name in ("mode", "low", "high", "normalize") if name in _stated(stated)]
    idle = idle if of.level == "none" else []
    if of.level != "none" and of.mode == "truncate" and stated.low is not None:
        idle = ["low"]
    if idle and getattr(stated, idle[0]):
        need = '"token", "sequence" or "geometric"' if of.level == "none" else ""
        remedy = f"rl.correction.level = {need}" if need else 'rl.correction.mode = "clip" or "mask"'
        yield Fault(
            (f"rl.correction.{idle[0]}", "rl.correction.level", "rl.correction.mode"),
            f"rl.correction.{idle[0]} = {show(getattr(stated, idle[0]))}: has no effect without {remedy}; set that, or "
            f"remove rl.correction.{idle[0]}",
        )
    for name in ("low", "reject_low"):
        low = getattr(of, name)
        if low is not None and low > 1:
            yield Fault(
                (f"rl.correction.{name}",),
                f"rl.correction.{name} = {low}: must be at most 1, the weight of equal policies; lower it",
            )


def reference_teaches(config: RunConfig) -> Faults:
    """[rl.reference] is read, its weights are of its own where they are offloaded, and a teacher is not the policy."""
    if config.rl is None:
        return
    rl = config.rl.resolved()
    if rl.reference is not None and not rl.has_reference:
        yield Fault(
            ("rl.reference", "rl.kl.weight"),
            f"[rl.reference]: has no effect with {_value(config.rl, 'kl.weight')}, {_value(config.rl, 'kl.to')}; set "
            'rl.kl.weight above 0 and rl.kl.to = "reference", or remove [rl.reference]',
        )
    checkpoint = config.checkpoint
    is_absent = rl.has_reference and rl.reference is None and checkpoint.initial_load_path is None
    if is_absent and (checkpoint.load_path or rl.warm_up_rollouts):  # without either no run starts so
        yield Fault(
            ("checkpoint.initial_load_path", "rl.kl.weight"),
            f"checkpoint.initial_load_path: absent, but with {_value(config.rl, 'kl.weight')} the reference is read "
            "from it at every start; name the weights that the first start had, or add [rl.reference]",
        )
    if rl.reference_offload and (not rl.has_reference or config.is_reference_in_policy):
        yield Fault(
            ("rl.reference_offload", "rl.kl.weight", "adapter"),
            f"rl.reference_offload = true: has no effect with {_value(config.rl, 'kl.weight')}, or with [adapter], "
            "where the base of the policy is the reference; remove it, or set rl.kl.weight above 0",
        )
    if rl.algorithm == "distillation" and rl.reference is None:
        yield Fault(
            ("rl.algorithm", "rl.reference"),
            'rl.algorithm = "distillation": [rl.reference] is absent, and the policy would be its own teacher; add '
            "[rl.reference] with load_path",
        )


def adapters_fit_the_algorithm(config: RunConfig) -> Faults:
    """All weights of a critic are trained; a reference without adapters has nothing of earlier ones."""
    if config.rl is None or config.adapter is None:
        return
    rl, path = config.rl.resolved(), config.adapter.initial_load_path
    if rl.has_critic:
        yield Fault(
            ("rl.advantage", "adapter"),
            f"{_value(config.rl, 'advantage')}: not possible with [adapter], because the critic trains all weights; "
            'take an advantage over groups, such as that of rl.algorithm = "gspo"',
        )
    if rl.has_reference and rl.reference is None and path is not None:
        yield Fault(
            ("adapter.initial_load_path", "rl.kl.weight"),
            f"adapter.initial_load_path = {show(path)}: the reference would be the base without these adapters; merge "
            "them with 'convert merge' and name the merged folder in [rl.reference]",
        )


def experts_are_known(config: RunConfig) -> Faults:
    """Routing replay needs experts, and an engine that names them."""
    if config.rl is None or not config.rl.routing_replay or config.rollout is None:
        return
    if config.rollout.kind == "sglang":
        yield Fault(
            ("rl.routing_replay", "rollout.kind"),
            'rl.routing_replay = true: experts are not read from rollout.kind = "sglang"; take "vllm" or "local", or '
            "remove rl.routing_replay",
        )


def keys_fit_the_advantage(config: RunConfig) -> Faults:
    """Keys of a critic need a critic, keys of later tokens an advantage that has them."""
    if config.rl is None:
        return
    advantage, needs = _value(config.rl, "advantage"), config.rl.resolved().advantage
    table: list[tuple[str, bool, str]] = [
        ("gamma", needs in ("returns", "gae"), '"returns" or "gae"'),
        ("gae_lambda", needs == "gae", '"gae"'),
        ("critic", needs == "gae", '"gae"'),
    ]
    for key, is_read, wanted in table:
        value: Any = getattr(config.rl, key)
        if key in _stated(config.rl) and not is_read:
            what = "[rl.critic]" if key == "critic" else f"rl.{key} = {show(value)}"
            yield Fault(
                (f"rl.{key}", "rl.advantage"),
                f"{what}: has no effect with {advantage}; set rl.advantage = {wanted}, or remove it",
            )


def rollout_is_whole_steps(config: RunConfig) -> Faults:
    """A rollout is one or several optimizer steps of one size."""
    if config.rl is None:
        return
    size, samples = config.training.global_batch_size, config.rl.samples_per_rollout
    if not isinstance(size, (int, float)) or size < 1 or samples % size:
        stated = f"{size:g}" if isinstance(size, (int, float)) else "absent" if size is None else show(size)
        yield Fault(
            ("training.global_batch_size", "rl.prompts_per_rollout", "rl.group_size"),
            f"training.global_batch_size = {stated}: [rl] needs the samples of an optimizer step, a divisor of "
            f"rl.prompts_per_rollout * rl.group_size = {samples}; set it to {samples}, or to a part of it",
        )


RL_RULES = (
    one_task_is_chosen,
    rollout_is_whole_steps,
    ratio_fits_its_clip,
    group_has_a_baseline,
    penalty_has_an_effect,
    correction_has_an_effect,
    keys_fit_the_advantage,
    reference_teaches,
    adapters_fit_the_algorithm,
    experts_are_known,
)
