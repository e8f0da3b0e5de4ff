"""Searched orders, exact search and the bound from counts: the card's table of proved optima, brute force, and certificates checked again."""

from __future__ import annotations

import copy
from fractions import Fraction
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bound import Bound, Certificate
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.pipeline import Chimera, OneFOneB, PipelineProblem, Schedule
from meshwright.decide.pipeline.bound import schedule_bound
from meshwright.decide.pipeline.exact import counts_bound, exact_search
from meshwright.decide.pipeline.improve import improved
from meshwright.decide.pipeline.judge import judge
from meshwright.decide.pipeline.lower import fabric_of
from meshwright.decide.pipeline.orders import check_orders, in_flight_peaks, kept_peak_bytes, times
from meshwright.decide.pipeline.search import Search
from meshwright.decide.pipeline.vschedules import ZBV, VHalf, VMin
from meshwright.decide.pipeline.zerobubble import ZB1P
from meshwright.errors import Infeasible, Unsupported, UsageError

of = PipelineProblem.of


def slots(devices: int, microbatches: int) -> PipelineProblem:
    """One slot per half stage and kind, one byte per half stage."""
    return of(devices, microbatches, forward_s=2, activation_bytes=2, message_bytes=0)


def makespan(problem: PipelineProblem, schedule: Schedule) -> float:
    check_orders(schedule)
    return times(problem, schedule).makespan_s


@cache
def fewest_slots(devices: int, microbatches: int, cap: int) -> int:
    """Breadth-first search over everything that devices can do in a slot: V placement, unit times; an oracle that shares nothing."""
    stages = 2 * devices
    place = [s if s < devices else stages - 1 - s for s in range(stages)]
    begin = ((0,) * stages, (0,) * stages, (0,) * stages)
    front, steps = {begin}, 0
    while (tuple([microbatches] * stages),) * 3 not in front:
        after = set()
        for f, i, w in front:
            choices: list[list[tuple[str, int] | None]] = []
            for d in range(devices):
                mine = [s for s in range(stages) if place[s] == d]
                able: list[tuple[str, int] | None] = [None]
                held = sum(f[s] - w[s] for s in mine)
                for s in mine:
                    if held < cap and f[s] < (f[s - 1] if s else microbatches):
                        able.append(("F", s))
                    if i[s] < (i[s + 1] if s < stages - 1 else f[s]):
                        able.append(("I", s))
                    if w[s] < i[s]:
                        able.append(("W", s))
                choices.append(able)
            work = [()]
            for able in choices:
                work = [(*x, a) for x in work for a in able]
            for combination in work:
                now = {"F": list(f), "I": list(i), "W": list(w)}
                for a in combination:
                    if a:
                        now[a[0]][a[1]] += 1
                after.add((tuple(now["F"]), tuple(now["I"]), tuple(now["W"])))
        # a state that is behind another in everything but what it holds cannot be dropped safely, so all stay
        front = after
        steps += 1
    return steps


@pytest.mark.parametrize(("devices", "microbatches", "cap"), [(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 3), (2, 2, 4)])
def test_exact_search_against_brute_force(devices: int, microbatches: int, cap: int) -> None:
    p = slots(devices, microbatches)
    start = ZBV(cap=cap, tries=0).plan(p)
    proof = exact_search(p, start, cap_bytes=(cap,) * devices)
    assert proof.optimal and makespan(p, proof.schedule) == fewest_slots(devices, microbatches, cap) == proof.least_s
    assert max(in_flight_peaks(proof.schedule)) <= cap


@pytest.mark.sample(4)
@pytest.mark.parametrize(("devices", "microbatches", "cap", "optimum"), [
    (4, 8, 8, 51), (4, 8, 4, 59), (3, 6, 4, 41), (4, 4, 5, 32), (4, 4, 4, 35), (2, 4, 3, 27), (2, 4, 2, 33),
])  # fmt: skip
def test_proved_optima_of_the_v_placement(devices: int, microbatches: int, cap: int, optimum: int) -> None:
    p = slots(devices, microbatches)
    found = Search(placement="vee", cap=cap, effort=600).plan(p)
    assert makespan(p, found) == optimum and max(in_flight_peaks(found)) <= cap
    assert found.notes[0].startswith("these orders are optimal")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("devices", "microbatches", "cap", "optimum"), [(4, 8, 6, 53), (3, 6, 4, 41), (4, 4, 5, 32), (4, 4, 4, 35), (2, 4, 3, 27)])
def test_the_certified_bound_is_the_optimum_here(devices: int, microbatches: int, cap: int, optimum: int) -> None:
    p = slots(devices, microbatches)
    simple = schedule_bound(p, ZBV(cap=cap).plan(p), cap_bytes=(cap,) * devices)
    bound = counts_bound(p, ZBV(cap=cap).plan(p), cap_bytes=(cap,) * devices, effort=600)
    # in all but the last what a device can keep says it by itself, and counts say no more
    assert (bound is None) == (simple.exact == optimum) == (devices > 2)
    assert (bound or simple).exact == optimum and not check_bound(bound or simple, fabric_of(p))


def test_proved_optima_without_the_v() -> None:
    straight = of(4, 4, forward_s=1, backward_s=2, activation_bytes=1, message_bytes=0)
    proof = exact_search(straight, OneFOneB().plan(straight), cap_bytes=(4,) * 4)
    assert proof.optimal and proof.least_s == 21
    both = of(4, 8, forward_s=1, backward_s=2, activation_bytes=1, message_bytes=0)
    for cap, optimum in ((4, 28), (8, 27)):  # 30 in the published order
        proof = exact_search(both, Chimera().plan(both), cap_bytes=(cap,) * 4, effort=1200)
        assert proof.optimal and makespan(both, proof.schedule) == optimum
        assert max(in_flight_peaks(proof.schedule)) <= cap


def test_patterns_are_improved_and_keep_their_caps() -> None:
    for p in (slots(4, 8), slots(3, 6)):
        for kind in (VHalf, VMin):
            published, better = kind(tries=0).plan(p), kind().plan(p)
            assert makespan(p, better) <= makespan(p, published)
            assert max(in_flight_peaks(better)) <= max(in_flight_peaks(published))
    assert makespan(slots(3, 6), VMin().plan(slots(3, 6))) == 41 and makespan(slots(4, 8), VMin().plan(slots(4, 8))) == 59
    uneven = of(4, 8, forward_s=2, input_grad_s=3, weight_grad_s=2)
    assert makespan(uneven, ZB1P().plan(uneven)) <= makespan(uneven, ZB1P(tries=0).plan(uneven)) == 65


@st.composite
def uneven(draw: st.DrawFn) -> PipelineProblem:
    devices = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.lists(st.integers(low, high), min_size=devices, max_size=devices))  # noqa: E731
    return of(
        devices, draw(st.integers(1, 4)), forward_s=each(1, 4), input_grad_s=each(1, 4), weight_grad_s=each(0, 3), activation_bytes=each(2, 9),
        message_bytes=1, p2p_latency_s=each(0, 2), speeds=[draw(st.sampled_from([1, 2])) for _ in range(devices)],
    )  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(problem=uneven(), data=st.data())
def test_bounds_hold_and_orders_fit_with_uneven_stages_speeds_and_messages(problem: PipelineProblem, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([OneFOneB(), ZB1P(tries=0), ZBV(tries=0)])).plan(problem)
    caps = (max(kept_peak_bytes(problem, start)),) * problem.devices
    faster = improved(problem, start, [[c] for c in caps], tries=200, sizes=[-(-problem.activation_bytes[s // start.chunks] // start.chunks)
                      for s in range(start.stages)])  # fmt: skip
    assert makespan(problem, faster) <= makespan(problem, start) and max(kept_peak_bytes(problem, faster)) <= caps[0]
    bound = counts_bound(problem, start, cap_bytes=caps, most_variables=600)
    if bound is not None:
        assert not check_bound(bound, fabric_of(problem))
        assert bound.exact <= Fraction(makespan(problem, faster)) and bound.exact > schedule_bound(problem, start, cap_bytes=caps).exact
    proof = exact_search(problem, faster, cap_bytes=caps, effort=3, most_variables=600)
    assert proof.least_s <= Fraction(makespan(problem, proof.schedule)) <= Fraction(makespan(problem, faster))


def test_the_search_fits_into_memory_with_what_is_received_ahead() -> None:
    p = of(4, 8, forward_s=0.02, backward_s=0.04, activation_bytes=100e6, message_bytes=4e6, p2p_rate_Bps=1e9, weight_bytes=1e6)
    took = []
    for cap in (900e6, 300e6, 220e6):
        tight = PipelineProblem.of(4, 8, forward_s=0.02, backward_s=0.04, activation_bytes=100e6, message_bytes=4e6, p2p_rate_Bps=1e9,
                                   weight_bytes=1e6, memory_cap_bytes=cap)  # fmt: skip
        j = judge(tight, Search(tries=500).plan(tight))
        assert j.over_bytes <= 0
        took.append(j.time_s)
    assert took == sorted(took) and took[0] <= judge(p, Chimera(split=True).plan(p)).time_s
    with pytest.raises(Infeasible, match="no orders"):
        Search().plan(of(4, 8, activation_bytes=100, memory_cap_bytes=50))
    with pytest.raises(Infeasible, match="no orders"):
        Search().plan(of(4, 8, weight_bytes=100, memory_cap_bytes=50))


@pytest.mark.parametrize("wrong", [Search(placement="x"), Search(cap=-1), Search(tries=-1), Search(effort=-1)])
def test_options_that_make_no_sense(wrong: Search) -> None:
    with pytest.raises(UsageError):
        wrong.plan(of(4, 8))


def test_both_ways_needs_even_depth() -> None:
    with pytest.raises(Unsupported, match="even"):
        Search(placement="both-ways").plan(of(3, 3))


def good() -> tuple[PipelineProblem, Bound]:
    p = slots(2, 4)
    bound = counts_bound(p, ZBV(cap=3, tries=0).plan(p), cap_bytes=(3,) * 2, effort=600)
    assert bound is not None and not check_bound(bound, fabric_of(p))
    return p, bound


@pytest.mark.parametrize("change", ["slots", "slot_s", "weight", "drop", "cap", "slot", "family", "before", "none", "sign", "value"])
def test_forged_certificates_are_seen(change: str) -> None:
    p, bound = good()
    data = copy.deepcopy(bound.certificate.data)
    value = bound.value
    if change == "slots":
        data["slots"], value = data["slots"] + 1, str(bound.exact + 1)
    elif change == "slot_s":
        data["slot_s"] = "0"
    elif change == "weight":
        data["multipliers"] = [[*row[:2], 1, *row[3:]] if row[0] == "memory" else row for row in data["multipliers"]]
    elif change == "drop":
        data["multipliers"] = [row for row in data["multipliers"] if row[0] != "memory"]
    elif change == "cap":
        data["cap_bytes"] = [4] * 2
    elif change == "slot":
        data["multipliers"][0][1] = 10_000
    elif change == "family":
        data["multipliers"].append(["guess", 1, 1, 0])
    elif change == "before":
        data["multipliers"].append(["order", 1, 1, 0, "F", 0])
    elif change == "none":
        data["multipliers"] = []
    elif change == "sign":
        data["multipliers"][0][2] = -data["multipliers"][0][2]
    else:
        value = str(bound.exact + 1)
    (finding,) = check_bound(msgspec.structs.replace(bound, value=value, certificate=Certificate(kind="pipeline", data=data)), fabric_of(p))
    assert finding.status == "wrong"


def test_weight_gradients_that_take_no_time_are_all_placed() -> None:
    """Their counts may rise at the very end, which is no slot of the step."""
    p = PipelineProblem.of(4, 6, input_grad_s=1, weight_grad_s=0)
    found = Search(placement="both-ways", tries=0, effort=12).plan(p)
    check_orders(found)


def test_both_ways_says_its_copies_and_may_keep_backwards_whole() -> None:
    p = PipelineProblem.of(4, 4)
    for copies in (2, 4):
        found = Search(placement="both-ways", tries=0, copies=copies).plan(p)
        assert found.copies <= copies and f"there are {found.copies} copies of the weights" in found.notes[0]
    assert {Search(placement="both-ways", tries=0, backward=x).plan(p).split for x in ("split", "whole")} == {True, False}
    with pytest.raises(Unsupported, match="to the end of W"):
        Search(placement="both-ways", cap=4, backward="whole").plan(p)
    with pytest.raises(UsageError, match="no even number of copies"):
        Search(copies=3).plan(p)
