"""The meeting of the launchers of all hosts, in a store on the first one: reports go there, and the decision comes
back."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from glm46.config.errors import UserError

_CONNECT = timedelta(seconds=60)


class Meeting:
    """All hosts of a run, from one of them.

    Raises:
        UserError: the first host does not answer, or its port is taken.
    """

    def __init__(self, node: int, nodes: int, address: str, port: int):
        self.node, self.nodes = node, nodes
        try:
            self._store = dist.TCPStore(address, port, is_master=node == 0, timeout=_CONNECT, wait_for_workers=False)
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            what = f"port {port} of this host cannot be opened" if node == 0 else f"no answer from {address}:{port}"
            raise UserError(
                f"environment: MASTER_ADDR = {address!r}, MASTER_PORT = {port}: {what}; start preflight on all "
                "hosts with one free port of the first"
            ) from error

    def collect(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Send a value under a name; on the first host the values of all, None for those that sent none in time."""
        self._store.set(f"{name}/{self.node}", json.dumps(value))
        if self.node:
            return []
        return [self._get(f"{name}/{node}", seconds) for node in range(self.nodes)]

    def decide(self, name: str, value: Any, seconds: float) -> Any:
        """The value of the first host, on all; None if it sends none in time."""
        if self.node == 0:
            self._store.set(name, json.dumps(value))
            return value
        return self._get(name, seconds)

    def _get(self, key: str, seconds: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return json.loads(self._store.get(key))
        except RuntimeError:  # DistStoreError after the time, DistNetworkError without the store
            return None
