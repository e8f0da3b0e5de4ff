"""Times of operators in whole steps: what is asked once, how alternatives take part, what fails."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import RunError
from meshwright.graph.step_graph import replacement
from meshwright.kernels.garbage import kept_memory
from meshwright.probe.steps import in_place as step_in_place
from meshwright.probe.steps.choices import with_variants
from meshwright.probe.steps.costs import StepCost, StepCosts, keys_of, measure_step
from meshwright.probe.steps.in_place import EVIDENCE, PLAIN, RATIO_LIMITS, Ratios, in_place, ratios_in_place, ratios_of_ways
from meshwright.run.steps.norms_apart import FROM_STATISTICS
from meshwright.run.steps.step import runner_of, step_tensors


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return capture_step(module, (torch.randn(8, 3, 48, 48), torch.randint(5, (8,))))


@pytest.fixture
def costs(step: CapturedStep, tmp_path: Path) -> StepCosts:
    found = StepCosts(tmp_path / "costs.json")
    measure_step(step.graph_module, step.step_graph, costs=found, rounds=1)
    return found


def test_ratios_are_asked_once_and_kept(step: CapturedStep, costs: StepCosts) -> None:
    graph = measure_step(step.graph_module, step.step_graph, costs=costs)
    asked: list[int] = []

    def tensors() -> list[torch.Tensor]:
        asked.append(1)
        return step_tensors(step)

    state = torch.get_rng_state()
    first = ratios_in_place(step.graph_module, graph, tensors, costs, rounds=1)
    assert first.plain and all(RATIO_LIMITS[0] <= r <= RATIO_LIMITS[1] for r in first.plain.values()) and torch.equal(state, torch.get_rng_state())
    assert ratios_in_place(step.graph_module, graph, tensors, StepCosts(costs.path)) == first and asked == [1]
    keys = keys_of(step.graph_module, graph)
    assert all(costs.costs[key].time_s >= step_in_place.MIN_OPERATOR_S for name, key in keys.items() if name in first.plain)


def test_what_takes_its_time_from_the_step(step: CapturedStep, costs: StepCosts) -> None:
    """An operator that was measured far too fast, or slow, alone is put right, as far as `RATIO_LIMITS` allow; the short ones are left alone."""
    graph = measure_step(step.graph_module, step.step_graph, costs=costs)
    keys = keys_of(step.graph_module, graph)
    (name, *_), others = [n for n in keys if "convolution" in n], [n for n in keys if "convolution" not in n]
    for n, time_s in {name: 1.0, **dict.fromkeys(others, step_in_place.MIN_OPERATOR_S / 2)}.items():
        costs.costs[keys[n]] = replace_time(costs.costs[keys[n]], time_s)
    graph = measure_step(step.graph_module, step.step_graph, costs=costs)
    ratios = ratios_in_place(step.graph_module, graph, lambda: step_tensors(step), costs, rounds=1)
    assert ratios.plain[name] == RATIO_LIMITS[0] and not {*others} & ratios.plain.keys()
    found = in_place(graph, step.graph_module, ratios)
    at = next(i for i, n in enumerate(graph.nodes) if n.name == name)
    assert found.nodes[at].time_s == 0.5 and found.evidence.endswith(EVIDENCE)


def replace_time(cost: StepCost, time_s: float) -> StepCost:
    return msgspec.structs.replace(cost, time_s=time_s)


def test_alternatives_and_halves_take_their_operators_ratio(step: CapturedStep, costs: StepCosts) -> None:
    alone = measure_step(step.graph_module, step.step_graph, costs=costs)
    with_variants(step, alone, costs=costs)
    # Given a cost: noise made it too slow to be taken once.
    costs.costs |= {k: replace_time(c, 1e-9) for k, c in costs.costs.items() if k.startswith(FROM_STATISTICS)}
    joint = with_variants(step, alone, costs=costs)
    ratios = Ratios(plain={n.name: 1.5 for n in alone.nodes if n.makes})
    found = in_place(joint, step.graph_module, ratios)
    seen = set()
    for a, b in zip(joint.nodes, found.nodes, strict=True):
        ratio = 1.5 if (a.makes or replacement(a.target)) and not a.optional else 1.0
        assert b.time_s == pytest.approx(a.time_s * ratio) and [x.name for x in b.alternatives] == [x.name for x in a.alternatives]
        assert all(y.time_s == pytest.approx(x.time_s * ratio) for x, y in zip(a.alternatives, b.alternatives, strict=True))
        seen |= {*(["alternatives"] if a.alternatives else []), replacement(a.target)}
    assert {"alternatives", FROM_STATISTICS} <= seen


def test_a_step_that_fails_is_named(costs: StepCosts) -> None:
    module = nn.Sequential(nn.Embedding(512, 512), nn.Linear(512, 512), nn.Linear(512, 5))
    ids = torch.randint(512, (64, 8))
    step = capture_step(module, (ids, torch.randint(5, (64, 8))))
    graph = measure_step(step.graph_module, step.step_graph, costs=costs, rounds=1)
    wrong = [x + 10**6 if x.dtype == torch.int64 and x.shape == ids.shape else x for x in step_tensors(step)]
    for key in keys_of(step.graph_module, graph).values():
        costs.costs[key] = replace_time(costs.costs[key], 1e-3)
    with pytest.raises(RunError, match="index") as error:
        ratios_in_place(step.graph_module, graph, lambda: wrong, costs, rounds=1)
    assert "embedding" in str(error.value.where)


def faults(megabytes: int) -> int:
    """Page faults of making and letting go such a tensor."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(megabytes << 18)
    del x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_stays_while_something_is_timed() -> None:
    size = 96  # beyond what glibc keeps by itself
    with kept_memory() as known:
        if not known:
            pytest.skip("not glibc: nothing is known to keep")
        first, *later = [faults(size) for _ in range(20)]  # aligned blocks leave holes that are a little too small, for some rounds
        assert first > 1000 and min(later) < 10
    assert faults(size) > 1000  # what was free has gone back


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    with kept_memory() as known:
        assert not known


def test_other_implementations_are_timed_in_steps_that_use_them(step: CapturedStep, costs: StepCosts) -> None:
    alone = measure_step(step.graph_module, step.step_graph, costs=costs)
    joint = with_variants(step, alone, costs=costs, rounding=True)
    asked: list[int] = []

    def tensors() -> list[torch.Tensor]:
        asked.append(1)
        return step_tensors(step)

    plain = ratios_in_place(step.graph_module, alone, tensors, costs, rounds=1)
    found = ratios_of_ways(step.graph_module, joint, tensors, costs, plain, rounds=1)
    assert found.plain == plain.plain and all(RATIO_LIMITS[0] <= r <= RATIO_LIMITS[1] for r in found.ways.values())
    long = {(n.name, a.name) for n in joint.nodes if n.name in plain.plain for a in n.alternatives if a.time_s >= step_in_place.MIN_OPERATOR_S}
    assert {way for _, way in found.ways} & {"in_place", "over_gradient"} and {x for x in found.ways if x[1] != PLAIN} <= long
    assert ratios_of_ways(step.graph_module, joint, tensors, StepCosts(costs.path), plain) == found and asked == [1, 1]
    doubled = replace(found, ways=dict.fromkeys(found.ways, 2.0))
    placed = {n.name: n for n in in_place(joint, step.graph_module, doubled).nodes}
    for n in joint.nodes:
        for a, b in zip(n.alternatives, placed[n.name].alternatives, strict=True):
            if (n.name, a.name) in found.ways:
                assert b.time_s == pytest.approx(2 * a.time_s)


def test_steps_by_other_implementations_give_what_the_plain_one_gives(step: CapturedStep, costs: StepCosts) -> None:
    alone = measure_step(step.graph_module, step.step_graph, costs=costs)
    joint = with_variants(step, alone, costs=costs)
    plans = step_in_place._plans_with_ways(joint)
    used = {joint.nodes[a.node].alternatives[a.alternative].name for p in plans for a in p.actions if a.alternative >= 0}
    assert {"in_place", "over_gradient", "sign_bits"} <= used
    plain = runner_of(step, keep_everything(alone), graph=alone).run(step_tensors(step))
    for plan in plans:
        assert check_step_plan(joint, plan).ok
        results = runner_of(step, plan, graph=joint).run(step_tensors(step))
        assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True) if a is not None)
