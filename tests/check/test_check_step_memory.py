"""Step plans: the checker against the simulator, and against plans that are wrong in one known way."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.step import dropped_at_last_use, finished, keep_everything
from meshwright.errors import CheckFailed, UsageError
from meshwright.graph.step_graph import Alternative, StepAction, StepGraph, StepNode, StepPlan, StepStorage
from meshwright.simulate.step_memory import simulate_step
from meshwright.testing.steps import random_runs, random_step_graph

replace = msgspec.structs.replace


@given(st.integers(0, 10**9), st.integers(1, 12), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_checker_and_simulator_agree(seed: int, forward: int, keep: float) -> None:
    rng = random.Random(seed)
    graph = replace(random_step_graph(rng, forward=forward), in_flight=rng.choice((1, 1, 2, 4)))
    runs, boundary = random_runs(graph, rng, keep=keep)
    plan = finished(graph, runs, boundary, strategy="random")
    verdict = check_step_plan(graph, plan)
    assert verdict.ok, verdict.findings
    assert (verdict.facts["peak_bytes"], verdict.facts["time_s"]) == (plan.peak_bytes, plan.time_s)
    assert plan.time_s >= keep_everything(graph).time_s or any(a >= 0 for _, a in runs)
    damaged = _damaged(graph, plan, rng)
    assert check_step_plan(graph, damaged).status == "wrong"


def _damaged(graph: StepGraph, plan: StepPlan, rng: random.Random) -> StepPlan:
    """One claim or one action changed so that it must be noticed."""
    kind = rng.choice(("peak", "time", "early", "leak", "budget", "saved", "missing"))
    actions = [*plan.actions]
    if kind == "peak":
        return replace(plan, peak_bytes=plan.peak_bytes + rng.choice((-1, 1)))
    if kind == "time":
        return replace(plan, time_s=plan.time_s * 1.01)
    if kind == "budget":
        return replace(plan, budget_bytes=plan.peak_bytes - 1)
    if kind == "saved":
        return replace(plan, saved=(*plan.saved, graph.boundary) if graph.boundary not in plan.saved else plan.saved[1:])
    if kind == "early":  # an operand is let go by the action before its reader's
        readers = [(i, x) for i, a in enumerate(actions) for x in a.drops if i and x in graph.nodes[a.node].inputs and x != actions[i - 1].node]
        if readers:
            i, x = rng.choice(readers)
            actions[i] = replace(actions[i], drops=tuple(y for y in actions[i].drops if y != x))
            actions[i - 1] = replace(actions[i - 1], drops=(*actions[i - 1].drops, x))
            return replace(plan, actions=tuple(actions))
    if kind == "leak":  # held where it peaks: a run that makes something is let go at the very end, and the claim stays
        for i, a in enumerate(actions):
            for x in a.drops:
                if i < plan.peak_at and graph.nodes[x].makes and all(b.node != x for b in actions[i + 1 :]) and _alone(graph, x):
                    actions[i] = replace(a, drops=tuple(y for y in a.drops if y != x))
                    return replace(plan, actions=tuple(actions))
    where = next(i for i, a in enumerate(actions) if a.node in graph.results)
    return replace(plan, actions=(*actions[:where], *actions[where + 1 :]))


def _alone(graph: StepGraph, x: int) -> bool:
    return all(n is graph.nodes[x] or not {*n.storages} & {*graph.nodes[x].storages} for n in graph.nodes)


def chain(**changes: Any) -> StepGraph:
    """x -> a -> b (loss) ; backward: c reads b, a; d reads c."""
    sizes = (("x", 8, "input"), ("a", 16, "made"), ("b", 16, "made"), ("c", 4, "made"), ("d", 4, "made"))
    nodes = [StepNode(name="x", target="placeholder", phase="input", storages=(0,))]
    reads: dict[str, tuple[int, ...]] = {"a": (0,), "b": (1,), "c": (1, 2), "d": (3, 1)}
    for i, (name, inputs) in enumerate(reads.items(), 1):
        phase = "forward" if i < 3 else "backward"
        node = StepNode(name=name, target="op", phase=phase, inputs=inputs, storages=(i,), makes=(i,), time_s=1.0)  # type: ignore[arg-type]
        nodes.append(replace(node, **changes.get(name, {})))
    storages = tuple(StepStorage(size_bytes=s, owner=o, kind=k) for o, s, k in sizes)  # type: ignore[arg-type]
    return StepGraph(name="chain", nodes=tuple(nodes), storages=storages, boundary=3, results=(2, 4))


def plan_of(graph: StepGraph, *actions: tuple[int, ...], boundary: int = 2, alternative: dict[int, int] | None = None) -> StepPlan:
    """Unchecked claims of zero."""
    made = tuple(StepAction(node=a[0], drops=a[1:], alternative=(alternative or {}).get(i, -1)) for i, a in enumerate(actions))
    return StepPlan(strategy="x", options={}, actions=made, boundary=min(boundary, len(made)), saved=(), peak_bytes=0, peak_at=0, time_s=0.0)


def messages(graph: StepGraph, plan: StepPlan) -> str:
    return "\n".join(f.message for f in check_step_plan(graph, plan).findings)


def test_by_hand() -> None:
    """Keeping a: 8+16+16 forward; while c runs 8+16+16+4; while d runs 8+16+4+4 and the loss 16."""
    plan = keep_everything(chain())
    assert (plan.peak_bytes, plan.time_s, plan.saved) == (48, 4.0, (1, 2))
    assert simulate_step(chain(), plan.actions).bytes_at == (24, 40, 44, 48)
    assert plan.actions[-1].drops == (1, 3)
    assert check_step_plan(chain(), plan).ok


@pytest.mark.parametrize(
    ("graph", "actions", "said"),
    [
        (chain(), [(1, 1), (2,), (3,), (4,)], "action 1 (b): reads a, which is not held"),
        (chain(), [(1,), (1,)], "still held from action 0"),
        (chain(), [(1,), (2, 2), (3,), (4,)], "drops b, a result of the step"),
        (chain(), [(1,), (2, 3), (3,), (4,)], "drops c, which is not held"),
        (chain(), [(1,), (2,), (3, 3), (3,), (4,)], "runs again, though it is a backward node"),
        (chain(), [(0,)], "is a placeholder"),
        (chain(), [(9,)], "names node 9"),
        (chain(), [(1, 77)], "drops a node that does not exist"),
        (chain(), [(1,), (2,), (3,)], "d, a result of the step, is never made"),
        (chain(a={"writes": (0,)}), [(1, 1), (1,)], "runs again, though it changes a tensor"),
        (chain(b={"writes": (1,)}), [(1,), (2,), (3,), (4,)], ""),
        (chain(c={"writes": (1,)}, d={"inputs": (1,)}), [(1,), (2,), (4,), (3,)], "d): reads a after nothing changed it"),
        (chain(a={"random": True}, b={"random": True, "inputs": (0,)}), [(2,), (1,)], "draws random numbers after b"),
    ],
)
def test_wrong_plans(graph: StepGraph, actions: list[tuple[int, ...]], said: str) -> None:
    found = messages(graph, plan_of(graph, *actions))
    assert said in found if said else "action" not in found


def test_backward_in_the_forward_part_and_late_results() -> None:
    assert "is a backward node in the forward part" in messages(chain(), plan_of(chain(), (1,), (2,), (3,), (4,), boundary=3))
    good = keep_everything(chain())
    assert "made after it" in messages(chain(), replace(good, boundary=1))


def test_writing_over() -> None:
    """b over a: a is gone, so c must be made from b alone; the storage is reused."""
    other = Alternative(name="in-place", inputs=(1,), time_s=1.0, over=1)
    from_b = Alternative(name="from b", inputs=(2,), time_s=1.0)
    graph = chain(b={"alternatives": (other,)}, c={"alternatives": (from_b,)}, d={"inputs": (3,)})
    plan = finished(graph, [(1, -1), (2, 0), (3, 0), (4, -1)], 2, strategy="x")
    assert check_step_plan(graph, plan).ok, messages(graph, plan)
    assert (plan.peak_bytes, plan.saved) == (8 + 16 + 4 + 4, (2,))
    assert "reads a, which is not held" in messages(graph, plan_of(graph, (1,), (2,), (3,), (4,), alternative={1: 0}))
    small = replace(graph, storages=(graph.storages[0], replace(graph.storages[1], size_bytes=15), *graph.storages[2:]))
    assert "over 15 B of a" in messages(small, plan_of(small, (1,), (2,), alternative={1: 0}))
    fixed = replace(graph, results=(1, 2, 4))
    assert "writes over a, a result of the step" in messages(fixed, plan_of(fixed, (1,), (2,), alternative={1: 0}))


def test_views_hold_their_storage() -> None:
    view = {"storages": (1,), "makes": ()}
    graph = chain(b=view, c={"inputs": (2,)}, d={"inputs": (3, 2)})
    plan = finished(graph, [(1, -1), (2, -1), (3, -1), (4, -1)], 2, strategy="x")
    assert check_step_plan(graph, plan).ok
    assert plan.peak_bytes == 8 + 16 + 4 + 4
    again = [(1, -1), (2, -1), (1, -1), (3, -1), (4, -1)]  # a anew, while its view b holds the first
    assert finished(graph, again, 2, strategy="x").peak_bytes == 8 + 16 + 16


@pytest.mark.parametrize("actions", [[StepAction(node=2)], [StepAction(node=1), StepAction(node=1)], [StepAction(node=1, drops=(3,))]])
def test_the_simulator_refuses_what_cannot_run(actions: list[StepAction]) -> None:
    with pytest.raises(UsageError):
        simulate_step(chain(), actions)


def test_several_micro_batches_need_to_know_where_backward_begins() -> None:
    with pytest.raises(UsageError, match="where backward begins"):
        simulate_step(replace(chain(), in_flight=2), [StepAction(node=1)])
    assert simulate_step(replace(chain(), in_flight=3), [StepAction(node=1)], boundary=1).bytes_at == (8 + 16 + 2 * 16,)
    with pytest.raises(UsageError, match="0 micro-batches in flight"):
        replace(chain(), in_flight=0)


def test_a_view_needs_what_it_views() -> None:
    graph = chain(b={"storages": (1,), "makes": (), "inputs": (0,)})
    with pytest.raises(UsageError, match="which no operand holds"):
        simulate_step(graph, [StepAction(node=2)])
    assert "of which it reads nothing" in messages(graph, plan_of(graph, (2,)))


def test_a_wrong_plan_raises_with_the_node() -> None:
    with pytest.raises(CheckFailed, match=r"action 0 \(b\)") as caught:
        check_step_plan(chain(), plan_of(chain(), (2,))).raise_if_wrong()
    assert caught.value.data["witness"]["node"] == "b"


def test_drops_follow_the_last_use() -> None:
    runs = [(1, -1), (2, -1), (1, -1), (3, -1), (4, -1)]
    assert [a.drops for a in dropped_at_last_use(chain(), runs)] == [(), (1,), (), (), (1, 3)]


def test_writing_over_one_part_of_a_tuple_leaves_another_of_its_size_alone() -> None:
    storages = tuple(StepStorage(size_bytes=8, owner=o, kind=k) for o, k in (("x", "input"), ("f", "made"), ("f", "made"), ("g", "made")))
    nodes = (
        StepNode(name="x", target="placeholder", phase="input", storages=(0,)),
        StepNode(name="f", target="op", phase="forward", inputs=(0,), storages=(1, 2), makes=(1, 2), time_s=1.0),
        StepNode(name="f.0", target="getitem", phase="forward", inputs=(1,), storages=(1,)),
        StepNode(name="f.1", target="getitem", phase="forward", inputs=(1,), storages=(2,)),
        StepNode(
            name="g", target="op", phase="forward", inputs=(2,), storages=(3,), makes=(3,), time_s=1.0,
            alternatives=(Alternative(name="over", inputs=(2,), time_s=1.0, over=2),),
        ),
    )  # fmt: skip
    graph = StepGraph(name="parts", nodes=nodes, storages=storages, boundary=5, results=(3, 4))
    plan = finished(graph, [(1, -1), (2, -1), (3, -1), (4, 0)], 4, strategy="over")
    assert check_step_plan(graph, plan).ok and plan.peak_bytes == 24
