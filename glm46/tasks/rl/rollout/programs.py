"""Runs the programs of episodes: starts, limits and ends them."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from glm46.compute.distributed.environment import set_variables
from glm46.config.printable import printable
from glm46.files.local_disk import real_path
from glm46.files.scratch import async_scratch_folder
from glm46.storage.judge.jail import FIRST_FOLDER, NO_JAIL, jail_of_programs, jailed, places_of
from glm46.storage.judge.landlock import Access
from glm46.tasks.rl.rollout.endpoint import Episode, PolicyEndpoint

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
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start a program in its own sandbox and session; it ends with this context.

        Args:
            folder: working folder, the only one that it may write.
            endpoint: the policy that it may call; None: no connections.
            judged: read-only folder that it judges, if any.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        environment = _with_absolute_folders(set_variables(self._names)) | dict(variables)
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
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            connecting.cancel()
            while process.returncode is None:  # asyncio's wait returns only after its output is closed
                await asyncio.sleep(_TICK_SECONDS)
            transport.close()

    async def run(
        self,
        command: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        seconds: float,
        stdin: bytes,
        policy: tuple[PolicyEndpoint, Episode] | None = None,
    ) -> ProgramOutcome:
        """Run a program until it or its episode ends.

        Args:
            folder: folder of the episode.
            stdin: standard input.
            policy: endpoint and episode of the program. None for a scoring program, which judges the folder: it runs in
                an empty folder and has no connections, because the policy may have written files that would otherwise
                be loaded from the current folder.
        """
        if policy is not None:
            endpoint, episode = policy
            start = self.started(command, folder, variables, endpoint)
            return await self._run_to_end(start, command, seconds, stdin, episode)
        async with async_scratch_folder() as empty_folder:
            start = self.started(command, empty_folder, variables, None, folder)
            return await self._run_to_end(start, command, seconds, stdin, None)

    async def run_alone(self, command: Sequence[str], seconds: float, *, is_scoring: bool) -> ProgramOutcome:
        """Run a program like an episode's program or a scoring program, in an empty folder and without a policy."""
        async with async_scratch_folder() as folder:
            start = self.started(command, folder, {}, None, folder if is_scoring else None)
            return await self._run_to_end(start, command, seconds, b"", None)

    async def _run_to_end(
        self,
        start: AbstractAsyncContextManager[asyncio.subprocess.Process],
        command: Sequence[str],
        seconds: float,
        stdin: bytes,
        episode: Episode | None,
    ) -> ProgramOutcome:
        output = bytearray()
        errors = bytearray()
        try:
            async with start as process:
                reading = asyncio.create_task(_exchange(process, stdin, output, errors))
                try:
                    failed = [episode.has_failed.wait()] if episode else []
                    ended, *others = await first_of(seconds, end_of(process), *failed)
                    if ended:
                        await last_words(reading)
                finally:
                    reading.cancel()
        except (OSError, ValueError) as error:
            return ProgramOutcome(f"{command[0]}: {error}", "")
        written = output.decode(errors="replace")
        complaints = errors.decode(errors="replace")
        fault = ""
        if not any((ended, *others)):
            fault = f"it took more than {seconds:g} s"
        elif process.returncode != 0:
            fault = end_in_words(process.returncode, complaints, written)
        return ProgramOutcome(fault, written, complaints)


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


async def first_of(seconds: float, *waits: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any] | None]:
    """Wait at most this long for the first of some coroutines; cancel the others and return None in their places."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return [task if task in done else None for task in tasks]


async def last_words(reading: asyncio.Task[None]) -> None:
    """Wait briefly for output that a program wrote before its end."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(reading), _LAST_WORDS_SECONDS)


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


async def _exchange(process: asyncio.subprocess.Process, stdin: bytes, output: bytearray, errors: bytearray) -> None:
    """Write standard input of a program, and keep the ends of its standard output and standard error."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    keeping = asyncio.gather(keep_end(process.stdout, output), keep_end(process.stderr, errors))
    try:
        with suppress(OSError):
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        await keeping
    finally:
        keeping.cancel()


async def keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream to its end, and keep its last part."""
    while part := await stream.read(2**16):
        kept += part
        del kept[:-_MOST_SAID]
