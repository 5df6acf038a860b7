"""Tokens for a batch of prompts, one or, with drafts of the prediction layers, several at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from glm46.inference.decoder import Decoder
from glm46.inference.sampling import Sampling, draw, draw_again, probabilities
from glm46.model.transformer import Transformer


class Generation:
    """A batch of prompts being continued; iterate over it for the new tokens.

    Each round runs the model once. In a speculative round the model also checks the tokens that the prediction layers
    drafted in the round before, so that one run can give several tokens; they are those that it would give one by one.

    Args:
        prompts: token ids, each at least one.
        max_new_tokens: most tokens per row.
        stop: ids that end a row; they are not given out.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        speculative: draft with the model's prediction layers.
        cpu_kernels: see `Decoder`.

    Attributes:
        done: for each row, whether it has ended.
        drafted, accepted: tokens that the prediction layers proposed, and how many of them the model agreed with.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
        vocab_size: int,
        speculative: bool = False,
        cpu_kernels: bool = True,
    ):
        self._model, self._sampling, self._stop, self._vocab = model, sampling, stop, vocab_size
        self._rows = [list(prompt) for prompt in prompts]
        self._ends = [len(row) + max_new_tokens for row in self._rows]
        self.done = [False] * len(self._rows)
        self._random = [torch.Generator().manual_seed(sampling.seed) for _ in self._rows]
        self._depth = len(model.mtp) if speculative else 0
        self.drafted = self.accepted = 0
        self._cpu_kernels = cpu_kernels

    @torch.inference_mode()
    def __iter__(self) -> Iterator[list[list[int]]]:
        """New tokens of each row, round by round, until all rows are done."""
        longest = max(self._ends) + self._depth + 1
        rows = len(self._rows)
        with Decoder(self._model, batch=rows, max_length=longest, cpu_kernels=self._cpu_kernels) as decoder:
            tokens = self._padded(self._rows)
            starts = [0] * len(self._rows)
            hidden = decoder.hidden(tokens, starts)
            last = [len(row) - 1 for row in self._rows]
            logits = decoder.logits(hidden[range(len(last)), last]).unsqueeze(1)
            drafts: list[list[int]] = [[] for _ in self._rows]
            # The prediction layers read the prompt shifted by one, whose last token is the one just chosen.
            known = [row[1:] for row in self._rows]
            while True:
                chosen = self._choose(logits, drafts)
                yield self._take(chosen)
                if all(self.done):
                    return
                if self._depth:
                    known = [before + new for before, new in zip(known, chosen, strict=True)]
                    drafts = self._draft(decoder, hidden, known, starts)
                starts = [len(row) - 1 for row in self._rows]
                fed = [[row[-1], *draft] for row, draft in zip(self._rows, drafts, strict=True)]
                hidden = decoder.hidden(self._padded(fed), starts)
                logits = decoder.logits(hidden)
                known = [[] for _ in self._rows]

    def _padded(self, rows: list[list[int]]) -> Tensor:
        longest = max(len(row) for row in rows)
        device = self._model.embed_tokens.weight.device
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)

    def _choose(self, logits: Tensor, drafts: list[list[int]]) -> list[list[int]]:
        """For each row the drafts that the model agrees with, and one token more.

        Args:
            logits: FP32 [B, 1 + drafts, V]; row b's place s follows its s-th draft.
        """
        logits = logits[..., : self._vocab]
        if self._sampling.is_greedy:
            best = logits.argmax(-1).tolist()  # sync: the tokens are needed to go on
            chosen = []
            for draft, own in zip(drafts, best, strict=True):
                agreed = next((s for s, token in enumerate(draft) if token != own[s]), len(draft))
                chosen.append(own[: agreed + 1])
        else:
            of_rows = logits.cpu()
            chosen = [self._draw(of_rows[b], drafts[b], self._random[b]) for b in range(len(drafts))]
        for b, draft in enumerate(drafts):
            if not self.done[b]:
                self.drafted += len(draft)
                self.accepted += len(chosen[b]) - 1
        return chosen

    def _draw(self, logits: Tensor, draft: list[int], generator: torch.Generator) -> list[int]:
        chosen: list[int] = []
        for place, token in enumerate(draft):
            chances = probabilities(logits[place], self._sampling)
            if torch.rand((), generator=generator) >= chances[token]:
                return [*chosen, draw_again(chances, token, generator)]
            chosen.append(token)
        return [*chosen, draw(probabilities(logits[len(draft)], self._sampling), generator)]

    def _take(self, chosen: list[list[int]]) -> list[list[int]]:
        """Append the tokens to their rows, up to a stop or the row's end; returns what is given out."""
        given = []
        for b, tokens in enumerate(chosen):
            if self.done[b]:
                given.append([])
                chosen[b] = tokens[:1]
                continue
            stop = next((i for i, token in enumerate(tokens) if token in self._stop), None)
            kept = tokens[:stop][: self._ends[b] - len(self._rows[b])]
            given.append(kept)
            self.done[b] = stop is not None or len(self._rows[b]) + len(kept) == self._ends[b]
            if not self.done[b]:
                self._rows[b] += kept
        return given

    def _draft(
        self, decoder: Decoder, hidden: Tensor, known: list[list[int]], starts: Sequence[int]
    ) -> list[list[int]]:
        """Tokens after the last one of each row, guessed by the prediction layers one after another.

        A later layer looks at a draft of the one before it. When that draft turns out wrong, the slot keeps what was
        made from it: later drafts are a little worse, the text is the same.

        Args:
            hidden: [B, S, D], of the model at positions `starts` and on.
            known: for each row, the tokens that follow those positions; the last of them is the row's last token.
        """
        drafts: list[list[int]] = [[] for _ in self._rows]
        rows = range(len(self._rows))
        last = [len(tokens) - 1 for tokens in known]
        for k in range(self._depth):
            ahead = [(tokens + draft)[k:] for tokens, draft in zip(known, drafts, strict=True)]
            width = hidden.shape[1]
            tokens = self._padded([row + [0] * (width - len(row)) for row in ahead])
            hidden = decoder.draft_hidden(k, hidden, tokens, starts)
            guesses = decoder.logits(hidden[rows, last])[:, : self._vocab].argmax(-1)
            for draft, guess in zip(drafts, guesses.tolist(), strict=True):  # sync: the next layer reads the guess
                draft.append(guess)
        return drafts


@torch.no_grad()
def continue_tokens(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    stop: frozenset[int],
    vocab_size: int,
    device: torch.device,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Continue a prompt without a cache: each token runs the model on the whole sequence.

    For models that `Decoder` cannot run, because their layers are sharded over ranks (FSDP2 gathers the weights only in
    the forward of the whole model). Collective if the model is: all ranks call it with the same arguments.

    Args:
        logits_of: the model, int64 [1, S] to [1, S, V].
        prompt: token ids, at least one.
        temperature: 0 takes the most likely token; otherwise draw with a fixed seed, the same on every rank.
        stop: ids that end the text.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        is_stopped: called before each token; true ends the text. All ranks must get the same answer.

    Returns:
        The new ids, without the stop id.
    """
    sampling, generator, tokens = Sampling(temperature), torch.Generator().manual_seed(0), list(prompt)
    for _ in range(max_new_tokens):
        if is_stopped():
            break
        logits = logits_of(torch.tensor([tokens], device=device))[0, -1, :vocab_size].float().cpu()
        token = int(logits.argmax()) if sampling.is_greedy else draw(probabilities(logits, sampling), generator)
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
