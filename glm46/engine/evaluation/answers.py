"""Answers to requests that rank 0 makes while it runs the tasks of lm-eval; all ranks compute them."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from glm46.engine.evaluation.results import Results
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.scoring import MOST_SLOTS, ContinuationRequest, ContinuationScore, score
from glm46.files.progress import tokens_progress
from glm46.storage.chats.chat import opened_thought
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.tokenizer_files import stop_ids

_ROUNDS = 4
"""Number of continuations of a row of the decoder between two saves."""


class EvaluationPrompt(NamedTuple):
    """A text to continue."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...]
    """Stop sequences: the text ends before the first one."""
    sampling: Sampling
    seed: int
    thinks: bool = False
    """True if the model thinks first: then the text is what it generates after the thought."""


class Answers:
    """Answers to requests by a model that was loaded for inference. Rank 0 calls `scores`, `texts` and `end`; the other
    ranks take part in the computation with `follow`.

    Args:
        results: stores the answers of rank 0, so that a stopped call can continue.
    """

    def __init__(self, loaded: Loaded, results: Results):
        self._world_size = loaded.mesh.layout.world_size
        self._loaded = loaded
        self._results = results

    def follow(self) -> None:
        """Take part in the computation of rank 0 until its `end`. For all other ranks."""
        while True:
            message = [None]
            dist.broadcast_object_list(message, src=0)
            if message[0] is None:
                return
            name, requests = message[0]
            getattr(self, name)(requests)

    def end(self) -> None:
        """Let the other ranks return from `follow`. For rank 0."""
        if self._world_size > 1:
            dist.broadcast_object_list([None], src=0)

    def _lead(self, name: str, requests: Sequence[ContinuationRequest | EvaluationPrompt], *more: object) -> None:
        """Run a method on all ranks, with further arguments on rank 0."""
        if self._world_size > 1:
            dist.broadcast_object_list([(name, requests)], src=0)
        getattr(self, name)(requests, *more)

    def scores(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        """Return scores in the order of the requests."""
        keys = [_key("score", request) for request in requests]
        missing = {
            key: request for key, request in zip(keys, requests, strict=True) if key not in self._results.figures
        }
        if missing:
            total = sum(len(request.inputs) for request in missing.values())
            with tokens_progress("scoring", total, partial(print, file=sys.stderr)) as advance:
                self._lead("_score", [*missing.values()], [*missing], advance)
        figures = (self._results.figures[key] for key in keys)
        return [ContinuationScore(logprob, bool(is_greedy)) for logprob, is_greedy in figures]

    def texts(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        """Return texts in the order of the prompts."""
        keys = [_key("text", prompt) for prompt in prompts]
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._results.figures}
        total = sum(prompt.max_new_tokens for prompt in missing.values())
        with tokens_progress("writing", total, partial(print, file=sys.stderr)) as advance:
            for sampling in dict.fromkeys(prompt.sampling for prompt in missing.values()):
                group = [(key, prompt) for key, prompt in missing.items() if prompt.sampling == sampling]
                # The longest ones first; equal prompts are neighbours and share their computation.
                group.sort(key=lambda pair: (-len(pair[1].tokens) - pair[1].max_new_tokens, pair[1].tokens))
                self._lead("_continue", [prompt for _, prompt in group], [key for key, _ in group], advance)
        tokenizer = self._loaded.tokenizer
        return [
            text_of(tokenizer, [int(token) for token in self._results.figures[key]], prompt)
            for key, prompt in zip(keys, prompts, strict=True)
        ]

    def _score(
        self,
        requests: Sequence[ContinuationRequest],
        keys: Sequence[str] = (),
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Compute scores. Collective over all ranks; ranks without keys do not store them."""
        model, _, mesh = self._loaded
        for batch in score(model, mesh, requests, advance):
            for number, result in batch:
                if keys:
                    self._results.add(keys[number], [result.logprob, float(result.is_greedy)])

    def _continue(
        self,
        prompts: Sequence[EvaluationPrompt],
        keys: Sequence[str] = (),
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Compute continuations like `_score`, for prompts with equal sampling, the longest first."""
        model, tokenizer, mesh = self._loaded
        first = 0
        replicas = mesh.layout.dp_degree
        while first < len(prompts):
            max_length = len(prompts[first].tokens) + prompts[first].max_new_tokens
            rows = max(1, MOST_SLOTS // max_length)
            portion = prompts[first : first + rows * _ROUNDS * replicas]
            share = -(-len(portion) // replicas)
            local_prompts = portion[mesh.row_group * share :][:share]
            continuations = [
                Continuation(prompt.tokens, prompt.max_new_tokens, prompt.seed) for prompt in local_prompts
            ]
            generation = Generation(
                Decoder(model, batch=max(min(rows, len(local_prompts)), 1), max_length=max_length, mesh=mesh),
                continuations,
                sampling=prompts[first].sampling,
                stop=frozenset(stop_ids(tokenizer)),
                vocab_size=tokenizer.vocab_size,
            )
            for _ in generation:
                for item, prompt in zip(continuations, local_prompts, strict=True):
                    if item.finish is None and item.tokens and has_ended(tokenizer, item.tokens, prompt):
                        item.finish = "stop"
            token_rows = mesh.gather_rows([item.text(frozenset(stop_ids(tokenizer))) for item in continuations])
            for key, tokens in zip(keys[first : first + len(portion)], token_rows, strict=False):
                self._results.add(key, [*tokens])
            first += len(portion)
            advance(sum(map(len, token_rows)))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], prompt: EvaluationPrompt) -> str:
    """Return the generated text without control tokens, up to the first stop sequence. A thought is not part of it:
    while the thought has not ended, the text is empty."""
    not_text = tokenizer.control_ids
    text = _after_thought(tokenizer, [token for token in tokens if token not in not_text], prompt)
    for end in prompt.until:
        text = text.split(end)[0]
    return text


def has_ended(tokenizer: Tokenizer, tokens: Sequence[int], prompt: EvaluationPrompt) -> bool:
    """True if a stop sequence was generated. As in lm-eval's `hf`, it may contain control tokens."""
    text = _after_thought(tokenizer, tokens, prompt)
    return any(end in text for end in prompt.until)


def _after_thought(tokenizer: Tokenizer, tokens: Sequence[int], prompt: EvaluationPrompt) -> str:
    """Return the text of a turn without its thought; empty while the thought is open."""
    text = tokenizer.decode([*tokens])
    if not prompt.thinks:
        return text
    # In some formats the prompt contains the tag that begins the thought.
    answer = f"{opened_thought(tokenizer, thinking=True)}{text}".rpartition("</think>")[2]
    return "" if "<think>" in answer else answer.lstrip()


def _key(kind: str, request: ContinuationRequest | EvaluationPrompt) -> str:
    """Return a key with everything, except the model, that determines an answer."""
    return f"{kind}/{hashlib.sha256(json.dumps(request, default=vars).encode()).hexdigest()[:32]}"
