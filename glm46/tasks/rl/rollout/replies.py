"""Checks of what inference servers reply."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from glm46.tasks.rl.rollout.http_calls import CallError
from glm46.tasks.rl.rollout.records import FINISHES, Completion, Request, SamplingRules


@contextmanager
def known_form(message: str) -> Iterator[None]:
    """Raise errors in reading a reply as `CallError`, whose message begins with this one."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CallError(f"{message} ({type(error).__name__}: {error})") from None


def checked(request: Request, rules: SamplingRules, completion: Completion) -> Completion:
    """Return the completion of a reply if it is valid, with the routes of its own tokens.

    Raises:
        CallError: it is not valid.
    """
    tokens, logprobs, finish, _, routes, *_ = completion
    if finish not in FINISHES:
        raise CallError(f"finish reason {finish!r}")
    are_possible = all(isinstance(value, (int, float)) and math.isfinite(value) and value < 1e-3 for value in logprobs)
    if len(tokens) != len(logprobs) or not are_possible:
        raise CallError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities, {logprobs[:3]} ...")
    if not tokens and finish != "abort" or len(tokens) > request.max_new_tokens:
        raise CallError(f"{len(tokens)} tokens, asked for 1 to {request.max_new_tokens}")
    wrong = [token for token in tokens if not 0 <= token < rules.vocab_size]
    ended = bool(tokens) and tokens[-1] in rules.stop
    if wrong or ended != (finish == "stop") or rules.stop.intersection(tokens[:-1]):
        raise CallError(f"tokens {wrong or tokens[-1:]} with finish reason {finish!r}")
    if finish == "length" and len(tokens) < request.max_new_tokens:
        raise CallError(f"it ended after {len(tokens)} of {request.max_new_tokens} tokens: its context is full")
    if not rules.routes or not tokens:
        return completion
    fed = len(request.prompt) + len(tokens) - 1
    if routes is None or routes.ndim != 3 or len(routes) < fed:
        raise CallError(f"experts {None if routes is None else routes.shape} of {fed} tokens")
    return completion._replace(routes=routes[:fed])


def version_of(text: object) -> int:
    """Parse the version that a server reports; -1 for a name that this client did not set, such as the default of a
    restarted server."""
    return int(str(text)) if str(text).isdecimal() else -1
