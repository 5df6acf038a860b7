"""Work of rank 0 alone, such as talking to servers, whose result all ranks get."""

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.server_state import EngineError

_SIGN_OF_LIFE_SECONDS = 5.0
_WORKING, _ASKED, _DONE, _ENGINE_ERROR, _USER_ERROR, _FAILED = range(6)
_ERRORS = {_ENGINE_ERROR: EngineError, _USER_ERROR: UserError}  # the first one is of both kinds


class CollectiveRequest:
    """Collective work that `run_on_first_rank` does in the middle of rank 0's work, when this asks for it."""

    def __init__(self, work: Callable[[], None]):
        self.work = work
        self.events: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        """Of the thread of rank 0: its result or error, or None when it asks."""
        self.done, self.has_failed = threading.Event(), False

    def ask(self) -> None:
        """Have all ranks do it; in the thread of rank 0.

        Raises:
            RuntimeError: it failed; the error is raised where the ranks are.
        """
        self.done.clear()
        self.events.put(None)
        self.done.wait()
        if self.has_failed:
            raise RuntimeError("the ranks failed in collective work for the inference servers")


def run_on_first_rank(work: Callable[[], bytes | None], request: CollectiveRequest | None = None) -> bytes:
    """The result of `work`, which rank 0 runs in a thread, on all ranks; no bytes for None. Collective.

    Work with servers may take longer than the timeout of the process group. So while it runs, rank 0 says every few
    seconds that it is alive: the other ranks' wait has the group's timeout, and lasts as long as the work.

    Args:
        request: whose `ask` the work may call.

    Raises:
        UserError, EngineError: on all ranks, if `work` raised it; the message is on rank 0.
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
