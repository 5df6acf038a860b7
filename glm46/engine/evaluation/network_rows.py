"""Greedy generation with a network on any layout, and batches from rows of tokens."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE, token_logprobs
from glm46.engine.evaluation.rows import share_of_rows
from glm46.engine.training.network import Network
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch


def tokens_at_once(plan: Plan) -> int:
    """Return the tokens of one rank's validation batch."""
    return plan.config.training.local_batch_size * plan.config.training.seq_len


def greedy_answers(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    has_ended: Callable[[int, Sequence[int]], bool],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Answer prompts with the most likely tokens. Collective.

    Each token takes one evaluation of all rows, in batches of the size of validation batches. There is no cache, so
    this works with every layout. Data-parallel ranks share the rows.

    Args:
        prompts: token ids, at least one per prompt; the same on all ranks.
        max_new_tokens: most new tokens of an answer.
        has_ended: takes the number of a prompt and the ids of its answer, at least one; returns whether the answer is
            complete.
        is_stopped: polled before each token; true on any rank ends all answers.

    Returns:
        The new ids of each prompt.
    """
    rows = [list(prompt) for prompt in prompts]
    multiple = network.plan.layout.sequence_pieces
    # One length for all tokens, so that a compiled model is compiled once.
    length = -(-(max(map(len, rows)) + max_new_tokens) // multiple) * multiple
    running = list(range(len(rows)))
    for _ in range(max_new_tokens):
        next_tokens, must_stop = _next_tokens(network, rows, length, is_stopped())
        if must_stop:
            break
        for number in running:
            rows[number].append(next_tokens[number])
        running = [number for number in running if not has_ended(number, rows[number][len(prompts[number]) :])]
        if not running:
            break
    network.release()
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_tokens(network: Network, rows: list[list[int]], length: int, is_stopped: bool) -> tuple[list[int], bool]:
    """Return the most likely next token of each row, and whether any rank is stopped. Collective."""
    rank = network.cluster.dp_rank
    ranks = network.plan.layout.dp_degree
    rows_per_batch = max(1, tokens_at_once(network.plan) // length) * ranks
    tokens = torch.full((len(rows) + 1,), -1, dtype=torch.int64)
    for first in range(0, len(rows), rows_per_batch):
        indices, local_rows = share_of_rows(rows[first : first + rows_per_batch], rank, ranks)
        batch = batch_of_rows(local_rows, length)
        output = network.evaluate(batch, token_logprobs)
        if output is not None:  # other stages of a pipeline have no head
            last_positions = [len(row) - 1 for row in local_rows]
            predicted = network.whole_rows(output.predictions[:1], batch)[
                0, range(len(local_rows)), last_positions
            ].cpu()
            tokens[[first + place for place in indices]] = predicted[: len(indices)]
    tokens[-1] = is_stopped
    # The maximum makes all ranks choose the same tokens: ranks that compute the same row may differ in the last bits.
    dist.all_reduce(tokens, dist.ReduceOp.MAX)
    *next_tokens, must_stop = tokens.tolist()
    return next_tokens, bool(must_stop)


def batch_of_rows(rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Build a batch whose rows hold one document each, followed by padding."""
    lengths = torch.tensor([[len(row)] for row in rows])
    positions = torch.arange(length).expand(len(rows), length)
    is_real = positions < lengths
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    ids[is_real] = torch.tensor([token for row in rows for token in row])
    labels: Tensor = torch.full_like(ids, IGNORE)
    documents = torch.where(is_real, 0, -1)
    return {"input_ids": ids, "labels": labels, "positions": positions.where(is_real, 0), "document_ids": documents}
