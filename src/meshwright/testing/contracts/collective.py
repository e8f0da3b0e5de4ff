"""What every collective strategy must do, on generated problems."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...check import check_program
from ...check.bounds.certificate import check_bound
from ...cost import Transport
from ...decide.collective import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, ForestColl, Ring, auto
from ...decide.collective.problem import Use
from ...decide.collective.program_time import simulated_time_s
from ...errors import Disconnected, Infeasible, TimeLimit, Unsupported
from ...fabric.fabric import Device, Fabric, Link, Switch
from ...program.hash import program_hash
from ...program.program import BUFFER_ROLES
from ..fabrics import fabrics
from .chosen import named_and_cited, parametrized

Kind = type[CollectiveStrategy]
USES: tuple[Use, ...] = get_args(Use)

EXAMPLES = settings(max_examples=40, deadline=None)
SIZES = st.sampled_from([4, 4000, 5040 * 16, 1 << 20])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "collective")


def problems(*, zero_latency: bool = False) -> st.SearchStrategy[CollectiveProblem]:
    @st.composite
    def draw_problem(draw: st.DrawFn) -> CollectiveProblem:
        fabric = draw(fabrics(min_devices=2, max_devices=6, zero_latency=zero_latency))
        names = [d.name for d in fabric.devices]
        ranks = draw(st.permutations(names))[: draw(st.integers(2, len(names)))]
        op = draw(st.sampled_from(OPERATIONS))
        return CollectiveProblem(fabric=fabric, op=op, ranks=tuple(ranks), size_bytes=draw(SIZES), root=draw(st.integers(0, len(ranks) - 1)))

    return draw_problem()


def planned(kind: Kind, problem: CollectiveProblem, **options: object) -> CollectivePlan | None:
    """The plan, or None for a refusal, which must say what to do."""
    try:
        return kind(**options).plan(problem, rng=np.random.default_rng(problem.seed))
    except Unsupported as refusal:
        assert refusal.message and refusal.hint
        return None


def time_of(plan: CollectivePlan, problem: CollectiveProblem) -> float:
    return simulated_time_s(plan.program, problem.fabric, (*problem.ranks, *plan.switches), problem.transport)


@EXAMPLES
@given(problem=problems())
def test_accepted_by_every_checker(kind: Kind, problem: CollectiveProblem) -> None:
    plan = planned(kind, problem)
    if plan is None:
        return
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    assert plan.bound is not None and not check_bound(plan.bound, problem.fabric)
    assert plan.program.contract is not None and plan.program.contract.op == problem.op


@EXAMPLES
@given(problem=problems())
def test_simulated_time_is_never_below_the_bound(kind: Kind, problem: CollectiveProblem) -> None:
    plan = planned(kind, problem)
    if plan is not None and plan.bound is not None:
        assert time_of(plan, problem) >= float(plan.bound) * (1 - 1e-9)


@EXAMPLES
@given(problem=problems())
def test_options_round_trip_and_equal_seeds_give_equal_bytes(kind: Kind, problem: CollectiveProblem) -> None:
    plan = planned(kind, problem)
    if plan is None:
        return
    repeated = planned(kind, problem)
    assert repeated is not None and program_hash(repeated.program) == program_hash(plan.program)
    options = json.loads(json.dumps(plan.options))
    assert set(options) == {f.name for f in fields(kind)}  # type: ignore[arg-type]
    again = planned(kind, problem, **options)
    assert again is not None
    assert program_hash(again.program) == program_hash(plan.program)
    assert json.loads(json.dumps(again.options)) == options
    json.dumps(plan.notes)


@EXAMPLES
@given(problem=problems(), salt=st.integers(0, 999))
def test_renaming_devices_keeps_the_value(kind: Kind, problem: CollectiveProblem, salt: int) -> None:
    plan = planned(kind, problem)
    name = {actor: f"x{(i * 7919 + salt) % 1000}-{i}" for i, actor in enumerate(problem.fabric.actor_names)}
    fabric = replace(
        problem.fabric,
        devices=tuple(replace(d, name=name[d.name]) for d in problem.fabric.devices),
        switches=tuple(replace(s, name=name[s.name]) for s in problem.fabric.switches),
        links=tuple(replace(x, src=name[x.src], dst=name[x.dst]) for x in problem.fabric.links),
    )
    renamed = replace(problem, fabric=fabric, ranks=tuple(name[r] for r in problem.ranks))
    other = planned(kind, renamed)
    assert (plan is None) == (other is None)
    if plan is not None and other is not None:
        assert plan.bound is not None and other.bound is not None and plan.bound.value == other.bound.value
        assert time_of(plan, problem) == time_of(other, renamed)


@EXAMPLES
@given(problem=problems(zero_latency=True))
def test_doubling_all_rates_halves_the_time(kind: Kind, problem: CollectiveProblem) -> None:
    plan = planned(kind, problem)
    twice = replace(problem.fabric, links=tuple(replace(x, rate_Bps=2 * x.rate_Bps) for x in problem.fabric.links))
    fast = replace(problem, fabric=twice)
    other = planned(kind, fast)
    assert (plan is None) == (other is None)
    if plan is not None and other is not None:
        assert other.bound is not None and plan.bound is not None and other.bound.exact * 2 == plan.bound.exact
        assert time_of(other, fast) * 2 == pytest.approx(time_of(plan, problem), rel=1e-9)


@EXAMPLES
@given(problem=problems())
def test_plans_are_usable_inside_a_training_step(kind: Kind, problem: CollectiveProblem) -> None:
    """Explicit chunks; one buffer per rank, in place (or an input and an output); equal chunk counts, at most an element of padding per chunk.

    Whatever else a rank has is scratch, which the caller's program gets without asking.
    """
    for variant in kind.variants(problem, "inlined"):
        try:
            usable(variant.plan(problem, rng=np.random.default_rng(problem.seed)), problem)
        except Unsupported as refusal:
            assert refusal.message and refusal.hint


def usable(plan: CollectivePlan, problem: CollectiveProblem) -> None:
    buffers = plan.program.buffers
    promised = plan.program.contract
    assert promised is not None
    sides = [[b for b, _, _ in ranges] for ranges in (promised.inputs, promised.outputs)]
    assert all(buffers.actor[side].tolist() == list(range(len(problem.ranks))) for side in sides)
    assert sides[0] == sides[1] or problem.op in ("all-to-all", "permute")
    own = sorted({b for side in sides for b in side})
    assert all(BUFFER_ROLES[int(buffers.role[b])] == "scratch" for b in range(len(buffers)) if b not in own)
    assert len(set(buffers.chunks[own].tolist())) == len(set(buffers.chunk_bytes.tolist())) == 1
    assert (plan.program.lanes.repeat == 1).all()
    chunks = int(buffers.chunks[own[0]])
    held = chunks * int(buffers.chunk_bytes[own[0]])
    assert problem.size_bytes <= held < problem.size_bytes + 4 * chunks


@EXAMPLES
@given(fabric=fabrics(min_devices=2, max_devices=5, connected=False), op=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]))
def test_disconnected_devices_are_infeasible(kind: Kind, fabric: Fabric, op: str) -> None:
    with pytest.raises(Disconnected if op in kind.operations else (Disconnected, Unsupported)):
        kind().plan(CollectiveProblem.on(fabric, op, 64), rng=np.random.default_rng(0))


def test_the_time_limit_ends_in_a_plan_or_a_typed_error(kind: Kind) -> None:
    problem = CollectiveProblem.on(star(24), "all-reduce", 1 << 20, time_limit_s=1e-9)
    try:
        plan = kind().plan(problem, rng=np.random.default_rng(0))
    except (TimeLimit, Unsupported) as stop:
        assert stop.hint
    else:
        assert check_program(plan.program).ok


def test_name_and_citation(kind: Kind) -> None:
    named_and_cited(kind)


@EXAMPLES
@given(problem=problems())
def test_what_it_says_of_itself_is_true(kind: Kind, problem: CollectiveProblem) -> None:
    """Where it does not apply it refuses every variant; variants are told apart by their labels."""
    for use in USES:
        found = kind.variants(problem, use)
        assert len({v.label for v in found}) == len(found) and all(type(v) is kind for v in found)
        if not kind.applies(problem):
            for variant in found:
                with pytest.raises(Unsupported):
                    variant.plan(problem, rng=np.random.default_rng(problem.seed))


def test_auto_ranks_it_among_the_others(kind: Kind) -> None:
    planned_one = False
    for op in OPERATIONS:
        fabric = star(5)
        if kind.switch_actors:
            fabric = replace(fabric, switches=tuple(replace(s, aggregate=True, multicast=True) for s in fabric.switches))
        problem = CollectiveProblem.on(fabric, op, 1 << 16, transport=Transport(per_message_s=1e-4))
        try:
            ranked = auto(problem, candidates=[Ring(), ForestColl(), kind()])
        except Unsupported:  # nobody has this operation
            continue
        times = [r.time_s for r in ranked if r.time_s is not None]
        assert all(later >= sooner * (1 - 1e-9) for sooner, later in pairwise(times)) and len(ranked) == 3  # ties go to fewer steps
        planned_one |= any(r.plan is not None and r.plan.strategy == kind.name for r in ranked)
        assert ranked[0].why.startswith("fastest") and all("above the bound" in r.why for r in ranked if r.plan)
    assert planned_one, "a strategy without an operation"


def test_auto_passes_infeasibility_on_and_explains_refusals(kind: Kind) -> None:
    apart = Fabric(name="apart", devices=(Device(name="a"), Device(name="b")))
    with pytest.raises(Infeasible):
        auto(CollectiveProblem.on(apart, "all-gather", 64), candidates=[kind()])
    stopped = auto(CollectiveProblem.on(star(12), "all-gather", 1 << 16, time_limit_s=1e-9), candidates=[Ring(), kind()])
    assert stopped[0].plan is not None and stopped[-1].why == "not tried: time limit"


def star(n: int) -> Fabric:
    links = tuple(Link(src=a, dst=b, rate_Bps=10**8 + i) for i in range(n) for a, b in ((f"d{i}", "s"), ("s", f"d{i}")))
    return Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(n)), switches=(Switch(name="s"),), links=links)
