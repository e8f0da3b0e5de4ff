"""Batch normalisation's statistics and result as two nodes: the same bits, the same bytes, and recomputation that makes no statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.baselines import Chen
from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.problem import StepStrategy
from meshwright.decide.memory.step import finished, keep_everything
from meshwright.errors import Infeasible
from meshwright.graph.step_graph import StepGraph, StepPlan, replacement
from meshwright.probe.steps.choices import with_variants
from meshwright.probe.steps.costs import StepCosts, measure_step
from meshwright.probe.steps.norms_apart import norms_apart
from meshwright.run.steps import variants as step_variants
from meshwright.run.steps.norms_apart import APART, FROM_STATISTICS, normalised
from meshwright.run.steps.step import VARIANTS, Variants, measured_peak_bytes, runner_of, step_tensors

assert step_variants  # registers the implementations
BATCH = 6


@given(
    shape=st.tuples(st.integers(2, 6), st.integers(1, 33), st.integers(1, 9), st.integers(1, 9)),
    affine=st.sampled_from([(True, True), (True, False), (False, False)]), last=st.booleans(), double=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_result_from_given_statistics_has_the_same_bits(
    shape: tuple[int, int, int, int], affine: tuple[bool, bool], last: bool, double: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    x = torch.randn(shape, dtype=dtype) * 10 ** torch.rand(()) + torch.randn(())
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    weight, bias = (torch.randn(shape[1], dtype=dtype) if there else None for there in affine)
    out, mean, deviation = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    assert torch.equal(normalised(x, weight, bias, mean, deviation), out)


def net(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in ((3, 8), (8, 8), (8, 12)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside, **options), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    return capture_step(net(), (torch.randn(BATCH, 3, 24, 24), torch.randint(0, 5, (BATCH,))), name="net")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> StepCosts:
    return StepCosts(Path(tmp_path_factory.mktemp("costs")) / "costs.json")


@pytest.fixture(scope="module")
def plain(step: CapturedStep, costs: StepCosts) -> StepGraph:
    return measure_step(step.graph_module, step.step_graph, costs=costs)


def priced(costs: StepCosts, **fields: object) -> StepCosts:
    """Results from statistics cost nothing, so that they are taken whatever this machine measures; or as said."""
    found = StepCosts(None)
    found.costs = {k: msgspec.structs.replace(c, **{"time_s": 0.0, **fields}) if k.startswith(FROM_STATISTICS) else c for k, c in costs.costs.items()}  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def apart(step: CapturedStep, plain: StepGraph, costs: StepCosts) -> StepGraph:
    norms_apart(step.graph_module, plain, costs)  # measures
    return norms_apart(step.graph_module, plain, priced(costs))


def kinds(graph: StepGraph, plan: StepPlan | None = None) -> list[str]:
    targets = [n.target for n in graph.nodes] if plan is None else [graph.nodes[a.node].target for a in plan.actions]
    return [r for t in targets if (r := replacement(t)) in (APART, FROM_STATISTICS)]


def gradients(step: CapturedStep, graph: StepGraph, plan: StepPlan, variants: Variants = VARIANTS) -> list[torch.Tensor | None]:
    torch.manual_seed(5)
    found: list[torch.Tensor | None] = runner_of(step, plan, graph=graph, variants=variants).run(step_tensors(step))
    return found


def assert_runs_equal(step: CapturedStep, plain: StepGraph, graph: StepGraph, plan: StepPlan) -> None:
    assert not check_step_plan(graph, plan).findings
    expected = gradients(step, plain, keep_everything(plain))
    found = gradients(step, graph, plan)
    assert len(found) == len(expected)
    assert all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(found, expected, strict=True))
    measured = measured_peak_bytes(runner_of(step, plan, graph=graph), step_tensors(step))
    assert abs(measured - plan.peak_bytes) <= 0.002 * plan.peak_bytes


def test_run_once_they_are_the_plain_operator(step: CapturedStep, plain: StepGraph, apart: StepGraph) -> None:
    assert kinds(apart) == [APART, FROM_STATISTICS] * 3
    before, after = keep_everything(plain), keep_everything(apart)
    assert after.time_s == pytest.approx(before.time_s, rel=1e-9)
    assert abs(after.peak_bytes - before.peak_bytes) <= 0.002 * before.peak_bytes
    assert_runs_equal(step, plain, apart, after)


SHARES = (0.9, 0.8, 0.7, 0.6)


@pytest.mark.parametrize(
    ("strategy", "shares"),
    [(FusionAware(effort=200_000), SHARES), (Monet(), (0.7,)), (Chen(), SHARES)],  # a programme of Monet's takes five seconds
    ids=["fusionaware", "monet", "chen"],
)
def test_plans_run_results_again_without_their_statistics(
    step: CapturedStep, plain: StepGraph, apart: StepGraph, strategy: StepStrategy, shares: tuple[float, ...]
) -> None:
    whole, more = keep_everything(apart).peak_bytes, 0
    for share in shares:
        try:
            plan = strategy.plan(apart, int(share * whole), rng=np.random.default_rng(0))
        except Infeasible:
            continue
        more += kinds(apart, plan).count(FROM_STATISTICS) - kinds(apart, plan).count(APART)
        assert_runs_equal(step, plain, apart, plan)
    assert more > 0 or isinstance(strategy, Chen)  # who runs whole stages again


def counting(calls: list[str]) -> Variants:
    """The package's implementations, noting which of the normalisation's are called."""
    def noting(name: str, function: object) -> object:
        return lambda *given: calls.append(name) or function(*given)  # type: ignore[func-returns-value, operator]

    ways = {k: noting(k[1], f) if k[1] in (APART, FROM_STATISTICS) else f for k, f in VARIANTS.alternatives.items()}
    joined = {k: noting("both", f) for k, f in VARIANTS.joined.items()}
    return replace(VARIANTS, alternatives=ways, joined=joined)  # type: ignore[arg-type]


def numbers(graph: StepGraph, kind: str) -> list[int]:
    return [i for i, n in enumerate(graph.nodes) if replacement(n.target) == kind]


def test_which_kernel_runs_when(step: CapturedStep, plain: StepGraph, apart: StepGraph) -> None:
    """In the forward pass both at once; in the backward pass either alone, both if they follow each other."""
    keep = keep_everything(apart)
    runs = [(a.node, -1) for a in keep.actions]
    whole, result = numbers(apart, APART)[1], numbers(apart, FROM_STATISTICS)[1]
    mean, deviation = apart.nodes[result].inputs[-2:]
    relu = next(i for i, n in enumerate(apart.nodes) if result in n.inputs)
    alone = [(result, -1), (relu, -1)]
    statistics = [(whole, -1), (mean, -1), (deviation, -1)]
    for again, expected in ((alone, [FROM_STATISTICS]), (statistics, [APART]), ([*statistics, *alone], ["both"])):
        line = [*runs[: keep.boundary], *again, *runs[keep.boundary :]]
        plan = finished(apart, line, keep.boundary, strategy="by hand")
        calls: list[str] = []
        gradients(step, apart, plan, counting(calls))
        assert calls == ["both"] * 3 + expected
        assert_runs_equal(step, plain, apart, plan)


def test_what_is_not_the_same_or_not_faster_stays_whole(step: CapturedStep, plain: StepGraph, costs: StepCosts, apart: StepGraph) -> None:
    assert apart != plain
    assert norms_apart(step.graph_module, plain, priced(costs, same_bits=False)) is plain
    assert norms_apart(step.graph_module, plain, priced(costs, time_s=1.0)) is plain


def test_only_training_is_taken_apart(costs: StepCosts) -> None:
    given = (torch.randn(BATCH, 3, 24, 24), torch.randint(0, 5, (BATCH,)))
    for module, there in ((net().eval(), False), (net(track_running_stats=False), True), (net(affine=False), True)):
        step = capture_step(module, given, name="net")
        plain = measure_step(step.graph_module, step.step_graph, costs=costs)
        norms_apart(step.graph_module, plain, costs)
        graph = norms_apart(step.graph_module, plain, priced(costs))
        assert bool(kinds(graph)) == there
        assert_runs_equal(step, plain, graph, keep_everything(graph))


def test_beside_other_implementations(step: CapturedStep, plain: StepGraph, costs: StepCosts, apart: StepGraph) -> None:
    assert apart  # measured
    known = priced(costs)
    graph = with_variants(step, plain, costs=known)
    assert kinds(graph) == kinds(apart)
    plan = Monet().plan(graph, int(0.6 * keep_everything(plain).peak_bytes), rng=np.random.default_rng(0))
    assert kinds(graph, plan).count(FROM_STATISTICS) >= 3
    assert_runs_equal(step, plain, graph, plan)
