"""Memory of attention grows with the row, and work with the squares of its documents."""

import torch
import torch.nn.functional as F

from glm46.compute.model import attention_runs
from glm46.compute.model.attention import attend
from glm46.compute.model.attention_layout import attention_layout


def test_sixteen_documents_cost_a_tenth_of_one(monkeypatch):
    """Pairs of queries and keys that are computed, seen or not, forward and backward: what time grows with. Seconds
    followed them where nothing else ran, and did not on a machine that was busy otherwise."""
    original, pairs = attention_runs._blocks, {1: [], 16: []}
    length, (q, k, v) = 8192, (torch.randn(1, 8192, n, 16, requires_grad=True) for n in (2, 1, 1))
    for documents, counted in pairs.items():

        def counting(*arguments, counted=counted):
            for block in original(*arguments):
                counted.append(block.mask.numel())
                yield block

        monkeypatch.setattr(attention_runs, "_blocks", counting)
        ids = torch.arange(length).div(length // documents, rounding_mode="floor").unsqueeze(0)
        attend(q, k, v, attention_layout(ids, (1, length), None)).sum().backward()
    assert length**2 <= sum(pairs[1]) <= 1.05 * length**2  # twice half of all
    assert sum(pairs[16]) <= sum(pairs[1]) / 10


def test_short_runs_are_computed_together_with_little_padding():
    """The samples of a rollout: 32 prompts of 15 tokens, and 8 completions of each, which see theirs."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randint(5, 11, (32, 8), generator=generator)
    queries = torch.cat([torch.full((32, 1), 15), own], 1).flatten()
    keys = torch.cat([torch.full((32, 1), 15), own + 15], 1).flatten()
    ends = [F.pad(sizes.cumsum(0), (1, 0)).int() for sizes in (queries, keys)]
    blocks = list(attention_runs._blocks(*ends, None, True, 4, 2))
    assert len(blocks) <= 6
    # With the heads of GLM-4.5 a block has fewer runs, so that its scores need no more memory.
    of_many = list(attention_runs._blocks(*ends, None, True, 96, 8))
    assert max(block.mask.numel() for block in of_many) * 96 <= 2**18
    assert sum(block.mask.numel() for block in blocks) <= 1.25 * int((queries * keys).sum())
    for index, total in ((0, 4 * int(queries.sum())), (1, 2 * int(keys.sum()))):
        rows = torch.cat([block[index].indices for block in blocks])
        assert torch.equal(rows[rows < total].sort().values, torch.arange(total))
