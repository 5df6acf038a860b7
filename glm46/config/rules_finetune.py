"""Rules about fine-tuning: where it starts, and the keys of other tasks."""

from glm46.config.faults import Fault, Faults, show
from glm46.config.run_config import RunConfig


def fine_tuning_has_a_base(config: RunConfig) -> Faults:
    """Fine-tuning starts from trained weights."""
    key = "checkpoint.initial_load_path"
    is_new = config.checkpoint.load_path is None and config.adapter is None  # a rule of [adapter] asks for the base
    if config.finetune is not None and is_new and config.checkpoint.initial_load_path is None:
        yield Fault(
            ("finetune", key),
            f"[finetune]: {key} is absent; name the trained weights to start from: a step folder with "
            "checkpoint.initial_load_model_only = true, or a Hugging Face folder with "
            "checkpoint.initial_load_in_hf = true",
        )


def fine_tuning_answers_messages(config: RunConfig) -> Faults:
    """A fine-tuning run shows answers, no continuation of a text."""
    prompt = config.inference.prompt
    if config.finetune is not None and prompt:
        yield Fault(
            ("inference.prompt", "finetune"),
            f"inference.prompt = {show(prompt)}: has no effect with [finetune], which shows answers to messages; move "
            "the text to finetune.samples, or remove inference.prompt",
        )


FINETUNE_RULES = (fine_tuning_has_a_base, fine_tuning_answers_messages)
