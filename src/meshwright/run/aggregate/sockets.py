"""UDP without Python per packet: compiled code calls the C library's `recvmmsg` and `sendmmsg`, many packets a call, on arrays laid out here."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba.core import types

from ...errors import PortInUse, RunError, Unsupported, UsageError
from ...kernels.compile import called, inlined
from .frames import HEADER_BYTES, MAX_CONTROL_BYTES

__all__ = [
    "BATCH", "Address", "Inbox", "Outbox", "address_of", "flush", "inbox", "now_ns", "open_socket", "outbox", "packed_address", "parse_address",
    "put", "receive",
]  # fmt: skip

BATCH = 64  # packets of one call of the C library
MAX_QUEUED = 512  # packets that wait for one call
WAIT_NS = 5_000_000  # that a receive waits at most, so that timers are looked at
BUFFER_BYTES = 8 << 20  # of the kernel's queues, both ways, where it grants so much
MSG_WAITFORONE = 0x10000
HEAD_WORDS = 8  # of the C library's `struct mmsghdr` on 64-bit Linux: name, its length, parts, their number, control (2), flags, bytes received

_recvmmsg: Any = types.ExternalFunction("recvmmsg", types.int32(types.int32, types.intp, types.uint32, types.int32, types.intp))
_sendmmsg: Any = types.ExternalFunction("sendmmsg", types.int32(types.int32, types.intp, types.uint32, types.int32))
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


class Inbox(NamedTuple):
    """`words[i]`: packet i; `numbers`: the same memory as 32-bit numbers; `heads[i, 7]`: its bytes; `names[i]`: who sent it."""

    words: Any
    numbers: Any
    heads: Any
    parts: Any
    names: Any


class Outbox(NamedTuple):
    """Packets that wait to be sent, each a header and a payload somewhere in memory. `state`: how many; how many flushes there were; packets sent."""

    heads: Any
    parts: Any
    clock: Any
    state: Any


def inbox(payload_bytes: int) -> Inbox:
    """Room for a batch of packets of up to so many bytes of payload, or of control messages, and a word more, so that one that is too long shows."""
    width = -(-max(HEADER_BYTES + payload_bytes, MAX_CONTROL_BYTES) // 8) + 1
    words, heads = np.zeros((BATCH, width), np.int64), np.zeros((BATCH, HEAD_WORDS), np.int64)
    parts, names = np.zeros((BATCH, 2), np.int64), np.zeros((BATCH, 2), np.int64)
    for i in range(BATCH):
        parts[i] = words[i].ctypes.data, width * 8
        heads[i, :4] = names[i].ctypes.data, 16, parts[i].ctypes.data, 1
    return Inbox(words, words.view(np.int32), heads, parts, names)


def outbox() -> Outbox:
    heads, parts = np.zeros((MAX_QUEUED, HEAD_WORDS), np.int64), np.zeros((MAX_QUEUED, 4), np.int64)
    for i in range(MAX_QUEUED):
        heads[i, 2:4] = parts[i].ctypes.data, 2
    return Outbox(heads, parts, np.zeros(2, np.int64), np.zeros(3, np.int64))


@inlined
def now_ns(out):  # type: ignore[no-untyped-def]
    """The monotonic clock."""
    _clock(1, out.clock.ctypes.data)
    return out.clock[0] * 1_000_000_000 + out.clock[1]


@called
def receive(fd, box):  # type: ignore[no-untyped-def]
    """Wait a little for packets; how many came."""
    for i in range(BATCH):
        box.heads[i, 1] = 16
    return max(_recvmmsg(fd, box.heads.ctypes.data, BATCH, MSG_WAITFORONE, 0), 0)


@called
def flush(fd, out):  # type: ignore[no-untyped-def]
    """Send all that waits. What the kernel will not take is lost, as packets may be."""
    first, refused, step = 0, 0, HEAD_WORDS * 8
    while first < out.state[0] and refused < 2:  # an error that an earlier packet met is told once
        sent = _sendmmsg(fd, out.heads.ctypes.data + first * step, out.state[0] - first, 0)
        if sent > 0:
            first += sent
            out.state[2] += sent
        else:
            refused += 1
    out.state[0] = 0
    out.state[1] += 1


@called
def put(fd, out, name, header, payload, size):  # type: ignore[no-untyped-def]
    """Queue a packet: addresses in memory of the receiver's name (0: the socket's peer), of the header and of the payload, and its bytes."""
    if out.state[0] == out.heads.shape[0]:
        flush(fd, out)
    i = out.state[0]
    out.heads[i, 0], out.heads[i, 1] = name, 16 if name else 0
    out.parts[i, 0], out.parts[i, 1] = header, HEADER_BYTES
    out.parts[i, 2], out.parts[i, 3] = payload, size
    out.state[0] += 1


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str, where: str = "--listen") -> Address:
    """`HOST:PORT`, IPv4 or a name. Raises: UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) < 65536:
        raise UsageError(f"not an address: {text[:64]!r}", where=where, hint="HOST:PORT, such as 10.0.0.1:48864")
    try:
        return Address(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0], int(port))  # type: ignore[arg-type]
    except OSError:
        raise UsageError(f"no host is called {host[:64]!r}", where=where, hint="an IPv4 address, or a name that has one") from None


def packed_address(address: Address) -> np.ndarray:
    """A `struct sockaddr_in` as two words."""
    return np.frombuffer(struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", address.port, socket.inet_aton(address.host)), np.int64).copy()


def address_of(words: np.ndarray) -> Address:
    """The other way round."""
    port, host = struct.unpack("!2xH4s8x", words.tobytes())
    return Address(socket.inet_ntoa(host), port)


def open_socket(*, listen: Address | None = None, peer: Address | None = None) -> socket.socket:
    """A socket that listens, or one that talks to one peer alone. Raises: Unsupported, PortInUse, UsageError, RunError."""
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        raise Unsupported("aggregation over sockets needs 64-bit Linux on a little-endian processor", hint="plan and simulate it anywhere")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    for plain, forced in ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32)):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE: beyond the machine's limit, for root
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
        except OSError:
            sock.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, WAIT_NS // 1000))
    try:
        if listen is not None:
            sock.bind((listen.host, listen.port))
        if peer is not None:
            sock.connect((peer.host, peer.port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"{listen} is in use", where="--listen", hint="another port, or end who has it", data={"address": str(listen)}) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{listen} is no address of this machine", where="--listen", hint="0.0.0.0 listens on all") from None
        raise RunError(f"cannot reach {peer or listen}: {os.strerror(error.errno or 0)}", hint="check the network") from None
    return sock
