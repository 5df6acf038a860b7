"""Programs that run episodes of a user's command. A program runs one episode, which it reads from its environment; or
it is a worker that runs many, one after another, each a line of standard input and a line of standard output."""

import asyncio
import json
import math
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from glm46.files.scratch import async_scratch_folder
from glm46.tasks.rl.rollout.endpoint import PolicyAccess, PolicyEndpoint
from glm46.tasks.rl.rollout.programs import Program, ProgramOutcome, Programs, end_in_words, end_of

TASK_NAME = "GLM46_TASK"
"""Environment variable with the row of an episode."""
_MOST_SHOWN = 200
_LEAVE_SECONDS = 5.0


def task_text(task: object) -> str:
    """Return the row of an episode as the value of `TASK_NAME`: JSON in ASCII."""
    return json.dumps(task, default=str)


@dataclass(eq=False)
class _Worker:
    """A running program that runs many episodes."""

    program: Program
    resources: AsyncExitStack
    """Closing it ends the program."""
    previous_episode: str = ""

    async def ask(self, line: str) -> bytes:
        """Send a line and return the answer, skipping repeated lines about the previous episode. Does not return if the
        program ends or closes its output; the caller cancels it."""
        await self.program.write(line.encode() + b"\n")
        try:
            while (answer := await self.program.stdout.readline()).endswith(b"\n"):
                if _outcome(answer, self.previous_episode) is None:
                    return answer
        except ValueError:
            return b"more than 65,536 bytes"
        never: bytes = await asyncio.get_running_loop().create_future()
        return never


class Workers:
    """Runs episodes in programs of one command.

    Args:
        programs: starts the programs.
        most_idle: maximum number of workers to keep between episodes. None: a program runs one episode.
    """

    def __init__(self, programs: Programs, command: Sequence[str], most_idle: int | None):
        self._programs = programs
        self._command = command
        self._most_idle = most_idle
        self._idle = list[_Worker]()
        self._watching = set[asyncio.Task[None]]()

    async def run(
        self, task: object, folder: str, seconds: float, policy: PolicyAccess
    ) -> tuple[ProgramOutcome, float | None]:
        """Run an episode and return its outcome and score.

        Args:
            task: row of the prompt.
            folder: working folder of a program that runs one episode; a worker has its own.
            policy: the policy that the program may call.
        """
        if self._most_idle is not None:
            return await self._run_in_worker(task, seconds, policy, self._most_idle)
        variables = policy.variables | {TASK_NAME: task_text(task)}
        outcome = await self._programs.run(self._command, folder, variables, seconds, policy=policy)
        return outcome, last_number(outcome.output, is_cut=bool(outcome.fault))

    async def _run_in_worker(
        self, task: object, seconds: float, policy: PolicyAccess, most_idle: int
    ) -> tuple[ProgramOutcome, float | None]:
        """Run an episode in an idle or a new worker. It is killed if its answer is invalid or if the endpoint ends its
        episode."""
        name = secrets.token_hex(8)  # not the name in the address, which every child of the program knows
        line = json.dumps({"episode": name, "task": task, "variables": policy.variables}, default=str)
        while True:
            is_new = not self._idle
            try:
                worker = await self._start(policy.endpoint) if is_new else self._idle.pop()
            except (OSError, ValueError) as error:
                return ProgramOutcome(f"{self._command[0]}: {error}", ""), None
            program = worker.program
            program.errors.clear()
            outcome = None
            try:
                ended, answer, failed = await program.first(seconds, worker.ask(line), policy.has_failed.wait())
                if answer:
                    outcome = _outcome(answer.result(), name)
            finally:
                if outcome is None or ended or failed or len(self._idle) >= most_idle:
                    await worker.resources.aclose()
                else:
                    worker.previous_episode = name
                    self._idle.append(worker)
            if outcome is not None or is_new or policy.requests or not (answer or ended):
                break  # otherwise the previous episode may have ended the program: try another one
        errors = program.errors.decode(errors="replace")
        if outcome is not None:
            text, score = outcome
            lines = text.strip().splitlines()
            return ProgramOutcome(lines[-1][:_MOST_SHOWN] if lines else text, errors + text), score
        fault = f"it took more than {seconds:g} s (rl.environment.seconds) to write and flush its line"
        if ended:
            fault = end_in_words(program.process.returncode, errors)
        elif answer:
            shown = answer.result().decode(errors="replace").strip()[:_MOST_SHOWN]
            rule = f'{{"episode": "{name}", "score": a number or null, "error": a text or null}}'
            fault = f"its line is not {rule}: {shown!r}; write other words to standard error"
        return ProgramOutcome(fault, errors), None

    async def _start(self, endpoint: PolicyEndpoint) -> _Worker:
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(async_scratch_folder())
            program = await stack.enter_async_context(self._programs.started(self._command, folder, {}, endpoint))
            worker = _Worker(program, stack.pop_all())
        watching = asyncio.create_task(self._remove_ended(worker))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return worker

    async def _remove_ended(self, worker: _Worker) -> None:
        """Free the resources of a worker that ends while idle."""
        await end_of(worker.program.process)
        if worker in self._idle:
            self._idle.remove(worker)
            await worker.resources.aclose()

    async def close(self) -> None:
        """End idle workers: close their input, and kill them a few seconds later."""
        idle = self._idle
        self._idle = []
        for worker in idle:
            worker.program.stdin.close()
        if idle:
            ends = [asyncio.create_task(end_of(worker.program.process)) for worker in idle]
            await asyncio.wait(ends, timeout=_LEAVE_SECONDS)
        for worker in idle:
            await worker.resources.aclose()


def last_number(output: str, *, is_cut: bool = False) -> float | None:
    """Parse the number in the last line of an output; with ``is_cut`` in the last line that is a number. None if there
    is no such number."""
    for line in reversed(output.strip().splitlines()):
        with suppress(ValueError):
            return number if math.isfinite(number := float(line)) else None
        if not is_cut:
            break
    return None


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
