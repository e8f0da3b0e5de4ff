"""What the stages of a training layout recompute: one rule for every layer, or the cheapest choice that keeps few enough bytes.

A region of a layout (`plan.recompute`) becomes a `Layer`; regions with equal layers form a class. A stage has so many regions of each
class, and every one of its micro-batches in flight keeps what its policy keeps, so the choice is how many regions of a class follow each point of
the class's frontier: an integer programme, whose workspace is that of the largest policy used. The first regions of a stage follow the policies
that keep least: their backward is the last to come, when fewer other values are held.
Cite: Korthikanti et al., MLSys 2023 (per-stage recomputation); Chen et al., 2016 (whole layers).
Left open by the papers: layers that a tensor-parallel split cuts into several segments; each part is a region of its own here.
Why a layer is no step graph (`graph.step_graph`): its frontier is exact and holds for any number of micro-batches in flight, where schedules are
searched for one number; and operators that write one storage in place run again together, where a step graph can only keep what they make.
Invariant: bytes saved add up to those asked for, counted in whole numbers. Cost: O(frontier points) integer programmes per class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import Infeasible
from ...graph.graph import OpNode
from ...plan.recompute import Region
from .captured import core_attention, layer_of_region
from .mix import Members, fractional_mix, leanest_bytes, whole_mix
from .problem import Layer, LayerPolicy, policy_of
from .rules import useful_policy
from .selective import frontier

__all__ = ["Chosen", "RegionChooser"]

MAX_FRONTIER_POINTS = 16  # of one class of layers, in memory and time, that the choice over all layers may take
Names = dict[tuple[str, str], tuple[str, ...]]


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
        counts = []
        for c in self.classes:
            core = {*core_attention([call.node for call in c.members[0][0].calls])}
            operators = {o.name for o in c.layer.operators}
            policy = useful_policy(c.layer, operators & core if name == "selective" else operators)
            counts.append([(policy if policy.kept_bytes < c.whole.kept_bytes else c.whole, len(c.members))])
        return self._chosen(counts)

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
        least_s = sum(x * p.time_s for c, mine in zip(self.classes, bound, strict=True) for x, p in zip(mine, c.points, strict=True))
        return self._chosen([list(zip(c.points, mine, strict=True)) for c, mine in zip(self.classes, counts, strict=True)], least_s)

    def most_saved(self) -> Chosen:
        """The choice that keeps least."""
        self._points()
        return self._chosen([[(c.points[-1], len(c.members))] for c in self.classes])

    def _chosen(self, counts: Sequence[Sequence[tuple[LayerPolicy, int]]], bound_s: float = float("inf")) -> Chosen:
        """By class, how many regions follow each policy. The last ones, which keep least, are those of the first regions."""
        again: Names = {}
        saved = workspace = 0
        time_s = 0.0
        for c, mine in zip(self.classes, counts, strict=True):
            policies = [policy for policy, count in reversed(mine) for _ in range(count)]
            for (region, own), policy in zip(c.members, policies, strict=True):
                if policy.recompute:
                    again[region.segment, region.layer] = tuple(own[n] for n in policy.recompute)
            for policy, count in mine:
                saved += count * (c.whole.kept_bytes - policy.kept_bytes)
                workspace = max(workspace, policy.workspace_bytes if count else 0)
                time_s += count * policy.time_s
        return Chosen(again=again, saved_bytes=saved, workspace_bytes=workspace, time_s=time_s, bound_s=min(bound_s, time_s))

    def _points(self) -> None:
        """The frontier of every class; where it has more points than are asked for, the leanest rule ends it."""
        for c in self.classes:
            if not c.points:
                points = frontier(c.layer, points=MAX_FRONTIER_POINTS)
                full = useful_policy(c.layer, {o.name for o in c.layer.operators})
                c.points = self.frontiers[self._shapes[id(c)]] = (*points, full) if full.kept_bytes < points[-1].kept_bytes else points
