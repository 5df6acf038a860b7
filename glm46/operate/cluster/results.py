"""Results of checks, and how the checks of a host run: each has a deadline, and any error becomes a result."""

import subprocess
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.files.threads import in_thread
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
ALL_RANKS = "all ranks"


class Result(NamedTuple):
    """The result of one check on one host, or on the group of all ranks."""

    check: str
    verdict: str
    """One of `VERDICTS`."""
    value: str
    """Value that was measured or found."""
    limit: str = ""
    remedy: str = ""
    host: str = ALL_RANKS


def limited(
    check: str,
    is_good: bool,
    value: str,
    limit: str,
    remedy: str,
    *,
    otherwise: str = FAIL,
    host: str = ALL_RANKS,
) -> Result:
    """Return a PASS, or ``otherwise`` with its remedy."""
    if is_good:
        return Result(check, PASS, value, limit, host=host)
    return Result(check, otherwise, value, limit, remedy, host)


def worst(results: Iterable[Result]) -> str:
    """Return the worst verdict; a SKIP counts as a PASS."""
    verdicts = {result.verdict for result in results}
    return next((verdict for verdict in (FAIL, WARN) if verdict in verdicts), PASS)


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


def run_checks(subject: Subject, checks: Mapping[str, Check], seconds: float) -> list[Result]:
    """Return the results of all checks, each with this deadline. A check that raises or does not end is a FAIL."""
    results = []
    for name, check in checks.items():
        # A thread that continues if the check does not end: a call to storage that hangs cannot be interrupted.
        ended = in_thread(partial(_results_of, check, subject))
        if wait([ended], seconds).not_done:
            value = f"no answer within {seconds:.0f} s"
            results.append(Result(name, FAIL, value, f"{seconds:.0f} s", _HOST_REMEDY))
        elif (error := ended.exception()) is None:
            results += ended.result()
        elif isinstance(error, UserError):
            results += [Result(name, FAIL, fault, "", "see the message") for fault in error.faults]
        else:
            remedy = _HOST_REMEDY if isinstance(error, (OSError, ValueError)) else _CHECK_REMEDY
            results.append(Result(name, FAIL, describe_error(error), "an answer", remedy))
    return results


def _results_of(check: Check, subject: Subject) -> list[Result]:
    return list(check(subject))


def describe_error(error: BaseException) -> str:
    """Describe an error on one line by type and message, and by its place in the code unless the message is enough."""
    text = textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_LETTERS)
    if isinstance(error, (OSError, UserError)):
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(place.filename).name}, line {place.lineno})"


def run_program(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Run a program, and return its end with all its output; None if it is not installed.

    Raises:
        TimeoutError: it did not end in time, and was killed.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} did not answer within {seconds:.0f} s") from error
