"""The sections [finetune], [finetune.preference] and [finetune.distillation]: runs that fine-tune trained weights."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.section import FORMAT_IS_FOUND, LocalPath, ModelFolder, Needs, OnHub, Section


class PreferenceConfig(Section):
    """[finetune.preference]: learn from pairs of answers to prefer the chosen completion of a prompt to the rejected
    one, or with KTO from single answers that are labelled desirable or not. Most losses compare with a reference: the
    weights of checkpoint.initial_load_path, which under [adapter] are the policy without its adapters."""

    loss_type: Literal["sigmoid", "ipo", "simpo", "orpo", "kto", "reward"] = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290). ipo: IPO (arXiv 2310.12036), with log-ratios per token. simpo: SimPO (arXiv
    2405.14734), without a reference. orpo: ORPO (arXiv 2403.07691), without a reference, and with the cross-entropy of
    the chosen completions. kto: KTO (arXiv 2402.01306), of sources of labelled answers (format =
    "unpaired_preference") or of pairs, whose two answers it takes as two examples. reward: a reward model, whose head
    gives one number for an answer (Bradley-Terry, arXiv 2203.02155), without a reference."""

    beta: Annotated[float, Needs("loss_type", ("sigmoid", "ipo", "simpo", "orpo", "kto"))] = Field(0.1, gt=0.0)
    """Scale of the log-ratios of policy and reference: a larger one keeps the policy nearer to the reference. simpo:
    scale of log-probabilities per token, 2 to 10 in the paper. orpo: weight of the odds ratio."""

    label_smoothing: Annotated[float, Needs("loss_type", ("sigmoid", "simpo"))] = Field(0.0, ge=0.0, lt=0.5)
    """Share of the pairs whose labels are taken to be swapped (conservative DPO)."""

    simpo_gamma: Annotated[float, Needs("loss_type", "simpo")] = Field(0.5, ge=0.0)
    """The margin that SimPO asks for, in units of ``beta`` times log-probability per token."""

    desirable_weight: Annotated[float, Needs("loss_type", "kto")] = Field(1.0, gt=0.0)
    """Weight of the losses of desirable examples. Where one kind is rare, raise its weight: the paper takes 1 to 4/3
    for the ratio of weight times number."""

    undesirable_weight: Annotated[float, Needs("loss_type", "kto")] = Field(1.0, gt=0.0)
    """Weight of the losses of undesirable examples."""

    sft_weight: Annotated[float, Needs("loss_type", ("sigmoid", "ipo", "simpo"))] = Field(0.0, ge=0.0)
    """Weight of the mean cross-entropy of the chosen completions, which is added to the loss, so that their likelihood
    does not fall (RPO, arXiv 2404.19733)."""

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with a reference."""
        return self.loss_type not in ("simpo", "orpo", "reward")


class DistillationConfig(Section):
    """[finetune.distillation]: learn at each target the distribution of a teacher with the same tokenizer: a frozen
    network, sharded as the student and read at every start, or what one has said before."""

    refused = FORMAT_IS_FOUND

    load_path: Annotated[ModelFolder | None, OnHub("model")] = None
    """The teacher: a step folder of a checkpoint, or a Hugging Face folder, or ``hf://owner/name`` of the hub. Absent:
    the weights that the run begins with; under [adapter] the student without its adapters, which takes no memory."""

    flavor: Annotated[str | None, Needs("load_path")] = None
    """Preset of the teacher's shape (glm46/config/presets.py). Absent: the shape of [model]."""

    stored_path: Annotated[LocalPath | None, Needs("load_path", absent=", a teacher that is loaded")] = None
    """Folder of what ``python -m glm46 teach`` has stored: the most likely tokens of a teacher at each target of the
    prepared sources. No teacher is loaded."""

    beta: float = Field(0.0, ge=0.0, le=1.0)
    """0: forward KL, of the teacher from the student. 1: reverse KL. Between: the generalised Jensen-Shannon divergence
    of GKD (arXiv 2306.13649), as TRL computes it."""

    temperature: float = Field(1.0, gt=0.0)
    """Divides the logits of both, for the divergence alone. It is not multiplied by the square of this number."""

    top_k: int = Field(64, ge=1)
    """Tokens of the teacher at each target, the most likely ones. All others count as one more."""

    sft_weight: float = Field(0.0, ge=0.0)
    """Weight of the mean cross-entropy of the targets, which is added to the mean divergence."""

    @property
    def is_start(self) -> bool:
        """True if the teacher is what the student begins as."""
        return self.load_path is None and self.stored_path is None

    @property
    def runs_head_twice(self) -> bool:
        """True if the cross-entropy, which is at temperature 1, takes logits of its own."""
        return self.temperature != 1.0 and self.sft_weight > 0


class FineTuneConfig(Section):
    """[finetune]: start from trained weights (checkpoint.initial_load_path) and learn the targets of conversations,
    to prefer one of two answers, or what a teacher says."""

    preference: PreferenceConfig | None = None
    """Pairs of answers, or labelled ones, and the loss that learns from them."""

    distillation: DistillationConfig | None = None
    """A teacher, and the divergence from it. Without this and ``preference`` the targets of conversations are learned
    by cross-entropy."""

    samples: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Messages of a user; the greedy answers to them are shown before the first step and after the last one, on any
    layout. Each new token runs the model on all of them without a cache. Absent: no answers."""

    thinking: Annotated[bool, Needs("samples")] = False
    """Let the model think before it answers the samples."""

    max_new_tokens: Annotated[int, Needs("samples")] = Field(128, ge=1)
    """Longest answer to a sample in tokens."""
