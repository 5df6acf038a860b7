"""The engine whose completions inference servers draw, with weights that they load from a disk."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from glm46.config.rollout import Rollout
from glm46.files.durable import create_durably, hash_file, sync_folder
from glm46.huggingface.write_folder import json_bytes
from glm46.rollout.first_rank import pack, run_on_first_rank, unpack
from glm46.rollout.launched_servers import LaunchedServers
from glm46.rollout.records import Completion, Request, SamplingRules
from glm46.rollout.server_pool import ServerPool
from glm46.rollout.server_state import Weights
from glm46.rollout.sglang_server import SglangServer
from glm46.rollout.vllm_server import VllmServer

VERSION_FILE = "version.json"
"""In a folder of weights: its version, and length and SHA-256 of each of its files."""

_HASHED_AT_ONCE = 8
_SERVERS = {"vllm": VllmServer, "sglang": SglangServer}


class ServerEngine:
    """See `Engine`. Rank 0 talks to the servers; all ranks get the completions."""

    def __init__(
        self,
        config: Rollout,
        *,
        folder: Path,
        export: Callable[[Path], None],
        score: Callable[[list[list[int]]], list[list[float]]],
        probe: list[list[int]],
        padding: range,
        say: Callable[[str], None] = print,
    ):
        """
        Args:
            folder: of the versions of the weights, if rollout.weights_folder does not name one; on a disk that all
            ranks
                and all servers see under this path.
            export: writes the policy as a Hugging Face folder under a new path. Collective.
            score: the policy's log-probability, at temperature 1, of each token but the first of sequences. Collective.
            probe: sequences of tokens that servers score after each update, the same in the whole run.
            padding: ids of the head's padding rows.
            say: takes a line for the log, on rank 0.
        """
        self._folder = Path(config.weights_folder or folder)
        self._export, self._score, self._probe = export, score, probe
        servers = [_SERVERS[config.kind](url, padding) for url in config.urls]
        self._launched = LaunchedServers(config.launch, config.urls, self._folder, say)
        self._pool = ServerPool(
            servers,
            deadline=config.deadline_seconds,
            restart=config.restart_seconds,
            say=say,
            still_starting=self._launched.require_running,
        )
        self._newest: Path | None = None

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate` and `ServerPool.generate`."""
        if dist.get_rank() == 0:
            self._launched.ensure(self._newest)
        return unpack(run_on_first_rank(lambda: pack(self._pool.generate(requests, rules))))

    def update(self, version: int) -> None:
        """Write the policy to the disk, have all servers load it, and compare their log-probabilities of the probe with
        the trainer's. Collective.

        Raises:
            EngineError: no server has these weights now.
            UserError: the disk is full, or at the first update: a server runs with other options than needed.
        """
        path = self._folder / f"version-{version:08d}"
        if dist.get_rank() == 0 and path.exists():  # of a run that was killed; export begins with a collective
            shutil.rmtree(path)
        self._export(path)
        self._newest = path
        if dist.get_rank() == 0:
            self._launched.ensure(path)
        expected = self._score(self._probe)

        def hand_over() -> bytes:
            names = sorted(path.iterdir())
            with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
                records = list(threads.map(hash_file, names))
            files = {name.name: vars(record) for name, record in zip(names, records, strict=True)}
            create_durably(path / VERSION_FILE, [json_bytes({"version": version, "files": files})])
            sync_folder(path)
            self._pool.update(Weights(version, path, self._probe, expected))
            self._remove(but=path)  # a server that comes back loads the newest one
            return b""

        run_on_first_rank(hand_over)

    def close(self) -> None:
        """Remove the weights from the disk, and end the servers that this run has started."""
        self._launched.stop()
        if dist.get_rank() == 0:
            self._remove()

    def _remove(self, *, but: Path | None = None) -> None:
        for folder in self._folder.glob("version-*"):
            if folder != but:
                shutil.rmtree(folder)
