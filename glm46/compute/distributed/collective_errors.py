"""Raise the UserError of one rank on all ranks; otherwise the other ranks would wait for the failed one forever."""

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from glm46.compute.distributed.agreement import combine_on_host
from glm46.config.errors import UnreadableError, UserError

_Result = TypeVar("_Result")
_END_OF_TRACEBACK = re.compile(
    "|".join(f"{kind.__module__}.{kind.__qualname__}: " for kind in (UserError, UnreadableError))
)
"""What Python prints between a traceback and the message of its error."""


def run_on_all_ranks(work: Callable[[], _Result]) -> _Result:
    """Return this rank's result of `work`, which every rank calls. Collective.

    Raises:
        UserError: `work` raised one on some rank; on all ranks, see `raise_on_all_ranks`.
    """
    result: _Result
    result, error = catch_user_error(work)
    if combine_on_host(torch.tensor([error is not None], dtype=torch.int64)).item():
        raise_on_all_ranks(error)
    return result


def read_on_first_rank(read: Callable[[], _Result]) -> _Result:
    """Call `read` on rank 0 only and return its result on all ranks. Collective.

    Raises:
        UserError: on all ranks, if `read` raised one.
    """
    box: list[Any] = [run_on_all_ranks(lambda: read() if dist.get_rank() == 0 else None)]
    if dist.get_world_size() > 1:  # one rank: a broadcast would only copy the result, by pickle
        dist.broadcast_object_list(box)
    result: _Result = box[0]
    return result


def on_first_rank(*faults: str) -> tuple[str, ...]:
    """Return the faults on rank 0, which prints them for all ranks; no faults on the others."""
    return faults if dist.get_rank() == 0 else ()


def catch_user_error(work: Callable[[], Any]) -> tuple[Any, UserError | None]:
    """Return the result of `work`, or the UserError that it raised. Other exceptions propagate. Not collective."""
    try:
        return work(), None
    except UserError as error:
        return None, error


def raise_on_all_ranks(error: UserError | None) -> NoReturn:
    """Raise UserError on every rank, because some rank has one. Collective; ranks without an error pass None.

    Raises:
        UserError: always; on rank 0 with the faults of all ranks, on the others without faults. UnreadableError if all
            errors are.
    """
    gathered: list[tuple[tuple[str, ...], bool] | None] = [None] * dist.get_world_size()
    local = None
    if error is not None:
        # A worker process of the loader puts a traceback before the fault.
        messages = tuple(_END_OF_TRACEBACK.split(text)[-1].strip() for text in error.faults)
        local = (messages, isinstance(error, UnreadableError))
    dist.all_gather_object(gathered, local)
    errors = [error_of_rank for error_of_rank in gathered if error_of_rank is not None]
    faults = dict.fromkeys(fault for faults, _ in errors for fault in faults)  # each once, in order
    kind = UnreadableError if all(is_unreadable for _, is_unreadable in errors) else UserError
    raise kind(*on_first_rank(*faults))
