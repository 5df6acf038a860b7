"""Requests that servers answer as they come, each to its end: through halts and updates of the weights."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glm46.tasks.rl.rollout.dispatch import Inbox
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, SamplingRules, VersionSpan, appended_routes

Serve = Callable[
    [Sequence[Request], SamplingRules, threading.Event, Callable[[int, Completion], None], Inbox], list[Completion]
]
"""`ServerPool.generate`."""


@dataclass(eq=False)
class OpenRequest:
    """A request until it is answered."""

    request: Request
    done: Callable[[Completion], object]
    """Gets the completion, in a thread of the engine; also one that was aborted at its deadline."""
    generated: Completion = NOTHING
    """At the last halt."""


class Requests(Protocol):
    """Takes requests of conversations and of samples."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """Answer requests."""
        ...

    def drop(self, asked: OpenRequest) -> None:
        """End a request without an answer."""
        ...


class OpenRequests:
    """See `Requests`. Methods may be called from any thread, `start` and `halt` from one at a time.

    Args:
        serve: generates on all servers; one call at a time.
        failed: is called when `error` is set.
        goes_on: requests go on where a halt has ended them, with other samples than without it. Otherwise they are
            generated anew, so that the same weights give the same samples.
    """

    def __init__(
        self, serve: Serve, rules: SamplingRules, failed: Callable[[], None] = lambda: None, *, goes_on: bool = True
    ):
        self._serve, self._rules, self._failed, self._goes_on = serve, rules, failed, goes_on
        self._open: dict[OpenRequest, None] = {}
        self._sent: list[OpenRequest] = []
        self._lock = threading.Lock()
        self._halt, self._inbox = threading.Event(), Inbox()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        """Of the servers: nothing is generated any more."""

    def ask(self, asked: Sequence[OpenRequest]) -> None:
        """See `Requests.ask`; while it is halted they wait."""
        with self._lock:
            self._open |= dict.fromkeys(asked)
            if self._thread is not None:
                self._sent += asked
                self._inbox.put(("", [rest(one.request, one.generated) for one in asked]))

    def drop(self, asked: OpenRequest) -> None:
        """See `Requests.drop`."""
        with self._lock:
            is_open = self._open.pop(asked, self) is None
            if is_open and self._thread is not None:
                self._inbox.put(("", self._sent.index(asked)))

    def start(self) -> None:
        """Generate; each new token is of the weights that the servers have now."""
        with self._lock:
            if self._thread is not None:
                return
            self._halt.clear()
            self._inbox, self._sent = Inbox(), list(self._open)
            requests = [rest(one.request, one.generated) for one in self._sent]
            self._thread = threading.Thread(target=self._run, args=(requests,), daemon=True)
            self._thread.start()

    def halt(self) -> bool:
        """End all calls and keep their tokens; whether it was generating. Returns within the deadlines of the
        servers."""
        if self._thread is None:
            return False
        self._halt.set()
        self._inbox.put(("", []))
        self._thread.join()
        with self._lock:
            self._thread = None
        return True

    def _run(self, requests: Sequence[Request]) -> None:
        sent = self._sent
        try:
            found = self._serve(requests, self._rules, self._halt, lambda i, one: self._end(sent[i], one), self._inbox)
        except BaseException as error:
            self.error = error
            self._failed()
            if not isinstance(error, Exception):
                raise
            return
        for one, completion in zip(sent, found, strict=False):  # others came behind the halt
            if len(completion.tokens) == rest(one.request, one.generated).max_new_tokens:  # halted behind its last one
                self._end(one, completion._replace(finish="length"))
            elif self._goes_on and one in self._open:
                one.generated = continued(one.generated, completion)

    def _end(self, one: OpenRequest, completion: Completion) -> None:
        with self._lock:
            is_open = self._open.pop(one, self) is None
        if is_open:
            one.generated = continued(one.generated, completion)
            one.done(one.generated)


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
