"""Answers to requests that rank 0 makes while it runs somebody else's tasks; all ranks compute them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from glm46.evaluation.results import Results
from glm46.huggingface.tokenizer_files import control_ids, stop_ids
from glm46.inference.decoder import Decoder
from glm46.inference.generation import Continuation, Generation
from glm46.inference.loading import Loaded
from glm46.inference.sampling import Sampling
from glm46.inference.scoring import MOST_SLOTS, Request, Score, score

Advance = Callable[[int], None]
"""Called with the number of tokens of the requests just answered, on rank 0."""

_ROUNDS = 4
"""Continuations of a row of the decoder between two saves."""


class Prompt(NamedTuple):
    """A text to continue."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...]
    """The text ends before the first of these."""
    sampling: Sampling
    seed: int


class Answers:
    """Answers requests. The methods of rank 0 wait for the other ranks, which run `follow`.

    Args:
        results: keep the answers of rank 0, so that a stopped call goes on.
    """

    def __init__(self, loaded: Loaded, results: Results):
        self._loaded, self._results = loaded, results
        self._not_text = control_ids(loaded.tokenizer)

    def scores(self, requests: Sequence[Request], advance: Advance) -> list[Score]:
        """Scores in the order of the requests. On rank 0."""
        keys = [_key("score", request) for request in requests]
        missing = [*{key: one for key, one in zip(keys, requests, strict=True) if self._lacks(key)}.items()]
        if missing:
            self._lead("_score", [request for _, request in missing], [key for key, _ in missing], advance)
        found = (self._results.figures[key] for key in keys)
        return [Score(logprob, bool(is_greedy)) for logprob, is_greedy in found]

    def texts(self, prompts: Sequence[Prompt], advance: Advance) -> list[str]:
        """Texts in the order of the prompts. On rank 0."""
        keys = [_key("text", prompt) for prompt in prompts]
        missing = [*{key: one for key, one in zip(keys, prompts, strict=True) if self._lacks(key)}.items()]
        # The longest ones first; equal prompts are neighbours and share their computation.
        missing.sort(key=lambda pair: (-len(pair[1].tokens) - pair[1].max_new_tokens, pair[1].tokens))
        for sampling in dict.fromkeys(prompt.sampling for _, prompt in missing):
            some = [(key, prompt) for key, prompt in missing if prompt.sampling == sampling]
            self._lead("_continue", [prompt for _, prompt in some], [key for key, _ in some], advance)
        return [
            _before(self._text([int(token) for token in self._results.figures[key]]), prompt.until)
            for key, prompt in zip(keys, prompts, strict=True)
        ]

    def follow(self) -> None:
        """Compute with rank 0 until its `end`. On the other ranks."""
        while True:
            found = [None]
            dist.broadcast_object_list(found, src=0)
            if found[0] is None:
                return
            name, requests = found[0]
            getattr(self, name)(requests, [], lambda _: None)

    def end(self) -> None:
        """Let the other ranks return from `follow`. On rank 0."""
        if self._loaded.mesh.layout.world_size > 1:
            dist.broadcast_object_list([None], src=0)

    def _lacks(self, key: str) -> bool:
        return key not in self._results.figures

    def _lead(self, name: str, requests: list, keys: list[str], advance: Advance) -> None:
        if self._loaded.mesh.layout.world_size > 1:
            dist.broadcast_object_list([(name, requests)], src=0)
        getattr(self, name)(requests, keys, advance)

    def _score(self, requests: Sequence[Request], keys: Sequence[str], advance: Advance) -> None:
        """Compute scores. Collective over all ranks; those without keys keep none."""
        model, _, mesh = self._loaded
        for batch in score(model, mesh, requests, advance):
            for number, found in batch:
                if keys:
                    self._results.add(keys[number], [found.logprob, float(found.is_greedy)])

    def _continue(self, prompts: Sequence[Prompt], keys: Sequence[str], advance: Advance) -> None:
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
                    if one.finish is None and one.tokens:
                        text = self._text(one.tokens)
                        one.finish = "stop" if _before(text, prompt.until) != text else None
            found = mesh.gather_rows([one.text(frozenset(stop_ids(tokenizer))) for one in written])
            for key, tokens in zip(keys[first : first + len(some)], found, strict=False):
                self._results.add(key, tokens)
            first += len(some)
            advance(sum(map(len, found)))

    def _text(self, tokens: Sequence[int]) -> str:
        return self._loaded.tokenizer.decode([token for token in tokens if token not in self._not_text])


def _before(text: str, until: Sequence[str]) -> str:
    for end in until:
        text = text.split(end)[0]
    return text


def _key(kind: str, request: Request | Prompt) -> str:
    """Names everything that decides an answer, beside the model."""
    return f"{kind}/{hashlib.sha256(json.dumps(request, default=vars).encode()).hexdigest()[:32]}"
