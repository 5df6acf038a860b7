"""The rendezvous of torchrun for ranks of one node: a store on loopback.

The stores of torchrun's own rendezvous listen on all addresses without a password, even for one node, and the launcher
of its default one reads pickles from there.
"""

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from glm46.commands.rendezvous import LOCAL_BACKEND

_LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """One launcher, whose store the ranks use too."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        listener = socket.create_server((_LOOPBACK, 0))
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return LOCAL_BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the name known to torchrun."""
    rendezvous_handler_registry.register(LOCAL_BACKEND, LocalRendezvous)
