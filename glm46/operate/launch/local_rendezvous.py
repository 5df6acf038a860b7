"""A rendezvous for torchrun with the ranks of one node: a store on loopback.

The stores of torchrun's own rendezvous listen on all addresses without a password, even for one node, and the launcher
of its default rendezvous reads pickles from its store.
"""

import socket

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from glm46.compat import PrefixStore, TCPStore
from glm46.operate.launch.rendezvous import LOCAL_BACKEND

_LOOPBACK = "127.0.0.1"


class LocalRendezvous(StaticTCPRendezvous):
    """Rendezvous of one launcher, whose store the ranks use too."""

    def __init__(self, parameters: RendezvousParameters):
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(_LOOPBACK, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=60)
        store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self._met = RendezvousInfo(PrefixStore(parameters.run_id, store), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def get_backend(self) -> str:
        """See `StaticTCPRendezvous.get_backend`."""
        return LOCAL_BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """See `StaticTCPRendezvous.next_rendezvous`."""
        return self._met


def register() -> None:
    """Register the rendezvous with torchrun."""
    registry.register(LOCAL_BACKEND, LocalRendezvous)
