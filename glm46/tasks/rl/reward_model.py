"""Rewards of a network: one number for a prompt with its answer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from glm46.engine.evaluation.rows import share_of_rows
from glm46.engine.training.network import Network
from glm46.tasks.pretrain.network_rows import batch_of_rows, tokens_at_once


def last_values(network: Network, rows: Sequence[Sequence[int]]) -> list[float]:
    """The value of the last token of each row, as `PreferenceLoss` trains it. Collective.

    Args:
        network: with a value head.
        rows: token ids without the marker that ends an answer; the same on all ranks.
    """
    rank, ranks, pieces = network.cluster.dp_rank, network.plan.layout.dp_degree, network.plan.layout.sequence_pieces
    length = -(-max(map(len, rows), default=1) // pieces) * pieces
    at_once = max(1, tokens_at_once(network.plan) // length) * ranks
    found = torch.full((len(rows),), -torch.inf)
    for first in range(0, len(rows), at_once):
        places, mine = share_of_rows(list(rows[first : first + at_once]), rank, ranks)
        batch = batch_of_rows(mine, length)
        output = network.evaluate(batch)
        if output is not None and output.values is not None:  # other stages of a pipeline have no head
            last = [len(row) - 1 for row in mine]
            values = network.whole_rows(output.values.unsqueeze(0), batch)[0, range(len(mine)), last].cpu()
            found[[first + place for place in places]] = values[: len(places)]
    network.release()
    # Ranks that compute the same row may differ in the last bits.
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
