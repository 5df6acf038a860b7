"""The section [rl]: the algorithm of reinforcement learning, as a preset and the keys that it sets."""

from typing import Annotated, Any, Literal

from pydantic import Field

from glm46.config.field_rules import Excludes, Needs, Requires
from glm46.config.hub_address import OnHub
from glm46.config.rl_data import EnvironmentConfig, PromptsConfig, PromptSetConfig, RewardTableConfig
from glm46.config.section import FORMAT_IS_FOUND, ModelFolder, Removed, Schedule, Section

Algorithm = Literal[
    "gspo",
    "gspo_glm",
    "grpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "ppo",
    "reinforce++",
    "reinforce++_baseline",
    "rloo",
    "tv",
    "glm5_agent",
    "distillation",
]
_LEVELS = ("token", "sequence", "geometric")
_EQUAL_POLICIES = "because all weights would be 1"
_OLD_POLICY = 'set rl.old_policy = "trainer", or rl.correction.level = "none" and no rejection'


class ClipConfig(Section):
    """[rl.clip]: bounds for the ratio of new to old policy. Absent keys come from the preset."""

    removed = {"dual": Removed("a sample with a negative advantage has no further bound; remove it")}

    low: float | None = Field(None, ge=0.0)
    """The ratio is clipped below 1 - low; at 1 or more there is no bound. algorithm = "tv": largest fall of a
    probability. algorithm = "glm5_agent": tokens with a ratio of 1 - low or less have no loss."""

    high: float | None = Field(None, ge=0.0)
    """The ratio is clipped above 1 + high. algorithm = "tv": largest rise of a probability. algorithm = "glm5_agent":
    tokens with a ratio of 1 + high or more have no loss."""


class KLConfig(Section):
    """[rl.kl]: penalty for the distance from the reference, which is the policy that the run began with or the weights
    of [rl.reference]; for algorithm = "tv" from the policy that the ratio divides by. Absent keys come from the
    preset."""

    removed = {"to": Removed('it is the old policy with algorithm = "tv", else the reference; remove it')}

    weight: Annotated[
        float | None,
        Excludes(
            "rl.warm_up_rollouts",
            unless="rl.reference",
            reason="because the reference would be the policy before it learned the labels",
            remedy="set rl.kl.weight = 0.0, or start from a fine-tuned model",
        ),
    ] = Field(None, ge=0.0)
    """Factor of the penalty; 0: no penalty, and no reference network."""

    where: Annotated[
        Literal["loss", "reward"] | None,
        Needs("weight"),
        Excludes(
            "rl.algorithm",
            "tv",
            when="reward",
            reason="whose penalty is for the distance from the old policy, which generated the samples",
            remedy='set rl.kl.where = "loss"',
        ),
    ] = None
    """loss: a term of the loss, with gradient. reward: subtracted from the reward of each token."""

    estimator: Annotated[
        Literal["k1", "k2", "k3"] | None,
        Needs("weight"),
        Excludes(
            "where",
            "loss",
            when="k1",
            reason="because the gradient of k1 has the mean 0",
            remedy='set rl.kl.estimator = "k2" or "k3", or set rl.kl.where = "reward"',
        ),
    ] = None
    """With d = log policy - log other: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d."""


class CorrectionConfig(Section):
    """[rl.correction]: weights for the difference between the policy as the engine computed it and as the trainer does,
    w = old policy of the trainer / policy of the rollout. Absent keys come from the preset."""

    removed = {
        "normalize": Removed("weights are not divided by their mean; remove it"),
        "veto": Removed('reject samples with reject_level = "sequence" or "geometric" instead'),
    }

    level: Literal["none", "token", "sequence", "geometric"] | None = None
    """none: no weights. token: w of each token. sequence: product of w over the tokens of a sample. geometric:
    geometric mean of w over these tokens."""

    mode: Annotated[Literal["truncate", "clip", "mask"] | None, Needs("level", _LEVELS)] = None
    """truncate: min(w, high) (TIS). clip: into [low, high]. mask: 0 outside of [low, high] (IcePop)."""

    low: Annotated[float | None, Needs("level", _LEVELS), Needs("mode", ("clip", "mask"))] = Field(None, ge=0.0, le=1.0)
    """Lower bound of w. Absent: 1 / high."""

    high: Annotated[float | None, Needs("level", _LEVELS)] = Field(None, ge=1.0)
    """Upper bound of w."""

    reject_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Level at which w is computed for rejection: tokens or samples outside of [reject_low, reject_high] are excluded
    from the loss (MIS)."""

    reject_low: Annotated[float | None, Needs("reject_level", _LEVELS)] = Field(None, ge=0.0, le=1.0)
    """Lower bound of rejection. Absent: 1 / reject_high."""

    reject_high: Annotated[float, Needs("reject_level", _LEVELS)] = Field(2.0, ge=1.0)
    """Upper bound of rejection; for "geometric" near 1, such as 1.0001."""

    @property
    def is_used(self) -> bool:
        """True if w changes the loss. The section must be resolved."""
        return self.level != "none" or self.reject_level != "none"


class ReferenceConfig(Section):
    """[rl.reference]: the weights of the reference, if they differ from the weights that the run began with. Shape and
    tokenizer are the same as for the policy. The weights are frozen, sharded like the policy, and read at every
    start."""

    refused = FORMAT_IS_FOUND

    load_path: Annotated[ModelFolder, OnHub("model")]
    """A step folder of a checkpoint, or a Hugging Face folder, or ``hf://owner/name`` of the hub."""


class CriticConfig(Section):
    """[rl.critic]: the value network of algorithms with advantage = "gae"."""

    lr: float | None = Field(None, gt=0.0)
    """Peak learning rate. Absent: optimizer.lr."""

    warmup_tokens: int = Field(0, ge=0)
    """Tokens of the schedule's clock during which only the critic learns."""


class RLConfig(Section):
    """[rl]: train a policy on rewards of its own samples. ``algorithm`` is a preset of the other keys."""

    removed = {
        "reference_offload": Removed("the reference is held like the policy; remove it, or shard over more ranks"),
        "gae_lambda": Removed("it is 1 in the preset of PPO; remove it"),
        "gamma": Removed('it is 1 in each preset, and 0 in that of "distillation"; remove it'),
        "ratio": Removed('it is of each sample with algorithm = "gspo" or "gspo_glm", else of each token; remove it'),
        "filter": Removed("dynamic_sampling = true skips groups of equal rewards; remove it"),
        "stop": Removed("watch the metrics mismatch_kl, entropy and equal_groups_ratio; remove the section"),
    }

    algorithm: Annotated[
        Algorithm, Requires("reference", when="distillation", remedy="add [rl.reference] with load_path, the teacher")
    ] = "gspo"
    """gspo: arXiv 2507.18071, gspo_glm with the narrower clip of GLM's recipe; grpo: 2402.03300; dr_grpo: 2503.20783;
    dapo: 2503.14476; cispo: 2506.13585; ppo: 1707.06347; reinforce++ and reinforce++_baseline: 2501.03262; rloo:
    2402.14740; tv: a mask on the change of probabilities instead of a clip; glm5_agent: arXiv 2602.15763, a mask on the
    ratio to the policy of the rollout; distillation: the advantage of a token is its log-probability under the teacher,
    which is [rl.reference], minus its log-probability under the policy (arXiv 2306.13649)."""

    prompts_per_rollout: int = Field(ge=1)
    """Prompts of one rollout, each sampled group_size times from one policy. One rollout is one or several optimizer
    steps of training.global_batch_size samples."""

    group_size: int = Field(8, ge=1)
    """Samples of each prompt."""

    old_policy: Annotated[
        Literal["trainer", "rollout"] | None,
        Excludes("correction.level", _LEVELS, when="rollout", reason=_EQUAL_POLICIES, remedy=_OLD_POLICY),
        Excludes("correction.reject_level", _LEVELS, when="rollout", reason=_EQUAL_POLICIES, remedy=_OLD_POLICY),
    ] = None
    """Log-probabilities that the ratio divides by. trainer: computed before the first step of a rollout, or by the
    forward pass of that step if it is the only one and no penalty in the reward reads them. rollout: as the engine
    computed them. Absent: from the preset."""

    routing_replay: Annotated[
        bool,
        Excludes(
            "moe.bias_update_rate",
            reason="because the bias would balance the experts that the engine chose, which it cannot change",
            remedy="set moe.bias_update_rate = 0.0",
        ),
    ] = False
    """The policy computes log-probabilities and gradients with the experts that the engine chose for each token, as
    constants (R3, arXiv 2510.11370). The policy still computes the weights of these experts, so the routers still
    learn."""

    advantage: Annotated[
        Literal["group_std", "group_mean", "leave_one_out", "returns", "gae"] | None,
        Excludes(
            "adapter",
            when="gae",
            reason="because the critic trains all weights",
            remedy='take an advantage over groups, such as the one of rl.algorithm = "gspo"',
        ),
    ] = None
    """group_std: (reward - mean of its group) / deviation of its group; group_mean: without the division;
    leave_one_out: reward - mean of the others of its group; returns: sum of the later rewards of the tokens; gae:
    generalised advantage estimation with a critic. Absent: from the preset."""

    reduction: Literal["token_mean", "sample_mean", "constant"] | None = None
    """token_mean: mean over all tokens of the optimizer step; sample_mean: mean over samples of the means over their
    tokens; constant: sum over tokens / (samples * training.seq_len). Absent: from the preset."""

    entropy_weight: float = Field(0.0, ge=0.0)
    """Factor of the entropy bonus in the loss."""

    dynamic_sampling: bool | None = None
    """Use only groups whose rewards differ, and sample more prompts to replace the others, in at most eight rounds: a
    rollout that is not full then has fewer samples. Absent: from the preset."""

    over_sampling: float = Field(1.0, ge=1.0, le=16.0)
    """A round samples this many times the prompts that are missing, and uses the first groups that qualify: as many
    samples in fewer rounds. Prompts after the last used one are sampled again in the next rollout."""

    overlong_share: float | None = Field(None, ge=0.0, le=1.0)
    """Share of the longest length, at its end: completions that end in it lose reward, linearly from 0 to 1. 0
    disables. Absent: from the preset."""

    warm_up_rollouts: int = Field(0, ge=0)
    """Rollouts at the start whose completions are not generated but are the labels of the prompts, with advantage 1:
    fine-tuning on the labels. For a model that would get no reward."""

    prompts: PromptsConfig | None = None
    rewards: tuple[RewardTableConfig, ...] = ()
    validation: tuple[PromptSetConfig, ...] = ()
    clip: ClipConfig = Field(default_factory=ClipConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    critic: Annotated[CriticConfig | None, Needs("advantage", "gae")] = None
    reference: Annotated[
        ReferenceConfig | None,
        Needs("kl.weight"),
        Excludes("algorithm", "tv", reason="whose penalty is for the distance from the old policy"),
    ] = None
    environment: EnvironmentConfig | None = None

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout over all ranks."""
        return self.prompts_per_rollout * self.group_size

    @property
    def reward_model(self) -> RewardTableConfig | None:
        """The reward that is computed by a network."""
        return next((reward for reward in self.rewards if reward.name == "model"), None)

    def resolved(self) -> "ResolvedRL":
        """Return the section with absent keys filled in from the preset."""
        return ResolvedRL.model_validate(
            _merged(_merged(_BASE, PRESETS[self.algorithm]), self.model_dump(exclude_unset=True))
        )


class ResolvedClip(ClipConfig):
    """[rl.clip] with the keys of the preset."""

    low: float
    high: float


class ResolvedKL(KLConfig):
    """[rl.kl] with the keys of the preset."""

    weight: float
    to: Literal["reference", "old"]
    """reference: the policy that the run began with, or the weights of [rl.reference]. old: the policy that the ratio
    divides by."""

    where: Literal["loss", "reward"]
    estimator: Literal["k1", "k2", "k3"]


class ResolvedCorrection(CorrectionConfig):
    """[rl.correction] with the keys of the preset."""

    level: Literal["none", "token", "sequence", "geometric"]
    high: float


class ResolvedRL(RLConfig):
    """[rl] with the keys of the preset."""

    policy_loss: Literal["ppo", "cispo", "tv", "mask"]
    """Loss of a token, which the algorithm alone decides. ppo: minimum of the objectives with the ratio and the clipped
    ratio. cispo: the clipped ratio is a constant weight of the log-probability, so that no token loses its gradient
    (arXiv 2506.13585). tv: the ratio is not clipped; a token whose probability has already moved by more than the
    bounds of the clip in the direction of its advantage has no gradient. mask: the ratio is a constant weight of the
    log-probability, and 0 outside of both bounds, whatever the sign of the advantage (arXiv 2602.15763)."""

    ratio: Literal["token", "sequence"]
    """Ratio of new to old policy: of each token, or of each sample, as the geometric mean over its tokens (GSPO)."""

    advantage: Literal["group_std", "group_mean", "leave_one_out", "returns", "gae"]
    gamma: float
    """Discount per token, for advantage = "returns" or "gae"."""

    gae_lambda: float
    """Weight of later value differences, for advantage = "gae"."""

    reduction: Literal["token_mean", "sample_mean", "constant"]
    overlong_share: float
    correction: ResolvedCorrection
    critic: CriticConfig
    whiten: bool
    """Normalise the advantages of all tokens of a rollout to mean 0 and standard deviation 1."""

    clip: ResolvedClip
    kl: ResolvedKL

    @property
    def has_reference(self) -> bool:
        """True if the section needs a reference network."""
        return self.kl.weight > 0 and self.kl.to == "reference"

    @property
    def has_critic(self) -> bool:
        """True if the section needs a critic."""
        return self.advantage == "gae"

    def is_on_policy(self, samples_per_step: Schedule | None) -> bool:
        """Return True if the old log-probabilities can come from the forward pass of the step itself, where the ratio
        is 1 but has a gradient. Each rollout must have one step, and no penalty in the reward may need the old
        log-probabilities before it."""
        is_in_reward = self.kl.weight > 0 and self.kl.where == "reward"
        is_one_step = self.samples_per_rollout == samples_per_step
        return is_one_step and self.old_policy == "trainer" and not is_in_reward


def _merged(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a table updated with the keys of another one that are not None, recursively."""
    merged = {
        key: _merged(table[key], value) if isinstance(value, dict) and isinstance(table.get(key), dict) else value
        for key, value in changes.items()
    }
    return table | {key: value for key, value in merged.items() if value is not None}


_BASE: dict[str, Any] = dict(
    ratio="token",
    old_policy="trainer",
    advantage="group_std",
    whiten=False,
    gamma=1.0,
    gae_lambda=1.0,
    reduction="sample_mean",
    critic={},
    dynamic_sampling=False,
    overlong_share=0.0,
    policy_loss="ppo",
    clip=dict(low=0.2, high=0.2),
    kl=dict(weight=0.0, to="reference", where="loss", estimator="k3"),
    correction=dict(level="none", mode="truncate", high=2.0),
)
PRESETS: dict[str, dict[str, Any]] = {
    "gspo": dict(ratio="sequence", clip=dict(low=3e-4, high=4e-4), correction=dict(level="token")),
    "gspo_glm": dict(ratio="sequence", clip=dict(low=1e-4, high=2e-4), correction=dict(level="token")),
    "grpo": {},
    "dr_grpo": dict(advantage="group_mean", reduction="constant"),
    "dapo": dict(reduction="token_mean", clip=dict(high=0.28), dynamic_sampling=True, overlong_share=0.2),
    "cispo": dict(policy_loss="cispo", reduction="token_mean", clip=dict(low=1.0, high=4.0)),
    "ppo": dict(advantage="gae", whiten=True, reduction="token_mean"),
    "reinforce++": dict(advantage="returns", whiten=True, reduction="token_mean"),
    "reinforce++_baseline": dict(advantage="group_mean", whiten=True, reduction="token_mean"),
    "rloo": dict(advantage="leave_one_out"),
    # With gamma = 0 the return of a token is -1 * (log policy - log teacher), plus the reward at the last token.
    "distillation": dict(
        advantage="returns",
        gamma=0.0,
        reduction="token_mean",
        kl=dict(weight=1.0, where="reward", estimator="k1"),
    ),
    # The penalty is 1e-3 * (log ratio)^2, twice k2.
    "tv": dict(
        policy_loss="tv",
        advantage="group_mean",
        reduction="token_mean",
        old_policy="rollout",
        kl=dict(weight=2e-3, to="old", estimator="k2"),
    ),
    # The paper states no bounds; these are the ones of DAPO.
    "glm5_agent": dict(
        policy_loss="mask",
        advantage="group_mean",
        reduction="token_mean",
        old_policy="rollout",
        clip=dict(low=0.2, high=0.28),
    ),
}
"""Keys that each algorithm sets, in addition to `_BASE`."""
