"""Preference losses, each a function of log-probabilities of pair halves, and the objective that they share.

Sources: DPO, arXiv 2305.18290, equation 7; the weighted cross-entropy of chosen completions, arXiv 2404.19733; IPO,
arXiv 2310.12036, equation 17, with means per token as its authors confirmed to TRL; SimPO, arXiv 2405.14734, equation
6; ORPO, arXiv 2403.07691, equations 6 and 7; KTO, arXiv 2402.01306, equations 7 and 8; reward models, arXiv 2203.02155,
equation 1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.collectives import sum_over_ranks
from glm46.compute.distributed.local_tensor import copy_to_device
from glm46.compute.model.cross_entropy import HeadForm, token_logprobs
from glm46.compute.model.transformer import LossSums
from glm46.compute.parallelize.pipeline import Fields
from glm46.config.finetune import PreferenceConfig
from glm46.engine.training.network import Network
from glm46.storage.data.batches import Batch
from glm46.tasks.finetune.halves import HALF, PairSums, field_of, sum_pairs

REFERENCE = "reference_logprobs"
KL = "kl"

Losses = Callable[[PairSums, PreferenceConfig, Tensor | float], Tensor]
"""Computes the loss of each pair, [pairs], or of each example, [pairs, 2]. Absent rows get any finite number.

Args: sums over halves (means per token without a reference), the config, and the policy's divergence for KTO."""


def sigmoid_losses(sums: PairSums, config: PreferenceConfig, _: Tensor | float) -> Tensor:
    """Compute the loss of DPO, or of SimPO, whose margin (of means per token) must reach a target."""
    margins = config.beta * (sums.log_ratios[:, 0] - sums.log_ratios[:, 1])
    margins = margins - (config.simpo_gamma if config.loss_type == "simpo" else 0.0)
    return -F.logsigmoid(margins)


def ipo_losses(sums: PairSums, config: PreferenceConfig, _: Tensor | float) -> Tensor:
    """Compute the squared distance of the margin per token from 1 / (2 beta)."""
    chosen, rejected = sums.means().log_ratios.unbind(1)
    return (chosen - rejected - 1 / (2 * config.beta)) ** 2


def orpo_losses(sums: PairSums, config: PreferenceConfig, _: Tensor | float) -> Tensor:
    """Compute the loss of the odds ratio of both means; `PreferenceLoss` adds the cross-entropy of chosen texts."""
    # FP32 can round a probability to 1, where the odds are infinite and their gradient is NaN; the clamp avoids this.
    means = sums.logprobs.where(sums.exists, -1.0).clamp(max=-1e-9)
    log_odds = means - torch.log(-torch.expm1(means))
    return -config.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def kto_losses(sums: PairSums, config: PreferenceConfig, kl: Tensor | float) -> Tensor:
    """Compute the loss of each desirable and undesirable example, relative to the divergence from the reference."""
    desirable, undesirable = (config.beta * (sums.log_ratios - kl)).unbind(1)
    weights = sums.tokens.new_tensor([config.desirable_weight, config.undesirable_weight])
    return weights * torch.stack([torch.sigmoid(-desirable), torch.sigmoid(undesirable)], 1)


def reward_losses(sums: PairSums, *_: object) -> Tensor:
    """Compute the Bradley-Terry loss. The sums are the rewards, one number for each half."""
    return -F.logsigmoid(sums.logprobs[:, 0] - sums.logprobs[:, 1])


LOSSES: dict[str, Losses] = {
    "sigmoid": sigmoid_losses,
    "ipo": ipo_losses,
    "simpo": sigmoid_losses,
    "orpo": orpo_losses,
    "kto": kto_losses,
    "reward": reward_losses,
}
"""Loss functions by ``loss_type``."""


class PreferenceLoss:
    """The objective for pairs and labelled examples. Its totals are ``targets``, the pairs, or with KTO the examples;
    ``chosen`` and ``rejected``, the halves of each kind; and ``chosen_targets``, the labels of chosen halves."""

    form: HeadForm = staticmethod(token_logprobs)
    fields: tuple[str, ...]

    def __init__(self, network: Network, config: PreferenceConfig):
        self._network = network
        self._config = config
        self._losses = LOSSES[config.loss_type]
        self._of_examples = config.loss_type == "kto"
        self._of_values = config.loss_type == "reward"
        self._beta = 1.0 if self._of_values else config.beta
        self._sft_weight = 1.0 if config.loss_type == "orpo" else config.sft_weight
        self.fields = (HALF, *[REFERENCE] * config.has_reference, *[KL] * self._of_examples)

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""
        halves = [field_of(batch, HALF) for batch in micro_batches]
        numbers = torch.cat([torch.empty(0, dtype=torch.int64), *(half[half >= 0].unique() for half in halves)])
        rejected = int((numbers % 2).sum())
        chosen = len(numbers) - rejected
        return {
            "targets": chosen + rejected if self._of_examples else chosen,
            "chosen": chosen,
            "rejected": rejected,
            "chosen_targets": sum(int(_is_chosen(half).sum()) for half in halves),
        }

    def loss(self, output: LossSums, batch: Fields, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`. Collective under context parallelism: ranks hold parts of a half, and each returns its
        share of the pairs' loss."""
        cluster = self._network.cluster
        half = batch[HALF]
        # Sum over the halves of whole rows. Rows have more tokens than halves, so the number of tokens bounds the size.
        scores = self._scores(output)
        sums = sum_pairs(scores, batch.get(REFERENCE, 0.0), half, 2 * half.numel() * cluster.layout.cp)
        if cluster.meshes.sequence is not None:
            sums = PairSums(*sum_over_ranks(torch.stack(sums), cluster.meshes.sequence.group))
        losses = self._existing(self._scored(sums), batch)
        loss: Tensor = losses.sum().float() / (cluster.layout.cp * max(totals["targets"], 1))
        if self._sft_weight:
            chosen = (scores * _is_chosen(half)).sum()
            loss = loss - self._sft_weight / max(totals["chosen_targets"], 1) * chosen
        return loss

    def _scores(self, output: LossSums) -> Tensor:
        """Return log-probabilities, or values of a reward model, FP32 [B, S]."""
        scores = output.values if self._of_values else output.logprobs
        assert scores is not None, "the head gives them"
        return scores

    def _scored(self, sums: PairSums) -> PairSums:
        """Return the quantities that rewards are computed from: sums, or means per token without a reference."""
        return sums if self._config.has_reference else sums.means()

    def _existing(self, scored: PairSums, batch: Fields) -> Tensor:
        """Compute the losses of pairs or examples, zero for rows without one."""
        losses = self._losses(scored, self._config, batch[KL][0, 0].double() if self._of_examples else 0.0)
        return losses * (scored.exists if self._of_examples else scored.exists[:, 0])

    def empty_sums(self) -> dict[str, Tensor]:
        """See `Objective.empty_sums`. FP64 sums over pairs: loss; pairs in the correct order, or with KTO the
        divergence at each example; log-probabilities of chosen halves; and for both halves, [2], log-probabilities
        and log-ratios."""
        scalars = ("loss", "kl" if self._of_examples else "correct", "chosen_logprobs")
        named = {name: torch.zeros((), dtype=torch.float64) for name in scalars}
        return named | {name: torch.zeros(2, dtype=torch.float64) for name in ("logprobs", "log_ratios")}

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        logprobs = self._network.whole_rows(self._scores(output).unsqueeze(0), batch)[0]
        fields = {name: copy_to_device(field_of(batch, name), logprobs.device) for name in self.fields}
        half = fields[HALF]
        sums = sum_pairs(logprobs, fields.get(REFERENCE, 0.0), half, 2 * half.numel())
        scored = self._scored(sums)
        named = {
            "loss": self._existing(scored, fields).sum(),
            "chosen_logprobs": sums.logprobs[:, 0].sum(),
            "logprobs": scored.logprobs.sum(0),
            "log_ratios": scored.log_ratios.sum(0),
        }
        if self._of_examples:
            named["kl"] = fields[KL][0, 0] * scored.exists.sum()
        else:  # a tie counts as half correct
            order = (scored.log_ratios[:, 0] - scored.log_ratios[:, 1]).sign()
            named["correct"] = ((order + 1) / 2 * scored.exists[:, 0]).sum()
        ranks = self._network.cluster.layout.ranks_per_dp_rank
        return {name: named[name].double() / ranks for name in self.empty_sums()}

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`. The columns are named as in TRL."""
        targets = max(totals["targets"], 1)
        halves = (totals["chosen"], totals["rejected"])
        nll = -sums["chosen_logprobs"].item() / max(totals["chosen_targets"], 1)
        row = {"loss": sums["loss"].item() / targets + self._sft_weight * nll}
        for side, index, count in zip(("chosen", "rejected"), (0, 1), halves, strict=True):
            if count:
                row[f"rewards/{side}"] = self._beta * sums["log_ratios"][index].item() / count
                if not self._of_values:
                    row[f"logps/{side}"] = sums["logprobs"][index].item() / count
        if all(halves):
            row["rewards/margins"] = row["rewards/chosen"] - row["rewards/rejected"]
        if self._of_examples:
            return row | {"kl": sums["kl"].item() / targets}
        row["rewards/accuracies"] = sums["correct"].item() / targets
        return row if self._of_values else row | {"nll_loss": nll}


def _is_chosen(half: Tensor) -> Tensor:
    return (half >= 0) & (half % 2 == 0)
