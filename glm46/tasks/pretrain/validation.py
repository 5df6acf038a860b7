"""Validation: loss on held-out documents."""

from collections.abc import Iterator
from operator import add

import torch

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.mtp import acceptance_length
from glm46.engine.training.loss_columns import loss_columns
from glm46.engine.training.network import Network
from glm46.engine.training.rank_sums import sum_over_all_ranks
from glm46.storage.data.batches import Batch
from glm46.storage.data.loader import build_validation_loader
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.pretrain.data_stream import batch_layout
from glm46.tasks.pretrain.next_token import NextToken, count_draft_runs, count_drafts


def evaluate(
    network: Network, objective: NextToken, manifests: dict[str, Manifest], tokenizer: Tokenizer
) -> dict[str, float]:
    """Compute validation metrics over all held-out text, or over `validation.steps` batches of each source. Collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; validation_mtp_acceptance of the first depth and validation_mtp_acceptance_length
        if there are prediction layers.
    """
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    totals = {name: _evaluate_source(network, objective, manifest, token_bytes) for name, manifest in manifests.items()}
    columns = loss_columns(totals)
    if drafts := sum(sums["drafts"] for sums in totals.values()):
        columns["mtp_acceptance"] = sum(sums["accepted"] for sums in totals.values()) / drafts
        accepted_runs, draft_runs = (
            [sum(sums[f"{name}/{depth}"] for sums in totals.values()) for depth in range(network.plan.mtp_depths)]
            for name in ("accepted_runs", "draft_runs")
        )
        columns["mtp_acceptance_length"] = acceptance_length(accepted_runs, draft_runs)
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
    """Compute sums over all ranks: loss, targets, text_bytes of the targets; for depth 1 drafts and accepted drafts;
    for each depth ``draft_runs/<k>`` and ``accepted_runs/<k>``, k from 0, see `NextToken`. Collective."""
    plan = network.plan
    cluster = network.cluster
    loss = torch.zeros((), dtype=torch.float64, device=cluster.device)
    accepted = torch.zeros(2, plan.mtp_depths, dtype=torch.float64, device=cluster.device)
    draft_runs = [0] * plan.mtp_depths
    targets = text_bytes = drafts = 0
    for batch in held_out_batches(network, manifest):
        labels = batch["labels"][batch["labels"] != IGNORE]
        targets += labels.numel()
        text_bytes += int(token_bytes[labels].sum())
        if plan.mtp_depths:
            drafts += count_drafts(batch["mtp_labels"])[0]
            draft_runs = [*map(add, draft_runs, count_draft_runs(batch["mtp_labels"]))]
        output = network.evaluate(batch)
        if output is None:  # only the last stage of a pipeline computes the loss
            continue
        assert output.loss is not None, "the form is `summed_loss`"
        loss += output.loss
        if plan.mtp_depths:
            counts_of_batch = objective.count_accepted(output, batch)
            accepted += torch.stack([counts_of_batch["accepted"], counts_of_batch["accepted_runs"]])
    # Every rank that reads the same rows adds these counts, so divide them. Of loss and accepted drafts each rank has
    # its own share.
    counts = {"targets": targets, "text_bytes": text_bytes, "drafts": drafts}
    counts |= {f"draft_runs/{depth}": count for depth, count in enumerate(draft_runs)}
    sums = {name: count / plan.layout.non_dp_degree for name, count in counts.items()}
    first_accepted, accepted_runs = accepted.tolist()
    sums |= {"loss": loss.item(), "accepted": sum(first_accepted[:1])}
    sums |= {f"accepted_runs/{depth}": count for depth, count in enumerate(accepted_runs)}
    summed = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    return {name: value.item() for name, value in summed.items()}
