"""Whole plans: layout, cycle, placement, links, memory, bound and prediction, and programs with calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from check_programs import Training, ring_all_reduce, training_layout, windowed_reduce

from meshwright.bound import Bound, Certificate
from meshwright.check import check_plan, check_program, whole
from meshwright.check.program.links import channel_links, check_links, link_time
from meshwright.check.training.layout import check_layout
from meshwright.errors import CheckFailed
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.document import fabric_document
from meshwright.plan.plan import CycleEntry, Plan, Prediction, Segment, TrainingLayout
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Fold, FoldAxis, Program

replace_struct = msgspec.structs.replace


def star(n: int, *, memory_bytes: int = 0) -> Fabric:
    devices = tuple(Device(name=f"d{i}", memory_bytes=memory_bytes, flops={"fp32": 1000}) for i in range(n))
    links = tuple(x for i in range(n) for x in (Link(src=f"d{i}", dst="s", rate_Bps=10), Link(src="s", dst=f"d{i}", rate_Bps=10)))
    return Fabric(name="star", devices=devices, switches=(Switch(name="s"),), links=links)


def plan(**changes: Any) -> Plan:
    t = Training(training_layout(data=2))
    fabric = changes.pop("fabric", star(4))
    made = Plan(
        kind="training", job={}, target_fabric=fabric_document(fabric), placement=("d0", "d1", "d2", "d3"),
        programs={"main": t.program, **t.programs},
        cycle=(CycleEntry(program="main"),), decisions={}, layout=t.layout, prediction=Prediction(target_fabric="star", time_s=1e6),
        bound=Bound(
            quantity="step time", value="0", unit="s",
            certificate=Certificate(kind="roofline", data={"flops": 0, "flops_per_s": 4000, "devices": 4, "dtype": "fp32"}),
        ),
    )  # fmt: skip
    return replace(made, **changes)


def test_a_right_plan_is_ok_with_figures() -> None:
    verdict = check_plan(plan())
    assert verdict.ok, verdict.findings
    assert verdict.facts["busiest_link_s"] == "16/5"  # three micro-batches of 8 bytes and two chunks of 4 of the gradient, at 10 B/s
    assert len(verdict.facts["memory_worst_bytes"]) == 4 and verdict.facts["memory_worst_exact"]
    assert verdict.to_json()["status"] == "ok"


def test_the_calls_of_a_plans_program_are_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Program] = []
    monkeypatch.setattr(whole, "inline", lambda p, table, inline=whole.inline: (written.append(p), inline(p, table))[1])
    made = plan()
    assert check_plan(made).ok and [p for p in written if len(p.calls)] == [made.main]


def test_a_need_that_is_a_bound_on_one_rank_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = whole.worst_order_memory

    def of_one_rank_a_bound(*given: Any) -> Any:
        return replace(found(*given), exact=(True, False, True, True))

    monkeypatch.setattr(whole, "worst_order_memory", of_one_rank_a_bound)
    assert check_plan(plan()).facts["memory_worst_exact"] is False


def wrong(message: str, check: str, **changes: Any) -> None:
    verdict = check_plan(plan(**changes))
    assert verdict.status == "wrong", verdict
    assert any(message in f.message and f.check == check for f in verdict.findings), [(f.check, f.message) for f in verdict.findings]
    with pytest.raises(CheckFailed) as caught:
        verdict.raise_if_wrong()
    assert caught.value.exit_code == 4 and caught.value.data["findings"] >= 1


def test_what_can_be_wrong_with_a_plan() -> None:
    wrong("actor 3 is placed on 'nowhere'", "links", placement=("d0", "d1", "d2", "nowhere"))
    wrong("which is no device", "links", placement=("d0", "d1", "d2", "s"))
    wrong("4 places (3 different)", "links", placement=("d0", "d1", "d2", "d2"))
    wrong("needs 3.2 s for its bytes, the prediction says 1 s", "links", prediction=Prediction(target_fabric="star", time_s=1.0))
    wrong("can need", "memory", fabric=star(4, memory_bytes=20))
    wrong("is not in the plan", "plan", cycle=(CycleEntry(program="gone"),))
    wrong("is not in the plan", "plan", cycle=(CycleEntry(program="main", when="select", table={"k": "gone"}),))
    wrong("runs no program", "plan", cycle=())
    bound = plan().bound
    assert bound is not None
    wrong("claimed is 1", "certificate", bound=replace_struct(bound, value="1"))
    data = bound.certificate.data | {"flops": 8 * 10**9}
    high = replace_struct(bound, value="2000000", certificate=Certificate(kind="roofline", data=data))
    wrong("below the bound", "plan", bound=high, layout=None)
    wrong("the layout's segments do 0 operations", "certificate", bound=high)


def test_a_plan_whose_callee_is_missing_or_wrong() -> None:
    good = plan()
    wrong("is called but not given", "wellformed", programs={"main": good.main})
    callee = ring_all_reduce(2)
    assert callee.contract is not None
    broken = replace(callee, contracts=(replace(callee.contract, op="all-gather"),))
    verdict = check_program(good.main, programs={"ring2": broken}, layout=good.layout)
    assert verdict.status == "wrong" and verdict.findings[0].witness["callee"] == "ring2"
    silent = replace(callee, contracts=())
    verdict = check_program(good.main, programs={"ring2": silent}, layout=good.layout)
    assert verdict.ok and any("states no contract" in note for note in verdict.notes)
    big = check_program(good.main, programs={"ring2": ring_all_reduce(3)}, layout=good.layout)
    assert big.status == "wrong" and "cannot be written out" in big.findings[0].message


def test_calls_from_two_lanes_of_a_rank_need_an_order() -> None:
    callee = ring_all_reduce(2)
    for ordered in (True, False):
        b = ProgramBuilder(ranks=2)
        comm = b.comm("dp", [0, 1])
        for r in range(2):
            x, y = b.buffer(r, chunks=2, chunk_bytes=4), b.buffer(r, chunks=2, chunk_bytes=4)
            first = b.lane(r).call(b.call(comm, "ring2", [(0, x, 0)]))
            b.lane(r).call(b.call(comm, "ring2", [(0, y, 0)]), after=[first] if ordered else [])
        verdict = check_program(b.build(), programs={"ring2": callee})
        assert verdict.ok is ordered
        if not ordered:
            assert "call on one communicator in no defined order" in verdict.findings[0].message


def test_of_many_calls_without_an_order_eight_are_named() -> None:
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    for _ in range(10):
        for r in range(2):
            b.lane(r).call(b.call(comm, "ring2", [(0, b.buffer(r, chunks=2, chunk_bytes=4), 0)]))
    found = check_program(b.build(), programs={"ring2": ring_all_reduce(2)}).findings
    assert len([f for f in found if "in no defined order" in f.message]) == 8


def test_a_plan_without_values_to_prove_says_so() -> None:
    b = ProgramBuilder(ranks=1)
    b.lane(0).nop()
    assert any("nothing to prove" in note for note in check_program(b.build()).notes)


def test_a_folded_program_too_big_to_expand_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    b = ProgramBuilder(ranks=4, name="folded")
    b.lane(0).nop()
    p = b.build()
    folded = replace(p, fold=Fold(axes=(FoldAxis("data", 4, 1, "shift"),), buffer_shift=np.zeros((1, 0), np.int32)))
    monkeypatch.setattr(whole, "MAX_EXPANDED_STEPS", 3)
    verdict = check_program(folded)
    assert verdict.status == "unknown" and "too many to expand" in verdict.findings[0].message
    assert any("have no cycle" in note for note in verdict.notes)


def test_a_fabric_document_that_cannot_be_read_is_unknown() -> None:
    verdict = check_plan(replace(plan(), target_fabric={"devices": [{"nom": "x"}]}))
    assert verdict.status == "unknown"


# ---- layouts -----------------------------------------------------------------------------------------------------------
def layout_with(**changes: Any) -> TrainingLayout:
    return replace_struct(training_layout(data=2), **changes)


def segment(**changes: Any) -> tuple[Segment, ...]:
    one, two = training_layout(data=2).segments
    return replace_struct(one, **changes), two


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (layout_with(data=3), "is not the program's 4 ranks"),
        (layout_with(global_batch=7), "are not the global batch 7"),
        (layout_with(stages=training_layout(data=2).stages[:1]), "2 stages are needed"),
        (layout_with(segments=training_layout(data=2).segments[:1]), "in exactly one stage"),
        (layout_with(segments=segment(stage=1)), "says it is in stage 1"),
        (layout_with(segments=segment(nodes=("n10",))), "repeats the node 'n10'"),
        (layout_with(segments=segment(sum_writes=("y",))), "sums values"),
        (layout_with(segments=segment(writes=("x", "loss"))), "is written by"),
        (layout_with(segments=segment(writes=())), "reads 'x', which no segment writes"),
    ],
)
def test_layouts(layout: TrainingLayout, words: str) -> None:
    assert check_layout(training_layout(data=2), 4) == []
    found = check_layout(layout, 4)
    assert any(words in f.message for f in found), [f.message for f in found]


# ---- links -------------------------------------------------------------------------------------------------------------
def routed(*names: str) -> Program:
    b = ProgramBuilder(ranks=2)
    x = [b.buffer(r, chunks=1, chunk_bytes=40) for r in range(2)]
    c = b.channel(0, 1, route=names or None)
    b.lane(0, repeat=3).send(c, x[0], 0)
    b.lane(1, repeat=3).recv(c, x[1], 0)
    return b.build()


def test_routes_are_followed_and_bytes_counted_with_repeats() -> None:
    fabric = star(3)
    assert channel_links(routed("d0", "s", "d1"), fabric, ("d0", "d1"), 0) == fabric.route(0, 1)
    time, found = link_time(routed(), fabric, ("d0", "d1"))
    assert not found and {str(x) for x in time.values()} == {"12"} and len(time) == 2
    assert check_links(routed(), fabric, ("d0", "d1"), 12.0) == []
    assert check_links(routed(), fabric, ("d0", "d1"), 11.9)[0].witness["needed_s"] == "12"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("d0", "d1"), "a link from d0 to d1, which does not exist"),
        (("d1", "s", "d0"), "does not lead from d0 to d1"),
        (("d0", "x", "d1"), "from d0 to x"),
    ],
)
def test_routes_that_are_none(names: tuple[str, ...], words: str) -> None:
    found = check_links(routed(*names), star(3), ("d0", "d1"))
    assert words in found[0].message and found[0].witness["step"] == 0 and found[0].check == "links"


def test_devices_that_cannot_reach_each_other() -> None:
    apart = Fabric(name="apart", devices=(Device(name="d0"), Device(name="d1")))
    assert "no path from d0 to d1" in check_links(routed(), apart, ("d0", "d1"))[0].message


def test_an_edge_with_a_lag_means_no_wait_in_a_callee_that_does_not_repeat() -> None:
    """With one iteration the edge that frees a slot for the next one never waits; written out it must not either."""
    callee = windowed_reduce(2, repeat=1, window=1)
    assert check_program(callee).ok
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    for r in range(2):
        x = b.buffer(r, chunks=1, chunk_bytes=4)
        b.lane(r).call(b.call(comm, "reduce", [(0, x, 0)]))
    assert check_program(b.build(), programs={"reduce": callee}).ok
