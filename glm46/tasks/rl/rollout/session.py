"""Records a conversation of the policy with any program: exact tokens of each turn, and samples in which each generated
token is trained once."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from glm46.storage.chats.chat import chat_prompt, chat_reply, opened_thought
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import Message, ToolCall
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.rollout.records import Completion, Request, SessionSample, seed_behind

Key = tuple[str, ...]
"""A message as it is compared: equal keys read alike."""


class NoRoom(ValueError):
    """A request that the limits of its episode leave no room for; the episode is truncated."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A request for one answer of the policy."""

    parent: "AnsweredTurn | None"
    """The turn whose tokens its prompt begins with; None: the prompt was rendered whole."""
    asked: tuple[Key, ...]
    """The messages of the request."""
    tools: tuple[Mapping, ...]
    new: list[int]
    """The end of its prompt, behind the tokens of the parent but their marker: with all prompts whole, the memory of an
    episode would grow with the square of its length."""
    length: int
    """Tokens of its prompt."""
    room: int
    """Tokens that its conversation leaves for it."""
    most_tokens: int
    """Of its completion: the room, or the limit that its request states."""
    seed: int
    """Of its request: a hash of the sample's seed, the tokens of its prompt, and the limit."""


@dataclass(frozen=True, eq=False)
class AnsweredTurn:
    """A turn that is generated."""

    turn: Turn
    completion: Completion
    answer: Message
    keys: tuple[Key, ...]
    """Of the messages and the answer."""


class Session:
    """The turns of an episode.

    A turn continues the deepest one whose messages, its answer included, its request begins with: the prompt is the
    exact tokens of that turn and what the format writes for the new messages. Where the format would write the earlier
    tokens otherwise (a new user message behind a thought, an edited history, other tools), the request is rendered
    whole and begins another sample.

    Args:
        first: prompt of the row, seed, and the longest completion. No sample is longer than both together.
        keeps_thoughts: past thoughts stay in prompts.
        recorded: turns that `note` got at an earlier start: one with the same seed is not generated again.
        note: gets each turn that is generated, with its seed in the place of the prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, first: Request, *, thinking: bool, most_turns: int, keeps_thoughts: bool = False,
        recorded: Sequence[SessionSample] = (), note: Callable[[SessionSample], None] = lambda turn: None,
    ):  # fmt: skip
        self._tokenizer, self._thinking, self._keeps = tokenizer, thinking, keeps_thoughts
        self._first, self._most_turns = first, most_turns
        self._note, self._recorded = note, {seed: completion for (seed,), completion in recorded}
        self.turns: list[Turn] = []
        self.answered: dict[Turn, AnsweredTurn] = {}
        """Those that are generated, in the order of their ends."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping], most_tokens: int | None = None) -> Turn:
        """The turn that answers messages; for the same request, or one whose prompt has the same tokens, the same turn,
        generated or not. With another limit that binds it is another request.

        Raises:
            NoRoom: the episode has had its turns, or the prompt leaves no room for a token.
        """
        keys, tools = tuple(map(self._key, messages)), tuple(tools)
        for turn in self.turns:
            is_same = len(turn.asked) == len(keys) and turn.asked == keys and turn.tools == tools
            if is_same and turn.most_tokens == min(turn.room, most_tokens or turn.room):
                return turn
        before = self._parent(keys, tools)
        if before is not None:
            keys = before.keys + keys[len(before.keys) :]  # the same texts, not others for each turn
        parent, new, length = self._prompt(before, messages, tools)
        room = len(self._first.prompt) + self._first.max_new_tokens - length
        if room < 1:
            row, own = len(self._first.prompt), self._first.max_new_tokens
            raise NoRoom(
                f"the prompt has {length} tokens, and a conversation has at most {row + own}: {row} of the row's "
                f"prompt and {own} of rollout.max_new_tokens, in which the program's system prompt and tools count "
                f"too; raise rollout.max_new_tokens above {length - row}, within training.seq_len"
            )
        most = min(room, most_tokens or room)
        seed = self._seed(parent, new if most == room else [*new, -most])
        for turn in self.turns:
            if (turn.seed, turn.tools, turn.most_tokens) == (seed, tools, most):  # of other messages that read alike
                return turn
        if len(self.turns) == self._most_turns:
            raise NoRoom(f"this episode has had its {self._most_turns} turns (rl.environment.max_turns)")
        turn = Turn(parent, keys, tools, new, length, room, most, seed)
        self.turns.append(turn)
        known = self._recorded.pop(turn.seed, None)
        if known is not None and (known.finish == "stop" or len(known.tokens) == turn.most_tokens):
            self._record(turn, known)
        return turn

    def request(self, turn: Turn) -> Request:
        """The request that generates a turn."""
        parts, at = [turn.new], turn.parent
        while at is not None:
            parts += [_without_marker(at.completion), at.turn.new]
            at = at.turn.parent
        return Request([*chain.from_iterable(reversed(parts))], turn.seed, turn.most_tokens, _routed(turn.parent))

    def _seed(self, parent: AnsweredTurn | None, new: list[int]) -> int:
        if parent is not None:
            return seed_behind(parent.turn.seed, [*_without_marker(parent.completion), *new])
        return self._first.seed if new == self._first.prompt else seed_behind(self._first.seed, new)

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping]) -> int:
        """Number of tokens of the prompt that `begin` would make."""
        return self._prompt(self._parent(tuple(map(self._key, messages)), tuple(tools)), messages, tools)[2]

    def _prompt(
        self, before: AnsweredTurn | None, messages: Sequence[Message], tools: Sequence[Mapping]
    ) -> tuple[AnsweredTurn | None, list[int], int]:
        """The turn whose tokens a prompt begins with, the tokens behind them, and the length of the prompt.

        Args:
            before: the turn that the messages continue.
        """
        if before is None or self._renders_otherwise(before, messages[len(before.keys) :]):
            prompt = chat_prompt(
                self._tokenizer, messages, tools=tools, thinking=self._thinking, keeps_thoughts=self._keeps
            )
            return None, prompt, len(prompt)
        # The marker at the end of a turn comes with the message that follows.
        new = chat_reply(self._tokenizer, messages[len(before.keys) :], thinking=self._thinking)
        return before, new, before.turn.length + len(_without_marker(before.completion)) + len(new)

    def end(self, turn: Turn, completion: Completion) -> None:
        """Record what was generated for a turn."""
        if completion.routes is not None:
            completion = completion._replace(routes=completion.routes[_routed(turn.parent) :])
        self._record(turn, completion)
        self._note(SessionSample([turn.seed], completion))

    def _record(self, turn: Turn, completion: Completion) -> None:
        reader = TurnReader(self._tokenizer, in_thought=bool(opened_thought(self._tokenizer, self._thinking)))
        for token in _without_marker(completion):
            reader.read(token)
        answer = reader.end()[1]
        answer = replace(answer, tool_calls=tuple(_typed(call, turn.tools) for call in answer.tool_calls))
        self.answered[turn] = AnsweredTurn(turn, completion, answer, (*turn.asked, self._key(answer)))

    def conversation(self) -> list[dict[str, str]]:
        """The messages of the last turn, with its answer; calls of tools as JSON."""
        return [
            {"role": role, "content": content, "reasoning_content": reasoning, "tool_calls": calls}
            for role, content, reasoning, calls in list(self.answered.values())[-1].keys
        ]

    def samples(self) -> list[SessionSample]:
        """The samples, first the one that ends with the last turn; each generated token has its label in the first one
        that holds it. Empty without turns."""
        parents = {one.turn.parent for one in self.answered.values()}
        trained: set[AnsweredTurn] = set()
        return [self._path(leaf, trained) for leaf in reversed(self.answered.values()) if leaf not in parents]

    def _path(self, leaf: AnsweredTurn, trained: set[AnsweredTurn]) -> SessionSample:
        path = [leaf]
        while (parent := path[0].turn.parent) is not None:
            path.insert(0, parent)
        whole, *others = (_as_reply(one.completion) if one in trained else one.completion for one in path)
        trained.update(path)
        for one, own in zip(path[1:], others, strict=True):
            whole = _joined(whole, one.turn.new, own)
        return SessionSample(path[0].turn.new, whole)

    def _parent(self, keys: tuple[Key, ...], tools: tuple[Mapping, ...]) -> AnsweredTurn | None:
        """The deepest turn that a request continues; of equal ones the latest."""
        # Deep ones first: a long one is compared once.
        deepest = sorted(reversed(self.answered.values()), key=lambda one: -len(one.keys))
        found = (one for one in deepest if one.turn.tools == tools and one.keys == keys[: len(one.keys)])
        return next(found, None)

    def _renders_otherwise(self, turn: AnsweredTurn, new: Sequence[Message]) -> bool:
        """True if the format writes the tokens up to a turn in another way in front of new messages: a user's removes
        the thoughts behind the last user's, and the place of an opened one."""
        if self._keeps or not self._thinking or all(message.role != "user" for message in new):
            return False
        behind = list(turn.keys)
        while behind and behind[-1][0] != "user":
            if behind.pop()[2]:
                return True
        return format_of(self._tokenizer).opens_thought

    def _key(self, message: Message) -> Key:
        reasoning = "" if self._keeps else message.reasoning.strip()
        calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
        content = message.content.strip() if message.role == "assistant" else message.content
        return message.role, content, reasoning, json.dumps(calls, sort_keys=True) if calls else ""


def _without_marker(completion: Completion) -> list[int]:
    return completion.tokens[: len(completion.tokens) - (completion.finish == "stop")]


def _as_reply(completion: Completion) -> Completion:
    """A completion that another sample trains."""
    length = len(completion.tokens)
    return completion._replace(logprobs=[0.0] * length, replies=((0, length),), drafted=0, accepted=0)


def _routed(at: AnsweredTurn | None) -> int:
    """Tokens, from the begin of the conversation on, whose experts are known behind a turn."""
    count = 0
    while at is not None and at.completion.routes is not None:
        count, at = count + len(at.completion.routes), at.turn.parent
    return count


def _joined(whole: Completion, new: list[int], own: Completion) -> Completion:
    """A completion with the next turn of its path.

    Args:
        new: tokens between both; the first one is the marker that the first ends with, or another role's.
    """
    contradicted, is_ended, last = whole.contradicted, whole.finish == "stop", len(whole.tokens) - 1
    if is_ended and new[0] != whole.tokens[last]:
        contradicted += ((last, new[0]),)
    found = whole.extended(new[is_ended:], own._replace(routes=None))
    start = len(found.tokens) - len(own.tokens)
    replies = (*found.replies, *((start + first, start + end) for first, end in own.replies))
    routes = own.routes if whole.routes is None else np.concatenate([whole.routes, own.routes])
    return found._replace(contradicted=contradicted, replies=replies, routes=routes)


def _typed(call: ToolCall, tools: Sequence[Mapping]) -> ToolCall:
    """A call whose arguments have the types that its tool describes, where they can be read so."""
    functions = [tool.get("function") or tool for tool in tools]
    described = next((one for one in functions if isinstance(one, Mapping) and one.get("name") == call.name), {})
    parameters = described.get("parameters")
    of = parameters.get("properties") if isinstance(parameters, Mapping) else None
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        kind = of.get(name) if isinstance(of, Mapping) else None
        if isinstance(kind, Mapping) and "string" not in kind.get("type", "string") and isinstance(value, str):
            with suppress(ValueError, RecursionError):
                arguments[name] = json.loads(value)
    return ToolCall(call.name, arguments)
