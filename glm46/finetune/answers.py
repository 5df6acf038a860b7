"""Greedy answers to prompts by a network on any layout."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.model.cross_entropy import IGNORE, token_logprobs
from glm46.training.network import Batch, Network


def greedy_answers(
    network: Network,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Answer prompts with the most likely tokens. Collective.

    Each token is one evaluation of all rows, as in validation: no cache, and the code of every layout. All
    data-parallel ranks compute the same rows.

    Args:
        prompts: token ids, at least one per prompt; the same on all ranks.
        max_new_tokens: most new tokens of an answer.
        stop: ids that end an answer.
        is_stopped: asked before each token; true on any rank ends all answers.

    Returns:
        The new ids of each prompt. An answer that ended has one id of ``stop``, its last one.
    """
    rows = [list(prompt) for prompt in prompts]
    pieces = network.plan.layout.sequence_pieces
    # One length for all tokens, so that a compiled model is compiled once.
    length = -(-(max(map(len, rows)) + max_new_tokens) // pieces) * pieces
    for _ in range(max_new_tokens):
        running = [number for number, row in enumerate(rows) if len(row) == len(prompts[number]) or row[-1] not in stop]
        if not running:
            break
        chosen, must_stop = _next_tokens(network, rows, length, is_stopped())
        if must_stop:
            break
        for number in running:
            rows[number].append(chosen[number])
    network.release()
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_tokens(network: Network, rows: list[list[int]], length: int, is_stopped: bool) -> tuple[list[int], bool]:
    """The most likely next token of each row, and whether any rank is stopped. Collective."""
    batch = _batch(rows, length)
    output = network.evaluate(batch, token_logprobs)
    found = torch.full((len(rows) + 1,), -1, dtype=torch.int64)
    if output is not None:  # other stages of a pipeline have no head
        last = [len(row) - 1 for row in rows]
        found[:-1] = network.whole_rows(output.predictions[:1], batch)[0, range(len(rows)), last].cpu()
    found[-1] = is_stopped
    # The largest, not one rank's: ranks that compute the same row may differ in the last bits, and must choose alike.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    *chosen, stopped = found.tolist()
    return chosen, bool(stopped)


def _batch(rows: list[list[int]], length: int) -> Batch:
    """Rows of one document each, with padding behind it."""
    lengths = torch.tensor([[len(row)] for row in rows])
    places = torch.arange(length).expand(len(rows), length)
    is_real = places < lengths
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    ids[is_real] = torch.tensor([token for row in rows for token in row])
    none: Tensor = torch.full_like(ids, IGNORE)
    documents = torch.where(is_real, 0, -1)
    return {"input_ids": ids, "labels": none, "positions": places.where(is_real, 0), "document_ids": documents}
