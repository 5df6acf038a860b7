"""The sections [finetune] and [finetune.preference]: runs that fine-tune trained weights."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import Excludes, Needs, Requires
from glm46.config.section import Removed, Section

WITH_REFERENCE = ("sigmoid", "ipo", "kto")
"""Values of ``loss_type`` that compare the policy with a reference."""


class PreferenceConfig(Section):
    """[finetune.preference]: learn from pairs of answers to prefer the chosen completion of a prompt to the rejected
    one, or, with KTO, from single answers labelled desirable or undesirable. Most losses compare with a reference: the
    weights of checkpoint.initial_load_path, which under [adapter] are the policy without its adapters."""

    removed = {"label_smoothing": Removed("each label is taken as it is; remove it, or remove doubtful pairs")}

    loss_type: Annotated[
        Literal["sigmoid", "ipo", "simpo", "orpo", "kto", "reward"],
        Requires(
            "checkpoint.initial_load_path",
            when=WITH_REFERENCE,
            remedy="name the weights that the first start had: every start reads the reference from them",
        ),
    ] = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290). ipo: IPO (arXiv 2310.12036), with log-ratios per token. simpo: SimPO (arXiv
    2405.14734), without a reference. orpo: ORPO (arXiv 2403.07691), without a reference, and with the cross-entropy of
    the chosen completions. kto: KTO (arXiv 2402.01306), of sources of labelled answers (format = "unpaired_preference")
    or of pairs, whose two answers count as two examples. reward: a reward model, whose head returns one number for an
    answer (Bradley-Terry, arXiv 2203.02155), without a reference."""

    beta: Annotated[float, Needs("loss_type", ("sigmoid", "ipo", "simpo", "orpo", "kto"))] = Field(0.1, gt=0.0)
    """Scale of the log-ratios of policy and reference: a larger one keeps the policy nearer to the reference. simpo:
    scale of log-probabilities per token, 2 to 10 in the paper. orpo: weight of the odds ratio."""

    simpo_gamma: Annotated[float, Needs("loss_type", "simpo")] = Field(0.5, ge=0.0)
    """Target margin of SimPO, in units of ``beta`` times log-probability per token."""

    desirable_weight: Annotated[float, Needs("loss_type", "kto")] = Field(1.0, gt=0.0)
    """Weight of the losses of desirable examples. If one kind is rare, raise its weight: in the paper the ratio of
    weight times number is 1 to 4/3."""

    undesirable_weight: Annotated[float, Needs("loss_type", "kto")] = Field(1.0, gt=0.0)
    """Weight of the losses of undesirable examples."""

    sft_weight: Annotated[float, Needs("loss_type", ("sigmoid", "ipo", "simpo"))] = Field(0.0, ge=0.0)
    """Weight of the mean cross-entropy of the chosen completions, which is added to the loss, so that their likelihood
    does not fall (RPO, arXiv 2404.19733)."""

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the policy with a reference."""
        return self.loss_type in WITH_REFERENCE


class FineTuneConfig(Section):
    """[finetune]: start from trained weights (checkpoint.initial_load_path) and learn the targets of conversations,
    or to prefer one of two answers."""

    removed = {
        "distillation": Removed('a policy learns from a teacher with rl.algorithm = "distillation"; remove the section')
    }

    preference: PreferenceConfig | None = None
    """Pairs of answers, or labelled ones, and the loss that learns from them. Absent: the targets of conversations are
    learned by cross-entropy."""

    train_only: Annotated[
        Literal["prediction_layers"] | None,
        Needs("model.shape.num_nextn_predict_layers", above=0),
        Needs("mtp.loss_weight"),
        Requires(
            "checkpoint.initial_load_model_only",
            unless=("checkpoint.initial_load_in_hf", "checkpoint.load_path"),
            remedy="set checkpoint.initial_load_model_only = true: optimizer states of frozen weights have no use",
        ),
    ] = None
    """prediction_layers: train the layers that draft tokens, and nothing else, so that drafts fit a tuned model
    again. Everything else is frozen, so the model answers as before. Absent: all weights, or adapters."""

    samples: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Excludes("preference.loss_type", "reward", reason="which gives a number and no text"),
    ] = ()
    """Messages of a user; the greedy answers to them are printed before the first step and after the last one, on any
    layout. Each new token runs the model on all samples without a cache. Absent: no answers."""

    thinking: Annotated[bool, Needs("samples")] = False
    """Let the model think before it answers the samples."""

    max_new_tokens: Annotated[int, Needs("samples")] = Field(128, ge=1)
    """Longest answer to a sample in tokens."""
