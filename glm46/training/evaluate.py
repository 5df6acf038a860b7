"""Validation: loss on held-out documents."""

import math

import torch

from glm46.data.loader import build_validation_loader
from glm46.data.manifest import Manifest
from glm46.distributed.collective_errors import run_on_all_ranks
from glm46.model.cross_entropy import IGNORE
from glm46.parallelize.fsdp import release_gathered
from glm46.training.build import Parts
from glm46.training.loss import count_drafts
from glm46.training.named_sums import sum_over_all_ranks
from glm46.training.step import count_accepted_drafts, to_device


@torch.no_grad()
def evaluate(parts: Parts) -> dict[str, float]:
    """Compute validation metrics over all held-out text, or as many batches as [validation] steps allows. Collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; validation_mtp_acceptance if there are prediction layers.
    """
    totals = {name: _evaluate_source(parts, manifest) for name, manifest in parts.manifests.items()}
    for model in parts.models:
        release_gathered(model)
    total = {key: sum(of_source[key] for of_source in totals.values()) for key in next(iter(totals.values()))}
    row: dict[str, float] = {}
    for name, sums in (("", total), *((f"/{name}", of_source) for name, of_source in totals.items())):
        row[f"validation_loss{name}"] = sums["loss"] / max(sums["targets"], 1)
        row[f"validation_bits_per_byte{name}"] = sums["loss"] / math.log(2.0) / max(sums["text_bytes"], 1)
    if total["drafts"]:
        row["validation_mtp_acceptance"] = total["accepted"] / total["drafts"]
    return row


def _evaluate_source(parts: Parts, manifest: Manifest) -> dict[str, float]:
    """Sums over all ranks: loss, targets, text_bytes of the targets, drafts, accepted drafts of depth 1. Collective."""
    config, layout = parts.config, parts.layout
    loader = build_validation_loader(
        manifest,
        seq_len=config.training.seq_len,
        mtp_depth=parts.shape.num_nextn_predict_layers,
        local_batch_size=config.validation.local_batch_size or config.training.local_batch_size,
        dp_rank=parts.dp_rank,
        dp_degree=layout.dp_degree,
        document_mask=config.data.document_mask,
        max_batches=None if config.validation.steps == -1 else config.validation.steps,
    )
    token_bytes = torch.from_numpy(parts.tokenizer.token_bytes())
    loss = torch.zeros((), dtype=torch.float64, device=parts.process.device)
    accepted = torch.zeros((), dtype=torch.float64, device=parts.process.device)
    targets = text_bytes = drafts = 0
    batches = iter(loader)
    for _ in range(len(loader)):
        batch = run_on_all_ranks(lambda: next(batches))
        labels = batch["labels"][batch["labels"] != IGNORE]
        targets += labels.numel()
        text_bytes += int(token_bytes[labels].sum())
        if parts.shape.num_nextn_predict_layers:
            drafts += count_drafts(batch["mtp_labels"])[0]
        arguments = to_device(batch, parts)
        result = parts.models[0](**arguments) if parts.pipeline is None else parts.pipeline.evaluate(arguments)
        if result is None:  # only the last stage of a pipeline computes the loss
            continue
        loss += result.loss
        if parts.shape.num_nextn_predict_layers:
            accepted += count_accepted_drafts(parts, result, batch)[0]
    # Counted by every rank that reads the same rows; loss and accepted drafts are not.
    counts = {"targets": targets, "text_bytes": text_bytes, "drafts": drafts}
    sums = {name: count / layout.non_dp_degree for name, count in counts.items()}
    sums |= {"loss": loss.item(), "accepted": accepted.item()}
    summed = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    return {name: value.item() for name, value in summed.items()}
