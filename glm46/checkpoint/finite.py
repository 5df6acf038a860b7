"""Checks for NaN and infinity in tensors to be saved: training cannot continue from them."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from glm46.distributed.local_tensor import local_tensor
from glm46.distributed.ranks import CheckpointError, Ranks

_NAMES_SHOWN = 3


class NotFiniteError(CheckpointError):
    """Tensors to be saved hold NaN or infinity; nothing was published."""


def refuse_not_finite(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise if tensors hold NaN or infinity. Collective.

    Args:
        tensors: this rank's parts.

    Raises:
        NotFiniteError: on all ranks, when the tensors of any rank hold NaN or infinity.
    """
    with ranks.stage("looking for values that are not finite") as stage:
        stage.value = names_not_finite(tensors)
    if names := sorted({name for found in stage.values for name in found}):
        raise NotFiniteError(describe(names))


@torch.no_grad()
def names_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose local part holds NaN or infinity; one pass over the memory."""
    bounds = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.is_floating_point() and local.numel():
            local = local.float() if local.dtype.itemsize == 1 else local
            bounds[name] = torch.stack(torch.aminmax(local)).double().cpu()  # NaN if any value is
    return [name for name, extremes in bounds.items() if not extremes.isfinite().all()]


def describe(names: Collection[str]) -> str:
    """One line with the names, shortened if there are many."""
    more = f" and {len(names) - _NAMES_SHOWN} more tensors" if len(names) > _NAMES_SHOWN else ""
    hold = "holds" if len(names) == 1 else "hold"
    return f"{', '.join(list(names)[:_NAMES_SHOWN])}{more} {hold} values that are not finite"
