"""Display of a generation: text on standard output, progress and speed on standard error.

The text of one prompt is printed token by token. The texts of several prompts are printed at the end; until then there
is a bar, or a line every 15 seconds, with rate and time left.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from glm46.config.faults import counted
from glm46.engine.inference.generation import Continuation, Generation
from glm46.files.progress import tokens_progress
from glm46.storage.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Display:
    """Runs a generation and displays it."""

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
        """Args:
        total: prompts, those of other ranks included.
        gather: their texts, from those of this rank; called at the end.
        """
        self._total, self._gather = total, gather
        self._generation, self._all, self._tokenizer, self._stop = generation, continuations, tokenizer, stop
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
                print(f"--- prompt {number}\n{self._tokenizer.decode(row)}")
        rate = f", {self._rate:.1f} tokens/s after the prompt" if self._rate else ""
        drafted, accepted = (sum(getattr(one, name) for one in self._all) for name in ("drafted", "accepted"))
        drafts = f", {accepted} of {drafted} drafts accepted" if drafted else ""
        print(
            f"{counted(self._tokens, 'token')}, first after {self._first - self._start:.2f} s{rate}{drafts}",
            file=sys.stderr,
        )

    def _rounds(self) -> Iterator[None]:
        """Run round by round, and keep the text of each row, without its stop id."""
        for _ in self._generation:
            self._now = time.perf_counter()
            if self._first == self._start:
                self._first = self._now
            self._rows = [one.text(self._stop) for one in self._all]
            yield

    def _stream(self) -> None:
        shown = 0
        for _ in self._rounds():
            # A character may be incomplete until the next token.
            complete = self._tokenizer.decode(self._rows[0]).rstrip(_REPLACEMENT)
            print(complete[shown:], end="", flush=True)
            shown = len(complete)
        print(self._tokenizer.decode(self._rows[0])[shown:])

    def _count(self) -> None:
        most, counted_before = sum(one.max_new_tokens for one in self._all), 0
        with tokens_progress("generating", most, partial(print, file=sys.stderr, flush=True)) as advance:
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
