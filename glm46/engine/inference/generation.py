"""Continuation of token sequences in a batch whose rows are replaced as they end, with a cache and, on request, drafts
of the prediction layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from glm46.compute.model.init import signed
from glm46.compute.model.transformer import Transformer
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampling, sample


@dataclass
class Continuation:
    """A prompt and what a model writes after it."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    seed: int = 0
    """With the position of a token, it decides the sample: nothing else in the batch matters, and a continuation of
    this prompt and its first tokens goes on with the same tokens."""
    tokens: list[int] = field(default_factory=list)
    """What was written, with the stop id."""
    logprobs: list[float] = field(default_factory=list)
    """Logarithm of the probability of each token, see `sample`."""
    finish: Literal["stop", "length", "abort"] | None = None
    """None until the end."""
    routes: Tensor | None = None
    """At the end, if the decoder records them: the experts of all tokens but the last one, see `Decoder.routes`."""
    drafted: int = 0
    """Tokens that the prediction layers drafted."""
    accepted: int = 0
    """Those of them that were kept."""

    def text(self, stop: frozenset[int]) -> list[int]:
        """The tokens without the stop id."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] in stop else self.tokens


class _Row:
    """A row of the decoder: what it continues, and the drafts of its next tokens."""

    def __init__(self, of: Continuation):
        self.of, self.seed = of, signed(of.seed)
        self.kind = blake2b(np.array(of.prompt, np.int64).tobytes(), digest_size=16).digest()
        """Equal for equal prompts."""
        self.drafts: list[int] = []
        self.last = of.tokens[-1] if of.tokens else of.prompt[-1]
        """The token to be fed next, the last known one."""
        self.position = len(of.prompt) + len(of.tokens) - 1
        """Position of that token."""


def decoder_for(
    model: Transformer,
    continuations: Sequence[Continuation],
    *,
    drafts: bool = False,
    cpu_kernels: bool = True,
    mesh: ModelMesh = ModelMesh(),  # noqa: B008 - frozen
) -> Decoder:
    """A decoder in which these continuations all have a row at once."""
    longest = max((len(one.prompt) + one.max_new_tokens for one in continuations), default=1)
    longest += model.shape.num_nextn_predict_layers + 1 if drafts else 0
    return Decoder(
        model, batch=len(continuations), max_length=longest, drafts=drafts, cpu_kernels=cpu_kernels, mesh=mesh
    )


class Generation:
    """Writes continuations; iterate over it to run round by round, each of which runs the model once.

    A row of the decoder that has ended gets the next continuation that waits. The rows of one prompt share its
    computation: their keys and values are copied. If the decoder drafts, a round also checks the tokens that the
    prediction layers drafted in the round before: those that equal what is sampled are kept. So drafts change neither
    the tokens nor their log-probabilities, but for the rounding of longer calls.

    Args:
        decoder: nobody else uses it until the end. Its rows are long enough for every continuation and its drafts. On a
            mesh all ranks in step run a generation, and ranks with the same rows the same one.
        continuations: written to; those that wait start in this order, so equal prompts should be neighbours.
        stop: ids that end a continuation.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        is_stopped: called before each round; true, on any of the ranks in step, ends all continuations with "abort".
        arriving: called before each round, and again and again without one; gives more continuations, or None at the
            end. One whose `finish` it sets loses its row.
    """

    def __init__(
        self,
        decoder: Decoder,
        continuations: Sequence[Continuation],
        *,
        sampling: Sampling,
        stop: frozenset[int],
        vocab_size: int,
        is_stopped: Callable[[], bool] = lambda: False,
        arriving: Callable[[], Sequence[Continuation] | None] | None = None,
    ):
        self._decoder, self._sampling, self._stop, self._vocab = decoder, sampling, stop, vocab_size
        self._is_stopped, self._arriving = is_stopped, arriving
        self._waiting, self._rows = [*map(_Row, reversed(continuations))], list[_Row]()
        self._cached = [b""] * decoder.batch
        """The kind of prompt whose keys and values each row of the cache begins with."""

    @torch.inference_mode()
    def __iter__(self) -> Iterator[None]:
        """Run until all continuations have ended."""
        with self._decoder:
            while True:
                if self._arriving is not None:
                    if (new := self._arriving()) is None:
                        return
                    waiting = [row for row in self._waiting if row.of.finish is None]
                    self._waiting = [*map(_Row, reversed(new)), *waiting]
                has_work = bool(self._waiting) or any(row.of.finish is None for row in self._rows)
                is_open, is_stopped = self._decoder.mesh.most(has_work, has_work and self._is_stopped())
                if not is_open and self._arriving is None:
                    return
                if is_stopped:
                    for row in (*self._rows, *self._waiting):
                        row.of.finish = row.of.finish or "abort"
                    self._keep_routes()
                    return
                if is_open:
                    self._admit()
                    self._round()
                    yield

    def run(self) -> None:
        """Write all continuations to their end."""
        for _ in self:
            pass

    def _admit(self) -> None:
        """Put waiting continuations into free rows. If none wait, move the last rows there, so that rows stay few."""
        free = [number for number, row in enumerate(self._rows) if row.of.finish is not None]
        free += range(len(self._rows), self._decoder.batch)
        new, rest = free[: len(self._waiting)], free[len(self._waiting) :]
        for number in new:
            self._rows[number : number + 1] = [self._waiting.pop()]
        moved: dict[int, int] = {}
        for number in reversed([number for number in rest if number < len(self._rows)]):
            last = self._rows.pop()
            if number < len(self._rows):
                self._rows[number] = last
                moved[number] = moved.pop(len(self._rows), len(self._rows))  # it may have been moved already
        if moved:
            length = max(self._rows[number].position for number in moved)
            self._decoder.copy_rows(list(moved.values()), list(moved), length)
        for number in moved:
            self._cached[number] = self._rows[number].kind
        self._fill(new)

    def _fill(self, new: list[int]) -> None:
        """Compute or copy the keys and values of the prompts of new rows."""
        of_others = set(range(self._decoder.batch)).difference(new)
        kept = (*of_others, *(row for row in new if self._cached[row] == self._rows[row].kind))
        held = {self._cached[row]: row for row in kept}
        computed: dict[bytes, int] = {}
        sources: dict[int, int] = {}
        for row in new:
            kind, length = self._rows[row].kind, len(self._rows[row].of.prompt) - 1
            if self._cached[row] == kind or not length:
                continue
            if (source := held.get(kind, computed.get(kind))) is not None:
                sources[row] = source
            else:
                computed[kind] = row
        self._decoder.fill([self._rows[row].of.prompt for row in computed.values()], list(computed.values()))
        if sources:
            length = max(len(self._rows[row].of.prompt) - 1 for row in sources)
            self._decoder.copy_rows(list(sources.values()), list(sources), length)
        for row in new:
            self._cached[row] = self._rows[row].kind

    def _round(self) -> None:
        """Run the model on the last token and the drafts of each row, and take what is sampled."""
        rows, decoder = self._rows, self._decoder
        if not rows:
            decoder.idle()
            return
        starts = [row.position for row in rows]
        tokens = self._padded([[row.last, *row.drafts] for row in rows])
        found, hidden = None, decoder.hidden(tokens, starts)
        if hidden is not None:
            places = self._tensor([[start + 1] for start in starts]) + torch.arange(
                tokens.shape[1], device=tokens.device
            )
            seeds = self._tensor([[row.seed] for row in rows]).expand_as(places)
            sampled = sample(decoder.logits(hidden)[..., : self._vocab], self._sampling, seeds, places)
            found = torch.stack([x.double() for x in sampled])
        chosen, logprobs = decoder.mesh.share(found, (2, *tokens.shape))
        of_rows = zip(rows, chosen.long().tolist(), logprobs.tolist(), strict=True)
        taken = [self._take(row, tokens, of) for row, tokens, of in of_rows]
        self._keep_routes()
        if decoder.depth:
            for row, drafts in zip(rows, self._draft(hidden, taken, starts), strict=True):
                row.drafts = drafts

    def _keep_routes(self) -> None:
        """Take the routes of rows that have ended."""
        for number, row in enumerate(self._rows):
            if row.of.finish is not None and row.of.routes is None:
                row.of.routes = self._decoder.routes(number, row.position)

    def _take(self, row: _Row, chosen: list[int], logprobs: list[float]) -> list[int]:
        """Append the accepted drafts and one more token, up to a stop id or the end; returns what is known after the
        token that was fed.

        Args:
            chosen: for each number of drafts the token after them.
        """
        agreed = 0
        while agreed < len(row.drafts) and row.drafts[agreed] == chosen[agreed]:
            agreed += 1
        one, known = row.of, chosen[: agreed + 1]
        one.drafted += len(row.drafts)
        one.accepted += agreed
        for token, logprob in zip(known, logprobs, strict=False):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            row.last, row.position = token, row.position + 1
            if token in self._stop:
                one.finish = "stop"
            elif len(one.tokens) == one.max_new_tokens:
                one.finish = "length"
            if one.finish is not None:
                break
        return known

    def _draft(self, hidden: Tensor | None, known: list[list[int]], starts: Sequence[int]) -> list[list[int]]:
        """Draft one token per prediction layer after the last token of each row.

        A layer reads the draft of the layer before it. If that draft is rejected later, its slot in the cache keeps the
        wrong keys: later drafts are slightly worse, the text is the same.

        Args:
            hidden: [B, S, D], of the model from positions `starts` on; None on stages without the head.
            known: for each row, the tokens that follow those positions, up to the row's last token.
            starts: position of each row's first hidden state.
        """
        drafts: list[list[int]] = [[] for _ in known]
        rows, last, guesses = range(len(known)), [len(tokens) - 1 for tokens in known], None
        for k in range(self._decoder.depth):
            if hidden is not None:
                ahead = [(tokens + draft)[k:] for tokens, draft in zip(known, drafts, strict=True)]
                tokens = self._padded([row + [0] * (hidden.shape[1] - len(row)) for row in ahead])
                hidden = self._decoder.draft_hidden(k, hidden, tokens, starts)
                guesses = self._decoder.logits(hidden[rows, last])[:, : self._vocab].argmax(-1)
            for draft, guess in zip(drafts, self._decoder.mesh.share(guesses, (len(known),)).tolist(), strict=True):
                draft.append(int(guess))
        return drafts

    def _padded(self, rows: list[list[int]]) -> Tensor:
        longest = max(len(row) for row in rows)
        return self._tensor([row + [0] * (longest - len(row)) for row in rows])

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.from_numpy(np.array(rows, np.int64)).to(self._decoder.device)  # NumPy reads lists faster
