"""The aggregation protocol as pure functions: what a switch and a worker do with one packet, for the socket loops, the twin and the state checker.

Cite: A. Sapio, M. Canini, C.-Y. Ho, J. Nelson, P. Kalnis, C. Kim, A. Krishnamurthy, M. Moshref, D. Ports, P. Richtarik, "Scaling Distributed Machine
Learning with In-Network Aggregation" (NSDI 2021, arXiv 1903.06701), section 4, algorithms 3 and 4.
Left open by the paper: networks that reorder or duplicate without bound; the rule there needs packets to arrive within one turn of a slot.
Our answer: the chunk's number is the generation of its slot.
Deviations: no bit of the other version is cleared, nothing is counted modulo the workers; a row says which chunk it holds. Chunks are numbered on
over consecutive tensors of a stream (slot = number mod slots, version = turn mod 2), so the next tensor is only more chunks.
Invariant: a row holds one chunk; every worker is added to it once; a finished row stays readable until its next chunk comes, which no worker sends
before all have this chunk's result.
Cost: constant per packet, plus the addition; memory 2 rows per slot, whatever the tensor's size.

State of a switch, per row (two to a slot): `chunk` (number that it holds), `seen` (bit per worker), `ready` (its result may be sent). State of a
worker, per slot: `due`, the chunk that it waits for.
"""

from __future__ import annotations

from ...kernels.compile import inlined

__all__ = [
    "ADDED", "DOUBLE", "FIRST", "IGNORED", "MAX_CHUNK", "MAX_WORKERS", "REPEAT", "accept", "first_chunk", "row_of", "take",
]  # fmt: skip

MAX_WORKERS = 62  # of one switch: a bit each of a 64-bit number
MAX_CHUNK = 1 << 40  # of a stream: the number's place in the header; 2^50 bytes at 1 KiB

IGNORED, FIRST, ADDED, DOUBLE, REPEAT = 0, 1, 2, 3, 4  # what `take` says is to be done with a packet


@inlined  # type: ignore[untyped-decorator]
def row_of(chunk: int, slots: int) -> int:
    """The row that serves a chunk: slots take turns, two rows each."""
    return 2 * (chunk % slots) + (chunk // slots) % 2


@inlined  # type: ignore[untyped-decorator]
def first_chunk(row: int, slots: int) -> int:
    """What a fresh row is said to hold: one turn before its first chunk."""
    return row // 2 + (row % 2 - 2) * slots


@inlined
def take(chunk, seen, ready, row, slots, worker, number):  # type: ignore[no-untyped-def]
    """A contribution to chunk `number`, whose row is `row`, comes to a switch.

    FIRST: the row now holds this chunk and what came is its value. ADDED: add it. REPEAT: send this worker the result again. DOUBLE: it is in already
    and the result is not there yet. IGNORED: of a turn that is over, or of one that cannot be yet.
    """
    bit = 1 << worker
    if number == chunk[row]:
        if not seen[row] & bit:
            seen[row] |= bit
            return ADDED
        return REPEAT if ready[row] else DOUBLE
    if number != chunk[row] + 2 * slots:
        return IGNORED
    chunk[row], seen[row], ready[row] = number, bit, 0
    return FIRST


@inlined
def accept(due, slots, number):  # type: ignore[no-untyped-def]
    """A result comes to a worker: is it the one that its slot waits for? Then the slot waits for the next."""
    slot = number % slots
    if due[slot] != number:
        return False
    due[slot] = number + slots
    return True
