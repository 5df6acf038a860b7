"""Continuation of a prompt by a network in training."""

import torch
import torch.distributed as dist

from glm46.engine.inference.sampling import continue_tokens
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.network import Network
from glm46.storage.data.tokenizer import Tokenizer

_MAX_NEW_TOKENS = 64
_TEMPERATURE = 0.6
"""Small models repeat themselves when they always take the most likely token."""


def continue_prompt(network: Network, tokenizer: Tokenizer, stop: StopRequest) -> list[str]:
    """Return lines with the continuation of [inference] prompt. Collective. A stop request on any rank ends the text.

    Args:
        network: a network without pipeline, tensor or context parallelism.
    """

    def is_stopped() -> bool:
        """Return whether any rank has received a signal. Collective."""
        requested = torch.tensor(stop.signal_name is not None, dtype=torch.int32)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    plan = network.plan
    prompt = tokenizer.encode(plan.config.inference.prompt).tolist()
    new_tokens = continue_tokens(
        network.models[0],
        prompt,
        max_new_tokens=min(_MAX_NEW_TOKENS, plan.shape.max_position_embeddings - len(prompt)),
        temperature=_TEMPERATURE,
        stop=frozenset({tokenizer.eos_id}),
        vocab_size=tokenizer.vocab_size,
        device=network.cluster.device,
        is_stopped=is_stopped,
    )
    text = plan.config.inference.prompt + "│" + tokenizer.decode(new_tokens)
    return ["Continuation of the prompt (prompt, then generated text):", "", text, ""]
