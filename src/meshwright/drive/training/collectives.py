"""The collectives that a training step calls: planned once per group of devices, size and purpose, and remembered."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ...cost import Transport
from ...decide.collective import STRATEGIES, CollectivePlan, CollectiveProblem, CollectiveStrategy, Ring, auto, strategy
from ...errors import TimeLimit, Unsupported
from ...fabric.fabric import Fabric
from ...kernels.effort import look
from ...program.calls import Callee
from ...program.program import Program
from ..collective.callee import bindable

__all__ = ["MAX_PLANNING_WORK_S", "PURPOSES", "SCOUTS", "CollectivePlanner", "Planned", "rank_order_ring"]

PURPOSES = ("gradient", "weights", "tensor", "tied", "norm")

# What layouts are judged with: the first of the list, most promising first. Planning a call takes milliseconds with these, seconds with some others,
# and a search over layouts makes hundreds; the winner's calls are tried with all.
SCOUTS = STRATEGIES[:2]
# Counted work, in seconds of a quiet core, of one strategy's plan of a call that is tried in place: some programs could work for minutes on each.
MAX_PLANNING_WORK_S = 2.0


@dataclass(frozen=True)
class Planned:
    """A collective, how long it takes alone on the fabric, and what else was tried."""

    problem: CollectiveProblem
    plan: CollectivePlan
    time_s: float
    tried: tuple[tuple[str, float | None, str], ...]  # (strategy, seconds alone, why not)


@dataclass
class CollectivePlanner:
    """Plans collectives (all-reduces, reduce-scatters, all-gathers) over groups of devices of one fabric. `strategy`: a name for all, or `auto`.

    `each_s`: counted work of one strategy's plan. `chosen[purpose]` overrides the strategy for one purpose ("gradient", "tensor", "tied");
    `for_placement` gives the callable that lowering wants for a placement of ranks on devices.
    """

    fabric: Fabric
    transport: Transport
    strategy: str = "auto"
    seed: int = 0
    reproducible: str = "run"  # of all its sums
    each_s: float = float("inf")
    chosen: dict[str, str] = field(default_factory=dict)
    cache: dict[tuple[str, tuple[str, ...], int, str], Planned] = field(default_factory=dict)
    by_hash: dict[str, tuple[str, Planned]] = field(default_factory=dict)
    bound: dict[int, Callee] = field(default_factory=dict)

    def with_choice(self, purpose: str, strategy: str) -> CollectivePlanner:
        """The same planner (caches are shared) with another strategy for one purpose, to be tried in place."""
        return replace(self, chosen={**self.chosen, purpose: strategy}, each_s=MAX_PLANNING_WORK_S)

    def for_placement(self, placement: tuple[str, ...], short: Collection[str] = ()) -> Any:
        """`short`: purposes whose calls are the ring in rank order, which has fewest steps."""
        found: dict[tuple[str, tuple[int, ...], int, str], Callee] = {}  # lowering asks the same for every buffer and call

        def plan(purpose: str, ranks: tuple[int, ...], size_bytes: int, op: str = "all-reduce") -> Callee:
            key = (purpose, ranks, size_bytes, op)
            if key not in found:
                order = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
                only = rank_order_ring(len(ranks), order) if purpose in short and self.strategy == "auto" and self.reproducible == "run" else None
                found[key] = self.collective(purpose, tuple(placement[r] for r in ranks), size_bytes, op, only=only)
            return found[key]

        return plan

    def collective(
        self, purpose: str, devices: tuple[str, ...], size_bytes: int, op: str = "all-reduce", *, only: CollectiveStrategy | None = None
    ) -> Callee:
        """`only`: this strategy and no other."""
        unit = 4 if op == "all-reduce" else 4 * len(devices)  # of the others every rank has a part of whole elements
        size = -(-max(size_bytes, unit) // unit) * unit
        strategy = repr(only) if only is not None else self.chosen.get(purpose, self.strategy)
        key = (op, devices, size, strategy)
        if key not in self.cache:
            look()
            self.cache[key] = self._plan(op, devices, size, strategy, only)
        planned = self.cache[key]
        callee = self._bound(planned.plan.program)
        self.by_hash.setdefault(callee.name, (purpose, planned))
        return callee

    def _bound(self, program: Program) -> Callee:
        """Lowering asks for the same few programs at every activation and message of a step."""
        from ...io.plan.plan import program_hash

        if id(program) not in self.bound:
            self.bound[id(program)] = bindable(program_hash(program), program)
        return self.bound[id(program)]

    def _plan(self, op: str, devices: tuple[str, ...], size: int, name: str, only: CollectiveStrategy | None) -> Planned:
        """Raises: Unsupported where the strategy named cannot be called from a step: it has not the operation, or adds in switches."""
        problem = CollectiveProblem(
            fabric=self.fabric, op=op, ranks=devices, size_bytes=size, seed=self.seed, transport=self.transport, reproducible=self.reproducible,
        )  # fmt: skip
        folds = STRATEGIES if self.reproducible == "tree" else ()  # where the bits are asked for, whoever sums by that tree is tried
        scouts = (*SCOUTS, *(k for k in folds if any(v.sums_by_tree(problem) for v in called_variants((k,), problem))))
        kinds = scouts if name == "auto" or only is not None else (strategy(name, where="--collective"),)
        candidates = [only] if only is not None else called_variants(kinds, problem)
        if not candidates:
            raise Unsupported(f"no program calls {name}: it has no schedule of {op} whose chunks are explicit and whose actors are the ranks alone")
        try:
            ranked = auto(problem, candidates=candidates, each_s=min(self.each_s, MAX_PLANNING_WORK_S))
        except TimeLimit:  # of the only one that may be called: as long as it takes
            ranked = auto(problem, candidates=candidates, each_s=self.each_s)
        best = ranked[0]
        assert best.plan is not None and best.time_s is not None, "auto raises when nothing has a plan"
        return Planned(problem, best.plan, best.time_s, tuple((r.strategy, r.time_s, r.why) for r in ranked))

    def decisions(self, callees: dict[str, Program]) -> dict[str, Any]:
        """Plan entries for the collectives that a step calls, by purpose and group."""
        found: dict[str, Any] = {}
        for name in callees:
            purpose, planned = self.by_hash[name]
            key = f"collective:{purpose}"
            entry = {
                "strategy": planned.plan.strategy,
                "options": dict(planned.plan.options),
                "program": name,
                "alone_s": planned.time_s,
                "bound_s": planned.plan.bound.value if planned.plan.bound is not None else None,
                "tried": [{"strategy": s, "alone_s": t, "why": w} for s, t, w in planned.tried],
            }
            if key in found:
                found[key]["programs"].append(entry)
            else:
                found[key] = {"strategy": planned.plan.strategy, "options": dict(planned.plan.options), "why": "", "cite": [], "programs": [entry]}
        for entry in found.values():
            names = sorted({p["strategy"] for p in entry["programs"]})
            entry["strategy"] = "+".join(names)
            several = any(len(p["tried"]) > 1 for p in entry["programs"])
            entry["why"] = "shortest simulated step of the strategies tried in place" if several else "the only strategy tried"
        return found


def rank_order_ring(ranks: int, order: tuple[int, ...] = (), *, folded: bool = False) -> CollectiveStrategy:
    return Ring(rings=1, slices=1, order=order or tuple(range(ranks)), folded=folded)


def called_variants(kinds: Iterable[type[CollectiveStrategy]], problem: CollectiveProblem) -> list[CollectiveStrategy]:
    """What a step can call: their programs are written into the step's."""
    return [v for kind in kinds for v in kind.variants(problem, "inlined")]
