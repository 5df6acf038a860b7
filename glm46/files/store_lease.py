"""A lease on a prefix of an object store: one run at a time writes there.

The lease is an object that its holder writes again every 20 seconds. It is created by a conditional request; a store
without them can give it to two runs that start within the same second. A lease that is not written for 90 seconds is
free: a run that was cut off from the store for so long may lose it, and then publishes nothing more.
"""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.files.store import Store
from glm46.files.threads import start_daemon

LEASE = "run.lease"
_RENEW_SECONDS = 20.0
_FREE_SECONDS = 90.0
_POLL_SECONDS = 2.0


class Lease:
    """The lease of this process on a store."""

    def __init__(self, store: Store):
        self._store = store
        self._fields = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "process": os.getpid(),
            "started": _start_of(os.getpid()),
        }
        self._is_taken = False
        self._end = threading.Event()

    def acquire(self) -> str | None:
        """Take the lease. Returns the holder if it is another run; None if it is this process.

        Waits up to 90 seconds for a holder on another machine that may have ended.
        """
        first = None
        first_seen = 0.0
        while True:
            try:
                self._store.create(LEASE, self._content())
            except FileExistsError:
                content = self._read()
            else:
                break
            if content is None:
                continue
            if first is None:
                first = content
                first_seen = time.monotonic()
            is_here, has_ended = self._state_here(content)
            if has_ended or (content == first and time.monotonic() - first_seen > _FREE_SECONDS):
                self._store.remove([LEASE])
            elif is_here or content != first:  # it lives, or was written again
                return _holder(content)
            else:
                time.sleep(_POLL_SECONDS)
        if not self.is_held():
            return _holder(self._read() or b"")
        self._is_taken = True
        start_daemon(self._renew, "lease")
        return None

    def is_held(self) -> bool:
        """Return True if the store still has the lease of this process. Raises StoreError if it does not answer."""
        return _fields(self._read() or b"").get("id") == self._fields["id"]

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        if self._is_taken:
            self._is_taken = False
            self._end.set()
            with suppress(OSError):  # it will be free after a time
                if self.is_held():
                    self._store.remove([LEASE])

    def _renew(self) -> None:
        while not self._end.wait(_RENEW_SECONDS):
            with suppress(OSError):  # an outage may pass; until then no checkpoint can be published either
                if not self.is_held():
                    return
                if not self._end.is_set():
                    self._store.write(LEASE, self._content())

    def _content(self) -> bytes:
        return json.dumps({**self._fields, "written": time.time()}).encode()

    def _read(self) -> bytes | None:
        try:
            return self._store.read(LEASE)
        except FileNotFoundError:
            return None

    def _state_here(self, content: bytes) -> tuple[bool, bool]:
        """Return whether the holder is a process of this machine that lives, and whether it is one that has ended."""
        fields = _fields(content)
        if any(fields.get(name) != self._fields[name] for name in ("host", "boot")):
            return False, False
        lives = _start_of(fields.get("process", 0)) == fields.get("started", "")
        return lives, not lives


def _fields(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        fields = json.loads(content)
        if isinstance(fields, dict):
            return fields
    return {}


def _holder(content: bytes) -> str:
    fields = _fields(content)
    return f"process {fields.get('process', 'of unknown number')} on {fields.get('host', 'an unknown host')}"


def _start_of(process: int) -> str | None:
    """Return the start time of a process, in the units of the kernel, which tells it from a later one of the same
    number; None if there is none. Source: proc(5), stat."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return None
