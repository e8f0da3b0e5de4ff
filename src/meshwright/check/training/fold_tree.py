"""Gradients that must be the fold over micro-batches, whatever the number of ranks: proved in two parts.

A replica folds its own micro-batches (`run.train.folds`): replica d has numbers d m .. d m + m - 1, in order, m a power of two, so its sum is one
node of the tree over all. The collective that adds the replicas' sums has a contract of its own, `tree`, proved for itself, over members in the
order of the replicas: the nodes above. What tensor ranks hold in parts they add up after all that, in their order. Nothing else may add to a
gradient: stages share no parameter, and a value feeds one later stage.

Where replicas divide gradients (sharding levels 2 and 3) it is the other way round: of n replicas, a power of two, replica d has numbers d, n + d,
2 n + d, ...; the collective's sum over micro-batch k is the node [k n, (k + 1) n), and the steps of the program that add these nodes up are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...plan.plan import Plan, TrainingLayout
from ...program.program import REPRODUCIBLE_SUMS, Kind, Part, Program
from ..program.fold_tree import FoldTrees
from ..verdict import Finding
from . import data_groups

__all__ = ["check_folds"]


def check_folds(plan: Plan) -> list[Finding]:
    """Of a training plan; nothing where the job asks for no fold."""
    job, layout = plan.job.get("training", {}), plan.layout
    recipe = job.get("recipe", {}) if isinstance(job, Mapping) else {}
    asked = isinstance(recipe, Mapping) and recipe.get("reproducible", "run") == "tree"
    if layout is None or not (asked or layout.step_end.folded):
        return []
    if not layout.step_end.folded or not asked:
        text = "the job asks for gradients that are folds, the layout does not" if asked else "the layout folds gradients, and the job asks for none"
        return [_wrong(text, "layout.end.folded")]
    return [*_of_layout(layout), *(found for program in plan.programs.values() for found in _of_program(program, plan.programs, layout))]


def _of_layout(layout: TrainingLayout) -> Iterator[Finding]:
    whole = {"context": layout.context != 1, "expert": layout.expert != 1, "placement": layout.placement}
    for name, divided in whole.items():
        if divided:
            yield _wrong(f"{name} divides what the fold over micro-batches wants whole", f"layout.{name}")
    if layout.step_end.norm and (layout.zero_level or layout.pipeline > 1):
        yield _wrong("a norm over stages or shards is added up in another order than on one rank", "layout.end.norm")
    flowing = {v.name for v in layout.values if v.differentiable}
    owners: dict[tuple[str, str], int] = {}
    for stage in layout.stages:
        named = [("parameter", p) for p in stage.params if p not in layout.frozen] + [("value", v) for v in stage.receives if v in flowing]
        for what, name in named:
            if owners.setdefault((what, name), stage.index) != stage.index:
                text = f"stages {owners[what, name]} and {stage.index} both add to the gradient of {what} {name!r}"
                yield _wrong(text, "layout.stages", **{what: name})
    m = layout.microbatches
    blocks = layout.data if layout.in_turn and m > 1 else 1 if layout.in_turn else m  # what must be a power of two
    if layout.data > 1 and (layout.replica_microbatches or blocks & (blocks - 1)):
        yield _wrong(f"replicas with {layout.microbatch_counts} micro-batches have no aligned blocks of the tree", "layout.microbatches")


def _of_program(p: Program, programs: Mapping[str, Program], layout: TrainingLayout) -> Iterator[Finding]:
    """The calls of a step, and the order of each rank's micro-batches."""
    for call in range(len(p.calls)):
        name = p.calls.names[int(p.calls.callee[call])]
        members = p.comms.groups[int(p.calls.comm[call])].tolist()
        for c in programs[name].contracts if name in programs else ():
            if c.op in REPRODUCIBLE_SUMS and (c.reproducible != "tree" or c.numbers or members != sorted(members)):
                text = f"the {c.op} {programs[name].name or name[:12]!r} adds up replicas otherwise than the tree over micro-batches does"
                yield _wrong(text, "contract.reproducible", callee=name)
    yield from _replicas_first(p, programs, layout)
    if layout.in_turn:
        yield from _kept_parts(p, layout)
    if not len(p.calls) and not len(p.ops):
        return
    lane = p.lane_of_step()
    at = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    last: dict[int, int] = {}
    for step in at.tolist():
        op, rank = int(p.steps.op[step]), int(p.lanes.actor[lane[step]])
        if p.ops.name[op] not in ("B", "W"):
            continue
        number = int(p.ops.microbatch[op])
        if number < last.get(rank, 0):
            text = f"{p.describe(step)} comes after micro-batch {last[rank]}: a replica folds its micro-batches in order"
            yield _wrong(text, "ops.microbatch", rank=rank, step=step, fold_node=[number, number + 1])
            return
        last[rank] = number


def _replicas_first(p: Program, programs: Mapping[str, Program], layout: TrainingLayout) -> Iterator[Finding]:
    """Is each gradient added up over replicas and micro-batches before it is over tensor ranks?"""
    over_tensor: set[tuple[int, str]] = set()
    lane, parts = p.lane_of_step(), [data_groups.part_of(name) for name in p.buffers.name]
    for step in np.flatnonzero((p.steps.kind == Kind.CALL) | (p.steps.kind == Kind.TRANSFER)).tolist():
        rank, call = int(p.lanes.actor[lane[step]]), int(p.steps.op[step])
        if p.steps.kind[step] == Kind.TRANSFER:
            part = parts[int(p.steps.dst_buffer[step])] if p.steps.dst_buffer[step] >= 0 else None
            if part is not None and part.kind == "gradshard" and (rank, part.group) in over_tensor:
                text = f"{p.describe(step)} adds micro-batches to what tensor ranks have added up before"
                yield _wrong(text, "steps", rank=rank, step=step)
            continue
        contracts = programs[name].contracts if (name := p.calls.names[int(p.calls.callee[call])]) in programs else ()
        if not any(c.op in REPRODUCIBLE_SUMS for c in contracts):
            continue
        replicas = len({layout.coordinates(m)[1] for m in p.comms.groups[int(p.calls.comm[call])].tolist()}) > 1
        for part in {parts[int(b)] for b in p.calls.binds[call][1::3]}:
            if part is None or not part.kind.startswith("grad"):
                continue
            if not replicas:
                over_tensor.add((rank, part.group))
            if part.kind == "gradfull" and not replicas:
                text = f"{p.describe(step)} adds up tensor ranks of one micro-batch: another order than over the sum of all"
                yield _wrong(text, "calls", rank=rank, step=step)
            elif replicas and (rank, part.group) in over_tensor:
                text = f"{p.describe(step)} adds up replicas of what tensor ranks have added up before: another order at other numbers of replicas"
                yield _wrong(text, "calls", rank=rank, step=step)


def _kept_parts(p: Program, layout: TrainingLayout) -> Iterator[Finding]:
    """Of sums over replicas, micro-batch by micro-batch: each copy within a rank adds the two children of a node, and all arrive at the optimizer."""
    trees, m = FoldTrees(), layout.microbatches
    trees.hold(0, 1, m)
    holds: dict[tuple[int, int], int] = {}  # (buffer, chunk) -> set of micro-batches, as bits
    parts = [data_groups.part_of(name) for name in p.buffers.name]
    kept = {b for b, x in enumerate(parts) if x is not None and x.kind == "gradshard"}
    followed = kept | {b for b, name in enumerate(p.buffers.name) if name.startswith("folds")}
    s, lane, lanes = p.steps, p.lane_of_step(), dict[int, int]()
    ends = np.stack([s.src_buffer, s.dst_buffer])
    for step in np.flatnonzero((s.kind == Kind.TRANSFER) & np.isin(ends, sorted(followed)).any(axis=0)).tolist():
        a, b, rank = int(s.src_buffer[step]), int(s.dst_buffer[step]), int(p.lanes.actor[lane[step]])
        if lanes.setdefault(rank, int(lane[step])) != int(lane[step]) or int(s.parts[step]) & ~int(Part.ADD) != int(Part.READ | Part.STORE):
            text = f"{p.describe(step)}: parts of gradients are added in several lanes, in no certain order, or sent once more"
            yield _wrong(text, "steps", rank=rank, step=step)
            return
        for i in range(int(s.count[step])):
            x, y = _held(holds, parts, a, int(s.src_chunk[step]) + i), _held(holds, parts, b, int(s.dst_chunk[step]) + i)
            add = bool(s.parts[step] & Part.ADD) and (y or b not in kept)  # what is kept begins as zeros
            if not x or (add and not y) or (add and not trees.allow(0, x, y, step)):
                why, facts = trees.why(step)
                yield _wrong(f"{p.describe(step)} {why or 'takes a part of no micro-batch'}", "steps", rank=rank, step=step, **facts)
                return
            holds[b, int(s.dst_chunk[step]) + i] = x | y if add else x
    for b in sorted(kept):
        if lacking := [c for c in range(int(p.buffers.chunks[b])) if holds.get((b, c), 0) != (1 << m) - 1]:
            yield _wrong(f"chunk {lacking[0]} of {p.buffer_name(b)} is not the sum of {m} micro-batches", "buffers", buffer=b)
            return


def _held(holds: Mapping[tuple[int, int], int], parts: Sequence[data_groups.Part | None], buffer: int, chunk: int) -> int:
    """Micro-batches in a chunk, as bits; whole gradients hold their own until something else is written there."""
    part = parts[buffer]
    return holds.get((buffer, chunk), 1 << part.number if part is not None and part.kind == "gradfull" else 0)


def _wrong(text: str, field: str, **more: object) -> Finding:
    return Finding(check="values", message=text, witness={"field": field, **more})
