"""Generates groups of samples on servers in a thread, while the caller trains, and through updates of the weights."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.engine.reliability.run_lock import writing
from glm46.files.durable import replace_durably
from glm46.tasks.rl.rollout.first_rank import pack, unpack
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules, VersionSpan, appended_routes

Generate = Callable[
    [Sequence[Request], SamplingRules, threading.Event, Callable[[int, Completion], None]], list[Completion]
]
"""`ServerPool.generate`: requests, rules, an event that ends it early, and what takes each finished completion."""

NOTHING = Completion([], [], "abort", [], None)
"""A sample of which no token is generated yet."""
_TICK_SECONDS = 0.5


@dataclass
class Group:
    """The samples of one prompt."""

    number: int
    """Of the prompt, counted over the run."""
    requests: list[Request]
    completions: list[Completion]
    """What is generated so far, with finish "abort" if that is not all."""
    finished: set[int]
    """Indices of the samples that are generated to their end or given up."""

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == len(self.requests)


class BackgroundGeneration:
    """Groups that servers generate, from being added to being taken. For the process that talks to the servers.

    A group that is generated wholly or in part is a file of `folder`, so that a kill loses no finished group.

    Args:
        generate: generates on all servers; one call at a time.
        folder: of the files; those of groups that `add` names are read again.
        goes_on: samples go on where a halt or a stop has ended them, with other samples than without it. Otherwise they
            are generated anew, so that the same weights give the same samples.
    """

    def __init__(self, generate: Generate, rules: SamplingRules, folder: Path, *, goes_on: bool):
        self._generate, self._rules, self._folder, self._goes_on = generate, rules, folder, goes_on
        self._groups: dict[int, Group] = {}
        self._changed = threading.Condition()
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._under_way: set[int] = set()
        self._error: BaseException | None = None

    def add(self, number: int, requests: list[Request], since: int) -> None:
        """Generate a group from the next `start` on, but for samples that a file has.

        Args:
            since: oldest version of the weights whose tokens are kept. If samples do not go on, the only one.
        """
        path = self._path(number)
        completions = unpack(path.read_bytes()) if path.is_file() else [NOTHING] * len(requests)
        completions = [one if self._is_kept(one, since) else NOTHING for one in completions]
        group = Group(number, requests, completions, set())
        group.finished = {i for i, one in enumerate(completions) if one.finish != "abort"}
        with self._changed:
            self._groups[number] = group

    def _is_kept(self, one: Completion, since: int) -> bool:
        versions = {span.version for span in one.spans}
        return min(versions, default=since) >= since if self._goes_on else versions == {since}

    def keep(self, numbers: Iterable[int], *, before: int) -> None:
        """Forget all other groups, and remove the files of those among the prompts before a number: prompts from there
        on will be handed out. Not while it generates them."""
        kept = set(numbers)
        with self._changed:
            self._groups = {number: group for number, group in self._groups.items() if number in kept}
        # By their names: a file that is being written has another one.
        for path in self._folder.glob("prompt_*.npz"):
            number = int(path.stem.partition("_")[2])
            if number < before and number not in kept:
                path.unlink()

    def start(self) -> None:
        """Go on with all groups that are not finished, where they stand; each new token is of the weights that the
        servers have now."""
        with self._changed:
            waiting = {number for number, group in self._groups.items() if not group.is_finished}
        if self._thread is not None and waiting <= self._under_way:
            return
        self.halt()
        self._halt.clear()
        self._under_way = waiting
        self._thread = threading.Thread(target=self._run, args=(sorted(waiting),), daemon=True)
        self._thread.start()

    def halt(self) -> bool:
        """End all requests and keep their tokens; whether it was generating. Returns within the deadlines of the
        servers."""
        if self._thread is None:
            return False
        self._halt.set()
        self._thread.join()
        self._thread = None
        self._under_way = set()
        return True

    def take(self, count: int, due: set[int], is_stopped: Callable[[], bool]) -> list[Group] | None:
        """Take this many finished groups, those that are due first, then by number; waits for them. None if a stop was
        requested.

        Args:
            due: numbers of groups that must be among them, at most `count`.

        Raises:
            UserError: no server is left, all refuse a request, or a group cannot be written.
        """

        def ready() -> list[Group]:
            finished = [self._groups[number] for number in sorted(self._groups) if self._groups[number].is_finished]
            if not due <= {group.number for group in finished}:
                return []
            return sorted(finished, key=lambda group: (group.number not in due, group.number))[:count]

        with self._changed:
            while len(found := ready()) < count and self._error is None:
                if is_stopped():
                    return None
                self._changed.wait(_TICK_SECONDS)
            if len(found) < count:
                raise self._error
            for group in found:
                del self._groups[group.number]
        return found

    def _run(self, numbers: Sequence[int]) -> None:
        groups = [self._groups[number] for number in numbers]
        places = [(group, i) for group in groups for i in range(len(group.requests)) if i not in group.finished]

        def finish(index: int, completion: Completion) -> None:
            group, i = places[index]
            with self._changed:
                group.completions[i] = continued(group.completions[i], completion)
                if len(group.finished) + 1 == len(group.requests):
                    self._write(group)  # before `take` sees it, which would hide an error
                group.finished.add(i)
                self._changed.notify_all()

        try:
            requests = [rest(group.requests[i], group.completions[i]) for group, i in places]
            try:
                for index, completion in enumerate(self._generate(requests, self._rules, self._halt, finish)):
                    group, i = places[index]
                    if i in group.finished:
                        continue
                    if len(completion.tokens) == requests[index].max_new_tokens:  # halted behind its last token
                        finish(index, completion._replace(finish="length"))
                    elif self._goes_on:
                        group.completions[i] = continued(group.completions[i], completion)
            finally:
                for group in groups:
                    if not group.is_finished and any(one.tokens for one in group.completions):
                        self._write(group)
        except BaseException as error:  # raised by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    def _write(self, group: Group) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_durably(self._path(group.number), [pack(group.completions)])

    def _path(self, number: int) -> Path:
        return self._folder / f"prompt_{number:08d}.npz"


def rest(request: Request, generated: Completion) -> Request:
    """The rest of a request: its prompt grows by the tokens that are generated, and its seed changes with them, so that
    the samples of a position are not used twice."""
    count, known = len(generated.tokens), 0 if generated.routes is None else len(generated.routes)
    return Request(request.prompt + generated.tokens, request.seed + count, request.max_new_tokens - count, known)


def continued(first: Completion, then: Completion) -> Completion:
    """One completion of two parts, the second of which was generated after the first."""
    at = len(first.tokens)
    spans = [*first.spans, *(VersionSpan(at + start, version) for start, version in then.spans)]
    spans = [span for i, span in enumerate(spans) if i == 0 or span.version != spans[i - 1].version]
    return Completion(
        first.tokens + then.tokens,
        first.logprobs + then.logprobs,
        then.finish,
        spans,
        appended_routes(first.routes, then.routes if then.tokens else None),
    )
