"""Display of a generation: text on standard output, progress and speed on standard error.

The text of a single prompt is printed token by token. The texts of several prompts are printed at the end; until then
there is a bar, or a line every 15 seconds, with rate and time left.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from glm46.config.faults import counted
from glm46.config.printable import printable
from glm46.engine.inference.generation import Continuation, Generation
from glm46.files.progress import tokens_progress
from glm46.storage.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Display:
    """Runner of a generation that displays it."""

    def __init__(
        self,
        generation: Generation,
        continuations: Sequence[Continuation],
        tokenizer: Tokenizer,
        *,
        stop: frozenset[int],
        total: int,
        gather: Callable[[list[list[int]]], list[list[int]]],
    ):
        """Initialize the display.

        Args:
            total: number of prompts over all ranks.
            gather: collects the texts of all ranks from the texts of this rank; called at the end.
        """
        self._total = total
        self._gather = gather
        self._generation = generation
        self._all = continuations
        self._tokenizer = tokenizer
        self._stop = stop
        self._rows: list[list[int]] = [[] for _ in continuations]
        self._start = self._first = self._now = time.perf_counter()

    def run(self) -> None:
        """Run the generation: print all text, then the number of tokens and the speed."""
        if self._total == 1:
            self._stream()
        else:
            self._count()
        self._rows = self._gather(self._rows)
        if self._total > 1:
            for number, row in enumerate(self._rows, start=1):
                print(f"--- prompt {number}\n{_shown(self._tokenizer.decode(row))}")
        rate = f", {self._rate:.1f} tokens/s after the prompt" if self._rate else ""
        drafted, accepted = (sum(getattr(item, name) for item in self._all) for name in ("drafted", "accepted"))
        drafts = f", {accepted} of {drafted} drafts accepted" if drafted else ""
        print(
            f"{counted(self._tokens, 'token')}, first after {self._first - self._start:.2f} s{rate}{drafts}",
            file=sys.stderr,
        )

    def _rounds(self) -> Iterator[None]:
        """Run round by round, and store the text of each row, without its stop id."""
        for _ in self._generation:
            self._now = time.perf_counter()
            if self._first == self._start:
                self._first = self._now
            self._rows = [item.text(self._stop) for item in self._all]
            yield

    def _stream(self) -> None:
        shown = 0
        for _ in self._rounds():
            # A character may be incomplete until the next token.
            complete = self._tokenizer.decode(self._rows[0]).rstrip(_REPLACEMENT)
            print(_shown(complete[shown:]), end="", flush=True)
            shown = len(complete)
        print(_shown(self._tokenizer.decode(self._rows[0])[shown:]))

    def _count(self) -> None:
        max_tokens = sum(item.max_new_tokens for item in self._all)
        counted_before = 0
        with tokens_progress("generating", max_tokens, partial(print, file=sys.stderr, flush=True)) as advance:
            for _ in self._rounds():
                advance(self._tokens - counted_before)
                counted_before = self._tokens

    @property
    def _tokens(self) -> int:
        return sum(len(row) for row in self._rows)

    @property
    def _rate(self) -> float:
        """Tokens per second of all rows after the first round; 0 before the second round."""
        later = self._tokens - len(self._rows)
        return later / (self._now - self._first) if later > 0 and self._now > self._first else 0.0


def _shown(text: str) -> str:
    """Return the text without control characters for a terminal; unchanged for a file or pipe."""
    return printable(text) if sys.stdout.isatty() else text
