"""Which address peers reach this process at, and what its connections have moved so far."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

__all__ = ["own_address", "transferred"]


def own_address(store_host: str) -> str:
    """The address that the group's peers reach this process at: of GLOO_SOCKET_IFNAME's interface, else of the way to the store, else loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                return socket.inet_ntoa(found[20:24])
        with contextlib.suppress(OSError):
            probe.connect((store_host or "127.0.0.1", 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
        if store_host in ("", "localhost", "127.0.0.1", "::1"):
            return "127.0.0.1"  # all ranks are here; a look-up of the host's name could hang
        with contextlib.suppress(OSError):  # the store's name leads to loopback here, but others reach this machine by its own name
            address = socket.gethostbyname(socket.gethostname())
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
                trial.bind((address, 0))
            return address
    return "127.0.0.1"


def transferred(hosts: set[str]) -> dict[str, int]:
    """Bytes acknowledged by, and received from, each of `hosts`, over all TCP connections of this process that are open now."""
    total = dict.fromkeys(hosts, 0)
    for entry in Path("/proc/self/fd").iterdir():
        try:
            seen = socket.socket(fileno=int(entry.name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            host = seen.getpeername()[0] if seen.family in (socket.AF_INET, socket.AF_INET6) else ""
            host = host.removeprefix("::ffff:")
            if host in total:
                acknowledged, received = struct.unpack_from("=QQ", seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)
                total[host] += acknowledged + received
        except (OSError, struct.error):
            continue
        finally:
            seen.detach()
    return total
