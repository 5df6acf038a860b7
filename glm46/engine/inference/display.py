"""Display of a generation: text on standard output, progress and speed on standard error.

The text of one prompt is printed token by token. The texts of several prompts are printed at the end; until then a
terminal shows the end of each text, and a log gets a line every few seconds.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from glm46.config.faults import counted
from glm46.engine.inference.generation import Continuation, Generation
from glm46.storage.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_SECONDS_PER_LINE = 5.0
_SECONDS_PER_VIEW = 0.2
_TOKENS_PER_VIEW = 200
"""Tokens decoded for a view: enough for a wide line. Decoding all of a long text would slow generation down."""


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
        self._most = max(one.max_new_tokens for one in continuations)
        self._start = self._first = self._now = time.perf_counter()

    def run(self) -> None:
        """Run the generation: print all text, then the number of tokens and the speed."""
        if self._total == 1:
            self._stream()
        elif sys.stderr.isatty():
            self._show_ends()
        else:
            self._log_lines()
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

    def _log_lines(self) -> None:
        written = self._start
        for _ in self._rounds():
            if self._now - written >= _SECONDS_PER_LINE:
                print(self._line(), file=sys.stderr, flush=True)
                written = self._now

    def _show_ends(self) -> None:
        drawn = self._start
        console = Console(stderr=True)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            for _ in self._rounds():
                if self._now - drawn >= _SECONDS_PER_VIEW:
                    live.update(self._ends(console), refresh=True)
                    drawn = self._now

    def _ends(self, console: Console) -> Group:
        """The end of each text and a progress line. Unfinished texts come first if not all fit on the terminal."""
        table = Table.grid(padding=(0, 1))
        order = sorted(range(len(self._rows)), key=lambda b: self._all[b].finish is not None)
        width = console.width - len(str(len(order))) - max(len(str(self._most)), len("done")) - 4
        for b in sorted(order[: max(1, console.height - 3)]):
            text = self._tokenizer.decode(self._rows[b][-_TOKENS_PER_VIEW:])
            end = "".join(c if c.isprintable() else " " for c in text)
            while cell_len(end) > width:  # some characters are two cells wide
                end = end[1:]
            mark = "done" if self._all[b].finish else str(len(self._rows[b]))
            table.add_row(Text(str(b + 1), style="bold"), Text(mark), Text(end, no_wrap=True))
        return Group(table, Text(self._line(), style="dim", no_wrap=True, overflow="ellipsis"))

    def _line(self) -> str:
        count = len(self._rows)
        left = f", at most {self._left:.0f} s left" if math.isfinite(self._left) else ""
        return (
            f"{counted(self._tokens, 'token')} of at most {count * self._most}, {self._rate:.1f} tokens/s{left}, "
            f"{sum(one.finish is not None for one in self._all)} of {count} prompts done"
        )

    @property
    def _tokens(self) -> int:
        return sum(len(row) for row in self._rows)

    @property
    def _rate(self) -> float:
        """Tokens per second of all rows after the first round; 0 before the second round."""
        later = self._tokens - len(self._rows)
        return later / (self._now - self._first) if later > 0 and self._now > self._first else 0.0

    @property
    def _left(self) -> float:
        """Seconds until the longest unfinished row is full, at its speed so far."""
        going = [len(row) for row, one in zip(self._rows, self._all, strict=True) if one.finish is None]
        longest = max(going, default=self._most)
        return (self._most - longest) * (self._now - self._first) / (longest - 1) if longest > 1 else math.inf
