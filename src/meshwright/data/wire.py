"""What a service of batches and its jobs say to each other: fixed heads, and one bounded text when a job comes."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["HEAD", "HELLO", "MAX_HELLO_BYTES", "NEXT", "WELCOME", "WORD", "Hello", "exactly", "hello_bytes", "listening", "parse_address", "seen_of"]

WORD = b"mw-feed1"
HELLO = struct.Struct("<8sI")  # a word, bytes of the text that follows
WELCOME = struct.Struct("<qqI")  # batches of an epoch, the job's epoch; bytes of the text that follows: why it is refused
NEXT = struct.Struct("<q")  # the epoch of which a batch is wanted
HEAD = struct.Struct("<qqQ")  # epoch, batch, bytes
MAX_HELLO_BYTES = 16 << 20  # a bit for each batch of an epoch
MAX_NAME = 128
MAX_BIND_S = 3.0


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`epoch`: -1 for a job that is new, else the one it is in, with the batches that came of it (bits)."""

    job: str
    epoch: int = -1
    seen: bytes = b""


def hello_bytes(hello: Hello) -> bytes:
    text = msgspec.msgpack.encode(hello)
    return HELLO.pack(WORD, len(text)) + text


def seen_of(hello: Hello, batches: int) -> NDArray[np.bool_]:
    """Raises: ValueError where it is of another number of batches."""
    if len(hello.seen) != -(-batches // 8) or len(hello.job) > MAX_NAME or hello.epoch < -1 or hello.epoch > 1 << 40:
        raise ValueError("seen")
    return np.unpackbits(np.frombuffer(hello.seen, np.uint8), count=batches).astype(np.bool_)


def exactly(channel: socket.socket, size: int) -> bytearray:
    """Raises: EOFError where the other side ends before; OSError."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = channel.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return data


def parse_address(text: str, *, where: str = "--at", own: bool = True) -> tuple[int, Any]:
    """(family, address) of `HOST:PORT`, or of a path of a socket's file; if it is not `own`, it must be one that others reach. Raises: UsageError."""
    if own and "/" in text:
        return socket.AF_UNIX, text
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not (0 if own else 1) <= int(port) <= 65535:
        raise UsageError(f"{text[:128]!r} is no address", where=where, hint="HOST:PORT, or a path: ./feed.sock" if own else "HOST:PORT")
    return socket.AF_INET, (host, int(port))


def listening(text: str, *, patience_s: float = MAX_BIND_S) -> socket.socket:
    """A socket that listens there; port 0: any. A path's socket that nobody listens on is replaced. An address that is taken is tried again for a
    while: a service that was killed may still be going. Raises: UsageError, OSError."""
    family, address = parse_address(text)
    begin = time.monotonic()
    while True:
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_UNIX and Path(text).is_socket() and not _answers(text):
                Path(text).unlink(missing_ok=True)
            if family == socket.AF_INET:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() - begin >= patience_s:
                raise
        time.sleep(0.05)


def _answers(path: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
