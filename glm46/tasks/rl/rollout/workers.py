"""Programs that stay for many episodes: each gets one at a time by a line of its standard input, and ends it by a line
of its standard output."""

import asyncio
import json
import math
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

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
    """A program that runs."""

    process: asyncio.subprocess.Process
    said: bytearray
    """The end of its standard error."""
    reading: asyncio.Task[None]
    held: AsyncExitStack
    """Ends it."""
    before: str = ""
    """The episode that it ended last."""

    async def ask(self, line: str) -> bytes:
        """The line that it answers to a line, not another one about the episode before. A program that ends or closes
        its output is waited for."""
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
    """Programs, each started when an episode finds none without one.

    Args:
        programs: starts them.
        command: of each.
        most_idle: that are kept without an episode.
    """

    def __init__(self, programs: Programs, command: Sequence[str], most_idle: int):
        self._programs, self._command, self._most_idle = programs, command, most_idle
        self._idle = list[_Worker]()
        self._watching = set[asyncio.Task[None]]()

    async def run(
        self, task: Any, variables: Mapping[str, str], seconds: float, policy: tuple[PolicyEndpoint, Episode]
    ) -> tuple[ProgramOutcome, float | None]:
        """The outcome of an episode, and its score. A program that does not answer as it should is killed, and so is
        that of an episode which the endpoint ended.

        Args:
            task: the row of the prompt.
            variables: address and key of the policy.
            policy: that it asks.
        """
        endpoint, episode = policy
        name = secrets.token_hex(8)  # not that of the address, which all know that the program starts
        line = json.dumps({"episode": name, "task": task, "variables": dict(variables)}, default=str)
        while True:
            is_new = not self._idle
            try:
                worker = await self._start(endpoint) if is_new else self._idle.pop()
            except (OSError, ValueError) as error:
                return ProgramOutcome(f"{self._command[0]}: {error}", ""), None
            outcome = None
            worker.said.clear()
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
                break  # else the episode before was the cause
        said = worker.said.decode(errors="replace")
        if outcome is not None:
            text, score = outcome
            lines = text.strip().splitlines()
            return ProgramOutcome(lines[-1][:_MOST_SHOWN] if lines else text, said + text), score
        fault = f"it took more than {seconds:g} s (rl.environment.seconds) to write and flush its line"
        if ended:
            fault = end_in_words(worker.process.returncode, said)
        elif answered:
            shown = answered.result().decode(errors="replace").strip()[:_MOST_SHOWN]
            rule = f'{{"episode": "{name}", "score": a number or null, "error": a text or null}}'
            fault = f"its line is not {rule}: {shown!r}; write other words to standard error"
        return ProgramOutcome(fault, said), None

    async def _start(self, endpoint: PolicyEndpoint) -> _Worker:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            started = self._programs.started(self._command, folder, {}, endpoint, asyncio.subprocess.PIPE)
            process, said = await stack.enter_async_context(started), bytearray()
            assert process.stderr is not None, "it is a pipe"
            reading = asyncio.create_task(keep_end(process.stderr, said))
            stack.callback(reading.cancel)
            worker = _Worker(process, said, reading, stack.pop_all())
        watching = asyncio.create_task(self._leave_out(worker))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return worker

    async def _leave_out(self, worker: _Worker) -> None:
        """Free what a program held that ended without an episode."""
        await end_of(worker.process)
        if worker in self._idle:
            self._idle.remove(worker)
            await worker.held.aclose()

    async def close(self) -> None:
        """End those that have no episode: their input ends, and a few seconds later they are killed."""
        left, self._idle = self._idle, []
        for worker in left:
            assert worker.process.stdin is not None, "it is a pipe"
            worker.process.stdin.close()
        if left:
            await asyncio.wait([asyncio.create_task(end_of(one.process)) for one in left], timeout=_LEAVE_SECONDS)
        for worker in left:
            await worker.held.aclose()


def _outcome(line: bytes, name: str) -> tuple[str, float | None] | None:
    """The fault and the score of an episode by its line; None if it is another one's, or no such line."""
    try:
        said = json.loads(line)
        fault, score = said.get("error") or "", said.get("score")
        number = None if score is None else float(score)
        is_right = said["episode"] == name and isinstance(fault, str) and not isinstance(score, str)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
    if not is_right or not (number is None or math.isfinite(number)):
        return None
    return fault.encode(errors="replace").decode(), number  # half a character of JSON cannot be written
