"""Newton-Schulz iterations: their values, and the memory that they take."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm46.compute.optim.newton_schulz import COEFFICIENTS, iterate_batched, iterate_into


class Allocations(TorchDispatchMode):
    """Number of storages that operators make."""

    def __init__(self):
        super().__init__()
        self.kept = []  # so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        found = function(*args, **kwargs)
        made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.kept += [x for x in made if x.untyped_storage().data_ptr() not in known]
        return found


def plain(x, steps):
    """One expression for each iteration, with a result of its own for each product."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_iterations_have_the_bits_of_the_plain_ones_and_reuse_their_buffers(steps, matrices, is_transposed):
    x = torch.randn(matrices, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16() / 20
    x = x.mT if is_transposed else x.mT.contiguous()
    expected = plain(x, steps)
    with Allocations() as made:
        found = iterate_batched(x.clone(), steps)
    assert torch.equal(found, expected)
    # The copy that is given; products, polynomial, the other matrix, and one in place of a transposed first one.
    assert len(made.kept) == 4 + is_transposed
    if matrices == 1:
        own, out = x.clone()[0], torch.empty(16, 24, dtype=x.dtype)
        with Allocations() as made:
            iterate_into(out, own, steps)
        torch.testing.assert_close(out, expected[0], rtol=0.05, atol=0.02)  # mm and bmm may round BF16 otherwise
        assert len(made.kept) == 2 + is_transposed
