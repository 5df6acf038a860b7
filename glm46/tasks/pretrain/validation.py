"""Validation: loss on held-out documents, and the tasks of [[validation.tasks]]."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.model.cross_entropy import IGNORE
from glm46.config.errors import UserError, raise_if
from glm46.config.training import ValidationTaskConfig
from glm46.engine.evaluation.loss import loss_columns
from glm46.engine.evaluation.needle import Needle
from glm46.engine.evaluation.position import Position
from glm46.engine.evaluation.rows import Measure
from glm46.engine.training.named_sums import sum_over_all_ranks
from glm46.engine.training.network import Network
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.storage.data.loader import build_validation_loader
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.pretrain.data_stream import batch_layout
from glm46.tasks.pretrain.network_rows import measured_figures
from glm46.tasks.pretrain.next_token import NextToken, count_drafts
from glm46.tasks.pretrain.standard_tasks import StandardMeasure

# The begin, the middle and the end of the text.
_NEEDLE_DEPTHS = (0.0, 0.5, 1.0)

ColumnsOf = Callable[[Network], dict[str, float]]
"""What a task of [[validation.tasks]] measures of a network, by column. Collective."""


def validation_measures(plan: Plan, manifests: dict[str, Manifest], tokenizer: Tokenizer) -> list[ColumnsOf]:
    """The measures of [[validation.tasks]].

    Raises:
        UserError: the held-out text or the tokenizer has no rows of these lengths, or a standard task cannot be run.
    """
    measures, faults = list[ColumnsOf](), list[str]()
    for index, task in enumerate(plan.config.validation.tasks):
        place = f"validation.tasks[{index}]"
        try:
            if task.kind == "standard":
                measures.append(StandardMeasure(task, place, tokenizer, plan.shape.max_position_embeddings).columns)
            else:
                measures.append(partial(_columns, _measure(task, plan, manifests, tokenizer)))
        except UserError as error:
            start = "" if task.kind == "standard" else f"{place}.lengths: "
            faults += [start + fault for fault in error.faults]
    raise_if(faults)
    return measures


def due_tasks(plan: Plan, progress: Progress) -> list[bool]:
    """Flags of the [[validation.tasks]] that are part of a validation after these steps: of the first, the last, and of
    those at its own frequency."""
    is_last = progress.tokens >= plan.budget_tokens
    return [is_last or progress.step % (task.freq or 1) == 0 for task in plan.config.validation.tasks]


def _measure(task: ValidationTaskConfig, plan: Plan, manifests: dict[str, Manifest], tokenizer: Tokenizer) -> Measure:
    usual: dict[str, Any] = {"lengths": task.lengths, "samples": task.samples, "seed": plan.config.debug.seed}
    if task.kind == "needle":
        return Needle(manifests, tokenizer, depths=_NEEDLE_DEPTHS, **usual)
    return Position(manifests, **usual)


def _columns(measure: Measure, network: Network) -> dict[str, float]:
    return measure.result(measured_figures(network, measure))["columns"]


def evaluate(
    network: Network,
    objective: NextToken,
    manifests: dict[str, Manifest],
    tokenizer: Tokenizer,
    measures: Sequence[ColumnsOf] = (),
) -> dict[str, float]:
    """Compute validation metrics over all held-out text, or as many batches as [validation] steps allows, and the
    columns of further measures. Collective.

    Returns:
        validation_loss in nats per token, validation_bits_per_byte, and both per source as
        ``validation_loss/<source>``; validation_mtp_acceptance if there are prediction layers.
    """
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    totals = {name: _evaluate_source(network, objective, manifest, token_bytes) for name, manifest in manifests.items()}
    columns = loss_columns(totals)
    if drafts := sum(sums["drafts"] for sums in totals.values()):
        columns["mtp_acceptance"] = sum(sums["accepted"] for sums in totals.values()) / drafts
    for measure in measures:
        columns |= measure(network)
    network.release()
    return {f"validation_{column}": value for column, value in columns.items()}


def held_out_batches(network: Network, manifest: Manifest) -> Iterator[Batch]:
    """The batches of a source that this rank validates on, equally many on each rank. Collective."""
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
    """Sums over all ranks: loss, targets, text_bytes of the targets, drafts, accepted drafts of depth 1. Collective."""
    plan, cluster = network.plan, network.cluster
    loss = torch.zeros((), dtype=torch.float64, device=cluster.device)
    accepted = torch.zeros((), dtype=torch.float64, device=cluster.device)
    targets = text_bytes = drafts = 0
    for batch in held_out_batches(network, manifest):
        labels = batch["labels"][batch["labels"] != IGNORE]
        targets += labels.numel()
        text_bytes += int(token_bytes[labels].sum())
        if plan.shape.num_nextn_predict_layers:
            drafts += count_drafts(batch["mtp_labels"])[0]
        output = network.evaluate(batch)
        if output is None:  # only the last stage of a pipeline computes the loss
            continue
        assert output.loss is not None, "the form is `summed_loss`"
        loss += output.loss
        if plan.shape.num_nextn_predict_layers:
            accepted += objective.count_accepted(output, batch)[0]
    # Counted by every rank that reads the same rows; loss and accepted drafts are not.
    counts = {"targets": targets, "text_bytes": text_bytes, "drafts": drafts}
    sums = {name: count / plan.layout.non_dp_degree for name, count in counts.items()}
    sums |= {"loss": loss.item(), "accepted": accepted.item()}
    summed = sum_over_all_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    return {name: value.item() for name, value in summed.items()}
