"""What MSCCL's executor demands of a file: ids, peers, channels, ranges, dependences, and the sizes of its tables.

Some of it the executor's parser refuses itself; the rest it would run wrongly (beyond a buffer, a flag that nobody sets, a connection with
two senders). Either way the file is wrong, and the finding names GPU, block and step. These rules look at one file alone; deadlock,
races and values are decided on its program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from ...interop.msccl import COLLECTIVES, DIALECTS, ExecutorLimits, MscclAlgo, MscclBlock, MscclGpu, MscclStep, chunks_of, collective_of
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["check_executor", "check_usage", "step_words"]

_Port = tuple[int, int, int, MscclStep]  # gpu, block, position, step


def step_words(gpu: int, block: int, position: int, step: MscclStep | None = None) -> str:
    """A step by its place and, if given, what it says: `gpu 0 tb 1 step 2 (rrc i3+ > o3, 2 chunks)`."""
    place = f"gpu {gpu} tb {block} step {position}"
    if step is None or step.type == "nop":
        return place + (" (nop)" if step is not None else "")
    src = f" {step.src_buffer}{step.src_offset}" if "X" in step.parts else ""
    dst = f" > {step.dst_buffer}{step.dst_offset}" if "D" in step.parts else ""
    return f"{place} ({step.type}{src}{dst}, {step.chunks} chunk{'s' * (step.chunks != 1)})"


def _finding(message: str, *, gpu: int = -1, tb: int = -1, step: int = -1, **more: object) -> Finding:
    witness = {k: v for k, v in (("gpu", gpu), ("tb", tb), ("step", step)) if v >= 0}
    return Finding(check="executor", message=message, witness=witness | more)


def check_executor(algo: MscclAlgo, limits: ExecutorLimits | None = None) -> list[Finding]:
    """Findings of all rules, a few of each kind; stops after the first group that finds something, since later rules rely on it."""
    caps = limits or ExecutorLimits()
    # Each group assumes the ones before: ids are sound before blocks are looked up, connections before their messages are counted.
    for group in ((_header, _gpus), (_blocks,), (_connections, _steps, _tables), (_messages, _dependences)):
        found: list[Finding] = []
        for rule in group:
            found += _some(rule(algo, caps))
        if found:
            return found
    return []


def _some(findings: Iterable[Finding]) -> list[Finding]:
    out: list[Finding] = []
    for finding in findings:
        out.append(finding)
        if len(out) == MAX_FINDINGS_OF_A_KIND:
            break
    return out


# ---- the algorithm -----------------------------------------------------------------------------------------------------
def _header(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    if not 1 <= algo.channels <= caps.channels:
        yield _finding(f"nchannels is {algo.channels}, the executor has 1..{caps.channels}", field="nchannels")
    if algo.chunks_per_loop < 1:
        yield _finding(f"nchunksperloop is {algo.chunks_per_loop}, the message needs at least one chunk", field="nchunksperloop")
    if algo.ranks < 1:
        yield _finding(f"ngpus is {algo.ranks}", field="ngpus")
        return
    if algo.collective not in COLLECTIVES:
        right = DIALECTS.get(algo.collective) or f"one of {', '.join(COLLECTIVES)}"
        yield _finding(f"coll is {algo.collective!r}, which the executor refuses; it says {right}", field="coll")
    op = collective_of(algo)
    if op in ("all-gather", "reduce-scatter", "all-to-all") and algo.chunks_per_loop % algo.ranks:
        text = f"nchunksperloop is {algo.chunks_per_loop}, which are not {algo.ranks} equal parts of whole chunks"
        yield _finding(text, field="nchunksperloop")
    for name, value in (("inplace", algo.in_place), ("outofplace", algo.out_of_place)):
        if value not in (0, 1):
            yield _finding(f"{name} is {value}, it must be 0 or 1", field=name)
    if not algo.in_place and not algo.out_of_place:
        yield _finding("inplace and outofplace are both 0: the executor never chooses this file", field="inplace")
    if algo.min_bytes < 0 or algo.max_bytes < 0 or (algo.max_bytes and algo.max_bytes < algo.min_bytes):
        text = f"minBytes {algo.min_bytes} and maxBytes {algo.max_bytes}: no message has such a size, so the executor never chooses this file"
        yield _finding(text, field="maxBytes")
    if not -1 <= algo.root < algo.ranks:
        yield _finding(f"root is {algo.root}, there are {algo.ranks} gpus", field="root")
    if len(algo.name) > caps.characters:
        yield _finding(f"name has {len(algo.name)} characters, the executor reads {caps.characters}", field="name")


def _gpus(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    seen: set[int] = set()
    for g in algo.gpus:
        if g.id in seen:
            yield _finding(f"gpu {g.id} is described twice", gpu=g.id)
        elif not 0 <= g.id < algo.ranks:
            yield _finding(f"gpu {g.id} is none of the {algo.ranks} of ngpus", gpu=g.id)
        seen.add(g.id)
        for name, value in (("i_chunks", g.i_chunks), ("o_chunks", g.o_chunks), ("s_chunks", g.s_chunks)):
            if value < 0:
                yield _finding(f"gpu {g.id}: {name} is {value}", gpu=g.id, field=name)
    for r in range(min(algo.ranks, len(algo.gpus) + MAX_FINDINGS_OF_A_KIND)):
        if r not in seen:
            yield _finding(f"gpu {r} is missing: ngpus is {algo.ranks}", gpu=r)


def _blocks(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    for g in algo.gpus:
        seen: set[int] = set()
        for b in g.blocks:
            where = f"gpu {g.id} tb {b.id}"
            if b.id in seen:
                yield _finding(f"{where} is described twice", gpu=g.id, tb=b.id)
            seen.add(b.id)
            for word, peer in (("send", b.send), ("recv", b.recv)):
                if peer == g.id:
                    yield _finding(f"{where}: {word} names its own gpu", gpu=g.id, tb=b.id, peer=peer)
                elif not -1 <= peer < algo.ranks:
                    yield _finding(f"{where}: {word} is {peer}, there are {algo.ranks} gpus", gpu=g.id, tb=b.id, peer=peer)
            if not 0 <= b.channel < algo.channels:
                yield _finding(f"{where}: chan is {b.channel}, nchannels is {algo.channels}", gpu=g.id, tb=b.id, chan=b.channel)
            for k, s in enumerate(b.steps):
                if s.number != k:
                    text = f"{where}: step {k} of {len(b.steps)} is numbered {s.number}; the executor counts in file order, and so do dependences"
                    yield _finding(text, gpu=g.id, tb=b.id, step=k, number=s.number)
                    break
        for k in range(len(seen)):
            if k not in seen:
                yield _finding(f"gpu {g.id} has {len(seen)} blocks, but no tb {k}: ids must be 0..{len(seen) - 1}", gpu=g.id, tb=k)
                break


def _connections(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    """(source, destination, channel) has one block at each end."""
    ends: dict[str, dict[tuple[int, int, int], int]] = {"send": {}, "recv": {}}
    for g in algo.gpus:
        counts: dict[tuple[str, int], int] = {}
        for b in g.blocks:
            for word, peer in (("send", b.send), ("recv", b.recv)):
                if peer < 0:
                    continue
                # Both ends name a connection alike: from, to, channel.
                key = (g.id, peer, b.channel) if word == "send" else (peer, g.id, b.channel)
                if key in ends[word]:
                    text = f"gpu {g.id} tb {b.id}: {word} {peer} on channel {b.channel} is tb {ends[word][key]}'s connection too"
                    yield _finding(text, gpu=g.id, tb=b.id, other_tb=ends[word][key], peer=peer, chan=b.channel)
                ends[word].setdefault(key, b.id)
                counts[word, b.channel] = counts.get((word, b.channel), 0) + 1
                if counts[word, b.channel] == caps.blocks_per_channel + 1:
                    text = f"gpu {g.id}: more than {caps.blocks_per_channel} blocks {word} on channel {b.channel}"
                    yield _finding(text, gpu=g.id, tb=b.id, chan=b.channel)
    for word, other, end in (("send", "recv", 0), ("recv", "send", 1)):
        # An end without the other waits for a block that does not exist.
        for key in sorted(ends[word].keys() - ends[other].keys()):
            gpu, tb, peer = key[end], ends[word][key], key[1 - end]
            text = f"gpu {gpu} tb {tb}: {word} {peer} on channel {key[2]}, where gpu {peer} has no block with {other} {gpu}"
            yield _finding(text, gpu=gpu, tb=tb, peer=peer, chan=key[2])


# ---- steps -------------------------------------------------------------------------------------------------------------
def _steps(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    for g in algo.gpus:
        declared = {"i": g.i_chunks, "o": g.o_chunks, "s": g.s_chunks}
        for b in g.blocks:
            for k, s in enumerate(b.steps):
                for text in _step(b, s, declared, caps):
                    yield _finding(f"{step_words(g.id, b.id, k, s)}: {text}", gpu=g.id, tb=b.id, step=k)


def _step(b: MscclBlock, s: MscclStep, declared: dict[str, int], caps: ExecutorLimits) -> Iterator[str]:
    if s.hasdep not in (0, 1):
        yield f"hasdep is {s.hasdep}, it must be 0 or 1"
    if s.depid < -1:
        yield f"depid is {s.depid}"
    if s.type == "nop":
        if s.depid < 0:
            yield "a nop without depid: the executor does not count it, so every later step of the block has another number than its s"
        return
    if "S" in s.parts and b.send < 0:
        yield "sends, but its block has no peer to send to"
    if "R" in s.parts and b.recv < 0:
        yield "receives, but its block has no peer to receive from"
    if not 1 <= s.chunks <= caps.count:
        yield f"cnt is {s.chunks}, the executor moves 1..{caps.count} chunks"
    for part, letter, offset, word in (("X", s.src_buffer, s.src_offset, "srcoff"), ("D", s.dst_buffer, s.dst_offset, "dstoff")):
        if part in s.parts and not 0 <= offset <= offset + max(0, s.chunks) <= declared[letter]:
            yield f"{word} {offset} with cnt {s.chunks} lies outside the {declared[letter]} chunks of {letter}"
        elif part in s.parts and offset > caps.offset:
            yield f"{word} {offset} does not fit the executor's 16 bits"


def _tables(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    for g in algo.gpus:
        nodes = 1 + len(algo.gpus) + len(g.blocks) + sum(len(b.steps) for b in g.blocks)
        if nodes > caps.nodes:
            yield _finding(f"gpu {g.id} has {nodes} elements, the executor's parser holds {caps.nodes}", gpu=g.id, elements=nodes)
        if len(g.blocks) > caps.children:
            yield _finding(f"gpu {g.id} has {len(g.blocks)} blocks, the executor's parser holds {caps.children}", gpu=g.id)
        for b in g.blocks:
            if len(b.steps) > caps.steps:
                text = f"gpu {g.id} tb {b.id} has {len(b.steps)} steps, the executor was built for {caps.steps}"
                yield _finding(text, gpu=g.id, tb=b.id, steps=len(b.steps))


def _messages(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    """The j-th send of a connection meets the j-th receive, and both say how many chunks it has."""
    sends: dict[tuple[int, int, int], list[_Port]] = {}
    receives: dict[tuple[int, int, int], list[_Port]] = {}
    for g in algo.gpus:
        for b in g.blocks:
            for k, s in enumerate(b.steps):
                if "S" in s.parts:
                    sends.setdefault((g.id, b.send, b.channel), []).append((g.id, b.id, k, s))
                if "R" in s.parts:
                    receives.setdefault((b.recv, g.id, b.channel), []).append((g.id, b.id, k, s))
    for key in sorted(sends.keys() | receives.keys()):
        ours, theirs = sends.get(key, []), receives.get(key, [])
        route = f"gpu {key[0]} to gpu {key[1]} on channel {key[2]}"
        # Connections are first in, first out: message j is the j-th send and the j-th receive in step order of their only blocks.
        for j, (out, into) in enumerate(zip_longest(ours, theirs)):
            if out is None or into is None:
                here = into or out
                what = "receives" if out is None else "sends"
                text = f"{step_words(*here)} {what} message {j} from {route}, which has {len(ours)} sends and {len(theirs)} receives"
                text += _first_difference(ours, theirs)
                yield _finding(text, gpu=here[0], tb=here[1], step=here[2], chan=key[2], sends=len(ours), receives=len(theirs))
                break
            if out[3].chunks != into[3].chunks:
                text = f"{step_words(*into)} takes {into[3].chunks} chunks as message {j} from {route}, {step_words(*out)} sends {out[3].chunks}"
                yield _finding(text, gpu=into[0], tb=into[1], step=into[2], chan=key[2], sender_tb=out[1], sender_step=out[2])
                break


def _first_difference(ours: list[_Port], theirs: list[_Port]) -> str:
    """Where the two ends part, going by the destination that writers put into sends too."""
    for j, (out, into) in enumerate(zip(ours, theirs, strict=False)):
        if out[3].dst_offset != into[3].dst_offset:
            return f"; the ends first name different chunks at message {j}: {step_words(*out)}, {step_words(*into)}"
    return ""


def _dependences(algo: MscclAlgo, caps: ExecutorLimits) -> Iterator[Finding]:
    for g in algo.gpus:
        ids = {b.id: b for b in g.blocks}
        seen = {b.id: _waiting(b) for b in g.blocks}
        # Flags rise along a block, so a wait ends if the last flag reaches its number.
        last = {b: max(x.flags, default=-1) for b, x in seen.items()}
        for b in g.blocks:
            endless = {(block, number) for block, number in seen[b.id].waits if last.get(block, -1) < number}
            for k, s in enumerate(b.steps):
                for text in _dependence(g, ids, b, k, s, endless, seen[b.id].goes_on, caps):
                    yield _finding(f"{step_words(g.id, b.id, k, s)}: {text}", gpu=g.id, tb=b.id, step=k, depid=s.depid, deps=s.deps)


class _Waiting(NamedTuple):
    """`flags`: the numbers that a block publishes; `waits`: the (block, number) it waits for; `goes_on`: steps that go on with a reduction."""

    flags: list[int]
    waits: set[tuple[int, int]]
    goes_on: list[bool]


def _waiting(block: MscclBlock) -> _Waiting:
    """The executor counts a slot for every step that is no `nop`, and before a step one for every wait beyond its first.

    Waits of `nop`s are those of the next step that does not go on with the reduction before it; at the end of a block nobody waits for them.
    """
    found = _Waiting([], set(), [False] * len(block.steps))
    held: list[tuple[int, int]] = []  # of the nops so far
    slots = reductions = 0
    open_sum: tuple[str, int, str] | None = None
    for k, s in enumerate(block.steps):
        own = [(s.depid, s.deps)] if s.depid >= 0 else []
        if s.type == "nop":
            held += own
            continue
        operands = (s.dst_buffer, s.dst_offset, s.src_buffer)
        found.goes_on[k] = s.type == "re" and not own and operands == open_sum
        if not found.goes_on[k]:
            # The first wait rides on the step itself, every further one takes a slot of its own.
            slots += max(0, len(held) + len(own) - 1)
            found.waits.update(held, own)
            held = []
        # The flag says how many slots were done, not the step's number in the file.
        if s.hasdep:
            found.flags.append(slots)
        slots += 1
        reductions += s.type == "re"
        open_sum = operands if s.type == "re" and not s.hasdep and reductions != 16 else None  # the executor ends a sum at the 16th of the block
    return found


def _dependence(
    g: MscclGpu, ids: dict[int, MscclBlock], b: MscclBlock, k: int, s: MscclStep, endless: set[tuple[int, int]], goes_on: list[bool],
    caps: ExecutorLimits,
) -> Iterator[str]:  # fmt: skip
    if s.depid >= 0:
        if s.depid not in ids:
            yield f"waits for tb {s.depid}, but gpu {g.id} has no such block: the flag is never set"
        elif s.depid > caps.dependable_block:
            yield f"waits for tb {s.depid}, but the executor keeps that number in 8 bits (at most {caps.dependable_block})"
        elif s.deps < 0:
            yield f"waits for tb {s.depid}, but deps is {s.deps}: that holds before anything has run"
        elif (s.depid, s.deps) in endless:
            other = ids[s.depid].steps
            flags = ", ".join(f"{j} ({x.type})" for j, x in enumerate(other) if x.hasdep) or "none"
            yield (
                f"waits for step {s.deps} of tb {s.depid}, which sets no flag from there on (it has {len(other)} steps, with hasdep: {flags})"
            )
    if s.type == "nop":
        following = next((j for j in range(k + 1, len(b.steps)) if b.steps[j].type != "nop"), -1)
        if following < 0:
            yield "a nop at the end of its block: the executor drops it, so nothing waits"
        elif goes_on[following]:
            yield f"a nop between reductions that fuse into one: step {following} does not wait for it"
        elif b.steps[following].depid < 0:
            yield f"a nop before step {following}, which has no depid of its own: the executor refuses the file"
    if s.type == "re" and goes_on[k]:
        first = next(j for j in range(k, -1, -1) if not goes_on[j] and b.steps[j].type == "re")
        chain = sum(1 for j in range(first, k + 1) if b.steps[j].type == "re")
        if b.steps[first].chunks != s.chunks:
            yield f"fuses with the reduction of step {first}, which has cnt {b.steps[first].chunks}: the executor takes the last one for all"
        if chain == caps.fused_reductions + 1:
            yield f"the reductions from step {first} on fuse into one of more than {caps.fused_reductions} operands"


# ---- use of the call's buffers -----------------------------------------------------------------------------------------
def check_usage(algo: MscclAlgo, in_place: bool) -> list[Finding]:
    """Steps that use what a call does not give: beyond the message, a buffer that only the root has, or writing into the caller's input."""
    op = collective_of(algo)
    if op is None:
        return [_finding(f"what a {algo.collective} file promises is not known, so it cannot be judged", field="coll")]
    roots = _roots(algo, op)
    if len(roots) != 1:
        return [_finding(f"{len(roots)} ranks could be the root of this {op}; state it: root=\"0\" in <algo>, or --root", field="root")]
    return _some(_usage(algo, op, roots[0], in_place))


def _roots(algo: MscclAlgo, op: str) -> list[int]:
    """Who can be the root: who is stated; else whoever receives nothing where data leaves the root, sends nothing where it goes there."""
    if op not in ("broadcast", "scatter", "reduce", "gather"):
        return [-1]
    if 0 <= algo.root < algo.ranks:
        return [algo.root]
    # The root of a broadcast gets nothing, the root of a reduce gives nothing away.
    part = "R" if op in ("broadcast", "scatter") else "S"
    return [g.id for g in algo.gpus if not any(part in s.parts for b in g.blocks for s in b.steps)]


def _lent(algo: MscclAlgo, op: str, root: int, gpu: MscclGpu, in_place: bool) -> dict[str, int]:
    """Chunks of input, output and scratch that a call gives a rank. One buffer of an in-place broadcast or reduce is everybody's."""
    inputs, outputs = chunks_of(op, algo.chunks_per_loop, algo.ranks)
    rooted = {"scatter": "i", "gather": "o"} | ({} if in_place else {"broadcast": "i", "reduce": "o"})
    has = {"i": inputs, "o": outputs, "s": gpu.s_chunks}
    return has if gpu.id == root or op not in rooted else has | {rooted[op]: 0}


def _usage(algo: MscclAlgo, op: str, root: int, in_place: bool) -> Iterator[Finding]:
    for g in algo.gpus:
        has = _lent(algo, op, root, g, in_place)
        for b in g.blocks:
            for k, s in enumerate(b.steps):
                where = step_words(g.id, b.id, k, s)
                for part, letter, offset in (("X", s.src_buffer, s.src_offset), ("D", s.dst_buffer, s.dst_offset)):
                    if part not in s.parts:
                        continue
                    if offset + s.chunks > has[letter]:
                        span = f"{letter}[{offset}..{offset + s.chunks - 1}]"
                        why = f"has {has[letter]} chunks there" if has[letter] else "gives this gpu no such buffer"
                        text = f"{where} uses {span}; {'an in-place' if in_place else 'an out-of-place'} {op} {why}"
                        yield _finding(text, gpu=g.id, tb=b.id, step=k, in_place=in_place)
                    elif part == "D" and letter == "i" and not in_place:
                        text = f"{where} writes into i[{offset}], which an out-of-place call only lends for reading"
                        yield _finding(text, gpu=g.id, tb=b.id, step=k, in_place=in_place)
