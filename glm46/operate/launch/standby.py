"""Rank server and signal handlers, kept across restarts."""

from dataclasses import dataclass

from glm46.compute.distributed.environment import share_cores
from glm46.config.run_config import RunConfig
from glm46.operate.launch.config_options import task_module
from glm46.operate.launch.rank_server import RankServer
from glm46.operate.launch.torchrun import LauncherSignals


@dataclass
class Standby:
    """The server of ranks of this launcher, and its signals."""

    signals: LauncherSignals
    server: RankServer | None = None

    def prepare(self, config: RunConfig, cores: int, processes: int) -> None:
        """Begin the imports of the ranks, if this has not been done. Call it in the main thread."""
        if self.server is None:
            share_cores(cores, processes)
            self.server = RankServer(["glm46.commands.train", task_module(config)])

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.close()
