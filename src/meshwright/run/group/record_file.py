"""The flight recorder's file: where things lie, and a reader that trusts nothing.

A file has a fixed size and is written through a memory map, so what a killed rank wrote last is still there. Numbers are signed 64-bit little endian.

| bytes | what |
|---|---|
| 0 | magic, version, length of a JSON header, the header: run, rank, world, host, pid, when the process started, clocks |
| 4096 | `MAX_GROUPS` rows of `GROUP_BYTES`: state, size, own rank, position (step, peer, direction, since when), ns waited per peer, JSON text |
| after | ring of `RING_RECORDS` records of collectives, 16 numbers each |

A position and a ring record start and end with the same counter; where the two differ the writer was stopped in between, and the reader says
"torn" instead of guessing. Times are the machine's monotonic clock; the header says what the wall clock showed then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError
from ...io.strict_json import decode, read_at_most, refuse_ambiguous

__all__ = [
    "DTYPES", "FILE_BYTES", "GROUP_BYTES", "MAGIC", "MAX_COUNTED_PEERS", "MAX_GROUPS", "MAX_HISTORY", "OPS", "RING_RECORDS", "SUFFIX", "VERSION",
    "Collective", "GroupRecord", "Header", "RankRecord", "call_text", "pack_call", "read_record",
]  # fmt: skip

MAGIC, VERSION, SUFFIX = b"MWFLIGHT", 1, ".flight"
HEADER_BYTES = GROUP_BYTES = 4096  # a page each
MAX_GROUPS = 32  # rows of the file; a process with more live groups records the others in memory only
RING_RECORDS, RECORD_BYTES = 1024, 128  # the last collectives of a process, 16 words each
MAX_HISTORY = 16  # collectives that a rank knows of itself, and tells the others, when something fails
RING_AT = HEADER_BYTES + MAX_GROUPS * GROUP_BYTES
FILE_BYTES = RING_AT + RING_RECORDS * RECORD_BYTES
MAX_COUNTED_PEERS = 128  # ranks of a group whose waits are counted, two words each in its row; further ones are not
# Words of a group's row; POSITION has four, WAITS two for every counted peer.
G_STATE, G_SIZE, G_RANK, G_ASKED, G_TEXT, G_FIRST, G_POSITION, G_WAITS = 0, 1, 2, 3, 4, 5, 8, 16
TEXT_AT = 8 * (G_WAITS + 2 * MAX_COUNTED_PEERS)
TEXT_BYTES = GROUP_BYTES - TEXT_AT
FREE, LIVE, CLOSED, FAILED = range(4)
# A position packs step, peer, direction and whether the rank waits: (step + 1) << 24 | peer << 2 | receives << 1 | waits.
ASKED, RUNNING, DONE, BROKEN, BUILTIN = range(5)
STATES = ("asked", "running", "done", "failed", "builtin")

OPS = (
    "?", "all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "all-to-all", "scatter", "gather", "barrier", "send", "recv",
    "monitored-barrier",
)  # fmt: skip
REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
DTYPES = (
    "?", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
)  # fmt: skip


def pack_call(op: str, root: int, reduction: str, dtype: str) -> int:
    """What torch asked for as one number: equal at all ranks of a correct program."""
    kinds = [table.index(x) if x in table else 0 for table, x in ((OPS, op), (REDUCTIONS, reduction), (DTYPES, dtype))]
    return kinds[0] | kinds[1] << 8 | kinds[2] << 16 | (root + 1) << 24


def call_text(call: int, size_bytes: int = 0) -> str:
    """`all-reduce sum float32 4 MiB` from a packed call; unknown numbers are `?`."""

    def name(table: tuple[str, ...], at: int) -> str:
        return table[at] if 0 <= at < len(table) else "?"

    words = [name(OPS, call & 255), name(REDUCTIONS, call >> 8 & 255)]
    words.append(name(DTYPES, call >> 16 & 255) if call >> 16 & 255 else "")
    if call >> 24 > 0:
        words.append(f"root {(call >> 24) - 1}")
    if size_bytes:
        words.append(size_text(size_bytes))
    return " ".join(w for w in words if w)


def size_text(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} bytes"


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    run: str
    rank: int
    world: int
    host: str
    pid: int
    started: int  # field 22 of /proc/PID/stat: tells a process from a later one with the same number
    monotonic_ns: int
    wall_ns: int
    program: str = ""  # argv[0]


class _GroupText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str = ""
    ranks: list[tuple[int, int, int]] = []  # (first, end, stride) runs of global ranks
    verdict: str = ""


@dataclass(frozen=True)
class Collective:
    """One record. `number` counts the collectives of its group, from 1; `name`: what of the program's hash fits 63 bits, 0 for a built-in one."""

    group: int
    number: int
    call: int
    size_bytes: int
    name: int
    state: str
    asked_ns: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class GroupRecord:
    """`waiting`: for `peer`, in `step`, since `since_ns`; `torn`: the writer was stopped while writing the position. Waits in ns per peer."""

    id: int
    state: int
    size: int
    rank: int
    asked: int
    name: str
    ranks: tuple[int, ...]
    verdict: str
    step: int
    peer: int
    receives: bool
    waiting: bool
    since_ns: int
    torn: bool
    receive_ns: tuple[int, ...]
    send_ns: tuple[int, ...]
    history: tuple[Collective, ...]  # in order


@dataclass(frozen=True)
class RankRecord:
    path: str
    header: Header
    groups: tuple[GroupRecord, ...]
    torn: int  # ring records that were being written


_HEADER = msgspec.json.Decoder(Header)
_TEXT = msgspec.json.Decoder(_GroupText)


def read_record(path: str | Path) -> RankRecord:
    """Raises: UsageError (cannot be read), FormatError (not a flight record, or damaged)."""
    where, data = read_at_most(path, FILE_BYTES)
    if data[:8] != MAGIC:
        raise FormatError("not a flight record", where=where, hint=f"they end in {SUFFIX} and lie in MESHWRIGHT_RECORD_DIR")
    if len(data) != FILE_BYTES:
        raise FormatError(f"{len(data)} bytes, a flight record has {FILE_BYTES}", where=where, hint="is it still being copied?")
    words = memoryview(data).cast("q")
    if words[1] != VERSION:
        newer = " by a newer meshwright" if words[1] > VERSION else ""
        raise FormatError(f"version {words[1]} was not written by this meshwright{newer and ' but' + newer}", where=where)
    header = _json(data, 24, words[2], HEADER_BYTES - 24, _HEADER, f"{where}: header")
    if header.schema != "meshwright.flight" or not 0 <= header.rank < header.world or header.pid < 1 or len(header.run) > 64:
        raise FormatError("the header contradicts itself", where=where)
    first = [words[(HEADER_BYTES + i * GROUP_BYTES) // 8 + G_FIRST] for i in range(MAX_GROUPS)]  # a row's earlier groups do not count
    records, torn = _ring(words, first)
    groups = [g for i in range(MAX_GROUPS) if (g := _group(data, words, i, records, header.world, where)) is not None]
    return RankRecord(str(path), header, tuple(groups), torn)


def _json(data: bytes, at: int, length: int, most: int, decoder: msgspec.json.Decoder[Any], where: str) -> Any:
    if not 0 < length <= most:
        raise FormatError(f"a text of {length} bytes, at most {most} fit", where=where)
    text = data[at : at + length]
    found = decode(text, decoder, where)
    refuse_ambiguous(text, where)
    return found


def _ring(words: Any, first: list[int]) -> tuple[dict[int, list[Collective]], int]:
    found: dict[int, list[Collective]] = {}
    torn = 0
    for row in range(RING_RECORDS):
        w = words[RING_AT // 8 + 16 * row :][:16]
        if not w[0] and not w[15]:
            continue
        if w[0] != w[15] or not 0 <= w[1] < MAX_GROUPS or not 0 <= w[6] < len(STATES) or w[2] < 1:
            torn += 1
            continue
        if w[0] < first[w[1]]:
            continue
        found.setdefault(w[1], []).append(Collective(w[1], w[2], w[3], w[4], w[5], STATES[w[6]], w[7], w[8], w[9]))
    return {g: sorted(rows, key=lambda r: r.number) for g, rows in found.items()}, torn


def _group(data: bytes, words: Any, row: int, records: dict[int, list[Collective]], world: int, where: str) -> GroupRecord | None:
    at = HEADER_BYTES + row * GROUP_BYTES
    w = words[at // 8 : (at + GROUP_BYTES) // 8]
    if w[G_STATE] == FREE:
        return None
    size, rank = w[G_SIZE], w[G_RANK]
    if w[G_STATE] not in (LIVE, CLOSED, FAILED) or not 1 <= size <= world or not 0 <= rank < size:
        raise FormatError(f"group {row}: state {w[G_STATE]}, rank {rank} of {size}", where=where)
    text = _GroupText()
    if w[G_TEXT]:
        text = _json(data, at + TEXT_AT, w[G_TEXT], TEXT_BYTES, _TEXT, f"{where}: group {row}")
    count, packed, since, again = w[G_POSITION : G_POSITION + 4]
    torn = count != again or packed < 0
    packed = 0 if torn else packed
    counted = min(size, MAX_COUNTED_PEERS)
    waits = tuple(max(0, x) for x in w[G_WAITS : G_WAITS + 2 * counted])
    peer = packed >> 2 & 0x3FFFFF
    waiting = bool(packed & 1) and peer < size
    return GroupRecord(
        id=row, state=w[G_STATE], size=size, rank=rank, asked=max(0, w[G_ASKED]), name=text.name, ranks=_expand(text.ranks, size),
        verdict=text.verdict,
        step=(packed >> 24) - 1, peer=peer if waiting else -1, receives=bool(packed & 2), waiting=waiting, since_ns=since, torn=torn,
        receive_ns=waits[::2], send_ns=waits[1::2], history=tuple(records.get(row, ())),
    )  # fmt: skip


def _expand(runs: list[tuple[int, int, int]], size: int) -> tuple[int, ...]:
    """Global ranks of a group; its own numbers where the text is missing or impossible."""
    out: list[int] = []
    for first, end, stride in runs:
        if stride < 1 or first < 0 or not 0 < -(-(end - first) // stride) <= size - len(out):
            return tuple(range(size))
        out.extend(range(first, end, stride))
    return tuple(out) if len(out) == size else tuple(range(size))
