"""Runs the programs of episodes: what starts one, limits it and ends it."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from glm46.compute.distributed.environment import set_variables
from glm46.storage.prepare.limited import limits_of_session
from glm46.tasks.rl.rollout.endpoint import Episode

_LAST_WORDS_SECONDS = 0.5
_MOST_SAID = 2**14
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class ProgramEnd(NamedTuple):
    """The end of a program."""

    fault: str
    """Empty if it ended with 0."""
    output: str
    """The end of what it wrote."""


def passed_on(names: Sequence[str]) -> dict[str, str]:
    """Variables of this process that each program gets, and those that are named."""
    return set_variables((*_VARIABLES, *names))


async def run_program(
    command: Sequence[str],
    folder: str,
    variables: Mapping[str, str],
    seconds: float,
    given: bytes,
    episode: Episode | None = None,
) -> ProgramEnd:
    """Run a program in a session of its own, which is killed when it or its episode ends.

    Args:
        variables: all that it gets.
        given: its standard input.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=variables, start_new_session=True, preexec_fn=limits_of_session(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return ProgramEnd(f"{command[0]}: {error}", "")
    said = bytearray()
    reading = asyncio.create_task(_exchange(process, given, said))
    ends = [asyncio.create_task(process.wait())]
    ends += [] if episode is None else [asyncio.create_task(episode.has_failed.wait())]
    try:
        done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is not None:  # what it said before its end
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading), _LAST_WORDS_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await process.wait()
        for task in ends:
            task.cancel()
    output = said.decode(errors="replace")
    if not done:
        return ProgramEnd(f"it took more than {seconds:g} s", output)
    lines = output.strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    status = process.returncode
    return ProgramEnd("" if status == 0 else f"it ended with code {status}{last}", output)


async def _exchange(process: asyncio.subprocess.Process, given: bytes, said: bytearray) -> None:
    """Give a program its standard input, and keep the end of its output."""
    with suppress(OSError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
    while part := await process.stdout.read(2**16):
        said += part
        del said[:-_MOST_SAID]
