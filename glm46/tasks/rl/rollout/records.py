"""Requests to an engine and its replies: the only types that engines and reinforcement learning share."""

import io
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple, Protocol, get_args

import numpy as np
from pydantic import PlainValidator, TypeAdapter, ValidationInfo
from pydantic_core import to_json

Finish = Literal["stop", "length", "abort"]
FINISHES: tuple[Finish, ...] = get_args(Finish)


class Request(NamedTuple):
    """One sample to generate."""

    prompt: list[int]
    seed: int
    """Random seed: request, weights and rules give the same tokens in any batch, on any number of ranks."""
    max_new_tokens: int
    known: int = 0
    """Leading tokens of the prompt whose experts need not be returned."""


class SamplingRules(NamedTuple):
    """Sampling settings for all requests of a call."""

    temperature: float
    """Logits are divided by it; 0 takes the most likely token, with its log-probability at 1."""
    stop: frozenset[int]
    """Token ids that end a completion."""
    vocab_size: int
    """Token ids from this one on are padding rows of the head; their probability is 0."""
    routes: bool = False
    """Return the chosen experts."""
    top_p: float = 1.0
    """See `Sampling`; below 1 the tokens that it keeps are returned."""
    top_k: int | None = None
    """See `Sampling`; if it is given, the tokens that it keeps are returned."""

    @property
    def are_filtered(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


class KeptTokens(NamedTuple):
    """The ids that each token of a completion was sampled from. Completions of rules that filter have it."""

    ids: np.ndarray
    """int32 [sum of counts]."""
    counts: np.ndarray
    """int32 [tokens]; 0 for tokens that were not sampled, such as those of a reply."""


class Completion(NamedTuple):
    """Tokens that follow a prompt: one generated turn, or a sample of several turns and the replies between them."""

    tokens: list[int]
    """Generated tokens, including the stop token if there is one."""
    logprobs: list[float]
    """Natural log-probability of each token under the distribution it was sampled from (at the temperature)."""
    finish: Finish
    versions: list[int]
    """Version of the weights that generated each token; tokens of a reply have the version of the turn before it."""
    routes: np.ndarray | None
    """uint8 or uint16 [prompt + tokens - 1, MoE layers, top_k]: experts chosen for each input token."""
    replies: tuple[tuple[int, int], ...] = ()
    """Start and end indices of tokens that an environment wrote or that another sample trains; their log-probability
    is 0."""
    drafted: int = 0
    """Number of tokens drafted by the prediction layers of the local engine."""
    accepted: int = 0
    """Number of drafted tokens that were kept."""
    contradicted: tuple[tuple[int, int], ...] = ()
    """Indices of generated end markers after which another role spoke, each with the marker that the model reads there
    instead."""
    prompt: Sequence[int] = ()
    """Tokens before a sample. A recorded turn has here the reply that came before it, or its seed alone if a program
    requested it. Empty as engines return it."""
    kept: KeptTokens | None = None
    """What the tokens were sampled from; None for samples of the whole vocabulary."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of equal `versions`: index of the first token, and version."""
        versions = self.versions
        return [(i, version) for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]

    @property
    def kept_counts(self) -> np.ndarray:
        """`KeptTokens.counts`, zeros without."""
        return np.zeros(len(self.tokens), np.int32) if self.kept is None else self.kept.counts

    def extended(self, reply: list[int], turn: "Completion") -> "Completion":
        """Append a reply, which may be empty, and the completion generated after it."""
        start = len(self.tokens)
        end = start + len(reply)
        reply_version = (self.versions or turn.versions)[-1:]
        return turn._replace(
            tokens=[*self.tokens, *reply, *turn.tokens],
            logprobs=[*self.logprobs, *[0.0] * len(reply), *turn.logprobs],
            versions=[*self.versions, *reply_version * len(reply), *turn.versions],
            routes=appended_routes(self.routes, turn.routes if turn.tokens else None),
            replies=(*self.replies, (start, end)) if reply else self.replies,
            drafted=self.drafted + turn.drafted,
            accepted=self.accepted + turn.accepted,
            prompt=self.prompt,
            kept=_appended_kept(self, len(reply), turn),
        )


NOTHING = Completion([], [], "abort", [], None)
"""A completion without tokens."""


def _appended_kept(first: Completion, reply: int, then: Completion) -> KeptTokens | None:
    """Return `Completion.kept` of two completions with this many tokens of a reply between them."""
    if first.kept is None and then.kept is None:
        return None
    ids = [completion.kept.ids for completion in (first, then) if completion.kept is not None]
    counts = [first.kept_counts, np.zeros(reply, np.int32), then.kept_counts]
    return KeptTokens(np.concatenate(ids), np.concatenate(counts))


def token_versions(spans: Iterable[tuple[int, int]], count: int) -> list[int]:
    """Return the version of each of this many tokens from `Completion.spans`; -1 before the first span."""
    versions = [-1] * count
    for start, version in spans:
        versions[start:] = [version] * (count - start)
    return versions


class Episode(NamedTuple):
    """An answer to a prompt, with or without an environment, and its reward once it is scored."""

    samples: list[Completion]
    """Completions with their prompts: one, or several if the conversation branches. The one with the last turn comes
    first. Empty if the environment failed."""
    fault: str = ""
    """Why there is no reward: the environment failed, the server did not finish it, or a reward failed."""
    score: float | None = None
    """Score from the scoring command, or from the program if there is no scoring command."""
    is_part: bool = False
    """True if the episode is unfinished: the samples hold its tokens or turns so far, from which it continues."""
    output: str = ""
    """Last output of a failed program. It is neither sent to other ranks nor stored."""
    group: int = -1
    """Number of the prompt, counted over the run."""
    reward: float | None = None
    """Weighted sum of the parts; None before scoring, or if there is a fault."""
    parts: Mapping[str, float] = {}
    """Unweighted value of each reward by name; failed rewards are missing."""

    @property
    def completion(self) -> Completion:
        """The sample with the last turn."""
        return self.samples[0] if self.samples else NOTHING


def appended_routes(first: np.ndarray | None, then: np.ndarray | None) -> np.ndarray | None:
    """Return the routes of a completion that was generated in two parts. The second part recomputes the tokens of the
    first, perhaps with other weights or in another batch, and may route them differently; the first part's routes are
    kept because its log-probabilities belong to them."""
    if first is None or then is None:
        return first if then is None else then
    return np.concatenate([first, then[len(first) :]])


def rest(request: Request, generated: Completion) -> Request:
    """Return the remaining part of a request: the generated tokens move to its prompt, and its seed advances by their
    count, so that no position uses the same random numbers twice."""
    count = len(generated.tokens)
    routed = 0 if generated.routes is None else len(generated.routes)
    return Request(request.prompt + generated.tokens, request.seed + count, request.max_new_tokens - count, routed)


def seed_behind(seed: int, tokens: Sequence[int]) -> int:
    """Return the 63-bit seed of a request that continues another one after some tokens. With one seed for all turns, a
    server that creates a generator per request would sample every turn with the same random numbers."""
    digest = blake2b(np.array([seed, *tokens], np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Engine(Protocol):
    """Generates completions with weights of the policy network."""

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """Return the completions of all requests of the job, in order.

        Collective for the in-process engine: every rank passes all requests and gets all completions.
        """

    def update(self, version: int) -> None:
        """Copy the weights of the policy network to the engine, as version `version`. Collective."""

    def close(self) -> None:
        """Free the resources of the engine."""


LINES = 3
"""Format version of the lines of a group file, each a checksum and `pack_groups`. Groups in another format are
generated again."""


def _array(_: object, packed: ValidationInfo) -> np.ndarray:
    assert isinstance(packed.context, io.BytesIO), "the file of arrays"
    array: np.ndarray = np.load(packed.context, allow_pickle=False)
    return array


_Array = Annotated[np.ndarray, PlainValidator(_array)]
_CompletionRow = tuple[
    list[int],
    list[float],
    Finish,
    list[tuple[int, int]],
    _Array | None,
    tuple[tuple[int, int], ...],
    int,
    int,
    tuple[tuple[int, int], ...],
    tuple[_Array, _Array] | None,
]
"""The fields of `Completion` in their order, with spans instead of versions and without the prompt."""
_EpisodeRow = tuple[
    list[tuple[list[int], _CompletionRow]], str, float | None, bool, str, int, float | None, dict[str, float]
]
"""The fields of `Episode` in their order; a sample is its prompt and the row of its completion."""
_COMPLETIONS = TypeAdapter(list[_CompletionRow])
_GROUPS = TypeAdapter(dict[int, list[_EpisodeRow]])


def _packed_completion(completion: Completion) -> _CompletionRow:
    tokens, logprobs, finish, _, routes, replies, drafted, accepted, contradicted, _, kept = completion
    return tokens, logprobs, finish, completion.spans, routes, replies, drafted, accepted, contradicted, kept


def _unpacked_completion(row: _CompletionRow, prompt: Sequence[int] = ()) -> Completion:
    tokens, logprobs, finish, spans, routes, replies, drafted, accepted, contradicted, kept = row
    versions = token_versions(spans, len(tokens))
    sets = None if kept is None else KeptTokens(*kept)
    return Completion(
        tokens, logprobs, finish, versions, routes, replies, drafted, accepted, contradicted, prompt=prompt, kept=sets
    )


def _packed_episode(episode: Episode) -> _EpisodeRow:
    samples = [([*sample.prompt], _packed_completion(sample)) for sample in episode.samples]
    _, fault, score, is_part, _, group, reward, parts = episode
    return samples, fault, score, is_part, "", group, reward, dict(parts)


def _unpacked_episode(row: _EpisodeRow) -> Episode:
    samples, fault, score, is_part, output, group, reward, parts = row
    completions = [_unpacked_completion(completion, prompt) for prompt, completion in samples]
    return Episode(completions, fault, score, is_part, output, group, reward, parts)


def _to_bytes(rows: object) -> bytes:
    """Pack rows without pickle: a line of JSON followed by the arrays of all completions in NumPy's format."""
    arrays = io.BytesIO()

    def outside(array: np.ndarray) -> str:
        assert isinstance(array, np.ndarray), array
        np.save(arrays, array, allow_pickle=False)
        return "behind the line"

    return to_json(rows, fallback=outside) + b"\n" + arrays.getvalue()


def pack(completions: Iterable[Completion]) -> bytes:
    """Pack completions without their prompts."""
    return _to_bytes([_packed_completion(completion) for completion in completions])


def unpack(content: bytes) -> list[Completion]:
    """Read completions packed by `pack`."""
    file = io.BytesIO(content)
    return [_unpacked_completion(row) for row in _COMPLETIONS.validate_json(file.readline(), context=file)]


def pack_groups(groups: Mapping[int, Sequence[Episode]]) -> bytes:
    """Pack the episodes of groups, by group number."""
    return _to_bytes({number: [_packed_episode(episode) for episode in group] for number, group in groups.items()})


def unpack_groups(content: bytes) -> dict[int, list[Episode]]:
    """Read groups packed by `pack_groups`."""
    file = io.BytesIO(content)
    rows = _GROUPS.validate_json(file.readline(), context=file)
    return {number: [_unpacked_episode(row) for row in group] for number, group in rows.items()}
