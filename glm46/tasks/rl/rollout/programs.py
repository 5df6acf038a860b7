"""Runs the programs of episodes: what starts one, holds it and ends it."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from glm46.compute.distributed.environment import set_variables
from glm46.storage.prepare.jail import FIRST_FOLDER, NO_JAIL, jail_of_programs, jailed, places_of
from glm46.storage.prepare.landlock import Access
from glm46.tasks.rl.rollout.endpoint import Episode, PolicyEndpoint

_LAST_WORDS_SECONDS, _TICK_SECONDS = 0.5, 0.01
_MOST_SAID = 2**14
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

    async def run(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        seconds: float,
        given: bytes,
        policy: tuple[PolicyEndpoint, Episode] | None = None,
    ) -> ProgramOutcome:
        """Run a program in a sandbox and a session of its own, which ends with it or with its episode.

        Args:
            given: its standard input.
            policy: that it asks; None: it connects to nothing.
        """
        environment = set_variables(self._names) | dict(variables)
        places = (*places_of(command, environment), *self._allowed)
        if self._jail != NO_JAIL:
            environment |= {"HOME": folder, "TMPDIR": folder}
        access = Access(places, policy[0].port if policy else None, self._has_network)
        most = [(resource.RLIMIT_CORE, 0)]
        with ExitStack() as stack:
            start = stack.enter_context(jailed(self._jail, command, folder, access, most))
            try:
                process = await asyncio.create_subprocess_exec(
                    *start.words, cwd=FIRST_FOLDER, env=environment, start_new_session=True, pass_fds=start.descriptors,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
            except (OSError, ValueError) as error:
                return ProgramOutcome(f"{start.words[0]}: {error}", "")
            connecting = asyncio.create_task(_serve_inside(start.channel and start.channel.dup(), policy))
        said = bytearray()
        reading = asyncio.create_task(_exchange(process, given, said))
        ends: list[asyncio.Task[object]] = [asyncio.create_task(_end_of(process.pid))]
        ends += [asyncio.create_task(policy[1].has_failed.wait())] if policy else []
        try:
            done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ends[0] in done:  # what it said before its end
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(reading), _LAST_WORDS_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for task in (*ends, connecting, reading):
                task.cancel()
            while process.returncode is None:  # asyncio's wait lasts until nobody has its output open
                await asyncio.sleep(_TICK_SECONDS)
        output = said.decode(errors="replace")
        if not done:
            return ProgramOutcome(f"it took more than {seconds:g} s", output)
        lines = output.strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        status = process.returncode
        return ProgramOutcome("" if status == 0 else f"it ended with code {status}{last}", output)


async def _end_of(pid: int) -> None:
    """Wait until a process ends, even if another one keeps its output open."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _serve_inside(channel: socket.socket | None, policy: tuple[PolicyEndpoint, Episode] | None) -> None:
    """Accept on the listening socket that a sandbox sends through its channel, until this is cancelled."""
    if channel is None or policy is None:
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
        await policy[0].serve_on(socket.socket(fileno=descriptor))


async def _exchange(process: asyncio.subprocess.Process, given: bytes, said: bytearray) -> None:
    """Give a program its standard input, and keep the end of its output."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    with suppress(OSError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
    while part := await process.stdout.read(2**16):
        said += part
        del said[:-_MOST_SAID]
