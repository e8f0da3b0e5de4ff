"""What the stages of a training layout recompute: one rule for every layer, or the cheapest choice that keeps few enough bytes.

A region of a layout (`plan.recompute`) becomes a `Layer`; regions with equal layers form a class. A stage has so many regions of each
class, and every one of its micro-batches in flight keeps what its policy keeps, so the choice is how many regions of a class follow each point of
the class's frontier: an integer programme, whose workspace is that of the largest policy used. The first regions of a stage follow the policies
that keep least: their backward is the last to come, when fewer other values are held.
Cite: Korthikanti et al., MLSys 2023 (per-stage recomputation); Chen et al., 2016 (whole layers).
Left open by the papers: layers that a tensor-parallel split cuts into several segments; each part is a region of its own here.
Invariant: bytes saved add up to those asked for, counted in whole numbers. Cost: O(frontier points) integer programmes per class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import Infeasible
from ...graph.graph import OpNode
from ...plan.recompute import Region
from .captured import core_attention
from .mix import Members, fractional_mix, leanest_bytes, whole_mix
from .problem import Layer, LayerPolicy, Operator, RecomputeProblem, policy_of
from .rules import useful
from .selective import frontier

__all__ = ["Chosen", "RegionChooser", "layer_of_region"]

POINTS = 16  # of a class's frontier
Names = dict[tuple[str, str], tuple[str, ...]]


def layer_of_region(region: Region, time_s: Callable[[OpNode], float]) -> Layer:
    """The calls that may run again, with the storages they touch; `time_s` prices one call's forward on one rank."""
    number: dict[int, int] = {}
    operators = []
    for call in region.calls:
        if call.may:
            reads, makes = (tuple(sorted(number.setdefault(s, len(number)) for s in sorted(part))) for part in (call.reads, call.makes))
            operators.append(Operator(name=call.node.name, time_s=time_s(call.node), reads=reads, makes=makes))
    sizes = tuple(region.size.get(s, 0) for s in number)
    return Layer(operators=tuple(operators), sizes=sizes, needed=tuple(sorted(number[s] for s in region.needed)))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`again`: calls by (segment, layer). `saved_bytes`: fewer kept per micro-batch; `time_s`: of running the calls again, per micro-batch."""

    again: Names
    saved_bytes: int
    workspace_bytes: int
    time_s: float
    bound_s: float


@dataclass
class _Class:
    layer: Layer
    members: list[tuple[Region, Mapping[str, str]]]  # with the names of its own calls by those of the first member
    whole: LayerPolicy
    points: tuple[LayerPolicy, ...] = ()


@dataclass
class RegionChooser:
    """Chooses for the regions of one stage. `frontiers` may be shared by choosers, so that equal layers are solved once."""

    regions: Sequence[Region]
    time_s: Callable[[OpNode, str], float]  # of a call in a segment
    frontiers: dict[Any, tuple[LayerPolicy, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes: list[_Class] = []
        known: dict[Any, _Class] = {}
        for region in self.regions:
            layer = layer_of_region(region, lambda n, key=region.segment: self.time_s(n, key))  # type: ignore[misc]
            names = [o.name for o in layer.operators]
            shape = (tuple((o.time_s, o.reads, o.makes) for o in layer.operators), layer.sizes, layer.needed)
            if shape not in known:
                known[shape] = _Class(layer, [], policy_of(layer, ()))
                self.classes.append(known[shape])
            first = [o.name for o in known[shape].layer.operators]
            known[shape].members.append((region, dict(zip(first, names, strict=True))))
        self._shapes = {id(c): (shape, tuple(o.name for o in c.layer.operators)) for shape, c in known.items()}
        for c in self.classes:
            c.points = self.frontiers.get(self._shapes[id(c)], ())

    def rule(self, name: str) -> Chosen:
        """`selective` (core attention) or `full` (every call whose result is not kept anyway) in every region."""
        again: Names = {}
        saved = workspace = 0
        time_s = 0.0
        for c in self.classes:
            core = {*core_attention([call.node for call in c.members[0][0].calls])}
            operators = {o.name for o in c.layer.operators}
            policy = _useful(c, operators & core if name == "selective" else operators)
            if policy.kept_bytes >= c.whole.kept_bytes:
                continue
            again |= {_place(r): tuple(own[n] for n in policy.recompute) for r, own in c.members}
            saved += len(c.members) * (c.whole.kept_bytes - policy.kept_bytes)
            workspace = max(workspace, policy.workspace_bytes)
            time_s += len(c.members) * policy.time_s
        return Chosen(again=again, saved_bytes=saved, workspace_bytes=workspace, time_s=time_s, bound_s=time_s)

    def cheapest(self, need_bytes: int, in_flight: int) -> Chosen:
        """The choice of least time that keeps `need_bytes` fewer with `in_flight` micro-batches, its workspace counted.

        Raises: Infeasible when no choice of this family does; `data["most_bytes"]` says how many it can.
        """
        self._points()
        members = [Members(count=len(c.members), policies=c.points, copies=in_flight) for c in self.classes]
        kept_bytes = sum(in_flight * len(c.members) * c.whole.kept_bytes for c in self.classes)
        most = kept_bytes - leanest_bytes(members)
        if most < need_bytes:
            raise Infeasible(
                f"recomputing saves at most {most} of {need_bytes} bytes",
                hint="more memory, smaller micro-batches, or another layout", data={"most_bytes": most, "needed_bytes": need_bytes},
            )  # fmt: skip
        counts = whole_mix(members, kept_bytes - need_bytes)
        bound = fractional_mix(members, kept_bytes - need_bytes)
        again: Names = {}
        saved = workspace = 0
        time_s = bound_s = 0.0
        for c, mine, least in zip(self.classes, counts, bound, strict=True):
            order = [i for i in reversed(range(len(c.points))) for _ in range(mine[i])]
            for (region, own), i in zip(c.members, order, strict=True):
                if c.points[i].recompute:
                    again[_place(region)] = tuple(own[n] for n in c.points[i].recompute)
                saved += c.whole.kept_bytes - c.points[i].kept_bytes
                workspace = max(workspace, c.points[i].workspace_bytes)
                time_s += c.points[i].time_s
            bound_s += sum(x * p.time_s for x, p in zip(least, c.points, strict=True))
        return Chosen(again=again, saved_bytes=saved, workspace_bytes=workspace, time_s=time_s, bound_s=min(bound_s, time_s))

    def most_saved(self) -> Chosen:
        """The choice that keeps least."""
        self._points()
        again: Names = {}
        saved = workspace = 0
        time_s = 0.0
        for c in self.classes:
            leanest = c.points[-1]
            again |= {_place(r): tuple(own[n] for n in leanest.recompute) for r, own in c.members if leanest.recompute}
            saved += len(c.members) * (c.whole.kept_bytes - leanest.kept_bytes)
            workspace = max(workspace, leanest.workspace_bytes)
            time_s += len(c.members) * leanest.time_s
        return Chosen(again=again, saved_bytes=saved, workspace_bytes=workspace, time_s=time_s, bound_s=time_s)

    def _points(self) -> None:
        """The frontier of every class; where it has more points than are asked for, the leanest rule ends it."""
        for c in self.classes:
            if not c.points:
                points = frontier(c.layer, points=POINTS)
                full = _useful(c, {o.name for o in c.layer.operators})
                c.points = self.frontiers[self._shapes[id(c)]] = (*points, full) if full.kept_bytes < points[-1].kept_bytes else points


def _useful(c: _Class, names: set[str]) -> LayerPolicy:
    return policy_of(c.layer, useful(RecomputeProblem(layer=c.layer, stages=()), names))


def _place(region: Region) -> tuple[str, str]:
    return region.segment, region.layer
