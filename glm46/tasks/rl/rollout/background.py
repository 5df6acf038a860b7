"""Generates groups of samples or episodes on servers, while the caller trains, and through updates of the weights."""

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
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests
from glm46.tasks.rl.rollout.records import (
    Completion,
    EpisodeEnd,
    Request,
    SessionSample,
    pack_groups,
    unpack_groups,
)

_TICK_SECONDS = 0.5


@dataclass(eq=False)
class Member:
    """A sample or an episode of a group."""

    number: int
    """Of the prompt, counted over the run."""
    request: Request
    end: EpisodeEnd
    """Its result, or the part to continue from."""
    found: EpisodeEnd | None = None
    """Its result, which may not be on the disk yet."""
    finish: Callable[[EpisodeEnd | BaseException], None] = lambda end: None
    """Takes the result, or an error that ends the run; in any thread, without a wait."""
    note: Callable[[SessionSample], None] = lambda turn: None
    """Takes a turn of an episode, which no kill loses soon after; in any thread, without a wait. The turns are the
    samples of the part that another start continues from."""
    cancel: Callable[[], object] | None = None
    """Ends it without a result. None: it has not begun."""
    parts: Callable[[], list[SessionSample]] = lambda: []
    """Gives the tokens so far of a sample without turns."""


Begin = Callable[[OpenRequests, Sequence[Member]], None]
"""Begins to generate members of one group, and sets what ends them."""


def begin_samples(requests: OpenRequests, members: Sequence[Member]) -> None:
    """See `Begin`: each member is one request."""

    def begin(member: Member) -> OpenRequest:
        def sample(completion: Completion) -> list[SessionSample]:
            return [SessionSample(member.request.prompt, completion)]

        asked = OpenRequest(
            member.request, lambda found: member.finish(EpisodeEnd(sample(found))), member.end.completion
        )
        member.cancel = partial(requests.drop, asked)
        member.parts = lambda: sample(asked.generated) if asked.generated.tokens else []
        return asked

    requests.ask([begin(member) for member in members])


class BackgroundGeneration:
    """Groups that servers generate, from being added to being taken. For the process that talks to the servers.

    What is finished of a group, turns of its episodes, and what a halt has cut of its samples is appended to a file of
    `folder` by a thread of its own, so that a kill does not lose it: all that comes while it waits for the disk is
    written at once. Groups are taken when they are on the disk.

    Args:
        folder: of the files; those of groups that `add` names are read again.
        say: takes a line for the log.
    """

    def __init__(
        self, requests: OpenRequests, folder: Path, begin: Begin = begin_samples, say: Callable[[str], None] = print
    ):
        self._requests, self._folder, self._begin, self._say = requests, folder, begin, say
        self._has_turns = begin is not begin_samples
        self._groups: dict[int, list[Member]] = {}
        self._unwritten: list[tuple[Member, EpisodeEnd]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        requests.failed = self._notify

    def _notify(self) -> None:
        with self._changed:
            self._error = self._error or self._requests.error
            self._changed.notify_all()

    def add(self, number: int, requests: list[Request], since: int) -> None:
        """Generate a group from the next `start` on, but for what a file has.

        Args:
            since: oldest version of the weights whose tokens are kept. If samples do not go on, the only one.
        """
        with self._changed:
            self._cancel(number)
        self._writer.submit(self._write).result()
        nothing = EpisodeEnd([], is_part=True)
        path, read = self._path(number), [nothing] * len(requests)
        for index, end in read_ends(path, self._say):
            if end.fault:
                continue  # it is tried again, behind its turns
            before = read[index].samples if self._has_turns and end.is_part else []
            read[index] = end._replace(samples=[*before, *end.samples])
        ends = [end if self._is_kept(end, since) else nothing for end in read]
        if any(end is not of_file for end, of_file in zip(ends, read, strict=True)):  # it must not be read again
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

    def _is_kept(self, end: EpisodeEnd, since: int) -> bool:
        versions = {span.version for sample in end.samples for span in sample.completion.spans}
        return min(versions, default=since) >= since if self._requests.goes_on else versions == {since}

    def _cancel(self, number: int) -> None:
        for member in self._groups.pop(number, ()):
            if member.cancel is not None and member.end.is_part:
                member.cancel()

    def keep(self, numbers: Iterable[int], *, before: int) -> None:
        """End and forget all other groups, and remove the files of those among the prompts before a number: prompts
        from there on will be handed out."""
        kept = set(numbers)
        with self._changed:
            for number in self._groups.keys() - kept:
                self._cancel(number)
        self._writer.submit(self._write).result()  # it creates none of their files any more
        for path in self._folder.glob("prompt_*"):  # also what a kill has left of a new one
            number = int(path.name.removeprefix("prompt_").partition(".")[0])
            if number < before and number not in kept:
                path.unlink()

    def start(self) -> None:
        """Go on with all groups that are not finished, where they stand."""
        for number in sorted(self._groups):
            new = [member for member in self._groups[number] if member.end.is_part and member.cancel is None]
            if new:
                self._begin(self._requests, new)
        self._requests.start()

    def halt(self) -> bool:
        """See `OpenRequests.halt`."""
        if not self._requests.halt():
            return False
        self._writer.submit(self._write).result()
        for number, members in {} if self._has_turns else self._groups.items():
            ends = [one.found or one.end._replace(samples=one.parts() or one.end.samples) for one in members]
            if not _are_finished(members) and any(end.samples for end in ends):
                with writing(self._folder):  # the whole file: with each part behind the one before it would grow
                    replace_durably(self._path(number), map(_line, enumerate(ends)))
        return True

    def unfinished(self, numbers: Iterable[int]) -> int:
        """Number of these groups that are not finished."""
        with self._changed:
            return sum(not _are_finished(self._groups[number]) for number in numbers)

    def take(
        self, count: int, due: set[int], is_stopped: Callable[[], bool], *, waits: bool = True
    ) -> dict[int, list[EpisodeEnd]] | None:
        """Take this many finished groups, those that are due first, then by number; waits for them. None if a stop was
        requested.

        Args:
            due: numbers of groups, at most `count`.
            waits: all that are due must be among them.

        Raises:
            UserError: no server is left, all refuse a request, or a group cannot be written.
        """

        def ready() -> list[int]:
            finished = [number for number, members in self._groups.items() if _are_finished(members)]
            if waits and not due <= set(finished):
                return []
            return sorted(finished, key=lambda number: (number not in due, number))[:count]

        with self._changed:
            while len(found := ready()) < count and self._error is None:
                if is_stopped():
                    return None
                self._changed.wait(_TICK_SECONDS)
            if len(found) < count and self._error is not None:
                raise self._error
            return {number: [member.end for member in self._groups.pop(number)] for number in found}

    def _finish(self, member: Member, end: EpisodeEnd | BaseException) -> None:
        with self._changed:
            members = self._groups.get(member.number, [])
            if isinstance(end, BaseException):
                self._error = self._error or end
                self._changed.notify_all()
            elif member in members:
                member.found = end
                of = [member] if self._has_turns else members  # an episode may take an hour
                done = [(one, one.found) for one in of if one.found is not None]
                self._unwritten += done if len(done) == len(of) else []
        self._writer.submit(self._write)

    def _note(self, member: Member, turn: SessionSample) -> None:
        with self._changed:
            self._unwritten.append((member, EpisodeEnd([turn], is_part=True)))
        self._writer.submit(self._write)

    def _write(self) -> None:
        """Write all that is not written. Errors are raised by `take`; what they left is written by the next call, and
        first: a conversation without one of its turns would be another one."""
        lines, written = dict[int, list[bytes]](), set[int]()
        with self._changed:
            some, self._unwritten = self._unwritten, []
            groups = {member.number: self._groups.get(member.number, []) for member, _ in some}
        some = [(member, end) for member, end in some if member in groups[member.number]]
        try:
            for member, end in some:
                index = groups[member.number].index(member)
                lines.setdefault(member.number, []).append(_line((index, end)))
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                for number, of in lines.items():
                    append_durably(self._path(number), of)
                    written.add(number)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            with self._changed:
                self._unwritten[:0] = [one for one in some if one[0].number not in written]
                for member, end in some:
                    member.end = end if member.number in written and not end.is_part else member.end
                self._changed.notify_all()

    def _path(self, number: int) -> Path:
        return self._folder / f"prompt_{number:08d}"


def _line(of_member: tuple[int, EpisodeEnd]) -> bytes:
    index, end = of_member
    packed = b64encode(pack_groups({index: [end]}))
    return b"%08x %s\n" % (crc32(packed), packed)


def append_durably(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines; they are on the disk when this returns. Raises OSError if the disk is full or not writable;
    then the file is as it was: behind half a line no other could be read."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            os.truncate(path, before)
        raise
    sync_folder(path.parent)


def read_ends(path: Path, say: Callable[[str], None] = print) -> Iterator[tuple[int, EpisodeEnd]]:
    """The lines of a file of a group: a member's index and its result, or a part. One that a kill has cut is removed,
    so that others can follow, and so are all from one on that cannot be read."""
    content, readable = path.read_bytes() if path.is_file() else b"", 0
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
