"""The HTTP endpoint that Prometheus scrapes, and the file by which it finds the endpoint."""

import base64
import contextlib
import errno
import hashlib
import hmac
import json
import os
import shlex
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from glm46.config.checkpoint import Metrics
from glm46.config.errors import UserError
from glm46.files.local_disk import network_file_system

_POLL_SECONDS = 0.1
"""Of the server for its end."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SixServer(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait 40 ms for an answer
    timeout = 10.0  # for a client that connects and sends nothing

    def log_message(self, *_: Any) -> None:
        """No line for each scrape."""


class Endpoint:
    """Serves the metrics of a collector on the address and port of [metrics], in threads.

    The server starts when this is made. If the port is taken, another one is chosen: training is worth more than a
    number. Prometheus finds it by a file in `prometheus_sd_folder`, once it is announced.

    Args:
        config: with a port.
        folder: job.dump_folder; its name becomes the label ``run``.
        report: takes one line about the address.

    Raises:
        UserError: the address, the certificate or the password cannot be used.
    """

    def __init__(self, config: Metrics, folder: Path, collector: Collector, report: Callable[[str], None]):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        app = make_wsgi_app(registry)
        if config.prometheus_password_file is not None:
            app = _with_password(app, _credentials(Path(config.prometheus_password_file)))
        context = _tls(config)
        self._server = _bind(config, app, report)
        if context is not None:
            # The handshake is left to the thread of the request: a silent client must not hold up the others.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        address, self.port = config.prometheus_address, self._server.server_port
        host = f"[{address}]" if ":" in address else address
        report(f"metrics      {'https' if context else 'http'}://{host}:{self.port}/metrics")
        target = socket.gethostname() if address in ("0.0.0.0", "::") else host
        self._report, self._is_loopback = (
            report,
            address == "localhost" or address.startswith("127.") or address == "::1",
        )
        # Two runs may have folders of one name.
        digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._found_by = Path(config.prometheus_sd_folder) / f"{folder.name}-{digest}.json"
        self._entry = {
            "targets": [f"{target}:{self.port}"],
            "labels": {"run": folder.name} | ({"__scheme__": "https"} if context else {}),
        }
        threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True).start()

    def announce(self) -> None:
        """Write the file by which Prometheus finds the run. From then on a missing endpoint raises an alert.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._found_by.parent.mkdir(parents=True, exist_ok=True)
            # Complete or absent, because Prometheus may read it at any time.
            draft = self._found_by.with_suffix(".draft")
            draft.write_text(json.dumps([self._entry]) + "\n", encoding="utf-8")
            os.replace(draft, self._found_by)
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


def _bind(config: Metrics, app: Callable[..., Iterable[bytes]], report: Callable[[str], None]) -> _Server:
    address = config.prometheus_address
    kind = _SixServer if ":" in address else _Server
    for port in (config.prometheus_port, 0):
        try:
            return make_server(address, port, app, server_class=kind, handler_class=_Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                report(f"metrics.prometheus_port = {port} is taken on {address}; another port is used")
                continue
            key, value = ("prometheus_port", port) if error.errno == errno.EACCES else ("prometheus_address", address)
            remedy = "take one from 1024 on" if key == "prometheus_port" else "state an address of this machine"
            raise UserError(f"metrics.{key} = {value!r}: {error.strerror or error}; {remedy}") from error
    raise AssertionError("port 0 is never taken")


def _tls(config: Metrics) -> ssl.SSLContext | None:
    if config.prometheus_tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.prometheus_tls_certificate, config.prometheus_tls_key)
    except OSError as error:  # SSLError is one
        raise UserError(
            f"metrics.prometheus_tls_certificate = {config.prometheus_tls_certificate!r}: cannot be loaded: "
            f"{error.strerror or error}; give a certificate and its key in PEM"
        ) from error
    return context


def _credentials(path: Path) -> bytes:
    try:
        text = path.read_text(encoding="utf-8").strip()
        is_open = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise UserError(
            f"metrics.prometheus_password_file = {str(path)!r}: cannot be read: {reason}; write USER:PASSWORD into it"
        ) from error
    if not all(text.partition(":")[::2]) or "\n" in text:
        raise UserError(
            f"metrics.prometheus_password_file = {str(path)!r}: must be one line; write USER:PASSWORD into it"
        )
    if is_open:
        raise UserError(
            f"metrics.prometheus_password_file = {str(path)!r}: others may read it; chmod 600 {shlex.quote(str(path))}"
        )
    return base64.b64encode(text.encode())


def _with_password(app: Callable[..., Iterable[bytes]], credentials: bytes) -> Callable[..., Iterable[bytes]]:
    expected = b"Basic " + credentials

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="glm46"')])
        return [b"user and password are needed\n"]

    return guarded
