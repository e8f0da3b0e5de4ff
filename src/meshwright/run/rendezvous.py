"""Where processes of one machine find each other: a store that the starting process hosts on a socket that is never given up.

Picking a free port, closing it and telling a rank to listen there is a race: somebody else may take it meanwhile. Here the socket that the system
gave the port to is the one that listens, and every rank is a client. Ranks use torch's own `env://`: TORCHELASTIC_USE_AGENT_STORE tells it that
the store is already hosted, as torchrun's agent does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .launcher import listen

__all__ = ["hosted_rendezvous"]


@contextmanager
def hosted_rendezvous(ranks: int) -> Iterator[dict[str, str]]:
    """Environment variables that every rank needs beside RANK and LOCAL_RANK; the store lives until the block is left. Loopback only.

    Raises: RunError when no socket can be had.
    """
    import torch.distributed as dist

    sock = listen(0)
    with sock:
        host, port = sock.getsockname()
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach(), use_libuv=True)
    try:
        yield {
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    finally:
        del store
