"""Text generation for a batch of prompts, with a cache and, on request, drafts of the prediction layers."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from glm46.inference.decoder import Decoder
from glm46.inference.sampling import Sampling, draw, draw_again, probabilities
from glm46.model.transformer import Transformer


class Generation:
    """Continues a batch of prompts; iterate over it for the new tokens.

    Each round runs the model once. With `speculative`, the run also checks the tokens that the prediction layers
    drafted in the previous round, so one round can give several tokens. Greedy tokens are the same as without drafts;
    sampled tokens have the same distribution.

    Args:
        prompts: token ids, at least one per prompt.
        max_new_tokens: most new tokens per row.
        stop: ids that end a row; they are not part of the output.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        speculative: draft with the model's prediction layers.
        cpu_kernels: see `Decoder`.

    Attributes:
        done: for each row, whether it has ended.
        drafted, accepted: number of tokens that the prediction layers drafted, and that the model accepted.
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
        """Yield the new tokens of each row, one list per round, until all rows are done."""
        longest = max(self._ends) + self._depth + 1
        rows = len(self._rows)
        with Decoder(self._model, batch=rows, max_length=longest, cpu_kernels=self._cpu_kernels) as decoder:
            tokens = self._padded(self._rows)
            starts = [0] * len(self._rows)
            hidden = decoder.hidden(tokens, starts)
            last = [len(row) - 1 for row in self._rows]
            logits = decoder.logits(hidden[range(len(last)), last]).unsqueeze(1)
            drafts: list[list[int]] = [[] for _ in self._rows]
            # The prediction layers read the prompt shifted by one; its last token is the first chosen one.
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
        """For each row, the accepted drafts and one more token.

        Args:
            logits: FP32 [B, 1 + drafts, V]; index s predicts the token after s drafts.
        """
        logits = logits[..., : self._vocab]
        if self._sampling.is_greedy:
            best = logits.argmax(-1).tolist()  # sync: the next round needs the tokens
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
        """Append the tokens to their rows, up to a stop id or the row's end; returns the new tokens of each row."""
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
        """Draft one token per prediction layer after the last token of each row.

        A layer reads the draft of the layer before it. If that draft is rejected later, its slot in the cache keeps the
        wrong keys: later drafts are slightly worse, the text is the same.

        Args:
            hidden: [B, S, D], of the model from positions `starts` on.
            known: for each row, the tokens that follow those positions, up to the row's last token.
            starts: position of each row's first hidden state.
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
            for draft, guess in zip(drafts, guesses.tolist(), strict=True):  # sync: the next layer reads the draft
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
