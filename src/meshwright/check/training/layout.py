"""Layouts of training plans: degrees, batches, stages, segments and buckets fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from ...plan.plan import ContextExchange, Segment, TrainingLayout, ValueInfo
from ..verdict import Finding
from .cells import among_experts, forward_again, members
from .copies import copy_faults
from .placement import placement_faults

__all__ = ["check_layout"]


def check_layout(layout: TrainingLayout, ranks: int | None) -> list[Finding]:
    """Degrees multiply to the ranks, batches to the global batch; stages hold their segments; every value has one maker."""
    bad: list[tuple[str, dict[str, Any]]] = []
    least = min(layout.data, layout.tensor, layout.pipeline, layout.microbatch_size, layout.microbatches)
    if least < 1:
        return [Finding(check="plan", message=f"layout: a degree or a number of micro-batches is {least}, the least is 1", witness={})]
    if ranks is not None and layout.ranks != ranks:
        bad.append((f"{layout.data} x {layout.tensor} x {layout.pipeline} is not the program's {ranks} ranks", {"ranks": ranks}))
    each = layout.replica_microbatches or (layout.microbatches,) * layout.data
    if len(each) != layout.data or min(each) < 1 or max(each) != layout.microbatches:
        bad.append((f"micro-batches {list(each)} are not at least one for each of {layout.data} replicas and {layout.microbatches} at most", {}))
    elif layout.context < 1 or layout.data % layout.context or (layout.context > 1 and layout.replica_microbatches):
        bad.append((f"context degree {layout.context} does not divide {layout.data} replicas with as many micro-batches each", {}))
    elif sum(each) * layout.microbatch_size != layout.global_batch * layout.context:
        text = f"({layout.microbatch_counts}) micro-batches of {layout.microbatch_size} samples are not the global batch {layout.global_batch}"
        bad.append((text, {}))
    stages = len(layout.placement[0]) if layout.placement else layout.pipeline
    if [s.index for s in layout.stages] != list(range(stages)):
        bad.append((f"{stages} stages are needed, in order", {}))
    bad += [(text, {}) for text in placement_faults(layout)]
    if bad and layout.placement:
        return [Finding(check="plan", message=f"layout: {text}", witness=facts) for text, facts in bad]
    keys = [s.key for s in layout.segments]
    if len(set(keys)) < len(keys) or sorted(k for s in layout.stages for k in s.segments) != sorted(keys):
        bad.append(("every segment must be in exactly one stage", {}))
    stage = {k: s.index for s in layout.stages for k in s.segments}
    made: dict[str, str] = {}
    nodes: set[str] = set()
    for seg in layout.segments:
        if stage.get(seg.key) != seg.stage:
            bad.append((f"segment {seg.key} says it is in stage {seg.stage}", {"segment": seg.key}))
        if nodes & set(seg.nodes):
            bad.append((f"segment {seg.key} repeats the node {min(nodes & set(seg.nodes))!r}", {"segment": seg.key}))
        nodes |= set(seg.nodes)
        if not set(seg.sum_writes) <= set(seg.writes) or not set(seg.sum_grads) <= set(seg.reads):
            bad.append((f"segment {seg.key} sums values that it does not write or read", {"segment": seg.key}))
        bad += [(text, {"segment": seg.key}) for text in _sequence(layout, seg)]
        for v in seg.writes:
            if v in made:
                bad.append((f"value {v!r} is written by {made[v]} and {seg.key}", {"value": v}))
            made[v] = seg.key
    bad += _forward_again(layout)
    bad += _context(layout, made, stage)
    bad += _batch_sums(layout, made)
    for seg in layout.segments:
        for v in seg.reads:
            if v not in made:
                bad.append((f"segment {seg.key} reads {v!r}, which no segment writes", {"value": v}))
    bad += [(text, {}) for text in _data_parallel(layout)]
    return [Finding(check="plan", message=f"layout: {text}", witness=facts) for text, facts in bad]


def _forward_again(layout: TrainingLayout) -> list[tuple[str, dict[str, Any]]]:
    """Segments that run forward again come in groups of neighbours, each in one, and their calls give the same twice."""
    groups, found = forward_again(layout), list[tuple[str, dict[str, Any]]]()
    order, seen = {s.index: list(s.segments) for s in layout.stages}, set[str]()
    segment = {s.key: s for s in layout.segments}
    for group in groups:
        first = segment[group[0]] if group and group[0] in segment else None
        mine = order.get(first.stage, []) if first is not None else []
        at = mine.index(group[0]) if group and group[0] in mine else 0
        if not group or mine[at : at + len(group)] != list(group) or seen & set(group):
            found.append((f"{', '.join(group) or 'nothing'} run forward again, which are no neighbours of one stage, or run in two groups", {}))
            continue
        seen |= set(group)
        if any(segment[key].step is not None for key in group):
            found.append((f"{', '.join(group)} run forward again, and by plans of their steps", {}))
    exchanges = () if layout.exchanges is UNSET else layout.exchanges
    if groups and (layout.batch_sums or any(x.again is True or x.copies is not UNSET for x in exchanges)):
        found.append(("segments run forward again beside statistics of the batch, copies of experts or blocks that come again", {}))
    return found


def _sequence(layout: TrainingLayout, seg: Segment) -> list[str]:
    """What a segment gathers, and what one that is split along the sequence reads and writes."""
    split = {v.name for v in layout.values if v.split is not None}
    found = []
    if not set(seg.gathers) <= set(seg.reads) & split:
        found.append(f"segment {seg.key} gathers values that it does not read or that are whole")
    if seg.sequence and (not seg.split or seg.gathers or not (set(seg.reads) | set(seg.writes)) & split):
        found.append(f"segment {seg.key} is split along the sequence, and reads or writes no such value as it is")
    if (seg.sequence or seg.gathers) and not (layout.sequence and layout.tensor > 1):
        found.append(f"segment {seg.key} is split along the sequence, and the layout says nothing is")
    return found


def _context(layout: TrainingLayout, made: dict[str, str], stage: dict[str, int]) -> list[tuple[str, dict[str, Any]]]:
    """Exchanges are of values alike that something in their stage makes before; their targets are made so, and by nothing else."""
    found: list[tuple[str, dict[str, Any]]] = []
    exchanges = () if layout.exchanges is UNSET else layout.exchanges
    value = {v.name: v for v in layout.values}
    crossing = {v for s in layout.stages for v in (*s.receives, *s.sends)}
    experts = [among_experts(layout, x) for x in exchanges]
    if (layout.expert > 1) != any(experts) or (layout.context > 1) == all(experts):
        degrees = f"context degree {layout.context}" + (f", expert degree {layout.expert}" if layout.expert > 1 else "")
        found.append((f"{degrees} and {len(exchanges)} exchanges of values do not belong together", {}))
    for x, of_experts in zip(exchanges, experts, strict=True):
        facts = {"value": x.target}
        a, b = value.get(x.source), value.get(x.target)
        known = x.kind == "shift" or (x.kind in ("all-to-all", "copies") and x.again is not True and (x.kind == "copies") == (x.copies is not UNSET))
        if not known or a is None or b is None or x.source not in made or x.target in made:
            found.append((f"the exchange of {x.source!r} as {x.target!r} is of no known kind, or of values that are not made, or made twice", facts))
            continue
        shapes = (a.shape, b.shape) if x.kind != "copies" else ((), ())
        if (shapes[0], a.dtype, a.differentiable, a.split) != (shapes[1], b.dtype, b.differentiable, b.split) or {x.source, x.target} & crossing:
            found.append((f"the exchange of {x.source!r} as {x.target!r} is of values unlike, or of such that stages hand over", facts))
        parts = members(layout, x)
        if x.kind == "all-to-all" and (not a.shape or a.shape[0] % parts or (layout.context > 1 and not of_experts and a.shape[0] != parts)):
            found.append((f"{x.source!r} has {a.shape[0] if a.shape else 0} blocks for {parts} ranks", facts))
        if x.copies is not UNSET:
            found += [(text, facts) for text in copy_faults(x, a, b, parts)]
        if x.counts is not UNSET or x.expected_bytes is not UNSET:
            found += [(text, facts) for text in _filled(x, exchanges, value, parts)]
        made[x.target] = made[x.source]
    return found


def _filled(x: ContextExchange, exchanges: Sequence[ContextExchange], value: Mapping[str, ValueInfo], parts: int) -> list[str]:
    """Of exchanged rows [E, C, H]: filled ones are numbered by a value of whole numbers [E] that the same ranks exchange."""
    counts = value.get(x.counts) if x.counts is not UNSET else None
    known = counts is not None and any(counts.name in (y.source, y.target) for y in exchanges)
    if not known or counts is None or counts.dtype != "int64" or counts.shape != value[x.source].shape[:1]:
        return [f"the filled rows of {x.source!r} are numbered by {x.counts!r}, which is no exchanged value of a number for each of its experts"]
    each = () if x.expected_bytes is UNSET else x.expected_bytes
    if len(each) != parts or any(not 0 <= n <= value[x.source].size_bytes // parts for n in each):
        return [f"{x.source!r} is expected to fill {list(each)} bytes of its {parts} blocks of {value[x.source].size_bytes // parts}"]
    return []


def _experts(layout: TrainingLayout) -> list[str]:
    """Who divides experts divides something, and has as much to do as its neighbours."""
    shards = () if layout.expert_shards is UNSET else layout.expert_shards
    if layout.expert == 1:
        return ["experts are divided among ranks, and the expert degree is 1"] if shards else []
    bad = []
    if layout.data % layout.expert:
        bad.append(f"expert degree {layout.expert} does not divide {layout.data} replicas")
    if not shards or any(s.axis or s.shares or s.groups or s.blocks != 1 or s.mixed for s in shards):
        bad.append("experts are divided along the first dimension of their parameters, in equal parts, and nothing of theirs is")
    again = [s for s in layout.shards if s.param in {x.param for x in shards}]
    if any(s.axis or s.groups or s.blocks != 1 or s.mixed or len(set(s.shares)) > 1 for s in again):
        bad.append("tensor indices divide a replica's experts along the first dimension, in equal parts, or hold all of them alike")
    if layout.replica_microbatches:
        bad.append("expert parallelism goes with equal replicas so far")
    used: dict[str, set[int]] = {}
    for s in layout.stages:
        for p in s.params:
            used.setdefault(p, set()).add(s.index)
    if any(len(used.get(s.param, {0})) > 1 for s in shards):
        bad.append("experts are used by several stages")
    return bad


def _batch_sums(layout: TrainingLayout, made: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Sums over the replicas are summed where they are made, and their gradients where they are read; each replica has one micro-batch."""
    sums = set(() if layout.batch_sums is UNSET else layout.batch_sums)
    found: list[tuple[str, dict[str, Any]]] = []
    if sums and (layout.data < 2 or layout.context > 1 or layout.microbatches > 1):
        text = f"statistics of the batch are summed over {layout.data} replicas of ({layout.microbatch_counts}) micro-batches: each must have one"
        found.append((text, {}))
    differentiable = {v.name for v in layout.values if v.differentiable}
    crossing = {v for s in layout.stages for v in (*s.receives, *s.sends)}
    for v in sorted(sums):
        if v not in made or v in crossing:
            found.append((f"{v!r} is a sum over the replicas that no segment makes, or that stages hand over", {"value": v}))
    for s in layout.segments:
        less = (sums & set(s.writes)) - set(s.sum_writes) or (sums & set(s.reads) & differentiable) - set(s.sum_grads)
        # Names are part of the format: "<node>/sum", "<node>/moments", "<node>/share" and "<node>/place<i>" are of the samples of one replica.
        less |= {n for n in s.writes if n.rpartition("/")[2].startswith(("place", "share")) or n.rpartition("/")[2] in ("sum", "moments")} - sums
        if less:
            found.append((f"segment {s.key} does not sum {min(less)!r} over the replicas, or its gradient", {"segment": s.key}))
    return found


def _data_parallel(layout: TrainingLayout) -> list[str]:
    """Sharding levels and buckets: each parameter of one stage in one bucket at most, shared ones in none."""
    bad = []
    bad += _experts(layout)
    if layout.zero_level not in (0, 1, 2, 3):
        bad.append(f"the sharding level is {layout.zero_level}, there are 0 to 3")
    if layout.data < 2 and (layout.zero_level or (layout.overlap and len(layout.placement) < 2)):
        bad.append(f"sharding level {layout.zero_level} and overlapped sums need replicas, there is one")
    if layout.server_replicas and (layout.server_replicas < 1 or layout.data % layout.server_replicas or layout.context * layout.expert > 1):
        bad.append(f"{layout.server_replicas} replicas of a server do not divide {layout.data} that divide neither positions nor experts")
    if layout.copies_in_servers and (not layout.zero_level or layout.context > 1 or not 1 < layout.expert < layout.data):
        bad.append(f"no replicas have the same experts and divide state, of {layout.data} at expert degree {layout.expert}: none can share a server")
    if layout.whole_parameters and (not layout.zero_level or any(b.codec for b in layout.buckets)):
        bad.append(f"parameters that replicas divide whole need a sharding level and gradients without codecs, the level is {layout.zero_level}")
    if (layout.zero_level or layout.overlap) and not layout.buckets and any(s.params for s in layout.stages):
        bad.append(f"sharding level {layout.zero_level} and overlapped sums need buckets, there are none")
    seen: set[tuple[int, str]] = set()
    for i, bucket in enumerate(layout.buckets):
        stage = layout.stages[bucket.stage] if 0 <= bucket.stage < len(layout.stages) else None
        for p in bucket.params:
            if stage is None or p not in stage.params or (bucket.stage, p) in seen:
                bad.append(f"bucket {i} names {p!r}, which stage {bucket.stage} does not hold, or holds in another bucket")
            elif sum(p in layout.held(family[0]).params for family in layout.families()) > 1:
                bad.append(f"bucket {i} names {p!r}, which several stages use")
            seen.add((bucket.stage, p))
    return bad
