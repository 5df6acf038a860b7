"""Rules about what a run with [rl] reads, generates and judges."""

from glm46.config.faults import Fault, Faults, counted, nearest, show
from glm46.config.generation_degrees import degree_faults
from glm46.config.model import ModelShape
from glm46.config.rl_data import WITHOUT_LABELS
from glm46.config.rules_layout import values_of
from glm46.config.run_config import RunConfig
from glm46.config.section import Section


def sections_come_together(config: RunConfig) -> Faults:
    """[rl] has prompts, rewards and [rollout], and none is there without [rl]."""
    if config.rl is None:
        if config.rollout is not None:
            yield Fault(("rollout", "rl"), "[rollout]: has no effect without [rl]; add [rl], or remove [rollout]")
        return
    if config.rollout is None:
        yield Fault(("rl", "rollout"), "[rl]: [rollout] is absent; add it with max_new_tokens")
    if config.rl.prompts is None:
        yield Fault(("rl.prompts",), "rl.prompts: absent; add [rl.prompts] with the file of prompts")
    if not config.rl.rewards:
        yield Fault(("rl.rewards",), 'rl.rewards: absent; add [[rl.rewards]] tables, such as name = "math"')


def policy_has_a_base(config: RunConfig) -> Faults:
    """The policy starts from trained weights, or learns the labels first."""
    if config.rl is None or config.rl.warm_up_rollouts:
        return
    if config.checkpoint.load_path is None and config.checkpoint.initial_load_path is None:
        key = "checkpoint.initial_load_path"
        yield Fault(
            ("rl", key),
            f"[rl]: {key} is absent; name the trained weights to start from, or set rl.warm_up_rollouts to learn the "
            "labels first",
        )


def samples_fit_into_rows(config: RunConfig) -> Faults:
    """A sample, its prompt included, is one document of a row."""
    if config.rl is None or config.rollout is None:
        return
    longest, width = config.rollout.max_new_tokens, config.training.seq_len
    if longest >= width:
        yield Fault(
            ("rollout.max_new_tokens", "training.seq_len"),
            f"rollout.max_new_tokens = {longest}: training.seq_len = {width} leaves no room for a prompt; lower it, or "
            "raise training.seq_len",
        )
    if not config.data.document_mask:
        yield Fault(
            ("data.document_mask", "rl"),
            "data.document_mask = false: samples that share a row would read each other; set it to true",
        )


def servers_are_named(config: RunConfig) -> Faults:
    """A run with servers has their addresses."""
    if config.rollout is None or config.rollout.kind == "local":
        return
    kind = f"rollout.kind = {show(config.rollout.kind)}"
    if not config.rollout.urls:
        yield Fault(
            ("rollout.urls", "rollout.kind"),
            f'rollout.urls: absent with {kind}; name the servers, such as ["http://127.0.0.1:8000"]',
        )


def adapters_can_be_sent(config: RunConfig) -> Faults:
    """There are adapters, of a kind that servers add to their weights."""
    if config.rollout is None or not config.rollout.send_adapters:
        return
    if config.rollout.weights == "broadcast":
        yield Fault(
            ("rollout.send_adapters", "rollout.weights"),
            'rollout.send_adapters = true, rollout.weights = "broadcast": servers take adapters from a folder alone; '
            "remove one of the two",
        )
    if config.rollout.weights_dtype is not None:
        yield Fault(
            ("rollout.send_adapters", "rollout.weights_dtype"),
            f"rollout.send_adapters = true, rollout.weights_dtype = {show(config.rollout.weights_dtype)}: adapters are "
            "not quantised; remove one of the two",
        )
    if config.adapter is None or config.adapter.name != "lora":
        has = "[adapter]: absent" if config.adapter is None else f"adapter.name = {show(config.adapter.name)}"
        yield Fault(
            ("rollout.send_adapters", "adapter.name"),
            f'rollout.send_adapters = true, {has}: servers add LoRA alone; set adapter.name = "lora", or remove '
            "rollout.send_adapters",
        )


def the_model_can_draw(config: RunConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The ranks that generate with one model split it evenly, and drafts have layers."""
    if config.rollout is None:
        return
    if config.rollout.speculative and not shape.num_nextn_predict_layers:
        yield Fault(
            ("rollout.speculative", "model.num_nextn_predict_layers"),
            "rollout.speculative = true: model.num_nextn_predict_layers = 0, so nothing drafts; remove it",
        )
    for key, fault in degree_faults(
        config.rollout.degrees, shape, world_size, lambda name, degree: f"rollout.{name}_degree = {degree}"
    ):
        yield Fault((f"rollout.{key}_degree",), fault)


def rewards_have_names(config: RunConfig) -> Faults:
    """Each reward is known and there once: its metrics are named after it."""
    rewards = () if config.rl is None else config.rl.rewards
    known = ("math", "exact", "choice", "format", "repetition", "code", "remote")
    for index, reward in enumerate(rewards):
        key = f"rl.rewards[{index}].name"
        if reward.name in [other.name for other in rewards[:index]]:
            yield Fault((key,), f"{key} = {show(reward.name)}: given twice; put what you need into one function")
        elif reward.name not in known and ":" not in reward.name:
            near = nearest(reward.name, known, 0.6)
            yield Fault(
                (key,),
                f"{key} = {show(reward.name)}: neither one of {', '.join(known)} nor package.module:function; "
                + (f"did you mean '{near}'?" if near else "correct it"),
            )
        if reward.name == "remote" and "url" not in reward.options:
            yield Fault((key,), f'{key} = "remote": needs options = {{url = "http://..."}}; add it')


def parts_fit_into_the_time(config: RunConfig) -> Faults:
    """A run of a program, and a try to reach a server, is a part of its reward."""
    for index, reward in enumerate(() if config.rl is None else config.rl.rewards):
        seconds, key = reward.options.get("seconds", 0), f"rl.rewards[{index}]"
        if reward.name in ("code", "remote") and isinstance(seconds, int | float) and seconds > reward.timeout_seconds:
            yield Fault(
                (f"{key}.options", f"{key}.timeout_seconds"),
                f"{key}.options.seconds = {show(seconds)}: must be at most {key}.timeout_seconds = "
                f"{reward.timeout_seconds:g}, which holds all runs or tries; lower it, or raise that",
            )


def labels_are_read(config: RunConfig) -> Faults:
    """A file that says where its labels are has a reward that reads them."""
    if config.rl is None or config.rl.prompts is None or not config.rl.rewards or config.rl.warm_up_rollouts:
        return
    key, names = config.rl.prompts.label_key, [reward.name for reward in config.rl.rewards]
    if key != type(config.rl.prompts).model_fields["label_key"].default and WITHOUT_LABELS.issuperset(names):
        yield Fault(
            ("rl.prompts.label_key", "rl.rewards"),
            f"rl.prompts.label_key = {show(key)}: none of the rewards ({', '.join(names)}) reads labels; add one such "
            "as math or exact, or remove rl.prompts.label_key",
        )


def keys_of_text_are_absent(config: RunConfig) -> Faults:
    """Keys about text have no effect on prompts."""
    if config.rl is None:
        return

    def differs(section: Section, key: str) -> bool:
        """From its default, which a dump states."""
        return getattr(section, key) != type(section).model_fields[key].default

    if config.training.spike_sigmas and differs(config.training, "spike_sigmas"):
        yield Fault(
            ("training.spike_sigmas", "rl"),
            f"training.spike_sigmas = {config.training.spike_sigmas}: the loss of a policy has no level that a spike "
            "could leave; remove it with [rl]",
        )
    for key, is_set in (
        ("data.sources", bool(config.data.sources)),
        ("data.stages", bool(config.data.stages)),
        ("inference.prompt", bool(config.inference.prompt)),
        ("validation.steps", differs(config.validation, "steps")),
        ("validation.tasks", bool(config.validation.tasks)),
        ("validation.local_batch_size", differs(config.validation, "local_batch_size")),
    ):
        if is_set:
            yield Fault((key, "rl"), f"{key}: has no effect with [rl], which reads prompts; remove {key}")
    if config.validation.enable != bool(config.rl.validation):
        fault = "validation.enable = true: rl.validation is empty; add [[rl.validation]] tables, or set it to false"
        if config.rl.validation:
            sets = counted(len(config.rl.validation), "set")
            fault = (
                f"validation.enable = false: {sets} of prompts in rl.validation would never be answered; set "
                "validation.enable = true, or leave them out with --rl.validation="
            )
        yield Fault(("validation.enable", "rl.validation"), fault)


def nothing_depends_on_packing(config: RunConfig) -> Faults:
    """Refuses results over whole rows, which would depend on the samples that share a row."""
    if config.rl is None:
        return
    if any(values_of(config.moe.sequence_aux_loss_weight)):
        yield Fault(
            ("moe.sequence_aux_loss_weight", "rl"),
            f"moe.sequence_aux_loss_weight = {show(config.moe.sequence_aux_loss_weight)}: balances rows, and samples "
            "are packed into rows in any way; set it to 0.0 with [rl]",
        )
    if config.moe.capacity_factor is not None:
        yield Fault(
            ("moe.capacity_factor", "rl"),
            f"moe.capacity_factor = {config.moe.capacity_factor}: drops tokens by the samples beside them, which the "
            "engine does not; remove it with [rl]",
        )


def steps_are_not_rolled_back(config: RunConfig) -> Faults:
    """Rollbacks skip samples of text; samples are generated again by the same weights."""
    if config.rl is not None and config.training.max_rollbacks:
        yield Fault(
            ("training.max_rollbacks", "rl"),
            f"training.max_rollbacks = {config.training.max_rollbacks}: has no effect with [rl]: the same weights "
            "would generate the same samples again; remove it",
        )


def warm_up_learns_whole_answers(config: RunConfig) -> Faults:
    """A label is an answer without a thought, and a rollout of labels one step."""
    if config.rl is None or not config.rl.warm_up_rollouts:
        return
    key = "rl.warm_up_rollouts"
    if config.rl.prompts is not None and config.rl.prompts.thinking:
        yield Fault(
            (key, "rl.prompts.thinking"),
            f"{key} = {config.rl.warm_up_rollouts}: labels hold no thoughts; set rl.prompts.thinking = false, or start "
            "from a fine-tuned model",
        )
    if config.training.global_batch_size != config.rl.samples_per_rollout:
        yield Fault(
            (key, "training.global_batch_size"),
            f"{key} = {config.rl.warm_up_rollouts}: labels are learned in rollouts of one optimizer step; set "
            f"training.global_batch_size = {config.rl.samples_per_rollout}",
        )
    if config.rl.resolved().kl.weight and config.rl.reference is None:
        yield Fault(
            (key, "rl.kl.weight"),
            f"{key} = {config.rl.warm_up_rollouts}: the reference would be the policy before it learned the labels; "
            "set rl.kl.weight = 0.0, or start from a fine-tuned model",
        )


ROLLOUT_RULES = (
    sections_come_together,
    policy_has_a_base,
    samples_fit_into_rows,
    adapters_can_be_sent,
    servers_are_named,
    rewards_have_names,
    parts_fit_into_the_time,
    labels_are_read,
    keys_of_text_are_absent,
    nothing_depends_on_packing,
    steps_are_not_rolled_back,
    warm_up_learns_whole_answers,
)
