"""Schedules in the search over layouts: what a candidate is priced at is what its program takes and holds, bounds hold, plans of them run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from captured import captured
from meshwright.cost import assumed_cost
from meshwright.decide.layout.layer_costs import FULL
from meshwright.decide.layout.mixed.bounds import family_bound_s
from meshwright.decide.layout.mixed.candidate import Candidate, Problem
from meshwright.decide.layout.mixed.grid import grid_candidates
from meshwright.decide.layout.mixed.schedule_bounds import cannot_fit, least_time_s, pieces_time_s
from meshwright.decide.layout.mixed.scheduled import MIN_GAIN, Scheduled
from meshwright.decide.layout.mixed.search import Demands, Judged, search_mixed
from meshwright.decide.layout.mixed.split import split_layers
from meshwright.decide.layout.profiled.predict import ProfilePrediction, predict
from meshwright.decide.pipeline import STRATEGIES, Action, PipelineProblem, Schedule
from meshwright.decide.pipeline.clocked import ClockedOrders
from meshwright.decide.pipeline.orders import kept_peak_bytes, times
from meshwright.drive.layout.schedules import MAX_LISTED_ROUNDS, MAX_ROUNDS, LayoutSchedules
from meshwright.drive.layout.search import find_layouts
from meshwright.drive.plans import check_plan
from meshwright.drive.training.found_layout import not_runnable, plan_found
from meshwright.errors import Deadlock, Infeasible, Unsupported, UsageError
from meshwright.graph.scale import at_batch
from meshwright.io.fabric.name import load_fabric
from meshwright.job import Training
from meshwright.profile.layer_profile import Entry
from meshwright.profile.layer_table import RECOMPUTE, LayerChoice
from meshwright.profile.network import ProfiledLayout, ProfiledSchedule, ProfiledStage, Replica
from meshwright.run.gate.gate import gate
from meshwright.testing.layer_tables import fabric, problem

WORK = (1.5, *(1.0,) * 14, 2.0)


def with_schedules(p: Problem, *names: str) -> Problem:
    p.schedules = LayoutSchedules(names)
    return p


MANY = ("interleaved", "breadth-first", "gpipe", "zbv")
BIG = with_schedules(problem(fabric([("fast", 4, 4)]), WORK, batch=32))


def any_scheduled(data: st.DataObject, p: Problem) -> Candidate:
    """Stages, pieces, micro-batches, replicas, recomputation of every layer at random, under any schedule that exists there."""
    stages, pipelines, count = data.draw(st.integers(2, 3)), data.draw(st.sampled_from((1, 2))), data.draw(st.sampled_from((2, 4, 7, 13)))
    assert p.schedules is not None
    variant = data.draw(st.sampled_from(p.schedules.variants(stages, count, len(WORK))))
    cuts = sorted(data.draw(st.permutations(range(1, len(WORK))))[: len(variant.stage_of) - 1])
    pieces = tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(WORK)), strict=True))
    held = [sum(n for n, s in zip(pieces, variant.stage_of, strict=True) if s == stage) for stage in range(stages)]
    made = tuple(ProfiledStage(layers=n, replicas=(Replica(device="fast"),) * pipelines) for n in held)
    layout = ProfiledLayout(
        stages=made, microbatch=1, microbatches=(count,) * pipelines,
        schedule=ProfiledSchedule(name=variant.label, layers=pieces, stage_of=variant.stage_of),
    )  # fmt: skip
    choices = (LayerChoice(data.draw(st.sampled_from(RECOMPUTE))), *(LayerChoice(data.draw(st.sampled_from(RECOMPUTE))),) * (len(WORK) - 1))
    return Candidate(layout, choices, "any")


def simulated(p: Problem, c: Candidate) -> ProfilePrediction:
    return predict(p.profile(c), c.layout, p.network, p.runtime, bars=False, orders=p.orders(c.layout))


def split_of(c: Candidate) -> bool:
    layout = c.layout
    assert BIG.schedules is not None and layout.schedule is not None
    variants = BIG.schedules.variants(len(layout.stages), layout.microbatches[0], len(WORK))
    return next(v.split for v in variants if v.label == layout.schedule.name)


def planned_whole(c: Candidate) -> bool:
    """Whether its step is short enough for its own orders, or two shorter steps stand for it."""
    return max(c.layout.microbatches) <= (MAX_LISTED_ROUNDS if split_of(c) else MAX_ROUNDS) * len(c.layout.stages)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_candidates_price_is_what_its_program_takes_and_holds(data: st.DataObject) -> None:
    c = any_scheduled(data, BIG)
    priced, predicted = BIG.estimate(c), simulated(BIG, c)
    # messages that queue behind each other, and gradients that share links with late messages, are the simulator's alone; pieces are cut at random
    # here, and list-scheduled orders planned for equal ones take some rounds until every round takes the same time
    close = planned_whole(c)
    assert priced.time_s == pytest.approx(predicted.time_s, rel=0.01 if close else 0.2)
    for ours, theirs in zip(priced.memory_bytes, predicted.memory_peak_bytes, strict=True):
        assert theirs * (1.0 if close else 0.98) - 64 <= ours <= theirs * (1.0 if close else 1.3) + 64
    pieces_s = pieces_time_s(BIG, c, split=split_of(c))
    assert predicted.time_s >= max(family_bound_s(BIG, c), least_time_s(BIG, c), pieces_s) * (1 - 1e-9)
    assert not close or priced.time_s >= max(least_time_s(BIG, c), pieces_s) * (1 - 1e-9)
    assert predicted.time_s >= predicted.bound_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_arrays_clock_and_memory_are_the_planners(data: st.DataObject) -> None:
    """Beside `orders.times` and `kept_peak_bytes`, which walk the actions in Python."""
    devices, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))

    def each(least: int) -> list[float]:
        return data.draw(st.lists(st.integers(least, 9).map(float), min_size=devices, max_size=devices))

    p = PipelineProblem.of(
        devices, count, forward_s=each(1), input_grad_s=each(1), weight_grad_s=each(1), activation_bytes=each(1), p2p_latency_s=0.5,
        message_bytes=0,
    )  # fmt: skip
    made = data.draw(st.sampled_from([v for kind in STRATEGIES for v in kind.variants(p) if v.traits.copies == v.traits.parts == 1]))
    quick = replace(made, tries=0) if hasattr(made, "tries") else made
    try:
        schedule = quick.plan(p, rng=np.random.default_rng(0))
    except (Infeasible, Unsupported):
        return
    clocked, v = ClockedOrders.of(schedule), schedule.chunks
    forward, backward, weights, kept = (
        np.repeat(row, v) / v for row in (p.forward_s, p.backward_s, p.weight_grad_s, p.activation_bytes)
    )  # fmt: skip
    ends = clocked.ends_s(forward, backward, weights, np.full(2 * (schedule.stages - 1), 0.5))
    assert ends.tolist() == pytest.approx([e[-1] for e in times(p, schedule).end_s])
    rounded = np.array([-(-x // v) for x in np.repeat(p.activation_bytes, v)], dtype=float)
    assert clocked.held_bytes(rounded, kept * 0).tolist() == pytest.approx(kept_peak_bytes(p, schedule))


def test_orders_that_wait_for_each_other_are_refused() -> None:
    schedule = Schedule(
        name="odd", devices=2, stages=2, placement=((0, 1),), copy_of=(0,),
        orders=((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))),
    )  # fmt: skip
    with pytest.raises(Deadlock, match="wait for each other"):
        ClockedOrders.of(schedule)


def test_pieces_that_are_tried() -> None:
    """As many as there are layers for; of list-scheduled orders, which are planned slowly, fewer numbers. More pieces, less of a bubble."""
    made = LayoutSchedules(("interleaved", "interleaved-zb"))
    found = {v.label: v for v in made.variants(4, 4, 40)}
    assert [label for label in found if "zb" in label] == ["interleaved-zb", "interleaved-zb chunks=4", "interleaved-zb chunks=8"]
    assert [label for label in found if "zb" not in label] == [f"interleaved chunks={v} group=4" for v in (2, 3, 4, 6, 8)]
    spans = []
    for label in ("interleaved chunks=8 group=4", "interleaved-zb", "interleaved-zb chunks=8"):
        forecast, pieces = made.forecast(label, 4, 4, (1.0, 1.0, 1.0)), len(found[label].stage_of)
        assert forecast is not None
        one = np.full(pieces, 4 / pieces)
        spans.append(float(forecast.ends_s(one, 2 * one, one, np.zeros(2 * (pieces - 1))).max()))
    assert 12.0 < spans[2] < spans[0] < spans[1]


def test_schedules_and_layouts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="no schedule fastest"):
        LayoutSchedules(("fastest", "gpipe"))
    one = (ProfiledStage(layers=3, replicas=(Replica(device="fast"),)),) * 2
    for layers, stage_of in (((3, 2), (0, 1)), ((3, 3), (0, 2)), ((3, 3, 0), (0, 1, 1)), ((3, 3), (0,))):
        with pytest.raises(UsageError, match="its pieces give the stages"):
            ProfiledLayout(stages=one, microbatch=1, microbatches=(2,), schedule=ProfiledSchedule(name="gpipe", layers=layers, stage_of=stage_of))
    plain = ProfiledLayout.uniform((8, 8), device="fast", microbatches=4)
    c = Candidate(plain, (LayerChoice(),) * len(WORK), "one")
    with pytest.raises(UsageError, match="needs its orders"):
        predict(BIG.profile(c), plain, BIG.network, BIG.runtime, bars=False, orders=((("F", 0, 0),), (("F", 1, 0),)))


def test_where_1f1b_has_a_bubble_a_schedule_wins_and_says_so() -> None:
    net = fabric([("fast", 4, 1)], nic_Bps=10**9)
    plain, free = (search_mixed(p, simulated=10, refine=1) for p in (problem(net, WORK, batch=6), with_schedules(problem(net, WORK, batch=6))))
    best = free.best
    assert best.time_s < plain.best.time_s and best.candidate.layout.schedule is not None
    assert free.counts["schedules"] and best.candidate.layout.schedule.name in best.candidate.layout.name
    only = with_schedules(problem(net, WORK, batch=6), "1f1b")
    assert search_mixed(only, simulated=10, refine=1).best.time_s == plain.best.time_s


def every(p: Problem, base: Candidate) -> Iterator[Candidate]:
    """The candidate on every schedule, its longest piece as short as can be."""
    layout, r = base.layout, base.layout.stages[0].replicas[0]
    a = p.table.priced(Entry(r.device, layout.microbatch, r.tensor), base.choices[0]._replace(sharding=0), layout.data)
    for variant in p.schedules.variants(len(layout.stages), layout.microbatches[0], len(WORK)) if p.schedules and len(layout.stages) > 1 else ():
        pieces = split_layers([a["forward_s"] + a["backward_s"]] * len(variant.stage_of))
        held = np.bincount(variant.stage_of, pieces, len(layout.stages))
        stages = tuple(msgspec.structs.replace(s, layers=int(n)) for s, n in zip(layout.stages, held, strict=True))
        schedule = ProfiledSchedule(name=variant.label, layers=pieces, stage_of=variant.stage_of)
        yield replace(base, layout=msgspec.structs.replace(layout, stages=stages, schedule=schedule))


@pytest.mark.parametrize("memory", [0, 500_000])
def test_what_no_order_goes_below_leaves_nothing_better_out(memory: int) -> None:
    """Few evaluations, the most promising first, find what pricing every schedule on all degrees finds: also among micro-batches so large
    that a pipeline has one of them."""
    p = with_schedules(problem(fabric([("fast", 4, 1)], nic_Bps=10**9), WORK, batch=8, memory=memory, microbatches=(1, 2, 4, 8)), *MANY)
    judged = [Judged(c, p.estimate(c)) for c in grid_candidates(p, p.pools[0], 4)]
    all_of_them = [(c, p.estimate(c), cannot_fit(p, j.candidate) or cannot_fit(p, c)) for j in judged for c in every(p, j.candidate)]
    assert all(e.over_bytes > 0 for _, e, hopeless in all_of_them if hopeless)
    assert any(hopeless for *_, hopeless in all_of_them) == bool(memory) and not any(cannot_fit(p, j.candidate) for j in judged if not memory)
    plain = min((j.estimate.time_s for j in judged if j.estimate.over_bytes <= 0), default=float("inf"))
    best = min(e.time_s for _, e, _ in all_of_them if e.over_bytes <= 0)
    found = [p.estimate(c).time_s for c in Scheduled(per_layer=0, evaluations=200).plan(p, Demands(), judged)]
    assert min([plain, *found]) <= min(best, plain) * (1 + 2 * MIN_GAIN)


def test_a_model_that_fits_with_no_other_schedule_fits() -> None:
    """One replica, no recomputation: 1F1B's first stage keeps a micro-batch per stage, V-shaped schedules keep less."""
    net = fabric([("fast", 4, 1)])
    choices = (LayerChoice("none", 0),)

    def best(memory: int, *names: str) -> Judged | None:
        p = with_schedules(replace(problem(net, WORK, batch=64, memory=memory, microbatches=(8,)), choices=choices), *names)
        try:
            return search_mixed(p, Demands(), methods=("grid", "schedules"), simulated=6, refine=0).best
        except Infeasible:
            return None

    low, high = 1, 10**7
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if best(middle, "1f1b") else (middle, high)
    assert best(high, "1f1b") is not None and best(low, "1f1b") is None
    found = best(low)
    assert found is not None and found.prediction is not None and max(found.prediction.memory_peak_bytes) <= low
    assert found.candidate.layout.schedule is not None


def test_equal_problems_give_equal_layouts() -> None:
    found = [search_mixed(with_schedules(problem(fabric([("fast", 3, 1)]), WORK, batch=8)), simulated=4, refine=1) for _ in range(2)]
    assert found[0].best == found[1].best and [j.candidate for j in found[0].ranked] == [j.candidate for j in found[1].ranked]


MODEL = f"{Path(__file__).parents[3] / 'examples' / 'gpt.py'}:tiny"
NET = load_fabric("laptop:4")


@pytest.mark.parametrize("names", [("interleaved",), ("zbv",), ("breadth-first",)])
def test_a_found_schedule_is_a_checked_plan_that_trains_alike(names: tuple[str, ...]) -> None:
    graph, cost = captured(MODEL), assumed_cost(NET)
    found = find_layouts(
        lambda b: at_batch(graph, b), NET, cost, global_batch=8, precision=FULL, microbatches=(1,), tensors=(1,), levels=(0,), recompute=("none",),
        simulated=12, refine=1, schedules=names,
    )  # fmt: skip
    scheduled = [j for j in found.found.ranked if j.candidate.layout.schedule is not None and not not_runnable(found, j)]
    chosen = min(scheduled, key=lambda j: (-len(j.candidate.layout.stages), len(j.candidate.layout.pieces)))
    plan = plan_found(found, chosen, Training(model=MODEL, global_batch=6), NET, cost, graph)
    check_plan(plan)
    mine, layout = chosen.candidate.layout, plan.layout
    assert layout is not None and mine.schedule is not None and layout.schedule == mine.schedule.name.split()[0]
    assert (layout.data, layout.pipeline, len(layout.stages)) == (mine.data, len(mine.stages), len(mine.pieces))
    heads = [found.problem.table.heads[first] for _, first, _ in mine.pieces]
    of_stage = [{n for s in layout.segments if s.stage == k for n in s.nodes} for k in range(len(mine.pieces))]
    assert all(head in nodes for head, nodes in zip(heads, of_stage, strict=True))
    assert "loss" in str(gate(plan, data="python-source").to_json())
