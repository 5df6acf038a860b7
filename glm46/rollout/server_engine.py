"""The engine whose completions inference servers draw, with weights that they load from a disk."""

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from glm46.config.rollout import Rollout
from glm46.distributed.collective_errors import on_first_rank
from glm46.files.durable import create_durably, hash_file, sync_folder
from glm46.huggingface.write_folder import json_bytes
from glm46.rollout.background import BackgroundDrawing
from glm46.rollout.first_rank import pack, run_on_first_rank, unpack
from glm46.rollout.launched_servers import LaunchedServers
from glm46.rollout.records import Completion, Request, SamplingRules
from glm46.rollout.server_pool import ServerPool
from glm46.rollout.server_state import CHANGED, EngineError, Weights
from glm46.rollout.sglang_server import SglangServer
from glm46.rollout.vllm_server import VllmServer

VERSION_FILE = "version.json"
"""In a folder of weights: its version, and length and SHA-256 of each of its files."""

_HASHED_AT_ONCE = 8
_CHECKED, _LONGEST = 8, 256
"""Completions of the first rollout, and tokens of each, and of each sequence of the probe."""
_USUAL_MISMATCH, _MOST_MISMATCH = 0.015, 0.15
_DEVIATIONS, _MOST_BIAS, _FEWEST_DRAWN = 4, 0.5, 32
"""Of the mean of log-probability and entropy: a server with a wrong sampler had -3.3 nats. Few tokens of which all are
the likely one have a mean of up to 0.3 without a spread."""
_SERVERS = {"vllm": VllmServer, "sglang": SglangServer}


class ServedPolicy(NamedTuple):
    """The policy as the ranks that train have it; what uses it is collective."""

    export: Callable[[Path], None]
    """Writes it as a Hugging Face folder under a new path."""
    score: Callable[[list[list[int]]], tuple[list[list[float]], list[list[float]]]]
    """Its log-probability, at temperature 1, of each token but the first of sequences, and the entropy at its place."""
    changed: Callable[[], AbstractContextManager[None]]
    """While it is open, a tensor of each kind has other values."""


class ServerEngine:
    """See `Engine`. Rank 0 talks to the servers; all ranks get the completions."""

    def __init__(
        self,
        config: Rollout,
        *,
        folder: Path,
        policy: ServedPolicy,
        probe: list[list[int]],
        padding: range,
        base: Path | None = None,
        say: Callable[[str], None] = print,
    ):
        """
        Args:
            folder: of the versions of the weights, if rollout.weights_folder does not name one; on a disk that all
                ranks and all servers see under this path.
            probe: sequences of tokens, at least one of two or more, that servers score after each update, the same in
                the whole run.
            padding: ids of the head's padding rows.
            base: Hugging Face folder that servers are started with, if the policy exports adapters for it alone. It
                may be written by the first export. None: servers are started with the weights of the moment.
            say: takes a line for the log, on rank 0.
        """
        self._folder = Path(config.weights_folder or folder)
        self._policy, self._say = policy, say
        self._probe = [tokens[:_LONGEST] for tokens in probe if len(tokens) > 1]
        servers = [_SERVERS[config.kind](url, padding) for url in config.urls]
        self._launched = LaunchedServers(config.launch, config.urls, self._folder, say)
        self._pool = ServerPool(
            servers,
            deadline=config.deadline_seconds,
            restart=config.restart_seconds,
            say=say,
            still_starting=self._launched.require_running,
        )
        self.background: BackgroundDrawing | None = None
        """After `draw_ahead`, on rank 0."""
        self._base, self._newest = base, base
        self._is_checked = False
        self._version = -1

    def draw_ahead(self, rules: SamplingRules, folder: Path) -> None:
        """Keep `background` in step with the weights from now on: it is halted while servers load, and while
        `generate` draws, and goes on afterwards.

        Args:
            folder: of what it draws.
        """
        if dist.get_rank() == 0:
            self.background = BackgroundDrawing(self._pool.generate, rules, folder)

    def _alone(self, work: Callable[[], bytes]) -> bytes:
        """Do what needs the servers without requests of the background."""
        is_drawing = self.background is not None and self.background.halt()
        found = work()
        if is_drawing:
            self.background.start()
        return found

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate` and `ServerPool.generate`.

        Raises:
            EngineError: no server is left, or the first completions are not from the trainer's policy.
        """
        if dist.get_rank() == 0:
            self._launched.ensure(self._newest)
        work = partial(self._alone, lambda: pack(self._pool.generate(requests, rules)))
        completions = unpack(run_on_first_rank(work))
        if rules.temperature == 1.0:
            self.check_mismatch(requests, completions)
        return completions

    def check_mismatch(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Compare the first completions of a run with the trainer's policy: the probe asks what a server says of given
        tokens, this check what it says of those that it draws, and whether they were drawn so. The mean of
        log-probability and entropy of tokens is 0 if they were. Collective; all ranks decide alike."""
        pairs = zip(requests, completions, strict=True)
        drawn = [
            (request.prompt, one.tokens[:_LONGEST], one.logprobs)
            for request, one in pairs
            if {span.version for span in one.spans} == {self._version}
        ]
        if self._is_checked or not drawn:
            return
        self._is_checked, drawn = True, drawn[:_CHECKED]
        logprobs, entropies = self._policy.score([prompt + tokens for prompt, tokens, _ in drawn])
        gaps, surprises = [], []
        for (_, tokens, theirs), ours, entropy in zip(drawn, logprobs, entropies, strict=True):
            places = zip(ours[-len(tokens) :], theirs, entropy[-len(tokens) :], strict=False)
            for own, reported, expected in places:
                gaps.append(own - reported)
                surprises.append(own + expected)
        mismatch = sum(math.exp(min(gap, 20.0)) - 1.0 - gap for gap in gaps) / len(gaps)
        said = f"the KL divergence of the first {len(gaps)} drawn tokens from the trainer's policy is {mismatch:.2g}"
        bias = sum(surprises) / len(gaps)
        spread = math.sqrt(sum((surprise - bias) ** 2 for surprise in surprises)) / len(gaps)
        if not mismatch <= _MOST_MISMATCH:
            self._refuse(
                f"{said}, at most {_MOST_MISMATCH:g} can be learned from: the servers report log-probabilities of "
                "another distribution than they draw from"
            )
        if len(gaps) >= _FEWEST_DRAWN and not abs(bias) <= max(_DEVIATIONS * spread, _MOST_BIAS):
            self._refuse(
                f"log-probability and entropy of the first {len(gaps)} drawn tokens add up to {bias:.2g} in the mean, "
                f"not to 0 (standard deviation {spread:.1g}): the servers draw from another distribution than the "
                "policy's"
            )
        if mismatch > _USUAL_MISMATCH and dist.get_rank() == 0:
            self._say(f"rollout: warning: {said}; {_USUAL_MISMATCH:g} is usual in BF16")

    @staticmethod
    def _refuse(fault: str) -> None:
        raise EngineError(
            *on_first_rank(
                f"rollout.urls: {fault}; start them with the options of docs/rollout_servers.md, and in the type of "
                "training.mixed_precision_param"
            )
        )

    def update(self, version: int) -> None:
        """Write the policy to the disk, have all servers load it, and compare their log-probabilities of the probe with
        the trainer's. Collective.

        The first time a policy with a changed tensor of each kind comes before: steps of training are smaller than the
        tolerance of the probe, and a server that loads nothing, or not all, may have been started with these weights.

        Raises:
            EngineError: no server has these weights now, or one did not take the changes.
            UserError: the disk is full, or at the first update: a server runs with other options than needed.
        """
        if self._version < 0:
            with self._policy.changed():
                self._hand_over(CHANGED, self._folder / "version-check")
        self._hand_over(version, self._folder / f"version-{version:08d}")
        self._version = version

    def _hand_over(self, version: int, path: Path) -> None:
        if dist.get_rank() == 0 and path.exists():  # of a run that was killed; export begins with a collective
            shutil.rmtree(path)
        self._policy.export(path)
        self._newest = self._base or path
        if dist.get_rank() == 0:
            self._launched.ensure(self._newest)
        expected, _ = self._policy.score(self._probe)

        def load() -> bytes:
            names = sorted(path.iterdir())
            with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
                records = list(threads.map(hash_file, names))
            files = {name.name: vars(record) for name, record in zip(names, records, strict=True)}
            create_durably(path / VERSION_FILE, [json_bytes({"version": version, "files": files})])
            sync_folder(path)
            self._pool.update(Weights(version, path, self._probe, expected))
            self._remove(but=path)  # a server that comes back loads the newest one
            return b""

        run_on_first_rank(lambda: self._alone(load))

    def close(self) -> None:
        """Remove the weights from the disk, and end the servers that this run has started."""
        if self.background is not None:
            self.background.halt()
        self._launched.stop()
        if dist.get_rank() == 0:
            self._remove()

    def _remove(self, *, but: Path | None = None) -> None:
        for folder in self._folder.glob("version-*"):
            if folder != but:
                shutil.rmtree(folder)
