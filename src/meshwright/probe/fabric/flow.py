"""One timed stream between two agents of a probe: as much as goes, counted by the receiver within a window that its start does not fall into.

A stream lasts warm_s (slow start, token buckets, queues), window_s (counted) and tail_s (so that streams that began a little later still have their
company). Needs the standard library only: agents run where nothing else is installed but this package.
"""

from __future__ import annotations

import array
import fcntl
import json
import math
import socket
import struct
import termios
import time
from pathlib import Path
from typing import Any

__all__ = ["drain", "stream", "take"]

BLOCK_BYTES = 1 << 18  # written and read at once
MAX_FLOW_S = 60.0  # of a stream that somebody may ask an agent for
MAX_SILENCE_S = 30.0  # of a connection, before its other end counts as lost
MAX_BUFFER_BYTES = 1 << 24  # of the kernel that somebody may ask an agent for
MAX_UNSENT_BYTES = 1 << 17  # waiting in the sender's kernel: what waits there when the window ends is lost time


def _seconds(order: dict[str, Any], *names: str) -> list[float]:
    values = [float(order[name]) for name in names]
    if not all(math.isfinite(x) and x >= 0 for x in values) or sum(values) > MAX_FLOW_S:
        raise ValueError(f"{', '.join(names)} must be >= 0 and last {MAX_FLOW_S:g} s at most together")
    return values


def stream(order: dict[str, Any], token: str, source: str = "") -> dict[str, Any]:
    """Send to another agent as fast as it goes; what that agent counted, or {"error": ...}. Orders: host, port, warm_s, window_s, tail_s.

    buffer_bytes bounds what is under way (0: the system decides).
    """
    warm, window, tail = _seconds(order, "warm_s", "window_s", "tail_s")
    host, port = str(order["host"]), int(order["port"])
    bound = (source, 0) if source not in ("", "0.0.0.0", "::") else None
    request = {"token": token, "do": "take", "warm_s": warm, "window_s": window, "tail_s": tail}
    try:
        with socket.create_connection((host, port), timeout=MAX_SILENCE_S, source_address=bound) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what is still queued at the end is of no use
            if 0 < int(order.get("buffer_bytes", 0)) <= MAX_BUFFER_BYTES:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(order["buffer_bytes"]))
                _by_loss(link)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            link.sendall(json.dumps(request).encode() + b"\n")
            block, end = bytes(BLOCK_BYTES), time.monotonic() + warm + window + tail
            # A full buffer must not keep the sender beyond the end of its stream.
            link.settimeout(0.05)
            while time.monotonic() < end:
                try:
                    link.send(block)
                except TimeoutError:
                    continue
            link.settimeout(MAX_SILENCE_S)
            link.shutdown(socket.SHUT_WR)
            answer = json.loads(link.makefile("rb").readline(4096))
    except (OSError, ValueError) as error:
        return {"error": f"{host}:{port}: {error}"}
    if not isinstance(answer, dict) or not all(isinstance(answer.get(x), int | float) for x in ("bytes", "seconds", "idle")):
        return {"error": f"{host}:{port}: sent an answer that cannot be read"}
    return answer


def _by_loss(link: socket.socket) -> None:
    """A window that grows until the buffer is under way fills a link at once. BBR, where it is the default, paces by what it got so far, and takes
    seconds to find its share of a link that others are on; cubic grows more slowly than reno here."""
    for name in (b"reno", b"cubic"):
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except (OSError, AttributeError):  # not available, or not allowed
            continue
        return


def take(reader: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Receive a stream: {"bytes", "seconds" in which they came, "idle": share of this machine's processors that was idle meanwhile}.

    Counted is what reaches this machine in the window after its first arrival, over the time from that one to the last. A reader that had to
    wait for a processor finds in the kernel what came meanwhile: that is no part of what comes afterwards.
    """
    warm, window, tail = _seconds(order, "warm_s", "window_s", "tail_s")
    begin = time.monotonic()
    opens, closes = begin + warm, begin + warm + window
    view = memoryview(bytearray(BLOCK_BYTES))
    first = last = 0.0
    counted = arrivals = found = left = 0
    before: tuple[int, int] | None = None
    after: tuple[int, int] | None = None
    while True:
        got = reader.readinto1(view)
        now = time.monotonic()
        if not got or now > closes + tail:
            break
        if now < opens:
            continue
        if before is None:
            before = _processors()
        if now <= closes:
            # The first arrival opens the time and is not counted: its bytes came before.
            left = _waiting(reader)
            if first == 0.0:
                first, found = now, left
            else:
                counted += got
            last, arrivals = now, arrivals + 1
        elif after is None:
            after = _processors()
    after = after or _processors()
    idle, total = (b - a for a, b in zip(before or after, after, strict=True))
    # A slow link may deliver in a few large arrivals, between which no rate can be read; then the whole window is the time.
    few = arrivals < 3 or last - first < window / 2
    return {"bytes": counted + left - found, "seconds": window if few else last - first, "idle": round(idle / total, 4) if total else 1.0}


def _waiting(reader: Any) -> int:
    """Bytes of a stream that the kernel holds, not read yet."""
    size = array.array("i", [0])
    fcntl.ioctl(reader.fileno(), termios.FIONREAD, size)
    return size[0]


def drain(reader: Any) -> None:
    """Read on until the sender has its answer and closes: closing with unread data could cost it the answer."""
    view = memoryview(bytearray(BLOCK_BYTES))
    end = time.monotonic() + MAX_SILENCE_S
    while time.monotonic() < end and reader.readinto1(view):
        continue


def _processors() -> tuple[int, int]:
    """(idle ticks, all ticks) of the machine since it started; zeros where the system does not say."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (fields[3] + fields[4], sum(fields)) if len(fields) == 8 else (0, 0)
