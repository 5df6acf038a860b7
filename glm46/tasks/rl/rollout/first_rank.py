"""Runs work on rank 0, such as talking to servers, and gives its result to all ranks."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.files.threads import in_thread
from glm46.tasks.rl.rollout.served_policy import EngineError

_SIGN_OF_LIFE_SECONDS = 5.0
_WORKING, _REQUESTED, _DONE, _ENGINE_ERROR, _USER_ERROR, _FAILED = range(6)
_ERRORS = {_ENGINE_ERROR: EngineError, _USER_ERROR: UserError}  # EngineError first: it is a UserError too


class CollectiveRequest:
    """Collective work that `run_on_first_rank` performs in the middle of rank 0's work, on request."""

    def __init__(self, work: Callable[[], None]):
        self.work = work
        self.events: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        """Requests of the collective work from rank 0's own work, and the end of that work."""

    def ask(self) -> Future[None]:
        """Have all ranks perform the work. The future has a RuntimeError if it failed; the error itself is raised by
        `run_on_first_rank`."""
        request: Future[None] = Future()
        request.set_running_or_notify_cancel()  # from now on nobody can cancel it
        self.events.put(request)
        return request


def run_on_first_rank(work: Callable[[], bytes | None], request: CollectiveRequest | None = None) -> bytes:
    """Run `work` in a thread on rank 0 and return its result on all ranks; empty bytes for None. Collective.

    Work with servers may take longer than the timeout of the process group, so rank 0 broadcasts a sign of life every
    few seconds while it runs.

    Args:
        request: collective work that `work` may request with `ask`.

    Raises:
        UserError, EngineError: on all ranks, if `work` raised it; only rank 0 has the message.
        RuntimeError: on the other ranks, if `work` raised anything else.
        Exception: any error of `request.work`, on the ranks where it failed. A rank where it did not fail waits in its
            next broadcast until the end of rank 0 breaks the connection, or until the group's timeout.
    """
    request = request or CollectiveRequest(lambda: None)
    if dist.get_rank() != 0:
        return _result_of_first_rank(request)
    end = in_thread(work)
    end.add_done_callback(request.events.put)
    while True:
        try:
            event = request.events.get(timeout=_SIGN_OF_LIFE_SECONDS)
        except queue.Empty:
            _send(_WORKING, b"")
            continue
        if event is end:
            break
        _perform(request.work, event)
    try:
        result = end.result() or b""
    except BaseException as error:
        _send(next((state for state, kind in _ERRORS.items() if isinstance(error, kind)), _FAILED), b"")
        raise
    _send(_DONE, result)
    return result


def _perform(work: Callable[[], None], request: Future[None]) -> None:
    """Perform collective work that was requested on rank 0."""
    try:
        _send(_REQUESTED, b"")
        work()
    except BaseException:
        request.set_exception(RuntimeError("the ranks failed in collective work for the inference servers"))
        raise
    request.set_result(None)


def _send(state: int, content: bytes) -> None:
    # Tensors on the CPU: the broadcast uses gloo.
    dist.broadcast(torch.tensor([state, len(content)]), 0)
    if content:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)


def _result_of_first_rank(request: CollectiveRequest) -> bytes:
    header = torch.tensor([_WORKING, 0])
    while header[0] in (_WORKING, _REQUESTED):
        dist.broadcast(header, 0)
        if header[0] == _REQUESTED:
            request.work()
    state, length = header.tolist()
    if state in _ERRORS:
        raise _ERRORS[state]()
    if state == _FAILED:
        raise RuntimeError("rank 0 failed in its work with the inference servers; its output says why")
    content = torch.empty(length, dtype=torch.uint8)
    if length:
        dist.broadcast(content, 0)
    return content.numpy().tobytes()
