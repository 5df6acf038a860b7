"""Text from a model, by computing the whole sequence again for each token: short samples while training."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
    """Continue a prompt.

    Args:
        logits_of: the model, int64 [1, S] to [1, S, V]. On many ranks all must call this with the same arguments.
        prompt: token ids, at least one.
        temperature: 0 takes the most likely token; else tokens are drawn with a fixed seed, the same on every rank.
        stop: ids that end the text.
        is_stopped: asked before each token; true ends the text. On many ranks all must get the same answer.
        vocab_size: ids from here on are padding rows of the head and are never taken.

    Returns:
        The new ids, without the stopping one.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        if is_stopped():
            break
        logits = logits_of(torch.tensor([tokens], device=device))[0, -1, :vocab_size].float().cpu()
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
