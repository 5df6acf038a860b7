"""Loss on documents that were never trained on."""

import math

import torch
import torch.distributed as dist

from glm46.data.loader import build_validation_loader
from glm46.data.manifest import Manifest
from glm46.distributed.collective_errors import run_on_all_ranks
from glm46.model.cross_entropy import IGNORE
from glm46.parallelize.fsdp import release_gathered
from glm46.training.build import Parts
from glm46.training.loss import count_drafts
from glm46.training.step import judge_drafts, to_device


@torch.no_grad()
def evaluate(parts: Parts) -> dict[str, float]:
    """Validation figures over all held-out text, or the part of it that [validation] steps allows; collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; mtp_acceptance when there are prediction layers.
    """
    totals = {name: _evaluate_source(parts, manifest) for name, manifest in parts.manifests.items()}
    for model in parts.models:
        release_gathered(model)
    row: dict[str, float] = {}
    for name, total in (("", sum(totals.values())), *((f"/{name}", total) for name, total in totals.items())):
        loss_sum, targets, text_bytes = total[:3].tolist()
        row[f"validation_loss{name}"] = loss_sum / max(targets, 1)
        row[f"validation_bits_per_byte{name}"] = loss_sum / math.log(2.0) / max(text_bytes, 1)
    good_drafts, drafts = sum(totals.values())[3:].tolist()
    if drafts:
        row["validation_mtp_acceptance"] = good_drafts / drafts
    return row


def _evaluate_source(parts: Parts, manifest: Manifest) -> torch.Tensor:
    """FP64 [5] on the CPU, summed over ranks: loss, targets, bytes of the targets' text, accepted drafts, drafts."""
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
    good_drafts = torch.zeros((), dtype=torch.float64, device=parts.process.device)
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
        if result is None:  # the loss is known on the last stage of a pipeline only
            continue
        loss += result.loss
        if parts.shape.num_nextn_predict_layers:
            good_drafts += judge_drafts(parts, result, batch)[0]
    # Every rank that reads the same rows has counted all of them.
    counts = [count / parts.layout.non_dp_degree for count in (targets, text_bytes, drafts)]
    total = torch.tensor([loss.item(), *counts[:2], good_drafts.item(), counts[2]], dtype=torch.float64)
    dist.all_reduce(total)
    return total
