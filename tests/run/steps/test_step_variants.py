"""Every other implementation of an operator, run for real in a whole step, against the plain step; and plans that choose among them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.step import finished, keep_everything
from meshwright.errors import RunError, UsageError
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.probe.steps.choices import with_variants
from meshwright.probe.steps.host_copies import CopyRates, measured_rates
from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors
from meshwright.run.steps.variants import BLOCK_ELEMENTS, int8, unpacked


class Mixed(nn.Module):
    """Every operator that has another implementation, once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group, self.layer = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.LayerNorm(10)
        self.again, self.drop, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Dropout(0.2), nn.Linear(160, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.batch(self.conv(x))), 3, 2, 1)
        x = nn.functional.relu6(self.group(self.again(x)))
        x = nn.functional.hardtanh(self.drop(torch.sigmoid(self.layer(x))) + x)
        x = nn.functional.gelu(torch.tanh(x))
        x = nn.functional.silu(x) * x - 2 * x / (x.square() + 1.5)
        return self.head(x.masked_fill(x > 0.7, 0.0).mean(2).flatten(1))


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    torch.manual_seed(0)
    return capture_step(Mixed(), (torch.randn(6, 3, 20, 20), torch.arange(6) % 5), name="mixed")


def results(step: CapturedStep, graph: StepGraph, plan: StepPlan) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [x.clone() for x in runner_of(step, plan, graph=graph).run(step_tensors(step)) if x is not None]


def forced(graph: StepGraph, node: int, alternative: int) -> StepPlan:
    """The whole step once, `node` by its alternative, with the extra nodes that it reads."""
    plain = keep_everything(graph)
    extra = {x for x in graph.nodes[node].alternatives[alternative].inputs if graph.nodes[x].optional}
    runs = sorted([*((a.node, -1) for a in plain.actions if a.node != node), (node, alternative), *((x, -1) for x in extra)])
    return finished(graph, runs, sum(graph.nodes[n].phase == "forward" for n, _ in runs), strategy="forced")


def test_every_alternative_gives_what_the_plain_operator_gives(step: CapturedStep) -> None:
    graph = with_variants(step, rounding=True, lossy=("bf16", "int8"), offload=CopyRates(to_host_Bps=1e9, from_host_Bps=1e9))
    expected = results(step, step.step_graph, keep_everything(step.step_graph))
    tried: dict[str, int] = {}
    for i, n in enumerate(graph.nodes):
        for k, a in enumerate(n.alternatives):
            if a.over >= 0 and any(a.over in m.inputs for m in graph.nodes[i + 1 :]):
                continue  # what it writes over is read later: not in a straight run of everything
            found = results(step, graph, forced(graph, i, k))
            kind = a.name.partition(" ")[0].partition(":")[0]
            tried[kind] = tried.get(kind, 0) + 1
            for x, y in zip(found, expected, strict=True):
                if a.lossless:
                    assert torch.equal(x, y), (n.target, a.name)
                else:
                    near = {"inverse": 1e-4, "bf16": 0.05, "int8": 0.05}[kind]
                    wrong, size = (x.double() - y.double()).square().mean(), y.double().square().mean()
                    assert wrong <= near**2 * max(float(size), 1e-6), (n.target, a.name)
    exact = {"in_place", "over_gradient", "mask_bits", "sign_bits", "operand", "meshwright.pool_argmax", "over", "host"}
    assert set(tried) == {*exact, "inverse", "bf16", "int8"}, tried
    assert tried["inverse"] == 3 and tried["mask_bits"] >= 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_plan_that_chooses_among_them_runs_equal_in_its_bytes(step: CapturedStep, share: float) -> None:
    graph = with_variants(step)
    keep = keep_everything(step.step_graph)
    strategy = Monet(exact_operators=0) if share else Monet(exact_operators=60, solver_nodes=30)
    plan = strategy.plan(graph, None, rng=np.random.default_rng(0))
    if share:
        budget = round(plan.peak_bytes + share * (keep.peak_bytes - plan.peak_bytes))
        plan = strategy.plan(graph, budget, rng=np.random.default_rng(0))
    assert any(a.alternative >= 0 for a in plan.actions)
    for x, y in zip(results(step, graph, plan), results(step, step.step_graph, keep), strict=True):
        assert torch.equal(x, y)
    torch.manual_seed(1)
    measured = measured_peak_bytes(runner_of(step, plan, graph=graph), step_tensors(step))
    # convolutions' inner workspaces are not in an unmeasured graph
    assert plan.peak_bytes * 0.98 <= measured <= keep.peak_bytes * 1.5


def test_int8_is_within_half_a_step_of_its_block() -> None:
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 700)
    narrow = int8(x)
    assert narrow.scale is not None and narrow.data.numel() == -(-x.numel() // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    step_of = narrow.scale.repeat_interleave(BLOCK_ELEMENTS)[: x.numel()].view(x.shape)
    assert bool(((unpacked(narrow) - x).abs() <= step_of * 0.5001).all())


def test_packed_forms_have_their_exact_size(step: CapturedStep) -> None:
    graph = with_variants(step)
    size = {n.name: sum(graph.storages[s].size_bytes for s in n.makes) for n in graph.nodes if n.optional}
    named = {n.name: n for n in step.graph_module.graph.nodes}
    assert size["relu.sign_bits"] == -(-named["relu"].meta["val"].numel() // 8)
    pooled = [n for n in graph.nodes if n.target.startswith("meshwright.pool_argmax")]
    assert [size[n.name] for n in pooled] == [6 * 16 * 10 * 10 // 2]


def test_offload_is_a_copy_at_its_rate_that_takes_no_device_bytes(step: CapturedStep) -> None:
    graph = with_variants(step, offload=CopyRates(to_host_Bps=1e9, from_host_Bps=2e9))
    copies = [n for n in graph.nodes if n.target == "meshwright.host"]
    assert copies and all(sum(graph.storages[s].size_bytes for s in n.makes) == 0 for n in copies)
    for n in copies:
        assert n.time_s == pytest.approx(sum(graph.storages[s].size_bytes for x in n.inputs for s in graph.nodes[x].storages) / 1e9)


def test_a_plan_that_lets_results_wait_on_the_host_runs_equal_in_its_bytes() -> None:
    """Free copies against products: nothing is computed again, and the device never holds what waits."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256, bias=False), nn.Tanh())))
    step = capture_step(net, (torch.randn(512, 256), torch.randn(512, 256)), loss="mse", name="chain")
    graph = with_variants(step, offload=CopyRates(to_host_Bps=1e15, from_host_Bps=1e15), offload_only=True)
    timed = [msgspec.structs.replace(n, time_s=n.time_s + (1e-3 if n.makes and not n.optional else 0.0), alternatives=tuple(
        msgspec.structs.replace(a, time_s=a.time_s + 1e-3) for a in n.alternatives if n.makes)) for n in graph.nodes]  # fmt: skip
    graph = msgspec.structs.replace(graph, nodes=tuple(timed))
    keep = keep_everything(graph)
    plan = Monet(exact_operators=60, solver_nodes=50).plan(graph, int(0.88 * keep.peak_bytes), rng=np.random.default_rng(0))
    assert any(graph.nodes[a.node].target == "meshwright.host" for a in plan.actions) and plan.time_s < keep.time_s + 1e-3
    for x, y in zip(results(step, graph, plan), results(step, graph, keep), strict=True):
        assert torch.equal(x, y)
    scratch = 512 * 256 * 4 - 4  # the mean of mse_loss keeps it, which only a measured graph knows
    assert measured_peak_bytes(runner_of(step, plan, graph=graph), step_tensors(step)) == plan.peak_bytes + scratch


def test_copy_rates_are_measured() -> None:
    rates = measured_rates(size_bytes=1 << 20, rounds=3)
    assert 1e7 < rates.to_host_Bps < 1e13 and 1e7 < rates.from_host_Bps < 1e13


def test_wrong_options_are_refused(step: CapturedStep) -> None:
    with pytest.raises(UsageError, match="fp4"):
        with_variants(step, lossy=("fp4",))
    with pytest.raises(UsageError, match="rate"):
        CopyRates(to_host_Bps=0, from_host_Bps=1)


def test_a_weight_near_zero_is_not_divided_by() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    step = capture_step(module, (torch.randn(5, 4), torch.arange(5) % 3))
    graph = with_variants(step, rounding=True)
    found = [(i, k) for i, n in enumerate(graph.nodes) for k, a in enumerate(n.alternatives) if a.name == "inverse"]
    assert len(found) == 1
    with torch.no_grad():
        module[1].weight[3] = 1e-5
    assert not any(a.name == "inverse" for n in with_variants(step, rounding=True).nodes for a in n.alternatives)
    with pytest.raises(RunError, match="cannot be divided by"):
        runner_of(step, forced(graph, *found[0]), graph=graph).run(step_tensors(step))
