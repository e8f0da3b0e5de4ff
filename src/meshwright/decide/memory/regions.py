"""What the stages of a training layout recompute: one rule for every layer, or the cheapest choice that keeps few enough bytes.

A region of a layout (`layout_recompute`) becomes a `Layer`; regions with equal layers form a class. A stage has so many regions of each
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
from ...graph import OpNode
from ...kernels.highs import require_optimal, solver, values
from ...layout_recompute import Region
from .captured import core_attention
from .problem import Layer, LayerPolicy, Operator, RecomputeProblem, policy_of
from .rules import useful
from .selective import frontier

__all__ = ["Chosen", "RegionChooser", "layer_of_region"]

POINTS = 16  # of a class's frontier
SCALE = 1e4
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
        self._require(need_bytes, in_flight)
        counts = self._solve(need_bytes, in_flight, integer=True)
        bound = self._solve(need_bytes, in_flight, integer=False)
        again: Names = {}
        saved = workspace = 0
        time_s = bound_s = 0.0
        for c, mine, least in zip(self.classes, counts, bound, strict=True):
            whole = [round(x) for x in mine]
            order = [i for i in reversed(range(len(c.points))) for _ in range(whole[i])]
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

    def _require(self, need_bytes: int, in_flight: int) -> None:
        best = 0
        for limit in sorted({p.workspace_bytes for c in self.classes for p in c.points}):
            saves = sum(
                len(c.members) * max([c.whole.kept_bytes - p.kept_bytes for p in c.points if p.workspace_bytes <= limit], default=0)
                for c in self.classes
            )
            best = max(best, saves * in_flight - limit)
        if best < need_bytes:
            raise Infeasible(
                f"recomputing saves at most {best} of {need_bytes} bytes",
                hint="more memory, smaller micro-batches, or another layout", data={"most_bytes": best, "needed_bytes": need_bytes},
            )  # fmt: skip

    def _solve(self, need_bytes: int, in_flight: int, *, integer: bool) -> list[list[float]]:
        """Columns: per class and point how many members follow it, then whether any does, then the workspace."""
        import highspy

        lp = solver(mip_rel_gap=0.0, mip_abs_gap=1e-9) if integer else solver()
        columns = [(c, p) for c in self.classes for p in c.points]
        n = len(columns)
        time_unit = (sum(len(c.members) * max(p.time_s for p in c.points) for c in self.classes) or 1.0) / SCALE
        byte_unit = (sum(len(c.members) * c.whole.kept_bytes for c in self.classes) or 1) * in_flight / SCALE
        for c, p in columns:
            lp.addVar(0.0, float(len(c.members)))
            lp.changeColCost(lp.getNumCol() - 1, p.time_s / time_unit)
        for _ in columns:
            lp.addVar(0.0, 1.0)
        lp.addVar(0.0, float("inf"))
        if integer:
            for column in range(2 * n):
                lp.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        at = 0
        for c in self.classes:
            lp.addRow(len(c.members), len(c.members), len(c.points), list(range(at, at + len(c.points))), [1.0] * len(c.points))
            at += len(c.points)
        for i, (c, p) in enumerate(columns):
            lp.addRow(0.0, float("inf"), 2, [i, n + i], [-1.0, float(len(c.members))])
            if p.workspace_bytes:
                lp.addRow(0.0, float("inf"), 2, [2 * n, n + i], [1.0, -p.workspace_bytes / byte_unit])
        saves = [in_flight * (c.whole.kept_bytes - p.kept_bytes) / byte_unit for c, p in columns]
        lp.addRow((need_bytes + 1e-6 * abs(need_bytes)) / byte_unit - 1e-9, float("inf"), n + 1, [*range(n), 2 * n], [*saves, -1.0])
        require_optimal(lp, what="choice of what the layers of a stage recompute")
        found = values(lp)[:n]
        result, at = [], 0
        for c in self.classes:
            result.append(found[at : at + len(c.points)])
            at += len(c.points)
        return result


def _useful(c: _Class, names: set[str]) -> LayerPolicy:
    return policy_of(c.layer, useful(RecomputeProblem(layer=c.layer, stages=()), names))


def _place(region: Region) -> tuple[str, str]:
    return region.segment, region.layer
