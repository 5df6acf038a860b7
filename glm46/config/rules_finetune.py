"""Rules about [finetune] and [finetune.preference]."""

from glm46.config.finetune import FineTuneConfig, PreferenceConfig
from glm46.config.model import ModelShape
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig


@rule
def fine_tuning_has_a_base(config: RunConfig, finetune: FineTuneConfig) -> Faults:
    """Fine-tuning starts from trained weights."""
    checkpoint = config.checkpoint
    key = "checkpoint.initial_load_path"
    starts = (checkpoint.load_path, checkpoint.initial_load_path, config.adapter)  # rules of [adapter] ask for the base
    if not any(start is not None for start in starts):
        yield fault(
            f"`finetune`: {key} is absent; name the trained weights to start from: a step folder with "
            "checkpoint.initial_load_model_only = true, or a Hugging Face folder with "
            "checkpoint.initial_load_in_hf = true",
            key,
        )


@rule
def preference_trains_no_prediction_layers(preference: PreferenceConfig, shape: ModelShape) -> Faults:
    """The preference loss trains only the decoder, not the prediction layers."""
    if shape.num_nextn_predict_layers:
        yield fault(
            "`model.shape.num_nextn_predict_layers`: must be 0 under `finetune.preference`, which leaves the "
            "prediction layers of the start as they are; set it to 0"
        )


@rule
def reward_model_is_whole(config: RunConfig, finetune: FineTuneConfig) -> Faults:
    """A reward model has a value head instead of an output head, and generates no text."""
    configured: dict[str, object] = {"adapter": config.adapter, "finetune.samples": finetune.samples}
    configured["checkpoint.last_save_in_hf"] = config.checkpoint.last_save_in_hf
    for key in [key for key, value in configured.items() if value and config.head == "value"]:
        yield fault(
            f"`{key}`: not possible under `finetune.preference.loss_type`: a reward model trains all weights, gives a "
            f"number and no text, and transformers has no form for it; remove {key}",
            key,
        )


@rule
def reference_is_the_start(config: RunConfig, preference: PreferenceConfig) -> Faults:
    """The reference of a preference is the policy at the start of the run."""
    if not preference.has_reference:
        return
    checkpoint = config.checkpoint
    adapter = config.adapter
    key = "checkpoint.initial_load_path"
    if adapter is not None:  # rules of [adapter] ask for the base
        if adapter.initial_load_path is not None:
            yield fault(
                "`adapter.initial_load_path`: not possible under `finetune.preference`, whose reference is the base "
                "without adapters; merge them with 'convert merge' and start from the merged folder"
            )
        return
    if checkpoint.initial_load_path is None and checkpoint.load_path is not None:  # else a rule of [finetune] says it
        yield fault(
            f"{key}: absent, but the reference of `finetune.preference` is read from it at every "
            "start, checkpoint.load_path or not; name the weights that the first start had",
            key,
        )
    if checkpoint.initial_load_exclude:
        name = "checkpoint.initial_load_exclude"
        yield fault(
            f"`{name}`: not possible under `finetune.preference`, whose reference is all that the run begins with; "
            f"remove {name}"
        )
