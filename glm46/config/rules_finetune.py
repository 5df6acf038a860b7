"""Rules about [finetune], [finetune.preference] and [finetune.distillation]."""

from glm46.config import float8_layers, rules_layout, rules_model, rules_pipeline
from glm46.config.finetune import DistillationConfig, FineTuneConfig, PreferenceConfig
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.rules import Faults, broken_rules, fault, rule
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
def objective_trains_no_prediction_layers(config: RunConfig, finetune: FineTuneConfig, shape: ModelShape) -> Faults:
    """There is one objective beside the cross-entropy, and it is of the decoder alone."""
    if finetune.preference is not None and finetune.distillation is not None:
        yield fault("`finetune.preference`, `finetune.distillation`: both given; remove one of them")
    elif shape.num_nextn_predict_layers and (finetune.preference or finetune.distillation):
        section = "preference" if finetune.preference else "distillation"
        yield fault(
            f"`model.num_nextn_predict_layers`: must be 0 under `finetune.{section}`, which does not train them: those "
            "of the start are left as they are; set it to 0"
        )


@rule
def preference_is_the_only_loss(config: RunConfig, preference: PreferenceConfig) -> Faults:
    """Nothing else is asked of pairs than their loss."""
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
def reference_is_the_start(config: RunConfig, finetune: FineTuneConfig) -> Faults:
    """The reference, or a teacher without a folder, is what the policy begins as."""
    distillation, section = finetune.distillation, "finetune.preference"
    if distillation is not None and distillation.is_start:
        section = "finetune.distillation"
    elif not config.has_preference_reference:
        return
    checkpoint, adapter, key = config.checkpoint, config.adapter, "checkpoint.initial_load_path"
    if adapter is not None:  # rules of [adapter] ask for the base
        if adapter.initial_load_path is not None and config.has_preference_reference:
            yield fault(
                "`adapter.initial_load_path`: not possible under `finetune.preference`, whose reference is the base "
                "without adapters; merge them with 'convert merge' and start from the merged folder"
            )
        return
    if checkpoint.initial_load_path is None and checkpoint.load_path is not None:  # else a rule of [finetune] says it
        yield fault(
            f"{key}: absent, but the frozen network of `{section}` is read from it at every start, "
            "checkpoint.load_path or not; name the weights that the first start had", key,
        )  # fmt: skip
    if checkpoint.initial_load_exclude:
        name = "checkpoint.initial_load_exclude"
        yield fault(
            f"`{name}`: not possible under `{section}`, whose frozen network is all that the run begins with; remove "
            f"{name}"
        )


@rule
def teacher_teaches(config: RunConfig, distillation: DistillationConfig, shape: ModelShape, world_size: int) -> Faults:
    """The teacher knows something else, in the same tokens, and fits the layout."""
    of, begin = distillation, "finetune.distillation"
    begins_equal = config.adapter is None or config.adapter.initial_load_path is None
    if of.is_start and not of.sft_weight and begins_equal:
        yield fault(
            f"`{begin}`: load_path is absent, so the student begins as its teacher and learns nothing; name a teacher, "
            "or set sft_weight above 0", f"{begin}.load_path", f"{begin}.sft_weight",
        )  # fmt: skip
    if of.top_k > shape.vocab_size:
        yield fault(f"`{begin}.top_k`: the vocabulary has {shape.vocab_size:,} tokens; lower it")
    if of.flavor is None or of.load_path is None or config.teacher is None:
        return
    if of.flavor not in PRESETS:
        yield fault(f"`{begin}.flavor`: no such preset; give one of {', '.join(PRESETS)}")
        return
    tokens = resolve_shape(config.teacher.model).vocab_size
    if tokens != shape.vocab_size:
        yield fault(
            f"`{begin}.flavor`: has {tokens:,} tokens, and the student {shape.vocab_size:,}; give a teacher with the "
            "student's tokenizer", "model.vocab_size",
        )  # fmt: skip
    files = rules_model, rules_layout, rules_pipeline, float8_layers
    of_student = {broken.message for broken in broken_rules(config, world_size, files)}
    for broken in broken_rules(config.teacher, world_size, files):
        if broken.message not in of_student:
            yield fault(f"`{begin}.flavor`: for the teacher {broken.message}", *broken.keys)
