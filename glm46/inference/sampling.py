"""From logits to a token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token; else logits are divided by it and a token is drawn."""
    top_k: int | None = None
    """Draw among this many most likely tokens only."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Draw among tokens with at least this part of the most likely token's probability."""
    seed: int = 0
    """Start of the random numbers; each row of a batch has its own, so a row does not depend on its neighbours."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from: FP32 [V] that sums to 1; filters apply in the order of the fields.

    Args:
        logits: FP32 [V].
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
    """A token drawn with the given probabilities, FP32 [V] on the CPU."""
    return int(torch.multinomial(chances, 1, generator=generator))


def draw_again(chances: Tensor, rejected: int, generator: torch.Generator) -> int:
    """A token for a draft that was rejected: drawn from what is left without it.

    Accepting a draft d with probability p(d) and else drawing from p without d gives d with p(d) and any other token t
    with (1 - p(d)) p(t) / (1 - p(d)) = p(t): the draft does not change what is drawn. Source: arXiv 2211.17192.
    """
    left = chances.clone()
    left[rejected] = 0.0
    return draw(left, generator)
