"""The order in which messages are issued on devices without tags: judged by NCCL's rules, beside the order with receives posted ahead, which they
refuse; and walked for real over gloo by ranks that do nothing else until a group is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_stages import make
from rig import TINY, fabric_of, grouped, in_threads, lowered
from tensor_rig import plan_case

from meshwright.check.issued import check_issued
from meshwright.check.verdict import Verdict
from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import KFACCosts, kfac_work
from meshwright.drive.pipeline.fill import fill_plan
from meshwright.drive.pipeline.pipelines import default_candidates, make_strategy, plan_pipeline, problem_of_plan, schedule_of_plan
from meshwright.errors import Deadlock, MeshwrightError
from meshwright.plan.plan import Plan
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline
from meshwright.program.program import Part, Program
from meshwright.program.tables import I32
from meshwright.run.executor.collective import callable_form
from meshwright.run.executor.executor import Executor
from meshwright.run.executor.lanes import fuse_lanes
from meshwright.run.executor.memory import RankMemory
from meshwright.run.executor.rounds import COMPUTE, MESSAGES, Round, compile_rounds, issued_orders
from meshwright.run.launch.pipeline_rank import make_walk, worst_difference
from meshwright.run.launch.rehearse import with_real_sizes
from meshwright.run.pipeline.orders import meetings, pipeline_orders
from meshwright.run.pipeline.stages import Given
from meshwright.testing.posted_ahead import posted_ahead

CPU = torch.device("cpu")
Walked = tuple[Program, list[I32], int]  # with the sends that may wait to be taken


# ---- what is judged --------------------------------------------------------------------------------------------------


@cache
def trainings() -> dict[str, Walked]:
    found = {}
    for degrees, microbatch in (((4, 1, 1), 2), ((2, 2, 1), 2), ((2, 1, 2), 1), ((1, 1, 4), 2), ((1, 2, 2), 2), ((1, 4, 1), 8), ((2, 2, 2), 1)):
        for collective in ("ring", "forestcoll"):
            _, program, callees = lowered(TINY, degrees, microbatch=microbatch, global_batch=8, collective=collective)
            flat = inline(program, callees).program
            found[f"{degrees} {collective}"] = flat, fuse_lanes(flat), 0
    for name, degrees, level in (("even", (2, 1, 1), 3), ("odd_tied", (2, 1, 2), 2), ("grouped_expand", (2, 2, 1), 1), ("odd_tied", (2, 1, 2), 3)):
        case = plan_case(name, degrees, microbatch=1, global_batch=2 * degrees[0], sharding=DataSharding(level, True, 1500))
        found[f"{name} {degrees} zero {level}"] = case.program, list(case.orders), 0
    return found


def pipeline_plans(devices: int, microbatches: int, **more: Any) -> Iterator[tuple[str, Plan]]:
    problem = PipelineProblem.of(devices, microbatches, forward_s=1.0, backward_s=2.0, **more)
    for name, options in [*default_candidates(problem), ("dualpipe-v", {})]:
        try:
            make_strategy(name, options).plan(problem)
        except MeshwrightError:
            continue
        yield f"{name} {options} {devices} {microbatches} {more}", plan_pipeline(problem, name, options)


@cache
def pipelines() -> dict[str, Walked]:
    found = {}
    for devices, microbatches, more in ((2, 3, {}), (4, 8, {}), (4, 5, {}), (2, 4, {"data": 2})):
        for name, plan in pipeline_plans(devices, microbatches, **more):
            program = inline(plan.main, plan.programs).program
            found[name] = program, pipeline_orders(plan, problem_of_plan(plan), schedule_of_plan(plan))[0], len(program.steps)
    return found


@cache
def collectives() -> dict[str, Walked]:
    found = {}
    sums = [("all-reduce", name) for name in ("ring", "forestcoll", "double-tree")]
    for op, name in (*sums, ("all-to-all", "direct"), ("all-gather", "bruck")):
        names = tuple(d.name for d in fabric_of(4).devices)
        problem = CollectiveProblem(fabric=fabric_of(4), op=op, ranks=names, size_bytes=48_000)
        form = callable_form(strategy(name)().plan(problem, rng=np.random.default_rng(0)).program)
        found[f"{op} {name}"] = form, fuse_lanes(form), 0
    return found


@pytest.mark.parametrize("kind", [trainings, pipelines, collectives], ids=lambda f: f.__name__)
def test_every_order_ends_even_if_devices_run_all_as_issued(kind: Any) -> None:
    assert len(kind()) >= 5
    for name, (program, orders, sends_ahead) in kind().items():
        found = issued_orders(program, compile_rounds(program, orders, sends_ahead=sends_ahead))
        verdict = check_issued(found, in_issue_order=True)
        assert verdict.ok, (name, verdict.findings)
        messages = int(((program.steps.parts & Part.SEND) > 0).sum())
        assert verdict.facts["messages"] == messages > 0
        assert check_issued(found).ok


@pytest.mark.parametrize("kind", [trainings, pipelines], ids=lambda f: f.__name__)
def test_receives_posted_ahead_do_not(kind: Any) -> None:
    """With communicators made at first use, as torch makes them, all deadlock; made before and on streams of their own, all end, but not in the order
    of issue: they stand and fall with room on the device."""
    for name, (program, orders, sends_ahead) in kind().items():
        (found,) = check_issued(posted_ahead(program, orders, sends_ahead, ready=False)).findings
        assert found.check == "deadlock" and "makes its communicator" in found.message, name
        assert len(found.witness["ranks"]) >= 2
        eager = posted_ahead(program, orders, sends_ahead, ready=True)
        assert check_issued(eager).ok, name
        assert not check_issued(eager, in_issue_order=True).ok, name


@pytest.mark.parametrize(("name", "devices", "microbatches"), [("chimera", 4, 4), ("interleaved", 4, 8), ("1f1b", 2, 4)])
def test_ranks_that_meet_in_a_compute_step(name: str, devices: int, microbatches: int) -> None:
    """K-FAC's sums, on a communicator of their own: a message that becomes ready behind a sum must not share a round with one before it."""
    problem = PipelineProblem.of(devices, microbatches, forward_s=0.02, activation_bytes=256, data=2, gradient_bytes=4096)
    found = fill_plan(plan_pipeline(problem, name), lambda p, s: kfac_work(p, s, KFACCosts(curvature_s=0.008, inverse_s=0.02, layers=3)))
    program = inline(found.plan.main, found.plan.programs).program
    together = meetings(program)
    orders, _ = pipeline_orders(found.plan, problem, found.judged.schedule)
    assert len(together) >= 2

    def verdict(told: Sequence[Sequence[int]]) -> Verdict:
        rounds = compile_rounds(program, orders, sends_ahead=len(program.steps), together=told)
        return check_issued(issued_orders(program, rounds, together), in_issue_order=True)

    assert verdict(together).ok
    if name != "1f1b":
        assert verdict(()).findings[0].check == "deadlock", "what the rounds are not told, they do not keep"


# ---- rounds ----------------------------------------------------------------------------------------------------------


def relay(depth: int) -> Program:
    """Rank 0 computes and sends three values to rank 1, which computes on each and sends it to rank 2."""
    b = ProgramBuilder(ranks=3)
    lanes = [b.lane(r) for r in range(3)]
    arrivals, posts = b.lane(1), b.lane(1)
    x = [[b.buffer(r, chunks=1, chunk_bytes=4) for _ in range(3)] for r in range(3)]
    first, second = b.channel(0, 1, depth=depth), b.channel(1, 2, depth=depth)
    senders = b.lane(0)
    for i in range(3):
        made = lanes[0].compute(b.op("F", writes=[(x[0][i], 0, 1)]))
        senders.send(first, x[0][i], 0, after=[made])
        came = arrivals.recv(first, x[1][i], 0)
        then = lanes[1].compute(b.op("F", reads=[(x[1][i], 0, 1)], writes=[(x[1][i], 0, 1)]), after=[came])
        posts.send(second, x[1][i], 0, after=[then])
        lanes[2].recv(second, x[2][i], 0)
    return b.build()


RELAYED = [np.array(x, np.int32) for x in ([0, 15, 1, 16, 2, 17], [9, 3, 12, 10, 4, 13, 11, 5, 14], [6, 7, 8])]  # each value at once to the next


def groups_of(depth: int, rank: int) -> list[tuple[int, int, int]]:
    """(position in the walk, sends, receives) of the relay's groups at a rank, in order."""
    before = compile_rounds(relay(depth), RELAYED)[rank].before
    return [(p, len(one.sends), len(one.receives)) for p in sorted(before) for one in before[p] if isinstance(one, Round)]


def test_a_message_does_not_wait_for_one_that_is_computed_later() -> None:
    """Three sends of rank 0 are three rounds, though a channel of three messages would hold them all at once; each goes when it is made."""
    assert groups_of(3, 0) == [(2, 1, 0), (4, 1, 0), (6, 1, 0)]
    assert [x[1:] for x in groups_of(3, 2)] == [(0, 1)] * 3


def test_what_comes_early_is_taken_while_a_rank_computes() -> None:
    """Rank 1 asks for the second value before it computes on the first, and for the third together with its first send."""
    assert groups_of(3, 1) == [(0, 0, 1), (0, 0, 1), (3, 1, 1), (6, 1, 0), (9, 1, 0)]


def test_no_receive_is_issued_before_its_credit() -> None:
    """With room for one message, the second is asked for when the first is taken, before rank 1 computes on it."""
    assert [x for x in groups_of(1, 1) if x[2]] == [(0, 0, 1), (1, 0, 1), (4, 1, 1)]


def test_walks_of_different_orders_are_refused() -> None:
    b = ProgramBuilder(ranks=2)
    x, y = b.buffer(0, chunks=2, chunk_bytes=4), b.buffer(1, chunks=2, chunk_bytes=4)
    there, back = b.channel(0, 1), b.channel(1, 0)
    b.lane(0).send(there, x, 0)
    b.lane(0).recv(back, x, 1)
    b.lane(1).recv(there, y, 0)
    b.lane(1).send(back, y, 1)
    program = b.build()
    assert len(compile_rounds(program, [np.array([0, 1], np.int32), np.array([2, 3], np.int32)])) == 2
    with pytest.raises(Deadlock, match="the orders of steps of ranks 0, 1 wait for each other") as caught:
        compile_rounds(program, [np.array([1, 0], np.int32), np.array([2, 3], np.int32)])
    assert caught.value.data["ranks"] == [0, 1]


# ---- the executor ----------------------------------------------------------------------------------------------------


class Notes:
    """A grouped transport of one rank that notes what it is told; messages bring ones."""

    grouped = True

    def __init__(self) -> None:
        self.made: list[Any] = []

    def exchange(self, sends: Any, receives: Any) -> list[int]:
        for tensor, _, _ in receives:
            tensor.fill_(1)
        self.made.append([(peer, True) for _, peer, _ in sends] + [(peer, False) for _, peer, _ in receives])
        return [sum(isinstance(x, list) for x in self.made) - 1]

    def wait(self, work: int) -> None:
        self.made.append(work)


class Idle:
    """Work that writes what its operator writes."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def compile(self, op: int, memory: RankMemory) -> Any:
        written = self.program.ops.writes[op].tolist()[::3]
        return lambda: [memory.view(b, 0, 1)().fill_(1) for b in written]


def test_the_executor_issues_what_is_judged() -> None:
    chain = relay(2)
    for program, orders, sends_ahead in [*collectives().values(), (chain, fuse_lanes(chain), 0)]:
        judged = issued_orders(program, compile_rounds(program, orders, sends_ahead=sends_ahead))
        for rank in range(program.ranks):
            notes = Notes()
            executor = Executor(
                program, orders, rank, memory=RankMemory(program, rank, CPU, {}, {}), transport=notes, work=Idle(program), sends_ahead=sends_ahead
            )
            executor.run()
            assert not executor._sent and not executor._received
            entries = judged.ranks[rank]
            made = [i for i, e in enumerate(entries) if e.kind == "messages"]
            assert [x for x in notes.made if isinstance(x, list)] == [[(m.peer, m.sends) for m in entries[i].messages] for i in made]
            # In their order, a group or a wait for one: the same in what is judged.
            expected = [made.index(e.after[0]) if e.kind == "work" else "group" for e in entries if e.kind == "messages" or e.after]
            assert [x if isinstance(x, int) else "group" for x in notes.made] == expected
            assert {e.stream for e in entries if e.kind == "work"} <= {COMPUTE} and {entries[i].stream for i in made} == {MESSAGES}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "options", "devices", "microbatches", "more"),
    [
        ("1f1b", {}, 4, 8, {}), ("gpipe", {}, 3, 4, {}), ("interleaved", {"chunks": 2}, 2, 4, {}), ("breadth-first", {"chunks": 2}, 2, 4, {}),
        ("chimera", {}, 4, 4, {}), ("chimera", {"split": True}, 2, 3, {"data": 2}), ("zb1p", {}, 4, 5, {}), ("zbv", {}, 4, 5, {}),
        ("v-half", {}, 4, 5, {}), ("dualpipe-v", {}, 4, 8, {}), ("1f1b", {}, 2, 3, {"data": 2}),
    ],
)  # fmt: skip
def test_pipelines_train_alike(name: str, options: dict[str, Any], devices: int, microbatches: int, more: dict[str, Any]) -> None:
    """Gradients and loss of serial training, by ranks that stand at a group until it is over."""
    plan = plan_pipeline(PipelineProblem.of(devices, microbatches, forward_s=1.0, backward_s=2.0, **more), name, options)
    problem, schedule = problem_of_plan(plan), schedule_of_plan(plan)
    modules, inputs, targets, loss = make(schedule.stages, schedule.microbatches * problem.data)
    given = Given(modules=tuple(modules), inputs=tuple(inputs), targets=tuple(targets), loss=loss)
    plan = with_real_sizes(plan, given)
    orders, _ = pipeline_orders(plan, problem, schedule)

    def body(rank: int, group: Any) -> float:
        walk = make_walk(plan, orders, rank, given, grouped(group), CPU)
        for _ in range(2):
            walk.clear()
            walk.step()
        return worst_difference(given, walk)

    assert max(in_threads(problem.devices * problem.data, body)) < 1e-9
