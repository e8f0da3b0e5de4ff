"""Rows that are exchanged a second time before backward: what is wrong with the second forward pass is found, and other routing then is an error."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from expert_loops import plan_for

import meshwright as mw
from meshwright.check.training.layout import check_layout
from meshwright.check.training.step import check_training
from meshwright.errors import RunError
from meshwright.plan.forward_again import group_ends, remade_values, run_again
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part

LAYOUT = (("expert", 2), ("fabric", "laptop:2"))


@pytest.fixture(scope="module")
def plan():
    return plan_for("float64", (*LAYOUT, ("recompute", "layers")))


@pytest.fixture(scope="module")
def program(plan):
    return inline(plan.main, plan.programs).program


def told(program, layout):
    return " ".join(f.message for f in check_training(program, layout))


def buffer(program, name, rank=0):
    return next(b for b, n in enumerate(program.buffers.name) if n == name and int(program.buffers.actor[b]) == rank)


def test_what_is_made_again_is_given_up_before(plan, program):
    layout = plan.layout
    assert told(program, layout) == ""
    groups = layout.forward_again
    assert len(groups) == 4 and run_again(layout) == {k for g in groups for k in g} and group_ends(layout) == {g[-1]: g for g in groups}
    remade = remade_values(layout)
    rows = [x for x in layout.exchanges if x.counts is not msgspec.UNSET]
    for x in rows:
        assert any({x.source, x.target} <= values and x.counts not in values for values in remade.values())
        first, second = buffer(program, f"act:{x.target}:0"), buffer(program, f"remade:{x.target}:0")
        forward = [s for s in np.flatnonzero(program.steps.kind == Kind.COMPUTE).tolist() if program.ops.name[int(program.steps.op[s])] == "F"]
        assert set(program.buffers.last[first].tolist()) <= set(forward) and program.buffers.last[second].tolist()
    assert not any(n.startswith("remade:") and "/counts" in n for n in program.buffers.name)  # numbers of rows stay


def test_memory_is_less_by_what_layers_keep(plan):
    kept = plan_for("float64", LAYOUT)
    assert max(plan.prediction.memory_peak_bytes) < max(kept.prediction.memory_peak_bytes) and plan.prediction.time_s > kept.prediction.time_s


def test_passes_that_the_layout_does_not_say_are_found(plan, program):
    without = msgspec.structs.replace(plan.layout, forward_again=msgspec.UNSET)
    assert "runs R" in told(program, without) and "times instead of 0" in told(program, without)
    kept = plan_for("float64", LAYOUT)
    program = inline(kept.main, kept.programs).program
    groups = msgspec.structs.replace(kept.layout, forward_again=(tuple(kept.layout.stages[0].segments[1:3]),))
    assert "0 times instead of 1" in told(program, groups)


def ops_of(program, name):
    return [o for o, n in enumerate(program.ops.name) if n == name]


def renamed(program, ops, old, new, lists="reads"):
    """The ops with one buffer for another among what they read or write."""
    table = getattr(program.ops, lists)
    values = table.values.copy()
    for op in ops:
        row = values[table.ptr[op] : table.ptr[op + 1]].reshape(-1, 3)
        row[row[:, 0] == old, 0] = new
    return replace(program, ops=replace(program.ops, **{lists: replace(table, values=values)}))


def test_a_pass_that_reads_what_was_given_up_is_found(plan, program):
    x = next(x for x in plan.layout.exchanges if x.target.endswith("/rows"))
    first, second = buffer(program, f"act:{x.target}:0"), buffer(program, f"remade:{x.target}:0")
    assert f"does not read remade:{x.target}:0" in told(renamed(program, ops_of(program, "R"), second, first), plan.layout)
    op = next(o for o in ops_of(program, "B") if any(program.buffers.name[b].startswith("remade:") for b in program.ops.reads[o][::3]))
    kept = next(program.buffers.name[b] for b in program.ops.reads[op][::3].tolist() if program.buffers.name[b].startswith("remade:"))
    rank = int(program.buffers.actor[program.ops.reads[op][0]])
    old = kept.replace("remade:", "act:")
    assert f"reads {old}" in told(renamed(program, [op], buffer(program, kept, rank), buffer(program, old, rank)), plan.layout)
    made, given = buffer(program, f"remade:{x.source}:0"), buffer(program, f"act:{x.source}:0")
    text = told(renamed(program, ops_of(program, "R"), made, given, "writes"), plan.layout)
    assert f"does not write {x.source}" in text and "which is of the other forward pass" in text
    key = next(s.key for s in plan.layout.segments if x.target in s.reads)
    saved, other = buffer(program, f"saved:{key}:0"), buffer(program, f"act:{x.source}:0")
    forward = [o for o in ops_of(program, "F") if program.ops.graph[o] == key]
    row = program.ops.writes[forward[0]].reshape(-1, 3)[0, 0]
    assert other != row and "which is of the other forward pass" in told(renamed(program, forward, int(row), saved, "writes"), plan.layout)


@pytest.mark.parametrize(("damage", "text"), [
    ("lost", "nothing has been written"), ("other block", "holds another value"), ("whole blocks", "in whole blocks, and the layout says otherwise"),
])  # fmt: skip
def test_a_second_exchange_that_brings_something_else_is_found(damage, text, plan, program):
    x, s = next(x for x in plan.layout.exchanges if x.target.endswith("/rows")), program.steps
    into = buffer(program, f"remade:{x.target}:0")
    step = next(i for i in np.flatnonzero(s.dst_buffer == into).tolist() if s.parts[i] & Part.STORE)
    local = next(i for i in np.flatnonzero(s.dst_buffer == into).tolist() if not s.parts[i] & Part.RECV)
    kind, chunk, size = s.kind.copy(), s.src_chunk.copy(), s.size.copy()
    if damage == "lost":
        kind[local] = Kind.NOP
    elif damage == "other block":
        chunk[local] = 1 - chunk[local]
    else:
        size[step if s.parts[step] & Part.RECV else next(i for i in np.flatnonzero(s.dst_buffer == into).tolist() if s.parts[i] & Part.RECV)] = -1
    assert text in told(replace(program, steps=replace(s, kind=kind, src_chunk=chunk, size=size)), plan.layout)


@pytest.mark.parametrize(("groups", "text"), [
    ((("s0.1", "s0.3"),), "no neighbours of one stage"), ((("s0.1", "s0.2"), ("s0.2", "s0.3")), "or run in two groups"),
    ((("nothing",),), "no neighbours of one stage"), (((),), "nothing run forward again"),
])  # fmt: skip
def test_groups_that_cannot_be_are_found(groups, text, plan):
    layout = msgspec.structs.replace(plan.layout, forward_again=groups)
    assert any(text in f.message for f in check_layout(layout, None))


def test_what_may_not_run_twice_is_found(plan):
    changed = msgspec.structs.replace(plan.layout, batch_sums=("x",))
    assert any("run forward again beside statistics" in f.message for f in check_layout(changed, None))
    segments = tuple(msgspec.structs.replace(s, step=SimpleNamespace()) for s in plan.layout.segments)
    found = check_layout(msgspec.structs.replace(plan.layout, segments=segments), None)
    assert any("by plans of their steps" in f.message for f in found)


def test_layers_that_may_not_run_twice_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    batch = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    made = mw.plan(model, batch, fabric="laptop:1", loss=torch.nn.functional.cross_entropy, recompute="layers")
    assert made.layout.forward_again == (("s0.0",),)  # the linear layer; statistics of batches would be counted twice
    assert not any("batch_norm" in n for s in made.layout.segments if s.key == "s0.0" for n in s.nodes)


def test_routing_that_changes_between_the_passes_is_an_error(plan, program):
    """Numbers of rows that the second pass makes are those that rows were sent by."""
    from meshwright.run.train.work import TrainingWork

    x = next(x for x in plan.layout.exchanges if x.target.endswith("/counts"))
    s = next(s for s in plan.layout.segments if x.source in s.writes)
    seen = []

    class Segment(SimpleNamespace):
        def forward(self, *given):
            return [torch.tensor([1, 2, 3, 4]) if v == x.source else torch.zeros(1) for v in s.writes]

    work = TrainingWork(program, plan.layout, 0, SimpleNamespace(
        loss="", once={}, draws=SimpleNamespace(), buffers={}, gradients={}, groups={}, counts=None, segments={}), None, None)  # fmt: skip
    names = {n: b for b, n in enumerate(program.buffers.name) if int(program.buffers.actor[b]) == 0}
    values = [None] * len(program.buffers)
    memory = SimpleNamespace(by_name=names, values=values, read=lambda b: values[b], put=lambda b, v: seen.append(b))
    segment = Segment(key=s.key, reads=s.reads, writes=s.writes, inputs=(), gathers=frozenset(), split=False, random=False)
    run = work._forward_again(segment, 0, memory)
    values[names[f"act:{x.source}:0"]] = torch.tensor([1, 2, 3, 4])
    run()
    assert seen
    values[names[f"act:{x.source}:0"]] = torch.tensor([1, 2, 4, 3])
    with pytest.raises(RunError, match="other numbers of rows to experts when it ran forward again"):
        run()


def test_a_plan_with_layers_says_so(plan):
    from meshwright.report.plan_text import plan_text

    entry = plan.decisions["recompute"]
    assert entry["strategy"] == "layers" and entry["options"]["stages"][0]["layers"] == 4 and entry["cite"]
    assert "layers: stage 0 4 layers" in " ".join(plan_text(plan).split())


def test_one_is_chosen_where_nothing_else_fits():
    """Between what layers need that run again whole and what every other choice needs: tensor ranks then sum a layer's results twice."""
    layers = (torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)) for _ in range(6))
    model = torch.nn.Sequential(torch.nn.Sequential(*layers))
    batch = torch.randn(64, 16, 8), torch.randn(64, 16, 8)
    options = {"loss": torch.nn.functional.mse_loss, "data": 1, "tensor": 2, "pipeline": 1, "microbatch": 64}
    need = {p: max(mw.plan(model, batch, fabric="laptop:2", recompute=p, **options).prediction.memory_worst_bytes) for p in ("full", "layers")}
    assert need["layers"] < need["full"]
    fabric = mw.read_fabric("laptop:2")
    fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=need["layers"]) for d in fabric.devices))
    for policy in ("auto", "full"):
        made = mw.plan(model, batch, fabric=fabric, recompute=policy, **options)
        assert made.layout.forward_again and made.decisions["recompute"]["why"].startswith("does not fit otherwise")
    assert made.prediction.phases_s["tensor-parallel"] > 0
