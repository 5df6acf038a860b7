"""The sections [finetune] and [finetune.preference]: runs that fine-tune trained weights on conversations or pairs."""

from typing import Annotated

from pydantic import Field

from glm46.config.section import Needs, Section


class PreferenceConfig(Section):
    """[finetune.preference]: direct preference optimisation (DPO, arXiv 2305.18290) on sources of pairs. The policy
    learns to prefer the chosen completion of a prompt to the rejected one, more than the reference does: the weights of
    checkpoint.initial_load_path, which under [adapter] are the policy without its adapters."""

    beta: float = Field(0.1, gt=0.0)
    """Scale of the log-ratios of policy and reference. A larger one keeps the policy nearer to the reference."""

    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Share of the pairs whose labels are taken to be swapped (conservative DPO)."""

    sft_weight: float = Field(0.0, ge=0.0)
    """Weight of the mean cross-entropy of the chosen completions, which is added to the loss, so that their likelihood
    does not fall (RPO, arXiv 2404.19733)."""


class FineTuneConfig(Section):
    """[finetune]: start from trained weights (checkpoint.initial_load_path) and learn the targets of conversations,
    or to prefer one of two answers."""

    preference: PreferenceConfig | None = None
    """Absent: the targets of conversations are learned by cross-entropy."""

    samples: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Messages of a user; the greedy answers to them are shown before the first step and after the last one, on any
    layout. Each new token runs the model on all of them without a cache. Absent: no answers."""

    thinking: Annotated[bool, Needs("samples")] = False
    """Let the model think before it answers the samples."""

    max_new_tokens: Annotated[int, Needs("samples")] = Field(128, ge=1)
    """Longest answer to a sample in tokens."""
