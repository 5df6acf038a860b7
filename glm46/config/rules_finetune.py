"""Rules about [finetune] and [finetune.preference]."""

from glm46.config.finetune import FineTuneConfig, PreferenceConfig
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig


@rule
def fine_tuning_has_a_base(config: RunConfig, finetune: FineTuneConfig) -> Faults:
    """Fine-tuning starts from trained weights."""
    checkpoint, key = config.checkpoint, "checkpoint.initial_load_path"
    starts = (checkpoint.load_path, checkpoint.initial_load_path, config.adapter)  # rules of [adapter] ask for the base
    if not any(start is not None for start in starts):
        yield fault(
            f"`finetune`: {key} is absent; name the trained weights to start from: a step folder with "
            "checkpoint.initial_load_model_only = true, or a Hugging Face folder with "
            "checkpoint.initial_load_in_hf = true", key,
        )  # fmt: skip


@rule
def preference_is_the_only_loss(config: RunConfig, preference: PreferenceConfig, shape: ModelShape) -> Faults:
    """Nothing else is asked of pairs than their loss."""
    if shape.num_nextn_predict_layers:
        yield fault(
            "`model.num_nextn_predict_layers`: must be 0 under `finetune.preference`, which does not train them: those "
            "of the start are left as they are; set it to 0"
        )
    if config.validation.tasks:
        yield fault(
            "validation.tasks: not possible under `finetune.preference`, whose held-out documents are pairs; remove "
            "them", "validation.tasks",
        )  # fmt: skip


@rule
def reward_model_is_whole(config: RunConfig, finetune: FineTuneConfig) -> Faults:
    """A reward model has a head of its own, and says no words."""
    stated: dict[str, object] = {"adapter": config.adapter, "finetune.samples": finetune.samples}
    stated["checkpoint.last_save_in_hf"] = config.checkpoint.last_save_in_hf
    for key in [key for key, value in stated.items() if value and config.head == "value"]:
        yield fault(
            f"`{key}`: not possible under `finetune.preference.loss_type`, which trains all weights, and one number in "
            f"place of words, a model that transformers has not; remove {key}", key,
        )  # fmt: skip


@rule
def reference_is_the_start(config: RunConfig, preference: PreferenceConfig) -> Faults:
    """The reference is what the policy begins as."""
    if not preference.has_reference:
        return
    checkpoint, adapter, key = config.checkpoint, config.adapter, "checkpoint.initial_load_path"
    if adapter is not None:  # rules of [adapter] ask for the base
        if adapter.initial_load_path is not None:
            yield fault(
                "`adapter.initial_load_path`: not possible under `finetune.preference`, whose reference is the base "
                "without adapters; merge them with 'convert merge' and start from the merged folder"
            )
        return
    if checkpoint.initial_load_path is None and checkpoint.load_path is not None:  # else a rule of [finetune] says it
        yield fault(
            f"{key}: absent, but the reference of `finetune.preference` is read from it at every start, "
            "checkpoint.load_path or not; name the weights that the first start had", key,
        )  # fmt: skip
    if checkpoint.initial_load_exclude:
        name = "checkpoint.initial_load_exclude"
        yield fault(
            f"`{name}`: not possible under `finetune.preference`, whose policy begins as its reference; remove {name}"
        )
