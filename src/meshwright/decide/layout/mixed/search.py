"""The search: candidates of all methods, evaluated in closed form, the best simulated, the best of those refined, bounded, ranked.

Cite: see `grid`, `interop`, `perlayer`, `fleet`. Left open by all: how good the answer is. Our answer: two lower bounds and the gaps to them.
Invariant: whoever wins was simulated, fits every device's memory, and keeps every constraint; every loser says why it lost.
Cost: O(layers) per candidate in closed form; MAX_SIMULATED event simulations and those of the refined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....errors import Infeasible
from ....kernels.effort import Budget, Cut
from ....kernels.stages import counted, innermost
from ....kernels.stages import stage as in_stage
from ....profile.layer_table import LayerChoice
from .. import strategies, strategy
from ..profiled.predict import ProfilePrediction, predict
from .bounds import LayoutBounds, layout_bounds
from .candidate import Candidate, Demands, Judged, LayersStrategy, Problem
from .refine import refined

__all__ = ["Demands", "Found", "Judged", "search_mixed", "uniform_choices"]

# Candidates simulated, best by the closed form first, and of these the fastest that are refined, unless other numbers are asked for.
MAX_SIMULATED = 50
MAX_REFINED = 5


@dataclass(frozen=True, kw_only=True)
class Found:
    """`ranked`: simulated ones, best first. `counts`: candidates proposed by method, that fit, simulated, refined."""

    ranked: tuple[Judged, ...]
    others: tuple[Judged, ...]
    bounds: LayoutBounds
    counts: Mapping[str, int]
    cut: Cut | None = None  # an interrupt ended the search

    @property
    def best(self) -> Judged:
        return self.ranked[0]


def require_methods(names: Iterable[str]) -> list[type[LayersStrategy]]:
    """The methods with these names. Raises: UnknownName."""
    return [strategy(m, "layers", where="--methods", what="method") for m in names]


def search_mixed(
    problem: Problem, demands: Demands | None = None, *, methods: Iterable[str] = (), simulated: int = MAX_SIMULATED, refine: int = MAX_REFINED
) -> Found:
    """`methods`: names of strategies for layers, by default all of ours.

    Raises: Infeasible with the tightest limit and the nearest change; UnknownName for a method, UsageError for missing prices or powers.
    """
    demands = demands or Demands()
    asked: list[LayersStrategy] = [kind() for kind in require_methods(methods) or strategies("layers")]
    demands.require({p.kind.name for p in problem.pools})
    seen: dict[tuple[object, ...], Judged] = {}
    counts: dict[str, int] = {}
    budget = Budget(simulated)
    with budget.net():
        for c in counted(_proposed(problem, demands, asked), "layouts by the closed form"):
            counts[c.source] = counts.get(c.source, 0) + 1
            if c.identity not in seen:
                seen[c.identity] = Judged(c, problem.estimate(c))
            if budget.late:
                break
    if not seen:
        raise Infeasible("no layout of these devices divides the global batch", hint="another global batch, micro-batch or number of devices")
    for refining in [x for x in asked if x.refines and not budget.late]:
        for c in (x for x in refining.plan(problem, demands, list(seen.values())) if x.layout.data % problem.table.experts == 0):
            counts[c.source] = counts.get(c.source, 0) + 1
            seen.setdefault(c.identity, Judged(c, problem.estimate(c)))
    fitting = [j for j in seen.values() if j.estimate.over_bytes <= 0]
    if not fitting:
        raise _too_small(problem, list(seen.values()))
    # Those that keep the constraints by the closed form go before those that do not: these are for naming the nearest.
    fitting.sort(
        key=lambda j: (
            bool(demands.broken(j.candidate, j.estimate.time_s)), demands.value(j.candidate, j.estimate.time_s), j.candidate.layout.name,
        )
    )  # fmt: skip
    with budget.net():  # what an interrupt ends
        ranked = _simulate(problem, fitting[:simulated], budget)
    # refined ones join the simulated: the simulator decides between them, so refining never makes worse
    ranked += _refined(problem, demands, ranked[:], refine) if not budget.late else []
    kept = _keeping(demands, ranked)
    best = kept[0]
    ranked = [best, *(_with_why(j, best, demands) for j in kept[1:])]
    simulated_ids = {j.candidate.identity for j in ranked}
    others = [_left_out(j, simulated) for j in seen.values() if j.candidate.identity not in simulated_ids]
    numbers = {**counts, "candidates": len(seen), "fitting": len(fitting), "simulated": len(ranked)}
    return Found(ranked=tuple(ranked), others=tuple(others), bounds=layout_bounds(problem, best.candidate), counts=numbers, cut=budget.cut)


# ---- candidates --------------------------------------------------------------------------------------------------------
def _proposed(problem: Problem, demands: Demands, asked: Sequence[LayersStrategy]) -> Iterable[Candidate]:
    """Every pool by itself, then kinds of device together."""
    def divided(found: Iterable[Candidate]) -> Iterable[Candidate]:
        return (c for c in found if c.layout.data % problem.table.experts == 0)

    for pool in problem.pools:
        for one_kind in [x for x in asked if not x.mixes and not x.refines]:
            yield from divided(one_kind.plan(replace(problem, pools=(pool,)), demands))
    for mixing in [x for x in asked if x.mixes]:
        yield from divided(mixing.plan(problem, demands))


# ---- judging -----------------------------------------------------------------------------------------------------------
@in_stage("simulated layouts")
def _simulate(problem: Problem, judged: Iterable[Judged], budget: Budget | None = None) -> list[Judged]:
    found: list[Judged] = []
    fastest_s = float("inf")
    for j in judged:
        if budget is not None and not budget.spend():
            break
        layout = j.candidate.layout
        orders = problem.orders(layout) if layout.schedule is not None else None
        if layout.schedule is not None and orders is None:
            continue  # too many actions for the event simulation
        predicted = predict(
            problem.profile(j.candidate), layout, problem.network, problem.runtime, bars=False, shapes=problem.shapes, orders=orders
        )  # fmt: skip
        if _fits(problem, j.candidate, predicted):
            found.append(Judged(j.candidate, j.estimate, predicted))
            if found[-1].time_s < fastest_s:
                fastest_s = found[-1].time_s
                innermost().best = f"{layout.name}, {fastest_s:.4g} s a step"
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
    known = {j.candidate.identity for j in judged}  # several candidates may be refined to one
    for j in sorted(judged, key=lambda j: demands.value(j.candidate, j.time_s))[:refine]:
        better = refined(problem, j.candidate, value)
        if better and better[-1].identity not in known:
            known.add(better[-1].identity)
            found += _simulate(problem, [Judged(better[-1], problem.estimate(better[-1]))])
    return found


def _keeping(demands: Demands, ranked: list[Judged]) -> list[Judged]:
    """Those that keep the constraints, best first. Raises: Infeasible with the nearest."""
    good = [j for j in ranked if not demands.broken(j.candidate, j.time_s)]
    if good:
        return sorted(good, key=lambda j: (demands.value(j.candidate, j.time_s), j.candidate.layout.name))
    if not ranked:
        raise Infeasible("no candidate fits in simulation", hint="more memory per device, or more devices")
    near = min(ranked, key=lambda j: demands.cost(j.candidate, j.time_s) if demands.budget else -j.candidate.layout.global_batch / j.time_s)
    cost, rate = demands.cost(near.candidate, near.time_s), near.candidate.layout.global_batch / near.time_s
    raise Infeasible(
        f"no layout meets the constraints; nearest: {near.candidate.layout.name}, {demands.broken(near.candidate, near.time_s)}",
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
    from ....profile.layer_table import RECOMPUTE

    return tuple(LayerChoice(r, z) for z in range(4) for r in RECOMPUTE)
