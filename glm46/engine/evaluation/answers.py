"""Answers to requests that rank 0 makes while it runs somebody else's tasks; all ranks compute them."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from glm46.engine.evaluation.results import Results
from glm46.engine.evaluation.task_names import TASKS
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation
from glm46.engine.inference.loading import Loaded
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.scoring import MOST_SLOTS, ContinuationRequest, ContinuationScore, score
from glm46.files.progress import tokens_progress
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.tokenizer_files import stop_ids

_ROUNDS = 4
"""Continuations of a row of the decoder between two saves."""


class EvaluationPrompt(NamedTuple):
    """A text to continue."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...]
    """The text ends before the first of these."""
    sampling: Sampling
    seed: int
    thinks: bool = False
    """The model thinks first: the text is what it writes behind the thought."""


class Keys(NamedTuple):
    """The names that messages give to what the user states."""

    names: str = "--tasks"
    folders: str = "--task-folder"
    fewshot: str = "--fewshot"
    run_code: str = "allow it with --run-code"
    """The remedy of tasks that run what the model writes."""
    others: tuple[str, ...] = TASKS
    """Names in the same place that are not of lm-eval."""


class Answering(Protocol):
    """The generator of answers on rank 0."""

    def scores(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        """Scores in the order of the requests."""
        ...

    def texts(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        """Texts in the order of the prompts."""
        ...


class FirstRankLeads:
    """Methods that rank 0 calls and all ranks run, the others from `follow`."""

    def __init__(self, world_size: int):
        self._world_size = world_size

    def follow(self) -> None:
        """Compute with rank 0 until its `end`. On the other ranks."""
        while True:
            found = [None]
            dist.broadcast_object_list(found, src=0)
            if found[0] is None:
                return
            name, requests = found[0]
            getattr(self, name)(requests)

    def end(self) -> None:
        """Let the other ranks return from `follow`. On rank 0."""
        if self._world_size > 1:
            dist.broadcast_object_list([None], src=0)

    def _lead(self, name: str, requests: Sequence[ContinuationRequest | EvaluationPrompt], *own: Any) -> Any:
        """Run a method on all ranks; rank 0 gives it further arguments."""
        if self._world_size > 1:
            dist.broadcast_object_list([(name, requests)], src=0)
        return getattr(self, name)(requests, *own)


class Answers(FirstRankLeads):
    """Answers requests with a model that was loaded for inference; see `Answering`.

    Args:
        results: keep the answers of rank 0, so that a stopped call goes on.
    """

    def __init__(self, loaded: Loaded, results: Results):
        super().__init__(loaded.mesh.layout.world_size)
        self._loaded, self._results = loaded, results

    def scores(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        """See `Answering`."""
        keys = [_key("score", request) for request in requests]
        missing = {key: one for key, one in zip(keys, requests, strict=True) if key not in self._results.figures}
        if missing:
            total = sum(len(request.inputs) for request in missing.values())
            with tokens_progress("scoring", total, partial(print, file=sys.stderr)) as advance:
                self._lead("_score", [*missing.values()], [*missing], advance)
        found = (self._results.figures[key] for key in keys)
        return [ContinuationScore(logprob, bool(is_greedy)) for logprob, is_greedy in found]

    def texts(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        """See `Answering`."""
        keys = [_key("text", prompt) for prompt in prompts]
        missing = {key: one for key, one in zip(keys, prompts, strict=True) if key not in self._results.figures}
        total = sum(prompt.max_new_tokens for prompt in missing.values())
        with tokens_progress("writing", total, partial(print, file=sys.stderr)) as advance:
            for sampling in dict.fromkeys(prompt.sampling for prompt in missing.values()):
                some = [(key, prompt) for key, prompt in missing.items() if prompt.sampling == sampling]
                # The longest ones first; equal prompts are neighbours and share their computation.
                some.sort(key=lambda pair: (-len(pair[1].tokens) - pair[1].max_new_tokens, pair[1].tokens))
                self._lead("_continue", [prompt for _, prompt in some], [key for key, _ in some], advance)
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
        """Compute scores. Collective over all ranks; those without keys keep none."""
        model, _, mesh = self._loaded
        for batch in score(model, mesh, requests, advance):
            for number, found in batch:
                if keys:
                    self._results.add(keys[number], [found.logprob, float(found.is_greedy)])

    def _continue(
        self,
        prompts: Sequence[EvaluationPrompt],
        keys: Sequence[str] = (),
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """As `_score`, for prompts of one sampling, the longest first."""
        model, tokenizer, mesh = self._loaded
        first, replicas = 0, mesh.layout.dp_degree
        while first < len(prompts):
            longest = len(prompts[first].tokens) + prompts[first].max_new_tokens
            rows = max(1, MOST_SLOTS // longest)
            some = prompts[first : first + rows * _ROUNDS * replicas]
            share = -(-len(some) // replicas)
            mine = some[mesh.row_group * share :][:share]
            written = [Continuation(one.tokens, one.max_new_tokens, one.seed) for one in mine]
            generation = Generation(
                Decoder(model, batch=max(min(rows, len(mine)), 1), max_length=longest, mesh=mesh),
                written,
                sampling=prompts[first].sampling,
                stop=frozenset(stop_ids(tokenizer)),
                vocab_size=tokenizer.vocab_size,
            )
            for _ in generation:
                for one, prompt in zip(written, mine, strict=True):
                    if one.finish is None and one.tokens and has_ended(tokenizer, one.tokens, prompt):
                        one.finish = "stop"
            found = mesh.gather_rows([one.text(frozenset(stop_ids(tokenizer))) for one in written])
            for key, tokens in zip(keys[first : first + len(some)], found, strict=False):
                self._results.add(key, [*tokens])
            first += len(some)
            advance(sum(map(len, found)))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], prompt: EvaluationPrompt) -> str:
    """The text that was written, without control tokens, up to the first of the ends. A thought is no part of it: while
    it has not ended, there is no text."""
    not_text = tokenizer.control_ids
    text = _behind_thought(tokenizer.decode([token for token in tokens if token not in not_text]), prompt)
    for end in prompt.until:
        text = text.split(end)[0]
    return text


def has_ended(tokenizer: Tokenizer, tokens: Sequence[int], prompt: EvaluationPrompt) -> bool:
    """True if one of the ends was written. As in lm-eval's `hf`, control tokens may hold it."""
    text = _behind_thought(tokenizer.decode([*tokens]), prompt)
    return any(end in text for end in prompt.until)


def _behind_thought(text: str, prompt: EvaluationPrompt) -> str:
    _, end, answer = text.rpartition("</think>")
    return answer.lstrip() if end and prompt.thinks else "" if prompt.thinks else text


def _key(kind: str, request: ContinuationRequest | EvaluationPrompt) -> str:
    """Names everything that decides an answer, beside the model."""
    return f"{kind}/{hashlib.sha256(json.dumps(request, default=vars).encode()).hexdigest()[:32]}"
