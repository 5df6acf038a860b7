"""Programs that stay for many episodes: each gets one at a time by a line of its standard input, and ends it by a line
of its standard output."""

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

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


class _Worker(NamedTuple):
    """A program that runs."""

    process: asyncio.subprocess.Process
    said: bytearray
    """The end of its standard error."""
    reading: asyncio.Task[None]
    held: AsyncExitStack
    """Ends it."""

    async def ask(self, line: str) -> bytes:
        """The line that it answers to a line. A program that answers none, or cannot be asked, is waited for."""
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        with suppress(OSError):
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()
        try:
            if answered := await self.process.stdout.readline():
                return answered
        except ValueError as error:  # the line is too long
            return str(error).encode()
        return await asyncio.get_running_loop().create_future()


class Workers:
    """As many programs as there are episodes at once, each started when it is needed.

    Args:
        programs: starts them.
        command: of each.
    """

    def __init__(self, programs: Programs, command: Sequence[str]):
        self._programs, self._command = programs, command
        self._idle = list[_Worker]()

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
        line = json.dumps({"episode": episode.name, "task": task, "variables": dict(variables)}, default=str)
        try:
            worker = await self._take(endpoint)
        except (OSError, ValueError) as error:
            return ProgramOutcome(f"{self._command[0]}: {error}", ""), None
        outcome = None
        worker.said.clear()
        try:
            answered, ended, failed = await first_of(
                seconds, worker.ask(line), end_of(worker.process), episode.has_failed.wait()
            )
            if answered:
                outcome = _outcome(answered.result(), episode.name)
            elif ended:
                await last_words(worker.reading)
        finally:
            if outcome is None or failed:
                await worker.held.aclose()
            else:
                self._idle.append(worker)
        said = worker.said.decode(errors="replace")
        if outcome is not None:
            fault, score = outcome
            return ProgramOutcome(fault, said), score
        fault = f"it took more than {seconds:g} s"
        if answered:
            shown = answered.result().decode(errors="replace").strip()[:_MOST_SHOWN]
            rule = f'{{"episode": "{episode.name}", "score": a number or null}}'
            fault = f"its line is not {rule}: {shown!r}; write other words to standard error"
        elif ended:
            fault = end_in_words(worker.process.returncode, said)
        return ProgramOutcome(fault, said), None

    async def _take(self, endpoint: PolicyEndpoint) -> _Worker:
        """A program without an episode."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            await worker.held.aclose()
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            started = self._programs.started(self._command, folder, {}, endpoint, asyncio.subprocess.PIPE)
            process, said = await stack.enter_async_context(started), bytearray()
            assert process.stderr is not None, "it is a pipe"
            reading = asyncio.create_task(keep_end(process.stderr, said))
            stack.callback(reading.cancel)
            return _Worker(process, said, reading, stack.pop_all())

    async def close(self) -> None:
        """End those that have no episode."""
        while self._idle:
            await self._idle.pop().held.aclose()


def _outcome(line: bytes, name: str) -> tuple[str, float | None] | None:
    """The fault and the score of an episode by its line; None if it is another one's, or no such line."""
    try:
        said = json.loads(line)
        fault, score = said.get("error", ""), said.get("score")
        number = None if score is None else float(score)
        is_right = said["episode"] == name and isinstance(fault, str) and not isinstance(score, str)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
    return (fault, number) if is_right and (number is None or math.isfinite(number)) else None
