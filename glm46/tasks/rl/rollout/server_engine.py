"""The engine of inference servers, with weights that they load from a disk or get by broadcast."""

import shutil
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import on_first_rank
from glm46.config.rollout import RolloutConfig
from glm46.files.durable import create_durably, hash_file, sync_folder
from glm46.storage.huggingface.write_folder import json_bytes
from glm46.tasks.rl.rollout.background import BackgroundGeneration, Begin, begin_samples
from glm46.tasks.rl.rollout.first_rank import CollectiveRequest, run_on_first_rank
from glm46.tasks.rl.rollout.inference_server import InferenceServer
from glm46.tasks.rl.rollout.open_requests import OpenRequests, answers
from glm46.tasks.rl.rollout.records import (
    Completion,
    EpisodeEnd,
    Request,
    SamplingRules,
    pack,
    pack_groups,
    unpack,
    unpack_groups,
)
from glm46.tasks.rl.rollout.server_pool import LaunchedServers, ServerPool
from glm46.tasks.rl.rollout.server_state import CHANGED, EngineError, ServedPolicy, ServerState, Weights
from glm46.tasks.rl.rollout.sglang_server import SglangServer
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from glm46.tasks.rl.rollout.weight_group import WeightGroup, WeightSender

VERSION_FILE = "version.json"
"""In a folder of weights: its version, and length and SHA-256 of each of its files."""

_HASHED_AT_ONCE = 8
_RESTART_SECONDS = 300.0  # the longest start of a server with a large model, when none is left
_PROBES, _FIRST, _LONGEST = 4, 8, 256
"""Prompts of the probe, completions that a server generates before all others, and tokens of each."""


class ServerEngine:
    """See `Engine`. Rank 0 talks to the servers; all ranks get the completions."""

    def __init__(
        self, config: RolloutConfig, *, folder: Path, policy: ServedPolicy, prompts: Sequence[list[int]],
        rules: SamplingRules, padding: range, routed: tuple[int, int] = (0, 0), base: Path | None = None,
        say: Callable[[str], None] = print,
    ):  # fmt: skip
        """
        Args:
            folder: of the versions of the weights, if rollout.weights_folder does not name one; on a disk that all
                ranks and all servers see under this path.
            prompts: all of the run, at least one of two or more tokens. Servers score the first ones after each
                update, and answer some from all over them before they generate for the run.
            base: Hugging Face folder that servers are started with, if the policy exports adapters for it alone. It
                may be written by the first export. None: servers are started with the weights of the moment.
            say: takes a line for the log, on rank 0.
        """
        self._folder = Path(config.weights_folder or folder)
        self._policy, self._say = policy, say
        self._probe = [tokens[:_LONGEST] for tokens in prompts if len(tokens) > 1][:_PROBES]
        spread = prompts[:: max(len(prompts) // _FIRST, 1)]
        length = min(config.max_new_tokens, _LONGEST)
        self._first = [Request(spread[i % len(spread)], i, length) for i in range(_FIRST)]
        self._rules, self._has_generated, self._goes_on = rules, False, False
        servers: list[InferenceServer] = [
            VllmServer(url, padding) if config.kind == "vllm" else SglangServer(url, padding, routed)
            for url in config.urls
        ]
        self._launches, self._launched = (
            bool(config.launch),
            LaunchedServers(config.launch, config.urls, self._folder, say),
        )
        self._pool = ServerPool(
            servers, rules=rules, longest=max(map(len, prompts)) + config.max_new_tokens,
            most_running=config.samples_at_once, deadline=config.deadline_seconds, restart=_RESTART_SECONDS, say=say,
            still_starting=self._launched.require_running,
        )  # fmt: skip
        self._background: BackgroundGeneration | None = None
        """After `generate_ahead`, on rank 0."""
        self._base, self._newest = base, base
        self._is_fp8 = config.weights_dtype is not None
        self._broadcasts, self._launches = config.weights == "broadcast", bool(config.launch)
        self._groups: Sequence[WeightGroup] = ()
        self._request = CollectiveRequest(self._broadcast)
        self._version = -1
        self._new: dict[ServerState, list[Completion]] = {}
        """First completions of servers that have joined, on rank 0."""

    def generate_ahead(self, folder: Path, begin: Begin = begin_samples, *, goes_on: bool) -> None:
        """Keep `background` in step with the weights from now on: it is halted while servers load, and while
        `generate` generates, and continues afterwards.

        Args:
            folder: of what it generates.
            begin: generates the members of a group.
            goes_on: it also generates while the policy trains. Otherwise `take` alone does, with the policy's weights.
        """
        self._goes_on = goes_on
        if dist.get_rank() == 0:
            requests = OpenRequests(self._pool, self._rules, goes_on=goes_on)
            self._background = BackgroundGeneration(requests, folder, begin, self._say)

    @property
    def background(self) -> BackgroundGeneration:
        """Of `generate_ahead`, on rank 0."""
        assert self._background is not None
        return self._background

    def take(
        self, count: int, due: set[int], is_stopped: Callable[[], bool], *, waits: bool = True
    ) -> dict[int, list[EpisodeEnd]] | None:
        """Finished groups by their numbers, see `BackgroundGeneration.take`. Collective; equal on ranks."""
        if not self._goes_on:
            self._ready()

        def wait() -> bytes:
            self._pool.send = None if self._goes_on else self._send  # the policy may be newer than the servers' weights
            try:
                self.background.start()
                groups = self.background.take(count, due, is_stopped, waits=waits)
            finally:
                if not self._goes_on:
                    self.background.halt()  # it may need the weights until then
                self._pool.send = None
            return b"" if groups is None else pack_groups(groups)

        content = run_on_first_rank(wait, self._request)
        return unpack_groups(content) if content else None

    def answer(self, work: Callable[[OpenRequests], bytes], rules: SamplingRules) -> bytes:
        """The result of work of rank 0 whose requests servers answer as they come. Collective."""
        self._ready()

        def run() -> bytes:
            requests = OpenRequests(self._pool, rules)
            requests.start()
            try:
                return work(requests)
            finally:
                requests.halt()

        return self._run(run)

    def _run(self, work: Callable[[], bytes]) -> bytes:
        """The result of work of rank 0 that needs the servers without requests of the background, on all ranks, which
        meanwhile broadcast the weights when a server needs them. Collective."""

        def alone() -> bytes:
            is_generating = self._background is not None and self._background.halt()
            self._pool.send = self._send
            try:
                found = work()
            finally:
                self._pool.send = None
            if is_generating:
                self.background.start()
            return found

        return run_on_first_rank(alone, self._request)

    def _send(self, groups: Sequence[WeightGroup]) -> None:
        self._groups = groups
        self._request.ask()

    def _broadcast(self) -> None:
        """Send the policy, which is that of the last update, to the servers that have joined groups. Collective."""
        sender = WeightSender(self._groups) if dist.get_rank() == 0 else None
        for name, tensor in self._policy.tensors():
            if sender is not None:
                sender.add(name, tensor)
        if sender is not None:
            sender.end()

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate` and `OpenRequests`."""
        self._ready()
        return unpack(self._run(lambda: pack(answers(self._pool, requests, rules))))

    def _ready(self) -> None:
        """Have servers that were lost join again, and check what they generate. Collective."""
        if dist.get_rank() == 0 and self._newest is not None:
            self._launched.ensure(self._newest)

        def join() -> bytes:
            self._pool.join_again()
            return self._first_samples()

        self._check_new(self._run(join))

    def _first_samples(self) -> bytes:
        """Of the servers that have joined; on rank 0."""
        self._new = self._pool.first_samples(self._first, at_start=not self._has_generated)
        return pack([one for completions in self._new.values() for one in completions])

    def _check_new(self, first_samples: bytes) -> None:
        """Compare what servers that have joined generate with the policy, which has the weights of the last update: the
        probe asks what a server says of given tokens, this check what it says of its own, and whether they are of its
        distribution. Collective; all ranks decide alike.

        Raises:
            EngineError: at the start of the run, of one that differs. Later that one is left out.
        """
        completions = unpack(first_samples)
        states, prompts = list(self._new), [request.prompt for request in self._first]
        for number, start in enumerate(range(0, len(completions), _FIRST)):
            generated = list(zip(prompts, completions[start : start + _FIRST], strict=True))
            said, is_right = self._policy.compare(generated, self._rules.temperature)
            if not is_right and not self._has_generated:
                raise EngineError(
                    *on_first_rank(
                        f"rollout.urls: {states[number].server.url if states else ''}: {said}; start it with the "
                        "options of docs/rollout_servers.md, and in the type of training.mixed_precision_param"
                    )
                )
            if states:
                self._pool.judge(states[number], said, is_right=is_right)
        self._has_generated |= bool(completions)

    def update(self, version: int) -> None:
        """Write the policy to the disk, or broadcast it, have all servers load it, and compare their log-probabilities
        of the probe with the trainer's. Collective.

        The first time a policy with a changed tensor of each kind comes before: steps of training are smaller than the
        tolerance of the probe, and a server that loads nothing, or not all, may have been started with these weights.

        Raises:
            EngineError: no server has these weights now, or one did not take the changes, or samples from others.
            UserError: the disk is full, or at the first update: a server runs with other options than needed.
        """
        if self._version < 0:
            with self._policy.changed():
                self._hand_over(CHANGED, self._folder / "version-check")
        first_samples = self._hand_over(version, self._folder / f"version-{version:08d}")
        self._version = version
        self._check_new(first_samples)

    def _hand_over(self, version: int, path: Path) -> bytes:
        """The weights that `_check_new` asks for."""
        folder = None if self._broadcasts else path
        if folder is not None:
            self._export(folder)
            self._newest = self._base or folder
        elif self._launches and self._newest is None:
            self._newest = path.with_name("version-start")  # its weights do not matter
            self._export(self._newest)
        if dist.get_rank() == 0 and self._newest is not None:
            self._launched.ensure(self._newest)
        expected, _ = self._policy.score(self._probe, 1.0)

        def load() -> bytes:
            if folder is not None:
                _write_manifest(folder, version)
            self._pool.update(Weights(version, folder, self._probe, expected, self._is_fp8))
            if folder is not None:
                # A server that comes back loads the newest one, behind the one that it was started with.
                self._remove(but={folder, *map(self._launched.folder_of, self._pool.awaited)})
            return b"" if version == CHANGED else self._first_samples()

        return self._run(load)

    def _export(self, path: Path) -> None:
        if dist.get_rank() == 0 and path.exists():  # of a run that was killed; export begins with a collective
            shutil.rmtree(path)
        self._policy.export(path)

    def close(self) -> None:
        """Remove the weights from the disk, and end the servers that this run has started."""
        with ExitStack() as ends:  # the last one first, and all of them: on a full disk the weights are what frees it
            if dist.get_rank() == 0:
                ends.callback(self._remove)
            ends.callback(self._launched.stop)
            if self._background is not None:
                ends.callback(
                    self._background.keep, (), before=0
                )  # what functions and programs still say is not written
                self._background.halt()

    def _remove(self, *, but: Set[Path | None] = frozenset()) -> None:
        for folder in self._folder.glob("version-*"):
            if folder not in but:
                shutil.rmtree(folder)


def _write_manifest(path: Path, version: int) -> None:
    """Write `VERSION_FILE` of a folder of weights."""
    names = sorted(path.iterdir())
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        records = list(threads.map(hash_file, names))
    files = {name.name: vars(record) for name, record in zip(names, records, strict=True)}
    create_durably(path / VERSION_FILE, [json_bytes({"version": version, "files": files})])
    sync_folder(path)
