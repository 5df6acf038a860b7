"""The metrics of a run, served for Prometheus while a process of the run lives."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.run_config import RunConfig
from glm46.engine.observe.endpoint import Endpoint
from glm46.engine.observe.exporter import RunCollector
from glm46.engine.reliability.stop import EXIT_DIVERGED, EXIT_HANG, before_exit
from glm46.operate.launch.torchrun import EXIT_FAILED_RANK


class Exporter:
    """The endpoint of a run from the launcher's point of view; without one, the methods have no effect."""

    def __init__(self, collector: RunCollector | None = None, endpoint: Endpoint | None = None):
        self._collector, self._endpoint = collector, endpoint
        self.code = EXIT_FAILED_RANK
        """Exit code of the run, as far as it is known."""

    def starts(self, number: int) -> None:
        """The ranks start for the n-th time, counted from 0; what earlier ones have left is not a sign of life."""
        if self._collector is not None:
            self._collector.restarted(number)
            self.announce()

    def announce(self) -> None:
        """Let Prometheus find the endpoint."""
        if self._endpoint is not None:
            self._endpoint.announce()

    def ends(self, code: int) -> int:
        """The run has ended with this exit code, which is returned."""
        self.code = code
        return code


@contextlib.contextmanager
def exporting(config: RunConfig | None, *, is_beside: bool = False) -> Iterator[Exporter]:
    """Serve the metrics of a run, if it has a port, inside of this context.

    Args:
        config: None for a process that exports nothing.
        is_beside: another process trains. Otherwise the heartbeat of an earlier run in the folder is ignored.

    Raises:
        UserError: see `Endpoint`.
    """
    if config is None or config.metrics.prometheus_port is None:
        yield Exporter()
        return
    folder = Path(config.job.dump_folder)
    collector = RunCollector(folder)
    if not is_beside:
        collector.restarted(0)
    endpoint = Endpoint(config.metrics, folder, collector, lambda line: print(line, flush=True))
    exporter = Exporter(collector, endpoint)
    before_exit.append(endpoint.withdraw)  # a signal while no rank runs ends this process at once, as intended
    try:
        yield exporter
    except UserError as error:
        exporter.code = error.exit_code
        raise
    finally:
        before_exit.remove(endpoint.withdraw)
        endpoint.close(has_failed=exporter.code in (EXIT_FAILED_RANK, EXIT_HANG, EXIT_DIVERGED))
