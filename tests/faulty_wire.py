"""A wire with faults between a client and a server of HTTP: each answer may be delayed, refused, cut or changed."""

import re
import socket
import threading
from collections.abc import Callable

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_REFUSAL = b"<Error><Code>%s</Code><Message>planted</Message></Error>"

Fault = Callable[[int, bytes], str | None]
"""Function of the number of a request and its first line that returns a fault, or None: ``500``, ``503``, ``reset``,
``hang``, ``cut`` (the body ends early), ``flip`` (a bit of the body is changed)."""


class FaultyWire:
    """A proxy on the loopback address that counts what passes.

    Attributes:
        port: of the proxy.
        requests: number of requests so far.
        faults: number of faults so far.
        sent_bytes, received_bytes: bytes of bodies from and to the client.
    """

    def __init__(self, server: tuple[str, int], fault: Fault):
        self._server = server
        self.fault = fault
        self.requests = 0
        self.faults = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while self._exchange(client):
                    pass
            except OSError:
                return

    def _exchange(self, client: socket.socket) -> bool:
        """Pass one request and its answer. Returns whether the connection can be used again."""
        request = _message(client, client)
        if request is None:
            return False
        head, body = request
        line = head.partition(b"\r\n")[0]
        with self._lock:
            number = self.requests
            self.requests += 1
            self.sent_bytes += len(body)
            fault = self.fault(number, line)
            self.faults += fault is not None
        if fault == "reset":
            return False
        if fault == "hang":
            threading.Event().wait(4.0)
            return False
        if fault in ("500", "503"):
            code = b"InternalError" if fault == "500" else b"SlowDown"
            content = _REFUSAL % code
            client.sendall(b"HTTP/1.1 %s Planted\r\nContent-Length: %d\r\n\r\n" % (fault.encode(), len(content)))
            client.sendall(b"" if line.startswith(b"HEAD") else content)
            return True
        with socket.create_connection(self._server) as server:
            server.sendall(head.replace(b"\r\nExpect: 100-continue", b"") + body)
            answer = _message(server, None, is_head=line.startswith(b"HEAD"))
        if answer is None:
            return False
        answer_head, answer_body = answer
        if fault == "cut":
            client.sendall(answer_head + answer_body[: len(answer_body) // 2])
            return False
        if fault == "flip" and answer_body:
            middle = len(answer_body) // 2
            answer_body = answer_body[:middle] + bytes([answer_body[middle] ^ 4]) + answer_body[middle + 1 :]
        self.received_bytes += len(answer_body)
        client.sendall(answer_head + answer_body)
        return b"connection: close" not in answer_head.lower()


def _message(
    source: socket.socket, client: socket.socket | None, *, is_head: bool = False
) -> tuple[bytes, bytes] | None:
    """Read a message with a length. Returns its head and its body; None if the connection has ended. ``client``: the
    sender of a request, who may wait for leave to send the body."""
    content = b""
    while _HEAD_END not in content:
        piece = source.recv(1 << 16)
        if not piece:
            return None
        content += piece
    head, _, body = content.partition(_HEAD_END)
    match = _LENGTH.search(head)
    length = 0 if match is None or is_head else int(match[1])
    if client is not None and b"100-continue" in head.lower() and len(body) < length:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    pieces = [body]
    remaining = length - len(body)
    while remaining > 0:
        piece = source.recv(min(remaining, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        remaining -= len(piece)
    return head + _HEAD_END, b"".join(pieces)
