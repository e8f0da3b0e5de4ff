"""The flight recorder: what every rank is doing, in a small file that survives the rank.

Always on. A process has one file; each of its groups has a row and all share one ring of collectives (`record_file` says how it lies). Writing is
a store into mapped memory: no system call, no lock, no allocation. Per wait of a walk two stores are made, per collective three.

The file lies in MESHWRIGHT_RECORD_DIR, where it stays, or in a private folder of the user (mode 0700), where it stays only if the group failed or
the process was killed. Files there whose process has been gone for a day are swept when a group is made. A file's name starts with the run's id,
so ranks of one machine find each other. `meshwright run doctor` reads them.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import mmap
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import RunError
from . import record_file as layout

__all__ = ["FlightFile", "Recorder", "flight_file", "private_folder", "process_started"]

_FOUR = struct.Struct("<4q")
MAX_DIGESTS = 1024  # calls of which a digest is known, so many may lie between a fast rank and a slow one
# Of a polynomial over a prime field: two different sequences have equal digests once in some 10^18.
_PRIME, _BASE, _CALL, _SIZE = (1 << 61) - 1, 1_000_003_777_222_111, 900_719_925_474_099, 611_953_771_337_933
_RECORD = struct.Struct("<16q")
_MAX_AGE_S = 86_400.0  # a day: older records in the private folder whose process is gone are removed
_now = time.monotonic_ns


def process_started(pid: int | str = "self") -> int:
    """When a process started, in ticks since boot; 0 if there is none (Linux)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def private_folder() -> Path:
    """A folder of this user alone. Raises: RunError if somebody else owns what has its name."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if not os.environ.get("XDG_RUNTIME_DIR") or not os.access(base, os.W_OK):
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"meshwright-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunError("is not a private folder of this user", where=str(folder), hint="remove it, or set MESHWRIGHT_RECORD_DIR")
    return folder


def _sweep(folder: Path) -> None:
    """Remove what runs of other days left."""
    for path in folder.glob(f"*{layout.SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(path.stem.rpartition("-")[2])
            if time.time() - path.stat().st_mtime > _MAX_AGE_S and not process_started(pid):
                path.unlink()


class FlightFile:
    """The mapped file of a process. `keep`: it stays when the last group is closed."""

    def __init__(self, folder: str, run: str, rank: int, world: int) -> None:
        self.keep = bool(folder)
        where = Path(folder) if folder else private_folder()
        where.mkdir(parents=True, exist_ok=True)
        if not folder:
            _sweep(where)
        self.path = where / f"{run}-rank{rank:05d}-{os.getpid()}{layout.SUFFIX}"
        self.pid, self.run, self.world = os.getpid(), run, world
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.posix_fallocate(handle, 0, layout.FILE_BYTES)  # a full disk is an error here, not a SIGBUS later
            self.map = mmap.mmap(handle, layout.FILE_BYTES)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise RunError(f"no room for the flight recorder: {error.strerror}", where=str(where), hint="set MESHWRIGHT_RECORD_DIR") from error
        finally:
            os.close(handle)
        self.words = memoryview(self.map).cast("q")
        text = msgspec.json.encode(
            layout.Header(
                schema="meshwright.flight", version=layout.VERSION, run=run, rank=rank, world=world, host=socket.gethostname()[:255], pid=self.pid,
                started=process_started(), monotonic_ns=_now(), wall_ns=time.time_ns(), program=Path(sys.argv[0] if sys.argv else "").name[:200],
            )
        )  # fmt: skip
        self.map[24 : 24 + len(text)] = text
        self.words[1], self.words[2] = layout.VERSION, len(text)
        self.map[:8] = layout.MAGIC  # last: a file with the magic has a header
        self.serial = itertools.count(1)
        self.users = 0

    def close(self) -> None:
        self.words.release()
        self.map.close()
        if not self.keep and os.getpid() == self.pid:
            self.path.unlink(missing_ok=True)


_lock = threading.Lock()
_current: FlightFile | None = None


def flight_file(folder: str, run: str, rank: int, world: int) -> FlightFile:
    """The process's file; made with its first group, closed with its last."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = FlightFile(folder, run, rank, world)
        _current.users += 1
        return _current


def _release(file: FlightFile) -> None:
    global _current
    with _lock:
        file.users -= 1
        if file.users == 0:
            if _current is file:
                _current = None
            file.close()


class Recorder:
    """One group's row. `waiting(step, peer, receives)` and `moving()` are called around every wait of a walk; `asked(call, bytes, program)` gives a
    collective its number, in the order in which the process asks for them (program 0: the built-in backend runs it, and how far it is is not known);
    `begin` .. `end` or `fail` surround its walk. The first three are closures: between two collectives the caches have forgotten all this, and
    a closure touches the least memory.
    """

    waiting: Callable[[int, int, int], None]
    moving: Callable[[], None]
    asked: Callable[[int, int, int], int]

    def __init__(self, file: FlightFile | None, ranks: Sequence[int], rank: int, name: str = "") -> None:
        self.file, self.ranks, self.rank, self.name = file, tuple(ranks), rank, name
        self.running = 0  # number of the collective that is walked, 0 for none
        self.last = 0  # number of the one begun last
        self._recent: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * MAX_DIGESTS  # (number, call, bytes, program) at number mod that
        self._count = [0]
        self._digests: list[tuple[int, int]] = [(0, 0)] * MAX_DIGESTS  # (number, digest of all calls up to it) at number mod that
        self._digested = (0, 0)  # the last of those
        self._digesting = threading.Lock()
        self.id = -1
        if file is not None:
            with _lock:
                # Unused rows first: what a closed or failed group left is worth reading for as long as there is room.
                rows = [i for i in range(layout.MAX_GROUPS) if file.words[_row(i)] != layout.LIVE]
                unused = [i for i in rows if file.words[_row(i)] == layout.FREE]
                self.id = (unused or rows or [-1])[0]
                if self.id >= 0:
                    file.words[_row(self.id)] = layout.LIVE
        if self.id < 0 or file is None:  # more groups than rows, or no file: recorded in memory only
            self._map: Any = bytearray(layout.FILE_BYTES)
            self.words: Any = memoryview(self._map).cast("q")
            self.id, self._serial = 0, itertools.count(1)
        else:
            self._map, self.words, self._serial = file.map, file.words, file.serial
        self._at = _row(self.id)
        self.words[self._at + layout.G_SIZE : self._at + layout.G_SIZE + 2] = memoryview(array.array("q", [len(self.ranks), rank]))
        self._zero()
        self.words[self._at + layout.G_FIRST] = next(self._serial)
        self._text("")
        self.words[self._at + layout.G_STATE] = layout.LIVE
        self._slots: dict[int, int] = {}
        self.waiting, self.moving = self._position()
        self.asked = self._asking()

    def _zero(self) -> None:
        first, end = self._at + layout.G_ASKED, self._at + layout.G_WAITS + 2 * layout.MAX_COUNTED_PEERS
        self.words[first:end] = memoryview(array.array("q", bytes(8 * (end - first))))

    def _text(self, verdict: str) -> None:
        runs = _runs(self.ranks)
        for shown in (runs, []):  # too many runs: the reader numbers the ranks of the group instead
            text = msgspec.json.encode({"name": self.name[:64], "ranks": shown, "verdict": verdict[:400]})
            if len(text) <= layout.TEXT_BYTES:
                break
        at = 8 * self._at + layout.TEXT_AT
        # Length 0 while the text is being written: a reader never takes half of it for a whole.
        self.words[self._at + layout.G_TEXT] = 0
        self._map[at : at + len(text)] = text
        self.words[self._at + layout.G_TEXT] = len(text)

    def _position(self) -> tuple[Callable[[int, int, int], None], Callable[[], None]]:
        pack, place, where = _FOUR.pack_into, self._map, 8 * (self._at + layout.G_POSITION)
        words, word, now = self.words, self._at + layout.G_POSITION + 1, _now
        self.waited = waited = array.array("q", bytes(16 * layout.MAX_COUNTED_PEERS))
        countable = 2 * layout.MAX_COUNTED_PEERS
        count, since, key, packed = 0, 0, 0, 0

        def waiting(step: int, peer: int, receives: int) -> None:
            nonlocal count, since, key, packed
            count += 1
            since = now()
            # Waits to receive at even words, to send at odd ones: `GroupRecord.receive_ns` and `send_ns`.
            key = (peer << 1) + 1 - receives
            packed = (step + 1) << 24 | peer << 2 | receives << 1
            # The counter first and last: a reader that finds two different ones knows that this store was interrupted.
            pack(place, where, count, packed | 1, since, count)

        def moving() -> None:
            if key < countable:
                waited[key] += now() - since
            # One word, without the lowest bit: the rank does not wait any more, but where it was stays.
            words[word] = packed

        return waiting, moving

    # ---- collectives -------------------------------------------------------------------------------------------
    @property
    def number(self) -> int:
        """Of the collective asked for last."""
        return self._count[0]

    @property
    def calls(self) -> dict[int, tuple[int, int, int]]:
        """number -> (call, bytes, program) of the last few."""
        last = self._count[0]
        rows = [self._recent[number % MAX_DIGESTS] for number in range(max(1, last - layout.MAX_HISTORY + 1), last + 1)]
        return {number: (call, size_bytes, name) for number, call, size_bytes, name in rows}

    def digest(self, number: int) -> int | None:
        """Of all calls up to that one: equal at ranks that have called the same. None where it is not known any more, or not yet."""
        self._digest()
        found, digest = self._digests[number % MAX_DIGESTS]
        return digest if found == number else None

    def _digest(self) -> None:
        """Of the calls since it was asked for last, a few times a second: not in the way of a call."""
        with self._digesting:
            (before, digest), last = self._digested, self._count[0]
            for number in range(before + 1, last + 1):
                _, call, size_bytes, name = self._recent[number % MAX_DIGESTS]
                digest = (digest * _BASE + call * _CALL + size_bytes * _SIZE + name) % _PRIME
                self._digests[number % MAX_DIGESTS] = number, digest
            self._digested = last, digest

    def _asking(self) -> Callable[[int, int, int], int]:
        pack, place, words, slots, last = _RECORD.pack_into, self._map, self.words, self._slots, self._at + layout.G_ASKED
        recent, count, serials, group, now = self._recent, self._count, self._serial, self.id, _now
        first, rows, built_in, own = layout.RING_AT, layout.RING_RECORDS, layout.BUILTIN, layout.ASKED
        kept, half = MAX_DIGESTS, MAX_DIGESTS // 2

        def asked(call: int, size_bytes: int, name: int) -> int:
            number = count[0] + 1
            recent[number % kept] = number, call, size_bytes, name
            count[0] = number  # not before: whoever makes digests reads up to it
            if not number % half:
                self._digest()
            serial = next(serials)
            state = built_in
            if name:
                slots[number] = serial
                state = own
            pack(place, first + serial % rows * 128, serial, group, number, call, size_bytes, name, state, now(), 0, 0, 0, 0, 0, 0, 0, serial)
            words[last] = number
            return number

        return asked

    def begin(self, number: int) -> None:
        self.running = self.last = number
        self._stamp(number, layout.RUNNING, 8)

    def end(self) -> None:
        number, self.running = self.running, 0
        self._finish(number, layout.DONE)

    def fail(self) -> None:
        """The collective under way was given up; where it was stays in the position."""
        number, self.running = self.running, 0
        self._finish(number, layout.BROKEN)

    def _finish(self, number: int, state: int) -> None:
        self._stamp(number, state, 9)
        self._slots.pop(number, None)
        counted = 2 * min(len(self.ranks), layout.MAX_COUNTED_PEERS)
        first = self._at + layout.G_WAITS
        self.words[first : first + counted] = memoryview(self.waited)[:counted]

    def _stamp(self, number: int, state: int, word: int) -> None:
        serial = self._slots.get(number, 0)
        at = layout.RING_AT // 8 + serial % layout.RING_RECORDS * 16
        if serial and self.words[at] == serial:  # not yet overwritten
            self.words[at + word] = _now()
            self.words[at + 6] = state

    # ---- for the health of the group ---------------------------------------------------------------------------
    def position(self) -> tuple[int, int, bool, bool, float]:
        """(step, peer, receives, waiting, seconds since) of this rank's walk."""
        at = self._at + layout.G_POSITION
        _, packed, since, _ = self.words[at : at + 4].tolist()
        waiting = bool(packed & 1)
        return (packed >> 24) - 1, packed >> 2 & 0x3FFFFF, bool(packed & 2), waiting, (_now() - since) / 1e9 if since else 0.0

    # ---- the end -----------------------------------------------------------------------------------------------
    def verdict(self, text: str) -> None:
        """The group failed: say why in the file, and keep the file."""
        self._text(text)
        self.words[self._at + layout.G_STATE] = layout.FAILED
        if self.file is not None:
            self.file.keep = True

    def close(self) -> None:
        file, self.file = self.file, None
        if file is None:
            return
        if self.words[self._at + layout.G_STATE] == layout.LIVE:
            self.words[self._at + layout.G_STATE] = layout.CLOSED
        # The map is released below, and writing to it then would end the process.
        copy = bytearray(self._map[:])  # late calls (a thread that is still ending) write here
        self._map, self.words, self.id = copy, memoryview(copy).cast("q"), self.id
        self.waiting, self.moving = self._position()
        self.asked = self._asking()
        _release(file)


def _row(row: int) -> int:
    return (layout.HEADER_BYTES + row * layout.GROUP_BYTES) // 8


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, end, stride) runs that spell a list of ranks."""
    out: list[tuple[int, int, int]] = []
    i = 0
    while i < len(ranks):
        stride = ranks[i + 1] - ranks[i] if i + 1 < len(ranks) else 1
        j = i + 1
        while stride > 0 and j < len(ranks) and ranks[j] - ranks[j - 1] == stride:
            j += 1
        out.append((ranks[i], ranks[j - 1] + 1, max(stride, 1)))
        i = j
    return out
