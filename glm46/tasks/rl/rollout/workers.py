"""Programs that run many episodes: each receives one episode at a time as a line of standard input, and ends it with a
line of standard output."""

import asyncio
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from glm46.files.scratch import async_scratch_folder
from glm46.tasks.rl.rollout.endpoint import Episode, PolicyEndpoint
from glm46.tasks.rl.rollout.programs import (
    ProgramOutcome,
    Programs,
    end_in_words,
    end_of,
    first_of,
    keep_end,
    last_words,
)

_MOST_SHOWN = 200
_LEAVE_SECONDS = 5.0


@dataclass(eq=False)
class _Worker:
    """A running program."""

    process: asyncio.subprocess.Process
    stderr_tail: bytearray
    """Last part of its standard error."""
    reading: asyncio.Task[None]
    held: AsyncExitStack
    """Resources of the program; closing them ends it."""
    before: str = ""
    """Name of its previous episode."""

    async def ask(self, line: str) -> bytes:
        """Send a line and return the answer, skipping repeated lines about the previous episode. Does not return if the
        program ends or closes its output; the caller cancels it."""
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        with suppress(OSError):
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()
        try:
            while (answered := await self.process.stdout.readline()).endswith(b"\n"):
                if _outcome(answered, self.before) is None:
                    return answered
        except ValueError:
            return b"more than 65,536 bytes"
        return await asyncio.get_running_loop().create_future()


class Workers:
    """A pool of programs. A program is started when an episode finds no idle one.

    Args:
        programs: starts the programs.
        command: command of each program.
        most_idle: maximum number of idle programs to keep.
    """

    def __init__(self, programs: Programs, command: Sequence[str], most_idle: int):
        self._programs = programs
        self._command = command
        self._most_idle = most_idle
        self._idle = list[_Worker]()
        self._watching = set[asyncio.Task[None]]()

    async def run(
        self, task: Any, variables: Mapping[str, str], seconds: float, policy: tuple[PolicyEndpoint, Episode]
    ) -> tuple[ProgramOutcome, float | None]:
        """Run an episode and return its outcome and score. A program is killed if its answer is invalid or if the
        endpoint ends its episode.

        Args:
            task: row of the prompt.
            variables: address and key of the policy.
            policy: endpoint and episode that the program uses.
        """
        endpoint, episode = policy
        name = secrets.token_hex(8)  # not the name in the address, which every child of the program knows
        line = json.dumps({"episode": name, "task": task, "variables": dict(variables)}, default=str)
        while True:
            is_new = not self._idle
            try:
                worker = await self._start(endpoint) if is_new else self._idle.pop()
            except (OSError, ValueError) as error:
                return ProgramOutcome(f"{self._command[0]}: {error}", ""), None
            outcome = None
            worker.stderr_tail.clear()
            try:
                answered, ended, failed = await first_of(
                    seconds, worker.ask(line), end_of(worker.process), episode.has_failed.wait()
                )
                if answered:
                    outcome = _outcome(answered.result(), name)
                if ended:
                    await last_words(worker.reading)
            finally:
                if outcome is None or ended or failed or len(self._idle) >= self._most_idle:
                    await worker.held.aclose()
                else:
                    worker.before = name
                    self._idle.append(worker)
            if outcome is not None or is_new or episode.requests or not (answered or ended):
                break  # otherwise the previous episode may have ended the program: try another one
        errors = worker.stderr_tail.decode(errors="replace")
        if outcome is not None:
            text, score = outcome
            lines = text.strip().splitlines()
            return ProgramOutcome(lines[-1][:_MOST_SHOWN] if lines else text, errors + text), score
        fault = f"it took more than {seconds:g} s (rl.environment.seconds) to write and flush its line"
        if ended:
            fault = end_in_words(worker.process.returncode, errors)
        elif answered:
            shown = answered.result().decode(errors="replace").strip()[:_MOST_SHOWN]
            rule = f'{{"episode": "{name}", "score": a number or null, "error": a text or null}}'
            fault = f"its line is not {rule}: {shown!r}; write other words to standard error"
        return ProgramOutcome(fault, errors), None

    async def _start(self, endpoint: PolicyEndpoint) -> _Worker:
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(async_scratch_folder())
            process = await stack.enter_async_context(self._programs.started(self._command, folder, {}, endpoint))
            errors = bytearray()
            assert process.stderr is not None, "it is a pipe"
            reading = asyncio.create_task(keep_end(process.stderr, errors))
            stack.callback(reading.cancel)
            worker = _Worker(process, errors, reading, stack.pop_all())
        watching = asyncio.create_task(self._leave_out(worker))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return worker

    async def _leave_out(self, worker: _Worker) -> None:
        """Free the resources of a program that ends while idle."""
        await end_of(worker.process)
        if worker in self._idle:
            self._idle.remove(worker)
            await worker.held.aclose()

    async def close(self) -> None:
        """End idle programs: close their input, and kill them a few seconds later."""
        idle = self._idle
        self._idle = []
        for worker in idle:
            assert worker.process.stdin is not None, "it is a pipe"
            worker.process.stdin.close()
        if idle:
            await asyncio.wait([asyncio.create_task(end_of(worker.process)) for worker in idle], timeout=_LEAVE_SECONDS)
        for worker in idle:
            await worker.held.aclose()


def _outcome(line: bytes, name: str) -> tuple[str, float | None] | None:
    """Parse fault and score of an episode from a line; None if it is invalid or about another episode."""
    try:
        response = json.loads(line)
        fault = response.get("error") or ""
        score = response.get("score")
        number = None if score is None else float(score)
        is_right = response["episode"] == name and isinstance(fault, str) and not isinstance(score, str)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
    if not is_right or not (number is None or math.isfinite(number)):
        return None
    return fault.encode(errors="replace").decode(), number  # a lone surrogate of JSON cannot be encoded
