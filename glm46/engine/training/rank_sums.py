"""Sums of nested values over the ranks, with few messages."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compat import flatten_tree, unflatten_tree
from glm46.compute.distributed.agreement import combine_on_host

Tree = TypeVar("Tree")
"""Tensors or numbers in dicts, lists and tuples, named ones too."""


def sum_over_all_ranks(tensors: Tree) -> Tree:
    """Sum tensors over all ranks, with one all-reduce for each dtype. Collective.

    Args:
        tensors: tensors on one device. The nesting, names, dtypes and shapes are equal on all ranks.

    Returns:
        The sums, nested in the same way; those of one dtype are views of one new tensor.
    """
    return _apply_to_flat(_all_reduced, tensors)


def sum_on_host(numbers: Tree) -> Tree:
    """Sum a few integers that thousands of ranks wait for. Collective.

    Args:
        numbers: integers and bools. The nesting and the names are equal on all ranks.

    Returns:
        Integers, nested in the same way.
    """
    local, structure = flatten_tree(numbers)
    sums: Tree = unflatten_tree(combine_on_host(torch.tensor(local, dtype=torch.int64)).tolist(), structure)
    return sums


def to_host(tensors: Tree) -> Tree:
    """Copy tensors to the CPU in one transfer for each dtype; waits for the device."""
    return _apply_to_flat(Tensor.cpu, tensors)


def _apply_to_flat(function: Callable[[Tensor], Tensor], tensors: Tree) -> Tree:
    """Call a function with one flat tensor for each dtype, and return the parts of its results."""
    leaves, structure = flatten_tree(tensors)
    results = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = function(torch.cat([leaves[place].reshape(-1) for place in places]))
        parts = flat.split([leaves[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            results[place] = part.view(leaves[place].shape)
    mapped: Tree = unflatten_tree(results, structure)
    return mapped


def _all_reduced(flat: Tensor) -> Tensor:
    if dist.get_world_size() > 1:  # a single rank would wait for gloo's thread
        dist.all_reduce(flat)
    return flat
