"""Sampling of tokens from logits: each token is a function of its own logits, seed and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm46.compute.model.init import GAMMA, mixed


@dataclass(frozen=True)
class Sampling:
    """Options of sampling."""

    temperature: float = 0.0
    """0 takes the most likely token; otherwise logits are divided by it and a token is sampled."""
    top_k: int | None = None
    """Sample only among this many most likely tokens."""
    top_p: float = 1.0
    """Sample only among the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Sample only among tokens whose probability is at least this fraction of the largest one."""
    records_kept: bool = False
    """Record the ids that the filters keep for each token, see `Continuation.kept`."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def scores(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits of the distribution to sample from, FP32 [..., V]. Tokens that a filter excludes get -inf.

    The filters apply in the order of the fields of `Sampling`. At temperature 0 the logits are returned unchanged.

    Args:
        logits: FP32 [..., V].
    """
    if sampling.is_greedy:
        return logits
    filtered = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < filtered.shape[-1]:
        filtered = filtered.masked_fill(filtered < filtered.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1.0:
        probabilities, order = filtered.softmax(-1).sort(descending=True, stable=True)
        sum_before = probabilities.cumsum(-1) - probabilities
        excluded = torch.zeros_like(sum_before, dtype=torch.bool).scatter_(-1, order, sum_before >= sampling.top_p)
        filtered = filtered.masked_fill(excluded, -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = filtered.softmax(-1)
        filtered = filtered.masked_fill(
            probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -torch.inf
        )
    return filtered


class Sampled(NamedTuple):
    """Sampled tokens and what they were sampled from."""

    tokens: Tensor
    """int64 [...]."""
    logprobs: Tensor
    """FP32 [...]: logarithms of the probabilities of the tokens: in the distribution that they were sampled from, or,
    for the most likely tokens, in the distribution of the logits."""
    scores: Tensor
    """FP32 [..., V]: see `scores`."""


def sample(logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor) -> Sampled:
    """Sample one token of each row, or take the most likely one.

    A sampled token is the first one at which the running sum of the probabilities, in FP64, exceeds
    `uniform(seeds, positions)`.

    Args:
        logits: FP32 [..., V].
        seeds: int64 [...].
        positions: int64 [...], position of the token in its sequence.
    """
    filtered = scores(logits, sampling)
    probabilities = filtered.softmax(-1)
    if sampling.is_greedy:
        tokens = filtered.argmax(-1, keepdim=True)
    else:
        sums = probabilities.cumsum(-1, dtype=torch.float64)
        # Less than the last sum, whatever it rounds to: the number is at most 1 - 2**-52.
        tokens = torch.searchsorted(sums, uniform(seeds, positions).unsqueeze(-1) * sums[..., -1:], right=True)
    return Sampled(tokens.squeeze(-1), probabilities.gather(-1, tokens).log().squeeze(-1), filtered)


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
    """Continue a prompt without a cache: each token runs the model on the full sequence.

    For models that `Decoder` cannot run, because their layers are sharded over ranks (FSDP2 gathers the weights only in
    the forward of the whole model). Collective if the model is: all ranks call it with the same arguments.

    Args:
        logits_of: runs the model, int64 [1, S] to [1, S, V].
        prompt: token ids, at least one.
        temperature: 0 takes the most likely token; otherwise sample with a fixed seed, the same on every rank.
        stop: ids that end the text.
        vocab_size: ids from here on are padding rows of the head and are never taken.
        is_stopped: called before each token; True ends the text. Must return the same value on all ranks.

    Returns:
        The new ids, without the stop id.
    """
    sampling = Sampling(temperature)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        if is_stopped():
            break
        logits = logits_of(torch.tensor([tokens], device=device))[0, -1:, :vocab_size].float()
        position = torch.tensor([len(tokens)], device=device)
        sampled = sample(logits, sampling, torch.zeros_like(position), position)
        token = int(sampled.tokens)  # sync: the next call needs the token
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return FP64 numbers uniform in [0, 1 - 2**-52]: a hash of seed and position, both int64.

    Each number is an output of SplitMix64 (doi 10.1145/2660193.2660195), whose state starts with its output for the
    seed, so that samples of neighbouring seeds and positions are independent.
    """
    state = mixed(seeds + GAMMA) + positions * GAMMA
    return mixed(state + GAMMA).bitwise_and(2**52 - 1).double() * 2.0**-52
