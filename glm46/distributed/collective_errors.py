"""A mistake or damage that one rank meets ends all ranks, with its cause: the others would wait for it without end."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from glm46.config.errors import UserError

_Result = TypeVar("_Result")
_MARK = f"{UserError.__module__}.{UserError.__qualname__}: "


def run_on_all_ranks(work: Callable[[], _Result]) -> _Result:
    """What `work` gives on this rank; collective.

    Raises:
        UserError: it raised one on some rank; on all ranks, as `raise_on_all_ranks` does.
    """
    result, error = catch_user_error(work)
    count = torch.tensor([error is not None], dtype=torch.int64)
    dist.all_reduce(count)
    if count.item():
        raise_on_all_ranks(error)
    return result


def on_first_rank(*faults: str) -> tuple[str, ...]:
    """Faults that all ranks have found alike, for the first rank, which speaks for all; nothing on others."""
    return faults if dist.get_rank() == 0 else ()


def catch_user_error(work: Callable[[], _Result]) -> tuple[_Result | None, UserError | None]:
    """What `work` gives, or the UserError that it raised. All else is a fault of the program, and goes its way."""
    try:
        return work(), None
    except UserError as error:
        return None, error


def raise_on_all_ranks(error: UserError | None) -> NoReturn:
    """End the run because some rank has met an error; collective, with None on ranks that have met none.

    Raises:
        UserError: always; with the faults of all ranks on the first, which speaks for all, and without any on others.
    """
    found: list[tuple[str, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error and tuple(map(_without_traceback, error.faults)))
    faults = dict.fromkeys(fault for faults in found for fault in faults or ())
    raise UserError(*on_first_rank(*faults))


def _without_traceback(fault: str) -> str:
    """A worker process of the loader hands its error on behind a traceback."""
    return fault.rpartition(_MARK)[2].strip()
