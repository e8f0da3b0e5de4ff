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

from ..cost import Cost, Priced
from ..errors import Unsupported
from ..fabric.fabric import Device
from ..graph.graph import OpGraph, OpNode, Work
from .plan import GradientBucket, Segment, TrainingLayout
from .recompute import made_again_bytes
from .shards import local_value
from .sizes import backward_works

__all__ = ["on_schedule", "split_prices", "weight_roles"]

Placement = tuple[tuple[int, ...], ...]


def on_schedule(
    layout: TrainingLayout, graph: OpGraph, *, name: str, pipeline: int, placement: Placement, copy_of: Sequence[int] = (), split: bool = False
) -> TrainingLayout:
    """`layout` has as many pipeline indices as stages; the result has `pipeline` of them. `placement`, `copy_of`, `split`: see TrainingLayout.

    Raises: Unsupported where a stage runs by the plan of its step graph and backward is split, and where copies of a stage would not be on ranks
    that hold the same stages.
    """
    plain = len(placement) == 1 and placement[0] == tuple(range(pipeline))
    made = replace(
        layout, schedule=name, pipeline=pipeline, placement=() if plain else placement,
        copy_of=tuple(copy_of) if len(placement) > 1 else (), split_backward=split,
    )  # fmt: skip
    if split:
        known, again = _Known(graph, layout), made_again_bytes(graph, layout)
        made = replace(made, segments=tuple(_split(known, s, again[s.key]) for s in layout.segments))
    if plain:
        return made
    _require_families(made)
    routes = [_routes(layout, where) for where in placement]
    if any(r != routes[0] for r in routes):
        raise Unsupported("the copies of a stage send their values to different stages", where=f"schedule {name}", hint="another schedule")
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
    """Prices of whole backwards divided between `I` and `W` as their rooflines are, where the layout's backward is split and the parts have none."""
    found = dict(table)
    for s in layout.segments if layout.split_backward else ():
        if f"{s.key}|I" in found:
            continue
        whole = found.get(f"{s.key}|B")
        parts = {name: cost.roofline(work, device).time_s for name, work in backward_works(s, split=True)}
        total = sum(parts.values())
        if whole is not None and total:
            for name, time_s in parts.items():
                found[f"{s.key}|{name}"] = Priced(whole.time_s * time_s / total, "interpolated", whole.cpu_s * time_s / total)
    return found


# ---- split backward ----------------------------------------------------------------------------------------------------
class _Known:
    """What all segments of a layout ask of it and of its graph."""

    def __init__(self, graph: OpGraph, layout: TrainingLayout) -> None:
        self.tensor, self.values = layout.tensor, {v.name: v for v in layout.values}
        self.node_of = {n.name: n for n in graph.nodes}
        self.trained = {f"param:{p.name}" for p in graph.parameters if p.trainable}

    def nodes(self, s: Segment) -> list[OpNode]:
        return [self.node_of[n] for n in s.nodes if n in self.node_of]

    def roles(self, s: Segment) -> dict[str, bool]:
        return _roles(self.nodes(s), {v for v in s.reads if v in self.values and self.values[v].differentiable}, self.trained)

    def largest_part(self, value: str) -> int:
        """Bytes of the largest part of a value that a tensor-parallel rank holds."""
        return max(local_value(self.values[value], t, self.tensor).size_bytes for t in range(self.tensor))


def _split(known: _Known, s: Segment, again_bytes: int) -> Segment:
    """`again_bytes`: what its calls make again for backward."""
    if s.step is not None:
        raise Unsupported(
            "the plan of a step graph orders a whole backward, and this schedule's is in two parts", where=f"segment {s.key}",
            hint="another --recompute, or a schedule with whole backward",
        )  # fmt: skip
    nodes, roles = known.nodes(s), known.roles(s)
    part = sum((n.backward if roles[n.name] else _half(n.backward) for n in nodes if n.name in roles), Work())
    whole = sum((n.backward for n in nodes), Work())
    own = {
        n.name: sum(_elements(o.shape) * _BYTES.get(o.dtype, 4) for o in n.outputs)
        for n in nodes if n.name in roles and (not roles[n.name] or n.name in s.writes)
    }  # fmt: skip
    # Gradients of partial sums are whole on every rank; so are those of values to which the segment adds a bias first.
    summed, left = sum(own.pop(v, 0) for v in s.sum_writes), sum(own.values())
    if s.split and known.tensor > 1:
        shares = s.shares or (1,) * known.tensor
        left = -(-left * max(shares) // sum(shares))
    left += summed + sum(known.largest_part(x.value) for x in s.row_biases if known.tensor > 1 and f"param:{x.bias}" in known.trained)
    return replace(s, weight_backward=_fraction(s.backward, part, whole), left_bytes=left + again_bytes)


def weight_roles(graph: OpGraph, layout: TrainingLayout) -> dict[str, bool]:
    """Operators whose backward has work for `W`: True where all of it is for parameters, False where it is for what a segment reads as well."""
    known, found = _Known(graph, layout), dict[str, bool]()
    for s in layout.segments:
        found |= known.roles(s)
    return found


def _roles(nodes: Sequence[OpNode], reads: set[str], trained: set[str]) -> dict[str, bool]:
    spine, beside = set(reads), set[str]()  # values that depend on a read; values beside that, which depend on parameters
    found: dict[str, bool] = {}
    for n in nodes:
        own = any(v in trained or v in beside for v in n.inputs)
        if any(v in spine for v in n.inputs):
            spine.add(n.name)
            if own:
                found[n.name] = False
        elif own:
            beside.add(n.name)
            found[n.name] = True
    return found


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
