"""Records a conversation of the policy with any program: exact tokens of each turn, and samples in which each generated
token is trained once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from glm46.storage.chats.chat import chat_prompt, chat_reply, opened_thought
from glm46.storage.chats.chat_pieces import listed_tools
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.chat_turn import TurnReader
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, seed_behind
from glm46.tasks.rl.rollout.session_samples import as_reply, joined, min_tokens, without_marker
from glm46.tasks.rl.rollout.tool_arguments import calls_key, typed_call

Key = tuple[str, ...]
"""Comparison key of a message: messages with equal keys have the same meaning."""


class NoRoom(ValueError):
    """The limits of an episode leave no room for a request; the episode is truncated."""


@dataclass(eq=False)
class Turn:
    """A request for one answer of the policy, and this answer once it is generated."""

    parent: "Turn | None"
    """Turn whose tokens begin the prompt; None if the prompt was rendered whole."""
    asked: tuple[Key, ...]
    """Keys of the messages of the request."""
    tools: tuple[Mapping[str, Any], ...]
    new: list[int]
    """Prompt tokens added after the parent turn, without its end marker. Whole prompts would make the memory of an
    episode quadratic in its length."""
    length: int
    """Number of tokens of the prompt."""
    room: int
    """Number of tokens that the window of the conversation leaves for the completion."""
    most_tokens: int
    """Maximum length of the completion: the room, or the limit in the request."""
    seed: int
    """Seed of the request: a hash of the sample's seed, the tokens of the prompt, and the limit."""
    completion: Completion = NOTHING
    answer: Message = Message("assistant", "")
    keys: tuple[Key, ...] = ()
    """Keys of the messages and the answer; empty until the turn is generated."""
    in_thought: bool = False
    """True if the turn was truncated, or ended, while its thought was open."""
    is_withdrawn: bool = False
    """True if the client disconnected, so that the answer was not delivered."""

    @property
    def is_answered(self) -> bool:
        """True once the turn is generated."""
        return bool(self.keys)


class Session:
    """The turns of an episode.

    A request continues the deepest turn whose messages and answer it begins with. Its prompt is the exact tokens of
    that turn followed by the new messages in the chat format. If the format would write the earlier tokens differently
    (a new user message after a thought, an edited history, other tools), the request is rendered whole and begins
    another sample.

    Args:
        first: prompt of the row, seed, and maximum completion. No sample is longer than prompt and completion together.
        keeps_thoughts: past thoughts stay in prompts.
        recorded: turns passed to `note` by an earlier start; a turn with the same seed is not generated again.
        note: receives each generated turn, with its seed instead of the prompt.
    """

    effort: str = ""
    """Reasoning effort that prompts state; set before the first request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        first: Request,
        *,
        thinking: bool,
        most_turns: int,
        keeps_thoughts: bool = False,
        recorded: Sequence[Completion] = (),
        note: Callable[[Completion], None] = lambda turn: None,
    ):
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._keeps = keeps_thoughts
        self._first = first
        self._most_turns = most_turns
        self._note = note
        self._recorded = {turn.prompt[0]: turn for turn in recorded}
        self.turns: list[Turn] = []
        self.answered: list[Turn] = []
        """Generated turns in the order of their answers. A withdrawn answer moves to the end when it is delivered."""

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], most_tokens: int | None = None
    ) -> Turn:
        """Return the turn that answers messages. Repeated requests, and requests whose prompts have the same tokens,
        share one turn, generated or not, unless their effective limits differ.

        Raises:
            NoRoom: the episode has no turns left, or the prompt leaves no room for a token.
        """
        keys = tuple(map(self._key, messages))
        tools = tuple(tools)
        for turn in self.turns:
            is_same = len(turn.asked) == len(keys) and turn.asked == keys and turn.tools == tools
            if is_same and turn.most_tokens == min(turn.room, most_tokens or turn.room):
                return turn
        prior = self._parent(keys, tools)
        if prior is not None:
            keys = prior.keys + keys[len(prior.keys) :]  # share the text objects of earlier turns to save memory
        parent, new, length = self._prompt(prior, messages, tools)
        room = self.window - length
        if room < 1:
            raise self._no_room(length, "tokens")
        limit = min(room, most_tokens or room)
        seed = self._seed(parent, new if limit == room else [*new, -limit])
        for turn in self.turns:
            if (turn.seed, turn.tools, turn.most_tokens) == (
                seed,
                tools,
                limit,
            ):  # other messages with the same meaning
                return turn
        if len(self.turns) == self._most_turns:
            raise NoRoom(f"this episode has had its {self._most_turns} turns (rl.environment.max_turns)")
        turn = Turn(parent, keys, tools, new, length, room, limit, seed)
        self.turns.append(turn)
        recorded = self._recorded.pop(turn.seed, None)
        if recorded is not None and (recorded.finish == "stop" or len(recorded.tokens) == turn.most_tokens):
            self._record(turn, recorded)
        return turn

    def request(self, turn: Turn) -> Request:
        """Return the request that generates a turn."""
        parts = [turn.new]
        parent = turn.parent
        while parent is not None:
            parts += [without_marker(parent.completion), parent.new]
            parent = parent.parent
        return Request([*chain.from_iterable(reversed(parts))], turn.seed, turn.most_tokens, _routed(turn.parent))

    def _seed(self, parent: Turn | None, new: list[int]) -> int:
        if parent is not None:
            return seed_behind(parent.seed, [*without_marker(parent.completion), *new])
        return self._first.seed if new == self._first.prompt else seed_behind(self._first.seed, new)

    def _prompt(
        self, prior: Turn | None, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Turn | None, list[int], int]:
        """Return the turn whose tokens begin a prompt, the tokens after them, and the length of the prompt.

        Args:
            prior: the turn that the messages continue.
        """
        descriptions = listed_tools(format_of(self._tokenizer), tools)
        longest_token = self._tokenizer.longest_token
        bound = min_tokens(messages, descriptions, longest_token=longest_token, keeps_thoughts=self._keeps)
        if bound > self.window:  # encoding a very long prompt would take long
            raise self._no_room(bound, "tokens or more")
        if prior is None or self._renders_otherwise(prior, messages[len(prior.keys) :]):
            messages = self._with_thoughts(messages) if self._keeps else messages
            prompt = chat_prompt(
                self._tokenizer,
                messages,
                tools=tools,
                thinking=self._thinking,
                keeps_thoughts=self._keeps,
                effort=self.effort,
            )
            return None, prompt, len(prompt)
        # The end marker of a turn is written with the message that follows.
        new = chat_reply(
            self._tokenizer,
            messages[len(prior.keys) :],
            tools=tools,
            thinking=self._thinking,
            keeps_thoughts=self._keeps,
        )
        return prior, new, prior.length + len(without_marker(prior.completion)) + len(new)

    def _no_room(self, length: int, unit: str) -> NoRoom:
        row = len(self._first.prompt)
        return NoRoom(
            f"the prompt has {length} {unit}, and a conversation has at most {self.window}: {row} of the row's "
            f"prompt and {self._first.max_new_tokens} of rollout.max_new_tokens, in which the program's system prompt "
            f"and tools count too; raise rollout.max_new_tokens above {length - row}, within training.seq_len"
        )

    @property
    def window(self) -> int:
        """Maximum number of tokens of a conversation."""
        return len(self._first.prompt) + self._first.max_new_tokens

    def withdraw(self, turn: Turn) -> None:
        """Remove a turn from the samples and the conversation because its client left without the answer."""
        turn.is_withdrawn = True

    def deliver(self, turn: Turn) -> None:
        """Restore a withdrawn turn after a client has received its answer."""
        if turn.is_withdrawn:
            turn.is_withdrawn = False
            self.answered.remove(turn)
            self.answered.append(turn)

    def end(self, turn: Turn, completion: Completion) -> None:
        """Record what was generated for a turn."""
        if completion.routes is not None:
            completion = completion._replace(routes=completion.routes[_routed(turn.parent) :])
        self._record(turn, completion)
        self._note(completion._replace(prompt=[turn.seed]))

    def _record(self, turn: Turn, completion: Completion) -> None:
        reader = TurnReader(self._tokenizer, in_thought=bool(opened_thought(self._tokenizer, self._thinking)))
        for token in without_marker(completion):
            reader.read(token)
        turn.in_thought = reader.in_thought
        answer = reader.end()[1]
        turn.answer = replace(answer, tool_calls=tuple(typed_call(call, turn.tools) for call in answer.tool_calls))
        turn.keys = (*turn.asked, self._key(turn.answer))
        turn.completion = completion
        self.answered.append(turn)

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages of the last turn and its answer, with tool calls as JSON."""
        return [
            {"role": role, "content": content, "reasoning_content": reasoning, "tool_calls": calls}
            for role, content, reasoning, calls in self._last_turns()[0].keys
        ]

    def samples(self) -> list[Completion]:
        """Return the samples, first the one that ends with the last turn. Each generated token of a delivered answer is
        a label only in the first sample that contains it. Empty without turns."""
        trained = {turn for turn in self.answered if turn.is_withdrawn}
        return [_path(leaf, trained) for leaf in self._last_turns()]

    def _last_turns(self) -> list[Turn]:
        """Return the delivered turns that no other delivered turn continues, the latest first."""
        delivered = [turn for turn in self.answered if not turn.is_withdrawn]
        continued = _ancestors(delivered)
        return [turn for turn in reversed(delivered) if turn not in continued]

    def _parent(self, keys: tuple[Key, ...], tools: tuple[Mapping[str, Any], ...]) -> Turn | None:
        """Return the deepest turn that a request continues; the latest of several."""
        # Deep turns first, so that a long history is compared only once.
        latest_first = self.answered[::-1]
        deepest = sorted(latest_first, key=lambda turn: -len(turn.keys))
        return next((turn for turn in deepest if turn.tools == tools and turn.keys == keys[: len(turn.keys)]), None)

    def _renders_otherwise(self, turn: Turn, new: Sequence[Message]) -> bool:
        """Return True if new messages change how the format writes the tokens up to a turn: it closes an open thought,
        and a user message removes the thoughts since the previous user message and the tag of an opened thought."""
        if turn.in_thought:
            return True
        if self._keeps or not self._thinking or all(message.role != "user" for message in new):
            return False
        keys = list(turn.keys)
        while keys and keys[-1][0] != "user":
            if keys.pop()[2]:
                return True
        format = format_of(self._tokenizer)
        return format.opens_thought and not format.tags_empty_thoughts

    def _with_thoughts(self, messages: Sequence[Message]) -> list[Message]:
        """Restore the thoughts of the policy's answers that the client did not send back."""
        restored = list(messages)
        keys = tuple(map(self._key, messages))
        for turn in self.answered:
            end = len(turn.keys)
            if end <= len(keys) and turn.keys == keys[:end] and not restored[end - 1].reasoning.strip():
                thought = turn.answer.reasoning
                restored[end - 1] = replace(restored[end - 1], reasoning=thought, written_reasoning=None)
        return restored

    def _key(self, message: Message) -> Key:
        reasoning = "" if self._keeps else message.reasoning.strip()
        content = message.content.strip() if message.role == "assistant" else message.content
        if message.loaded_tools:
            content = json.dumps(["tool_reference", *message.loaded_tools])
        return message.role, content, reasoning, calls_key(message.tool_calls)


def _routed(turn: Turn | None) -> int:
    """Return the number of leading tokens of the conversation whose experts are known after a generated turn."""
    count = 0
    while turn is not None and turn.completion.routes is not None:
        count = count + len(turn.completion.routes)
        turn = turn.parent
    return count


def _ancestors(turns: Sequence[Turn]) -> set[Turn]:
    """Return the turns that these continue, directly or indirectly."""
    ancestors: set[Turn] = set()
    for turn in turns:
        parent = turn.parent
        while parent is not None and parent not in ancestors:
            ancestors.add(parent)
            parent = parent.parent
    return ancestors


def _path(leaf: Turn, trained: set[Turn]) -> Completion:
    """Return the sample that ends with a turn. Turns in ``trained`` are no labels in it; its turns are added there."""
    path = [leaf]
    while (parent := path[0].parent) is not None:
        path.insert(0, parent)
    whole, *others = (as_reply(turn.completion) if turn in trained else turn.completion for turn in path)
    trained.update(path)
    for turn, completion in zip(path[1:], others, strict=True):
        whole = joined(whole, turn.new, completion)
    return whole._replace(prompt=path[0].new)
