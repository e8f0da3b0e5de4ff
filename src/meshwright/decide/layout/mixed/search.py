"""The search: candidates of all methods, evaluated in closed form, the best simulated, the best of those refined, bounded, ranked.

Cite: see `grid`, `interop`, `perlayer`, `fleet`. Left open by all: how good the answer is. Our answer: two lower bounds and the gaps to them.
Invariant: whoever wins was simulated, fits every device's memory, and keeps every constraint; every loser says why it lost.
Cost: O(layers) per candidate in closed form; SIMULATED event simulations and those of the refined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from ....cite import Cite
from ....errors import Infeasible, UsageError
from ....layer_profile import Entry
from ....layer_table import LayerChoice
from ..grid import CITE as GRID_CITE
from ..profiled.predict import ProfilePrediction, predict
from . import fleet, interop, perlayer
from .bounds import LayoutBounds, layout_bounds
from .candidate import Candidate, Estimate, Problem
from .fleet import fleet_candidates
from .grid import grid_candidates
from .proposals import alpa_candidates, with_best_choices
from .refine import refined

__all__ = ["CITES", "Demands", "Found", "Judged", "METHODS", "search_mixed", "uniform_choices"]

SIMULATED = 50
REFINED = 5
CHOSEN = 24  # degrees and splits whose layers are chosen one by one
WITH_TENSOR = 12  # candidates whose layers may also choose half the tensor degree
METHODS = ("grid", "inter-operator", "per-layer", "mixed")
CITES: dict[str, Cite] = {"grid": GRID_CITE, "inter-operator": interop.CITE, "per-layer": perlayer.CITE, "mixed": fleet.CITE}
Objective = Literal["time", "cost", "energy"]


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Prices per device and hour, watts per device, by kind of device. `budget`: the most a step may cost; `samples_per_s`: the least throughput."""

    objective: Objective = "time"
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    watts: Mapping[str, float] = field(default_factory=dict)
    budget: float = 0.0
    samples_per_s: float = 0.0

    def require(self, devices: Iterable[str]) -> None:
        """Raises: UsageError naming every kind of device that lacks a price or a power the objective needs, or a demand below zero."""
        for option, demand in (("budget", self.budget), ("min-throughput", self.samples_per_s)):
            if not demand >= 0:
                raise UsageError(f"{demand:g} is not >= 0", where=f"--{option}", hint="0 asks for nothing")
        for needed, table, option in (
            (self.objective == "cost" or self.budget > 0, self.price_per_hour, "price"),
            (self.objective == "energy", self.watts, "power"),
        ):
            missing = sorted(set(devices) - set(table)) if needed else []
            if missing:
                raise UsageError(f"no {option} of {', '.join(missing)}", where=f"--{option}", hint=f"give --{option} {missing[0]}=NUMBER")
        for name, table in (("price", self.price_per_hour), ("power", self.watts)):
            if any(not v >= 0 for v in table.values()):
                raise UsageError(f"a {name} is not >= 0", where=f"--{name}")

    def cost(self, candidate: Candidate, time_s: float) -> float:
        return sum(self.price_per_hour.get(r.device, 0.0) * r.tensor for s in candidate.layout.stages for r in s.replicas) * time_s / 3600

    def joules(self, candidate: Candidate, time_s: float) -> float:
        return sum(self.watts.get(r.device, 0.0) * r.tensor for s in candidate.layout.stages for r in s.replicas) * time_s

    def value(self, candidate: Candidate, time_s: float) -> float:
        if self.objective == "cost":
            return self.cost(candidate, time_s)
        return self.joules(candidate, time_s) if self.objective == "energy" else time_s

    def broken(self, candidate: Candidate, time_s: float) -> str:
        """The constraint that a step of that time breaks, or nothing."""
        if self.budget > 0 and self.cost(candidate, time_s) > self.budget:
            return f"a step costs {self.cost(candidate, time_s):.6g}, the budget is {self.budget:.6g}"
        rate = candidate.layout.global_batch / time_s
        if self.samples_per_s > 0 and rate < self.samples_per_s:
            return f"{rate:.6g} samples/s, at least {self.samples_per_s:.6g} wanted"
        return ""


@dataclass(frozen=True)
class Judged:
    """`prediction` is None where a candidate was not simulated; `why` says why it is not the winner."""

    candidate: Candidate
    estimate: Estimate
    prediction: ProfilePrediction | None = None
    why: str = ""

    @property
    def time_s(self) -> float:
        return self.prediction.time_s if self.prediction is not None else self.estimate.time_s


@dataclass(frozen=True, kw_only=True)
class Found:
    """`ranked`: simulated ones, best first. `counts`: candidates proposed by method, that fit, simulated, refined."""

    ranked: tuple[Judged, ...]
    others: tuple[Judged, ...]
    bounds: LayoutBounds
    counts: Mapping[str, int]

    @property
    def best(self) -> Judged:
        return self.ranked[0]


def search_mixed(
    problem: Problem, demands: Demands | None = None, *, methods: Iterable[str] = METHODS, simulated: int = SIMULATED, refine: int = REFINED
) -> Found:
    """Raises: Infeasible with the tightest limit and the nearest change; UsageError for unknown methods, missing prices or powers."""
    demands, methods = demands or Demands(), tuple(methods)
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        raise UsageError(f"there is no method {unknown[0]!r}", where="--methods", hint=f"there are: {', '.join(METHODS)}")
    demands.require({p.kind.name for p in problem.pools})
    seen: dict[tuple[object, ...], Judged] = {}
    counts: dict[str, int] = {}
    for c in _proposed(problem, demands, methods):
        counts[c.source] = counts.get(c.source, 0) + 1
        if c.identity not in seen:
            seen[c.identity] = Judged(c, problem.estimate(c))
    if not seen:
        raise Infeasible("no layout of these devices divides the global batch", hint="another global batch, micro-batch or number of devices")
    if "per-layer" in methods:
        for j in _chosen_per_layer(problem, list(seen.values())):
            counts[j.candidate.source] = counts.get(j.candidate.source, 0) + 1
            seen.setdefault(j.candidate.identity, j)
    fitting = [j for j in seen.values() if j.estimate.over_bytes <= 0]
    if not fitting:
        raise _too_small(problem, list(seen.values()))
    # Those that keep the constraints by the closed form go before those that do not: these are for naming the nearest.
    fitting.sort(
        key=lambda j: (
            bool(demands.broken(j.candidate, j.estimate.time_s)), demands.value(j.candidate, j.estimate.time_s), j.candidate.layout.name,
        )
    )  # fmt: skip
    ranked = _simulate(problem, fitting[:simulated])
    ranked += _refined(problem, demands, ranked[:], refine)
    kept = _keeping(demands, ranked)
    best = kept[0]
    ranked = [best, *(_with_why(j, best, demands) for j in kept[1:])]
    simulated_ids = {j.candidate.identity for j in ranked}
    others = [_left_out(j, simulated) for j in seen.values() if j.candidate.identity not in simulated_ids]
    numbers = {**counts, "candidates": len(seen), "fitting": len(fitting), "simulated": len(ranked)}
    return Found(ranked=tuple(ranked), others=tuple(others), bounds=layout_bounds(problem, best.candidate), counts=numbers)


# ---- candidates --------------------------------------------------------------------------------------------------------
def _proposed(problem: Problem, demands: Demands, methods: tuple[str, ...]) -> Iterable[Candidate]:
    """Where time is not all that counts, fewer devices of a kind are tried too (halves, down to one)."""
    found: list[Iterable[Candidate]] = []
    for pool in problem.pools:
        sizes = [pool.kind.devices]
        while sizes[-1] > 1 and (demands.objective != "time" or demands.budget > 0):
            sizes.append(sizes[-1] // 2)
        for devices in sizes:
            if "grid" in methods:
                found.append(grid_candidates(problem, pool, devices))
        if "inter-operator" in methods:
            found.append(alpa_candidates(problem, pool, pool.kind.devices))
    if "mixed" in methods and len(problem.pools) > 1:
        found.append(fleet_candidates(problem))
    return chain.from_iterable(found)


def _chosen_per_layer(problem: Problem, judged: list[Judged]) -> Iterable[Judged]:
    """For the most promising degrees, whether they fit or not: the best choice of every layer."""
    best: dict[tuple[object, ...], Judged] = {}
    for j in judged:
        layout = j.candidate.layout
        key = (tuple((s.layers, s.replicas[0]) for s in layout.stages), layout.microbatch, layout.microbatches)
        if key not in best or j.estimate.time_s < best[key].estimate.time_s:
            best[key] = j
    for number, j in enumerate(sorted(best.values(), key=lambda j: j.estimate.time_s)[:CHOSEN]):
        levels = {c.sharding for c in j.candidate.choices}
        choices = [c for c in problem.choices if c.sharding in levels or (c.sharding == 1 and j.candidate.layout.data > 1)]
        if number < WITH_TENSOR:
            choices += _half_degrees(problem, j.candidate)
        made = with_best_choices(problem, j.candidate, choices, "per-layer")
        if made is not None:
            yield Judged(made, problem.estimate(made))


def _half_degrees(problem: Problem, c: Candidate) -> list[LayerChoice]:
    """Half the tensor degree inside each group of ranks, the micro-batch's samples divided in two, where table and samples allow it everywhere."""
    layout = c.layout
    replicas = {r for s in layout.stages for r in s.replicas}
    halves = {Entry(r.device, layout.microbatch // 2, r.tensor // 2) for r in replicas}
    degrees = {r.tensor for r in replicas}
    if layout.microbatch % 2 or len(degrees) > 1 or max(degrees) < 2 or any(e not in problem.table.rows for e in halves):
        return []
    levels = {x.sharding for x in c.choices}
    return [LayerChoice(x.recompute, x.sharding, max(degrees) // 2) for x in problem.choices if x.sharding in levels and not x.tensor]


# ---- judging -----------------------------------------------------------------------------------------------------------
def _simulate(problem: Problem, judged: Iterable[Judged]) -> list[Judged]:
    found = []
    for j in judged:
        predicted = predict(problem.profile(j.candidate), j.candidate.layout, problem.network, problem.runtime, bars=False, shapes=problem.shapes)
        if _fits(problem, j.candidate, predicted):
            found.append(Judged(j.candidate, j.estimate, predicted))
    return found


def _fits(problem: Problem, candidate: Candidate, predicted: ProfilePrediction) -> bool:
    """The simulator's memory is the last word; it gives one peak per stage, so stages of several kinds keep the closed form's verdict."""
    for stage, peak in zip(candidate.layout.stages, predicted.memory_peak_bytes, strict=True):
        limits = [limit for r in stage.replicas if (limit := problem.pool(r).memory_bytes)]
        if limits and peak > min(limits) and len({r.device for r in stage.replicas}) == 1:
            return False
    return True


def _refined(problem: Problem, demands: Demands, judged: list[Judged], refine: int) -> list[Judged]:
    def value(c: Candidate) -> float:
        e = problem.estimate(c)
        return demands.value(c, e.time_s) if e.over_bytes <= 0 else float("inf")

    found: list[Judged] = []
    for j in sorted(judged, key=lambda j: demands.value(j.candidate, j.time_s))[:refine]:
        better = refined(problem, j.candidate, value)
        if better:
            found += _simulate(problem, [Judged(better[-1], problem.estimate(better[-1]))])
    return found


def _keeping(demands: Demands, ranked: list[Judged]) -> list[Judged]:
    """Those that keep the constraints, best first. Raises: Infeasible with the nearest."""
    good = [j for j in ranked if not demands.broken(j.candidate, j.time_s)]
    if good:
        return sorted(good, key=lambda j: (demands.value(j.candidate, j.time_s), j.candidate.layout.name))
    if not ranked:
        raise Infeasible("no candidate fits in simulation", hint="more memory per device, or more devices")
    near = min(ranked, key=lambda j: (demands.cost(j.candidate, j.time_s) if demands.budget else -j.candidate.layout.global_batch / j.time_s))
    cost, rate = demands.cost(near.candidate, near.time_s), near.candidate.layout.global_batch / near.time_s
    raise Infeasible(
        f"no layout keeps the constraints; nearest: {near.candidate.layout.name}, {demands.broken(near.candidate, near.time_s)}",
        hint=f"a budget of {cost:.6g} per step" if demands.budget and cost > demands.budget else f"a throughput of {rate:.6g} samples/s",
        data={"layout": near.candidate.layout.name, "time_s": near.time_s, "cost": cost, "samples_per_s": rate},
    )


def _too_small(problem: Problem, judged: list[Judged]) -> Infeasible:
    near = min(judged, key=lambda j: (j.estimate.over_bytes, j.estimate.time_s))
    e, layout = near.estimate, near.candidate.layout
    replica = layout.stages[e.fullest].replicas[0]
    limit = problem.pool(replica).memory_bytes
    need = limit + e.over_bytes
    return Infeasible(
        f"no layout fits: the smallest, {layout.name}, needs {need} bytes on a {replica.device} of stage {e.fullest}, which has {limit}",
        where=f"memory of {replica.device}", hint=f"devices with {need} bytes, or more of them, or a smaller micro-batch",
        data={"layout": layout.name, "stage": e.fullest, "device": replica.device, "needed_bytes": need, "limit_bytes": limit},
    )  # fmt: skip


def _with_why(j: Judged, best: Judged, demands: Demands) -> Judged:
    slower = demands.value(j.candidate, j.time_s) / demands.value(best.candidate, best.time_s) - 1
    assert j.prediction is not None and best.prediction is not None
    reasons = {
        "computation": j.prediction.bound_s - best.prediction.bound_s,
        "pipeline bubble": (j.prediction.closed_form_s - j.prediction.bound_s) - (best.prediction.closed_form_s - best.prediction.bound_s),
        "gradients, update and messages": (j.time_s - j.prediction.closed_form_s) - (best.time_s - best.prediction.closed_form_s),
    }
    what = max(reasons, key=lambda k: reasons[k])
    return Judged(j.candidate, j.estimate, j.prediction, f"{slower:+.1%} {demands.objective}; most of it {what} ({reasons[what]:+.4g} s)")


def _left_out(j: Judged, simulated: int) -> Judged:
    if j.estimate.over_bytes > 0:
        return Judged(j.candidate, j.estimate, None, f"needs {j.estimate.over_bytes} bytes more than there are on stage {j.estimate.fullest}")
    return Judged(j.candidate, j.estimate, None, f"not simulated: closed form {j.estimate.time_s:.6g} s is not among the best {simulated}")


def uniform_choices() -> tuple[LayerChoice, ...]:
    """Every recomputation at every sharding level, the fastest first."""
    from ....layer_table import RECOMPUTE

    return tuple(LayerChoice(r, z) for z in range(4) for r in RECOMPUTE)
