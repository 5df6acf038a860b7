"""Records a conversation of the policy with any program: exact tokens of each turn, and samples in which each generated
token is trained once."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from glm46.storage.chats.chat import chat_prompt, chat_reply, opened_thought
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import Message, ToolCall
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.rollout.records import Completion, Request, SessionSample

Key = tuple[str, ...]
"""A message as it is compared: equal keys read alike."""


class NoRoom(ValueError):
    """A request that the limits of its episode leave no room for; the episode is truncated."""


@dataclass(eq=False)
class Turn:
    """One answer of the policy."""

    parent: "Turn | None"
    """The turn whose tokens its prompt begins with; None: the prompt was rendered whole."""
    asked: tuple[Key, ...]
    """The messages of the request."""
    tools: tuple[Mapping, ...]
    request: Request
    completion: Completion | None = None
    """None until it is generated."""
    answer: Message | None = None
    keys: tuple[Key, ...] = ()
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
        recorded: turns of an earlier start: one with the same prompt is not generated again.
    """

    def __init__(
        self, tokenizer: Tokenizer, first: Request, *, thinking: bool, most_turns: int, keeps_thoughts: bool = False,
        recorded: Sequence[SessionSample] = (),
    ):  # fmt: skip
        self._tokenizer, self._thinking, self._keeps = tokenizer, thinking, keeps_thoughts
        self._first, self._most_turns = first, most_turns
        self._recorded = {tuple(prompt): completion for prompt, completion in recorded}
        self.turns: list[Turn] = []
        self._ended: list[Turn] = []
        """Those that are generated, in the order of their ends."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping], most_tokens: int | None = None) -> Turn:
        """The turn that answers messages; for the same request the same turn, generated or not.

        Raises:
            NoRoom: the episode has had its turns, or the prompt leaves no room for a token.
        """
        keys, tools = tuple(map(self._key, messages)), tuple(tools)
        for turn in self.turns:
            if len(turn.asked) == len(keys) and turn.asked == keys and turn.tools == tools:
                return turn
        if len(self.turns) == self._most_turns:
            raise NoRoom(f"this episode has had its {self._most_turns} turns (rl.environment.max_turns)")
        parent, prompt = self._prompt(messages, keys, tools)
        room = len(self._first.prompt) + self._first.max_new_tokens - len(prompt)
        if room < 1:
            raise NoRoom(
                f"the prompt has {len(prompt)} tokens, and a conversation has at most {room + len(prompt)}: those of "
                "the row's prompt and rollout.max_new_tokens"
            )
        turn = Turn(parent, keys, tools, Request(prompt, self._first.seed, min(room, most_tokens or room)))
        self.turns.append(turn)
        known = self._recorded.pop(tuple(prompt), None) if self._recorded else None
        if known is not None and (known.finish == "stop" or len(known.tokens) == turn.request.max_new_tokens):
            self.end(turn, known)
        return turn

    def ended(self) -> list[SessionSample]:
        """The turns so far, for `recorded`."""
        return [SessionSample(turn.request.prompt, turn.completion) for turn in list(self._ended)]

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping]) -> int:
        """Number of tokens of the prompt that `begin` would make."""
        return len(self._prompt(messages, tuple(map(self._key, messages)), tuple(tools))[1])

    def _prompt(
        self, messages: Sequence[Message], keys: tuple[Key, ...], tools: tuple[Mapping, ...]
    ) -> tuple[Turn | None, list[int]]:
        """The turn that messages continue, and the prompt."""
        parent = self._parent(keys, tools)
        new = messages if parent is None else messages[len(parent.keys) :]
        if parent is None or self._renders_otherwise(parent, new):
            return None, chat_prompt(
                self._tokenizer, messages, tools=tools, thinking=self._thinking, keeps_thoughts=self._keeps
            )
        # The marker at the end of a turn comes with the message that follows.
        before = parent.request.prompt + _without_marker(parent.completion)
        return parent, before + chat_reply(self._tokenizer, new, thinking=self._thinking)

    def end(self, turn: Turn, completion: Completion) -> None:
        """Record what was generated for a turn."""
        reader = TurnReader(self._tokenizer, in_thought=bool(opened_thought(self._tokenizer, self._thinking)))
        for token in _without_marker(completion):
            reader.read(token)
        answer = reader.end()[1]
        calls = tuple(_typed(call, turn.tools) for call in answer.tool_calls)
        turn.completion, turn.answer = completion, replace(answer, tool_calls=calls)
        turn.keys = (*turn.asked, self._key(turn.answer))
        self._ended.append(turn)

    def conversation(self) -> list[dict[str, str]]:
        """The messages of the last turn, with its answer; calls of tools as JSON."""
        return [
            {"role": role, "content": content, "reasoning_content": reasoning, "tool_calls": calls}
            for role, content, reasoning, calls in self._ended[-1].keys
        ]

    def samples(self) -> list[SessionSample]:
        """The samples, first the one that ends with the last turn; each generated token has its label in the first one
        that holds it. Empty without turns.

        Raises:
            ValueError: a prompt is not the tokens before it.
        """
        parents = {turn.parent for turn in self._ended}
        trained: set[Turn] = set()
        return [self._path(leaf, trained) for leaf in reversed(self._ended) if leaf not in parents]

    def _path(self, leaf: Turn, trained: set[Turn]) -> SessionSample:
        turns = [leaf]
        while turns[0].parent is not None:
            turns.insert(0, turns[0].parent)
        root, whole = turns[0].request.prompt, None
        for turn in turns:
            own = turn.completion
            length = len(own.tokens)
            if turn in trained:
                own = own._replace(logprobs=[0.0] * length, replies=((0, length),), drafted=0, accepted=0)
            trained.add(turn)
            whole = own if whole is None else _joined(root, whole, turn, own)
        return SessionSample(root, whole)

    def _parent(self, keys: tuple[Key, ...], tools: tuple[Mapping, ...]) -> Turn | None:
        """The deepest turn that a request continues; of equal ones the latest."""
        deepest = sorted(reversed(self._ended), key=lambda turn: -len(turn.keys))  # a long one is compared once
        found = (turn for turn in deepest if turn.tools == tools and turn.keys == keys[: len(turn.keys)])
        return next(found, None)

    def _renders_otherwise(self, turn: Turn, new: Sequence[Message]) -> bool:
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


def _joined(root: list[int], whole: Completion, turn: Turn, own: Completion) -> Completion:
    """A completion behind the prompt of a root, with the next turn of its path."""
    prompt, end = turn.request.prompt, len(root) + len(whole.tokens)
    is_ended = whole.finish == "stop"
    # Contradicted markers are read as those in the prompt.
    read = root + whole.tokens
    for index, marker in whole.contradicted:
        read[len(root) + index] = marker
    if prompt[: end - is_ended] != read[: end - is_ended]:
        raise ValueError("a prompt is not the tokens before it")
    found = whole.extended(prompt[end:], own)
    contradicted = whole.contradicted
    if is_ended and prompt[end - 1] != read[-1]:
        contradicted += ((end - 1 - len(root), prompt[end - 1]),)
    start = len(found.tokens) - len(own.tokens)
    replies = (*found.replies, *((start + first, start + last) for first, last in own.replies))
    return found._replace(contradicted=contradicted, replies=replies)


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
            with suppress(ValueError):
                arguments[name] = json.loads(value)
    return ToolCall(call.name, arguments)
