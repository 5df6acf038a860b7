"""Rows through a network on any layout: the figures of a measure, and greedy answers."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.engine.evaluation.rows import (
    Figures,
    Measure,
    Row,
    build_batch,
    equal_lengths,
    padded,
    row_figures,
    share_of_rows,
)
from glm46.engine.training.named_sums import sum_over_all_ranks
from glm46.engine.training.network import Network
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch


def tokens_at_once(plan: Plan) -> int:
    """Tokens of a batch of a rank in a validation."""
    return plan.config.training.local_batch_size * plan.config.training.seq_len


def measured_figures(network: Network, measure: Measure) -> Figures:
    """The figures of all rows of a measure, on all ranks. Collective."""
    ranks, rank = network.plan.layout.dp_degree, network.cluster.dp_rank
    place = {row.key: number for number, row in enumerate(measure.rows)}
    found = torch.zeros(len(place), measure.width, dtype=torch.float64)
    for rows in equal_lengths(measure.rows, tokens_at_once(network.plan), ranks):
        own, mine = share_of_rows(rows, rank, ranks)
        for number, of_row in zip(own, _run_rows(network, measure, mine), strict=False):
            found[place[rows[number].key]] = torch.tensor(of_row, dtype=torch.float64)
    # Ranks that hold the same rows have equal figures.
    summed = sum_over_all_ranks({"found": found / network.plan.layout.ranks_per_dp_rank})["found"].tolist()
    return {key: summed[number] for key, number in place.items()}


def _run_rows(network: Network, measure: Measure, rows: list[Row]) -> list[list[float]]:
    """The figures of rows of equal length; empty on pipeline stages without the head. Collective."""
    batch = run_on_all_ranks(lambda: build_batch(rows))
    whole = padded(batch, network.plan.layout.sequence_pieces)
    output = network.evaluate(whole, token_logprobs)
    if output is None:
        return []
    assert output.logprobs is not None, "the form is `token_logprobs`"
    values = torch.stack([output.logprobs.double(), output.predictions[0].double()])  # FP64 is exact for token ids
    logprobs, predictions = network.whole_rows(values, whole)[..., : rows[0].length]
    return row_figures(measure, batch, logprobs, predictions.long())


def greedy_answers(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    has_ended: Callable[[int, Sequence[int]], bool],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Answer prompts with the most likely tokens. Collective.

    Each token is one evaluation of all rows, in batches as large as those of validation: no cache, and the code of
    every layout. Data-parallel ranks share the rows.

    Args:
        prompts: token ids, at least one per prompt; the same on all ranks.
        max_new_tokens: most new tokens of an answer.
        has_ended: whether an answer ends with its last token, from the number of its prompt and its ids, at least one.
        is_stopped: asked before each token; true on any rank ends all answers.

    Returns:
        The new ids of each prompt.
    """
    rows = [list(prompt) for prompt in prompts]
    pieces = network.plan.layout.sequence_pieces
    # One length for all tokens, so that a compiled model is compiled once.
    length = -(-(max(map(len, rows)) + max_new_tokens) // pieces) * pieces
    running = list(range(len(rows)))
    for _ in range(max_new_tokens):
        chosen, must_stop = _next_tokens(network, rows, length, is_stopped())
        if must_stop:
            break
        for number in running:
            rows[number].append(chosen[number])
        running = [number for number in running if not has_ended(number, rows[number][len(prompts[number]) :])]
        if not running:
            break
    network.release()
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_tokens(network: Network, rows: list[list[int]], length: int, is_stopped: bool) -> tuple[list[int], bool]:
    """The most likely next token of each row, and whether any rank is stopped. Collective."""
    rank, ranks = network.cluster.dp_rank, network.plan.layout.dp_degree
    at_once = max(1, tokens_at_once(network.plan) // length) * ranks
    found = torch.full((len(rows) + 1,), -1, dtype=torch.int64)
    for first in range(0, len(rows), at_once):
        places, mine = share_of_rows(rows[first : first + at_once], rank, ranks)
        batch = batch_of_rows(mine, length)
        output = network.evaluate(batch, token_logprobs)
        if output is not None:  # other stages of a pipeline have no head
            last = [len(row) - 1 for row in mine]
            predicted = network.whole_rows(output.predictions[:1], batch)[0, range(len(mine)), last].cpu()
            found[[first + place for place in places]] = predicted[: len(places)]
    found[-1] = is_stopped
    # The largest, not one rank's: ranks that compute the same row may differ in the last bits, and must choose alike.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    *chosen, stopped = found.tolist()
    return chosen, bool(stopped)


def batch_of_rows(rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Rows of one document each, with padding behind it."""
    lengths = torch.tensor([[len(row)] for row in rows])
    places = torch.arange(length).expand(len(rows), length)
    is_real = places < lengths
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    ids[is_real] = torch.tensor([token for row in rows for token in row])
    none: Tensor = torch.full_like(ids, IGNORE)
    documents = torch.where(is_real, 0, -1)
    return {"input_ids": ids, "labels": none, "positions": places.where(is_real, 0), "document_ids": documents}
