"""Folded lowering of sharding levels, of other schedules and of divided positions: what the written-out form does, and proved without it."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from fractions import Fraction
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
from meshwright.check import check_program
from meshwright.check.folded import training as proof
from meshwright.check.folded.fabric import folded_link_time
from meshwright.check.folded.messages import ends_of
from meshwright.check.folded.shadow import shadow
from meshwright.check.folded.training import check_folded_training
from meshwright.check.folded.trips import with_round_trips
from meshwright.check.program.links import link_time
from meshwright.check.program.memory import worst_order_memory
from meshwright.check.program.order import Order
from meshwright.check.training.layout import check_layout
from meshwright.cost import assumed_cost
from meshwright.decide.layout.context import context_graph
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.layout.experts import experts_graph, tensor_part
from meshwright.decide.layout.grid import Grid
from meshwright.decide.layout.problem import LayoutCandidate, LayoutProblem
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.pipeline import one_f_one_b_order
from meshwright.drive import plans as drive
from meshwright.drive.pipeline.pipelines import make_strategy
from meshwright.drive.training import evaluate, order
from meshwright.drive.training.collectives import CollectivePlanner
from meshwright.drive.training.folded import RankOrderRings, folded_step, with_microbatches, worst_bytes
from meshwright.drive.training.pairs import exchanges_s, pairs_of, woven_orders
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.placements import placements_of, with_server_replicas
from meshwright.drive.training.recompute import RecomputeWanted
from meshwright.drive.training.schedules import Orders, actions_of, layout_problem, scheduled
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, Unsupported
from meshwright.explain.explanation import explain_plan
from meshwright.graph.graph import OpGraph
from meshwright.graph.liveness import segment_workspace
from meshwright.graph.scale import at_batch
from meshwright.io.plan.plan import read_plan, write_plan
from meshwright.job import Training
from meshwright.lower.training import lower_training
from meshwright.plan.plan import StepEnd, TrainingLayout
from meshwright.plan.recompute import with_forward_again
from meshwright.plan.routing import UNIFORM, Routing
from meshwright.plan.sizes import training_works
from meshwright.program.calls import inline
from meshwright.program.fold import expand
from meshwright.program.program import Program
from meshwright.simulate import simulate_program, simulate_stored

NO_ORDERS: Orders = ()
SCHEDULES = [("interleaved", 2), ("breadth-first", 1), ("zb1p", 3), ("zb2p", 2), ("zbv", 0), ("v-half", 1), ("gpipe", 2)]
EXAMPLES = Path(__file__).parents[2] / "examples"


@functools.cache
def graph_of(batch: int, model: str = "gpt.py:tiny_tied") -> OpGraph:
    return at_batch(captured(str(EXAMPLES / model)), batch)


class Lowered(msgspec.Struct):
    fabric: Any
    graph: Any
    layout: TrainingLayout
    orders: Any
    plain: Program
    folded: Program
    callees: dict[str, Program]
    places: tuple[str, ...]


@functools.cache
def lowered(
    degrees: tuple[int, int, int], level: int = 0, *, context: int = 1, exchange: str = "", schedule: str = "", norm: bool = False,
    overlap: bool = True, sequence: bool = False, expert: int = 1, hot: bool = False, server: int = 0, again: bool = False, way: str = "",
) -> Lowered:  # fmt: skip
    """Degrees of data, tensor and pipeline; both ways, with the same collectives. `server`: devices of each, by default a tensor group's, over which
    replicas are spread. `again`: layers run forward again. `way`: the placement, by its name."""
    data, tensor, pipeline = degrees
    fabric = boxes(data * context * pipeline * tensor // (server or tensor), server or tensor)
    made = make_strategy(schedule, {}).settled() if schedule else None
    stages = pipeline * (made.traits.stages_per_device if made is not None else 1)
    places, cost = tuple(d.name for d in fabric.devices), assumed_cost(fabric)
    wide = boxes(data * context * stages, tensor)
    model = "experts.py:small" if expert > 4 else "experts.py:tiny" if expert > 1 else "gpt.py:tiny_tied" if context == 1 else "gpt.py:tiny"
    routing = Routing(zipf=1.2) if hot else UNIFORM
    problem = LayoutProblem(
        graph_at=lambda b: graph_of(b, model), fabric=wide, cost=cost, global_batch=4 * data, fixed=(data, tensor, stages, 1), context=context,
        expert=expert, routing=routing,
    )  # fmt: skip
    grid = Grid(workspace=segment_workspace, tensor_options=TensorOptions(sequence=sequence), apart=again)
    degree = next(c.degrees for c in grid.plan(problem) if c.degrees.exchange == exchange)
    layout = grid.sharded(problem, degree, DataSharding(level, overlap, 0)).layout
    assert layout is not None
    graph, orders = context_graph(graph_of(1, model), context, exchange) if context > 1 else graph_of(1, model), NO_ORDERS
    graph = experts_graph(graph, expert, routing, tensor_part(graph, layout)) if expert > 1 else graph
    ways = placements_of(layout, fabric, alike=True)
    places = dict(ways)[way] if way else next(ways)[1] if server else places
    layout = with_server_replicas(layout, places, fabric)
    if made is not None:
        exchange_s = exchanges_s(layout, fabric, cost, places, {}) if made.traits.pairs else ()
        plan = made.plan(layout_problem(layout, graph, fabric, cost, places, devices=pipeline, exchange_s=exchange_s), rng=np.random.default_rng(0))
        layout, orders = scheduled(layout, graph, plan), actions_of(plan)
    layout = msgspec.structs.replace(layout, end=StepEnd(norm=True)) if norm else layout
    layout = with_forward_again(graph, layout) if again else layout
    if made is not None and made.traits.pairs:
        paired = LayoutCandidate(degrees=degree, layout=layout, orders=orders, pairs=pairs_of(plan))
        orders = woven_orders(paired, graph, fabric, cost, places, {})
        assert any(len(row) > len({*row}) for row in orders)
    rings = RankOrderRings(CollectivePlanner(fabric=fabric, transport=cost.transport), places)
    plain, one = lower_training(graph, layout, one_f_one_b_order, rings, orders=orders)
    folded, other = lower_training(graph, layout, one_f_one_b_order, rings, folded=True, orders=orders)
    return Lowered(fabric, graph, layout, orders, plain, folded, {**one, **other}, places)


def same(x: Lowered, whole: Program) -> None:
    """Makespan, memory of every rank, bytes and busy seconds of every link of the folded program are those of `whole`; both are proved."""
    cost, works = assumed_cost(x.fabric), training_works(x.graph, x.layout)
    flat = inline(whole, x.callees).program
    one = simulate_program(flat, x.fabric, x.places, cost, works=works)
    other = simulate_stored(x.folded, x.fabric, x.places, cost, works=works, programs=x.callees)
    assert other.makespan_s == one.makespan_s and other.memory_peak_bytes == one.memory_peak_bytes
    assert max(other.memory_peak_bytes) <= max(worst_bytes(x.folded, x.callees))
    assert {k: v for k, v in other.link_busy_s.items() if v} == pytest.approx({k: v for k, v in one.link_busy_s.items() if v}, rel=1e-12)
    assert folded_link_time(x.folded, x.callees, x.fabric, x.places)[0] == link_time(flat, x.fabric, x.places)[0]
    assert check_folded_training(x.folded, x.callees, x.layout) == []
    assert check_program(expand(x.folded), programs=x.callees, layout=x.layout).ok


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("degrees", "norm", "overlap"), [((2, 2, 2), True, True), ((3, 1, 2), False, False), ((2, 2, 1), False, True)])
def test_sharding_levels_fold(level: int, degrees: tuple[int, int, int], norm: bool, overlap: bool) -> None:
    x = lowered(degrees, level, norm=norm, overlap=overlap, sequence=degrees[2] == 1)
    assert x.folded.fold is not None and x.folded.fold.members == degrees[0] * degrees[1]
    assert len(x.folded.steps) * x.folded.fold.members == len(x.plain.steps)
    same(x, x.plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("schedule", "level"), SCHEDULES)
def test_schedules_fold(schedule: str, level: int) -> None:
    x = lowered((2, 1, 2), level, schedule=schedule)
    same(x, x.plain)
    cost = assumed_cost(x.fabric)
    step = folded_step(
        x.graph, x.layout, x.fabric, cost, x.places, CollectivePlanner(fabric=x.fabric, transport=cost.transport), orders=x.orders
    )  # fmt: skip
    assert len(step.program.steps) == len(x.folded.steps) and min(step.needs_bytes) > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(("exchange", "degrees"), [("ulysses", (1, 2, 2)), ("ring", (2, 1, 2)), ("ring-again", (2, 1, 1)), ("ulysses", (2, 2, 1))])
def test_contexts_fold(exchange: str, degrees: tuple[int, int, int], level: int) -> None:
    """With other replicas too, folded sums go over positions and over samples apart; without, they are those of the written-out step."""
    x = lowered(degrees, level, context=2, exchange=exchange, norm=level == 3)
    assert ends_of(x.folded).pairs and x.folded.fold is not None and x.folded.fold.members == 2 * degrees[0] * degrees[1]
    same(x, x.plain if degrees[0] == 1 else expand(x.folded))
    assert check_program(x.plain, programs=x.callees, layout=x.layout).ok


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", ["", "interleaved", "zb1p"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("degrees", [(2, 1, 2), (4, 1, 2), (4, 2, 1)])
def test_experts_fold(degrees: tuple[int, int, int], level: int, schedule: str) -> None:
    """Whole groups are summed over neighbours and over the others apart; experts' over those with the same."""
    x = lowered(degrees, level, schedule=schedule, expert=2, norm=level != 1)
    assert len(x.folded.sizes) and x.folded.fold is not None and x.folded.fold.members == degrees[0] * degrees[1]
    same(x, x.plain if degrees[0] == 2 else expand(x.folded))
    assert check_program(x.plain, programs=x.callees, layout=x.layout).ok


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "level", "again"), [((2, 1, 2), 0, False), ((2, 1, 2), 1, True), ((4, 1, 2), 3, False), ((2, 2, 2), 1, False)])
def test_pairs_fold(degrees: tuple[int, int, int], level: int, again: bool) -> None:
    """Rows of compute steps of two micro-batches, with exchanges of both between them."""
    x = lowered(degrees, level, schedule="dualpipe-v", expert=2, again=again)
    assert x.folded.fold is not None and x.folded.fold.members == degrees[0] * degrees[1]
    same(x, x.plain if degrees[0] == 2 else expand(x.folded))
    assert check_program(x.plain, programs=x.callees, layout=x.layout).ok


@pytest.mark.parametrize(("degrees", "level", "how"), [
    ((2, 1, 2), 0, {"expert": 2}), ((4, 2, 1), 3, {"expert": 2, "norm": True}), ((2, 1, 2), 2, {"expert": 2, "schedule": "zb1p"}),
    ((4, 1, 1), 3, {"expert": 4, "server": 2}), ((1, 2, 2), 1, {"context": 2, "exchange": "ulysses"}), ((2, 2, 2), 0, {"sequence": True}),
])  # fmt: skip
def test_layers_that_run_forward_again_fold(degrees: tuple[int, int, int], level: int, how: dict[str, Any]) -> None:
    """Every message of a layer's forward pass comes twice; what it brings the second time is given up after the layer's backward."""
    x, kept = lowered(degrees, level, again=True, **how), lowered(degrees, level, **how)
    same(x, expand(x.folded))
    assert check_program(x.plain, programs=x.callees, layout=x.layout).ok
    assert x.layout.forward_again and {"R"} == {*x.plain.ops.name} - {*kept.plain.ops.name}
    names = {name.partition(":")[0] for name in x.plain.buffers.name}
    assert "remade" in names and ("remadeall" in names) is ("actall" in names)


CASES = [
    ((2, 2, 2), 2, "", (1, 1)), ((2, 1, 2), 1, "", (1, 1)), ((2, 1, 1), 1, "ulysses", (2, 1)), ((1, 1, 2), 2, "ring", (2, 1)),
    ((2, 2, 1), 3, "ulysses", (2, 1)), ((4, 1, 1), 1, "", (1, 2)), ((2, 1, 2), 0, "", (1, 2)),
]  # fmt: skip


@settings(max_examples=few(12), deadline=None, derandomize=True)
@given(case=st.sampled_from(CASES), kind=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_damage_is_refused_folded_as_it_is_written_out(case: tuple[tuple[int, int, int], int, str, tuple[int, int]], kind: int, seed: int) -> None:
    degrees, level, exchange, (context, expert) = case
    x = lowered(degrees, level, context=context, exchange=exchange, expert=expert)
    mutant = damaged(x.folded, kind, np.random.default_rng(seed))
    assert accepted(lambda: not check_folded_training(mutant, x.callees, x.layout)) <= accepted(
        lambda: check_program(expand(mutant), programs=x.callees, layout=x.layout).ok
    )


def accepted(proved: Any) -> bool:
    try:
        return bool(proved())
    except (FormatError, Unsupported):
        return False


def damaged(p: Program, kind: int, rng: np.random.Generator) -> Program:
    """A wait is lost, an op forgets a range, a chunk, a message or a channel goes elsewhere, a buffer moves otherwise, two steps change places."""
    s = p.steps
    moved = np.flatnonzero((s.kind == 1) & (s.count > 0))
    if kind == 0:
        at = int(rng.integers(len(s.after_step)))
        ptr = s.after_ptr.copy()
        ptr[int(np.searchsorted(s.after_ptr, at, side="right")) :] -= 1
        return replace(p, steps=replace(s, after_ptr=ptr, after_step=np.delete(s.after_step, at), after_lag=np.delete(s.after_lag, at)))
    if kind == 1:
        triples = p.ops.writes.values.copy()
        row = 3 * int(rng.integers(len(triples) // 3))
        triples[row + 2] -= 1
        return replace(p, ops=replace(p.ops, writes=replace(p.ops.writes, values=triples)))
    if kind == 2:
        at, chunk = int(rng.choice(moved)), s.src_chunk.copy()
        chunk[at] += int(s.count[at])
        return replace(p, steps=replace(s, src_chunk=chunk))
    if kind == 3:
        at, parts = int(rng.choice(moved)), s.parts.copy()
        parts[at] ^= 4
        return replace(p, steps=replace(s, parts=parts))
    if kind == 4:
        dst = p.channels.dst.copy()
        at = int(rng.integers(max(1, len(dst))))
        dst[at : at + 1] = p.channels.src[at : at + 1]
        return replace(p, channels=replace(p.channels, dst=dst))
    assert p.fold is not None
    if kind == 5:
        shift = p.fold.buffer_shift.copy()
        rows, columns = np.nonzero(shift)
        at = int(rng.integers(len(rows)))
        shift[rows[at], columns[at]] = 0
        return replace(p, fold=replace(p.fold, buffer_shift=shift))
    lanes = np.flatnonzero(p.lanes.end - p.lanes.start > 1)
    first = int(p.lanes.start[int(rng.choice(lanes))])
    swapped: dict[str, Any] = {}
    for name in ("kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count"):
        column = getattr(s, name).copy()
        column[[first, first + 1]] = column[[first + 1, first]]
        swapped[name] = column
    return replace(p, steps=replace(s, **swapped))


@pytest.mark.sample(4)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(
    ("degrees", "expert"), [((8, 1, 1), 2), ((8, 1, 1), 4), ((8, 1, 1), 8), ((4, 2, 1), 4), ((8, 1, 2), 8), ((8, 2, 1), 2), ((4, 1, 2), 2)]
)
def test_groups_that_fill_no_whole_servers_fold(degrees: tuple[int, int, int], expert: int, level: int) -> None:
    """On servers of four: replicas with equal experts, or those that divide them, are in some servers and parts of others, and are spread."""
    x = lowered(degrees, level, expert=expert, server=4)
    assert sorted(x.places) == sorted(d.name for d in x.fabric.devices)
    same(x, expand(x.folded))


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(
    ("degrees", "near", "far", "how"),
    [((8, 1, 1), 4, 2, {}), ((12, 1, 1), 4, 3, {"norm": True}), ((4, 2, 1), 2, 2, {"norm": True}), ((8, 1, 1), 4, 2, {"expert": 4})],
)
def test_servers_are_sent_each_part_of_a_group_once(degrees: tuple[int, int, int], near: int, far: int, how: dict[str, Any], level: int) -> None:
    """A gather of whole weights puts blocks together in the server: each NIC carries one rank's block, and no whole group."""
    x = lowered(degrees, level, server=4, **how)
    same(x, expand(x.folded))
    assert check_program(x.plain, programs=x.callees, layout=x.layout).ok
    divided = re.compile({1: "weights@|gradients@|norm:data", 2: "weights@|gradfull|norm:data", 3: "gathered|gradfull|norm:data"}[level])
    b, wanted = x.folded.buffers, Fraction(0)
    for name, chunks, size in zip(b.name, b.chunks.tolist(), b.chunk_bytes.tolist(), strict=True):
        wanted += Fraction(chunks * size * (far - 1), far * (1 if name.endswith("%") else near)) if divided.match(name) else 0
    time_s = folded_link_time(x.folded, x.callees, x.fabric, x.places)[0]
    sent = {link.src: time_s[i] * link.rate_Bps for i, link in enumerate(x.fabric.links) if "/nic" in link.src and link.dst == "core" and i in time_s}
    assert sent == dict.fromkeys([f"{d.group}/nic{d.name[-1]}" for d in x.fabric.devices], wanted)


def nic_bytes(x: Lowered) -> set[Fraction]:
    time_s = folded_link_time(x.folded, x.callees, x.fabric, x.places)[0]
    return {time_s[i] * link.rate_Bps for i, link in enumerate(x.fabric.links) if "/nic" in link.src and link.dst == "core" and i in time_s}


@pytest.mark.parametrize(("degrees", "level"), [((8, 1, 1), 1), ((8, 1, 1), 2), ((8, 2, 1), 3)])
def test_copies_of_experts_share_a_server(degrees: tuple[int, int, int], level: int) -> None:
    """Where the ranks that divide experts fill several servers: what all replicas divide is put together among copies, so half goes over each NIC."""
    server = 2 * degrees[1]
    expert = degrees[0] // 2
    name = "tensor in data" if degrees[1] > 1 else "data"
    inside, across = (lowered(degrees, level, expert=expert, server=server, way=f"{name}, {x}", norm=level == 3) for x in (
        "copies of experts in servers", "spread over servers"))  # fmt: skip
    assert inside.layout.copies_in_servers and not across.layout.copies_in_servers
    same(inside, expand(inside.folded))
    assert check_program(inside.plain, programs=inside.callees, layout=inside.layout).ok
    (less,), (more,) = nic_bytes(inside), nic_bytes(across)
    assert less < more * 3 / 4
    wrong = msgspec.structs.replace(inside.layout, copies_in_servers=msgspec.UNSET)
    assert check_folded_training(inside.folded, inside.callees, wrong)
    assert any("none can share a server" in f.message for f in check_layout(msgspec.structs.replace(inside.layout, zero_level=0), None))


@pytest.mark.parametrize(("degrees", "expert", "spread"), [((8, 1, 1), 4, False), ((8, 1, 1), 8, True), ((8, 1, 1), 2, True), ((4, 2, 1), 1, True)])
def test_only_groups_that_fill_no_whole_servers_are_spread(degrees: tuple[int, int, int], expert: int, spread: bool) -> None:
    """In rank order what is spread cannot be folded, and says so."""
    x = lowered(degrees, expert=expert, server=4)
    ways = dict(placements_of(x.layout, x.fabric, alike=True))
    assert ("data, spread over servers" in ways or "tensor in data, spread over servers" in ways) is spread
    assert not any("spread" in way for way in dict(placements_of(x.layout, x.fabric)))
    in_order = tuple(d.name for d in x.fabric.devices)
    if spread:
        with pytest.raises(Unsupported, match=r"different lengths|not used like"):
            simulate_stored(x.folded, x.fabric, in_order, assumed_cost(x.fabric), programs=x.callees)
    else:
        assert x.places == in_order


@pytest.mark.parametrize(("level", "schedule", "context", "expert"), [(2, "interleaved", 1, 1), (1, "zb2p", 2, 1), (1, "interleaved", 1, 2)])
def test_plans_of_them_go_the_whole_way(
    level: int, schedule: str, context: int, expert: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Planned, written, read, proved without their written-out form, simulated and explained."""
    for module in (evaluate, order):
        monkeypatch.setattr(module, "MAX_PROGRAM_STEPS", 1)
    monkeypatch.setattr("meshwright.check.whole.MAX_EXPANDED_STEPS", 0)
    model = "experts.py:tiny" if expert > 1 else "gpt.py:tiny"
    fixed = LayoutWanted(data=2, tensor=2, pipeline=2, microbatch=1, context=context, expert=expert)
    wishes = (fixed, RecomputeWanted("none"), ShardingWanted(level=level), PipelineWanted(name=schedule))
    job = Training(model=str(EXAMPLES / model), global_batch=16)
    made = plan_training(job, boxes(4 * context, 2), graph=captured(job.model), wishes=wishes)
    assert made.layout is not None and made.prediction is not None and made.main.fold is not None and made.main.fold.members == 4 * context
    assert (made.layout.zero_level, made.layout.schedule, made.layout.context, made.layout.expert) == (level, schedule, context, expert)
    write_plan(tmp_path / "plan.json", made)
    again = read_plan(tmp_path / "plan.json")
    assert drive.check_plan(again).ok and drive.simulate_plan(again).makespan_s == made.prediction.time_s
    assert explain_plan(again, quick=True).breakdown.time_s == made.prediction.time_s


def test_messages_to_other_members_that_do_more_are_refused() -> None:
    x = lowered((1, 1, 2), 2, context=2, exchange="ring")
    s, end = x.folded.steps, ends_of(x.folded).ends
    taken = next(e.step for e in end if not e.sends)
    parts = s.parts.copy()
    parts[taken] |= 16
    with pytest.raises(Unsupported, match="passed on, added elsewhere"):
        ends_of(replace(x.folded, steps=replace(s, parts=parts)))
    count = s.count.copy()
    count[taken] += 1
    with pytest.raises(FormatError, match="receipts that do not match"):
        ends_of(replace(x.folded, steps=replace(s, count=count)))
    for column, message in (("dst_buffer", "uses a buffer of another rank"), ("chan_in", "not at the end of its channel")):
        row = getattr(s, column).copy()
        other = next(e for e in end if x.folded.buffers.actor[e.place[0]] != x.folded.buffers.actor[s.dst_buffer[taken]])
        row[taken] = other.place[0] if column == "dst_buffer" else other.channel
        with pytest.raises(FormatError, match=message):
            ends_of(replace(x.folded, steps=replace(s, **{column: row})))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("level", "expert", "exchange"), [(0, 2, ""), (1, 2, ""), (0, 1, "ulysses"), (0, 1, "ring")])
def test_what_comes_back_says_that_what_was_sent_has_left(level: int, expert: int, exchange: str) -> None:
    """Memory in the worst order of a folded program is at least that of the written-out form, and hardly more. Messages that wait for no answer are
    without it."""
    x = lowered((2, 1, 2), level, expert=expert, context=2 if exchange else 1, exchange=exchange)
    flat = inline(expand(x.folded), x.callees).program
    worst = worst_order_memory(flat, Order(flat))
    exact = np.array(worst.peak_bytes[: flat.ranks]) + np.array(worst.staging_bytes[: flat.ranks])
    folded = np.array(worst_bytes(x.folded, x.callees))
    assert np.all(folded >= exact) and np.all(folded <= 1.15 * exact)
    made = shadow(x.folded, x.callees)
    assert len(with_round_trips(made).steps.after_step) > len(made.program.steps.after_step)
    alone = shadow(lowered((2, 1, 2), level).folded, lowered((2, 1, 2), level).callees)
    assert with_round_trips(alone) is alone.program


def test_long_programs_are_bounded_along_the_computing_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps other lanes have: the bound of the sweep is no less than what a simulation needs, and no more than what closures say."""
    x = lowered((4, 1, 2), 0, expert=4)
    flat = inline(x.plain, x.callees).program
    simulated = simulate_program(flat, x.fabric, x.places, assumed_cost(x.fabric), works=training_works(x.graph, x.layout)).memory_peak_bytes
    closures = worst_order_memory(flat, Order(flat))
    monkeypatch.setattr("meshwright.check.program.memory.MIN_SWEPT_BUFFERS", 0)
    swept = worst_order_memory(flat, Order(flat))
    at_most = np.array(closures.peak_bytes) * 1.05
    needs = np.array(swept.peak_bytes) + np.array(swept.staging_bytes)
    assert np.all(needs[: flat.ranks] >= simulated[: flat.ranks]) and np.all(np.array(swept.peak_bytes) <= at_most)


def test_what_every_micro_batch_moves_alike_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that replicas divide are gathered, and gradients summed, in every micro-batch: images of their parts are found in the first."""
    images: list[int] = []
    own = proof._FoldedStep.image
    monkeypatch.setattr(proof._FoldedStep, "image", lambda self, *how: images.append(1) or own(self, *how))  # type: ignore[func-returns-value]
    followed = []
    for microbatches in (2, 6):
        x = lowered((4, 1, 1), 3)
        layout = with_microbatches(x.layout, microbatches)
        rings = RankOrderRings(CollectivePlanner(fabric=x.fabric, transport=assumed_cost(x.fabric).transport), x.places)
        program, callees = lower_training(x.graph, layout, one_f_one_b_order, rings, folded=True)
        images.clear()
        assert check_folded_training(program, callees, layout) == []
        followed.append(len(images))
    assert followed[0] == followed[1] > 0
