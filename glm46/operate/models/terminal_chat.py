"""A chat in the terminal: the user types messages, and answers are printed while they are generated."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from glm46.config.errors import UserError
from glm46.config.printable import printable
from glm46.engine.inference.generation import Continuation
from glm46.engine.reliability.stop import EXIT_SIGNAL
from glm46.operate.launch.process_end import ENDING_SIGNALS, end_on_signals
from glm46.storage.chats.chat import chat_prompt, opened_thought
from glm46.storage.chats.chat_turn import Part, TurnReader
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer

with contextlib.suppress(ImportError):  # Python may be built without it
    import readline  # noqa: F401 - input() has history and editing then

_HELP = "Ctrl-C stops an answer; /new begins a new conversation; Ctrl-D or /exit ends the chat."


@dataclass
class TerminalChat:
    """A conversation between standard input and a model, in the chat format of `glm46.storage.chats.chat`.

    Args:
        answer: starts an answer to a prompt; each round adds tokens to the continuation. Raises UserError if the prompt
            is too long.
        stop: token ids that end a turn.
        system: first message of each conversation.
        tools: descriptions of tools, as the model is shown them.
        thinks: whether the model may think before it answers.
        keeps_thoughts: whether later prompts contain earlier thoughts; only for formats that open thoughts.
        effort: reasoning effort that prompts state.
    """

    tokenizer: Tokenizer
    answer: Callable[[list[int]], tuple[Continuation, Iterable[None]]]
    stop: frozenset[int]
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    thinks: bool = False
    keeps_thoughts: bool = False
    effort: str = ""

    def __post_init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

    def run(self) -> None:
        """Read messages and print answers until the input ends."""
        print(_HELP, file=sys.stderr)
        first_messages = [] if self.system is None else [Message("system", self.system)]
        messages = first_messages
        with _ctrl_c_interrupts(), contextlib.suppress(EOFError):
            while True:
                try:
                    line = _read_line("> ")
                    if line == "/exit":
                        return
                    if line == "/new":
                        messages = first_messages
                    elif line.strip():
                        messages = self._turn([*messages, Message("user", line)])
                except KeyboardInterrupt:  # discards what was typed; a tool call without its result cannot stay
                    print(file=sys.stderr)
                except UserError as error:
                    print(*(f"error: {fault}; /new begins anew" for fault in error.faults), sep="\n", file=sys.stderr)

    def _turn(self, messages: list[Message]) -> list[Message]:
        """Print the answer to the last message; return the conversation with it. Results of tool calls are read from
        standard input."""
        waits_for_results = True
        while waits_for_results:
            message, waits_for_results = self._write(messages)
            messages = [*messages, message]
            if waits_for_results:
                results = [Message("tool", _read_line(f"result of {call.name}> ")) for call in message.tool_calls]
                messages += results
        return messages

    def _write(self, messages: list[Message]) -> tuple[Message, bool]:
        """Print the assistant's turn as it is generated; return it, and whether it waits for results of tool calls."""
        prompt = chat_prompt(
            self.tokenizer,
            messages,
            tools=self.tools,
            thinking=self.thinks,
            keeps_thoughts=self.keeps_thoughts,
            effort=self.effort,
        )
        reader = TurnReader(self.tokenizer, in_thought=bool(opened_thought(self.tokenizer, self.thinks)))
        shown = 0
        kind = None
        continuation, rounds = self.answer(prompt)
        note = ""
        try:
            for _ in rounds:
                text = continuation.text(self.stop)
                for token in text[shown:]:
                    kind = self._show(reader.read(token), kind)
                shown = len(text)
        except KeyboardInterrupt:
            note = "stopped"
        remaining_part, message = reader.end()
        self._show(remaining_part, kind)
        self._console.print()
        if continuation.finish == "length":
            note = f"cut off after --max-new-tokens {continuation.max_new_tokens}"
        if note:
            print(f"[{note}]", file=sys.stderr)
        return message, bool(message.tool_calls) and continuation.finish == "stop"

    def _show(self, part: Part | None, previous_kind: str | None) -> str | None:
        """Print a part of a turn; return the kind of the part that was printed last."""
        if part is None:
            return previous_kind
        text = printable(part.text)
        if part.kind != previous_kind or part.kind == "call":
            text = f"{'' if previous_kind is None else chr(10)}{'call: ' if part.kind == 'call' else ''}{text}"
        style = {"thought": "dim", "answer": "", "call": "bold"}[part.kind]
        self._console.print(text, end="", style=style)
        self._console.file.flush()
        return part.kind


def _read_line(prompt: str) -> str:
    """Read a line of standard input. The prompt is printed only in a terminal.

    Raises:
        EOFError: the input has ended.
    """
    while True:
        try:
            line = input(prompt) if sys.stdin.isatty() else input()
            line.encode()
            return line
        except UnicodeError:
            print("error: contains bytes that are not UTF-8; convert the text, or set LC_ALL=C.UTF-8", file=sys.stderr)


@contextlib.contextmanager
def _ctrl_c_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt; the other signals end the program, as in all verbs."""
    others = [number for number in ENDING_SIGNALS if number != signal.SIGINT]
    listener = end_on_signals(lambda number: EXIT_SIGNAL + number, others)
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        listener.restore()
