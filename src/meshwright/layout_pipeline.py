"""A layout with one stage per rank put on a pipeline schedule: several stages per rank, copies of them, backward in two parts.

A rank that holds several stages holds a value once: a stage that reads what an earlier stage of the same rank made or received gets no message for
it, and gradients of all its readers there add up in one buffer. So every rank receives a value once, and sends its gradient once.

What `W` is of a segment's backward, and what is kept for it, follows from the operators: on the way from a differentiable read to the results an
operator with trained parameters does about half of its backward work for each; beside that way all of it is for parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from .cost import Cost, Priced
from .errors import Unsupported
from .fabric import Device
from .graph import OpGraph, OpNode, Work
from .layout_sizes import backward_works
from .plan import GradientBucket, Segment, TrainingLayout

__all__ = ["on_schedule", "split_prices", "weight_part"]

Placement = tuple[tuple[int, ...], ...]


def on_schedule(
    layout: TrainingLayout, graph: OpGraph, *, name: str, pipeline: int, placement: Placement, copy_of: Sequence[int] = (), split: bool = False
) -> TrainingLayout:
    """`layout` has as many pipeline indices as stages; the result has `pipeline` of them. `placement`, `copy_of`, `split`: see TrainingLayout.

    Raises: Unsupported where calls run again or values are split along the sequence and backward is split, where copies of a stage would not be
    on ranks that hold the same stages, and where sharding levels would have to divide what copies hold.
    """
    plain = len(placement) == 1 and placement[0] == tuple(range(pipeline))
    made = replace(
        layout, schedule=name, pipeline=pipeline, placement=() if plain else placement,
        copy_of=tuple(copy_of) if len(placement) > 1 else (), split_backward=split,
    )  # fmt: skip
    if split:
        made = replace(made, segments=tuple(_split(graph, layout, s) for s in layout.segments))
    if plain:
        return made
    _require_families(made)
    routes = [_routes(layout, where) for where in placement]
    if any(r != routes[0] for r in routes):
        raise Unsupported("copies of the stages pass values on differently", where=f"schedule {name}", hint="another schedule")
    receives = routes[0]
    stages = []
    for s in layout.stages:
        sends = receives[s.index + 1] if s.index + 1 < len(receives) else ()
        stages.append(replace(s, receives=receives[s.index], sends=sends))
    made = replace(made, stages=tuple(stages))
    trained = {p.name for p in graph.parameters if p.trainable}
    return replace(made, buckets=_buckets(made, trained)) if made.buckets else made


def _require_families(layout: TrainingLayout) -> None:
    if len(layout.placement) < 2:
        return
    if layout.zero_level:
        raise Unsupported(
            f"sharding level {layout.zero_level} divides state among replicas, not among copies of a stage", where=f"schedule {layout.schedule}",
            hint="--zero 0, or a schedule with one copy of the stages",
        )  # fmt: skip
    for p in range(layout.pipeline):
        mates = set(layout.mates(p))
        for s, _ in layout.hosted(p):
            if {where[s] for where in layout.placement} != mates:
                raise Unsupported(
                    f"copies of stage {s} are on ranks that hold other stages too", where=f"schedule {layout.schedule}",
                    hint="a schedule whose copies of a stage share all their stages",
                )  # fmt: skip


def _routes(layout: TrainingLayout, where: Sequence[int]) -> list[tuple[str, ...]]:
    """Values that every stage receives from the one before it, when stage k is on rank `where[k]`."""
    maker = {v: s.stage for s in layout.segments for v in s.writes}
    readers: dict[str, set[int]] = {}
    for s in layout.segments:
        for v in s.reads:
            readers.setdefault(v, set()).add(s.stage)
    order = dict.fromkeys(v for s in layout.stages for v in (*s.receives, *s.sends))
    received: list[list[str]] = [[] for _ in layout.stages]
    for v in order:
        first, last = maker[v], max(readers.get(v, {maker[v]}))
        wanted = set(readers.get(v, ()))
        for k in range(last, first, -1):
            here = [j for j in range(first, k) if where[j] == where[k]]
            if k not in wanted:
                continue
            if here:
                wanted.add(here[0])  # which made or receives it
            else:
                wanted.add(k - 1)
                received[k].append(v)
    return [tuple(x) for x in received]


def _buckets(layout: TrainingLayout, trained: set[str]) -> tuple[GradientBucket, ...]:
    """Parameters that only stages of one rank share are no longer shared: they join the bucket that is complete last."""
    users = Counter(p for family in layout.families() for p in layout.held(family[0]).params)
    placed = {p for b in layout.buckets for p in b.params}
    found = list(layout.buckets)
    for stage in layout.stages:
        for p in stage.params:
            shared = any(p in other.params for other in layout.stages if other is not stage)
            if p not in trained or p in placed or users[p] > 1 or not shared:
                continue
            mine = [i for i, b in enumerate(found) if b.stage == stage.index]
            if mine:
                found[mine[-1]] = replace(found[mine[-1]], params=(*found[mine[-1]].params, p))
            else:
                found.append(GradientBucket(stage=stage.index, params=(p,)))
            placed.add(p)
    return tuple(found)


def split_prices(table: Mapping[str, Priced], layout: TrainingLayout, cost: Cost, device: Device) -> dict[str, Priced]:
    """Prices of whole backwards divided between `I` and `W` as their rooflines are, where the layout's backward is split."""
    found = dict(table)
    for s in layout.segments if layout.split_backward else ():
        whole = found.get(f"{s.key}|B")
        parts = {name: cost.roofline(work, device).time_s for name, work in backward_works(s, split=True)}
        total = sum(parts.values())
        if whole is not None and total:
            for name, time_s in parts.items():
                found[f"{s.key}|{name}"] = Priced(whole.time_s * time_s / total, "interpolated", whole.cpu_s * time_s / total)
    return found


# ---- split backward ----------------------------------------------------------------------------------------------------
def _split(graph: OpGraph, layout: TrainingLayout, s: Segment) -> Segment:
    if s.recompute or s.step is not None:
        raise Unsupported("calls that run again are needed in both parts of a split backward", where=f"segment {s.key}", hint="--recompute steps")
    if s.gathers or s.sequence:
        raise Unsupported(
            "values gathered along the sequence are needed in both parts of a split backward", where=f"segment {s.key}",
            hint="--sequence-parallel off, or a schedule with whole backward",
        )  # fmt: skip
    differentiable = {v.name for v in layout.values if v.differentiable}
    node_of = {n.name: n for n in graph.nodes}
    nodes = [node_of[n] for n in s.nodes if n in node_of]
    trained = {f"param:{p.name}" for p in graph.parameters if p.trainable}
    part, left = weight_part(nodes, {v for v in s.reads if v in differentiable}, trained, set(s.writes))
    whole = sum((n.backward for n in nodes), Work())
    if s.split and layout.tensor > 1:
        shares = s.shares or (1,) * layout.tensor
        left = -(-left * max(shares) // sum(shares))
    return replace(s, weight_backward=_fraction(s.backward, part, whole), left_bytes=left)


def weight_part(nodes: Sequence[OpNode], reads: set[str], trained: set[str], writes: set[str]) -> tuple[Work, int]:
    """(work left for `W`, bytes of gradients kept for it) of consecutive operators that read `reads` and give `writes`."""
    spine, beside = set(reads), set[str]()  # values that depend on a read; values beside that, which depend on parameters
    part, left = Work(), 0
    for n in nodes:
        on_spine, own = any(v in spine for v in n.inputs), any(v in trained or v in beside for v in n.inputs)
        size = sum(_elements(o.shape) * _BYTES.get(o.dtype, 4) for o in n.outputs)
        if on_spine:
            spine.add(n.name)
            part += _half(n.backward) if own else Work()
            left += size if own else 0
        elif own:
            beside.add(n.name)
            part += n.backward
            left += size if n.name in writes else 0
    return part, left


_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for d in shape:
        count *= d
    return count


def _half(w: Work) -> Work:
    return Work(flops=w.flops // 2, bytes_read=w.bytes_read // 2, bytes_written=w.bytes_written // 2, calls=w.calls // 2)


def _fraction(total: Work, part: Work, whole: Work) -> Work:
    """What `part` is of `whole`, of `total`."""

    def share(field: str) -> int:
        there = getattr(whole, field)
        return int(getattr(total, field)) * getattr(part, field) // there if there else 0

    return Work(flops=share("flops"), bytes_read=share("bytes_read"), bytes_written=share("bytes_written"), calls=share("calls"))
