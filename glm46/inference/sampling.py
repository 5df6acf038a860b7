"""Sampling of a token from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    temperature: float = 0.0
    """0 takes the most likely token; otherwise logits are divided by it and a token is drawn."""
    top_k: int | None = None
    """Draw only among this many most likely tokens."""
    top_p: float = 1.0
    """Draw only among the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Draw only among tokens whose probability is at least this fraction of the largest one."""
    seed: int = 0
    """Seed of each row's own generator: the tokens of a row do not depend on other rows."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities to draw a token from, FP32 [V]. Filters apply in the order of the fields of `Sampling`.

    Args:
        logits: FP32 [V].
        sampling: with a temperature above 0.
    """
    scores = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        chances, order = scores.softmax(-1).sort(descending=True, stable=True)
        before = chances.cumsum(-1) - chances
        scores = scores.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    if sampling.min_p > 0.0:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    return scores.softmax(-1)


def draw(chances: Tensor, generator: torch.Generator) -> int:
    """Draw a token with the given probabilities, FP32 [V] on the CPU."""
    return int(torch.multinomial(chances, 1, generator=generator))


def draw_again(chances: Tensor, rejected: int, generator: torch.Generator) -> int:
    """Draw the token that replaces a rejected draft: from the probabilities without it.

    A draft d is accepted with probability p(d); otherwise the token is drawn from p without d. This gives d with
    probability p(d), and any other token t with (1 - p(d)) p(t) / (1 - p(d)) = p(t), so drafts do not change the
    distribution. Source: arXiv 2211.17192.
    """
    left = chances.clone()
    left[rejected] = 0.0
    return draw(left, generator)
