"""A chat in the terminal: messages are typed, answers are shown while they are written."""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from glm46.config.errors import UserError
from glm46.engine.inference.generation import Continuation
from glm46.engine.reliability.stop import EXIT_SIGNAL
from glm46.operate.launch.process_end import ENDING_SIGNALS, end_on_signals
from glm46.storage.chats.chat import chat_prompt, opened_thought
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.chat_turn import Part, TurnReader
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import Tokenizer

_HELP = """Ctrl-C stops an answer; Ctrl-D or /exit ends the chat; /new begins a new one; /help shows these lines.
/think and /nothink switch thinking on and off; at the end of a message they are for its answer alone."""


_COMMANDS = ("/exit", "/new", "/help", "/think", "/nothink")


class _Ended(Exception):
    """The input has ended."""


@dataclass
class TerminalChat:
    """A conversation between standard input and a model, in the chat format of `glm46.storage.chats.chat`.

    Args:
        answer: begins an answer to a prompt; each round adds tokens to the continuation. It ends early when the
            function given to it returns true. Raises UserError if the prompt is too long.
        stop: ids that end a turn.
        system: first message of each conversation.
        tools: descriptions of tools, as the model is shown them.
        thinks: whether the model may think before it answers.
        keeps_thoughts: whether later prompts hold its thoughts; of formats that open thoughts.
    """

    tokenizer: Tokenizer
    answer: Callable[[list[int], Callable[[], bool]], tuple[Continuation, Iterable[None]]]
    stop: frozenset[int]
    system: str | None = None
    tools: Sequence[Mapping] = ()
    thinks: bool = False
    keeps_thoughts: bool = False
    _messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        with contextlib.suppress(ImportError):  # Python may be built without it
            import readline  # noqa: F401 - input() has history and editing then

    def run(self) -> None:
        """Talk until the input ends."""
        print(_HELP, file=sys.stderr)
        self._begin()
        with _ctrl_c_interrupts(), contextlib.suppress(_Ended):
            while True:
                try:
                    self._turn(_read_line("> "))
                except KeyboardInterrupt:
                    print(file=sys.stderr)

    def _begin(self) -> None:
        self._messages = [Message("system", self.system)] if self.system is not None else []

    def _turn(self, line: str) -> None:
        """One message of the user: a command, or a message with its answer and the calls in it."""
        if line == "/exit":
            raise _Ended
        if line == "/new":
            self._begin()
        elif line == "/help":
            print(_HELP, file=sys.stderr)
        elif line in ("/think", "/nothink"):
            self.thinks = line == "/think"
        elif re.match(r"/\w+(?!\S)", line):
            remedy = (
                f"there are {', '.join(_COMMANDS)}, each alone; a message that begins with / needs a space before it"
            )
            print(f"error: {line.split()[0]}: not a command; {remedy}", file=sys.stderr)
        elif line.strip():
            text, before = line.removesuffix(" /think"), list(self._messages)
            thinks = self.thinks or text != line
            # /nothink at the end of a message is a token of GLM-4.5 and 4.6, so it stays there.
            if format_of(self.tokenizer).opens_thought and text.endswith("/nothink"):
                text, thinks = text.removesuffix("/nothink").rstrip(), False
            self._messages.append(Message("user", text))
            try:
                while self._write(thinks):
                    for call in self._messages[-1].tool_calls:
                        self._messages.append(Message("tool", _read_line(f"result of {call.name}> ")))
            except KeyboardInterrupt:  # a call without its result cannot be followed by a message
                self._messages = before
                raise
            except UserError as error:
                self._messages = before
                print(*(f"error: {fault}; /new begins anew" for fault in error.faults), sep="\n", file=sys.stderr)

    def _write(self, thinks: bool) -> bool:
        """Write and show the assistant's turn; returns whether it waits for results of calls."""
        prompt = chat_prompt(
            self.tokenizer, self._messages, tools=self.tools, thinking=thinks, keeps_thoughts=self.keeps_thoughts
        )
        is_open, shown, kind = bool(opened_thought(self.tokenizer, thinks)), 0, None
        reader = TurnReader(self.tokenizer, in_thought=is_open)
        with _stoppable() as is_stopped:
            one, rounds = self.answer(prompt, is_stopped)
            for _ in rounds:
                text = one.text(self.stop)
                for token in text[shown:]:
                    kind = self._show(reader.read(token), kind)
                shown = len(text)
        rest, message = reader.end()
        self._show(rest, kind)
        self._console.print()
        notes = {"length": f"cut off after --max-new-tokens {one.max_new_tokens}", "abort": "stopped"}
        if one.finish in notes:
            print(f"[{notes[one.finish]}]", file=sys.stderr)
        self._messages.append(message)
        return bool(message.tool_calls) and one.finish == "stop"

    def _show(self, part: Part | None, before: str | None) -> str | None:
        """Show a part of a turn; returns the kind of what was shown last."""
        if part is None:
            return before
        # A model may write escape sequences, which a terminal would obey.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in part.text)
        if part.kind != before or part.kind == "call":
            text = f"{'' if before is None else chr(10)}{'call: ' if part.kind == 'call' else ''}{text}"
        style = {"thought": "dim", "answer": "", "call": "bold"}[part.kind]
        self._console.print(text, end="", style=style)
        self._console.file.flush()
        return part.kind


def _read_line(prompt: str) -> str:
    """A line of standard input. A terminal gets the prompt.

    Raises:
        _Ended: the input has ended.
    """
    while True:
        try:
            line = input(prompt) if sys.stdin.isatty() else input()
            line.encode()
            return line
        except EOFError:
            raise _Ended from None
        except UnicodeError:
            print("error: contains bytes that are not UTF-8; convert the text, or set LC_ALL=C.UTF-8", file=sys.stderr)


@contextlib.contextmanager
def _ctrl_c_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; the other signals end the program, as in all verbs."""
    others = [number for number in ENDING_SIGNALS if number != signal.SIGINT]
    listener = end_on_signals(lambda number: EXIT_SIGNAL + number, others)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        listener.restore()


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C makes the function true. A second one, of a user who cannot wait for a long prompt, interrupts."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
