"""Gradient groups that go through a codec: every replica's own gradients once into what is exchanged, all of it into what the optimizer reads.

What a payload stands for is no number that a checker can follow: here it is one quantity per group and replica where payloads are gathered, and one
contribution per replica to one quantity per group and round where they are summed. `encode` must find all of this replica's contributions and no
others in the whole group, and fills its own slot, or the first sum; the gradients are spent then. `advance` must find the sum before complete, and
fills the next. `decode` must find the payload of replica d in slot d, for every d, or every sum complete, and only then is the group what the
optimizer must find. Replicas are the data replicas of every copy of a stage. How much of a gradient a codec keeps is what the codec states; it is
tested against the code that runs (tests/run/codecs). With tensor-parallel ranks, a group with a codec holds only what these divide.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, takewhile

from ...plan.plan import TrainingLayout
from ...program.program import Program
from ..verdict import Finding
from .state import StepState

__all__ = ["STEPS", "codec_steps", "coded", "held_alike"]


def codec_steps(layout: TrainingLayout, p: Program, rank: int) -> Counter[tuple[str, str, int]]:
    """(name, group, micro-batch) of the steps that a rank runs once for each of its groups with a codec."""
    stage = layout.coordinates(rank)[0]
    sums = Counter(name.partition("@")[2] for b, name in enumerate(p.buffers.name) if p.buffers.actor[b] == rank and _sum_number(name) >= 0)
    found: Counter[tuple[str, str, int]] = Counter()
    for i, bucket in enumerate(layout.buckets_of(stage)):
        if bucket.codec:
            found.update((name, f"codec{stage}@{i}", -1) for name in ("encode", "decode"))
            found.update({("advance", f"codec{stage}@{i}", -1): sums[str(i)] - 1} if sums[str(i)] > 1 else {})
    return found


def held_alike(layout: TrainingLayout) -> list[Finding]:
    """Parameters in groups with a codec that several tensor-parallel ranks hold elements of."""
    if layout.tensor == 1:
        return []
    divided = {s.param for s in layout.shards} - {x.param for x in layout.partial_gradients}
    odd = [(i, p) for i, b in enumerate(layout.buckets) if b.codec for p in b.params if p not in divided]
    text = "bucket {} sends {} through a codec, and tensor-parallel ranks hold it alike: they would not stay so"
    return [Finding(check="values", message=text.format(i, p), witness={"bucket": i, "parameter": p}) for i, p in odd[:1]]


def coded(m: StepState, step: int, rank: int, op: int) -> None:
    """One `encode`, `advance` or `decode`."""
    STEPS[m.p.ops.name[op]](m, step, rank, op)


def _encode(m: StepState, step: int, rank: int, op: int) -> None:
    name = _group(m, op)
    whole = _all_of(m, step, rank, f"gradients{name}", "read")
    if whole < 0:
        return
    if whole not in m.p.ops.writes[op].reshape(-1, 3)[:, 0]:
        m.wrong(step, f"does not spend gradients{name}, which it sends")
        return
    root, lo, hi = m.locate(whole, 0, int(m.p.buffers.chunks[whole]), 0)
    for cell in range(lo, hi):
        # What is sent must be this rank's whole contribution, or error feedback would keep the rest out.
        want = _own(m, rank, whole, cell)
        if m.memory[root][cell] != want:
            m.mismatch(step, whole, cell, m.memory[root][cell], want)
            return
    if m.data_buffers.get((rank, f"sum0{name}"), -1) >= 0:
        _fill_sum(m, step, rank, name, 0)
    else:
        _fill_slot(m, step, rank, name, op)
    # The codec takes the gradients over: until decoded, nobody may read them.
    m.store(root, lo, hi, [m.garbage] * (hi - lo), step)


def _fill_slot(m: StepState, step: int, rank: int, name: str, op: int) -> None:
    replica, n = _replica(m, rank)
    sent = m.data_buffers.get((rank, f"sent{name}"), -1)
    slots = [(first, count) for b, first, count in m.p.ops.writes[op].reshape(-1, 3).tolist() if b == sent]
    own = int(m.p.buffers.chunks[sent]) // n if sent >= 0 else 0
    if slots != [(replica * own, own)] or own * n != int(m.p.buffers.chunks[sent]):
        m.wrong(step, f"must fill the slot of replica {replica} in sent{name}, and no other")
        return
    place, first, end = m.locate(sent, replica * own, own, 0)
    m.store(place, first, end, [_payload(m, rank, name, replica, k) for k in range(end - first)], step)


def _fill_sum(m: StepState, step: int, rank: int, name: str, number: int) -> None:
    b = _all_of(m, step, rank, f"sum{number}{name}", "write")
    if b >= 0:
        root, lo, hi = m.locate(b, 0, int(m.p.buffers.chunks[b]), 0)
        m.store(root, lo, hi, [_addend(m, rank, name, number, k, {_replica(m, rank)[0]}) for k in range(hi - lo)], step)


def _advance(m: StepState, step: int, rank: int, op: int) -> None:
    name = _group(m, op)
    read = [m.p.buffers.name[b] for b in m.p.ops.reads[op].reshape(-1, 3)[:, 0].tolist()]
    number = max((_sum_number(x) for x in read if x.endswith(name)), default=-1)
    if number < 0:
        m.wrong(step, f"reads no sum of {name}")
    elif _complete(m, step, rank, name, number):
        _fill_sum(m, step, rank, name, number + 1)


def _decode(m: StepState, step: int, rank: int, op: int) -> None:
    name = _group(m, op)
    whole = _all_of(m, step, rank, f"gradients{name}", "write")
    if whole < 0:
        return
    numbers = list(takewhile(lambda k: (rank, f"sum{k}{name}") in m.data_buffers, count()))
    if not (all(_complete(m, step, rank, name, k) for k in numbers) if numbers else _slots_filled(m, step, rank, name)):
        return
    place, first, end = m.locate(whole, 0, int(m.p.buffers.chunks[whole]), 0)
    # All payloads were complete, so decoding gives the whole sum.
    m.store(place, first, end, [m.whole_gradient(rank, whole, cell) for cell in range(first, end)], step)


def _slots_filled(m: StepState, step: int, rank: int, name: str) -> bool:
    sent = _all_of(m, step, rank, f"sent{name}", "read")
    if sent < 0:
        return False
    _, lo, hi = m.locate(sent, 0, int(m.p.buffers.chunks[sent]), 0)
    slot = max(1, (hi - lo) // _replica(m, rank)[1])
    return _holds(m, step, sent, [_payload(m, rank, name, k // slot, k % slot) for k in range(hi - lo)])


def _complete(m: StepState, step: int, rank: int, name: str, number: int) -> bool:
    b = _all_of(m, step, rank, f"sum{number}{name}", "read")
    if b < 0:
        return False
    _, lo, hi = m.locate(b, 0, int(m.p.buffers.chunks[b]), 0)
    return _holds(m, step, b, [_addend(m, rank, name, number, k, set(range(_replica(m, rank)[1]))) for k in range(hi - lo)])


def _holds(m: StepState, step: int, b: int, wanted: list[int]) -> bool:
    """Every cell of the buffer is what it must be; a finding otherwise."""
    root, lo, _ = m.locate(b, 0, int(m.p.buffers.chunks[b]), 0)
    for k, want in enumerate(wanted):
        if m.memory[root][lo + k] != want:
            m.mismatch(step, b, lo + k, m.memory[root][lo + k], want)
            return False
    return True


def _group(m: StepState, op: int) -> str:
    return "@" + m.p.ops.graph[op].partition("@")[2]


def _sum_number(name: str) -> int:
    """Of a buffer that payloads are summed in, by its name; -1 for others."""
    head, at, _ = name.partition("@")
    digits = head.removeprefix("sum")
    return int(digits) if at and head.startswith("sum") and digits.isdecimal() else -1


def _replica(m: StepState, rank: int) -> tuple[int, int]:
    """(number of this rank among those that hold the same, how many these are)."""
    stage, data, _ = m.layout.coordinates(rank)
    mates = m.layout.mates(stage)
    return mates.index(stage) * m.layout.data + data, len(mates) * m.layout.data


def _all_of(m: StepState, step: int, rank: int, name: str, verb: str) -> int:
    """The rank's buffer of that name, if the op reads (writes) all of it; -1, and a finding, otherwise."""
    b = m.data_buffers.get((rank, name), -1)
    if b < 0 or not m.covers(step, b, verb):
        m.wrong(step, f"does not {verb} the whole of {name}")
        return -1
    return b


def _home(m: StepState, rank: int) -> tuple[int, int]:
    stage, _, tensor = m.layout.coordinates(rank)
    return m.layout.mates(stage)[0], tensor


def _payload(m: StepState, rank: int, name: str, replica: int, cell: int) -> int:
    return 1 << (32 + replica) | m.quantity("sent", *_home(m, rank), name, replica, cell)


def _addend(m: StepState, rank: int, name: str, number: int, cell: int, replicas: set[int]) -> int:
    return sum(1 << (32 + r) for r in replicas) | m.quantity("sum", *_home(m, rank), name, number, cell)


def _own(m: StepState, rank: int, b: int, cell: int) -> int:
    """A cell of the gradients with every contribution of this rank's own micro-batches."""
    place, (stage, replica, _) = m.place(rank, b, cell), m.layout.coordinates(rank)
    held = set(m.layout.hosted(stage))
    bits = 0
    for key in m.users.get(place, set()):
        for microbatch in range(m.layout.microbatches_of(replica)):
            if (m.segment[key].stage, m.layout.copy(microbatch)) in held:
                bits |= m.contribution(key, microbatch, replica)
    return bits << 32 | m.quantity("gradient", *place) if bits else 0


STEPS = {"encode": _encode, "advance": _advance, "decode": _decode}
