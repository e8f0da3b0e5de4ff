"""ForestColl's plans: what is remembered between sizes never shows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.decide.collective import CollectivePlan, CollectiveProblem, ForestColl
from meshwright.decide.collective.forestcoll import cut_and_pace
from meshwright.decide.collective.forestcoll import strategy as forestcoll
from meshwright.decide.collective.forestcoll.pieces import lead_of, round_number
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric import name as fabric_names
from meshwright.io.plan.program import program_bytes
from meshwright.kernels.effort import NEVER
from meshwright.program.program import Program

SIZES = (256, 1 << 23, 12_345_676)  # the last two share a way, the first has one of its own


@cache
def load_fabric(name: str) -> Fabric:
    """One object per name: its forests are remembered between the tests."""
    return fabric_names.load_fabric(name)


def planned(problem: CollectiveProblem, **options: object) -> CollectivePlan:
    return ForestColl(**options).plan(problem, rng=np.random.default_rng(0))  # type: ignore[arg-type]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["dgx-a100:2", "mi250:1", "two-islands", "dgx-h100:24"])
def test_a_plan_remembered_from_another_size_is_the_one_built_afresh(name: str) -> None:
    shared = replace(load_fabric(name))
    ops = {"dgx-h100:24": ("all-gather", "all-reduce"), "mi250:1": ("all-gather", "broadcast"), "two-islands": ("all-reduce", "gather")}
    for op in ops.get(name, ("all-gather", "all-reduce", "broadcast")):
        for size in SIZES:
            fresh = CollectiveProblem.on(replace(shared), op, size)
            one, two = planned(replace(fresh, fabric=shared)), planned(fresh)
            assert program_bytes(one.program) == program_bytes(two.program), (op, size)
            assert (one.options, one.notes, one.bound) == (two.options, two.notes, two.bound), (op, size)


def test_other_options_ranks_roots_and_shards_are_not_mixed_up() -> None:
    shared = replace(load_fabric("dgx1-v100"))
    some = tuple(d.name for d in shared.devices)[:6]
    cases = [
        ({}, {}), ({"trees": 2}, {}), ({"max_trees": 1}, {}), ({"structure": False}, {}), ({"relay": True}, {}), ({"quantum": 2}, {}),
        ({"depth": 3, "pieces": 4}, {}), ({"unroll": False, "pieces": 4}, {}), ({"unroll": True, "pieces": 4}, {}),
        ({}, {"op": "broadcast"}), ({}, {"op": "broadcast", "root": 3}), ({}, {"op": "reduce", "root": 3}), ({}, {"ranks": some[::-1]}),
        ({}, {"op": "scatter", "shard_bytes": (4096, 8192, 0, 4096, 0, 1 << 20)}), ({}, {"shard_bytes": (4096, 8192, 0, 4096, 4, 1 << 20)}),
        ({}, {"shard_bytes": (65536,) * 6}), ({}, {"element_bytes": 8}),
    ]  # fmt: skip
    afresh: dict[int, CollectivePlan] = {}
    for number, (options, change) in enumerate([*cases, *cases]):
        size = sum(change.get("shard_bytes", (1 << 15,)))  # type: ignore[arg-type]
        fields = {"op": "all-gather", "ranks": some, "size_bytes": size, **change}
        one = planned(CollectiveProblem(fabric=shared, **fields), **options)  # type: ignore[arg-type]
        if number < len(cases):
            afresh[number] = planned(CollectiveProblem(fabric=replace(shared), **fields), **options)  # type: ignore[arg-type]
        two = afresh[number % len(cases)]
        assert program_bytes(one.program) == program_bytes(two.program), (options, change)
        assert (one.options, one.notes, one.bound) == (two.options, two.notes, two.bound), (options, change)


def test_forests_that_a_limit_cut_short_are_not_kept() -> None:
    problem = CollectiveProblem.on(replace(load_fabric("dgx-a100:2")), "broadcast", 1 << 20)
    hurried = planned(replace(problem, effort_s=0.05))  # by then packing has ended, trees of one root are still compared
    unhurried, fresh = planned(problem), planned(replace(problem, fabric=replace(problem.fabric)))
    assert program_bytes(unhurried.program) == program_bytes(fresh.program)
    assert hurried.notes["height"] > fresh.notes["height"]


def without_a_port(name: str) -> Fabric:
    whole, gone = load_fabric(name), "box1/nic1"
    switches = tuple(s for s in whole.switches if s.name != gone)
    return replace(whole, switches=switches, links=tuple(x for x in whole.links if gone not in (x.src, x.dst)))


def test_programs_that_would_be_huge_take_fewer_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(without_a_port("dgx-h100:5"), "all-gather", 1 << 20)
    usual = planned(problem, structure=True)
    assert usual.notes["trees_per_root"] > 1 and usual.notes["ratio"] == "1"
    monkeypatch.setattr(forestcoll, "MAX_STEPS_PER_PIECE", 2 * 40 * 40)
    few = planned(replace(problem, fabric=replace(problem.fabric)), structure=True)
    assert few.notes["trees_per_root"] == 1 and Fraction(9, 10) < Fraction(few.notes["ratio"]) < 1
    assert few.program.executed_steps < usual.program.executed_steps and check_program(few.program).ok
    alike = planned(CollectiveProblem.on(load_fabric("dgx-h100:5"), "all-gather", 1 << 20))
    assert alike.notes["ratio"] == "1"  # servers that are alike are not limited: images need no room


def test_few_ranks_get_the_lower_of_two_forests() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx-h100:6"), "all-gather", 1 << 20)
    over_servers, general, chosen = (planned(problem, structure=s) for s in (True, False, None))
    assert chosen.notes["height"] == min(over_servers.notes["height"], general.notes["height"]) < over_servers.notes["height"]
    assert program_bytes(planned(problem, **chosen.options).program) == program_bytes(chosen.program)
    assert planned(problem, fold=True).program.fold is not None


def test_channels_hold_as_many_messages_as_latency_asks_for() -> None:
    problem = CollectiveProblem.on(load_fabric("hgx-b200:2"), "all-gather", 1 << 30)
    slow = replace(problem, size_bytes=1 << 26)
    deep = planned(problem)
    assert deep.options["depth"] == 64 and set(deep.program.channels.depth.tolist()) == {64}
    assert planned(slow).options["pieces"] < deep.options["pieces"]
    fast, stalled = (planned(problem, depth=d, pieces=deep.notes["pieces"]).program for d in (64, 4))
    assert simulated_time_s(fast, problem.fabric, problem.ranks, None) < simulated_time_s(stalled, problem.fabric, problem.ranks, None)


def test_trees_are_fewer_where_many_would_leave_too_few_pieces() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx1-p100:2"), "all-gather", 1 << 28)
    exact, chosen = planned(problem, trees=184), planned(problem)
    assert exact.notes["ratio"] == "1" and chosen.notes["trees_per_root"] <= 32 and Fraction(chosen.notes["ratio"]) > Fraction(95, 100)
    times = [simulated_time_s(p.program, problem.fabric, problem.ranks, None) for p in (chosen, exact)]
    assert times[0] < times[1]


@pytest.mark.sample(4)
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce"])
def test_paced_programs_are_correct(op: str, unroll: bool) -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), op, 1 << 24)
    options = {"trees": 6, "quantum": 4, "pieces": 6, "unroll": unroll, "depth": 4}
    free, paced = planned(problem, pace=0, **options).program, planned(problem, pace=2, **options).program
    assert len(paced.steps) == len(free.steps) and len(paced.steps.after_step) > len(free.steps.after_step)
    verdict = check_program(paced)
    assert verdict.ok, verdict
    shards = replace(problem, shard_bytes=(1 << 20,) * 14 + (0, 1 << 21)) if op in ("all-gather", "reduce-scatter") else problem
    assert check_program(planned(shards, pace=2, **options | {"unroll": None}).program).ok


@pytest.mark.sample(7)
@pytest.mark.parametrize(("unroll", "lead"), [(False, 2), (False, 3), (False, 4), (True, 4)])
@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-reduce", "reduce"])
def test_programs_with_a_lead_move_the_same_data(op: str, unroll: bool, lead: int) -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), op, 1 << 24)
    options = {"trees": 3, "quantum": 1, "pieces": 12, "unroll": unroll, "depth": 4, "pace": 2}
    leading, plain = planned(problem, lead=lead, **options), planned(problem, **options).program
    program = leading.program
    assert set(program.lanes.repeat.tolist()) == {1 if unroll else 12 // lead} and program.executed_steps == plain.executed_steps
    assert (program.message_bytes() == plain.message_bytes()[0]).all() and check_program(program).ok
    assert program_bytes(planned(problem, **leading.options).program) == program_bytes(program)


def test_long_ways_are_ahead_by_the_lead_and_short_ways_fill_the_end() -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), "reduce-scatter", 1 << 30)
    options = {"trees": 14, "quantum": 1, "pieces": 256, "pace": 16}
    late, ahead = (simulated_time_s(planned(problem, lead=lead, **options).program, problem.fabric, problem.ranks, None) for lead in (1, 8))
    assert ahead < 0.999 * late
    forests = ForestColl(trees=14)._prepared(problem, NEVER).forests
    assert [lead_of(problem, forests, pieces, 6000) for pieces in (3, 256, 1 << 20)] == [1, 16, 16] and lead_of(problem, forests, 256, 10**6) == 1


def test_a_lead_divides_the_pieces() -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:1"), "reduce-scatter", 1 << 20)
    with pytest.raises(UsageError, match="a lead of 3 does not divide 8 pieces"):
        planned(problem, pieces=8, lead=3)
    with pytest.raises(UsageError, match="lead must be >= 1"):
        planned(problem, lead=0)
    with pytest.raises(UsageError, match="a lead of 4 needs channels of as many messages, not 2"):
        planned(problem, pieces=8, lead=4, depth=2)
    assert planned(problem, lead=3).options["pieces"] % 3 == 0


def test_pacing_lets_channels_of_unlike_shares_end_together() -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), "all-gather", 1 << 28)
    free, paced = (planned(problem, trees=14, quantum=4, pieces=64, pace=pace) for pace in (0, 16))
    times = [simulated_time_s(p.program, problem.fabric, problem.ranks, None) for p in (paced, free)]
    assert times[0] < 0.95 * times[1]


def test_the_way_taken_is_the_fastest_tried() -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), "reduce-scatter", 1 << 26)
    strategy = ForestColl(trees=14)
    ready = strategy._prepared(problem, NEVER)
    ways = strategy._ways(problem, ready)
    times = {}
    for way in ways:
        options = {"trees": 14, "quantum": way.quantum, "pieces": way.pieces, "pace": way.pace}
        times[way] = simulated_time_s(planned(problem, **options).program, problem.fabric, problem.ranks, None)
    taken = strategy._way(problem, ready)
    assert len(ways) > 2 and taken in ways and times[taken] < 1.01 * min(times.values())


def test_tries_that_would_take_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), "reduce-scatter", 1 << 30)
    strategy = ForestColl(trees=14)
    ready = strategy._prepared(problem, NEVER)
    monkeypatch.setattr(cut_and_pace, "MAX_TRY_WORK", 0)
    assert strategy._way(problem, ready) == strategy._ways(problem, ready)[0]


def test_ways_whose_messages_end_one_by_one_are_not_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such fabrics only the first pieces are tried: simulating all of them costs minutes."""
    problem = CollectiveProblem.on(load_fabric("mi300x:2"), "reduce-scatter", 1 << 30)
    strategy = ForestColl(trees=3)
    ready = strategy._prepared(problem, NEVER)
    ways, real, taken = strategy._ways(problem, ready), cut_and_pace.simulated, list[int]()

    def watched(program: Program, *more: Any) -> tuple[float, int]:
        taken.append(int(program.lanes.repeat.max()))
        return real(program, *more)

    monkeypatch.setattr(cut_and_pace, "simulated", watched)
    for rates, most in ((10**15, max(way.pieces for way in ways)), (0, 2 * cut_and_pace.TRY_PIECES[-1])):
        taken.clear()
        monkeypatch.setattr(cut_and_pace, "MAX_LONGER_TRY_RATES", rates)
        monkeypatch.setattr(cut_and_pace, "MAX_FINAL_RATES", rates)
        cut_and_pace.best_way(problem, ready, ways, lambda way: strategy._in_way(problem, ready, way))
        assert max(taken) == most


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (1, 1), (3, 2), (31, 16), (33, 32), (47, 40), (100, 96), (127, 112), (4096, 4096)])
def test_pieces_are_round_numbers(value: int, expected: int) -> None:
    assert round_number(value) == expected
