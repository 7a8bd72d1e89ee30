"""torchrun's c10d rendezvous with an authenticated state.

The agents of all nodes keep the rendezvous state in a TCPStore on the first node, as a pickle. A TCPStore has no
authentication: anyone who can connect can list and set its keys, so a random job id is no protection, and
`pickle.loads` of untrusted bytes can run any code. Here the state carries an HMAC with RENDEZVOUS_KEY, and a state
without a valid HMAC is rejected before unpickling.

This does not protect the ranks: their own store, gloo and NCCL have no authentication either, and ranks exchange
pickled objects through them. Train in trusted networks only. CLUSTER_INTERFACE keeps other networks out.
"""

from __future__ import annotations

import hmac
import socket
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from launch.slurm_network import MAC_BYTES, sign

# Name of the handler for torchrun.
BACKEND = "zeco-c10d"


class SignedBackend(RendezvousBackend):
    """The c10d backend with a signed state.

    Args:
        backend: stores the state.
        key: secret shared by the job's agents.
    """

    def __init__(self, backend: RendezvousBackend, key: bytes) -> None:
        self._backend, self._key = backend, key

    @property
    def name(self) -> str:
        """The handler's name for torchrun."""
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """See `RendezvousBackend`. Raises RendezvousStateError for a state without a valid HMAC."""
        found = self._backend.get_state()
        return None if found is None else (self._open(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See `RendezvousBackend`. Raises RendezvousStateError for a state without a valid HMAC."""
        found = self._backend.set_state(sign(self._key, state) + state, token)
        return None if found is None else (self._open(found[0]), *found[1:])

    def _open(self, signed: bytes) -> bytes:
        mac, state = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not hmac.compare_digest(mac, sign(self._key, state)):
            raise RendezvousStateError("the rendezvous' state is not signed by this job: somebody else writes there")
        return state


class _Handler(DynamicRendezvousHandler):
    """Makes the ranks' store, on rank 0's node, listen on a single address."""

    listen_address: str | None = None

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return server(self.listen_address, master_addr, master_port)


def server(listen_address: str | None, name: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Create a TCPStore server; without `listen_address` it listens on all interfaces, torch's default.

    Args:
        listen_address: of this node.
        name: host name by which this process connects to it.
        port: 0 for a free one.
        timeout: of the store's operations.

    Raises:
        OSError, DistError: the port is in use, or the address does not belong to this machine.
    """
    if listen_address is None:
        return TCPStore(name, port, is_master=True, multi_tenant=True, timeout=timeout)
    # TCPStore has no listen address, but takes a socket that listens already.
    listening = socket.create_server((listen_address, port))
    port = listening.getsockname()[1]
    return TCPStore(
        listen_address, port, is_master=True, multi_tenant=True, timeout=timeout, master_listen_fd=listening.detach()
    )


def create_handler(key: bytes, parameters: RendezvousParameters) -> RendezvousHandler:
    """Create torchrun's rendezvous handler.

    Args:
        key: of the job. Not one of the parameters, since torchrun logs those.
        parameters: `is_host`, and `read_timeout` and `join_timeout` in seconds; with a local address the stores listen
            only there.

    Raises:
        RendezvousConnectionError: the store cannot be created or reached.
    """
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    timeout = timedelta(seconds=int(parameters.get("read_timeout")))
    try:
        if parameters.get_as_bool("is_host"):
            store = server(parameters.local_addr, host, port, timeout)
        else:
            store = TCPStore(host, port, is_master=False, multi_tenant=True, timeout=timeout)
    except (OSError, ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(str(error)) from error
    backend = SignedBackend(C10dRendezvousBackend(store, parameters.run_id), key)
    handler = _Handler.from_backend(
        parameters.run_id,
        store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(join=timedelta(seconds=int(parameters.get("join_timeout")))),
    )
    handler.listen_address = parameters.local_addr
    return handler
