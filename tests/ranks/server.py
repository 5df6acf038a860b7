"""Programs of these tests by fork, as the fixture `server`: functions of the files beside this one."""

import json
import os
import select
import signal
import time
from pathlib import Path
from socket import socket

from tests.fork_server import ROOT, ForkServer, read_line
from tests.processes import PROGRAM_SECONDS

_CALL = "import sys; from tests.ranks.forked_ranks import call_program; sys.exit(call_program(*sys.argv[1:]))"


def differences(row: dict, bounds: dict[str, float]) -> list[str]:
    """Each error of a row that is not below its bound, with its place: a parameter, or the values of a step."""
    return [
        f"{key} {row[key][0]:.1e} is not below {bound:.0e}: {row[key][1]}"
        for key, bound in bounds.items()
        if not row[key][0] < bound
    ]


class Forked:
    """A started program, in a session of its own; of what `subprocess.Popen` has, what the tests use."""

    def __init__(self, process: int, connection: socket, output: Path):
        self.pid, self.output, self.returncode = process, output, None
        self._connection = connection

    def poll(self, seconds: float = 0.0) -> int | None:
        """Its exit code, for which this waits so long."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(read_line(self._connection))
        return self.returncode

    def wait(self) -> int:
        """Its exit code; if it hangs, it is killed, with all its ranks, and the test fails."""
        if self.poll(PROGRAM_SECONDS) is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"not through after {PROGRAM_SECONDS} s\n{self.output.read_text()[-4000:]}")
        return self.returncode

    def text(self) -> str:
        """What it says; it must end with 0."""
        code = self.wait()
        assert code == 0, f"exit code {code}\n{self.output.read_text()[-4000:]}"
        return self.output.read_text()


class CaseRows:
    """The rows that a started program prints, one per named case, available while it runs. See `run_cases`."""

    def __init__(self, started: Forked, names: list[str]):
        self._started, self._names, self._rows = started, names, {}
        self._end = time.monotonic() + PROGRAM_SECONDS

    def row(self, name: str) -> dict:
        """The row of a case; waits until it is printed, and fails the test if the ranks of this case failed."""
        while name not in self._rows:
            code = self._started.poll(0.05)  # before the output is read: it is complete if the program has ended
            lines = self._started.output.read_text().rpartition("\n")[0].splitlines()
            self._rows = {row["name"]: row for row in map(json.loads, (x for x in lines if x.startswith("{")))}
            if name in self._rows:
                break
            if code is not None or time.monotonic() > self._end:
                self._kill()
                state = "is too slow" if code is None else f"ended with exit code {code}"
                raise AssertionError(f"{name}: no result, the program {state}\n" + "\n".join(lines)[-4000:])
        if "failed" in self._rows[name]:
            raise AssertionError(f"{name}: its ranks failed\n{self._rows[name]['failed'][-8000:]}")
        return self._rows[name]

    def close(self) -> None:
        """Wait until the program has removed its files; end it if the tests stopped before its last case."""
        if self._rows.keys() >= set(self._names):
            self._started.wait()
        self._kill()

    def _kill(self) -> None:
        if self._started.poll() is None:
            os.killpg(self._started.pid, signal.SIGKILL)


class Server:
    """The server of forks with what these programs need."""

    def __init__(self, folder: Path):
        self._folder, self._started = folder, 0
        compiles = "torch._dynamo.backends.debugging", "torch._inductor.compile_fx"  # 2 s in each rank
        self._server = ForkServer(
            folder,
            *compiles,
            "glm46.storage.prepare.pipeline",
            "glm46.operate.launch.train_rank",
            "glm46.tasks.pretrain.task",
            "tests.small_run",
        )
        self.close = self._server.close

    def start(
        self, program: str, *arguments: str | int, ranks: int = 0, environment: dict[str, str] | None = None
    ) -> Forked:
        """Call ``program``, a function of a file beside this one as ``file.function``.

        Args:
            ranks: on so many of which it is called; 0: in the process that is started.
            environment: further variables.
        """
        self._started += 1
        output, words = (
            self._folder / f"{self._started}-{program}",
            ["-c", _CALL, program, str(ranks), json.dumps(arguments)],
        )
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        with output.open("wb") as file:
            return Forked(*self._server.start(words, file, variables), output)

    def text(self, program: str, *arguments: str | int, **options) -> str:
        """What a program says that must end with 0."""
        return self.start(program, *arguments, **options).text()

    def rows(self, program: str, *arguments: str | int, **options) -> list[dict]:
        """The JSON objects that it prints, one per line."""
        text = self.text(program, *arguments, **options)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
