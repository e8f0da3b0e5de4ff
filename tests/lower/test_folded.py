"""Folded lowering: one rank of every stage stands for all. It means what the unfolded lowering does, to the last bit; proved without expanding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from alike_servers import boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from captured import captured
from effort import few
from meshwright.check import check_plan, check_program
from meshwright.check.folded.fabric import folded_link_time
from meshwright.check.folded.shadow import shadow
from meshwright.check.folded.slots import near_axis
from meshwright.check.folded.training import check_folded_training
from meshwright.check.program.links import link_time
from meshwright.check.program.memory import worst_order_memory
from meshwright.check.program.order import Order
from meshwright.check.program.sweep import swept_peaks
from meshwright.cost import assumed_cost
from meshwright.decide.layout.grid import Grid
from meshwright.decide.layout.problem import Degrees, LayoutCandidate, LayoutProblem
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.drive import plans as drive
from meshwright.drive.training import evaluate, order
from meshwright.drive.training import layout as layout_decision
from meshwright.drive.training.collectives import CollectivePlanner
from meshwright.drive.training.evaluated import Evaluated
from meshwright.drive.training.folded import RankOrderRings, folded_step, with_microbatches
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, TimeLimit, UnknownName, Unsupported
from meshwright.explain.explanation import explain_plan
from meshwright.fabric.fabric import Fabric
from meshwright.graph.graph import OpGraph
from meshwright.graph.liveness import segment_workspace
from meshwright.graph.scale import at_batch
from meshwright.io.plan.plan import read_plan, write_plan
from meshwright.job import Training
from meshwright.lower.folded import folded_works, why_not_folded
from meshwright.lower.training import lower_training
from meshwright.plan.copies import COPIED, ExpertCopies
from meshwright.plan.plan import ContextExchange, PartialGradient, Plan, StepEnd, TrainingLayout
from meshwright.plan.sizes import training_works
from meshwright.program.calls import called_sizes, inline
from meshwright.program.flat import flatten, represented_by
from meshwright.program.fold import expand
from meshwright.program.program import Part, Program
from meshwright.simulate import simulate_program, simulate_stored

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPES = [(2, 2, 2, 1, False), (2, 2, 1, 2, True), (1, 4, 2, 1, True), (3, 1, 2, 1, False), (1, 2, 2, 2, False), (4, 2, 1, 1, False)]


@functools.cache
def graph_of(model: str, batch: int = 0) -> OpGraph:
    return captured(str(EXAMPLES / model)) if not batch else at_batch(graph_of(model), batch)


@dataclass
class Both:
    """A layout lowered both ways, with the same collectives."""

    fabric: Fabric
    graph: OpGraph
    layout: TrainingLayout
    plain: Program
    folded: Program
    callees: dict[str, Program]
    places: tuple[str, ...]


def layout_of(
    model: str, data: int, tensor: int, pipeline: int, microbatch: int, sequence: bool, batch: int
) -> tuple[Fabric, OpGraph, TrainingLayout]:
    fabric = boxes(data * pipeline, tensor)
    problem = LayoutProblem(
        graph_at=lambda b: graph_of(model, b), fabric=fabric, cost=assumed_cost(fabric), global_batch=batch,
        fixed=(data, tensor, pipeline, microbatch),
    )  # fmt: skip
    candidate = Grid(workspace=segment_workspace, tensor_options=TensorOptions(sequence=sequence)).plan(problem)[0]
    assert candidate.layout is not None, candidate.why
    return fabric, graph_of(model, microbatch), candidate.layout


@functools.cache
def both(model: str, data: int, tensor: int, pipeline: int, microbatch: int, sequence: bool, batch: int = 12, norm: bool = False) -> Both:
    fabric, graph, layout = layout_of(model, data, tensor, pipeline, microbatch, sequence, batch)
    layout = msgspec.structs.replace(layout, end=StepEnd(norm=True)) if norm else layout
    places = tuple(d.name for d in fabric.devices)
    rings = RankOrderRings(CollectivePlanner(fabric=fabric, transport=assumed_cost(fabric).transport), places)
    plain, one = lower_training(graph, layout, one_f_one_b_order, rings)
    folded, other = lower_training(graph, layout, one_f_one_b_order, rings, folded=True)
    return Both(fabric, graph, layout, plain, folded, {**one, **other}, places)


@pytest.mark.sample(5)
@pytest.mark.parametrize("model", ["gpt.py:tiny", "gpt.py:tiny_tied"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_folded_is_unfolded_to_the_last_bit(model: str, shape: tuple[int, int, int, int, bool]) -> None:
    """Makespan, memory of every rank, busy seconds and bytes of every link, the worst order's memory, the phases."""
    x = both(model, *shape)
    assert x.folded.fold is not None and x.folded.fold.members == shape[0] * shape[1]
    assert len(x.folded.steps) * x.folded.fold.members == len(x.plain.steps)
    cost, whole = assumed_cost(x.fabric), inline(x.plain, x.callees).program
    works = training_works(x.graph, x.layout)
    assert folded_works(x.graph, x.layout) == works, "these shapes divide evenly"
    one = simulate_program(whole, x.fabric, x.places, cost, works=works)
    other = simulate_stored(x.folded, x.fabric, x.places, cost, works=works, programs=x.callees)
    assert other.makespan_s == one.makespan_s and other.memory_peak_bytes == one.memory_peak_bytes
    assert {k: v for k, v in other.link_busy_s.items() if v} == pytest.approx({k: v for k, v in one.link_busy_s.items() if v}, rel=1e-12)
    assert folded_link_time(x.folded, x.callees, x.fabric, x.places)[0] == link_time(whole, x.fabric, x.places)[0]
    exact = worst_order_memory(whole)
    step = folded_step(x.graph, x.layout, x.fabric, cost, x.places, CollectivePlanner(fabric=x.fabric, transport=cost.transport))
    needs = [a + b for a, b in zip(exact.peak_bytes, exact.staging_bytes, strict=True)][: x.plain.ranks]
    assert all(a <= b <= 1.05 * a for a, b in zip(needs, step.needs_bytes, strict=True))
    again = simulate_program(inline(expand(x.folded), x.callees).program, x.fabric, x.places, cost, works=works, record=False)
    assert again.makespan_s == one.makespan_s


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_folded_programs_are_proved_without_expanding(shape: tuple[int, int, int, int, bool]) -> None:
    x = both("gpt.py:tiny_tied", *shape)
    assert check_folded_training(x.folded, x.callees, x.layout) == []
    verdict = check_program(expand(x.folded), programs=x.callees, layout=x.layout)
    assert verdict.ok, verdict.findings


@settings(max_examples=few(6), deadline=None, derandomize=True)
@given(shape=st.sampled_from([*SHAPES, (3, 2, 1, 2, True), (5, 1, 1, 1, False)]), norm=st.booleans(), seed=st.integers(0, 10_000))
def test_folded_callees_mean_what_written_out_ones_do(shape: tuple[int, int, int, int, bool], norm: bool, seed: int) -> None:
    """The same step with its rings stored by one member: time, memory, links and proof to the last bit; damaged rings are refused as written out."""
    x = both("gpt.py:tiny_tied", *shape, batch=60 if shape[0] == 5 else 12, norm=norm)
    cost, works = assumed_cost(x.fabric), folded_works(x.graph, x.layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.drive.training.folded.MIN_FOLDED_RING", 2)
        step = folded_step(x.graph, x.layout, x.fabric, cost, x.places, CollectivePlanner(fabric=x.fabric, transport=cost.transport))
    stored = {name: q for name, q in step.callees.items() if q.fold is not None}
    assert stored and all(len(q.buffers) == 1 for q in stored.values())
    plain = {name: expand(q) for name, q in step.callees.items() if q.fold is not None} | {n: q for n, q in step.callees.items() if q.fold is None}
    one = simulate_stored(step.program, x.fabric, x.places, cost, works=works, programs=plain)
    assert step.timeline.makespan_s == one.makespan_s and step.timeline.memory_peak_bytes == one.memory_peak_bytes
    assert folded_link_time(step.program, step.callees, x.fabric, x.places) == folded_link_time(step.program, plain, x.fabric, x.places)
    with_plain, with_stored = shadow(step.program, plain), shadow(step.program, step.callees)
    assert np.array_equal(with_plain.staging_bytes, with_stored.staging_bytes) and with_plain.calls == with_stored.calls
    assert called_sizes(step.program, plain) == called_sizes(step.program, step.callees)
    whole = expand(step.program)
    assert check_folded_training(step.program, step.callees, x.layout) == []
    assert check_program(whole, programs=step.callees, layout=x.layout).ok
    rng = np.random.default_rng(seed)
    name = str(rng.choice(sorted(stored)))
    broken = {**step.callees, name: _damaged(stored[name], rng)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.check.whole.MAX_EXPANDED_STEPS", 0)  # nothing is written out
        assert check_program(step.program, programs=step.callees, layout=x.layout).ok
        assert check_program(step.program, programs=broken, layout=x.layout).findings
    assert not check_program(whole, programs=broken, layout=x.layout).ok


def _damaged(ring: Program, rng: np.random.Generator) -> Program:
    """A ring that adds where it must not, moves a chunk elsewhere, forgets a sum, promises another operation or sends to another member."""
    s, c = ring.steps, ring.contracts[0]
    at = int(rng.choice(np.flatnonzero((s.parts & Part.RECV) != 0)))
    kind = int(rng.integers(5))
    if kind == 0:
        parts = s.parts.copy()
        parts[at] ^= int(Part.READ) if parts[at] & Part.READ else int(Part.STORE)
        return replace(ring, steps=replace(s, parts=parts))
    if kind == 1:
        chunk = s.dst_chunk.copy()
        chunk[at] = (chunk[at] + 1) % int(ring.buffers.chunks[0])
        return replace(ring, steps=replace(s, dst_chunk=chunk))
    if kind == 2:
        other = "reduce-scatter" if c.op == "all-gather" else "all-gather"
        return replace(ring, contracts=(replace(c, inputs=c.outputs, outputs=c.inputs, op=other),))
    if kind == 3:
        assert ring.fold is not None
        return replace(ring, fold=replace(ring.fold, buffer_shift=ring.fold.buffer_shift * 0))
    return replace(ring, channels=replace(ring.channels, dst=np.zeros_like(ring.channels.dst)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_norm_of_gradients_folds(shape: tuple[int, int, int, int, bool]) -> None:
    x = both("gpt.py:tiny_tied", *shape, norm=True)
    cost, whole = assumed_cost(x.fabric), inline(x.plain, x.callees).program
    works = training_works(x.graph, x.layout)
    assert folded_works(x.graph, x.layout) == works and sum(n == "norm" for n in whole.ops.name) >= x.plain.ranks
    one = simulate_program(whole, x.fabric, x.places, cost, works=works)
    other = simulate_stored(x.folded, x.fabric, x.places, cost, works=works, programs=x.callees)
    assert other.makespan_s == one.makespan_s and other.memory_peak_bytes == one.memory_peak_bytes
    without = both("gpt.py:tiny_tied", *shape)
    plain = simulate_program(inline(without.plain, without.callees).program, x.fabric, x.places, cost, works=training_works(x.graph, without.layout))
    assert one.makespan_s > plain.makespan_s
    assert check_folded_training(x.folded, x.callees, x.layout) == []
    assert check_program(expand(x.folded), programs=x.callees, layout=x.layout).ok
    reads = [[x.folded.buffers.name[b] for b in x.folded.ops.reads[op][::3].tolist()] for op in range(len(x.folded.ops))]
    adding = [(op, i) for op, names in enumerate(reads) for i, n in enumerate(names) if n.startswith("norm:")]
    assert len(adding) == ((shape[1] > 1) + (shape[2] > 1)) * shape[2]
    for op, i in adding:  # a norm step, or the optimizer, does not read the numbers before it
        wrong = _ops_with(x.folded, op, "reads", i)
        assert any("the whole of norm:" in f.message for f in check_folded_training(wrong, x.callees, x.layout))


def _ops_with(p: Program, op: int, name: str, drop: int) -> Program:
    """Without the `drop`-th range that an op reads or writes."""
    from meshwright.program.tables import Csr

    csr = getattr(p.ops, name)
    rows = [row.tolist() for row in (csr[i] for i in range(len(csr)))]
    rows[op] = rows[op][: 3 * drop] + rows[op][3 * drop + 3 :]
    return replace(p, ops=replace(p.ops, **{name: Csr.of(rows)}))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), shape=st.sampled_from(SHAPES[:4]))
def test_what_the_unfolded_checker_refuses_is_refused_folded(seed: int, shape: tuple[int, int, int, int, bool]) -> None:
    """Mutants of the representatives' lanes: waits, accesses, messages and calls that are lost or moved. Nothing wrong passes folded."""
    x = both("gpt.py:tiny_tied", *shape)
    rng = np.random.default_rng(seed)
    p = x.folded
    s = p.steps
    kind = int(rng.integers(4))
    if kind == 0 and len(s.after_step):  # a wait is lost
        at = int(rng.integers(len(s.after_step)))
        owner = int(np.searchsorted(s.after_ptr, at, side="right")) - 1
        ptr = s.after_ptr.copy()
        ptr[owner + 1 :] -= 1
        mutant = replace(p, steps=replace(s, after_ptr=ptr, after_step=np.delete(s.after_step, at), after_lag=np.delete(s.after_lag, at)))
    elif kind == 1:  # an op forgets something that it reads or writes
        op = int(rng.integers(len(p.ops)))
        name = str(rng.choice(["reads", "writes"]))
        width = len(getattr(p.ops, name)[op]) // 3
        mutant = _ops_with(p, op, name, int(rng.integers(max(1, width))))
    elif kind == 2:  # two steps of a lane change places
        lane = int(rng.integers(len(p.lanes)))
        lo, hi = int(p.lanes.start[lane]), int(p.lanes.end[lane])
        if hi - lo < 2:
            return
        a, b = lo + rng.choice(hi - lo, 2, replace=False)
        columns: dict[str, Any] = {}
        for name in ("kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count"):
            column = getattr(s, name).copy()
            column[[a, b]] = column[[b, a]]
            columns[name] = column
        mutant = replace(p, steps=replace(s, **columns))
    else:  # a call becomes nothing, or works on another buffer
        calls = np.flatnonzero(s.kind == 2)
        if not len(calls):
            return
        at = int(rng.choice(calls))
        if rng.integers(2):
            column, ops = s.kind.copy(), s.op.copy()
            column[at], ops[at] = 3, -1
            mutant = replace(p, steps=replace(s, kind=column, op=ops))
        else:
            values = p.calls.binds.values.copy()
            row = int(p.calls.binds.ptr[s.op[at]])
            alike = np.flatnonzero((p.buffers.actor == p.buffers.actor[values[row + 1]]) & (p.buffers.chunks == p.buffers.chunks[values[row + 1]]))
            values[row + 1] = int(rng.choice(alike))
            mutant = replace(p, calls=replace(p.calls, binds=replace(p.calls.binds, values=values)))
    try:
        wrong = not check_program(expand(mutant), programs=x.callees, layout=x.layout).ok
    except (FormatError, Unsupported):
        wrong = True
    try:
        refused = bool(check_folded_training(mutant, x.callees, x.layout))
    except (FormatError, Unsupported):
        refused = True
    assert refused or not wrong


def test_shares_that_are_not_equal_are_padded_to_the_largest() -> None:
    """A vocabulary of 259 among four: every rank gets the 65 rows of the largest part, and the step takes as long as the unfolded one."""
    x = both("gpt.py:tiny", 1, 4, 2, 1, False)
    shards = {s.param: s for s in x.layout.shards}
    assert any("tokens" in name or "head" in name for name in shards)
    uneven = msgspec.structs.replace(
        x.layout, segments=tuple(msgspec.structs.replace(s, shares=(2, 1, 1, 1)) if s.split else s for s in x.layout.segments)
    )
    works, folded = training_works(x.graph, uneven), folded_works(x.graph, uneven)
    assert any("@" in key for key in works) and not any("@" in key.rpartition("|")[2] for key in folded)
    assert all(folded[key.rpartition("@")[0]].flops >= work.flops for key, work in works.items() if "@" in key)


def test_layouts_whose_ranks_are_not_alike_are_refused() -> None:
    x = both("gpt.py:tiny", 2, 2, 1, 2, True)
    param = x.layout.stages[0].params[0]
    for layout, word in (
        (msgspec.structs.replace(x.layout, zero_level=2, end=StepEnd(folded=True)), "sharding level 2"),
        (msgspec.structs.replace(x.layout, partial_gradients=(PartialGradient(param=param, groups=((0,), (1,))),)), "partial sums"),
    ):
        assert word in why_not_folded(layout)
        with pytest.raises(Unsupported, match=word):
            lower_training(x.graph, layout, one_f_one_b_order, lambda *a: None, folded=True)
    placed = ExpertCopies(members=2, experts=2, copies=((0, 1),), rows=(), busiest_rows=1, before_rows=1, bound_rows=1)
    copied = ContextExchange(kind=COPIED, source="a", target="b", copies=placed)
    for change, word in (
        ({"schedule": "chimera", "placement": ((0, 1), (1, 0))}, "copies of the stages"),
        ({"expert": 2, "context": 2}, "divide experts and positions"),
        ({"replica_microbatches": (2, 1)}, "unequal numbers of micro-batches"), ({"exchanges": (copied,)}, "unlike numbers of copies of experts"),
    ):  # fmt: skip
        assert word in why_not_folded(msgspec.structs.replace(x.layout, **change)) and not why_not_folded(x.layout)
    with pytest.raises(Unsupported, match="divide experts and positions"):
        near_axis(msgspec.structs.replace(x.layout, expert=2, context=2))


def test_a_fabric_without_the_symmetry_is_refused() -> None:
    """Two data replicas in each server: their ring leaves the server at every second rank only."""
    x = both("gpt.py:tiny", 4, 2, 1, 1, False)
    fabric = boxes(2, 4)
    with pytest.raises(Unsupported, match="members"):
        simulate_stored(x.folded, fabric, [d.name for d in fabric.devices], assumed_cost(fabric), programs=x.callees)


def test_folded_ranks_are_placed_on_devices() -> None:
    x = both("gpt.py:tiny", 2, 2, 1, 2, True)
    for odd in ("nobody", x.fabric.switches[0].name):
        with pytest.raises(UnknownName, match=f"no device '{odd}'"):
            simulate_stored(x.folded, x.fabric, (*x.places[:-1], odd), assumed_cost(x.fabric), programs=x.callees)


def test_calls_that_the_shadow_cannot_read_are_refused() -> None:
    x = both("gpt.py:tiny_tied", 2, 2, 2, 1, False)
    missing = {name: q for name, q in x.callees.items() if name != x.folded.calls.names[0]}
    with pytest.raises(FormatError, match="not given"):
        shadow(x.folded, missing)
    shift = x.folded.fold.buffer_shift.copy()  # type: ignore[union-attr]
    shift[:] = 1
    with pytest.raises(Unsupported, match="move by 1 chunks"):
        shadow(replace(x.folded, fold=replace(x.folded.fold, buffer_shift=shift)), x.callees)  # type: ignore[type-var]
    promised = {name: replace(q, contracts=()) for name, q in x.callees.items()}
    with pytest.raises(Unsupported, match="promises no all-reduce"):
        shadow(x.folded, promised)
    channels = replace(x.folded.channels, dst=np.where(np.arange(len(x.folded.channels)) == 0, 1, x.folded.channels.dst).astype(np.int32))
    with pytest.raises(FormatError, match="not at the end of its channel"):
        shadow(replace(x.folded, channels=channels), x.callees)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swept_memory_bounds_the_exact_worst_order(shape: tuple[int, int, int, int, bool]) -> None:
    x = both("gpt.py:tiny_tied", *shape)
    whole = inline(x.plain, x.callees).program
    exact, swept = worst_order_memory(whole), swept_peaks(whole, Order(whole))
    assert all(a <= b <= 1.02 * a for a, b in zip(exact.peak_bytes, swept, strict=True))


def test_every_rank_is_represented_by_its_stages_first() -> None:
    x = both("gpt.py:tiny", 2, 2, 2, 1, False)
    assert represented_by(x.folded).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert represented_by(x.plain).tolist() == list(range(8))
    assert flatten(x.folded, x.callees).program.fold is not None


# ---- planning ------------------------------------------------------------------------------------------------------
def planned(monkeypatch: pytest.MonkeyPatch, steps: int = 3_000, **fixed: int) -> Plan:
    for module in (evaluate, layout_decision, order):
        monkeypatch.setattr(module, "MAX_PROGRAM_STEPS", steps)
    job = Training(model=str(EXAMPLES / "gpt.py:tiny_tied"), global_batch=96)
    return plan_training(  # type: ignore[arg-type]
        job, boxes(4, 2), graph=graph_of("gpt.py:tiny_tied"), wishes=(LayoutWanted(**fixed), RecomputeWanted("none")),
    )  # fmt: skip


def test_a_plan_that_is_too_large_unfolded_is_written_folded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planned, proved folded, written, read, simulated again, explained; its time is the unfolded program's."""
    made = planned(monkeypatch, data=2, tensor=2, pipeline=2, microbatch=1)
    assert made.main.fold is not None and made.prediction is not None and made.layout is not None
    monkeypatch.setattr("meshwright.check.whole.MAX_EXPANDED_STEPS", 0)
    verdict = check_plan(made)
    assert verdict.ok and any("representatives" in note for note in verdict.notes), verdict
    write_plan(tmp_path / "plan.json", made)
    again = read_plan(tmp_path / "plan.json")
    assert drive.simulate_plan(again).makespan_s == made.prediction.time_s
    whole = inline(expand(again.main), again.programs).program
    fabric = drive.fabric_of(again)
    assert simulate_program(whole, fabric, again.placement, drive.cost_of(again), works=drive.works_of(again)).makespan_s == made.prediction.time_s
    found = explain_plan(again, quick=True)
    assert found.breakdown.time_s == made.prediction.time_s and len(found.breakdown.stages) == 2
    assert all(len(made.prediction.__getattribute__(name)) == 8 for name in ("memory_peak_bytes", "memory_worst_bytes"))


def test_few_micro_batches_say_how_long_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    x = both("gpt.py:tiny", 1, 2, 2, 1, False, 96)
    cost = assumed_cost(x.fabric)
    step = functools.partial(folded_step, x.graph, fabric=x.fabric, cost=cost, placement=x.places)
    times = [
        step(with_microbatches(x.layout, m), planner=CollectivePlanner(fabric=x.fabric, transport=cost.transport)).timeline.makespan_s
        for m in (6, 10, 96)
    ]
    assert times[1] + 86 * (times[1] - times[0]) / 4 == pytest.approx(times[2], rel=0.01)


def test_a_search_judges_folded_layouts_by_few_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_PLANNED_DEVICES", 4)
    monkeypatch.setattr("meshwright.drive.training.decisions.MAX_PLANNED_DEVICES", 4)
    made = planned(monkeypatch, steps=100)
    assert made.main.fold is not None and made.layout is not None and made.layout.global_batch == 96


def test_a_folded_program_is_not_inlined_as_if_it_were_whole() -> None:
    x = both("gpt.py:tiny", 2, 2, 1, 2, True)
    with pytest.raises(Unsupported, match="stores only some of its ranks"):
        inline(x.folded, x.callees)


def test_a_layout_that_fits_with_few_micro_batches_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = both("gpt.py:tiny", 2, 2, 2, 1, False)
    cost = assumed_cost(x.fabric)
    planner = CollectivePlanner(fabric=x.fabric, transport=cost.transport)
    evaluator = evaluate.Evaluator(fabric=x.fabric, cost=cost, graph=x.graph, planner=planner)
    candidate = LayoutCandidate(degrees=Degrees(2, 2, 2, 1), layout=x.layout)
    found = Evaluated(candidate=candidate, extrapolated_s=1.0)
    monkeypatch.setattr(evaluate.Evaluator, "_evaluate_folded", lambda *a, **k: Evaluated(candidate=candidate, why="no room"))
    with pytest.raises(TimeLimit, match="not with all: no room"):
        evaluator.whole(found)
    whole = Evaluated(candidate=candidate)
    assert evaluator.whole(whole) is whole


def test_folded_links_name_places_that_do_not_exist() -> None:
    x = both("gpt.py:tiny", 2, 2, 1, 2, True)
    time, found = folded_link_time(x.folded, x.callees, x.fabric, (*x.places[:-1], "nobody"))
    assert not time and "nobody" in found[0].message
