"""What a switch and its workers say beside the sums: who joins, who leaves, how far everyone is, why a job is over. JSON in packets of its own."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from .frames import HEADER_BYTES, MAGIC, MAX_CONTROL_BYTES, VERSION

__all__ = ["Aborted", "Hop", "Join", "Leave", "Left", "Status", "StatusJob", "StatusSlot", "Welcome", "decode", "encode", "kind_of"]

T = TypeVar("T", bound=msgspec.Struct)


class Hop(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The switch above one: its address, and which of its workers, of how many, this one is."""

    address: str
    worker: int
    children: int


class Join(msgspec.Struct, forbid_unknown_fields=True):
    """A worker asks to take part. `children`: workers at this switch; `workers`: of the whole job, however many switches; `nonce`: of this attempt;
    `above`: the way from this switch to the top, () where it is the top.
    """

    job: str
    worker: int
    children: int
    workers: int
    words: int
    slots: int
    mode: str
    nonce: int
    above: tuple[Hop, ...] = ()


class Welcome(msgspec.Struct, forbid_unknown_fields=True):
    """All have joined."""

    nonce: int
    world: int
    slots: int


class Aborted(msgspec.Struct, forbid_unknown_fields=True):
    """The job is over, or never began. `code`: stable, for programs; `worker`: at fault, -1 for nobody."""

    code: str
    reason: str
    worker: int = -1


class Leave(msgspec.Struct, forbid_unknown_fields=True):
    """A worker has all its results."""

    nonce: int


class Left(msgspec.Struct, forbid_unknown_fields=True):
    """How many have left so far, and whether that is all."""

    left: int
    over: bool


class StatusSlot(msgspec.Struct, forbid_unknown_fields=True):
    """A slot that waits: for workers, or for the switch above."""

    slot: int
    chunk: int
    missing: list[int]
    above: bool = False


class StatusJob(msgspec.Struct, forbid_unknown_fields=True):
    """A job. `waits`: its slots that hold unfinished sums, at most a few; `silent_s`: by worker, since it was last heard."""

    job: str
    workers: int
    joined: int
    slots: int
    mode: str
    state: str
    waits: list[StatusSlot]
    silent_s: list[float]


class Status(msgspec.Struct, forbid_unknown_fields=True):
    """Of a switch. `asked`: the job that was asked for, "" for all."""

    asked: str = ""
    slots: int = 0
    free_slots: int = 0
    words: int = 0
    jobs: list[StatusJob] = []
    counters: dict[str, int] = {}


def encode(kind: int, worker: int, world: int, message: msgspec.Struct) -> bytes:
    data = struct.pack("<HBBIQ", MAGIC, kind | VERSION << 4, worker, world, 0) + msgspec.json.encode(message)
    assert len(data) <= MAX_CONTROL_BYTES
    return data


def kind_of(packet: bytes) -> tuple[int, int, int] | None:
    """(kind, worker, world); None for what is not ours."""
    if not HEADER_BYTES <= len(packet) <= MAX_CONTROL_BYTES:
        return None
    magic, kind, worker, world, _ = struct.unpack_from("<HBBIQ", packet)
    return (kind & 15, worker, world) if magic == MAGIC and kind >> 4 == VERSION else None


def decode(packet: bytes, kind: type[T]) -> T | None:
    """The message in a packet; None for one that is none of that kind."""
    try:
        return msgspec.json.decode(packet[HEADER_BYTES:], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
