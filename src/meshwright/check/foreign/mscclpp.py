"""Is an MSCCL++ plan right? Its executor's rules, then form, deadlock, races and values of its program. Findings name GPU, block and operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ...errors import FormatError, Unsupported
from ...interop.mscclpp import DATA, SYNC, ImportedMscclpp, MscclppBlock, MscclppGpu, MscclppOp, MscclppPlan, Ref, operation_of
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding, Verdict
from ..whole import check_program

__all__ = ["judge_mscclpp"]

_STEP = re.compile(r"rank (\d+) lane (\d+) step (\d+)")
_OURS = ("lane", "rank", "iteration", "other_lane", "other_iteration", "buffer")
_KEYS = ("step", "other_step", "sender", "waits_for")


def judge_mscclpp(plan: MscclppPlan, read: Callable[[MscclppPlan], ImportedMscclpp]) -> Verdict:
    """All checks of a plan; `read`: its program (Raises: FormatError, Unsupported); `facts`: blocks, steps (operations) and connections."""
    facts: dict[str, Any] = {
        "blocks": sum(len(g.threadblocks) for g in plan.gpus), "steps": sum(len(b.ops) for g in plan.gpus for b in g.threadblocks),
        "channels": sum(len(c.connected_to) for g in plan.gpus for c in g.channels), "modes": ["in place" if plan.in_place else "out of place"],
    }  # fmt: skip
    found = list(islice(_rules(plan), MAX_FINDINGS_OF_A_KIND)) or list(islice(_syncs(plan), MAX_FINDINGS_OF_A_KIND))
    if found:
        return Verdict(findings=tuple(found), facts=facts)
    try:
        made = read(plan)
    except FormatError as error:
        return Verdict(findings=(Finding(check="executor", message=str(error), witness={"where": error.where}),), facts=facts)
    except Unsupported as error:
        return Verdict(findings=(Finding(check="executor", message=str(error), witness={"where": error.where}, status="unknown"),), facts=facts)
    verdict = check_program(made.program)
    found = [_in_words_of_the_plan(made, f) for f in verdict.findings]
    found += list(islice(_borrowed(plan), MAX_FINDINGS_OF_A_KIND))
    return Verdict(findings=tuple(found), facts=facts, notes=verdict.notes)


def _finding(message: str, **witness: Any) -> Finding:
    return Finding(check="executor", message=message, witness=witness)


def _rules(plan: MscclppPlan) -> Iterator[Finding]:
    n = len(plan.gpus)
    if not n:
        yield _finding("the plan has no gpu", field="gpus")
        return
    for k, g in enumerate(plan.gpus):
        if g.id != k:
            yield _finding(f"gpu {g.id} stands at place {k}: the executor looks its rank up by place", gpu=g.id)
    try:
        op = operation_of(plan)
    except Unsupported as error:
        yield _finding(error.message, field="collective")
        return
    first = plan.gpus[0]
    wanted = {"all-gather": (1, n), "reduce-scatter": (n, 1)}.get(op, (1, 1))
    for g in plan.gpus:
        if (g.input_chunks, g.output_chunks) != (first.input_chunks, first.output_chunks) or min(g.input_chunks, g.output_chunks) < 1:
            yield _finding(f"gpu {g.id} cuts its buffers into {g.input_chunks} and {g.output_chunks} chunks, gpu {first.id} otherwise", gpu=g.id)
        if g.scratch_chunks < 0:
            yield _finding(f"gpu {g.id} has {g.scratch_chunks} scratch chunks", gpu=g.id)
        for c in g.channels:
            for peer in c.connected_to:
                if not 0 <= peer < n or peer == g.id:
                    yield _finding(f"gpu {g.id} connects to gpu {peer}", gpu=g.id, peer=peer)
        ids = [b.id for b in g.threadblocks]
        if ids != list(range(len(ids))):
            yield _finding(f"gpu {g.id}: blocks must be numbered 0..{len(ids) - 1} in order, got {ids[:16]}", gpu=g.id)
    if first.input_chunks * wanted[1] != first.output_chunks * wanted[0] or (op == "all-to-all" and first.input_chunks % n):
        yield _finding(f"{first.input_chunks} input and {first.output_chunks} output chunks are not those of a whole {op} among {n}", field="gpus")
    if plan.max_message_size < plan.min_message_size or plan.min_message_size < 0:
        yield _finding(f"no message has a size from {plan.min_message_size} to {plan.max_message_size}", field="max_message_size")
    for g in plan.gpus:
        for kind in ("memory", "port"):
            for peer in sorted(set(g.peers(kind))):
                if peer < n and g.peers(kind).count(peer) != plan.gpus[peer].peers(kind).count(g.id):
                    mine, theirs = g.peers(kind).count(peer), plan.gpus[peer].peers(kind).count(g.id)
                    yield _finding(f"gpu {g.id} has {mine} {kind} connections to gpu {peer}, which has {theirs} back", gpu=g.id, peer=peer)


def _spans(op: MscclppOp, g: MscclppGpu) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Local (buffer, first, end) that an operation reads and writes."""

    def local(refs: tuple[Ref, ...]) -> list[tuple[str, int, int]]:
        return [(r.type, r.index, r.index + r.size) for r in refs if r.type is not None]

    return local(op.src_buff), local(op.dst_buff)


def _meet(one: list[tuple[str, int, int]], two: list[tuple[str, int, int]]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in one for b in two)


def _syncs(plan: MscclppPlan) -> Iterator[Finding]:
    """Threads of a block run ahead of each other: what depends on an earlier operation needs a nop between."""
    for g in plan.gpus:
        for b in g.threadblocks:
            yield from _sync(g, b)


def _sync(g: MscclppGpu, b: MscclppBlock) -> Iterator[Finding]:
    moved: list[tuple[int, MscclppOp]] = []  # since the last nop
    waited = -1
    for k, op in enumerate(b.ops):
        where, facts = f"gpu {g.id} tb {b.id} op {k} ({op.name})", {"gpu": g.id, "tb": b.id, "step": k}
        if op.name in SYNC:
            moved, waited = [], -1
        elif op.name in ("wait", "rlxwait", "sem_acquire"):
            waited = k
        elif op.name in DATA:
            if waited >= 0:
                yield _finding(f"{where} may run before the wait of op {waited} has ended: no nop between", **facts)
            reads, writes = _spans(op, g)
            for j, other in moved:
                before_reads, before_writes = _spans(other, g)
                if _meet(reads, before_writes) or _meet(writes, before_writes) or _meet(writes, before_reads):
                    yield _finding(f"{where} and op {j} ({other.name}) touch the same chunks: no nop between", **facts)
                    break
            moved.append((k, op))
            if op.name in ("pws", "pwsf"):
                moved = moved[-1:]
        elif op.name in ("signal", "rlxsignal", "sem_release") and moved:
            yield _finding(f"{where} may tell of op {moved[-1][0]} ({moved[-1][1].name}) before it is done: no nop between", **facts)


def _borrowed(plan: MscclppPlan) -> Iterator[Finding]:
    """Out of place the caller lends its input for reading only."""
    for g in plan.gpus if not plan.in_place else ():
        for b in g.threadblocks:
            for k, op in enumerate(b.ops):
                refs = [r for r in op.dst_buff if r.type == "i"]
                ids = [x for refs_ in b.remote_buffer_refs if refs_.access_channel_type == op.channel_type for x in refs_.remote_buffer_ids]
                far = [r for r in op.dst_buff if r.buffer_id is not None and g.remote_buffers[ids[r.buffer_id]].type == "i"]
                if refs or far:
                    text = f"gpu {g.id} tb {b.id} op {k} ({op.name}) writes into an input, which an out-of-place call only lends for reading"
                    yield _finding(text, gpu=g.id, tb=b.id, step=k)


# ---- findings in words of the plan -------------------------------------------------------------------------------------
def _in_words_of_the_plan(made: ImportedMscclpp, f: Finding) -> Finding:
    def words(step: int) -> str:
        return f"gpu {int(made.gpu[step])} tb {int(made.block[step])} op {int(made.position[step])}"

    def place(step: int) -> dict[str, int]:
        return {"gpu": int(made.gpu[step]), "tb": int(made.block[step]), "step": int(made.position[step])}

    message = _STEP.sub(lambda m: words(int(m[3])), f.message)
    message = re.sub(r"\brank (\d+)", r"gpu \1", message).replace(" (iteration 0)", "").replace(" (iterations 0 and 0)", "")
    witness: dict[str, Any] = {k: v for k, v in f.witness.items() if k not in (*_OURS, *_KEYS, "cycle")}
    if isinstance(f.witness.get("rank"), int):
        witness["gpu"] = f.witness["rank"]
    for key in _KEYS:
        value = f.witness.get(key, -1)
        if isinstance(value, int) and 0 <= value < len(made.gpu):
            witness |= place(value) if key == "step" else {key: place(value)}
    if isinstance(f.witness.get("cycle"), list):
        witness["cycle"] = [{**place(int(x["step"])), "waits": x["waits"]} for x in f.witness["cycle"]]
    return replace(f, message=message, witness=witness)
