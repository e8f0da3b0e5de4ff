"""Frames of the control connections (`control`): 4 bytes of length (capped), then JSON of a typed struct."""

from __future__ import annotations

import struct

import msgspec

from .agreement import Message

__all__ = ["HELLO", "LENGTH", "MAX_FRAME_BYTES", "MAX_HELLO_BYTES", "MESSAGE", "PROTOCOL_VERSION", "Hello", "frame"]

PROTOCOL_VERSION = 3  # of the frames; a hello with another one is closed without an answer
MAX_FRAME_BYTES = 1 << 20  # of a message between members: a damaged length must not make this process keep gigabytes
MAX_HELLO_BYTES = 1024  # of a frame from somebody who has not shown the token yet
LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    protocol: int
    group: str
    token: str
    rank: int


HELLO, MESSAGE = msgspec.json.Decoder(Hello), msgspec.json.Decoder(Message)


def frame(value: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(value)
    return LENGTH.pack(len(body)) + body
