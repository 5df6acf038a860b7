"""Ranks of a small run by fork: the imports are paid once, so that hundreds of starts and ends take minutes."""

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import Process, join, leave
from glm46.storage.checkpoint import dcp, integrity
from tests.processes import PROGRAM_SECONDS

# A fork has none of the threads of torch's pool, and the first call that wants them makes a new pool. That is not safe
# from several threads: autograd starts one per device of a device guard, eight with FakeTensorMode, and now and then
# one of them aborts with "Invalid thread pool!". In the child's only thread it is safe.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))

_STORES: list[dist.Store] = []
_INHERITED: list[dist.Store] = []
PORT_DIGITS = 5


def die_in_sync(number: int) -> None:
    """Let this process end by kill -9 in its n-th sync of a file, nearly all of which are in a save; 0: in none."""
    calls = 0

    def sync(descriptor: int, original=os.fsync) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    dcp.fsync = integrity.os.fsync = sync


def end_with(work: Callable[[], int]) -> None:
    """End this forked process with the exit code that ``work`` gives, as an interpreter does."""
    code = 1
    try:
        code = work()
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # it must end here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call_program(program: str, count: str, arguments: str) -> int:
    """Call ``file.function`` of this folder, in this process or on so many ranks; its exit code."""
    module, name = program.split(".")
    del sys.argv[1:]  # as of a program that is started without arguments
    function = getattr(importlib.import_module(f"tests.ranks.{module}"), name)
    if count == "0":
        return function(*json.loads(arguments)) or 0
    run_ranks(int(count), lambda: function(*json.loads(arguments)))
    return 0


def start_ranks(count: int, log: Path, work: Callable[[int], int]) -> list[int]:
    """Fork ranks that see the variables of torchrun and end with what ``work(rank)`` returns; their process ids."""
    # All are forked before the store has a thread: what locks it holds in that moment would stay locked in a rank.
    children, (reader, writer) = [], os.pipe()

    def run(rank: int) -> int:
        descriptor = os.open(log.with_name(f"{log.name}{rank}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.close(writer)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=os.read(reader, PORT_DIGITS).decode())
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        return work(rank)

    for rank in range(count):
        child = os.fork()
        if child == 0:
            end_with(partial(run, rank))
        children.append(child)
    # As torchrun does, the parent holds the store, so that it outlives each rank.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    _STORES.append(store)
    del _STORES[:-2]
    os.write(writer, count * f"{store.port:0{PORT_DIGITS}}".encode())
    os.close(reader)
    os.close(writer)
    return children


def run_ranks(count: int, work: Callable[[], None]) -> None:
    """Run ``work()`` on so many ranks and print what rank 0 prints; this process ends where one of them fails."""
    codes, texts = _run(count, work)
    if any(codes):
        sys.exit(f"exit codes {codes}\n" + "\n".join(texts))
    print(texts[0], end="", flush=True)


def run_cases(count: int, names: list[str], work: Callable[[list[str]], None], at_once: int) -> None:
    """Run ``work(some)`` on new ranks, ``at_once`` of the named cases at a time; print what rank 0 prints.

    Rank 0 prints one JSON object per case, with its "name". A case whose ranks fail does not end the others: its row
    has the output of its ranks under "failed", and new ranks continue with the cases after it.
    """
    if count <= 2:  # both halves have work
        at_once = min(at_once, (len(names) + 1) // 2)
    chunks = [names[i : i + at_once] for i in range(0, len(names), at_once)]
    if count <= 2:
        in_halves(chunks, lambda chunk: _run_some(count, chunk, work))
    else:
        for chunk in chunks:
            _run_some(count, chunk, work)


def in_halves(items: Iterable, work: Callable[[Any], None]) -> None:
    """Call ``work(item)`` for every other item and beside them for the rest, in a process each; this one ends where one
    of them fails.

    Two ranks that wait for each other leave a quarter of two cores idle, one rank leaves half: other ranks run beside
    them. Each process forks its ranks before it has a store.
    """
    items, children = list(items), []
    for half in filter(None, [items[::2], items[1::2]]):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with its program
            _INHERITED[:] = _STORES  # their threads are not in this process: destroying one would wait without end
            _STORES.clear()
            end_with(lambda half=half: [work(item) for item in half] and 0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"exit codes {codes}")


def _run_some(count: int, names: list[str], work: Callable[[list[str]], None]) -> None:
    """`run_cases` of cases that share ranks as long as none fails."""
    remaining = names
    while remaining:
        some = remaining
        codes, texts = _run(count, lambda some=some: work(some))
        rows = {json.loads(line)["name"]: line for line in texts[0].splitlines() if line.startswith("{")}
        failed = next((name for name in some if name not in rows), some[-1] if any(codes) else None)
        if failed is not None:
            # The ends of all ranks: a rank that lost its neighbour says less than the one that failed first.
            ends = "\n".join(text[-7500 // count :] for text in texts)
            rows[failed] = json.dumps({"name": failed, "failed": f"exit codes {codes}\n{ends}"})
        sys.stdout.flush()
        os.write(1, "".join(f"{row}\n" for row in rows.values()).encode())  # whole: the other half writes here, too
        remaining = [name for name in remaining if name not in rows]


def _run(count: int, work: Callable[[], None]) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        codes = await_ranks(start_ranks(count, log, lambda rank: work() or 0), patience=20)
        return codes, [log.with_name(f"log{rank}").read_text() for rank in range(count)]


def run_whole(count: int, log: Path, work: Callable[[int], int]) -> list[str]:
    """Outputs of ranks that all end well; this process ends where one fails. Arguments of `start_ranks`."""
    codes = await_ranks(start_ranks(count, log, work))
    said = [log.with_name(f"{log.name}{rank}").read_text() for rank in range(count)]
    if any(codes):
        sys.exit("".join(said))
    return said


def await_ranks(children: list[int], patience: float = math.inf) -> list[int]:
    """Exit codes of all ranks, -9 for those that hung, or had to be killed some time after one failed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + PROGRAM_SECONDS
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            end = min(end, time.monotonic() + patience)
            patience = math.inf
        if time.monotonic() > end:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
            end += 60
        time.sleep(0.002)
    return [codes[child] for child in children]


def print_figures(cases: dict[int, list[Any]], measure: Callable[[Process, Any], dict]) -> None:
    """On each rank: measure the cases of this number of ranks; rank 0 prints a row of each."""
    torch.set_num_threads(1)
    process = join(300)
    for case in cases[process.world_size]:
        figures = measure(process, case)
        if process.is_main:
            print(json.dumps(figures), flush=True)
    leave()
