"""Budgets, throughputs, objectives and zones: whatever is demanded, no layout of an exhaustive enumeration that meets it does better."""

from __future__ import annotations

import functools
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.layout import strategies
from meshwright.decide.layout.mixed.candidate import Candidate, Problem
from meshwright.decide.layout.mixed.search import Demands, search_mixed
from meshwright.decide.layout.profiled.predict import predict
from meshwright.profile.layer_table import LayerChoice
from meshwright.profile.network import ProfiledLayout, ProfiledStage, Replica
from meshwright.testing.layer_tables import fabric, problem

WORK = (1.5, 1.0, 1.0, 2.0)
PRICES, WATTS = {"fast": 3600.0, "slow": 900.0}, {"fast": 700.0, "slow": 150.0}


@functools.cache
def case(zones: bool) -> tuple[Problem, tuple[tuple[Candidate, float], ...]]:
    """A server of two fast and one of two slow devices, in one zone or two; every layout of one pipeline of up to two stages, simulated."""
    p = problem(fabric([("fast", 1, 2), ("slow", 1, 2)], trunk_Bps=10**7 if zones else 0), WORK, batch=4)
    parts = [Replica(device=pool.kind.name, tensor=t, zone=pool.kind.zone) for pool in p.pools for t in (1, 2)]
    shapes = [((len(WORK),), (a,)) for a in parts]
    for a, b in product(parts, parts):
        if a.device != b.device or a.tensor + b.tensor <= 2:
            shapes += [((cut, len(WORK) - cut), (a, b)) for cut in range(1, len(WORK))]
    found = []
    for (layers, row), microbatch, recompute in product(shapes, (1, 2), ("none", "full")):
        stages = tuple(ProfiledStage(layers=n, replicas=(r,)) for n, r in zip(layers, row, strict=True))
        layout = ProfiledLayout(stages=stages, microbatch=microbatch, microbatches=(4 // microbatch,))
        c = Candidate(layout, (LayerChoice(recompute),) * len(WORK), "all")
        found.append((c, predict(p.profile(c), c.layout, p.network, p.runtime, bars=False).time_s))
    return p, tuple(found)


@given(
    zones=st.booleans(), objective=st.sampled_from(["time", "cost", "energy"]), rank=st.floats(0, 1), by=st.sampled_from(["budget", "rate", "none"])
)
@settings(max_examples=8, deadline=None)
def test_no_enumerated_layout_does_better(zones: bool, objective: str, rank: float, by: str) -> None:
    p, every = case(zones)
    free = Demands(objective=objective, price_per_hour=PRICES, watts=WATTS)  # type: ignore[arg-type]
    costs, times = sorted(free.cost(c, t) for c, t in every), sorted(t for _, t in every)
    at = int(rank * (len(every) - 1))
    demands = Demands(
        objective=objective, price_per_hour=PRICES, watts=WATTS, budget=costs[at] * 1.000001 if by == "budget" else 0.0,  # type: ignore[arg-type]
        samples_per_s=p.global_batch / times[at] * 0.999999 if by == "rate" else 0.0,
    )  # fmt: skip

    def worth(c: Candidate, t: float) -> float:
        return {"time": t, "cost": demands.cost(c, t), "energy": demands.joules(c, t)}[objective]

    meeting = [
        (c, t) for c, t in every
        if (not demands.budget or demands.cost(c, t) <= demands.budget) and p.global_batch / t >= demands.samples_per_s
    ]  # fmt: skip
    assert meeting
    best = search_mixed(p, demands, simulated=60, refine=5).best
    assert worth(best.candidate, best.time_s) <= min(worth(c, t) for c, t in meeting) * (1 + 1e-9)
    assert not demands.budget or demands.cost(best.candidate, best.time_s) <= demands.budget * (1 + 1e-9)
    assert p.global_batch / best.time_s >= demands.samples_per_s * (1 - 1e-9)


def test_every_method_names_its_source() -> None:
    kinds = strategies("layers")
    assert len({kind.name for kind in kinds}) == len(kinds)
    own = [kind for kind in kinds if kind.name != "schedules"]  # the grid's degrees, with every schedule there is
    assert len({kind.cite.key for kind in own}) == len(own)
    assert all(kind.cite.title in kind.cite.line() for kind in kinds)
