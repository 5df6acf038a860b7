"""The HTTP endpoint that Prometheus scrapes, and the file by which it finds the endpoint."""

import contextlib
import errno
import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from glm46.config.checkpoint import MetricsConfig
from glm46.config.errors import UserError
from glm46.files.durable import replace_durably
from glm46.files.local_disk import network_file_system


class Endpoint:
    """Serves the metrics of a collector on the address and port of [metrics], in threads.

    The server starts when this is made. If the port is taken, another one is chosen: training is worth more than a
    number. Prometheus finds it by a file in `prometheus_sd_folder`, once it is announced.

    Args:
        config: with a port.
        folder: job.dump_folder; its name becomes the label ``run``.
        report: takes one line about the address.

    Raises:
        UserError: the address cannot be used.
    """

    def __init__(self, config: MetricsConfig, folder: Path, collector: Collector, report: Callable[[str], None]):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._server = _start(config, registry, report)
        address, self.port = config.prometheus_address, self._server.server_port
        host = f"[{address}]" if ":" in address else address
        report(f"metrics      http://{host}:{self.port}/metrics")
        target = socket.gethostname() if address in ("0.0.0.0", "::") else host
        self._report, self._is_loopback = report, address in ("localhost", "::1") or address.startswith("127.")
        # Two runs may have folders of one name.
        digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._found_by = Path(config.prometheus_sd_folder) / f"{folder.name}-{digest}.json"
        self._entry: dict[str, Any] = {"targets": [f"{target}:{self.port}"], "labels": {"run": folder.name}}

    def announce(self) -> None:
        """Write the file by which Prometheus finds the run. From then on a missing endpoint raises an alert.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._found_by.parent.mkdir(parents=True, exist_ok=True)
            # Complete or absent, because Prometheus may read it at any time.
            replace_durably(self._found_by, [json.dumps([self._entry]).encode() + b"\n"])
        except OSError as error:
            raise UserError(
                f"metrics.prometheus_sd_folder = {str(self._found_by.parent)!r}: {error.filename} cannot be written: "
                f"{error.strerror}; set another folder"
            ) from error
        if self._is_loopback and (kind := network_file_system(self._found_by.parent)):
            self._report(
                f"metrics.prometheus_sd_folder = {str(self._found_by.parent)!r} is on a network file system ({kind}), "
                f"and the address {self._entry['targets'][0]} means another machine there: a Prometheus elsewhere that "
                "reads this folder raises TrainingDown; set metrics.prometheus_address, or a folder on a local disk"
            )

    def close(self, *, has_failed: bool) -> None:
        """Stop serving. The file by which Prometheus finds the run stays after a failure, so that the missing endpoint
        raises an alert; after an end as intended it is removed."""
        self._server.shutdown()
        self._server.server_close()
        if not has_failed:
            self.withdraw()

    def withdraw(self) -> None:
        """Remove the file by which Prometheus finds the run."""
        with contextlib.suppress(OSError):
            self._found_by.unlink(missing_ok=True)


def _start(config: MetricsConfig, registry: CollectorRegistry, report: Callable[[str], None]) -> WSGIServer:
    address = config.prometheus_address
    for port in (config.prometheus_port or 0, 0):
        try:
            server, _ = start_http_server(port, address, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                report(f"metrics.prometheus_port = {port} is taken on {address}; another port is used")
                continue
            stated, remedy = f"prometheus_address = {address!r}", "state an address of this machine"
            if error.errno == errno.EACCES:
                stated, remedy = f"prometheus_port = {port}", "take one from 1024 on"
            raise UserError(f"metrics.{stated}: {error.strerror or error}; {remedy}") from error
        return server
    raise AssertionError("port 0 is never taken")
