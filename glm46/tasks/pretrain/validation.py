"""Validation: loss on held-out documents."""

from collections.abc import Iterator

import torch

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.model.cross_entropy import IGNORE
from glm46.engine.training.loss_columns import loss_columns
from glm46.engine.training.network import Network
from glm46.engine.training.rank_sums import sum_over_all_ranks
from glm46.storage.data.batches import Batch
from glm46.storage.data.loader import build_validation_loader
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.pretrain.data_stream import batch_layout
from glm46.tasks.pretrain.next_token import NextToken, count_drafts


def evaluate(
    network: Network, objective: NextToken, manifests: dict[str, Manifest], tokenizer: Tokenizer
) -> dict[str, float]:
    """Compute validation metrics over all held-out text, or over `validation.steps` batches of each source. Collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; validation_mtp_acceptance if there are prediction layers.
    """
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    totals = {name: _evaluate_source(network, objective, manifest, token_bytes) for name, manifest in manifests.items()}
    columns = loss_columns(totals)
    if drafts := sum(sums["drafts"] for sums in totals.values()):
        columns["mtp_acceptance"] = sum(sums["accepted"] for sums in totals.values()) / drafts
    network.release()
    return {f"validation_{column}": value for column, value in columns.items()}


def held_out_batches(network: Network, manifest: Manifest) -> Iterator[Batch]:
    """Yield this rank's validation batches of a source, the same number on each rank. Collective."""
    config = network.plan.config
    loader = build_validation_loader(
        manifest,
        batch_layout(network.plan, network.cluster, config.training.seq_len),
        max_batches=None if config.validation.steps == -1 else config.validation.steps,
    )
    batches = iter(loader)
    for _ in range(len(loader)):
        yield run_on_all_ranks(lambda: next(batches))


def _evaluate_source(
    network: Network, objective: NextToken, manifest: Manifest, token_bytes: torch.Tensor
) -> dict[str, float]:
    """Compute sums over all ranks: loss, targets, text_bytes of the targets, and for depth 1 drafts and accepted
    drafts. Collective."""
    plan = network.plan
    cluster = network.cluster
    loss = torch.zeros((), dtype=torch.float64, device=cluster.device)
    accepted = torch.zeros((), dtype=torch.float64, device=cluster.device)
    targets = text_bytes = drafts = 0
    for batch in held_out_batches(network, manifest):
        labels = batch["labels"][batch["labels"] != IGNORE]
        targets += labels.numel()
        text_bytes += int(token_bytes[labels].sum())
        if plan.mtp_depths:
            drafts += count_drafts(batch["mtp_labels"])[0]
        output = network.evaluate(batch)
        if output is None:  # only the last stage of a pipeline computes the loss
            continue
        assert output.loss is not None, "the form is `summed_loss`"
        loss += output.loss
        if plan.mtp_depths:
            accepted += objective.count_accepted(output, batch)[0]
    # Every rank that reads the same rows adds these counts, so divide them. Of loss and accepted drafts each rank has
    # its own share.
    counts = {"targets": targets, "text_bytes": text_bytes, "drafts": drafts}
    sums = {name: count / plan.layout.non_dp_degree for name, count in counts.items()}
    sums |= {"loss": loss.item(), "accepted": accepted.item()}
    summed = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    return {name: value.item() for name, value in summed.items()}
