"""Generates groups of samples or episodes on servers while the caller trains, across weight updates."""

import os
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

from glm46.engine.reliability.run_lock import writing
from glm46.files.durable import replace_durably, sync_folder
from glm46.files.standard_output import LineWriter, print_line
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests
from glm46.tasks.rl.rollout.records import (
    Completion,
    Episode,
    Request,
    pack_groups,
    unpack_groups,
)

_TICK_SECONDS = 0.5


@dataclass(eq=False)
class Member:
    """A sample or an episode of a group."""

    number: int
    """Number of the prompt, counted over the run."""
    request: Request
    end: Episode
    """Its stored result, or the part to continue from."""
    result: Episode | None = None
    """Its result, which may not be on disk yet."""
    finish: Callable[[Episode | BaseException], None] = lambda end: None
    """Takes the result, or an error that ends the run. Callable from any thread; does not block."""
    note: Callable[[Completion], None] = lambda turn: None
    """Takes a turn of an episode and soon stores it. Callable from any thread; does not block. After a restart the
    stored turns are the samples of the part to continue from."""
    cancel: Callable[[], object] | None = None
    """Ends it without a result; None until it has begun."""
    parts: Callable[[], list[Completion]] = lambda: []
    """Returns the tokens so far of a sample without turns."""


Begin = Callable[[OpenRequests, Sequence[Member]], None]
"""Begins to generate members of one group, and sets their `cancel`."""


def begin_samples(requests: OpenRequests, members: Sequence[Member]) -> None:
    """See `Begin`: each member is one request."""

    def begin(member: Member) -> OpenRequest:
        def sample(completion: Completion) -> list[Completion]:
            return [completion._replace(prompt=member.request.prompt)]

        open_request = OpenRequest(
            member.request, lambda completion: member.finish(Episode(sample(completion))), member.end.completion
        )
        member.cancel = partial(requests.drop, open_request)
        member.parts = lambda: sample(open_request.generated) if open_request.generated.tokens else []
        return open_request

    requests.ask([begin(member) for member in members])


class BackgroundGeneration:
    """Groups that servers generate, from `add` to `take`. Used by the process that talks to the servers.

    A writer thread appends finished results, turns of episodes, and samples truncated by a halt to one file per group
    in `folder`, so that a kill does not lose them. Results that arrive during a write are written together. Groups can
    be taken once they are on disk.

    Args:
        folder: holds the files; `add` reads the file of its group.
        say: takes a line for the log.
    """

    def __init__(
        self, requests: OpenRequests, folder: Path, begin: Begin = begin_samples, say: LineWriter = print_line
    ):
        self._requests = requests
        self._folder = folder
        self._begin = begin
        self._say = say
        self._has_turns = begin is not begin_samples
        self._groups: dict[int, list[Member]] = {}
        self._unwritten: list[tuple[Member, Episode]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        requests.failed = self._notify

    def _notify(self) -> None:
        with self._changed:
            self._error = self._error or self._requests.error
            self._changed.notify_all()

    def add(self, number: int, requests: list[Request], since: int) -> None:
        """Generate a group from the next `start` on, except for members with results in its file.

        Args:
            since: oldest version of the weights whose tokens are kept; the only one if samples do not continue after a
                halt.
        """
        with self._changed:
            self._cancel(number)
        self._writer.submit(self._write).result()
        nothing = Episode([], is_part=True)
        path = self._path(number)
        read = [nothing] * len(requests)
        for index, end in read_ends(path, self._say):
            if end.fault:
                continue  # it is tried again, after its turns
            previous = read[index].samples if self._has_turns and end.is_part else []
            read[index] = end._replace(samples=[*previous, *end.samples])
        ends = [end if self._is_kept(end, since) else nothing for end in read]
        if any(
            end is not stored for end, stored in zip(ends, read, strict=True)
        ):  # discarded ends must not be read again
            with writing(self._folder):
                replace_durably(path, map(_line, enumerate(ends)))
        members = [
            Member(number, request, end, None if end.is_part else end)
            for request, end in zip(requests, ends, strict=True)
        ]
        for member in members:
            member.finish, member.note = partial(self._finish, member), partial(self._note, member)
        with self._changed:
            self._groups[number] = members

    def _is_kept(self, end: Episode, since: int) -> bool:
        versions = {version for sample in end.samples for version in sample.versions}
        return min(versions, default=since) >= since if self._requests.goes_on else versions == {since}

    def _cancel(self, number: int) -> None:
        for member in self._groups.pop(number, ()):
            if member.cancel is not None and member.end.is_part:
                member.cancel()

    def keep(self, numbers: Iterable[int], *, before: int) -> None:
        """Cancel all groups except `numbers`, and remove their files if they are numbered below `before`: later prompts
        are still to be handed out."""
        kept = set(numbers)
        with self._changed:
            for number in self._groups.keys() - kept:
                self._cancel(number)
        self._writer.submit(self._write).result()  # afterwards it creates no file of a cancelled group
        for path in self._folder.glob("prompt_*"):  # including partial files left by a kill
            number = int(path.name.removeprefix("prompt_").partition(".")[0])
            if number < before and number not in kept:
                path.unlink()

    def start(self) -> None:
        """Continue all unfinished groups from their current state."""
        for number in sorted(self._groups):
            new = [member for member in self._groups[number] if member.end.is_part and member.cancel is None]
            if new:
                self._begin(self._requests, new)
        self._requests.start()

    def halt(self, seconds: float | None = None) -> bool:
        """See `OpenRequests.halt`."""
        if not self._requests.halt(seconds):
            return False
        self._writer.submit(self._write).result()
        for number, members in {} if self._has_turns else self._groups.items():
            ends = [
                member.result or member.end._replace(samples=member.parts() or member.end.samples) for member in members
            ]
            if not _are_finished(members) and any(end.samples for end in ends):
                with writing(self._folder):  # replace it: appending each part would let it grow
                    replace_durably(self._path(number), map(_line, enumerate(ends)))
        return True

    def unfinished(self, numbers: Iterable[int]) -> int:
        """Return how many of these groups are not finished."""
        with self._changed:
            return sum(not _are_finished(self._groups[number]) for number in numbers)

    def take(
        self, count: int, due: set[int], is_stopped: Callable[[], bool], *, waits: bool = True
    ) -> dict[int, list[Episode]] | None:
        """Wait for this many finished groups and take them, due groups first, then by number. Return None if a stop was
        requested.

        Args:
            due: numbers of groups, at most `count`.
            waits: wait until all due groups are finished.

        Raises:
            UserError: no server is left, all servers refuse a request, or a group cannot be written.
        """

        def ready() -> list[int]:
            finished = [number for number, members in self._groups.items() if _are_finished(members)]
            if waits and not due <= set(finished):
                return []
            return sorted(finished, key=lambda number: (number not in due, number))[:count]

        with self._changed:
            while len(numbers := ready()) < count and self._error is None:
                if is_stopped():
                    return None
                self._changed.wait(_TICK_SECONDS)
            if len(numbers) < count and self._error is not None:
                raise self._error
            return {number: [member.end for member in self._groups.pop(number)] for number in numbers}

    def _finish(self, member: Member, end: Episode | BaseException) -> None:
        with self._changed:
            members = self._groups.get(member.number, [])
            if isinstance(end, BaseException):
                self._error = self._error or end
                self._changed.notify_all()
            elif member in members:
                member.result = end
                waiting = [member] if self._has_turns else members  # an episode may take an hour
                done = [(peer, peer.result) for peer in waiting if peer.result is not None]
                self._unwritten += done if len(done) == len(waiting) else []
        self._writer.submit(self._write)

    def _note(self, member: Member, turn: Completion) -> None:
        with self._changed:
            self._unwritten.append((member, Episode([turn], is_part=True)))
        self._writer.submit(self._write)

    def _write(self) -> None:
        """Write all unwritten results. Errors are raised by `take`. The next call writes what failed, before anything
        newer: a conversation must not lack one of its turns."""
        lines = dict[int, list[bytes]]()
        written = set[int]()
        with self._changed:
            pending = self._unwritten
            self._unwritten = []
            groups = {member.number: self._groups.get(member.number, []) for member, _ in pending}
        pending = [(member, end) for member, end in pending if member in groups[member.number]]
        try:
            for member, end in pending:
                index = groups[member.number].index(member)
                lines.setdefault(member.number, []).append(_line((index, end)))
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                for number, member_lines in lines.items():
                    append_durably(self._path(number), member_lines)
                    written.add(number)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            with self._changed:
                self._unwritten[:0] = [item for item in pending if item[0].number not in written]
                for member, end in pending:
                    member.end = end if member.number in written and not end.is_part else member.end
                self._changed.notify_all()

    def _path(self, number: int) -> Path:
        return self._folder / f"prompt_{number:08d}"


def _line(indexed_end: tuple[int, Episode]) -> bytes:
    index, end = indexed_end
    packed = b64encode(pack_groups({index: [end]}))
    return b"%08x %s\n" % (crc32(packed), packed)


def append_durably(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines and sync them to disk. Raises OSError if the disk is full or not writable, after restoring the file:
    lines after a partial line could not be read."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise
    sync_folder(path.parent)


def read_ends(path: Path, say: LineWriter = print_line) -> Iterator[tuple[int, Episode]]:
    """Yield the lines of a group's file: index and result, or part, of a member. Truncate the file before the first
    line that is incomplete, because of a kill, or unreadable, so that new lines can follow."""
    content = path.read_bytes() if path.is_file() else b""
    readable = 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            total, packed = line.split()
            if int(total, 16) != crc32(packed):
                raise ValueError("its checksum is another one")
            ((index, (end,)),) = unpack_groups(b64decode(packed)).items()
        except ValueError as error:
            say(f"rollout: {path}: cut at byte {readable}, behind which it cannot be read ({error})")
            break
        readable += len(line)
        yield index, end
    if readable < len(content):
        os.truncate(path, readable)


def _are_finished(members: Iterable[Member]) -> bool:
    return not any(member.end.is_part for member in members)
