"""Runs work on rank 0, such as talking to servers, and gives its result to all ranks."""

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.server_state import EngineError

_SIGN_OF_LIFE_SECONDS = 5.0
_WORKING, _ASKED, _DONE, _ENGINE_ERROR, _USER_ERROR, _FAILED = range(6)
_ERRORS = {_ENGINE_ERROR: EngineError, _USER_ERROR: UserError}  # EngineError first: it is a UserError too


class CollectiveRequest:
    """Collective work that `run_on_first_rank` performs in the middle of rank 0's work, on request."""

    def __init__(self, work: Callable[[], None]):
        self.work = work
        self.events: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        """Events from the work thread of rank 0: its result or error, or None to request the collective work."""
        self.done = threading.Event()
        self.has_failed = False

    def ask(self) -> None:
        """Have all ranks perform the work. Called from the work thread of rank 0.

        Raises:
            RuntimeError: the work failed; the error itself is raised by `run_on_first_rank`.
        """
        self.done.clear()
        self.events.put(None)
        self.done.wait()
        if self.has_failed:
            raise RuntimeError("the ranks failed in collective work for the inference servers")


def run_on_first_rank(work: Callable[[], bytes | None], request: CollectiveRequest | None = None) -> bytes:
    """Run `work` in a thread on rank 0 and return its result on all ranks; empty bytes for None. Collective.

    Work with servers may take longer than the timeout of the process group, so rank 0 broadcasts a sign of life every
    few seconds while it runs.

    Args:
        request: collective work that `work` may request with `ask`.

    Raises:
        UserError, EngineError: on all ranks, if `work` raised it; only rank 0 has the message.
        RuntimeError: on the other ranks, if `work` raised anything else.
    """
    request = request or CollectiveRequest(lambda: None)
    if dist.get_rank() != 0:
        return _result_of_first_rank(request)
    events = request.events

    def run() -> None:
        try:
            events.put(work() or b"")
        except BaseException as error:
            events.put(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            result = events.get(timeout=_SIGN_OF_LIFE_SECONDS)
        except queue.Empty:
            _send(_WORKING, b"")
            continue
        if result is not None:
            break
        try:
            _send(_ASKED, b"")
            request.work()
        except BaseException:
            request.has_failed = True
            raise
        finally:
            request.done.set()
    if isinstance(result, bytes):
        _send(_DONE, result)
        return result
    _send(next((state for state, kind in _ERRORS.items() if isinstance(result, kind)), _FAILED), b"")
    raise result


def _send(state: int, content: bytes) -> None:
    dist.broadcast(torch.tensor([state, len(content)]), 0)
    if content:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)


def _result_of_first_rank(request: CollectiveRequest) -> bytes:
    header = torch.tensor([_WORKING, 0])
    while header[0] in (_WORKING, _ASKED):
        dist.broadcast(header, 0)
        if header[0] == _ASKED:
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
