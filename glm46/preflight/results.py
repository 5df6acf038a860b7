"""Results of checks, and how checks run: each one has a deadline, and whatever it meets becomes a result."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.planner.machine import Machine
from glm46.planner.plan import Plan

PASS, SKIP, WARN, FAIL = "PASS", "SKIP", "WARN", "FAIL"
VERDICTS = (PASS, SKIP, WARN, FAIL)
"""From the best to the worst; SKIP says why in its value."""


class Result(NamedTuple):
    """What one check found on one host, or on the group of all ranks."""

    check: str
    verdict: str
    """One of `VERDICTS`."""
    value: str
    """What was measured or found."""
    limit: str = ""
    remedy: str = ""


def limited(check: str, is_good: bool, value: str, limit: str, remedy: str, *, otherwise: str = FAIL) -> Result:
    """PASS, or ``otherwise`` with its remedy."""
    return Result(check, PASS, value, limit) if is_good else Result(check, otherwise, value, limit, remedy)


@dataclass(frozen=True)
class Subject:
    """What is checked: this host as one node of a run. Without a plan, a host that nothing is planned for yet."""

    machine: Machine
    processes: int
    """Ranks of this host."""
    plan: Plan | None = None
    node: int = 0
    nodes: int = 1
    address: str = "localhost"
    """Name or address of the first node."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """That the run listens on, on its first node, by the variable or key that sets them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that change what libraries do."""
    is_full: bool = False
    prometheus: str | None = None
    """URL of a Prometheus that watches the run."""
    root: Path = Path("/")
    """Folder of /proc, /sys and /dev; tests pass their own."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.machine.gpus)

    def read(self, path: str) -> str | None:
        """The text of a file of the system without white space at its ends; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None


Check = Callable[[Subject], Iterable[Result]]


@dataclass
class HostReport:
    """All that is known about one host."""

    host: str
    results: list[Result] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """What must be equal on all hosts."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "HostReport":
        """The inverse of `as_dict`."""
        return cls(content["host"], [Result(**result) for result in content["results"]], dict(content["facts"]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"host": self.host, "results": [result._asdict() for result in self.results], "facts": self.facts}


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The value of ``work``, which runs in a thread that is left behind if it does not end: storage that hangs cannot
    be interrupted.

    Raises:
        TimeoutError: it did not end in time. OSError, UserError and ValueError of ``work`` are raised here.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except (OSError, UserError, ValueError) as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome and not thread.is_alive():
        raise RuntimeError("the thread of the check ended; its error is above")
    if "value" not in outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome["value"]


def run_checks(subject: Subject, checks: Mapping[str, Check], seconds: float) -> list[Result]:
    """The results of all checks, each with this deadline. A check that raises or does not end is a FAIL."""
    results = []
    for name, check in checks.items():
        try:
            results += within(seconds, lambda check=check: list(check(subject)))
        except UserError as error:
            results += [Result(name, FAIL, fault, "", "see the message") for fault in error.faults]
        except (OSError, ValueError) as error:
            remedy = "look at this part of the host by hand; a process that waits for a disk shows as D in ps"
            results.append(Result(name, FAIL, f"{type(error).__name__}: {error}", f"{seconds:.0f} s", remedy))
    return results


class Ended(NamedTuple):
    """End of a program."""

    code: int
    output: str
    """Standard output and error."""


def run_program(command: Sequence[str], seconds: float) -> Ended | None:
    """Run a program; None if it is not installed.

    Raises:
        TimeoutError: it did not end in time, and was killed.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} did not answer within {seconds:.0f} s") from error
    return Ended(done.returncode, done.stdout.decode(errors="replace"))


WAITS = ", waits for the others"
"""End of the stage of a rank that has done its own part."""

Rows = dict[int, list[Result]]
"""Results by the number of the host, -1 for the group."""


def write_rows(rows: Mapping[int, list[Result]], path: Path) -> None:
    """Write the results of `Examination.run` for the process that started the ranks."""
    content = {str(host): [result._asdict() for result in results] for host, results in rows.items()}
    path.write_text(json.dumps(content))


def read_rows(path: Path) -> Rows:
    """The inverse of `write_rows`; empty if rank 0 did not come to its end."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return {int(host): [Result(**result) for result in results] for host, results in content.items()}
