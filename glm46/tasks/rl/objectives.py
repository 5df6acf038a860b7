"""Objectives of policy and critic, on batches with the fields of `training_fields`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.collectives import sum_over_ranks
from glm46.compute.distributed.local_tensor import copy_to_device
from glm46.compute.model.cross_entropy import IGNORE, HeadForm, summed_loss, token_logprobs
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.config.rl import ResolvedRL
from glm46.config.section import Section, is_huggingface
from glm46.engine.training.network import Network
from glm46.run.plan import Plan
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch
from glm46.tasks.pretrain.next_token import count_targets
from glm46.tasks.rl.packing import fields_of
from glm46.tasks.rl.policy_loss import (
    TokenLosses,
    cispo_loss,
    correction_weights,
    kl_estimate,
    mask_loss,
    ppo_loss,
    sequence_ratio,
    sum_over_samples,
    token_ratio,
    tv_loss,
    value_loss,
)

_FAR = 2.0
"""A ratio beyond this or its inverse counts in ``ratio_far``."""
_MEANS = (
    "clip_fraction",
    "old_policy_kl",
    "ratio_deviation",
    "ratio_far",
    "entropy",
    "mismatch_kl",
    "mismatch_logprob",
    "correction_mean",
    "correction_dropped",
    "reference_kl",
)
"""Columns of policy metrics that are means over targets; ``ratio_deviation`` is the root of a mean."""
_VALUE_CLIP = 0.2  # largest change of a value that the critic's loss rewards, as in slime


def critic_plan(plan: Plan) -> Plan:
    """Return the plan for building the critic, with its own learning rate."""
    lr = plan.config.reinforcement[0].resolved().critic.lr
    if lr is None:
        return plan
    return _changed(plan, optimizer=plan.config.optimizer.model_copy(update={"lr": lr}))


def reference_plan(plan: Plan) -> Plan:
    """Return the plan for building the reference, which is loaded from [rl.reference] or else from the run's initial
    weights."""
    rl, _ = plan.config.reinforcement
    checkpoint = plan.config.checkpoint
    if (reference := rl.reference) is not None:
        update = {"initial_load_path": reference.load_path, "initial_load_in_hf": is_huggingface(reference.load_path)}
        checkpoint = checkpoint.model_copy(update=update)
    return _changed(plan, checkpoint=checkpoint, adapter=None)


def reward_plan(plan: Plan, load_path: str) -> Plan:
    """Return the plan for building a reward model, which is loaded from a step folder."""
    start = {"initial_load_path": load_path, "initial_load_in_hf": False}
    return _changed(plan, checkpoint=plan.config.checkpoint.model_copy(update=start), adapter=None)


def _changed(plan: Plan, **sections: Section | None) -> Plan:
    return replace(plan, config=plan.config.model_copy(update=sections))


class PolicyGradient:
    """The policy's objective: loss of the ratio, KL penalty, entropy, and the loss of multi-token prediction.

    Multi-token prediction learns from generated tokens; its gradient reaches its own layers only. Totals are
    ``targets``, ``samples``, ``episodes``, and the totals of `count_targets` for multi-token prediction. Old
    log-probabilities are computed with the same ``form``.
    """

    def __init__(
        self,
        network: Network,
        config: ResolvedRL,
        temperature: float,
        *,
        is_on_policy: bool = False,
        is_restricted: bool = False,
    ):
        """With ``is_on_policy`` (see `ResolvedRL.is_on_policy`) batches need no ``old_logprobs`` or ``correction``.
        With ``is_restricted`` they have ``kept``, and distributions are over these tokens alone."""
        self._is_on_policy = is_on_policy
        self.record: Callable[[Tensor, Batch], None] = lambda logprobs, batch: None
        """Takes the log-probabilities of an on-policy step; they are the old log-probabilities of its rollout."""
        self._network = network
        self._config = config
        self._depths = network.plan.mtp_depths
        self.form: HeadForm = partial(token_logprobs, entropy=True, temperature=temperature)
        self.fields: tuple[str, ...] = ("sample", "sample_tokens", "episode_tokens", "advantages")
        self.fields += ("rollout_logprobs",) if is_on_policy else ("old_logprobs", "correction")
        if config.has_reference:
            self.fields += ("reference_logprobs",)
        self._fields_of_sums = (*self.fields, "rollout_logprobs")
        if config.routing_replay:
            self.fields += ("routes",)  # read by the model, not by the loss
        if is_restricted:
            self.fields += ("kept",)  # read by the head

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""

        def count(name: str) -> int:
            by_batch = [fields_of(batch)[name][batch["labels"] != IGNORE] for batch in micro_batches]
            return sum(len(numbers[numbers >= 0].unique()) for numbers in by_batch)

        counts = {"samples": count("sample"), "episodes": count("episode")}
        return count_targets(micro_batches, self._depths) | counts

    def loss(self, output: LossSums, batch: Fields, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`. Collective under context parallelism."""
        assert output.logprobs is not None and output.entropy is not None
        sequence = self._network.cluster.meshes.sequence
        # The loss of a token depends on all ranks' parts of its sample.
        sum_parts = partial(sum_over_ranks, group=sequence.group) if sequence is not None else lambda sums: sums
        samples = max(totals["samples"], 1)  # at least 1: padding is summed into index 0
        batch = self._with_old(batch, output.logprobs, samples, sum_parts)
        losses, _ = self._token_losses(output.logprobs, batch, samples, sum_parts)
        # With weight 0, detach: a gradient of zeros would cost another tensor as large as the logits.
        entropy = output.entropy if self._config.entropy_weight else output.entropy.detach()
        figures = {"loss": losses.loss, "entropy": entropy, "kl": self._penalty(output.logprobs, batch)}
        loss: Tensor = self._total({name: self._reduced(value, batch).sum() for name, value in figures.items()}, totals)
        if clock < self._config.critic.warmup_tokens:
            loss = loss * 0.0
        mtp_weight = schedule_value(self._network.plan.config.mtp.loss_weight, clock)
        depths = totals["mtp_targets"]
        for depth_loss, targets in zip(output.mtp_losses, depths, strict=False):
            loss = loss + mtp_weight / len(depths) * depth_loss / max(targets, 1)
        return loss

    def _with_old(self, batch: Fields, logprobs: Tensor, samples: int, sum_parts: Callable[[Tensor], Tensor]) -> Fields:
        """Add ``old_logprobs`` and ``correction`` to an on-policy batch, whose old log-probabilities are its own.

        Off policy the batch already has them from `training_fields`.
        """
        if not self._is_on_policy:
            return batch
        old = logprobs.detach()
        sample = batch["sample"]
        sums = partial(sum_over_samples, sample=sample, samples=samples, sum_parts=sum_parts)
        weights = correction_weights(old.double() - batch["rollout_logprobs"], sums, self._config.correction)
        return {**batch, "old_logprobs": old, "correction": weights.float().where(sample >= 0, 0.0)}

    def _token_losses(
        self, logprobs: Tensor, batch: Fields, samples: int, sum_parts: Callable[[Tensor], Tensor]
    ) -> tuple[TokenLosses, Tensor]:
        """Compute corrected losses of the tokens, and their ratios, in the shape of ``logprobs``."""
        config = self._config
        clip = config.clip
        old = batch["old_logprobs"]
        advantages = batch["advantages"]
        if config.ratio == "sequence":
            ratio = sequence_ratio(logprobs, old, batch["sample"], batch["sample_tokens"], samples, sum_parts)
        else:
            ratio = token_ratio(logprobs, old)
        if config.policy_loss == "cispo":
            losses = cispo_loss(ratio, logprobs, advantages, clip.low, clip.high)
        elif config.policy_loss == "mask":
            losses = mask_loss(ratio, logprobs, advantages, clip.low, clip.high)
        elif config.policy_loss == "tv":
            losses = tv_loss(ratio, logprobs, old, advantages, clip.low, clip.high)
        else:
            assert config.policy_loss == "ppo"
            losses = ppo_loss(ratio, advantages, clip.low, clip.high)
        return losses._replace(loss=losses.loss * batch["correction"]), ratio

    def _penalty(self, logprobs: Tensor, batch: Fields) -> Tensor:
        """Estimate the KL divergence at each token for the penalty in the loss; zeros if the loss has no penalty."""
        kl = self._config.kl
        if kl.weight == 0 or kl.where == "reward":
            return torch.zeros_like(logprobs)
        return kl_estimate(logprobs, batch[f"{kl.to}_logprobs"], kl.estimator)

    def _reduced(self, values: Tensor, batch: Fields) -> Tensor:
        """Weight values of tokens for the sum that `_total` divides."""
        return values / batch["episode_tokens"].clamp(min=1) if self._config.reduction == "sample_mean" else values

    def _total(self, sums: Mapping[str, Any], totals: Mapping[str, Any]) -> Any:
        """Compute the loss from sums of `_reduced` values."""
        config = self._config
        denominator = {
            "token_mean": totals["targets"],
            "sample_mean": totals["episodes"],
            "constant": totals["episodes"] * self._network.plan.config.training.seq_len,
        }[config.reduction]
        loss = sums["loss"] + config.kl.weight * sums["kl"] - config.entropy_weight * sums["entropy"]
        return loss / max(denominator, 1)

    def empty_sums(self) -> dict[str, Tensor]:
        """See `Objective.empty_sums`. FP64 [] sums over tokens; ``loss``, ``policy_kl`` and ``policy_entropy`` are
        weighted as the reduction requires. With prediction depths also ``mtp_losses`` [K]."""
        sums = {name: torch.zeros((), dtype=torch.float64) for name in ("loss", "policy_kl", "policy_entropy", *_MEANS)}
        return sums | ({"mtp_losses": torch.zeros(self._depths, dtype=torch.float64)} if self._depths else {})

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        assert output.logprobs is not None and output.entropy is not None
        mtp_sums = {"mtp_losses": output.mtp_losses} if "mtp_labels" in batch and self._depths else {}
        stacked = torch.stack([output.logprobs, output.entropy])
        logprobs, entropy = self._network.whole_rows(stacked, batch)
        if self._is_on_policy:
            self.record(logprobs, batch)
        fields: Fields = {
            name: copy_to_device(fields_of(batch)[name], logprobs.device) for name in self._fields_of_sums
        }
        samples = max(int(fields["sample"].max()) + 1, 1)
        fields = self._with_old(fields, logprobs, samples, lambda sums: sums)
        losses, ratio = self._token_losses(logprobs, fields, samples, lambda sums: sums)
        is_token = fields["sample_tokens"] > 0
        old = fields["old_logprobs"]
        figures = {
            "loss": self._reduced(losses.loss, fields),
            "policy_kl": self._reduced(self._penalty(logprobs, fields), fields),
            "policy_entropy": self._reduced(entropy, fields),
            "clip_fraction": losses.is_clipped & is_token,
            "old_policy_kl": kl_estimate(old, logprobs, "k3"),
            "ratio_deviation": (ratio - 1).square() * is_token,
            "ratio_far": ((ratio > _FAR) | (ratio < 1 / _FAR)) & is_token,
            "mismatch_kl": kl_estimate(fields["rollout_logprobs"], old, "k3"),
            "entropy": entropy,
            "mismatch_logprob": (old - fields["rollout_logprobs"]).abs(),
            "correction_mean": fields["correction"],
            "correction_dropped": (fields["correction"] == 0) & is_token,
        }
        if self._config.has_reference:
            figures["reference_kl"] = kl_estimate(logprobs, fields["reference_logprobs"], "k3")
        ranks = self._network.cluster.layout.ranks_per_dp_rank
        return {name: value.sum().double() / ranks for name, value in figures.items()} | mtp_sums

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`."""
        values = {name: sums[name].item() for name in self.empty_sums() if name != "mtp_losses"}
        weighted = {"loss": values["loss"], "kl": values["policy_kl"], "entropy": values["policy_entropy"]}
        row = {"loss": self._total(weighted, totals)} | {
            name: values[name] / max(totals["targets"], 1) for name in _MEANS
        }
        row["ratio_deviation"] **= 0.5
        if not self._config.has_reference:
            del row["reference_kl"]
        if any(totals["mtp_targets"]):
            losses = zip(sums["mtp_losses"].tolist(), totals["mtp_targets"], strict=True)
            row["mtp_loss"] = sum(loss / max(targets, 1) for loss, targets in losses) / self._depths
            row["mtp_loss_weight"] = schedule_value(self._network.plan.config.mtp.loss_weight, clock)
        return row


class ValueLoss:
    """The critic's objective: clipped squared error at each token with a label. Its only total is ``targets``."""

    def __init__(self, network: Network):
        self._network = network
        self.form: HeadForm = summed_loss
        self.fields: tuple[str, ...] = ("old_values", "returns", "sample_tokens")

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""
        return {"targets": count_targets(micro_batches, 0)["targets"]}

    def _losses(self, values: Tensor, batch: Fields) -> TokenLosses:
        losses = value_loss(values, batch["old_values"], batch["returns"], _VALUE_CLIP)
        is_token = batch["sample_tokens"] > 0
        return TokenLosses(losses.loss * is_token, losses.is_clipped & is_token)

    def loss(self, output: LossSums, batch: Fields, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`."""
        assert output.values is not None
        loss = self._losses(output.values, batch).loss.sum()
        targets: int = max(totals["targets"], 1)
        return loss / targets

    def empty_sums(self) -> dict[str, Tensor]:
        """See `Objective.empty_sums`. FP64 [] sums over tokens."""
        names = ("loss", "clipped", "error", "error_square", "return", "return_square")
        return {name: torch.zeros((), dtype=torch.float64) for name in names}

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        assert output.values is not None
        values = self._network.whole_rows(output.values.unsqueeze(0), batch)[0]
        fields = {name: copy_to_device(fields_of(batch)[name], values.device) for name in self.fields}
        losses = self._losses(values, fields)
        returns = fields["returns"].double()
        error = (returns - values) * (fields["sample_tokens"] > 0)
        figures = {
            "loss": losses.loss,
            "clipped": losses.is_clipped,
            "error": error,
            "error_square": error.square(),
            "return": returns,
            "return_square": returns.square(),
        }
        ranks = self._network.cluster.layout.ranks_per_dp_rank
        return {name: value.sum().double() / ranks for name, value in figures.items()}

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`. Explained variance: 1 - Var(return - value) / Var(return)."""
        means = {name: sums[name].item() / max(totals["targets"], 1) for name in self.empty_sums()}
        error_variance = means["error_square"] - means["error"] ** 2
        return_variance = means["return_square"] - means["return"] ** 2
        row = {"loss": means["loss"], "clip_fraction": means["clipped"], "return_mean": means["return"]}
        return row | ({"explained_variance": 1 - error_variance / return_variance} if return_variance > 1e-12 else {})
