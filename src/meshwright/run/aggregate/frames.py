"""The packets: a header of two 64-bit words, little-endian, then whole 32-bit numbers, or the words of a control message.

Word 0: magic (16 bits), kind (4), version (4), worker (8), world (32). Word 1: chunk (40), exponent (8), signature (16). `world` names one run of one
job on one switch: a number that the switch draws, so that nothing of another run is taken for this one's. `exponent`: the exponent field of the
largest float of the chunk that this slot serves next. `signature`: of the call (how many elements, of what kind), so that workers whose calls differ
are told.
"""

from __future__ import annotations

import zlib

from ...kernels.compile import inlined

__all__ = [
    "ABORT", "CONTRIBUTION", "HEADER_BYTES", "JOIN", "LEAVE", "MAGIC", "MAX_CONTROL_BYTES", "RESULT", "STATUS", "VERSION", "head", "signature",
    "tail",
]  # fmt: skip

MAGIC, VERSION = 0x776D, 1
CONTRIBUTION, RESULT, JOIN, LEAVE, STATUS, ABORT = 0, 1, 2, 3, 4, 5  # kinds; from JOIN on the words of a control message follow
HEADER_BYTES = 16
MAX_CONTROL_BYTES = 1400  # of a control message with its header: one packet of Ethernet's size


@inlined  # type: ignore[untyped-decorator]
def head(kind: int, worker: int, world: int) -> int:
    """Word 0."""
    return MAGIC | kind << 16 | VERSION << 20 | worker << 24 | world << 32


@inlined  # type: ignore[untyped-decorator]
def tail(number: int, exponent: int, call: int) -> int:
    """Word 1."""
    return number | exponent << 40 | call << 48


def signature(call: int, elements: int, mode: int) -> int:
    """16 bits that differ, but for one chance in 65,536, where two workers' calls differ."""
    return zlib.crc32(f"{call},{elements},{mode}".encode()) & 0xFFFF
