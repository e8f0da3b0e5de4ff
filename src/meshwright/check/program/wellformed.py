"""Form: everything that can be decided without an order. All later checks assume that this one found nothing.

One sender and one receiver lane per channel; equal repeats, message counts and byte counts at both ends; parts that make
sense; buffers and channels of the right actor; legal `after` edges; aliases inside what they lie in; equal call order per communicator.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...errors import FormatError
from ...program.program import Contract, Kind, Part, Program
from ...program.validate import validate
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .order import Addresses, messages, ports, wait_once

__all__ = ["check_form", "check_wellformed", "witness"]

LOCAL_PARTS = Part.RECV | Part.READ | Part.ADD | Part.STORE | Part.SEND  # what a transfer does with data, as against returning a credit


def witness(p: Program, step: int, *, iteration: int = 0, chunk: int | None = None, **more: Any) -> dict[str, Any]:
    """The usual witness of a step: rank, lane, step, iteration and the chunk it touches."""
    st = p.step(step)
    if chunk is None:
        chunk = st.dst[1] if st.dst[0] >= 0 else st.src[1] if st.src[0] >= 0 else -1
        if st.kind is Kind.COMPUTE:
            touched = [*p.ops.writes[st.op].tolist(), *p.ops.reads[st.op].tolist()]
            chunk = touched[1] if touched else -1
    return {"rank": st.actor, "lane": st.lane, "step": step, "iteration": iteration, "chunk": chunk, **more}


def check_wellformed(p: Program) -> list[Finding]:
    try:
        validate(p)
    except FormatError as error:
        return [Finding(check="format", message=str(error), witness={"field": error.where})]
    if p.fold is not None:
        return [Finding(check="wellformed", message="a folded program must be expanded first", status="unknown")]
    return check_form(p)


def check_form(p: Program) -> list[Finding]:
    """The rules beyond those of the tables (`validate`), which must hold."""
    for part in (_parts, _actors, _channels, _edges, _aliases, _calls, _contract):  # each may rely on the ones before
        found = list(islice(part(p), MAX_FINDINGS_OF_A_KIND))
        if found:
            return found
    return []


def _at(p: Program, step: int, what: str, **more: Any) -> Finding:
    return Finding(check="wellformed", message=f"{p.describe(step)}: {what}", witness=witness(p, step, **more))


def _parts(p: Program) -> Iterator[Finding]:
    s, b = p.steps, p.buffers
    transfer = s.kind == Kind.TRANSFER
    has = {q: transfer & ((s.parts & q) != 0) for q in Part}
    recv, read, add, store, send = (has[q] for q in (Part.RECV, Part.READ, Part.ADD, Part.STORE, Part.SEND))
    zero = s.count == 0
    both = (s.src_buffer >= 0) & (s.dst_buffer >= 0) & transfer
    # Chunks of one symbol are of one size; negative numbers keep symbols apart from bytes.
    unit = np.where(b.size >= 0, -1 - b.size, b.chunk_bytes) if len(b) else np.zeros(0)
    differ = both.copy()
    differ[both] = unit[s.src_buffer[both]] != unit[s.dst_buffer[both]]
    rules = (
        (~transfer & (s.parts != 0), "only transfers have parts"),
        (transfer & ((s.parts & LOCAL_PARTS) == 0), "a transfer with no part; use a nop"),
        (read & (s.src_buffer < 0), "reads, but names no source buffer"),
        (store & (s.dst_buffer < 0), "stores, but names no destination buffer"),
        (transfer & ~read & (s.src_buffer >= 0), "names a source buffer that it does not read"),
        (transfer & ~store & (s.dst_buffer >= 0), "names a destination buffer that it does not store to"),
        (send & ~recv & ~read & ~zero, "sends, but neither receives nor reads anything"),
        ((recv | read) & ~store & ~send & ~zero, "takes data that goes nowhere"),
        (store & ~recv & ~read, "stores, but neither receives nor reads anything"),
        (add & ~read & ~(recv & has[Part.IN_SET]), "adds, but has one operand only"),
        (recv & read & ~add, "receives and reads, but does not add"),
        (recv & has[Part.IN_SET] & ~add, "receives from a set, but does not add"),
        (add & ~recv & ~store, "adds to its destination, but does not store"),
        ((has[Part.IN_SET] & ~recv) | (has[Part.OUT_SET] & ~send), "names a channel set that it does not use"),
        ((recv | send) & ~zero & (s.src_buffer < 0) & (s.dst_buffer < 0) & (s.size < 0), "moves chunks of no buffer, so their size is unknown"),
        (differ, "source and destination chunks differ in size"),
    )
    for bad, what in rules:
        for step in np.flatnonzero(bad)[:MAX_FINDINGS_OF_A_KIND].tolist():
            yield _at(p, step, what)


def _actors(p: Program) -> Iterator[Finding]:
    s, b = p.steps, p.buffers
    lane_of = p.lane_of_step()
    actor = p.lanes.actor[lane_of]
    for side, what in (("src_buffer", "reads"), ("dst_buffer", "stores to")):
        buffer = getattr(s, side)
        bad = (buffer >= 0) & (b.actor[np.maximum(buffer, 0)] != actor) if len(b) else np.zeros(len(s), bool)
        for step in np.flatnonzero(bad)[:MAX_FINDINGS_OF_A_KIND].tolist():
            yield _at(p, step, f"{what} {p.buffer_name(int(buffer[step]))}, which is on actor {int(b.actor[buffer[step]])}")
    computing = np.flatnonzero(s.kind == Kind.COMPUTE)
    for step in computing[_strange(p, computing, actor)].tolist():
        op = int(s.op[step])
        for csr, what in ((p.ops.reads, "reads"), (p.ops.writes, "writes")):
            row = csr[op]
            wrong = row[::3][b.actor[row[::3]] != actor[step]]
            if len(wrong):
                yield _at(p, step, f"{what} {p.buffer_name(int(wrong[0]))}, which is on actor {int(b.actor[wrong[0]])}")
    last_owner = np.repeat(np.arange(len(b)), np.diff(b.last.ptr))
    for k in np.flatnonzero(b.actor[last_owner] != actor[b.last.values])[:MAX_FINDINGS_OF_A_KIND].tolist():
        buffer = int(last_owner[k])
        yield _at(p, int(b.last.values[k]), f"ends the life of {p.buffer_name(buffer)}, which is on actor {int(b.actor[buffer])}")


def _strange(p: Program, steps: np.ndarray[Any, Any], actor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which of these computing steps have an op with buffers of another actor."""
    found = np.zeros(len(steps), bool)
    for csr in (p.ops.reads, p.ops.writes):
        op = np.repeat(np.arange(len(p.ops)), np.diff(csr.ptr))
        first = (np.arange(len(op)) - csr.ptr[op]) % 3 == 0
        op, owner = op[first], p.buffers.actor[csr.values[first]]
        # An op's buffers are of one actor where the least and the most of them are.
        least, most = np.full(len(p.ops), np.iinfo(np.int32).max), np.full(len(p.ops), -1)
        np.minimum.at(least, op, owner)
        np.maximum.at(most, op, owner)
        of = p.steps.op[steps]
        found |= (most[of] >= 0) & ((least[of] != actor[steps]) | (most[of] != actor[steps]))
    return found


def _channels(p: Program) -> Iterator[Finding]:
    c, lane_of = p.channels, p.lane_of_step()
    lane_on: dict[str, np.ndarray[Any, Any]] = {}
    counts: dict[str, np.ndarray[Any, Any]] = {}
    sides = (("send", Part.SEND, Part.OUT_SET, "chan_out", c.src), ("receive", Part.RECV, Part.IN_SET, "chan_in", c.dst))
    clean = True
    for word, part, in_set, column, end in sides:
        steps, channels = ports(p, part, in_set, column)
        lane = lane_of[steps]
        for k in np.flatnonzero(p.lanes.actor[lane] != end[channels])[:MAX_FINDINGS_OF_A_KIND].tolist():
            clean = False
            chan = int(channels[k])
            yield _at(p, int(steps[k]), f"{word}s on channel {chan}, whose end is actor {int(end[chan])}", channel=chan)
        first = np.full(len(c), -1, np.int64)
        # Written from behind, so the first lane of each channel is what stays.
        first[channels[::-1]] = lane[::-1]
        for k in np.flatnonzero(lane != first[channels])[:MAX_FINDINGS_OF_A_KIND].tolist():
            clean = False
            who = f"lane {int(first[channels[k]])} {word}s on it too"
            yield _at(p, int(steps[k]), f"channel {int(channels[k])} must have one lane at each end, {who}", channel=int(channels[k]))
        lane_on[word], counts[word] = first, np.bincount(channels, minlength=len(c))
    for chan in np.flatnonzero(counts["send"] != counts["receive"])[:MAX_FINDINGS_OF_A_KIND].tolist():
        clean = False
        ends = f"from rank {int(c.src[chan])} to rank {int(c.dst[chan])}"
        sent, got = int(counts["send"][chan]), int(counts["receive"][chan])
        at_lane = int(lane_on["send" if sent > got else "receive"][chan])
        part, flag, column = (Part.SEND, Part.OUT_SET, "chan_out") if sent > got else (Part.RECV, Part.IN_SET, "chan_in")
        steps, channels = ports(p, part, flag, column)
        step = int(steps[channels == chan][min(sent, got)])
        text = f"{p.describe(step)} has no partner: channel {chan} {ends} has {sent} sends and {got} receives per iteration"
        yield Finding(check="wellformed", message=text, witness=witness(p, step, channel=chan, lane=at_lane))
    # What follows matches messages one by one, which needs equal counts.
    if not clean:
        return
    used = np.flatnonzero(counts["send"] > 0)
    repeat = p.lanes.repeat
    for chan in used[repeat[lane_on["send"][used]] != repeat[lane_on["receive"][used]]][:MAX_FINDINGS_OF_A_KIND].tolist():
        step = int(p.lanes.start[lane_on["receive"][chan]])
        yield _at(p, step, f"channel {chan} joins lanes of repeat {int(repeat[lane_on['send'][chan]])} and {int(repeat[lane_on['receive'][chan]])}")
    yield from _sizes(p)


def _sizes(p: Program) -> Iterator[Finding]:
    m, s = messages(p), p.steps
    size = p.message_bytes()
    for k in np.flatnonzero((size[m.send] != size[m.recv]) | (s.size[m.send] != s.size[m.recv]))[:MAX_FINDINGS_OF_A_KIND].tolist():
        sender, step = int(m.send[k]), int(m.recv[k])
        name = f"message {int(m.ordinal[k])} of channel {int(m.channel[k])}"
        text = f"takes {int(size[step])} bytes for {name}, which has {int(size[sender])}: {p.describe(sender)}"
        yield _at(p, step, text, channel=int(m.channel[k]), sender=sender)


def _edges(p: Program) -> Iterator[Finding]:
    s, lane_of = p.steps, p.lane_of_step()
    owner = np.repeat(np.arange(len(s)), np.diff(s.after_ptr))
    actor, repeat = p.lanes.actor[lane_of], p.lanes.repeat[lane_of]
    once = wait_once(p, lane_of.astype(np.int64))
    for bad, what in (
        (actor[owner] != actor[s.after_step], "waits for a step of another actor"),
        ((repeat[owner] != repeat[s.after_step]) & ~once, "waits for a step of a lane with another repeat"),
        (once & (s.after_lag > 0), "waits once, so the edge cannot have a lag"),
    ):
        for k in np.flatnonzero(bad)[:MAX_FINDINGS_OF_A_KIND].tolist():
            yield _at(p, int(owner[k]), f"{what}: {p.describe(int(s.after_step[k]))}", waits_for=int(s.after_step[k]))


def _aliases(p: Program) -> Iterator[Finding]:
    b = p.buffers
    depth, up = 0, b.alias_of.copy()
    while np.any(up >= 0):
        up = np.where(up >= 0, b.alias_of[np.maximum(up, 0)], -1)
        depth += 1
        if depth > len(b):
            yield Finding(check="wellformed", message="buffer aliases form a cycle", witness={"buffer": int(np.argmax(up >= 0))})
            return
    size = Addresses(p).size
    for k in np.flatnonzero(b.alias_of >= 0).tolist():
        of = int(b.alias_of[k])
        end = int(b.alias_offset_bytes[k] + size[k])
        why = ""
        if b.actor[k] != b.actor[of] or b.space[k] != b.space[of]:
            why = f"lies in a buffer of actor {int(b.actor[of])}, space {int(b.space[of])}"
        elif b.alias_offset_bytes[k] < 0 or end > size[of]:
            why = f"ends at byte {end} of a buffer of {int(size[of])}"
        elif b.window[k] != b.window[of]:
            why = f"has window {int(b.window[k])} inside window {int(b.window[of])}"
        if why:
            text = f"alias {p.buffer_name(k)} of {p.buffer_name(of)} {why}"
            yield Finding(check="wellformed", message=text, witness={"buffer": k, "rank": int(b.actor[k])})


def _calls(p: Program) -> Iterator[Finding]:
    for comm in range(len(p.comms)):
        group = p.comms.groups[comm].tolist()
        if len(set(group)) != len(group):
            yield Finding(check="wellformed", message=f"comm {p.comms.name[comm]!r} names a rank twice", witness={"comm": comm})
            return
    s, calls = p.steps, p.calls
    at = np.flatnonzero(s.kind == Kind.CALL)
    actor = p.lanes.actor[p.lane_of_step()[at]]
    # Per communicator and member, its calls in step order: the k-th calls of all members must be one call.
    sequences: dict[int, dict[int, list[int]]] = {c: {int(r): [] for r in p.comms.groups[c]} for c in range(len(p.comms))}
    for step, who in zip(at.tolist(), actor.tolist(), strict=True):
        comm = int(calls.comm[s.op[step]])
        if who not in sequences[comm]:
            yield _at(p, step, f"calls on comm {p.comms.name[comm]!r}, of which it is no member", comm=comm)
            return
        sequences[comm][who].append(step)
    for comm, members in sequences.items():
        lists = list(members.values())
        for k in range(max(map(len, lists), default=0)):
            row = [steps[k] if k < len(steps) else -1 for steps in lists]
            has = next(x for x in row if x >= 0)
            if -1 in row:
                missing = list(members)[row.index(-1)]
                yield _at(p, has, f"call {k} on comm {p.comms.name[comm]!r} is never made by rank {missing}", comm=comm, missing_rank=missing)
                break
            other = next((x for x in row if _signature(p, x) != _signature(p, has)), -1)
            if other >= 0:
                text = f"call {k} on comm {p.comms.name[comm]!r} differs in callee or bytes from {p.describe(has)}"
                yield _at(p, other, text, comm=comm, other=has)
                break


def _signature(p: Program, step: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Callee, and per binding the callee's buffer and the bytes of the caller's chunks."""
    call = int(p.steps.op[step])
    binds = p.calls.binds[call].reshape(-1, 3)
    return int(p.calls.callee[call]), tuple(sorted((int(a), int(p.buffers.chunk_bytes[b])) for a, b, _ in binds if 0 <= b < len(p.buffers)))


def _contract(p: Program) -> Iterator[Finding]:
    for c in p.contracts:
        yield from _promise(p, c)


def _promise(p: Program, c: Contract) -> Iterator[Finding]:
    members = c.members(p.ranks)
    if c.op in ("broadcast", "reduce", "scatter", "gather") and not 0 <= c.root < len(members):
        yield Finding(check="wellformed", message=f"a {c.op} needs a root among the {len(members)} ranks, got {c.root}", witness={"root": c.root})
    for word, table in (("input", c.inputs), ("output", c.outputs)):
        for rank, (buffer, chunk, count) in zip(members, table, strict=True):
            inside = 0 <= buffer < len(p.buffers) and 0 <= chunk <= chunk + count <= p.buffers.chunks[buffer]
            if not inside or p.buffers.actor[buffer] != rank:
                text = f"the contract's {word} of rank {rank} is no range of a buffer of that rank"
                yield Finding(check="wellformed", message=text, witness={"rank": rank})
    used = [b for b, _, _ in (*c.inputs, *c.outputs) if 0 <= b < len(p.buffers)]
    if len(set(p.buffers.chunk_bytes[used].tolist())) > 1:
        yield Finding(check="wellformed", message="the contract's buffers have chunks of different sizes", witness={"buffers": used})
    if np.any(p.buffers.window[used] > 0) and np.any(p.lanes.repeat > 1):
        yield Finding(check="wellformed", message="the contract's buffers must hold every iteration (window 0)", witness={"buffers": used})
