"""Continuation of token sequences in a batch whose rows are replaced when they end, with a cache and optional drafts of
the prediction layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from glm46.compute.model.init import signed
from glm46.compute.model.transformer import Transformer
from glm46.engine.inference.decoder import Decoder, drafted_tokens
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampled, Sampling, sample


@dataclass
class Continuation:
    """A prompt and the tokens that a model generates after it."""

    prompt: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    seed: int = 0
    """Seed that, with the position of a token, determines the sample, independent of the rest of the batch. A
    continuation of this prompt plus its first generated tokens yields the same further tokens."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens, with the stop id."""
    logprobs: list[float] = field(default_factory=list)
    """Logarithm of the probability of each token, see `sample`."""
    kept: list[np.ndarray] = field(default_factory=list)
    """int32 arrays: the ids that each token was sampled from, if the generation records them."""
    finish: Literal["stop", "length", "abort"] | None = None
    """Reason of the end; None before."""
    routes: Tensor | None = None
    """Experts of all tokens except the last one, see `Decoder.routes`; set at the end if the decoder records them."""
    drafted: int = 0
    """Tokens that the prediction layers drafted."""
    accepted: int = 0
    """Drafted tokens that were kept."""

    def text(self, stop: frozenset[int]) -> list[int]:
        """Return the tokens without the stop id."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] in stop else self.tokens


class _Row:
    """A row of the decoder: its continuation, and the drafts of its next tokens."""

    def __init__(self, continuation: Continuation):
        self.of = continuation
        self.seed = signed(continuation.seed)
        self.kind = blake2b(np.array(continuation.prompt, np.int64).tobytes(), digest_size=16).digest()
        """Hash of the prompt, equal for equal prompts."""
        self.drafts: list[int] = []
        self.last = continuation.tokens[-1] if continuation.tokens else continuation.prompt[-1]
        """Next token to feed: the last token so far."""
        self.position = len(continuation.prompt) + len(continuation.tokens) - 1
        """Position of that token."""


def decoder_for(
    model: Transformer,
    continuations: Sequence[Continuation],
    *,
    drafts: bool | int = False,
    cpu_kernels: bool = True,
    mesh: ModelMesh = ModelMesh(),  # noqa: B008 - frozen
) -> Decoder:
    """Build a decoder with a row for each of these continuations; further arguments as in `Decoder`."""
    max_length = max((len(item.prompt) + item.max_new_tokens for item in continuations), default=1)
    max_length += drafted_tokens(model, drafts) + 1 if drafts else 0
    return Decoder(
        model, batch=len(continuations), max_length=max_length, drafts=drafts, cpu_kernels=cpu_kernels, mesh=mesh
    )


class Generation:
    """Generator of continuations; iterate over it to run round by round, with one call of the model per round.

    A row of the decoder that has ended gets the next waiting continuation. Rows with the same prompt share its
    computation: their keys and values are copied. If the decoder drafts, a round also checks the tokens that the
    prediction layers drafted in the previous round: drafts that equal the sampled tokens are kept. So drafts change
    neither the tokens nor their log-probabilities, except for the rounding of longer calls.

    Args:
        decoder: used by nothing else until the end. Its rows must be long enough for every continuation with its
            drafts. On a mesh all ranks in step run a generation, and ranks with the same rows run the same one.
        continuations: updated in place; waiting ones start in this order, so equal prompts should be neighbours.
        stop: ids that end a continuation.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        is_stopped: called before each round; True on any of the ranks in step ends all continuations with "abort".
        arriving: called before each round, and repeatedly while there is no work; returns more continuations, or None
            at the end. A continuation whose `finish` it sets loses its row.
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
        self._decoder = decoder
        self._sampling = sampling
        self._stop = stop
        self._vocab = vocab_size
        self._is_stopped = is_stopped
        self._arriving = arriving
        self._waiting = [*map(_Row, reversed(continuations))]
        self._rows = list[_Row]()
        self._cached = [b""] * decoder.batch
        """Kind of the prompt whose keys and values are at the start of each row of the cache."""

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
        """Generate all continuations to their end."""
        for _ in self:
            pass

    def _admit(self) -> None:
        """Put waiting continuations into free rows, and move the last rows into rows that remain free, so that the
        number of rows stays small."""
        free = [number for number, row in enumerate(self._rows) if row.of.finish is not None]
        free += range(len(self._rows), self._decoder.batch)
        new = free[: len(self._waiting)]
        rest = free[len(self._waiting) :]
        for number in new:
            self._rows[number : number + 1] = [self._waiting.pop()]
        moved: dict[int, int] = {}
        for number in reversed([number for number in rest if number < len(self._rows)]):
            last = self._rows.pop()
            if number < len(self._rows):
                self._rows[number] = last
                moved[number] = moved.pop(len(self._rows), len(self._rows))  # the row may have been moved before
        if moved:
            length = max(self._rows[number].position for number in moved)
            self._decoder.copy_rows(list(moved.values()), list(moved), length)
        for number in moved:
            self._cached[number] = self._rows[number].kind
        self._fill(new)

    def _fill(self, new: list[int]) -> None:
        """Compute or copy the keys and values of the prompts of new rows."""
        other_rows = set(range(self._decoder.batch)).difference(new)
        cached_rows = (*other_rows, *(row for row in new if self._cached[row] == self._rows[row].kind))
        source_by_kind = {self._cached[row]: row for row in cached_rows}
        computed: dict[bytes, int] = {}
        sources: dict[int, int] = {}
        for row in new:
            kind = self._rows[row].kind
            length = len(self._rows[row].of.prompt) - 1
            if self._cached[row] == kind or not length:
                continue
            if (source := source_by_kind.get(kind, computed.get(kind))) is not None:
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
        """Run the model on the last token and the drafts of each row, and take the sampled tokens."""
        rows = self._rows
        decoder = self._decoder
        if not rows:
            decoder.idle()
            return
        starts = [row.position for row in rows]
        tokens = self._padded([[row.last, *row.drafts] for row in rows])
        sampled = None
        hidden = decoder.hidden(tokens, starts)
        if hidden is not None:
            places = self._tensor([[start + 1] for start in starts]) + torch.arange(
                tokens.shape[1], device=tokens.device
            )
            seeds = self._tensor([[row.seed] for row in rows]).expand_as(places)
            sampled = sample(decoder.logits(hidden)[..., : self._vocab], self._sampling, seeds, places)
        results = _shared(decoder.mesh, sampled, tokens.shape, records_kept=self._sampling.records_kept)
        taken = [self._take(row, *result) for row, result in zip(rows, results, strict=True)]
        self._keep_routes()
        if decoder.depth:
            for row, drafts in zip(rows, self._draft(hidden, taken, starts), strict=True):
                row.drafts = drafts

    def _keep_routes(self) -> None:
        """Store the routes of rows that have ended."""
        for number, row in enumerate(self._rows):
            if row.of.finish is not None and row.of.routes is None:
                row.of.routes = self._decoder.routes(number, row.position)

    def _take(self, row: _Row, chosen: list[int], logprobs: list[float], kept: list[np.ndarray]) -> list[int]:
        """Append the accepted drafts and one more token, up to a stop id or the end.

        Args:
            chosen: sampled token after each number of accepted drafts.
            logprobs, kept: of these tokens; ``kept`` is empty if it is not recorded.

        Returns:
            The tokens that follow the token that was fed.
        """
        agreed = 0
        while agreed < len(row.drafts) and row.drafts[agreed] == chosen[agreed]:
            agreed += 1
        continuation = row.of
        accepted = chosen[: agreed + 1]
        continuation.drafted += len(row.drafts)
        continuation.accepted += agreed
        for place, token in enumerate(accepted):
            continuation.tokens.append(token)
            continuation.logprobs.append(logprobs[place])
            continuation.kept += kept[place : place + 1]
            row.last = token
            row.position = row.position + 1
            if token in self._stop:
                continuation.finish = "stop"
            elif len(continuation.tokens) == continuation.max_new_tokens:
                continuation.finish = "length"
            if continuation.finish is not None:
                break
        return accepted

    def _draft(self, hidden: Tensor | None, following: list[list[int]], starts: Sequence[int]) -> list[list[int]]:
        """Draft one token per prediction depth after the last token of each row.

        A depth reads the draft of the previous one. If that draft is rejected later, its slot in the cache keeps the
        wrong keys: later drafts are slightly worse, but the text is the same.

        Args:
            hidden: [B, S, D], hidden states of the model from positions `starts` on; None on stages without the head.
            following: for each row, the tokens that follow these positions, up to the row's last token.
            starts: position of each row's first hidden state.
        """
        drafts: list[list[int]] = [[] for _ in following]
        rows = range(len(following))
        last = [len(tokens) - 1 for tokens in following]
        guesses = None
        for k in range(self._decoder.depth):
            if hidden is not None:
                ahead = [(tokens + draft)[k:] for tokens, draft in zip(following, drafts, strict=True)]
                tokens = self._padded([row + [0] * (hidden.shape[1] - len(row)) for row in ahead])
                hidden = self._decoder.draft_hidden(k, hidden, tokens, starts)
                guesses = self._decoder.logits(hidden[rows, last])[:, : self._vocab].argmax(-1)
            for draft, guess in zip(drafts, self._decoder.mesh.share(guesses, (len(following),)).tolist(), strict=True):
                draft.append(int(guess))
        return drafts

    def _padded(self, rows: list[list[int]]) -> Tensor:
        max_length = max(len(row) for row in rows)
        return self._tensor([row + [0] * (max_length - len(row)) for row in rows])

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.from_numpy(np.array(rows, np.int64)).to(self._decoder.device)  # NumPy reads lists faster


def _shared(
    mesh: ModelMesh, sampled: Sampled | None, size: Sequence[int], *, records_kept: bool
) -> list[tuple[list[int], list[float], list[np.ndarray]]]:
    """Return tokens, their log-probabilities and, if they are recorded, the ids that each one was sampled from, for
    each row. Collective over the ranks of the rows.

    Args:
        sampled: [B, S]; None on stages without the head.
        size: B and S.
    """
    values = None if sampled is None else torch.stack([sampled.tokens.double(), sampled.logprobs.double()])
    tokens, logprobs = mesh.share(values, (2, *size))
    ids: list[list[np.ndarray]] = [[] for _ in range(size[0])]
    if records_kept:
        # Of the source alone: another rank that rounds differently may keep another number of ids.
        kept = sampled.scores > -torch.inf if sampled is not None and mesh.is_source else None
        counts = mesh.share(None if kept is None else kept.sum(-1), size).long()
        flat = mesh.share(None if kept is None else kept.nonzero()[:, -1], (int(counts.sum()),))
        arrays = np.split(flat.numpy().astype(np.int32), counts.flatten().cumsum(0)[:-1].numpy())
        ids = [arrays[start : start + size[1]] for start in range(0, len(arrays), size[1])]
    return list(zip(tokens.long().tolist(), logprobs.tolist(), ids, strict=True))
