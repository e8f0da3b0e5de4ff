"""Messages between a lab's holder and its clients over a unix socket: a length, one JSON document, and file descriptors with it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["MAX_MESSAGE_BYTES", "receive", "send"]

MAX_MESSAGE_BYTES = 64 << 20  # of one document: a damaged length must not make the holder keep more
MAX_FDS = 8  # file descriptors that go with one message
_HEADER = struct.Struct("!I")


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Raises: OSError."""
    body = json.dumps(message).encode()
    header = _HEADER.pack(len(body))
    if fds:
        socket.send_fds(sock, [header], list(fds))
    else:
        sock.sendall(header)
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its descriptors (close-on-exec), or None when the other side has closed. Raises: OSError, ValueError."""
    header, fds, _, _ = socket.recv_fds(sock, _HEADER.size, MAX_FDS)
    if not header:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    header += _exactly(sock, _HEADER.size - len(header))
    (size,) = _HEADER.unpack(header)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(sock, size)), fds


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise ValueError("the connection ended within a message")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
