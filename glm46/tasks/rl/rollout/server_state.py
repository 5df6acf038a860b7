"""One server of a pool: whether it may generate, and the weights that it must have for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError
from glm46.tasks.rl.rollout.inference_server import InferenceServer
from glm46.tasks.rl.rollout.records import Completion, SamplingRules
from glm46.tasks.rl.rollout.weight_group import WeightGroup

_TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (0.5, 0.05), "float16": (0.2, 0.02), "fp8": (2.0, 0.25)}
"""By type of a server: largest and mean difference of log-probabilities from the trainer's. Rounding was measured at
4e-6 in FP32, and at 0.16 and 0.005 in BF16, most of it from tokens near a tie that take another expert; a server with
half of its weights was 0.6 off, one with old ones 3. Rounding the weights of a debug model to FP8 gives 0.4 to 0.7 and
0.12 in the mean, and servers may round activations too."""
_LEAST_STEP = 1e-5
"""A step of the trainer's log-probabilities that no server computes the same bits before and after."""
MOST_FAILURES = 3
"""In a row, of one server; or of one request on all servers."""
NEVER_JOINED = "not asked yet"
CHANGED = -1
"""The version of a policy with changed tensors, which checks servers at the start and generates nothing."""


class EngineError(UserError):
    """No server is left. What was generated before is kept by who has it; weights and optimizer are untouched."""


class Weights(NamedTuple):
    """One version of the policy, and how to recognise it."""

    version: int
    folder: Path | None
    """None: they are broadcast."""
    probe: list[list[int]]
    """Sequences of tokens."""
    expected: list[list[float]]
    """The trainer's log-probability of each of their tokens but the first."""
    is_fp8: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return "one changed tensor of each kind" if self.version == CHANGED else f"version {self.version}"


@dataclass(eq=False)
class ServerState:
    """A server and what the pool knows of it."""

    server: InferenceServer
    lost: str | None = NEVER_JOINED
    """Why it generates nothing."""
    is_checked: bool = False
    """True if what it generates was compared with the policy since it joined."""
    is_refused: bool = False
    """It samples from another distribution; no update changes that, so it is not asked again."""
    refused: int | None = None
    """The version that it could not take; with the next one it is asked again, or when no other server is left."""
    failures: int = 0
    running: set[str] = field(default_factory=set)
    """Names of its requests."""
    group: WeightGroup | None = None
    """In which it waits for a broadcast."""
    scores: list[list[float]] = field(default_factory=list)
    """Of the probe, by the version before."""
    expected: list[list[float]] = field(default_factory=list)

    def begin(self, weights: Weights, *, rules: SamplingRules, longest: int, deadline: float) -> str | None:
        """Compare the server with what is needed and, for a broadcast, have it join a group; returns why it cannot,
        None if it can.

        Args:
            longest: tokens of a prompt and its completion.

        Raises:
            UserError: it was started in another way than needed, and has never generated.
        """

        def prepare() -> None:
            self.server.alive()
            if self.lost is not None:
                self.server.check(routes=rules.routes)
                self._require_context(longest)
            self.refused = weights.version  # until it has passed
            if weights.folder is None:
                self.group = self.server.join(weights.version, deadline)

        return self._fault_of(prepare)

    def complete(self, weights: Weights, *, rules: SamplingRules, deadline: float) -> str | None:
        """Load the weights of a folder, or wait until those of the broadcast are loaded, and compare; returns why the
        server cannot generate with them, None if it can.

        Raises:
            UserError: it was started in another way than needed, and has never generated.
            EngineError: it did not take the changes of the check at the start.
        """
        scores: list[list[float]] = []

        def load() -> None:
            if weights.folder is None:
                assert self.group is not None, "it has joined the broadcast"
                self.server.receive(self.group, weights.version, deadline)
            else:
                self.server.load(weights.folder, weights.version, deadline)
            scores.extend(self.server.score(tokens, deadline) for tokens in weights.probe)
            if self.lost is not None and weights.version != CHANGED:
                self.server.check_stop(list(rules.stop))

        if (fault := self._fault_of(load)) is not None:
            return fault
        reason = self._wrong_scores(weights, scores)
        if reason is not None and weights.version == CHANGED:
            raise EngineError(
                f"rollout.urls: {self.server.url} does not have the weights that it said to have loaded: {reason}; "
                "start it with the release and the options of docs/rollout_servers.md"
            )
        self.scores, self.expected = scores, weights.expected
        if reason is None:
            self.refused = None
        return reason

    def generate(self, *call: Any) -> Completion | CallError:
        """See `InferenceServer.generate`; the completion or the error."""
        try:
            return self.server.generate(*call)
        except CallError as error:
            return error

    def fault_behind(self, failure: CallError) -> str | None:
        """The reason why the server can generate nothing more, now that a request has failed; None if it can."""
        self.failures += 1
        try:
            self.server.alive()
        except CallError as error:
            return f"{failure}; then {error}"
        return str(failure) if self.failures >= MOST_FAILURES else None

    def leave_group(self) -> None:
        """End the broadcast for this server, if that has not ended."""
        if self.group is not None:
            self.group.close()
        self.group = None

    def _require_context(self, longest: int) -> None:
        context = self.server.context
        if context is not None and longest > context:
            raise UserError(
                f"rollout.urls: {self.server.url} has a context of {context} tokens, but a prompt with "
                f"rollout.max_new_tokens has up to {longest}; start it with --max-model-len {longest}, or lower "
                "rollout.max_new_tokens or the longest prompt"
            )

    def _fault_of(self, work: Callable[[], None]) -> str | None:
        try:
            work()
        except CallError as error:
            return str(error)
        except (UserError, LookupError, TypeError, AttributeError, ValueError) as error:
            if self.lost == NEVER_JOINED:  # at the start, before work is done
                raise
            return str(error) if isinstance(error, UserError) else f"a reply has an unknown form: {error!r}"
        return None

    def _wrong_scores(self, weights: Weights, scores: list[list[float]]) -> str | None:
        dtype = "fp8" if weights.is_fp8 else self.server.dtype
        most, mean = _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])
        gaps = _gaps(scores, weights.expected)
        if not (max(gaps) <= most and sum(gaps) / len(gaps) <= mean):  # NaN too
            return (
                f"after the update to {weights.name} its log-probabilities differ from the trainer's by up "
                f"to {max(gaps):.2g}, {sum(gaps) / len(gaps):.2g} in the mean; {dtype} explains "
                f"{most:g} and {mean:g}"
            )
        moved = max(_gaps(weights.expected, self.expected)) if self.expected else 0.0
        if scores == self.scores and moved > _LEAST_STEP:
            return f"after the update to {weights.name} it computes what it did before: its weights are old"
        return None


def _gaps(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    return [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
