"""Gradient groups that go through a codec: every replica's own gradients once into its slot, every slot into what the optimizer reads.

What a payload stands for is no number that a checker can follow: here it is one quantity per group and replica. `encode` must find all of this
replica's contributions and no others in the whole group, and fills its own slot; the gradients are spent then. `decode` must find the payload
of replica d in slot d, for every d, and only then is the group what the optimizer must find. How much of a gradient a codec keeps is what the
codec states; it is tested against the code that runs (tests/run/codecs).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..plan import TrainingLayout

if TYPE_CHECKING:
    from .training import TrainingStep

__all__ = ["codec_steps", "decode", "encode"]


def codec_steps(layout: TrainingLayout, rank: int) -> Counter[tuple[str, str, int]]:
    """(name, group, micro-batch) of the encodes and decodes that a rank runs once."""
    stage = layout.coordinates(rank)[0]
    groups = [f"codec{stage}@{i}" for i, b in enumerate(layout.buckets_of(stage)) if b.codec]
    return Counter((name, group, -1) for group in groups for name in ("encode", "decode"))


def encode(m: TrainingStep, step: int, rank: int, op: int) -> None:
    name = _group(m, op)
    whole, sent = _whole(m, step, rank, op, "gradients", name, "read"), m.data_buffers.get((rank, f"sent{name}"), -1)
    if whole < 0:
        return
    if whole not in m.p.ops.writes[op].reshape(-1, 3)[:, 0]:
        m.wrong(step, f"does not spend gradients{name}, which it sends")
        return
    root, lo, hi = m.locate(whole, 0, int(m.p.buffers.chunks[whole]), 0)
    replica = m.layout.coordinates(rank)[1]
    for cell in range(lo, hi):
        want = _own(m, rank, whole, cell)
        if m.memory[root][cell] != want:
            m.mismatch(step, whole, cell, m.memory[root][cell], want)
            return
    slots = [(first, count) for b, first, count in m.p.ops.writes[op].reshape(-1, 3).tolist() if b == sent]
    n = m.layout.data
    own = int(m.p.buffers.chunks[sent]) // n if sent >= 0 else 0
    if slots != [(replica * own, own)] or own * n != int(m.p.buffers.chunks[sent]):
        m.wrong(step, f"must fill the slot of replica {replica} in sent{name}, and no other")
        return
    place, first, end = m.locate(sent, replica * own, own, 0)
    m.store(place, first, end, [_payload(m, name, replica, k) for k in range(end - first)], step)
    m.store(root, lo, hi, [m.garbage] * (hi - lo), step)


def decode(m: TrainingStep, step: int, rank: int, op: int) -> None:
    name = _group(m, op)
    sent = _whole(m, step, rank, op, "sent", name, "read")
    whole = _whole(m, step, rank, op, "gradients", name, "write")
    if sent < 0 or whole < 0:
        return
    root, lo, hi = m.locate(sent, 0, int(m.p.buffers.chunks[sent]), 0)
    slot = (hi - lo) // m.layout.data
    for k in range(hi - lo):
        want = _payload(m, name, k // max(1, slot), k % max(1, slot))
        if m.memory[root][lo + k] != want:
            m.mismatch(step, sent, lo + k, m.memory[root][lo + k], want)
            return
    place, first, end = m.locate(whole, 0, int(m.p.buffers.chunks[whole]), 0)
    m.store(place, first, end, [m.whole_gradient(rank, whole, cell) for cell in range(first, end)], step)


def _group(m: TrainingStep, op: int) -> str:
    return "@" + m.p.ops.graph[op].partition("@")[2]


def _whole(m: TrainingStep, step: int, rank: int, op: int, kind: str, name: str, verb: str) -> int:
    """The rank's buffer of that name, if the op reads (writes) all of it; -1, and a finding, otherwise."""
    b = m.data_buffers.get((rank, f"{kind}{name}"), -1)
    if b < 0 or not m.covers(step, b, verb):
        m.wrong(step, f"does not {verb} the whole of {kind}{name}")
        return -1
    return b


def _payload(m: TrainingStep, name: str, replica: int, cell: int) -> int:
    return 1 << (32 + replica) | m.quantity("sent", name, replica, cell)


def _own(m: TrainingStep, rank: int, b: int, cell: int) -> int:
    """A cell of the gradients with every contribution of this rank's own micro-batches."""
    place, replica = m.place(rank, b, cell), m.layout.coordinates(rank)[1]
    bits = 0
    for key in m.users.get(place, set()):
        for microbatch in range(m.layout.microbatches):
            bits |= m.contribution(key, microbatch, replica)
    return bits << 32 | m.quantity("gradient", *place) if bits else 0
