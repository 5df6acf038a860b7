"""The engine of inference servers, which load weights from a disk or receive them by broadcast."""

import asyncio
import shutil
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from glm46.compute.distributed.collective_errors import on_first_rank
from glm46.config.rollout import RolloutConfig
from glm46.files.durable import create_durably, hash_file, sync_folder
from glm46.files.standard_output import LineWriter, print_line
from glm46.storage.huggingface.write_folder import json_bytes
from glm46.tasks.rl.rollout.background import BackgroundGeneration, Begin, begin_samples
from glm46.tasks.rl.rollout.first_rank import CollectiveRequest, run_on_first_rank
from glm46.tasks.rl.rollout.launched_servers import LaunchedServers
from glm46.tasks.rl.rollout.open_requests import OpenRequests, answers
from glm46.tasks.rl.rollout.records import (
    Completion,
    Episode,
    Request,
    SamplingRules,
    pack,
    pack_groups,
    unpack,
    unpack_groups,
)
from glm46.tasks.rl.rollout.served_policy import CHANGED, EngineError, ServedPolicy, Weights
from glm46.tasks.rl.rollout.server import Server
from glm46.tasks.rl.rollout.servers import Servers
from glm46.tasks.rl.rollout.sglang_server import SglangServer
from glm46.tasks.rl.rollout.vllm_server import VllmServer
from glm46.tasks.rl.rollout.weight_group import WeightGroup, WeightSender

VERSION_FILE = "version.json"
"""File in a folder of weights with their version, and length and SHA-256 of each file."""

_RESTART_SECONDS = 300.0  # time for a server with a large model to start, when no server is left
_HALT_SECONDS = 30.0
"""Maximum wait at the end of a run for the calls of generation: longer than a halt takes unless a server loads
weights."""
_PROBES = 4
"""Prompts of the probe."""
_FIRST = 8
"""Completions that check a server after it joins."""
_MAX_CHECKED_TOKENS = 256
"""Maximum tokens of each prompt of the probe, and of each of these completions."""


class ServerEngine:
    """See `Engine`. Rank 0 talks to the servers; all ranks get the completions."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        folder: Path,
        policy: ServedPolicy,
        prompts: Sequence[list[int]],
        rules: SamplingRules,
        padding: range,
        routed: tuple[int, int] = (0, 0),
        base: Path | None = None,
        say: LineWriter = print_line,
    ):
        """
        Args:
            folder: holds the versions of the weights unless rollout.weights_folder is set; on a disk that all ranks and
                servers see under this path.
            prompts: all prompts of the run, at least one of two or more tokens. Servers score the first ones after each
                update, and answer an even selection of them before they generate for the run.
            base: Hugging Face folder to start servers with, if the policy exports only adapters for it. The first
                export may write it. None: servers are started with the current weights.
            say: takes a line for the log, on rank 0.
        """
        self._folder = Path(config.weights_folder or folder)
        self._policy = policy
        self._say = say
        self._probe = [tokens[:_MAX_CHECKED_TOKENS] for tokens in prompts if len(tokens) > 1][:_PROBES]
        spread = prompts[:: max(len(prompts) // _FIRST, 1)]
        length = min(config.max_new_tokens, _MAX_CHECKED_TOKENS)
        self._first = [Request(spread[i % len(spread)], i, length) for i in range(_FIRST)]
        self._rules = rules
        self._has_generated = False
        self._goes_on = False
        servers: list[Server] = [
            VllmServer(url, padding) if config.kind == "vllm" else SglangServer(url, padding, routed)
            for url in config.urls
        ]
        self._launched = LaunchedServers(config.launch, config.urls, self._folder, say)
        self._servers = Servers(
            servers,
            rules=rules,
            max_tokens=max(map(len, prompts)) + config.max_new_tokens,
            max_running=config.samples_at_once,
            deadline=config.deadline_seconds,
            restart=_RESTART_SECONDS,
            say=say,
            still_starting=self._launched.require_running,
        )
        self._background: BackgroundGeneration | None = None
        """Background generation on rank 0, after `generate_ahead`."""
        self._base = base
        self._newest = base
        self._is_fp8 = config.weights_dtype is not None
        self._broadcasts = config.weights == "broadcast"
        self._launches = bool(config.launch)
        self._groups: Sequence[WeightGroup] = ()
        self._request = CollectiveRequest(self._broadcast)
        self._version = -1
        self._new: dict[Server, list[Completion]] = {}
        """First completions of servers that joined; on rank 0."""

    def generate_ahead(self, folder: Path, begin: Begin = begin_samples, *, goes_on: bool) -> None:
        """Create `background`, which pauses while servers load weights and while `generate` runs.

        Args:
            folder: holds the generated groups.
            begin: generates the members of a group.
            goes_on: also generate while the policy trains. Otherwise only `take` generates, with the policy's weights.
        """
        self._goes_on = goes_on
        if dist.get_rank() == 0:
            requests = OpenRequests(self._servers, self._rules, goes_on=goes_on)
            self._background = BackgroundGeneration(requests, folder, begin, self._say)

    @property
    def background(self) -> BackgroundGeneration:
        """Background generation; on rank 0, after `generate_ahead`."""
        assert self._background is not None
        return self._background

    def take(
        self, count: int, due: set[int], is_stopped: Callable[[], bool], *, waits: bool = True
    ) -> dict[int, list[Episode]] | None:
        """Take finished groups by number, see `BackgroundGeneration.take`. Collective; all ranks get the same."""
        if not self._goes_on:
            self._ready()

        def wait() -> bytes:
            # While samples continue, the policy may be newer than the servers' weights.
            self._servers.send = None if self._goes_on else self._send
            try:
                self.background.start()
                groups = self.background.take(count, due, is_stopped, waits=waits)
            finally:
                if not self._goes_on:
                    self.background.halt()  # it may need the weights until then
                self._servers.send = None
            return b"" if groups is None else pack_groups(groups)

        content = run_on_first_rank(wait, self._request)
        return unpack_groups(content) if content else None

    def answer(self, work: Callable[[OpenRequests], bytes], rules: SamplingRules) -> bytes:
        """Run work on rank 0 that sends requests to servers, and return its result on all ranks. Collective."""
        self._ready()

        def run() -> bytes:
            requests = OpenRequests(self._servers, rules)
            requests.start()
            try:
                return work(requests)
            finally:
                requests.halt()

        return self._run(run)

    def _run(self, work: Callable[[], bytes]) -> bytes:
        """Run work on rank 0 while background generation is halted, and return its result on all ranks. Meanwhile all
        ranks broadcast the weights when a server needs them. Collective."""

        def alone() -> bytes:
            is_generating = self._background is not None and self._background.halt()
            self._servers.send = self._send
            try:
                result = work()
            finally:
                self._servers.send = None
            if is_generating:
                self.background.start()
            return result

        return run_on_first_rank(alone, self._request)

    async def _send(self, groups: Sequence[WeightGroup]) -> None:
        self._groups = groups
        await asyncio.wrap_future(self._request.ask())

    def _broadcast(self) -> None:
        """Send the policy of the last update to the servers that have joined groups. Collective."""
        sender = WeightSender(self._groups) if dist.get_rank() == 0 else None
        for name, tensor in self._policy.tensors():
            if sender is not None:
                sender.add(name, tensor)
        if sender is not None:
            sender.end()

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate` and `OpenRequests`."""
        self._ready()
        loop = self._servers.loop
        return unpack(self._run(lambda: pack(loop.run(answers(self._servers, requests, rules)))))

    def _ready(self) -> None:
        """Let lost servers join again, and check what they generate. Collective."""
        if dist.get_rank() == 0 and self._newest is not None:
            self._launched.ensure(self._newest)

        async def join() -> bytes:
            await self._servers.join_again()
            return await self._first_samples()

        self._check_new(self._run(lambda: self._servers.loop.run(join())))

    async def _first_samples(self) -> bytes:
        """Generate and pack the first completions of servers that joined; on rank 0."""
        self._new = await self._servers.first_samples(self._first, at_start=not self._has_generated)
        return pack([completion for completions in self._new.values() for completion in completions])

    def _check_new(self, first_samples: bytes) -> None:
        """Compare the completions of servers that joined with the policy, which has the weights of the last update. The
        probe compares log-probabilities of given tokens; this check compares those of generated tokens, and whether
        the tokens follow the policy's distribution. Collective; all ranks decide equally.

        Raises:
            EngineError: a server differs at the start of the run. Later such a server is excluded.
        """
        completions = unpack(first_samples)
        servers = list(self._new)
        prompts = [request.prompt for request in self._first]
        for number, start in enumerate(range(0, len(completions), _FIRST)):
            generated = list(zip(prompts, completions[start : start + _FIRST], strict=True))
            report, is_right = self._policy.compare(generated, self._rules.temperature)
            if not is_right and not self._has_generated:
                raise EngineError(
                    *on_first_rank(
                        f"rollout.urls: {servers[number].url if servers else ''}: {report}; start it with the "
                        "options of docs/rollout_servers.md, and in the type of training.mixed_precision_param"
                    )
                )
            if servers:
                self._servers.judge(servers[number], report, is_right=is_right)
        self._has_generated |= bool(completions)

    def update(self, version: int) -> None:
        """Write the policy to disk or broadcast it, load it into all servers, and compare their log-probabilities of
        the probe with the trainer's. Collective.

        The first call also sends a policy with a changed tensor of each kind. Training steps are smaller than the
        tolerance of the probe, so it would miss a server that was started with these weights and loads none, or only
        some.

        Raises:
            EngineError: no server has these weights, or a server did not load the changed tensors or samples from
                another distribution.
            UserError: the disk is full, or, at the first update, a server runs with wrong options.
        """
        if self._version < 0:
            with self._policy.changed():
                self._hand_over(CHANGED, self._folder / "version-check")
        first_samples = self._hand_over(version, self._folder / f"version-{version:08d}")
        self._version = version
        self._check_new(first_samples)

    def _hand_over(self, version: int, path: Path) -> bytes:
        """Hand one version of the weights to the servers; return the first completions for `_check_new`."""
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

        async def load() -> bytes:
            if folder is not None:
                await _write_manifest(folder, version)
            await self._servers.update(Weights(version, folder, self._probe, expected, self._is_fp8))
            if folder is not None:
                # A restarted server first needs the folder that it was started with, then the newest one.
                self._remove(but={folder, *map(self._launched.folder_of, self._servers.awaited)})
            return b"" if version == CHANGED else await self._first_samples()

        return self._run(lambda: self._servers.loop.run(load()))

    def _export(self, path: Path) -> None:
        # From a killed run. Removed before the export, which begins with a collective.
        if dist.get_rank() == 0 and path.exists():
            shutil.rmtree(path)
        self._policy.export(path)

    def close(self) -> None:
        """Remove the weights from disk, and end the servers that this run started."""
        with ExitStack() as ends:  # last in, first out, all run despite errors: removing weights can free a full disk
            if dist.get_rank() == 0:
                ends.callback(self._remove)
            ends.callback(self._launched.stop)
            ends.callback(self._servers.loop.stop)
            if self._background is not None:
                # Late results of functions and programs are not written.
                ends.callback(self._background.keep, (), before=0)
                self._background.halt(_HALT_SECONDS)

    def _remove(self, *, but: Set[Path | None] = frozenset()) -> None:
        for folder in self._folder.glob("version-*"):
            if folder not in but:
                shutil.rmtree(folder)


async def _write_manifest(path: Path, version: int) -> None:
    """Write the `VERSION_FILE` of a folder of weights."""
    names = sorted(path.iterdir())
    records = await asyncio.gather(*(asyncio.to_thread(hash_file, name) for name in names))
    files = {name.name: vars(record) for name, record in zip(names, records, strict=True)}
    create_durably(path / VERSION_FILE, [json_bytes({"version": version, "files": files})])
    sync_folder(path)
