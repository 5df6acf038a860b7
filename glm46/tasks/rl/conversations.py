"""Conversations of the policy with the function of [rl.environment]: its replies, the turns behind them, and whole
conversations that go on in the background."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Literal

import numpy as np

from glm46.storage.chats.chat import chat_reply
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import FunctionPool, Reply
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests
from glm46.tasks.rl.rollout.records import NOTHING, Completion, EpisodeEnd, Request, SessionSample, seed_behind

Role = Literal["tool", "user"]


def asked_role(done: Completion, tokenizer: Tokenizer) -> Role | None:
    """The role that is asked to reply to the last turn of a conversation."""
    if done.finish != "stop":
        return None
    last, markers = done.tokens[-1], tokenizer.special
    return "tool" if last == markers["<|observation|>"] else "user" if last == markers["<|user|>"] else None


def behind_reply(
    request: Request, done: Completion, role: Role, reply: Reply | str, tokenizer: Tokenizer, *, thinking: bool
) -> EpisodeEnd | tuple[list[int], Request]:
    """The end of a conversation, or the tokens of a reply and the turn behind it, with the seed that a `Session` gives.

    Args:
        reply: a text says why there is none.
    """
    fault = f"rl.environment: {reply}" if isinstance(reply, str) else ""
    if isinstance(reply, Reply) and reply.text is not None:
        # The turn has the marker.
        tokens = chat_reply(tokenizer, [Message(role, reply.text)], thinking=thinking)[1:]
        whole, ends = [*done.tokens, *tokens], [0, *(end for _, end in done.replies), None]
        if (left := request.max_new_tokens - len(whole)) > 0:
            seed = reduce(seed_behind, (whole[start:end] for start, end in pairwise(ends)), request.seed)
            known = 0 if done.routes is None else len(done.routes)
            return tokens, Request([*request.prompt, *whole], seed, left, known)
        done = done._replace(finish="length")
    return EpisodeEnd([SessionSample(request.prompt, done)], fault)


@dataclass(frozen=True)
class Conversations:
    """Conversations that servers and a function continue in the background, also while the policy trains."""

    pool: FunctionPool
    """Has the function."""
    tokenizer: Tokenizer
    thinking: bool
    most_turns: int
    """Of the policy."""
    prompt: Callable[[int], Prompt]
    """Of a number."""
    answer: Callable[[Prompt, Completion], Answer]
    """Gives what the function gets of a prompt and its conversation."""
    threads: ThreadPoolExecutor
    """As many as calls of the function at once."""

    def begin(self, requests: OpenRequests, members: Sequence[Member]) -> None:
        """See `Begin`: each member is a conversation, which continues after its recorded turns."""
        begun = [_Conversation(self, member, requests) for member in members]
        new = [one for one in begun if not one.done.tokens]
        requests.ask([one.next_turn([], one.request) for one in new])  # equal prompts go to one server
        for one in begun:
            if one.done.tokens:
                self.threads.submit(one.reply)


class _Conversation:
    """One conversation of `Conversations`; one thread at a time works on it."""

    def __init__(self, of: Conversations, member: Member, requests: OpenRequests):
        self._of, self._member, self._requests, self.request = of, member, requests, member.request
        self._asked, self.done = OpenRequest(self.request), NOTHING
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
        of = self._of
        found: EpisodeEnd | tuple[list[int], Request] = EpisodeEnd([SessionSample(self.request.prompt, self.done)])
        try:
            role = asked_role(self.done, of.tokenizer)
            if self._is_open and role is not None and len(self.done.replies) + 1 < of.most_turns:
                (reply,) = of.pool.replies([of.answer(of.prompt(self._member.number), self.done)])
                found = behind_reply(self.request, self.done, role, reply, of.tokenizer, thinking=of.thinking)
        except BaseException as error:
            self._member.finish(error)
            raise
        if isinstance(found, EpisodeEnd):
            self._member.finish(found)
            return
        with self._lock:
            if self._is_open:
                self._requests.ask([self.next_turn(*found)])
