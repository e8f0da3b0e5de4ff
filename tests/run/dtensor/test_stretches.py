"""Stretches of operators whose backward is one call of autograd: where they are cut, how few they are, and that no bit depends on them."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from captured import captured
from meshwright.cost import Cost, Transport
from meshwright.decide.layout.autoddl import AutoDDL, ShardingProblem
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.lower.sharding import ShardedProgram, lower_sharding
from meshwright.plan.sharding import ShardingPlan
from meshwright.program.program import Kind
from meshwright.run.dtensor import work
from meshwright.run.dtensor.work import stretches
from meshwright.run.dtensor.worker import WorkRequest, _Trainer

EXAMPLES = Path(__file__).parents[3] / "examples"
NETS = Path(__file__).parents[2] / "decide" / "layout" / "autoddl" / "sharding_problems.py"
CASES = [
    (f"{EXAMPLES / 'gpt.py'}:tiny_tied", 2, "auto"), (f"{EXAMPLES / 'gpt.py'}:tiny", 4, "data"), (f"{EXAMPLES / 'convnet.py'}:tiny", 2, "auto"),
    (f"{NETS}:branches", 2, "auto"), (f"{NETS}:shared", 1, "auto"), (f"{NETS}:shared", 2, "megatron"),
]  # fmt: skip


def planned(model: str, devices: int, search: str) -> tuple[ShardingPlan, ShardedProgram]:
    row = tuple(Device(name=f"n{i}", kind="cpu", flops={"fp32": 10**8}) for i in range(devices))
    links = tuple(x for d in row for x in (Link(src=d.name, dst="s", rate_Bps=10**9), Link(src="s", dst=d.name, rate_Bps=10**9)))
    graph, fabric = captured(model, scalable=False), Fabric(name="star", devices=row, switches=(Switch(name="s"),), links=links)
    cost = Cost(per_call_s=1e-7, transport=Transport(per_message_s=1e-7))
    plan = AutoDDL(search=search).plan(ShardingProblem(graph=graph, fabric=fabric, cost=cost))
    return plan, lower_sharding(plan, graph)


CALL = ("call", "")


def walked(lowered: ShardedProgram, rank: int) -> list[tuple[str, str]]:
    """A rank's steps in order: (name, key) of a compute step, or `CALL`."""
    program, found = lowered.program, []
    for step in (program.lanes.actor[program.lane_of_step()] == rank).nonzero()[0].tolist():
        op = int(program.steps.op[step])
        found.append((program.ops.name[op], program.ops.graph[op]) if program.steps.kind[step] == Kind.COMPUTE else CALL)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "devices", "search"), CASES)
def test_stretches_are_cut_only_where_something_is_exchanged_or_comes_back(model: str, devices: int, search: str) -> None:
    _, lowered = planned(model, devices, search)
    for rank in range(devices):
        steps, found = walked(lowered, rank), stretches(lowered, rank)
        assert [key for one in found for key in one] == list(dict.fromkeys(key for name, key in steps if name == "B"))

        def between(first: str, last: str, steps: list[tuple[str, str]] = steps) -> tuple[bool, set[str]]:
            """Whether anything is exchanged from one backward to another, and to what gradients come back by redistribution."""
            part = steps[steps.index(("B", first)) : steps.index(("B", last))]
            return CALL in part, {lowered.moves[key].source for name, key in part if name == "back"}

        for one in found:
            exchanged, back = between(one[0], one[-1])
            assert not exchanged and not back & set(one)
        for one, after in pairwise(found):
            exchanged, back = between(one[0], after[0])
            assert exchanged or after[0] in back or any(x.gradient for x in lowered.insides[after[0]][rank]), "cut without need"
        backward = steps[next(i for i, (name, _) in enumerate(steps) if name == "B") :]
        unsent = Counter(key for name, key in backward if name == "back")  # a redistribution without an exchange is one step
        assert len(found) <= 1 + backward.count(CALL) + sum(n == 1 for n in unsent.values())


class Silence:
    """Messages that bring zeros."""

    grouped = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None: ...

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        tensor.zero_()

    def wait(self, work: Any) -> None: ...


def alone(plan: ShardingPlan) -> _Trainer:
    """Rank 0."""
    return _Trainer(plan, WorkRequest(plans=[]), 0, torch.device("cpu"), Silence(), "plan")


def gradients(plan: ShardingPlan) -> dict[str, torch.Tensor]:
    """What rank 0 finds for its parameters in a step."""
    trainer = alone(plan)
    trainer._run(0)
    assert not trainer.work.done, "a backward was left out"
    return {name: p.grad for name, p in trainer.work.parameters.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "devices", "search"), CASES)
def test_gradients_are_those_of_operators_one_by_one(model: str, devices: int, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, lowered = planned(model, devices, search)
    calls, differentiate = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or differentiate(*a, **k))
    found = gradients(plan)
    talking = sum(x.gradient for of_rank in lowered.insides.values() for x in of_rank[0])
    assert 0 < len(calls) <= len(stretches(lowered, 0)) + talking
    monkeypatch.setattr(work, "stretches", lambda lowered, rank: [[key] for one in stretches(lowered, rank) for key in one])
    single = gradients(plan)
    assert found.keys() == single.keys() and any(x.abs().sum() > 0 for x in found.values())
    assert all(torch.equal(found[name], single[name]) for name in found)


def test_a_step_leaves_nothing_for_the_garbage_collector() -> None:
    trainer, counts = alone(planned(f"{NETS}:shared", 2, "megatron")[0]), []
    trainer._run(0)
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            trainer._run(number)
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[2], "gradients stay in cycles"
