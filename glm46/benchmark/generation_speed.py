"""Greedy decoding with a cache against `transformers` with its cache: same weights, prompt and threads, in turns."""

import statistics
import time
from collections.abc import Callable

import torch

from glm46.benchmark.model_speed import Workload, build_ours
from glm46.benchmark.peer import build_peer
from glm46.config.errors import UserError
from glm46.inference.generation import Generation
from glm46.inference.sampling import Sampling
from glm46.model.transformer import Transformer

PEERS = ("grouped_mm", "eager")
"""Its implementations of the experts; the fastest of each round is what we are compared with."""

Rows = list[list[int]]


def generation_speed(
    flavor: str, batch: int, *, prompt_tokens: int, new_tokens: int, rounds: int, with_peers: bool
) -> str:
    """Decode the same prompts with everybody and report tokens per second after the prompt.

    Raises:
        UserError: somebody gives other tokens, so that times would compare different work.
    """
    work = Workload(flavor, batch, prompt_tokens, torch.device("cpu"), torch.float32)
    ours = build_ours(work).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, ours.shape.vocab_size, (batch, prompt_tokens), generator=generator)
    runs: dict[str, Callable[[int], Rows]] = {"ours": lambda new: _ours(ours, prompts, new)}
    if with_peers:
        for implementation in PEERS:
            peer = build_peer(ours, implementation).eval()
            peer.config.use_cache = peer.generation_config.use_cache = True
            runs[implementation] = lambda new, peer=peer: _theirs(peer, prompts, new)
    given = {name: run(new_tokens) for name, run in runs.items()}
    if any(rows != given["ours"] for rows in given.values()):
        raise UserError("benchmark: the contestants give different tokens; a comparison means nothing")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(_timed(runs[name], new_tokens) - _timed(runs[name], 1))
    decoded = batch * (new_tokens - 1)
    lines = [
        f"greedy decoding of {flavor}, batch {batch}, {new_tokens} tokens after a prompt of {prompt_tokens}, float32, "
        f"{torch.get_num_threads()} threads; medians of {rounds} interleaved rounds, time of the prompt taken off"
    ]
    for name, times in seconds.items():
        title = name if name == "ours" else f"transformers {name}"
        lines.append(f"  {title:<24} {decoded / statistics.median(times):10.1f} tokens/s")
    if with_peers:
        ratios = [min(seconds[peer][i] for peer in PEERS) / seconds["ours"][i] for i in range(rounds)]
        lines.append(f"  {'ours / fastest peer':<24} {statistics.median(ratios):10.2f} (median of the rounds' ratios)")
    return "\n".join(lines)


def _ours(model: Transformer, prompts: torch.Tensor, new_tokens: int) -> Rows:
    generation = Generation(
        model, prompts.tolist(), max_new_tokens=new_tokens, sampling=Sampling(), stop=frozenset(),
        vocab_size=model.shape.vocab_size,
    )  # fmt: skip
    rows: Rows = [[] for _ in range(len(prompts))]
    for given in generation:
        for row, tokens in zip(rows, given, strict=True):
            row += tokens
    return rows


def _theirs(peer, prompts: torch.Tensor, new_tokens: int) -> Rows:
    mask = torch.ones_like(prompts)
    with torch.inference_mode():
        out = peer.generate(
            prompts, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=True,
        )  # fmt: skip
    return out[:, prompts.shape[1] :].tolist()


def _timed(run: Callable[[int], Rows], new_tokens: int) -> float:
    started = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - started
