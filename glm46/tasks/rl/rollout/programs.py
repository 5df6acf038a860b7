"""Runs the programs of episodes: what starts one, holds it and ends it."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from glm46.compute.distributed.environment import set_variables
from glm46.storage.prepare.jail import FIRST_FOLDER, NO_JAIL, jail_of_programs, jailed, places_of
from glm46.storage.prepare.landlock import Access
from glm46.tasks.rl.rollout.endpoint import Episode, PolicyEndpoint

_LAST_WORDS_SECONDS, _TICK_SECONDS = 0.5, 0.01
_MOST_SAID, _MOST_OF_LINE = 2**14, 2**16
_NETWORK = "network"
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class ProgramOutcome(NamedTuple):
    """The end of a program."""

    fault: str
    """Empty if it ended with 0."""
    output: str
    """The end of what it wrote."""


class Programs:
    """Runs programs in the best sandbox of this machine.

    Args:
        names: of variables of this process that they get beside PATH and the like.
        allowed: paths that they may read beside system, Python and their own; "network" opens that of the host.
    """

    def __init__(self, names: Sequence[str], allowed: Sequence[str]):
        self._names, self._jail = (*_VARIABLES, *names), jail_of_programs()
        self._has_network = _NETWORK in allowed
        self._allowed = [os.path.abspath(os.path.expanduser(path)) for path in allowed if path != _NETWORK]

    @asynccontextmanager
    async def started(
        self, command: Sequence[str], folder: str, variables: Mapping[str, str], endpoint: PolicyEndpoint | None,
        errors: int = asyncio.subprocess.STDOUT,
    ) -> AsyncIterator[asyncio.subprocess.Process]:  # fmt: skip
        """A program in a sandbox and a session of its own, which ends with this context.

        Args:
            endpoint: that it may ask; None: it connects to nothing.
            errors: where its standard error goes.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        environment = set_variables(self._names) | dict(variables)
        places = (*places_of(command, environment), *self._allowed)
        if self._jail != NO_JAIL:
            environment |= {"HOME": folder, "TMPDIR": folder}
        access = Access(places, endpoint.port if endpoint else None, self._has_network)
        most = [(resource.RLIMIT_CORE, 0)]
        with ExitStack() as stack:
            start = stack.enter_context(jailed(self._jail, command, folder, access, most))
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.subprocess_exec(
                partial(asyncio.subprocess.SubprocessStreamProtocol, _MOST_OF_LINE, loop), *start.words,
                cwd=FIRST_FOLDER, env=environment, start_new_session=True, pass_fds=start.descriptors, stderr=errors,
            )  # fmt: skip
            process = asyncio.subprocess.Process(transport, protocol, loop)
            connecting = asyncio.create_task(_serve_inside(start.channel and start.channel.dup(), endpoint))
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            connecting.cancel()
            while process.returncode is None:  # asyncio's wait lasts until nobody has its output open
                await asyncio.sleep(_TICK_SECONDS)
            transport.close()

    async def run(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        seconds: float,
        given: bytes,
        policy: tuple[PolicyEndpoint, Episode] | None = None,
    ) -> ProgramOutcome:
        """Run a program to its end, or to that of its episode.

        Args:
            given: its standard input.
            policy: that it asks; None: it connects to nothing.
        """
        said = bytearray()
        try:
            async with self.started(command, folder, variables, policy[0] if policy else None) as process:
                reading = asyncio.create_task(_exchange(process, given, said))
                try:
                    failed = [policy[1].has_failed.wait()] if policy else []
                    ended, *others = await first_of(seconds, end_of(process), *failed)
                    if ended:
                        await last_words(reading)
                finally:
                    reading.cancel()
        except (OSError, ValueError) as error:
            return ProgramOutcome(f"{command[0]}: {error}", "")
        output = said.decode(errors="replace")
        if not any((ended, *others)):
            return ProgramOutcome(f"it took more than {seconds:g} s", output)
        return ProgramOutcome("" if process.returncode == 0 else end_in_words(process.returncode, output), output)


def end_in_words(status: int | None, output: str) -> str:
    """The fault of a program that ended, with the last line that it wrote."""
    lines = output.strip().splitlines()
    return f"it ended with code {status}{f': {lines[-1]}' if lines else ''}"


async def first_of(seconds: float, *waits: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any] | None]:
    """Wait for the first of some waits, for so long at most. The others, None in what is returned, are cancelled."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return [task if task in done else None for task in tasks]


async def last_words(reading: asyncio.Task[None]) -> None:
    """Wait for what a program wrote before its end."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(reading), _LAST_WORDS_SECONDS)


async def end_of(process: asyncio.subprocess.Process) -> None:
    """Wait until a process ends, even if another one keeps its output open."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _serve_inside(channel: socket.socket | None, endpoint: PolicyEndpoint | None) -> None:
    """Accept on the listening socket that a sandbox sends through its channel, until this is cancelled."""
    if channel is None or endpoint is None:
        return
    with channel:
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(channel, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(channel)
        _, found, _, _ = socket.recv_fds(channel, 1, 1)
    for descriptor in found:
        await endpoint.serve_on(socket.socket(fileno=descriptor))


async def _exchange(process: asyncio.subprocess.Process, given: bytes, said: bytearray) -> None:
    """Give a program its standard input, and keep the end of its output."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    with suppress(OSError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
    await keep_end(process.stdout, said)


async def keep_end(output: asyncio.StreamReader, said: bytearray) -> None:
    """Read an output to its end, and keep the last part of it."""
    while part := await output.read(2**16):
        said += part
        del said[:-_MOST_SAID]
