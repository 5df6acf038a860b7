"""Speed of generation against `transformers`, both with a cache: same weights and prompts, interleaved."""

import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.loading import load_for_inference
from glm46.engine.inference.sampling import Sampling
from scripts.measure.model_speed import Workload, build_ours
from scripts.measure.peer import build_peer
from scripts.measure.rounds import interleaved

PEERS = {"transformers grouped_mm": "grouped_mm", "transformers eager": "eager"}
"""Name -> implementation of the experts in `transformers`, its default first."""

OURS, GENERAL, SPECULATIVE = "ours", "ours without CPU kernel", "ours, speculative"

_TEXT_LENGTH = 200_000
"""Characters of the Python library that prompts are cut from, at equal distances."""

Rows = list[list[int]]


@dataclass(frozen=True)
class Decoding:
    """The work of every contestant, in FP32 on the CPU."""

    flavor: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    folder: Path | None = None
    """A Hugging Face or step folder; prompts are then text. None: random weights of the flavor."""
    samples: int | None = None
    """As in rollouts: so many samples of each prompt, at temperature 1. None: greedy."""


@dataclass
class _Contestant:
    run: Callable[[int], Rows]
    """Decode this number of tokens for each prompt."""
    first: list[float]
    """Seconds to the first token, per round."""
    rest: list[float]
    """Seconds from the first token to the last one, per round."""

    @property
    def whole(self) -> list[float]:
        """Seconds for all tokens, per round."""
        return [first + rest for first, rest in zip(self.first, self.rest, strict=True)]


def generation_speed(
    work: Decoding, *, rounds: int | None, speculative: bool, with_peers: bool, report: Callable[[str], None]
) -> str:
    """Decode the same prompts with every contestant and report tokens per second after the first token.

    Args:
        rounds: see `timed_rounds`.
        speculative: also decode with drafts of the prediction layers, and report how many were accepted.
        with_peers: include `transformers`.

    Raises:
        UserError: the contestants give different tokens, so their times are not comparable.
    """
    ours, prompts = _model_and_prompts(work, 1 if speculative else 0)
    drawn = work.samples is not None
    if speculative and not ours.mtp:
        raise UserError(f"--speculative: {work.folder} has no prediction layers (num_nextn_predict_layers = 0)")
    contestants = {
        OURS: _Contestant(lambda new: _ours(ours, prompts, new, drawn)[0], [], []),
        GENERAL: _Contestant(lambda new: _ours(ours, prompts, new, drawn, cpu_kernels=False)[0], [], []),
    }
    if speculative:
        drafting = partial(_ours, ours, prompts, drawn=drawn, speculative=True)
        contestants[SPECULATIVE] = _Contestant(lambda new: drafting(new_tokens=new)[0], [], [])
    if with_peers:
        for name, experts in PEERS.items():
            peer = build_peer(ours, experts).eval()
            peer.config.use_cache = peer.generation_config.use_cache = True
            contestants[name] = _Contestant(lambda new, peer=peer: _theirs(peer, prompts, new, drawn), [], [])
    given = {name: contestant.run(work.new_tokens) for name, contestant in contestants.items()}
    if work.samples is None and any(rows != given[OURS] for rows in given.values()):
        raise UserError("benchmark: the contestants give different tokens, so their times are not comparable")
    for contestant in interleaved(list(contestants.values()), rounds, report):
        contestant.first.append(_timed(contestant.run, 1))
        contestant.rest.append(_timed(contestant.run, work.new_tokens) - contestant.first[-1])
    lines = _report(work, contestants)
    if speculative:
        rows = _ours(ours, prompts, work.new_tokens, drawn, speculative=True)[1]
        drafted, accepted = sum(row.drafted for row in rows), sum(row.accepted for row in rows)
        lines.append(f"  {accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})")
    return "\n".join(lines)


def _model_and_prompts(work: Decoding, prediction_layers: int) -> tuple[Transformer, torch.Tensor]:
    cpu, samples = torch.device("cpu"), work.samples or 1
    if work.batch % samples:
        raise UserError(f"benchmark: --batch {work.batch}: must be a multiple of --samples {samples}")
    if work.folder is None:
        shape = Workload(work.flavor, work.batch, work.prompt_tokens, cpu, torch.float32, None, prediction_layers)
        ours = build_ours(shape).eval()
        generator = torch.Generator().manual_seed(0)
        size = (work.batch // samples, work.prompt_tokens)
        prompts = torch.randint(0, ours.shape.vocab_size, size, generator=generator)
        return ours, prompts.repeat_interleave(samples, 0)
    ours, tokenizer = load_for_inference(work.folder, tokenizer=None, dtype=torch.float32, device=cpu)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    ids = torch.from_numpy(tokenizer.encode(text[:_TEXT_LENGTH]).astype("int64"))
    apart = len(ids) // (work.batch // samples)
    if apart < work.prompt_tokens:
        raise UserError(
            f"benchmark: --batch {work.batch} --prompt-tokens {work.prompt_tokens}: more than the {len(ids)} tokens of "
            "text at hand; lower one of them"
        )
    starts = [i // samples * apart for i in range(work.batch)]
    return ours, torch.stack([ids[start : start + work.prompt_tokens] for start in starts])


def _report(work: Decoding, contestants: dict[str, _Contestant]) -> list[str]:
    rounds = len(contestants[OURS].rest)
    kind = f"{work.samples} samples per prompt at temperature 1" if work.samples else "greedy decoding"
    lines = [
        f"{kind} of {work.folder or work.flavor}, batch {work.batch}, {work.new_tokens} tokens after a prompt of "
        f"{work.prompt_tokens}, float32, {torch.get_num_threads()} threads; medians of {rounds} interleaved rounds",
        f"  {'':<24} {'first token, ms':>16} {'then tokens/s':>14} {'of all, tokens/s':>17}",
    ]
    decoded = work.batch * (work.new_tokens - 1)
    for name, contestant in contestants.items():
        first, rest = statistics.median(contestant.first), statistics.median(contestant.rest)
        whole = statistics.median(contestant.whole)
        lines.append(
            f"  {name:<24} {first * 1e3:16.1f} {decoded / rest:14.1f} {work.batch * work.new_tokens / whole:17.1f}"
        )
    # Rollouts wait for whole samples; of decoding, the time of the prompt is another matter.
    measure = "whole" if work.samples else "rest"
    peers = [getattr(contestants[name], measure) for name in PEERS if name in contestants]
    for name in (OURS, GENERAL, SPECULATIVE):
        if peers and name in contestants:
            own_times = getattr(contestants[name], measure)
            default, fastest = (
                statistics.median(theirs / own for theirs, own in zip(times, own_times, strict=True))
                for times in (peers[0], [min(times) for times in zip(*peers, strict=True)])
            )
            lines.append(f"  {name}: {default:.2f} times transformers' default, {fastest:.2f} times the fastest peer")
    return lines


def _ours(
    model: Transformer,
    prompts: torch.Tensor,
    new_tokens: int,
    drawn: bool,
    *,
    speculative: bool = False,
    cpu_kernels: bool = True,
) -> tuple[Rows, list[Continuation]]:
    rows = [Continuation(prompt, new_tokens, seed) for seed, prompt in enumerate(prompts.tolist())]
    decoder = decoder_for(model, rows, drafts=speculative, cpu_kernels=cpu_kernels)
    sampling = Sampling(1.0 if drawn else 0.0)
    Generation(decoder, rows, sampling=sampling, stop=frozenset(), vocab_size=model.shape.vocab_size).run()
    return [row.tokens for row in rows], rows


def _theirs(peer, prompts: torch.Tensor, new_tokens: int, drawn: bool) -> Rows:
    mask = torch.ones_like(prompts)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if drawn else {"do_sample": False}
    with torch.inference_mode():
        out = peer.generate(
            prompts, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            eos_token_id=None, pad_token_id=0, use_cache=True, **sampling,
        )  # fmt: skip
    return out[:, prompts.shape[1] :].tolist()


def _timed(run: Callable[[int], Rows], new_tokens: int) -> float:
    started = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - started
