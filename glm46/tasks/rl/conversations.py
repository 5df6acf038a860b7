"""Conversations of the policy with the function of [rl.environment]."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from glm46.storage.chats.chat import chat_reply, opened_thought
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import FunctionPool, Reply
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.open_requests import OpenRequest, Requests
from glm46.tasks.rl.rollout.records import NOTHING, Completion, EpisodeEnd, Request, SessionSample, seed_behind

Role = Literal["tool", "user"]


def answer_of(
    prompt: Prompt, completion: Completion, tokenizer: Tokenizer, stop: frozenset[int], *, thinking: bool
) -> Answer:
    """A prompt and what was generated behind it, as functions get them; ``stop`` are the ids that end a turn."""
    is_finished, history, start = completion.finish == "stop", list[str](), 0
    decode, tokens = tokenizer.decode, completion.tokens
    # A thought that the prompt opens belongs to the turn: rewards read the same text in each chat format.
    opened = opened_thought(tokenizer, thinking)
    for first, end in completion.replies:
        last = first - (tokens[first - 1] in stop)  # a turn may be cut
        history += [opened + decode(tokens[start:last]), decode(tokens[first:end]).removesuffix(opened)]
        start = end
    text = opened + decode(tokens[start : len(tokens) - is_finished])
    return Answer(prompt.text, text, prompt.label, thinking, len(tokens), is_finished, tuple(history))


@dataclass(frozen=True)
class Conversations:
    """See `Environment`: a function replies to each turn."""

    pool: FunctionPool
    """Has the function."""
    tokenizer: Tokenizer
    stop: frozenset[int]
    """Ids that end a turn."""
    thinking: bool
    most_turns: int
    """Of the policy."""
    threads: ThreadPoolExecutor
    """As many as calls of the function at once."""
    replies_soon: ClassVar = True

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Environment.begin`."""
        begun = [_Conversation(self, prompt(member.number), member, requests) for member in members]
        new = [one for one in begun if not one.done.tokens]
        requests.ask([one.next_turn([], one.request) for one in new])  # equal prompts go to one server
        for one in begun:
            if one.done.tokens:
                self.threads.submit(one.reply)

    def close(self) -> None:
        """See `Environment.close`: calls that wait for a thread are given up before the processes end."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


class _Conversation:
    """One conversation of `Conversations`; one thread at a time works on it."""

    def __init__(self, of: Conversations, prompt: Prompt, member: Member, requests: Requests):
        self._of, self._prompt, self._member, self._requests = of, prompt, member, requests
        self.request, self.done = member.request, NOTHING
        self._asked = OpenRequest(self.request)
        for reply, turn in member.end.samples:
            self._extend(reply, turn)
        self._lock, self._is_open, member.cancel = threading.Lock(), True, self._cancel

    def _cancel(self) -> None:
        with self._lock:
            self._is_open = False
            self._requests.drop(self._asked)

    def next_turn(self, reply: list[int], request: Request) -> OpenRequest:
        """The turn behind a reply."""
        self._asked = OpenRequest(request, partial(self._end_turn, reply))
        return self._asked

    def _end_turn(self, reply: list[int], turn: Completion) -> None:
        """Go on behind a turn; in a thread of the engine, which does not wait."""
        self._member.note(SessionSample(reply, self._extend(reply, turn)))
        self._of.threads.submit(self.reply)

    def _extend(self, reply: list[int], turn: Completion) -> Completion:
        """Add a turn; returns it with the routes alone of what the turns before it were not fed."""
        done, routes = self.done, turn.routes
        if routes is not None and done.routes is not None:
            fed = len(self.request.prompt) + len(done.tokens) + len(reply) + len(turn.tokens) - 1
            turn = turn._replace(routes=routes[max(len(routes) - fed + len(done.routes), 0) :])
            routes = np.concatenate([done.routes, turn.routes])
        self.done = done.extended(reply, turn)._replace(routes=routes)
        return turn

    def reply(self) -> None:
        """Have the function reply to the last turn, and ask for the next one, or end."""
        try:
            found = self._behind()
        except BaseException as error:
            self._member.finish(error)
            raise
        if isinstance(found, EpisodeEnd):
            self._member.finish(found)
            return
        with self._lock:
            if self._is_open:
                self._requests.ask([found])

    def _behind(self) -> EpisodeEnd | OpenRequest:
        """The next turn, with the seed that a `Session` gives, or the end."""
        of, done, fault, role = self._of, self.done, "", self._asked_role()
        if self._is_open and role is not None and len(done.replies) + 1 < of.most_turns:
            answer = answer_of(self._prompt, done, of.tokenizer, of.stop, thinking=of.thinking)
            (reply,) = of.pool.replies([answer])
            fault = f"rl.environment: {reply}" if isinstance(reply, str) else ""
            if isinstance(reply, Reply) and reply.text is not None:
                # The turn has the marker.
                tokens = chat_reply(of.tokenizer, [Message(role, reply.text)], thinking=of.thinking)[1:]
                whole, ends = [*done.tokens, *tokens], [0, *(end for _, end in done.replies), None]
                if (left := self.request.max_new_tokens - len(whole)) > 0:
                    seed = reduce(seed_behind, (whole[start:end] for start, end in pairwise(ends)), self.request.seed)
                    known = 0 if done.routes is None else len(done.routes)
                    return self.next_turn(tokens, Request([*self.request.prompt, *whole], seed, left, known))
                done = done._replace(finish="length")
        return EpisodeEnd([SessionSample(self.request.prompt, done)], fault)

    def _asked_role(self) -> Role | None:
        """The role that is asked to reply to the last turn."""
        if self.done.finish != "stop":
            return None
        last, markers = self.done.tokens[-1], self._of.tokenizer.special
        return "tool" if last == markers["<|observation|>"] else "user" if last == markers["<|user|>"] else None
