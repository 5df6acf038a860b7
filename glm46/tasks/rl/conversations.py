"""Conversations of the policy with the function of [rl.environment]: its replies, the turns behind them, and whole
conversations that go on in the background."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from glm46.storage.chats.chat import chat_reply
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.open_requests import OpenRequest, OpenRequests
from glm46.tasks.rl.rollout.records import NOTHING, Completion, EpisodeEnd, Request, SessionSample


def asked_role(done: Completion, tokenizer: Tokenizer) -> Literal["tool", "user"] | None:
    """The role that is asked to reply to the last turn of a conversation."""
    if done.finish != "stop":
        return None
    last, markers = done.tokens[-1], tokenizer.special
    return "tool" if last == markers["<|observation|>"] else "user" if last == markers["<|user|>"] else None


def turn_behind(
    request: Request, done: Completion, reply: Message, tokenizer: Tokenizer, *, thinking: bool
) -> tuple[list[int], Request] | None:
    """The tokens of a reply, and the request of the turn behind it; None if there is no room."""
    tokens = chat_reply(tokenizer, [reply], thinking=thinking)[1:]  # the turn has the marker
    left = request.max_new_tokens - len(done.tokens) - len(tokens)
    return (tokens, Request([*request.prompt, *done.tokens, *tokens], request.seed, left)) if left > 0 else None


@dataclass(frozen=True)
class Conversations:
    """Conversations that servers and a function go on with by themselves, also while the policy trains."""

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
        """See `Begin`: each member is a conversation, which goes on behind its recorded turns."""
        begun = [_Conversation(self, member, requests) for member in members]
        new = [one for one in begun if not one.done.tokens]
        requests.ask([one.next_turn([], one.request) for one in new])  # equal prompts go to one server
        for one in begun:
            if one.done.tokens:
                self.threads.submit(one.reply)


class _Conversation:
    """See `Conversations`; one thread after another goes on with it."""

    def __init__(self, of: Conversations, member: Member, requests: OpenRequests):
        self._of, self._member, self._requests, self.request = of, member, requests, member.request
        self._prompt, self._asked = of.prompt(member.number), OpenRequest(self.request)
        self.done = NOTHING
        """Its whole turns."""
        for reply, turn in member.end.samples:
            self.done = self.done.extended(reply, turn)
        self._lock, self._is_open = threading.Lock(), True
        member.cancel = self._cancel

    def _sample(self) -> SessionSample:
        return SessionSample(self.request.prompt, self.done)

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
        self.done = self.done.extended(reply, turn)
        self._member.note(SessionSample(reply, turn))
        self._of.threads.submit(self.reply)

    def reply(self) -> None:
        """Have the function reply to the last turn, and ask for the next one, or end."""
        try:
            if self._is_open and (end := self._end_or_ask()) is not None:
                self._member.finish(end)
        except BaseException as error:
            self._member.finish(error)
            raise

    def _end_or_ask(self) -> EpisodeEnd | None:
        of, text = self._of, None
        role = asked_role(self.done, of.tokenizer)
        if role is not None and len(self.done.replies) + 1 < of.most_turns:
            (reply,) = of.pool.replies([of.answer(self._prompt, self.done)])
            if isinstance(reply, str):
                return EpisodeEnd([self._sample()], f"rl.environment: {reply}")
            text = reply.text
        if role is None or text is None:
            return EpisodeEnd([self._sample()])
        turn = turn_behind(self.request, self.done, Message(role, text), of.tokenizer, thinking=of.thinking)
        if turn is None:
            self.done = self.done._replace(finish="length")
            return EpisodeEnd([self._sample()])
        with self._lock:
            if self._is_open:
                self._requests.ask([self.next_turn(*turn)])
        return None
