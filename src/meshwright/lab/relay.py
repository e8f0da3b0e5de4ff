"""Delay and loss in user space, for kernels without netem: `python -m meshwright.lab.relay JOBS`, started by the lab's holder.

A cable that needs them is a pair of TAP interfaces instead of a veth pair; this process carries the frames from one to the other,
each after its direction's delay, and drops them with its direction's probability from a seeded generator. Frames pass as
super-packets with their headers for checksum and segmentation (as a virtual machine's would), so that a few thousand frames per
second are enough; where frames are dropped the kernel cuts them into packets first, so that losses are single packets. It ends
with the lab, and if it is killed its cables go silent.

JOBS is a JSON list of cables: {"ends": [[namespace, interface], [namespace, interface]], "delay_s": [there, back], "loss": [there,
back], "seed": int}.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from heapq import heappop, heappush
from typing import Any

from ..run.machine.process import prompt_scheduling
from . import namespaces as ns
from .batches import HERE

__all__ = ["Direction", "main"]

MAX_FRAME_BYTES = 1 << 17  # read at once: a segmented frame of 64 KiB and its headers fit
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
MAX_FRAMES_PER_TURN = 32  # frames taken from one cable before the others have their turn
MAX_WAITING_BYTES = 64 << 20  # of frames that one direction delays; what comes beyond is dropped, as a full switch drops it


class Direction:
    """Frames of one direction, waiting for their time. `now` in seconds."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        self.delay_s, self.loss = delay_s, loss
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def put(self, frame: bytes, now: float) -> None:
        if (self.loss and self._random.random() < self.loss) or self._bytes > MAX_WAITING_BYTES:
            return
        self._waiting.append((now + self.delay_s, frame))
        self._bytes += len(frame)

    @property
    def next_s(self) -> float | None:
        """When the first frame is due."""
        return self._waiting[0][0] if self._waiting else None

    def due(self, now: float) -> list[bytes]:
        """Frames whose time has come, in order."""
        frames = []
        while self._waiting and self._waiting[0][0] <= now:
            frames.append(self._waiting.popleft()[1])
        self._bytes -= sum(map(len, frames))
        return frames


def open_tap(namespace: str, interface: str, *, segments: bool) -> int:
    """A descriptor for a TAP interface that exists in a namespace. `segments`: super-packets pass whole. Raises: OSError."""
    place = os.open(HERE / namespace, os.O_RDONLY)
    ns.setns(place, ns.NEWNET)
    os.close(place)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 | _TUN_F_TSO6 if segments else 0))
    return fd


def main() -> None:
    jobs: list[dict[str, Any]] = json.loads(sys.argv[1])
    ways: dict[int, tuple[int, Direction]] = {}
    for number, job in enumerate(jobs):
        fds = [open_tap(*end, segments=not any(job["loss"])) for end in job["ends"]]
        for side in (0, 1):
            ways[fds[side]] = (fds[1 - side], Direction(job["delay_s"][side], job["loss"][side], job["seed"] * 1_000_003 + 2 * number + side))
    prompt_scheduling()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _carry(ways)


def _carry(ways: dict[int, tuple[int, Direction]]) -> None:
    """One turn costs what came and what is due, however many cables there are."""
    came = select.epoll()
    for fd in ways:
        came.register(fd, select.EPOLLIN)
    due: list[tuple[float, int]] = []  # heap: (when its first frame is due, where it came in), of directions in which frames wait
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        select.select([came], [], [], wait)  # epoll itself counts in whole milliseconds
        for fd, _ in came.poll(0):
            way = ways[fd][1]
            waits = way.next_s is not None
            _take(fd, way)
            if not waits and (first := way.next_s) is not None:
                heappush(due, (first, fd))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, fd = heappop(due)
            target, way = ways[fd]
            for frame in way.due(now):
                try:
                    os.write(target, frame)
                except OSError:  # the interface is down, or the kernel is out of buffers: a real cable would lose it too
                    continue
            if (first := way.next_s) is not None:
                heappush(due, (first, fd))


def _take(fd: int, way: Direction) -> None:
    """What came in, up to a cable's share of a turn."""
    for _ in range(MAX_FRAMES_PER_TURN):
        try:
            frame = os.read(fd, MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        way.put(frame, time.monotonic())


if __name__ == "__main__":
    main()
