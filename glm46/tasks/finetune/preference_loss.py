"""The loss of direct preference optimisation (DPO), with the sums over the tokens of each half of a pair.

Sources: DPO, arXiv 2305.18290, equation 7; label smoothing, E. Mitchell, "A note on DPO with noisy preferences" (2023);
the weighted cross-entropy of chosen completions, arXiv 2404.19733.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.collectives import sum_over_ranks
from glm46.compute.distributed.local_tensor import copy_to_device
from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.compute.model.transformer import LossSums
from glm46.config.finetune import PreferenceConfig
from glm46.engine.training.network import Network
from glm46.storage.data.batches import Batch

HALF, REFERENCE = "pair_half", "reference_logprobs"


def split_pairs(batch: Batch, begin_id: int) -> Batch:
    """The halves of each pair as documents of their own: other ``document_ids`` and ``positions``, and the new field
    ``pair_half``, int64 [B, S]: at each position with a label the number of its half in the batch, the chosen half of
    pair n being 2n and the rejected one 2n + 1; else -1.

    Args:
        batch: of the loader, whose documents are pairs.
        begin_id: the token that each half begins with, and no other place holds.
    """
    is_real = batch["document_ids"] >= 0
    begins = (batch["input_ids"] == begin_id) & is_real
    halves = begins.cumsum(1)
    places = torch.arange(begins.shape[1]).expand_as(halves)
    first = torch.where(begins, places, 0).cummax(1).values
    before = halves[:, -1:].cumsum(0) - halves[:, -1:]
    return batch | {
        "document_ids": torch.where(is_real, halves - 1, -1),
        "positions": torch.where(is_real, places - first, 0),
        HALF: torch.where(batch["labels"] != IGNORE, before + halves - 1, -1),
    }


class PairSums(NamedTuple):
    """FP64 [pairs, 2], chosen and rejected: sums over the tokens of each half. Rows of no pair are zero."""

    logprobs: Tensor
    """Of the policy."""
    log_ratios: Tensor
    """Of policy and reference."""
    tokens: Tensor


def sum_pairs(logprobs: Tensor, reference: Tensor, half: Tensor, size: int) -> PairSums:
    """Sum over halves.

    Args:
        logprobs, reference: FP32 [B, S].
        half: int64 [B, S], see `split_pairs`.
        size: more than the largest number of a half, and even. Not the exact one, which the host does not know.
    """
    has_label = half >= 0
    values = torch.stack([logprobs, logprobs - reference, torch.ones_like(logprobs)]).double() * has_label
    sums = values.new_zeros(3, size).index_add(1, half.clamp(min=0).flatten(), values.flatten(1))
    return PairSums(*sums.view(3, -1, 2))


def pair_losses(log_ratios: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """The loss of each pair, [pairs], of log-ratios [pairs, 2] of the chosen and the rejected completion."""
    margins = beta * (log_ratios[:, 0] - log_ratios[:, 1])
    return -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)


class PreferenceLoss:
    """The objective of pairs. Its totals: ``targets``, the pairs; ``chosen_targets``, the labels of chosen halves."""

    form = staticmethod(token_logprobs)
    fields = (HALF, REFERENCE)

    def __init__(self, network: Network, config: PreferenceConfig):
        self._network, self._config = network, config

    def count(self, micro_batches: list[Batch]) -> dict[str, Any]:
        """See `Objective.count`."""
        halves = [batch[HALF] for batch in micro_batches]
        return {
            "targets": sum(int(half.max()) + 1 for half in halves) // 2,
            "chosen_targets": sum(int(_is_chosen(half).sum()) for half in halves),
        }

    def loss(self, output: LossSums, batch: Batch, totals: Mapping[str, Any], clock: int) -> Tensor:
        """See `Objective.loss`. Collective under context parallelism, whose ranks hold parts of a half: each rank
        returns its share of the loss of the pairs."""
        cluster, half, size = self._network.cluster, batch[HALF], self._size(batch[HALF])
        sums = sum_pairs(output.logprobs, batch[REFERENCE], half, size)
        if cluster.meshes.sequence is not None:
            sums = PairSums(*sum_over_ranks(torch.stack(sums), cluster.meshes.sequence.group))
        losses = pair_losses(sums.log_ratios, self._config.beta, self._config.label_smoothing) * _exists(sums)
        loss = losses.sum().float() / (cluster.layout.cp * max(totals["targets"], 1))
        if self._config.sft_weight:
            chosen = (output.logprobs * _is_chosen(half)).sum()
            loss = loss - self._config.sft_weight / max(totals["chosen_targets"], 1) * chosen
        return loss

    def _size(self, half: Tensor) -> int:
        """Of the halves of whole rows, which have more tokens than halves."""
        return 2 * half.numel() * self._network.cluster.layout.cp

    def empty_sums(self) -> dict[str, Tensor]:
        """FP64 sums over pairs: loss, of their correct order, and [2] of log-probabilities and log-ratios."""
        scalars = {name: torch.zeros((), dtype=torch.float64) for name in ("loss", "correct")}
        return scalars | {name: torch.zeros(2, dtype=torch.float64) for name in ("logprobs", "log_ratios")}

    def sums(self, output: LossSums, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.sums`. Collective under context parallelism."""
        logprobs = self._network.whole_rows(output.logprobs.unsqueeze(0), batch)[0]
        half, reference = (copy_to_device(batch[name], logprobs.device) for name in (HALF, REFERENCE))
        sums = sum_pairs(logprobs, reference, half, 2 * half.numel())
        order = (sums.log_ratios[:, 0] - sums.log_ratios[:, 1]).sign()  # a tie is half of a correct order
        losses = pair_losses(sums.log_ratios, self._config.beta, self._config.label_smoothing)
        named = {
            "loss": (losses * _exists(sums)).sum(),
            "correct": ((order + 1) / 2 * _exists(sums)).sum(),
            "logprobs": sums.logprobs.sum(0),
            "log_ratios": sums.log_ratios.sum(0),
        }
        return {name: value / self._network.cluster.layout.ranks_per_dp_rank for name, value in named.items()}

    def metrics(self, sums: dict[str, Tensor], totals: Mapping[str, Any], clock: int) -> dict[str, float]:
        """See `Objective.metrics`."""
        pairs = max(totals["targets"], 1)
        chosen, rejected = (self._config.beta * sums["log_ratios"] / pairs).tolist()
        chosen_logprob, rejected_logprob = (sums["logprobs"] / pairs).tolist()
        return {
            "loss": sums["loss"].item() / pairs,
            "reward_margin": chosen - rejected,
            "reward_accuracy": sums["correct"].item() / pairs,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "chosen_logprob": chosen_logprob,
            "rejected_logprob": rejected_logprob,
            "chosen_loss": -sums["logprobs"][0].item() / max(totals["chosen_targets"], 1),
        }


def _is_chosen(half: Tensor) -> Tensor:
    return (half >= 0) & (half % 2 == 0)


def _exists(sums: PairSums) -> Tensor:
    return sums.tokens[:, 0] > 0
