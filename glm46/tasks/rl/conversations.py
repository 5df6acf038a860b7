"""Conversations of the policy with the function of [rl.environment]."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from glm46.storage.chats.chat import chat_reply, opened_thought
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.prompts import Prompt
from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.function_pool import FunctionPool
from glm46.tasks.rl.rollout.background import Member
from glm46.tasks.rl.rollout.open_requests import OpenRequest, Requests
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Episode, Request, seed_behind

Role = Literal["tool", "user"]


def answer_of(
    prompt: Prompt, completion: Completion, tokenizer: Tokenizer, stop: frozenset[int], *, thinking: bool
) -> Answer:
    """Convert a prompt and its completion to the form that reward functions get; ``stop`` are ids that end a turn."""
    is_finished = completion.finish == "stop"
    history = list[str]()
    start = 0
    decode = tokenizer.decode
    tokens = completion.tokens
    # A thought that the prompt opens belongs to the turn: rewards read the same text in each chat format.
    opened = opened_thought(tokenizer, thinking)
    for first, end in completion.replies:
        last = first - (tokens[first - 1] in stop)  # a turn may be truncated
        history += [opened + decode(tokens[start:last]), decode(tokens[first:end]).removesuffix(opened)]
        start = end
    text = opened + decode(tokens[start : len(tokens) - is_finished])
    return Answer(prompt.text, text, prompt.label, thinking, len(tokens), is_finished, tuple(history))


@dataclass(frozen=True)
class Conversations:
    """An `Environment` in which a function replies to each turn."""

    pool: FunctionPool
    """Calls the function."""
    tokenizer: Tokenizer
    stop: frozenset[int]
    """Ids that end a turn."""
    thinking: bool
    most_turns: int
    """Most turns of the policy in a conversation."""
    threads: ThreadPoolExecutor
    """One thread for each concurrent call of the function."""
    replies_soon: ClassVar = True

    def begin(self, prompt: Callable[[int], Prompt], requests: Requests, members: Sequence[Member]) -> None:
        """See `Environment.begin`."""
        conversations = [_Conversation(self, prompt(member.number), member, requests) for member in members]
        new = [talk for talk in conversations if not talk.done.tokens]
        # Equal prompts go to one server.
        requests.ask([talk.next_turn([], talk.request) for talk in new])
        for talk in conversations:
            if talk.done.tokens:
                self.threads.submit(talk.reply)

    def close(self) -> None:
        """See `Environment.close`. Cancels calls that wait for a thread before it ends the processes."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.pool.close()


class _Conversation:
    """One conversation of `Conversations`; one thread at a time works on it."""

    def __init__(self, environment: Conversations, prompt: Prompt, member: Member, requests: Requests):
        self._environment = environment
        self._prompt = prompt
        self._member = member
        self._requests = requests
        self.request = member.request
        self.done = NOTHING
        self._asked = OpenRequest(self.request)
        for turn in member.end.samples:
            self._extend([*turn.prompt], turn)
        self._lock = threading.Lock()
        self._is_open = True
        member.cancel = self._cancel

    def _cancel(self) -> None:
        with self._lock:
            self._is_open = False
            self._requests.drop(self._asked)

    def next_turn(self, reply: list[int], request: Request) -> OpenRequest:
        """Create the request for the turn after a reply."""
        self._asked = OpenRequest(request, partial(self._end_turn, reply))
        return self._asked

    def _end_turn(self, reply: list[int], turn: Completion) -> None:
        """Continue after a turn. Runs in a thread of the engine, so the function is called in another one."""
        self._member.note(self._extend(reply, turn)._replace(prompt=reply))
        self._environment.threads.submit(self.reply)

    def _extend(self, reply: list[int], turn: Completion) -> Completion:
        """Add a reply and a turn. Returns the turn, with its routes limited to tokens without routes from earlier
        turns."""
        done = self.done
        routes = turn.routes
        if routes is not None and done.routes is not None:
            fed = len(self.request.prompt) + len(done.tokens) + len(reply) + len(turn.tokens) - 1
            turn = turn._replace(routes=routes[max(len(routes) - fed + len(done.routes), 0) :])
            routes = np.concatenate([done.routes, turn.routes])
        self.done = done.extended(reply, turn)._replace(routes=routes)
        return turn

    def reply(self) -> None:
        """Call the function on the last turn, then request the next turn or finish."""
        try:
            outcome = self._continue()
        except BaseException as error:
            self._member.finish(error)
            raise
        if isinstance(outcome, Episode):
            self._member.finish(outcome)
            return
        with self._lock:
            if self._is_open:
                self._requests.ask([outcome])

    def _continue(self) -> Episode | OpenRequest:
        """Return the request for the next turn, or the end of the episode."""
        environment = self._environment
        role = self._next_role()
        if not self._is_open or role is None or len(self.done.replies) + 1 >= environment.most_turns:
            return self._end()
        answer = answer_of(
            self._prompt, self.done, environment.tokenizer, environment.stop, thinking=environment.thinking
        )
        reply, failure = environment.pool.reply(answer)
        if reply is None:
            return self._end(f"rl.environment: {failure}" if failure else "")
        messages = [Message(role, reply)]
        # Without the first token, a marker that the turn already ends with.
        tokens = chat_reply(environment.tokenizer, messages, thinking=environment.thinking)[1:]
        remaining = self.request.max_new_tokens - len(self.done.tokens) - len(tokens)
        if remaining <= 0:
            self.done = self.done._replace(finish="length")
            return self._end()
        return self.next_turn(tokens, self._request_after(tokens, remaining))

    def _end(self, fault: str = "") -> Episode:
        return Episode([self.done._replace(prompt=self.request.prompt)], fault)

    def _request_after(self, reply: list[int], max_new_tokens: int) -> Request:
        """Return the request for the turn after a reply. Its seed is the one that a `Session` would compute."""
        tokens = [*self.done.tokens, *reply]
        ends = [0, *(end for _, end in self.done.replies), len(tokens)]
        seed = self.request.seed
        for start, end in pairwise(ends):
            seed = seed_behind(seed, tokens[start:end])
        routed = 0 if self.done.routes is None else len(self.done.routes)
        return Request([*self.request.prompt, *tokens], seed, max_new_tokens, routed)

    def _next_role(self) -> Role | None:
        """Return the role that replies to the last turn; None if the turn does not ask for a reply."""
        if self.done.finish != "stop":
            return None
        last = self.done.tokens[-1]
        markers = self._environment.tokenizer.special
        return "tool" if last == markers["<|observation|>"] else "user" if last == markers["<|user|>"] else None
