"""Validation: loss on held-out documents."""

import math

import torch

from glm46.data.loader import BatchLayout, build_validation_loader
from glm46.data.manifest import Manifest
from glm46.data.tokenizer import Tokenizer
from glm46.distributed.collective_errors import run_on_all_ranks
from glm46.model.cross_entropy import IGNORE
from glm46.pretrain.next_token import NextToken, count_drafts
from glm46.training.named_sums import sum_over_all_ranks
from glm46.training.network import Network


def evaluate(
    network: Network, objective: NextToken, manifests: dict[str, Manifest], tokenizer: Tokenizer
) -> dict[str, float]:
    """Compute validation metrics over all held-out text, or as many batches as [validation] steps allows. Collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; validation_mtp_acceptance if there are prediction layers.
    """
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    totals = {name: _evaluate_source(network, objective, manifest, token_bytes) for name, manifest in manifests.items()}
    network.release()
    total = {key: sum(of_source[key] for of_source in totals.values()) for key in next(iter(totals.values()))}
    row: dict[str, float] = {}
    for name, sums in (("", total), *((f"/{name}", of_source) for name, of_source in totals.items())):
        row[f"validation_loss{name}"] = sums["loss"] / max(sums["targets"], 1)
        row[f"validation_bits_per_byte{name}"] = sums["loss"] / math.log(2.0) / max(sums["text_bytes"], 1)
    if total["drafts"]:
        row["validation_mtp_acceptance"] = total["accepted"] / total["drafts"]
    return row


def _evaluate_source(
    network: Network, objective: NextToken, manifest: Manifest, token_bytes: torch.Tensor
) -> dict[str, float]:
    """Sums over all ranks: loss, targets, text_bytes of the targets, drafts, accepted drafts of depth 1. Collective."""
    plan, config, cluster = network.plan, network.plan.config, network.cluster
    loader = build_validation_loader(
        manifest,
        BatchLayout(
            seq_len=config.training.seq_len,
            mtp_depth=plan.shape.num_nextn_predict_layers,
            local_batch_size=config.validation.local_batch_size or config.training.local_batch_size,
            dp_rank=cluster.dp_rank,
            dp_degree=plan.layout.dp_degree,
            document_mask=config.data.document_mask,
        ),
        max_batches=None if config.validation.steps == -1 else config.validation.steps,
    )
    loss = torch.zeros((), dtype=torch.float64, device=cluster.device)
    accepted = torch.zeros((), dtype=torch.float64, device=cluster.device)
    targets = text_bytes = drafts = 0
    batches = iter(loader)
    for _ in range(len(loader)):
        batch = run_on_all_ranks(lambda: next(batches))
        labels = batch["labels"][batch["labels"] != IGNORE]
        targets += labels.numel()
        text_bytes += int(token_bytes[labels].sum())
        if plan.shape.num_nextn_predict_layers:
            drafts += count_drafts(batch["mtp_labels"])[0]
        output = network.evaluate(batch)
        if output is None:  # only the last stage of a pipeline computes the loss
            continue
        loss += output.loss
        if plan.shape.num_nextn_predict_layers:
            accepted += objective.count_accepted(output, batch)[0]
    # Counted by every rank that reads the same rows; loss and accepted drafts are not.
    counts = {"targets": targets, "text_bytes": text_bytes, "drafts": drafts}
    sums = {name: count / plan.layout.non_dp_degree for name, count in counts.items()}
    sums |= {"loss": loss.item(), "accepted": accepted.item()}
    summed = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    return {name: value.item() for name, value in summed.items()}
