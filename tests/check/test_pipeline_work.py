"""Pipeline plans against their contract: what every step consumes and makes, by stage, micro-batch and phase; other work; figures of bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest

from meshwright.check import Verdict, check_plan
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import evaluation_work, gradient_work
from meshwright.drive.pipeline.fill import fill_plan
from meshwright.drive.pipeline.pipelines import plan_pipeline
from meshwright.plan.plan import Plan
from meshwright.program.hash import program_hash
from meshwright.program.program import Kind, Program
from meshwright.program.tables import Csr
from meshwright.testing.mutate import mutate
from meshwright.testing.mutate_order import rearranged

FIGURES = {"activation_bytes": 12, "message_bytes": 4, "weight_bytes": 64, "gradient_bytes": 16, "p2p_rate_Bps": 4}


@lru_cache
def plan(strategy: str = "1f1b", **more: Any) -> Plan:
    return plan_pipeline(PipelineProblem.of(more.pop("devices", 3), 4, **{**FIGURES, **more}), strategy)


def with_main(old: Plan, program: Program) -> Plan:
    name = program_hash(program)
    others = {k: p for k, p in old.programs.items() if k != old.cycle[0].program}
    return replace(old, programs={name: program, **others}, cycle=(msgspec.structs.replace(old.cycle[0], program=name), *old.cycle[1:]))


def said(verdict: Verdict) -> str:
    assert verdict.status == "wrong", verdict
    return verdict.findings[0].message


def without(p: Program, gone: Callable[[int], bool]) -> Program:
    return rearranged(p, [[s for s in range(int(a), int(b)) if not gone(s)] for a, b in zip(p.lanes.start, p.lanes.end, strict=True)])


def ops(p: Program, **columns: Any) -> Program:
    return replace(p, ops=replace(p.ops, **columns))


@pytest.mark.parametrize("strategy", ["1f1b", "gpipe", "zb1p", "chimera", "interleaved", "breadth-first"])
@pytest.mark.parametrize("bytes_", [None, 0])
def test_without_messages_nothing_arrives(strategy: str, bytes_: int | None) -> None:
    """Also where messages have no bytes: what they say is that the work before is done."""
    devices = 4 if strategy == "chimera" else 2
    made = plan(strategy, devices=devices, **({} if bytes_ is None else {"message_bytes": 0, "activation_bytes": 0, "gradient_bytes": 0}))
    assert check_plan(made).ok
    p = made.main
    mutant = with_main(made, without(p, lambda s: p.steps.kind[s] == Kind.TRANSFER))
    assert "nothing was written to" in said(check_plan(mutant))


@pytest.mark.parametrize(("change", "words"), [
    (lambda p: ops(p, microbatch=np.roll(p.ops.microbatch, 1)), "has microbatch"),
    (lambda p: ops(p, stage=p.ops.stage[::-1].copy()), "has stage"),
    (lambda p: ops(p, name=tuple({"F": "B", "B": "F"}[x] for x in p.ops.name)), "has name 'B', its action 0F0 says 'F'"),
    (lambda p: ops(p, graph=("stage9", *p.ops.graph[1:])), "has graph 'stage9'"),
    (lambda p: ops(p, accumulate=np.zeros_like(p.ops.accumulate)), "has accumulate 0"),
    (lambda p: replace(p, buffers=replace(p.buffers, chunk_bytes=p.buffers.chunk_bytes * 2)), "the problem says"),
    (lambda p: replace(p, buffers=replace(p.buffers, name=tuple(x.replace("out:0:1", "out:0:0") for x in p.buffers.name))), "two buffers 'out:0:0'"),
    (lambda p: replace(p, buffers=replace(p.buffers, name=tuple(x.replace("in:1:0", "other") for x in p.buffers.name))), "no buffer 'in:1:0'"),
    (lambda p: replace(p, lanes=replace(p.lanes, repeat=p.lanes.repeat * 2)), "a pipeline's step has none that does"),
])  # fmt: skip
def test_labels_of_steps_and_buffers(change: Callable[[Program], Program], words: str) -> None:
    assert words in said(check_plan(with_main(plan(), change(plan().main))))


def test_a_lane_too_many_or_too_few() -> None:
    p = plan().main
    compute = np.flatnonzero(p.steps.kind == Kind.COMPUTE)
    assert "the schedule says 8" in said(check_plan(with_main(plan(), without(p, lambda s: s == compute[7]))))
    stray = replace(p, lanes=replace(p.lanes, role=np.where(np.arange(len(p.lanes)) == 0, 2, p.lanes.role)))
    assert any("which this step is not to do" in f.message for f in check_plan(with_main(plan(), stray)).findings)


def test_reads_and_writes_are_those_of_the_action() -> None:
    p = plan().main
    op = next(k for k, name in enumerate(p.ops.name) if name == "B" and len(p.ops.reads[k]) > 6)
    for table, verb in (("reads", "read"), ("writes", "write")):
        rows = [getattr(p.ops, table)[k].tolist() for k in range(len(p.ops))]
        rows[op] = rows[op][3:]
        assert f"does not {verb}" in said(check_plan(with_main(plan(), ops(p, **{table: type(p.ops.reads).of(rows)}))))
        rows[op] = [*getattr(p.ops, table)[op].tolist(), *getattr(p.ops, table)[op].tolist()[:3]]
    names = {name: k for k, name in enumerate(p.buffers.name) if p.buffers.actor[k] == 0}
    rows = [p.ops.reads[k].tolist() for k in range(len(p.ops))]
    rows[0] += [names["saved:0:1"], 0, 1]
    assert "reads saved:0:1; 0F0 does not" in said(check_plan(with_main(plan(), ops(p, reads=type(p.ops.reads).of(rows)))))


def test_gradients_of_replicas_are_summed() -> None:
    made = plan(data=2)
    p = made.main
    mutant = with_main(made, without(p, lambda s: p.steps.kind[s] == Kind.CALL))
    assert "4 of 8 contributions lack" in said(check_plan(mutant))
    sharded = plan_pipeline(PipelineProblem.of(2, 4, **{**FIGURES, "data": 2}), "breadth-first", {"sharded": True})
    p = sharded.main
    mutant = with_main(sharded, without(p, lambda s: p.steps.kind[s] == Kind.CALL))
    assert "reads weights" in said(check_plan(mutant))


def test_w_follows_its_i() -> None:
    made = plan("zb1p")
    lists = [list(range(int(a), int(b))) for a, b in zip(made.main.lanes.start, made.main.lanes.end, strict=True)]
    p = made.main
    # Of the last stage, which is sent no gradient: elsewhere the order would be a race for that.
    lane = next(x for x in lists if p.steps.kind[x[0]] == Kind.COMPUTE and p.ops.stage[p.steps.op[x[0]]] == 2)
    runs = [(p.ops.name[op], int(p.ops.microbatch[op])) for op in p.steps.op[lane]]
    pair = runs.index(("I", 0)), runs.index(("W", 0))
    lane[pair[0]], lane[pair[1]] = lane[pair[1]], lane[pair[0]]
    doc = msgspec.to_builtins(made.job["schedule"])
    words = doc["orders"][2].split()
    words[pair[0]], words[pair[1]] = words[pair[1]], words[pair[0]]
    doc["orders"][2] = " ".join(words)
    endless = replace(p, buffers=replace(p.buffers, last=Csr.of([[]] * len(p.buffers))))  # nor is it one of lifetimes then
    mutant = replace(with_main(made, rearranged(endless, lists)), job={**made.job, "schedule": doc})
    assert "may run before" in said(check_plan(mutant))


@pytest.mark.parametrize(("part", "field", "value", "words"), [
    ("schedule", "devices", 2, "devices"), ("schedule", "stages", 4, "4 stages on 3 devices"), ("schedule", "copy_of", [0, 0], "2 micro-batches"),
    ("schedule", "copy_of", [0, 0, 0, 1], "copy"), ("schedule", "placement", [[0, 1, 3]], "placement"), ("schedule", "split", True, "device 0"),
    ("schedule", "orders", ["0F0", "", ""], "device 0 lacks"), ("problem", "message_bytes", [4, 4], "sizes"),
    ("schedule", "parts", "x", "ValueError"),
    ("problem", "message_bytes", [4, 8, 4], "the problem says 8"),
])  # fmt: skip
def test_schedules_that_contradict_themselves_or_the_program(part: str, field: str, value: Any, words: str) -> None:
    doc = {**msgspec.to_builtins(plan().job[part]), field: value}
    assert words in said(check_plan(replace(plan(), job={**plan().job, part: doc})))


def test_a_pipeline_plan_without_its_schedule_is_not_accepted() -> None:
    assert "say no work that can be followed" in said(check_plan(replace(plan(), job={k: v for k, v in plan().job.items() if k != "schedule"})))


# ---- other work ------------------------------------------------------------------------------------------------------------
@lru_cache
def filled(kind: str) -> Plan:
    if kind == "evaluation":
        return fill_plan(plan(), lambda problem, schedule: evaluation_work(problem, schedule, 1), most_steps=8).plan
    return fill_plan(plan(), lambda problem, schedule: gradient_work(problem, schedule, "shampoo", [("a", 0.2), ("b", 0.3)]), most_steps=8).plan


def step_with_work(made: Plan) -> int:
    return next(k for k, x in enumerate(made.cycle) if any(name.startswith("fill:") for name in made.programs[x.program].ops.graph))


def with_step(made: Plan, k: int, program: Program) -> Plan:
    name, old = program_hash(program), made.cycle[k].program
    programs = {name: program, **{key: p for key, p in made.programs.items() if key != old}}
    return replace(made, programs=programs, cycle=tuple(msgspec.structs.replace(x, program=name) if i == k else x for i, x in enumerate(made.cycle)))


@pytest.mark.parametrize("kind", ["evaluation", "gradients"])
def test_other_work_is_done_as_placed(kind: str) -> None:
    made = filled(kind)
    assert check_plan(made).ok
    k = step_with_work(made)
    p = made.programs[made.cycle[k].program]
    fill = [s for s in range(len(p.steps)) if p.steps.kind[s] == Kind.COMPUTE and p.ops.graph[p.steps.op[s]].startswith("fill:")]
    assert "which the plan puts into this step" in said(check_plan(with_step(made, k, without(p, lambda s: s == fill[0]))))
    named = ops(p, name=tuple("nothing" if x.startswith("fill:") else n for n, x in zip(p.ops.name, p.ops.graph, strict=True)))
    assert "which this step is not to do" in said(check_plan(with_step(made, k, named)))


def test_what_is_handed_over_arrives() -> None:
    made = filled("evaluation")
    k = step_with_work(made)
    p = made.programs[made.cycle[k].program]
    fill = {b for b, name in enumerate(p.buffers.name) if name.startswith("fill")}
    touched = [{int(p.steps.src_buffer[s]), int(p.steps.dst_buffer[s])} for s in range(len(p.steps))]
    moves = [s for s in range(len(p.steps)) if p.steps.kind[s] == Kind.TRANSFER and touched[s] & fill]
    assert moves
    assert "does not hold what was to be handed to it" in said(check_plan(with_step(made, k, without(p, lambda s: s in moves))))
    rows = [[] if x.startswith("fill:") else p.ops.reads[i].tolist() for i, x in enumerate(p.ops.graph)]
    assert "has not received what" in said(check_plan(with_step(made, k, ops(p, reads=type(p.ops.reads).of(rows)))))
    writes = [p.ops.writes[i].tolist() for i in range(len(p.ops))]
    op = next(i for i, x in enumerate(p.ops.graph) if x.startswith("fill:") and not len(p.ops.writes[i]))
    lane = p.lane_of_step()
    rank = int(p.lanes.actor[lane[int(np.flatnonzero((p.steps.kind == Kind.COMPUTE) & (p.steps.op == op))[0])]])
    stray = next(b for b, name in enumerate(p.buffers.name) if name.startswith("weights") and p.buffers.actor[b] == rank)
    writes[op] += [stray, 0, int(p.buffers.chunks[stray])]
    assert check_plan(with_step(made, k, ops(p, writes=type(p.ops.writes).of(writes)))).status == "wrong"


def test_pieces_and_items_follow_one_another() -> None:
    """Without its waits the second phase of an item may run before the first, and work before the actions that it waits for."""
    made = filled("gradients")
    k = step_with_work(made)
    p = made.programs[made.cycle[k].program]
    lists = [list(range(int(a), int(b))) for a, b in zip(p.lanes.start, p.lanes.end, strict=True)]
    row = next(x for x in lists if len(x) > 1 and all(p.steps.kind[s] == Kind.COMPUTE and p.ops.graph[p.steps.op[s]].startswith("fill:") for s in x))
    row.reverse()
    assert "may start before" in said(check_plan(with_step(made, k, rearranged(p, lists))))


# ---- the bound is of this pipeline -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("field", "value", "words"), [
    ("stages", 3, ""), ("microbatches", [5], "its microbatches are [5]"), ("split", True, ""), ("devices", 4, "its devices are 4"),
    ("activation_bytes", [12, 12, 13], "its activation_bytes"),
])  # fmt: skip
def test_a_bound_of_another_pipeline_is_refused(field: str, value: Any, words: str) -> None:
    made = plan()
    assert made.bound is not None
    data = {**made.bound.certificate.data, field: value}
    bound = msgspec.structs.replace(made.bound, certificate=msgspec.structs.replace(made.bound.certificate, data=data))
    verdict = check_plan(replace(made, bound=bound))
    assert (verdict.status == "ok") == (field == "stages") and (not words or any(words in f.message for f in verdict.findings)), verdict.findings


def test_seconds_that_the_problem_has_not() -> None:
    """The certificate of a slower pipeline is consistent in itself, and proves nothing about this one."""
    made, slower = plan(), plan(forward_s=2.0)
    assert slower.bound is not None
    assert "of stage 0 takes 1 s, it says 2" in said(check_plan(replace(made, bound=slower.bound, prediction=None)))
    slow_links = plan(p2p_rate_Bps=1)
    assert slow_links.bound is not None
    assert "a message over border 0 takes 1 s, it says 4" in said(check_plan(replace(made, bound=slow_links.bound, prediction=None)))


def test_mutants_that_a_checker_of_order_alone_accepts() -> None:
    made, rng = plan("1f1b", data=2), np.random.default_rng(0)
    for operator in ("wrong micro-batch", "drop accumulate", "drop write", "copy becomes reduce", "wrong destination buffer", "drop backward"):
        mutant = mutate(made.main, operator, rng)
        assert mutant is not None and check_plan(with_main(made, mutant.program)).status == "wrong", operator
