"""Runs the programs of episodes: starts, limits and ends them."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from glm46.compute.distributed.environment import variables_that_are_set
from glm46.config.printable import printable
from glm46.files.local_disk import real_path
from glm46.files.scratch import async_scratch_folder
from glm46.storage.judge.jail import FIRST_FOLDER, NO_JAIL, jail_of_programs, jailed, places_of
from glm46.storage.judge.landlock import Access
from glm46.tasks.rl.rollout.endpoint import PolicyAccess, PolicyEndpoint

_LAST_WORDS_SECONDS = 0.5
_TICK_SECONDS = 0.01
_MOST_SAID = 2**14
_MOST_OF_LINE = 2**16
_NETWORK = "network"
_LISTS_OF_FOLDERS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_VARIABLES = (*_LISTS_OF_FOLDERS, "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
FOLDER_NAME = "GLM46_EPISODE_FOLDER"
"""Environment variable with the folder that a scoring program judges."""
_OF_JUDGES = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
}
"""Environment of scoring programs: Python and git must run no code from the folder of an episode."""


@dataclass(eq=False)
class Program:
    """A running program. Tasks read its outputs, of which the ends are kept."""

    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    output: bytearray
    """The end of its standard output, if it is read to its end."""
    errors: bytearray
    """The end of its standard error."""
    reading: list[asyncio.Task[None]]

    async def write(self, content: bytes) -> None:
        """Write to standard input, which the program may have closed."""
        with suppress(OSError):
            self.stdin.write(content)
            await self.stdin.drain()

    async def write_all(self, content: bytes) -> None:
        """Write the whole standard input, and close it."""
        await self.write(content)
        self.stdin.close()

    async def first(self, seconds: float, *events: Coroutine[Any, Any, object]) -> list[asyncio.Task[Any] | None]:
        """Wait at most this long for the end of the program, or for the first of some events.

        Returns:
            The tasks of end and events, with None for what has not happened; these are cancelled.
        """
        tasks = [asyncio.create_task(event) for event in (end_of(self.process), *events)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if tasks[0] in done:
            await asyncio.wait(self.reading, timeout=_LAST_WORDS_SECONDS)  # for what it wrote before its end
        return [task if task in done else None for task in tasks]


class ProgramOutcome(NamedTuple):
    """The outcome of a program."""

    fault: str
    """Why it failed; empty if it ended with code 0."""
    output: str
    """The end of its standard output."""
    errors: str = ""
    """The end of its standard error."""

    @property
    def both(self) -> str:
        """Standard output, followed by standard error."""
        separator = "\n" if self.output and self.errors and not self.output.endswith("\n") else ""
        return f"{self.output}{separator}{self.errors}"


class Programs:
    """Runs programs in the strongest sandbox that this machine supports.

    Args:
        names: environment variables to pass to programs in addition to PATH and similar ones.
        allowed: paths that programs may read in addition to the system, Python and their own; "network" allows the
            network of the host.
        keeps_modes: forbid changes of modes, owners and times of files if the sandbox cannot restrict them to the
            program's own folder.
    """

    def __init__(self, names: Sequence[str], allowed: Sequence[str], *, keeps_modes: bool = False):
        self._names = (*_VARIABLES, *names)
        self._jail = jail_of_programs()
        self._has_network = _NETWORK in allowed
        self._allowed = [os.path.abspath(os.path.expanduser(path)) for path in allowed if path != _NETWORK]
        self._keeps_modes = keeps_modes

    @asynccontextmanager
    async def started(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        endpoint: PolicyEndpoint | None,
        judged: str | None = None,
    ) -> AsyncIterator[Program]:
        """Start a program in its own sandbox and session; it ends with this context.

        Args:
            folder: working folder, the only one that it may write.
            endpoint: the policy that it may call; None: no connections.
            judged: read-only folder that it judges, if any.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        environment = _with_absolute_folders(variables_that_are_set(self._names)) | dict(variables)
        places = [*places_of(command, environment), *self._allowed]
        if self._jail != NO_JAIL or judged is not None:
            environment |= {"HOME": folder, "TMPDIR": folder}
            environment["GIT_CONFIG_NOSYSTEM"] = "1"  # git fails if /etc/gitconfig exists and cannot be read
        if judged is not None:
            environment = _judge_environment(environment, command, judged)
            places.append(judged)
        access = Access(places, endpoint.port if endpoint else None, self._has_network, not self._keeps_modes)
        limits = [(resource.RLIMIT_CORE, 0)]
        with ExitStack() as stack:
            start = stack.enter_context(jailed(self._jail, command, folder, access, limits))
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.subprocess_exec(
                partial(asyncio.subprocess.SubprocessStreamProtocol, _MOST_OF_LINE, loop),
                *start.words,
                cwd=FIRST_FOLDER,
                env=environment,
                start_new_session=True,
                pass_fds=start.descriptors,
            )
            process = asyncio.subprocess.Process(transport, protocol, loop)
            connecting = asyncio.create_task(_serve_inside(start.channel and start.channel.dup(), endpoint))
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        assert process.stderr is not None, "it is a pipe"
        errors = bytearray()
        reading = [asyncio.create_task(_keep_end(process.stderr, errors))]
        try:
            yield Program(process, process.stdin, process.stdout, bytearray(), errors, reading)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for task in (connecting, *reading):
                task.cancel()
            while process.returncode is None:  # asyncio's wait returns only after its output is closed
                await asyncio.sleep(_TICK_SECONDS)
            transport.close()

    async def run(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        seconds: float,
        stdin: bytes = b"",
        *,
        policy: PolicyAccess | None = None,
        is_judge: bool = False,
    ) -> ProgramOutcome:
        """Run a program until it or its episode ends.

        Args:
            folder: folder of the episode.
            stdin: standard input.
            policy: the policy that it may call, if any.
            is_judge: the program scores the folder. It runs in an empty folder, because the policy may have written
                files that would otherwise be loaded from the current folder.
        """
        endpoint = policy.endpoint if policy else None
        async with AsyncExitStack() as stack:
            working_folder = await stack.enter_async_context(async_scratch_folder()) if is_judge else folder
            judged = folder if is_judge else None
            try:
                async with self.started(command, working_folder, variables, endpoint, judged) as program:
                    program.reading.append(asyncio.create_task(_keep_end(program.stdout, program.output)))
                    program.reading.append(asyncio.create_task(program.write_all(stdin)))
                    failures = [policy.has_failed.wait()] if policy else []
                    events = await program.first(seconds, *failures)
            except (OSError, ValueError) as error:
                return ProgramOutcome(f"{command[0]}: {error}", "")
        output = program.output.decode(errors="replace")
        errors = program.errors.decode(errors="replace")
        fault = ""
        if not any(events):
            fault = f"it took more than {seconds:g} s"
        elif program.process.returncode != 0:
            fault = end_in_words(program.process.returncode, errors, output)
        return ProgramOutcome(fault, output, errors)


def _with_absolute_folders(variables: Mapping[str, str]) -> dict[str, str]:
    """Make the lists of folders in environment variables absolute.

    A program that starts in another folder would resolve relative and empty elements from there.
    """
    environment = dict(variables)
    for name in _LISTS_OF_FOLDERS:
        folders = [os.path.abspath(folder) for folder in environment.pop(name, "").split(os.pathsep) if folder]
        if folders:
            environment[name] = os.pathsep.join(folders)
    return environment


def _judge_environment(environment: Mapping[str, str], command: Sequence[str], judged: str) -> dict[str, str]:
    """Return the environment of a scoring program. PYTHONSAFEPATH stops imports of modules next to its script, so the
    folder of the script is added to PYTHONPATH."""
    result = {**environment, **_OF_JUDGES, FOLDER_NAME: judged}
    scripts = [real_path(Path(word)) for word in command[1:] if word.endswith(".py") and os.path.isfile(word)]
    folders = [str(script.parent) for script in scripts[:1]]
    if "PYTHONPATH" in environment:
        folders.append(environment["PYTHONPATH"])
    if folders:
        result["PYTHONPATH"] = os.pathsep.join(folders)
    return result


def end_in_words(status: int | None, *outputs: str) -> str:
    """Describe how a program ended, with the last line of the first output that is not empty."""
    for output in outputs:
        lines = output.strip().splitlines()
        if lines:
            return f"it ended with code {status}: {printable(lines[-1])}"
    return f"it ended with code {status}"


async def end_of(process: asyncio.subprocess.Process) -> None:
    """Wait until a process ends, even if another process keeps its output open."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _serve_inside(channel: socket.socket | None, endpoint: PolicyEndpoint | None) -> None:
    """Serve the policy on the listening socket that a sandbox sends through its channel, until this is cancelled."""
    if channel is None or endpoint is None:
        return
    with channel:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(channel, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(channel)
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    for descriptor in descriptors:
        await endpoint.serve_on(socket.socket(fileno=descriptor))


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream to its end, and keep its last part."""
    while part := await stream.read(2**16):
        kept += part
        del kept[:-_MOST_SAID]
