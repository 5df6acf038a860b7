"""One harness for tests of several ranks: `run_ranks(function, world_size, *args)` returns what each rank returns.

A test of ranks is one file, with the function above the test::

    def sum_of_ranks(number: int) -> int:
        process = join(300)
        total = torch.tensor(number + process.rank)
        dist.all_reduce(total)
        leave()
        return total.item()

    def test_all_ranks_have_the_sum():
        assert run_ranks(sum_of_ranks, 2, 5) == [11, 11]

Functions never run in the process of pytest. They run in forks of one server (`tests/fork_server.py`) that has torch
and glm46 imported, so each call begins as a fresh process does: no process group, no compiled code, one thread, no
changed default, and the variables that the test had when it called. Arguments and results travel as pickles, in files
of the session between processes that the harness has started itself.

    pytest                         server                    program                ranks
    run_ranks, call, start ------> forks a program --------> forks ranks ---------> function(*args) on each
    result, or error of the rank that failed first  <------- waits <--------------- results and outputs in files

From a test:

* `run_ranks`: a function on ranks; a list of what they return.
* `call`: a function in one program, for example one that starts ranks, kills them and starts others.
* `start`: the same without waiting; a `Program`.
* `case_row`, a fixture: the row of one case, where cases share the ranks of a program; see `Cases`.

Inside of a program:

* `Ranks`: forks of the program that are ranks; their exit codes, outputs and results.
* `in_halves`: work on every other item in one process, and on the rest in another one.
* `this_rank`: the number of a rank, before it joins a process group.

An error has the traceback of the rank that failed first, then the end of what the other ranks wrote. Ranks that hang
write the stacks of their threads at the deadline, and are killed.
"""

import ctypes
import faulthandler
import math
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from glm46.compute.distributed.process import Process, join, leave
from glm46.storage.checkpoint import dcp, integrity
from tests.fork_server import ROOT, ForkServer, read_line
from tests.processes import PROGRAM_SECONDS

# A fork has none of the threads of torch's pool, and the first call that wants them makes a new pool. That is not safe
# from several threads: autograd starts one per device of a device guard, eight with FakeTensorMode, and now and then
# one of them aborts with "Invalid thread pool!". In the child's only thread it is safe.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))

STACKS_SIGNAL = signal.SIGRTMIN
"""A process that gets it writes the stacks of its threads to its output. Neither the package nor torch uses it."""
_FAILURE_PATIENCE = 20.0
"""Seconds that the other ranks have to end after one has failed."""
_FIRST_ERROR, _OTHER_OUTPUT = 8000, 2000
"""Characters of an error message: of the rank that failed first, and of each other rank."""
_PORT_DIGITS = 5
_RUN_PROGRAM = "import sys; from tests.harness import run_program; sys.exit(run_program(sys.argv.pop()))"


# In the process of pytest.


class _Session:
    """The server of this process, which starts with the first program."""

    folder: Path | None = None
    server: ForkServer | None = None
    programs = 0


@contextmanager
def session(folder: Path) -> Iterator[None]:
    """Let `start` work inside of this context; files of programs are in ``folder``."""
    _Session.folder = folder
    yield
    if _Session.server is not None:
        _Session.server.close()
    _Session.server = _Session.folder = None


def _server() -> ForkServer:
    if _Session.server is None:
        assert _Session.folder is not None, "tests/ranks/conftest.py opens the session"
        compiles = "torch._dynamo.backends.debugging", "torch._inductor.compile_fx"  # 2 s in each rank
        _Session.server = ForkServer(
            _Session.folder,
            *compiles,
            "glm46.storage.prepare.pipeline",
            "glm46.operate.launch.train_rank",
            "glm46.tasks.pretrain.task",
            "tests.builders",
        )
    return _Session.server


class _Task(NamedTuple):
    """What a program has to do."""

    function: Callable[..., Any]
    args: tuple
    ranks: int
    deadline: float


class Program:
    """A started program, in a process session of its own. It has the part of `subprocess.Popen` that tests use."""

    def __init__(self, process: int, connection: socket, folder: Path, deadline: float):
        self.pid = process
        self.folder = folder
        self.output = folder / "output"
        self.returncode: int | None = None
        self._connection = connection
        self._deadline = deadline

    def poll(self, seconds: float = 0.0) -> int | None:
        """Its exit code, after waiting for at most ``seconds``."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(read_line(self._connection))
        return self.returncode

    def wait(self) -> int:
        """Its exit code. A program that hangs is killed with its ranks, and the test fails with its stacks."""
        # The program's own deadline comes first, because it shows the stacks of ranks.
        if self.poll(self._deadline + 60) is None:
            os.killpg(self.pid, STACKS_SIGNAL)
            time.sleep(1)
            self.kill()
            raise AssertionError(f"not through after {self._deadline + 60} s\n{self._end_of_output()}")
        assert self.returncode is not None
        return self.returncode

    def text(self) -> str:
        """What it wrote, or rank 0 if it has ranks; it must end with 0."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self._end_of_output()}"
        return self.output.read_text()

    def result(self) -> Any:
        """What its function returned, or a list of the results of its ranks; it must end with 0."""
        self.text()
        return _read(self.folder / "result")

    def kill(self) -> None:
        """End it, if it runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _end_of_output(self) -> str:
        return self.output.read_text(errors="replace")[-2 * _FIRST_ERROR :]


def start(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 0,
    environment: dict[str, str] | None = None,
    deadline: float = PROGRAM_SECONDS,
) -> Program:
    """Start a program that calls ``function(*args)``.

    Args:
        function: at the top level of a module; a lambda or a local function cannot be sent.
        ranks: number of ranks on which it is called; 0: in the program itself.
        environment: variables besides those of this process.
        deadline: seconds after which a hang is assumed.
    """
    server = _server()
    _Session.programs += 1
    name = getattr(function, "__name__", "partial")
    folder = _Session.folder / f"{_Session.programs}-{name}"
    folder.mkdir()
    _write(folder / "task", _Task(function, args, ranks, deadline))
    words = ["-c", _RUN_PROGRAM, str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    with (folder / "output").open("wb") as file:
        process, connection = server.start(words, file, variables)
    return Program(process, connection, folder, deadline)


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What ``function(*args)`` returns in a program of its own. Options of `start`."""
    return start(function, *args, **options).result()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank. It joins the process group itself. Options of `start`."""
    return start(function, *args, ranks=world_size, **options).result()


class Cases:
    """Rows of named cases, which a program computes one after another: each is available as soon as its ranks ended.

    Cases share ranks, because to start some, join them and compile takes longer than many a case. New ranks continue
    after a case whose ranks failed; its own row is that error.

    Args:
        function: called on each rank as ``function(names, shared)``, a generator of one row per name. Rows of rank 0
            are kept.
        world_size: number of ranks.
        names: of the cases.
        prepare: called once, before ranks are forked, as ``prepare(names, world_size, folder)`` with an empty folder;
            what it returns is ``shared``.
        at_once: number of cases that share ranks.
    """

    def __init__(
        self,
        function: Callable[[list[str], Any], Iterator[Any]],
        world_size: int,
        names: list[str],
        prepare: Callable[[list[str], int, Path], Any] | None,
        at_once: int,
    ):
        self._program = start(_run_cases, function, world_size, names, prepare, at_once)
        self._names = names
        self._end = time.monotonic() + PROGRAM_SECONDS

    def row(self, name: str) -> Any:
        """The row of a case; waits for it, and fails the test if the ranks of this case failed."""
        file = self._program.folder / f"case-{self._names.index(name)}"
        while not file.exists():
            code = self._program.poll(0.05)
            if file.exists():
                break
            if code is not None or time.monotonic() > self._end:
                self._program.kill()
                state = "is too slow" if code is None else f"ended with exit code {code}"
                output = self._program.output.read_text()
                raise AssertionError(f"{name}: no result, the program {state}\n{output[-_FIRST_ERROR:]}")
        row = _read(file)
        if isinstance(row, _Failure):
            raise AssertionError(f"{name}: its ranks failed\n{row.message}")
        return row

    def close(self) -> None:
        """End the program, if tests stopped before its last case."""
        if all((self._program.folder / f"case-{number}").exists() for number in range(len(self._names))):
            self._program.wait()
        self._program.kill()


class _Failure(NamedTuple):
    message: str


def measure_cases(measure: Callable[[Process, Any], Any], cases: Sequence[Any]) -> list[Any]:
    """On each rank: join, return what ``measure(process, case)`` gives for each case, and leave."""
    process = join(300)
    rows = [measure(process, case) for case in cases]
    leave()
    return rows


def differences(row: dict, bounds: dict[str, float]) -> list[str]:
    """Each error of a row that is not below its bound, with its place: a parameter, or the values of a step."""
    return [
        f"{key} {row[key][0]:.1e} is not below {bound:.0e}: {row[key][1]}"
        for key, bound in bounds.items()
        if not row[key][0] < bound
    ]


# In a program and its ranks.


class _Program:
    """The program that this process is, or that it is a rank of."""

    folder: Path | None = None
    deadline = PROGRAM_SECONDS


def run_program(folder: str) -> int:
    """Be the program whose task is in this folder."""
    _Program.folder = Path(folder)
    faulthandler.enable()
    # Forks inherit it: each of them writes to its own output, which has the same number.
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    task = _read(_Program.folder / "task")
    _Program.deadline = task.deadline
    if task.ranks:
        ranks = Ranks(task.ranks, task.function, *task.args)
        result = ranks.results()
        print(ranks.text(0), end="", flush=True)
    else:
        result = task.function(*task.args)
    _write(_Program.folder / "result", result)
    return 0


def this_rank() -> int:
    """Number of this rank."""
    return int(os.environ["RANK"])


class Ranks:
    """Forks of this process that see the variables of torchrun and call ``function(*args)``.

    A rank ends with 0 once its function returns, with 1 where it raises, with its code for `sys.exit`. Whatever the
    function captures is inherited by the fork. Results are sent by pickle. ``pids`` are its processes, and ``hung`` the
    numbers of those that had to be killed.
    """

    _stores: list[dist.Store] = []
    _inherited: list[dist.Store] = []

    def __init__(self, count: int, function: Callable[..., Any], *args: Any):
        self.pids: list[int] = []
        self._folder = Path(tempfile.mkdtemp(dir=_Program.folder, prefix="ranks-"))
        self._codes: dict[int, int] = {}
        self.hung: set[int] = set()
        # All are forked before the store has a thread: what locks it holds at that time would stay locked in a rank.
        reader, writer = os.pipe()
        for rank in range(count):
            (self._folder / f"log{rank}").touch()  # a rank that is killed at its start makes none
            child = os.fork()
            if child == 0:
                os.close(writer)
                end_with(lambda rank=rank: self._run(rank, count, reader, function, args))
            self.pids.append(child)
        # As torchrun does, the parent holds the store, so that it outlives each rank.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        del self._stores[:-2]
        os.write(writer, count * f"{store.port:0{_PORT_DIGITS}}".encode())
        os.close(reader)
        os.close(writer)

    def _run(self, rank: int, count: int, port: int, function: Callable[..., Any], args: tuple) -> int:
        _end_with_parent()
        descriptor = os.open(self._folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=os.read(port, _PORT_DIGITS).decode())
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        _write(self._folder / f"result{rank}", function(*args))
        return 0

    def wait(self, patience: float = math.inf) -> list[int]:
        """Exit codes, -9 for those that hung, or that had to be killed ``patience`` seconds after one failed."""
        end = time.monotonic() + _Program.deadline
        while len(self._codes) < len(self.pids):
            if any(self.ended().values()):
                end = min(end, time.monotonic() + patience)
                patience = math.inf
            if time.monotonic() > end:
                self._kill()
                end = math.inf
            time.sleep(0.002)
        return [self._codes[rank] for rank in range(len(self.pids))]

    def ended(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        for rank in self._running():
            done, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if done:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        return dict(self._codes)

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self.pids)) if rank not in self._codes]

    def _kill(self) -> None:
        """Kill the ranks that run, after they have written their stacks."""
        for number, seconds in ((STACKS_SIGNAL, 0.5), (signal.SIGKILL, 0.0)):
            for rank in self._running():  # a zombie that was not waited for has its process id still
                os.kill(self.pids[rank], number)
                self.hung.add(rank)
            time.sleep(seconds)

    def text(self, *ranks: int) -> str:
        """What these ranks wrote, one after another; without a number, all ranks."""
        numbers = ranks or range(len(self.pids))
        return "".join((self._folder / f"log{rank}").read_text(errors="replace") for rank in numbers)

    def results(self) -> list[Any]:
        """What the function returned on each rank. If one fails, this process ends with the error of the first one."""
        if any(self.wait(_FAILURE_PATIENCE)):
            sys.exit(self.error())
        files = [self._folder / f"result{rank}" for rank in range(len(self.pids))]
        return [_read(file) if file.exists() else None for file in files]  # `sys.exit(0)` returns nothing

    def error(self) -> str:
        """Exit codes, and what ranks wrote: the one that failed first, then the others."""
        codes = self.wait()
        logs = [self._folder / f"log{rank}" for rank in range(len(codes))]
        # The last line of a rank that failed is its error: the earliest one is not from the loss of a neighbour.
        order = sorted(
            range(len(codes)),
            key=lambda rank: (codes[rank] == 0, rank in self.hung, logs[rank].stat().st_mtime_ns),
        )
        parts = [f"exit codes {codes}" + (f", no end of ranks {sorted(self.hung)}" if self.hung else "")]
        for rank in order:
            most = _FIRST_ERROR if rank == order[0] else _OTHER_OUTPUT
            parts.append(f"rank {rank}:\n{self.text(rank)[-most:]}")
        return "\n".join(parts)


def in_halves(items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """``[work(item) for item in items]``, every other item in one process and the rest in another one; this process
    ends where one of them fails.

    Two ranks that wait for each other leave a quarter of two cores idle, one rank leaves half of them: other ranks run
    at the same time. Each process forks its ranks before it has a store.
    """
    folder = Path(tempfile.mkdtemp(dir=_Program.folder, prefix="halves-"))
    children = []

    def run(half: int) -> int:
        _end_with_parent()
        Ranks._inherited[:] = Ranks._stores  # their threads are not in this process: destroying one would hang
        Ranks._stores.clear()
        _write(folder / str(half), [work(item) for item in items[half::2]])
        return 0

    halves = range(min(2, len(items)))
    for half in halves:
        child = os.fork()
        if child == 0:
            end_with(lambda half=half: run(half))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"exit codes {codes}")
    results: list[Any] = [None] * len(items)
    for half in halves:
        results[half::2] = _read(folder / str(half))
    return results


def _end_with_parent() -> None:
    """Let the kernel kill this fork when its program has ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _run_cases(
    function: Callable[[list[str], Any], Iterator[Any]],
    world_size: int,
    names: list[str],
    prepare: Callable[[list[str], int, Path], Any] | None,
    at_once: int,
) -> None:
    """The program of `Cases`."""
    folder = Path(tempfile.mkdtemp(dir=_Program.folder, prefix="shared-"))
    shared = None if prepare is None else prepare(names, world_size, folder)
    numbers = list(range(len(names)))
    if world_size <= 2:  # both halves have work
        at_once = min(at_once, (len(names) + 1) // 2)
    chunks = [numbers[i : i + at_once] for i in range(0, len(names), at_once)]

    def run(chunk: list[int]) -> None:
        _run_chunk(function, world_size, names, chunk, shared)

    if world_size <= 2:
        in_halves(chunks, run)
    else:
        for chunk in chunks:
            run(chunk)
    shutil.rmtree(folder)


def _run_chunk(function, world_size: int, names: list[str], chunk: list[int], shared: Any) -> None:
    """Cases that share ranks as long as none fails."""
    remaining = chunk
    while remaining:
        current = remaining
        rows = Path(tempfile.mkdtemp(dir=_Program.folder, prefix="rows-"))

        def on_rank(current=current, rows=rows) -> None:
            # The generator is the first argument, so that it runs to its end after the last row.
            for row, number in zip(function([names[number] for number in current], shared), current, strict=True):
                if this_rank() == 0:
                    _write(rows / f"{number}", row)

        ranks = Ranks(world_size, on_rank)
        has_failed = any(ranks.wait(_FAILURE_PATIENCE))
        remaining = [number for number in current if not (rows / f"{number}").exists()]
        failed = (remaining or current[-1:])[0] if has_failed else None
        if failed is not None:
            _write(rows / f"{failed}", _Failure(ranks.error()))
            remaining = [number for number in remaining if number != failed]
        for number in current:
            if (rows / f"{number}").exists():
                (rows / f"{number}").rename(_Program.folder / f"case-{number}")


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


def _write(file: Path, value: Any) -> None:
    """Write a pickle that is whole as soon as the file exists."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(value))
    part.rename(file)


def _read(file: Path) -> Any:
    """Read a pickle of `_write`: only processes of this harness write them."""
    return pickle.loads(file.read_bytes())
