"""Results of checks, and how checks run: each one has a deadline, and any error becomes a result."""

import subprocess
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.operate.estimate.machine import Machine
from glm46.run.plan import Plan

_ERROR_LETTERS = 300
_HOST_REMEDY = "look at this part of the host by hand; a process that waits for a disk shows as D in ps"
_CHECK_REMEDY = "the check itself failed and says nothing about the host: report it with the output of --json"

PASS = "PASS"
SKIP = "SKIP"
WARN = "WARN"
FAIL = "FAIL"
VERDICTS = (PASS, SKIP, WARN, FAIL)
"""Verdicts from the best to the worst; the value of a SKIP is its reason."""


class Result(NamedTuple):
    """The result of one check on one host, or on the group of all ranks."""

    check: str
    verdict: str
    """One of `VERDICTS`."""
    value: str
    """Value that was measured or found."""
    limit: str = ""
    remedy: str = ""


def limited(check: str, is_good: bool, value: str, limit: str, remedy: str, *, otherwise: str = FAIL) -> Result:
    """Return a PASS, or ``otherwise`` with its remedy."""
    return Result(check, PASS, value, limit) if is_good else Result(check, otherwise, value, limit, remedy)


@dataclass(frozen=True)
class Subject:
    """The subject of the checks: this host as one node of a run, or without a plan as one node of a cluster."""

    machine: Machine
    processes: int
    """Ranks of this host."""
    plan: Plan | None = None
    node: int = 0
    nodes: int = 1
    address: str = "localhost"
    """Name or address of the first node."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports that the run listens on, on its first node, by the variable or key that sets them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that change what libraries do."""
    is_full: bool = False
    root: Path = Path("/")
    """Folder of /proc, /sys and /dev; tests pass their own."""

    @property
    def run(self) -> Plan:
        """Plan, for checks of a run."""
        assert self.plan is not None
        return self.plan

    @property
    def has_gpu(self) -> bool:
        return bool(self.machine.gpus)

    def read(self, path: str) -> str | None:
        """Return the stripped text of a file of the system; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None


Check = Callable[[Subject], Iterable[Result]]


@dataclass
class HostReport:
    """Results and facts of one host."""

    host: str
    results: list[Result] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    """Facts that must be equal on all hosts."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "HostReport":
        """Invert `as_dict`."""
        return cls(content["host"], [Result(**result) for result in content["results"]], dict(content["facts"]))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {"host": self.host, "results": [result._asdict() for result in self.results], "facts": self.facts}


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the value of ``work``, which runs in a thread that continues if it does not end in time: storage that
    hangs cannot be interrupted.

    Raises:
        TimeoutError: it did not end in time. Errors of ``work`` are raised here.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:  # raised below
            outcome["error"] = error
            if not isinstance(error, Exception):
                raise

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return outcome["value"]


def _all_of(check: Check, subject: Subject) -> list[Result]:
    return list(check(subject))


def run_checks(subject: Subject, checks: Mapping[str, Check], seconds: float) -> list[Result]:
    """Return the results of all checks, each with this deadline. A check that raises or does not end is a FAIL."""
    results = []
    for name, check in checks.items():
        try:
            results += within(seconds, partial(_all_of, check, subject))
        except UserError as error:
            results += [Result(name, FAIL, fault, "", "see the message") for fault in error.faults]
        except BaseException as error:
            is_host_fault = isinstance(error, (OSError, ValueError))
            limit = f"{seconds:.0f} s" if isinstance(error, TimeoutError) else "an answer"
            results.append(
                Result(name, FAIL, describe_error(error), limit, _HOST_REMEDY if is_host_fault else _CHECK_REMEDY)
            )
            if not isinstance(error, Exception):
                raise
    return results


def describe_error(error: BaseException) -> str:
    """Describe an error on one line by type and message, and by its place in the code unless the message is enough."""
    text = textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_LETTERS)
    if isinstance(error, (OSError, UserError)):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(place.filename).name}, line {place.lineno})"


class CheckEnded(NamedTuple):
    """Exit code and output of a program."""

    code: int
    output: str
    """Standard output and error."""


def run_program(command: Sequence[str], seconds: float) -> CheckEnded | None:
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
    return CheckEnded(done.returncode, done.stdout.decode(errors="replace"))
