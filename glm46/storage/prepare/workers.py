"""Function calls in worker processes, which end with their parent, after an error, and on a signal to the parent."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from glm46.config.errors import UserError

_BLOCKED_IN_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a job system sends to all processes. Workers block them; the parent ends its workers."""


def call_in_workers(
    workers: int,
    start: Callable[..., None],
    arguments: tuple[Any, ...],
    function: Callable[..., Any],
    items: Sequence[tuple[Any, ...]],
) -> Generator[tuple[int, Any], None, None]:
    """Call ``function(*item)`` for each item in worker processes that first call ``start(*arguments)``.

    A pool of the standard library is not used: its processes and threads outlive a parent that exits abruptly.

    Yields:
        The index of an item and the result of its call, in the order of completion.

    Raises:
        UserError: a worker was killed. Exceptions of ``start`` and ``function`` are raised here too. The remaining
            workers are killed in each case.
    """
    processes: dict[Any, BaseProcess] = {}
    waiting = iter(enumerate(items))
    try:
        for _, task in zip(range(workers), waiting, strict=False):
            connection, process = start_worker(start, arguments, function)
            processes[connection] = process
            connection.send(task)
        busy = set(processes)
        while busy:
            for connection in cast(list[Connection], wait(busy)):
                yield _result(connection, processes[connection])
                if (following := next(waiting, None)) is None:
                    busy.remove(connection)
                else:
                    connection.send(following)
    finally:
        for process in processes.values():
            end_worker(process)


def start_worker(
    start: Callable[..., Any], arguments: tuple[Any, ...], function: Callable[..., Any]
) -> tuple[Connection, BaseProcess]:
    """Start a process that calls ``start(*arguments)``, then ``function(*item)`` for each ``(number, item)`` that it
    receives.

    Returns:
        The connection, which receives ``(number, result, None)`` for each call, or after an exception
        ``(None, exception, traceback)`` as the last message; and the process.
    """
    # Spawned: a fork of a process with threads (torch, a progress bar) may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, start, arguments, function), daemon=True)
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_WORKERS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, process


def end_worker(process: BaseProcess) -> None:
    """Kill a worker and all programs in its session that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # the worker has no session yet, or its whole session has ended
        os.killpg(cast(int, process.pid), signal.SIGKILL)
    process.kill()
    process.join()


def _result(connection: Connection, process: BaseProcess) -> tuple[int, Any]:
    try:
        number, result, fault = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = cast(int, process.exitcode)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise UserError(
            f"a worker process was ended by {how}, which happens when memory runs out; set fewer processes and give "
            "the same command again: it continues after the finished parts"
        ) from None
    if fault:
        raise result from RuntimeError(f"in a worker process:\n{fault}")
    return number, result


def _work(
    connection: Connection, start: Callable[..., Any], arguments: tuple[Any, ...], function: Callable[..., Any]
) -> None:
    _begin_session()
    worker_id = os.getpid()

    def send_fault(_kind: type | None, error: BaseException | None, _trace: object) -> bool:
        if error is not None:
            connection.send((None, error, "".join(traceback.format_exception(error))))
        return True

    with ExitStack() as stack:
        stack.push(send_fault)
        start(*arguments)
        for number, item in _tasks(connection):
            result = function(*item)
            if os.getpid() != worker_id:
                os._exit(0)  # a fork of this process that the function has made
            connection.send((number, result, None))


def _tasks(connection: Connection) -> Iterator[tuple[int, tuple[Any, ...]]]:
    with suppress(EOFError):  # the parent exited
        while True:
            yield connection.recv()


def _begin_session() -> None:
    """Start a session for this worker, and a process that kills the session when the parent exits. A thread could not:
    a function that holds the interpreter lock would block it, and programs that the worker has started would
    continue."""
    os.setsid()
    parent = cast(BaseProcess, multiprocessing.parent_process()).sentinel
    if os.fork():
        return
    os.closerange(0, parent)  # the parent detects the end of the worker by its closed connection
    os.closerange(parent + 1, os.sysconf("SC_OPEN_MAX"))
    wait([parent])
    os.killpg(0, signal.SIGKILL)
