"""Training programs of every schedule pass the checker; programs and layouts that are wrong in what schedules add do not. No process runs."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.capture.graph import capture
from meshwright.check import check_program
from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.cost import Cost, Transport
from meshwright.decide.collective import CollectiveProblem, Ring
from meshwright.decide.layout.build import build_layout
from meshwright.decide.layout.data_sharding import PLAIN, DataSharding
from meshwright.decide.layout.megatron import search_regions
from meshwright.decide.layout.problem import Degrees
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.memory.regions import RegionChooser
from meshwright.decide.pipeline import PipelineProblem
from meshwright.drive.collective.callee import bindable
from meshwright.drive.pipeline.pipelines import make_strategy
from meshwright.drive.training.pairs import pairs_of
from meshwright.drive.training.schedules import actions_of, scheduled
from meshwright.errors import Unsupported
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.lower.compressed import unsupported_layout
from meshwright.lower.training import lower_training
from meshwright.plan.forward_again import group_ends, steps_of_pass
from meshwright.plan.on_schedule import on_schedule
from meshwright.plan.plan import SegmentStep
from meshwright.plan.recompute import LayoutRegions
from meshwright.plan.shards import local_value
from meshwright.program.calls import inline
from meshwright.program.hash import program_hash
from meshwright.program.program import Kind
from meshwright.run.calibrate.transport import laptop_shape

MODEL = "tests/run/schedule_models.py:net"
QUICK = {"tries": 20}
SCHEDULES = [
    ("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2}), ("interleaved", {"chunks": 3}), ("breadth-first", {"chunks": 2}),
    ("breadth-first", {"chunks": 2, "group": 2, "reverse": True}), ("chimera", {}), ("chimera", {"pipes": 2, "mode": "double"}),
    ("chimera", {"split": True}), ("zb1p", QUICK), ("zb2p", QUICK), ("zbv", QUICK), ("v-half", QUICK), ("v-min", QUICK), ("dualpipe-v", {}),
    ("search", {"placement": "vee", **QUICK}), ("interleaved-zb", QUICK), ("search", {"placement": "looped", **QUICK}),
]  # fmt: skip


@cache
def graph():
    return capture(MODEL, batch_size=1, methods=("export",), scalable=False)


@cache
def regions():
    return search_regions(graph())


@cache
def ring(ranks: tuple[int, ...], size: int, op: str) -> Any:
    fabric = laptop_shape(max(ranks) + 1)
    problem = CollectiveProblem(
        fabric=fabric, op=op, ranks=tuple(fabric.devices[r].name for r in ranks), size_bytes=-(-size // 8) * 8, transport=Transport(),
        element_bytes=8,
    )  # fmt: skip
    program = Ring().plan(problem, rng=np.random.default_rng(0)).program
    return bindable(program_hash(program), program)


def lowered(name, options, devices, microbatches, *, data=1, tensor=1, sharding=PLAIN, problem=None, sequence=False, rule=""):
    """(layout, orders, inlined program). `rule`: of recomputation."""
    problem = problem or PipelineProblem.of(devices, microbatches, data=data)
    schedule = make_strategy(name, options).plan(problem, rng=np.random.default_rng(0))
    found, kept = regions()
    layout = build_layout(
        graph(), found, Degrees(data, tensor, schedule.stages, 1), data * schedule.microbatches, cost=Cost(), device=laptop_shape(2).devices[0],
        border_Bps=1e9, workspace=lambda g, n: (0, 0), kept=kept, sharding=sharding, options=TensorOptions(sequence=sequence),
    )  # fmt: skip
    layout = scheduled(recomputed(layout, rule) if rule else layout, graph(), schedule)
    orders = actions_of(schedule)
    return layout, orders, lower(layout, orders)


def recomputed(layout, rule):
    regions = LayoutRegions(graph(), layout)
    return regions.apply(RegionChooser(regions.regions, lambda n, key: 1.0).rule(rule).again)


def lower(layout, orders):
    def plan(purpose: str, ranks: tuple[int, ...], size: int, op: str = "all-reduce") -> Any:
        return ring(ranks, size, op)

    program, callees = lower_training(graph(), layout, lambda *_: [], plan, orders=orders)
    return inline(program, callees).program


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_program_is_right(data):
    """Form, deadlock, races and values, with uneven stages, data, tensor and sequence parallelism, recomputation and sharding levels."""
    name, options = data.draw(st.sampled_from(SCHEDULES))
    devices = data.draw(st.sampled_from([4] if options.get("pipes") == 2 else [2, 4] if name == "chimera" else [1, 2, 3, 4]))
    least = 2 * devices if name == "dualpipe-v" else devices if name == "interleaved" else 1
    microbatches = data.draw(st.integers(least, least + 5))
    replicas, tensor = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    level, overlap = data.draw(st.sampled_from([(0, False), (0, True), (1, False), (2, True), (3, True)]))
    sharding = DataSharding(level, overlap, 900, name == "chimera") if replicas > 1 or (name == "chimera" and not level) else PLAIN
    seconds = data.draw(st.lists(st.integers(1, 4), min_size=devices, max_size=devices))
    problem = PipelineProblem.of(devices, microbatches, data=replicas, forward_s=seconds)
    layout, _, flat = lowered(
        name, options, devices, microbatches, data=replicas, tensor=tensor, sharding=sharding, problem=problem,
        sequence=tensor > 1 and data.draw(st.booleans()), rule=data.draw(st.sampled_from(["", "full"])),
    )  # fmt: skip
    assert not check_layout(layout, flat.ranks)
    check_program(flat, layout=layout).raise_if_wrong()
    works = flat.ops.name
    assert {"I", "W"} <= set(works) if layout.split_backward else "B" in works


@pytest.mark.parametrize(
    ("name", "devices", "level", "overlap"),
    [*(("dualpipe-v", 2, level, level != 2) for level in range(4)), ("dualpipe", 2, 0, True), ("dualpipe", 4, 1, False)],
)
def test_pairs_in_rows_of_any_order_are_right(name, devices, level, overlap):
    """Steps of a forward and of the backward beside it in any order: as pairs begin when both halves can, nobody waits for ever."""
    draw = random.Random(level)
    problem = PipelineProblem.of(devices, 2 * devices, data=2, pair_overlap=0.5)
    sharding = DataSharding(level, overlap, 900, name == "dualpipe")
    layout, orders, flat = lowered(name, {}, devices, 2 * devices, data=2, tensor=2, sharding=sharding, problem=problem)
    pairs = pairs_of(make_strategy(name, {}).plan(problem, rng=np.random.default_rng(0)))
    ends = group_ends(layout)
    steps = {(phase, s.index): len(steps_of_pass(s, phase, ends)) for s in layout.stages for phase in "FIW"}
    rows = []
    for order, places in zip(orders, pairs, strict=True):
        row = [*order]
        for at in reversed(places):
            forward, back = ([a for a in half for _ in range(steps[a[:2]])] for half in (order[at : at + 1], order[at + 1 : at + 3]))
            turns = [True] * len(forward) + [False] * len(back)
            draw.shuffle(turns)
            row[at : at + 3] = [(forward if turn else back).pop(0) for turn in turns]
        rows.append(tuple(row))
    mixed = lower(layout, tuple(rows))
    assert max(steps.values()) > 2 and all(pairs)
    check_program(mixed, layout=layout).raise_if_wrong()
    assert sorted(mixed.ops.name) == sorted(flat.ops.name)


def test_an_action_in_more_parts_than_it_has_steps_is_refused():
    layout, orders, _ = lowered("zbv", QUICK, 2, 3)
    with pytest.raises(Unsupported, match=r"does not fit the layout: 0F0 in 99 parts"):
        lower(layout, ((orders[0][0],) * 98 + orders[0], *orders[1:]))


@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_parameter_that_two_stages_of_a_rank_use_is_in_one_bucket(level):
    """And frozen ones in none. Breadth-first makes gradients of several micro-batches at once for such a bucket."""
    layout, _, flat = lowered("breadth-first", {"chunks": 2}, 2, 3, data=2, sharding=DataSharding(level, True, 900))
    both = [p for p in layout.stages[1].params if p in layout.stages[3].params]
    named = [p for b in layout.buckets for p in b.params]
    assert {p: named.count(p) for p in both} == {p: int(p != "scale") for p in both} and len(both) > 1
    assert not check_layout(layout, flat.ranks) and not check_training(flat, layout)


def test_stages_without_parameters_are_right():
    layout, _, flat = lowered("zb1p", {"tries": 0}, 20, 2)
    bare = [s.index for s in layout.stages if not s.params]
    assert bare and not check_training(flat, layout)
    assert sum(name == "optimizer" for name in flat.ops.name) < 20


def messages(flat, layout):
    return " ".join(f.message for f in check_training(flat, layout))


def ops(flat, name):
    return [i for i in np.flatnonzero(flat.steps.kind == Kind.COMPUTE).tolist() if flat.ops.name[int(flat.steps.op[i])] == name]


def test_wrong_schedules_are_found():
    """W left out, run twice, before its I, of another copy's micro-batch; a copy's sum left out; W without what I left."""
    layout, orders, flat = lowered("zbv", QUICK, 2, 3)
    assert not check_training(flat, layout)
    first = next(i for i, a in enumerate(orders[0]) if a[0] == "W")
    with pytest.raises(Unsupported, match=r"does not fit the layout: .*W"):
        lower(layout, (orders[0][:first] + orders[0][first + 1 :], *orders[1:]))
    step = ops(flat, "W")[0]
    names = list(flat.ops.name)
    names[int(flat.steps.op[step])] = "B"
    assert "instead of" in messages(msgspec_ops(flat, name=tuple(names)), layout)
    reads = flat.ops.reads
    op = int(flat.steps.op[step])
    left = [b for b in reads[op][::3].tolist() if flat.buffers.name[b].startswith("left:")]
    other = next(b for b, n in enumerate(flat.buffers.name) if n.startswith("left:") and b not in left and flat.buffers.actor[b] == 0)
    values = reads.values.copy()
    low, high = int(reads.ptr[op]), int(reads.ptr[op + 1])
    values[low:high][values[low:high] == left[0]] = other
    assert "does not read left:" in messages(msgspec_ops(flat, reads=type(reads)(reads.ptr, values)), layout)


def test_copies_must_sum_their_gradients():
    layout, orders, flat = lowered("chimera", {}, 4, 4)
    assert layout.mates(0) == (0, 3) and not check_training(flat, layout)
    alone = msgspec.structs.replace(layout, copy_of=(0,) * 4)
    assert "instead of" in messages(flat, alone)
    apart = lower_without_sums(layout, orders)
    assert "lacks" in messages(apart, layout)


def lower_without_sums(layout, orders):
    """The step with every copy keeping its own gradients."""
    from meshwright.lower import data as lowering_data

    sums = lowering_data.DataParallel._reduce
    lowering_data.DataParallel._reduce = lambda *_: None
    try:
        return lower(layout, orders)
    finally:
        lowering_data.DataParallel._reduce = sums


def msgspec_ops(flat, **changes):
    from dataclasses import replace

    return replace(flat, ops=replace(flat.ops, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": ((0, 1, 1, 9),)}, "not 0 to 1"), ({"placement": ((0, 0, 0, 0),)}, "one at least"), ({"copy_of": (0, 0, 1)}, "one of 1 copies"),
        ({"placement": ((0, 1, 1, 0), (0, 1, 1, 0)), "copy_of": (0, 1, 0)}, "each at most once"),
        ({"placement": ((0, 1, 1, 0), (1, 0, 0, 1))}, "nothing says which"),
        ({"placement": ((0, 1, 1, 0), (1, 0, 0, 0)), "copy_of": (0, 1, 0)}, "hold other stages too"),
    ],
)  # fmt: skip
def test_impossible_placements_are_refused(changes, message):
    layout, _, _ = lowered("zbv", {"tries": 0}, 2, 3)
    wrong = msgspec.structs.replace(layout, **changes)
    assert any(message in f.message for f in check_layout(wrong, None)), check_layout(wrong, None)


def test_what_is_made_again_counts_until_the_weights_have_used_it():
    """Whichever comes first, the choice of what runs again or the schedule."""
    plain, _, _ = lowered("zb1p", {"tries": 0}, 2, 2)
    first, _, _ = lowered("zb1p", {"tries": 0}, 2, 2, rule="full")
    assert recomputed(plain, "full") == first
    for a, b in zip(plain.segments, first.segments, strict=True):
        assert a.left_bytes <= b.left_bytes and a.saved_bytes >= b.saved_bytes
        assert b.left_bytes - a.left_bytes >= a.saved_bytes - b.saved_bytes  # what is not kept is made again, and other things on the way
    assert any(s.recompute for s in first.segments)


def test_sizes_of_values_are_asked_for_only_where_a_backward_in_two_parts_needs_them(monkeypatch):
    """Not those of all values for every segment."""
    asked = []
    monkeypatch.setattr("meshwright.plan.on_schedule.local_value", lambda v, *a: (asked.append(v.name), local_value(v, *a))[1])
    layout, _, _ = lowered("zb1p", {"tries": 0}, 2, 2, tensor=2)
    biases = {x.value for s in layout.segments for x in s.row_biases}
    assert layout.split_backward and set(asked) == biases and len(asked) == 2 * sum(len(s.row_biases) for s in layout.segments)


def test_a_step_graphs_plan_and_missing_orders_are_refused():
    layout, orders, _ = lowered("zb1p", {"tries": 0}, 2, 2)
    nothing = StepGraph(name="nothing", nodes=(), storages=(), boundary=0, results=())
    straight = StepPlan(strategy="none", options={}, actions=(), boundary=0, saved=(), peak_bytes=0, peak_at=0, time_s=0.0)
    step = SegmentStep(graph=nothing, plan=straight, reads=(), writes=(), gradients=(), handed=0)
    planned = msgspec.structs.replace(layout.segments[0], step=step)
    wrong = msgspec.structs.replace(layout, segments=(planned, *layout.segments[1:]))
    with pytest.raises(Unsupported, match="plans of step graphs are of whole backwards"):
        lower(wrong, orders)
    with pytest.raises(Unsupported, match="by the orders"):
        lower(layout, ())
    with pytest.raises(Unsupported, match="orders a whole backward"):
        on_schedule(wrong, graph(), name="zb1p", pipeline=2, placement=((0, 1),), split=True)


def test_halved_backwards_are_refused():
    with pytest.raises(Unsupported, match="half a micro-batch"):
        lowered("chimera", {"mode": "halve"}, 2, 2)


def early_sums(flat):
    """Collectives that wait for a backward step which is not the last of its rank."""
    backward = [s for s in range(len(flat.steps)) if flat.steps.kind[s] == Kind.COMPUTE and flat.ops.name[int(flat.steps.op[s])] == "B"]
    lane = flat.lane_of_step()
    last = {int(lane[s]): s for s in backward}
    waits = [
        on for s in np.flatnonzero(flat.steps.kind == Kind.NOP).tolist()
        for on in flat.steps.after_step[flat.steps.after_ptr[s] : flat.steps.after_ptr[s + 1]].tolist()
    ]  # fmt: skip
    return sum(on in backward and on < last[int(lane[on])] for on in waits)


def test_codecs_with_copies_and_divided_state_are_refused():
    layout, _, _ = lowered("chimera", {}, 2, 2, data=2, sharding=DataSharding(1, True, 900, True))
    assert "copies of a stage" in unsupported_layout(layout)
    assert not unsupported_layout(lowered("chimera", {}, 2, 2, data=2, sharding=DataSharding(0, True, 900, True))[0])


def test_copies_without_a_micro_batch_take_part_in_sums():
    layout, _, flat = lowered("chimera", {}, 4, 1, sharding=DataSharding(0, True, 900, True))
    check_program(flat, layout=layout).raise_if_wrong()


@pytest.mark.parametrize(("level", "data"), [(0, 1), (1, 2)])
def test_sums_over_copies_start_during_backward(level, data):
    early, late = (lowered("chimera", {}, 4, 4, data=data, sharding=DataSharding(level, x, 900, True)) for x in (True, False))
    for layout, _, flat in (early, late):
        assert not check_layout(layout, flat.ranks)
        check_program(flat, layout=layout).raise_if_wrong()
    assert early_sums(early[2]) > 0 == early_sums(late[2])
