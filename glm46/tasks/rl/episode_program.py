"""Runs a program of an episode, with a deadline, few variables and limits."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from glm46.compute.distributed.environment import set_variables
from glm46.storage.prepare.limited import limits_of_session

_MOST_SAID = 2**14
_LAST_SECONDS = 0.5
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


async def run_program(
    command: Sequence[str], folder: str, passed: Sequence[str], variables: Mapping[str, str], seconds: float,
    given: bytes, has_failed: asyncio.Event | None = None,
) -> tuple[str, str]:  # fmt: skip
    """Run a program in a session of its own, which is killed when it or its episode ends: why it failed, if it did, and
    the end of its output.

    Args:
        folder: its current one.
        passed: names of variables that it gets beside the usual ones.
        variables: others, with their values.
        given: its standard input.
        has_failed: of its episode.
    """
    environment = set_variables((*_VARIABLES, *passed)) | dict(variables)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, start_new_session=True, preexec_fn=limits_of_session(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"{command[0]}: {error}", ""
    said = bytearray()
    reading = asyncio.create_task(_exchange(process, given, said))
    ends = [asyncio.create_task(process.wait())]
    ends += [] if has_failed is None else [asyncio.create_task(has_failed.wait())]
    try:
        done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is not None:  # what it said before its end
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading), _LAST_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await process.wait()
        for task in ends:
            task.cancel()
    output = said.decode(errors="replace")
    if not done:
        return f"it took more than {seconds:g} s", output
    lines = output.strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    status = process.returncode
    return "" if status == 0 else f"it ended with code {status}{last}", output


async def run_scoring(
    command: Sequence[str], folder: str, passed: Sequence[str], seconds: float, given: Any
) -> tuple[str, float | None]:
    """Run a scoring program: why it failed, if it did, and its number."""
    said = json.dumps(given, default=str).encode()
    fault, output = await run_program(command, folder, passed, {}, seconds, said)
    with suppress(ValueError):
        score = float(output.strip().rpartition("\n")[2])
        if not fault and math.isfinite(score):
            return "", score
    return f"rl.environment.score_command: {fault or 'its last line is no number'}", None


async def _exchange(process: asyncio.subprocess.Process, given: bytes, said: bytearray) -> None:
    """Give a program its standard input, and keep the end of its output."""
    with suppress(OSError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
    while part := await process.stdout.read(2**16):
        said += part
        del said[:-_MOST_SAID]
