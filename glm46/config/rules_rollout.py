"""Rules about the prompts, generation and rewards of a run with [rl]."""

from glm46.config.faults import counted, nearest
from glm46.config.generation_degrees import degree_faults
from glm46.config.model import ModelShape
from glm46.config.rl import ResolvedRL, RLConfig
from glm46.config.rl_data import WITHOUT_LABELS
from glm46.config.rollout import RolloutConfig
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig
from glm46.config.section import values_of


@rule
def sections_come_together(config: RunConfig) -> Faults:
    """[rl] has prompts, rewards and [rollout], and there is no [rollout] without [rl]."""
    rl = config.rl
    if rl is None:
        if config.rollout is not None:
            yield fault("`rollout`: has no effect without [rl]; add [rl], or remove [rollout]", "rl")
        return
    if config.rollout is None:
        yield fault("`rl`: [rollout] is absent; add it with max_new_tokens", "rollout")
    if rl.prompts is None:
        yield fault("rl.prompts: absent; add [rl.prompts] with the file of prompts", "rl.prompts")
    if not rl.rewards:
        yield fault('rl.rewards: absent; add [[rl.rewards]] tables, such as name = "math"', "rl.rewards")
    if config.validation.enable and not rl.validation:
        yield fault(
            "`validation.enable`: rl.validation is empty; add [[rl.validation]] tables, or set it to false",
            "rl.validation",
        )
    if rl.validation and not config.validation.enable:
        sets = counted(len(rl.validation), "set")
        yield fault(
            f"`validation.enable`: {sets} of prompts in rl.validation would never be answered; set validation.enable = "
            "true, or leave them out with --rl.validation=",
            "rl.validation",
        )


@rule
def policy_has_a_base(config: RunConfig, rl: RLConfig) -> Faults:
    """The policy starts from trained weights, or first learns the labels."""
    key = "checkpoint.initial_load_path"
    starts = (config.checkpoint.load_path, config.checkpoint.initial_load_path)
    if starts == (None, None) and not rl.warm_up_rollouts:
        yield fault(
            f"`rl`: {key} is absent; name the trained weights to start from, or set rl.warm_up_rollouts to learn the "
            "labels first",
            key,
        )


@rule
def samples_fit_into_rows(config: RunConfig, rl: RLConfig, rollout: RolloutConfig) -> Faults:
    """A sample fits into a row together with its prompt, and no loss term or limit depends on what shares a row."""
    if rollout.max_new_tokens >= config.training.seq_len:
        yield fault(
            "`rollout.max_new_tokens`: `training.seq_len` leaves no room for a prompt; lower it, or raise "
            "training.seq_len"
        )
    if not config.data.document_mask:
        yield fault("`data.document_mask`: samples that share a row would read each other; set it to true", "rl")
    if any(values_of(config.moe.sequence_aux_loss_weight)):
        yield fault(
            "`moe.sequence_aux_loss_weight`: balances rows, and samples are packed into rows in any way; set it to 0.0 "
            "with `rl`"
        )
    if config.moe.capacity_factor is not None:
        yield fault(
            "`moe.capacity_factor`: drops tokens by the samples next to them, which the engine does not; remove it "
            "with `rl`"
        )


@rule
def servers_are_named(rollout: RolloutConfig) -> Faults:
    """A run with servers has their addresses."""
    if rollout.kind != "local" and not rollout.urls:
        example = '["http://127.0.0.1:8000"]'
        yield fault(f"rollout.urls: absent with `rollout.kind`; name the servers, such as {example}", "rollout.urls")


@rule
def adapters_can_be_sent(config: RunConfig, rollout: RolloutConfig) -> Faults:
    """There are adapters, of a kind that servers add to their weights."""
    if not rollout.send_adapters:
        return
    if rollout.weights == "broadcast":
        yield fault(
            "`rollout.send_adapters`, `rollout.weights`: servers take adapters from a folder alone; remove one of the "
            "two"
        )
    if rollout.weights_dtype is not None:
        yield fault(
            "`rollout.send_adapters`, `rollout.weights_dtype`: adapters are not quantised; remove one of the two"
        )
    if config.adapter is None or config.adapter.name != "lora":
        has = "[adapter]: absent" if config.adapter is None else "`adapter.name`"
        yield fault(
            f'`rollout.send_adapters`, {has}: servers add LoRA alone; set adapter.name = "lora", or remove '
            "rollout.send_adapters",
            "adapter.name",
        )


@rule
def the_model_can_generate(rollout: RolloutConfig, shape: ModelShape, world_size: int | None) -> Faults:
    """The ranks that generate with one model split it evenly, and drafts have layers."""
    if rollout.speculative and not shape.num_nextn_predict_layers:
        yield fault("`rollout.speculative`: `model.shape.num_nextn_predict_layers`, so nothing drafts; remove it")
    for key, broken in degree_faults(
        rollout.degrees, shape, world_size, lambda name, degree: f"rollout.{name}_degree = {degree}"
    ):
        yield fault(broken, f"rollout.{key}_degree")


@rule
def rewards_have_names(rl: RLConfig) -> Faults:
    """Each reward is known and listed once, because metrics are named after it. Its runs or tries fit into its time
    limit."""
    builtin = ("math", "exact", "choice", "format", "repetition", "code", "remote", "score", "model")
    for index, reward in enumerate(rl.rewards):
        place = f"rl.rewards[{index}]"
        seconds = reward.options.get("seconds", 0)
        if reward.name in [other.name for other in rl.rewards[:index]]:
            yield fault(f"`{place}.name`: given twice; put what you need into one function")
        elif reward.name not in builtin and ":" not in reward.name:
            near = nearest(reward.name, builtin, 0.6)
            yield fault(
                f"`{place}.name`: neither one of {', '.join(builtin)} nor package.module:function; "
                + (f"did you mean '{near}'?" if near else "correct it")
            )
        if reward.name == "model" and reward.options.keys() != {"load_path"}:
            yield fault(
                f'`{place}.options`: must be {{load_path = "..."}}, the step folder of a reward model; state that alone'
            )
        if reward.name == "code" and reward.options.get("sandbox", "auto") not in ("auto", "required"):
            yield fault(f'`{place}.options.sandbox`: neither "auto" nor "required"; correct it')
        if reward.name == "remote" and "url" not in reward.options:
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
def warm_up_learns_whole_answers(config: RunConfig, algorithm: ResolvedRL) -> Faults:
    """Warm-up needs prompts without thoughts, because labels have none, and rollouts of one step."""
    if not algorithm.warm_up_rollouts:
        return
    key = "`rl.warm_up_rollouts`"
    samples = algorithm.samples_per_rollout
    if algorithm.prompts is not None and algorithm.prompts.thinking:
        yield fault(
            f"{key}: labels hold no thoughts; set rl.prompts.thinking = false, or start from a fine-tuned model",
            "rl.prompts.thinking",
        )
    if config.training.global_batch_size != samples:
        yield fault(
            f"{key}: labels are learned in rollouts of one optimizer step; set training.global_batch_size = {samples}",
            "training.global_batch_size",
        )
    if algorithm.kl.weight and algorithm.reference is None:
        yield fault(
            f"{key}: the reference would be the policy before it learned the labels; set rl.kl.weight = 0.0, or start "
            "from a fine-tuned model",
            "rl.kl.weight",
        )
