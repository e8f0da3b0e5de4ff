"""Step plans run for real: gradients and statistics bit-equal to eager whatever is computed again, and the measured peak is the predicted one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import fx, nn

from meshwright.capture.step import CapturedStep, capture_step, step_graph_of
from meshwright.decide.memory.step import finished, keep_everything
from meshwright.errors import CheckFailed, FormatError, RunError, UnknownName, UsageError
from meshwright.graph.step_graph import Alternative, StepGraph
from meshwright.probe.steps.costs import StepCosts, measure_step
from meshwright.run.steps.step import StepRunner, Variants, measured_peak_bytes, runner_of, step_tensors
from meshwright.simulate.step_memory import simulate_step
from meshwright.testing.steps import random_runs

replace = msgspec.structs.replace


class Net(nn.Module):
    """Convolutions, batch norm, dropout twice, pooling, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Dropout(0.3)
        self.second, self.up, self.head = nn.Conv2d(16, 16, 3), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.norm(self.conv(x))))
        y = nn.functional.max_pool2d(nn.functional.gelu(self.second(y)), 2)
        return self.head(self.drop(self.up(y.mean((2, 3)))))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on busy cores wait for each other, and workspaces depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    torch.manual_seed(0)
    return capture_step(Net(), (torch.randn(8, 3, 24, 24), torch.randint(0, 16, (8,))))


@pytest.fixture(scope="module")
def measured(step: CapturedStep) -> StepGraph:
    return measure_step(step.graph_module, step.step_graph, rounds=1)


@pytest.fixture(scope="module")
def eager(step: CapturedStep) -> dict[str, torch.Tensor]:
    kept = {n: b.clone() for n, b in step.source.module.named_buffers()}
    torch.manual_seed(5)
    loss = step.objective(*step.source.inputs)
    found = {"loss": loss.detach()}
    parameters = dict(step.source.module.named_parameters())
    found |= {f"gradient:{n}": g for n, g in zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True)}
    for n, b in step.source.module.named_buffers():
        found[f"buffer:{n}"] = b.clone()
        b.copy_(kept[n])
    return found


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_recomputed_steps_equal_eager_and_peak_as_predicted(
    step: CapturedStep, measured: StepGraph, eager: dict[str, torch.Tensor], keep: float
) -> None:
    for seed in range(2):
        plan = finished(measured, *random_runs(measured, random.Random(seed), keep=keep), strategy="random")
        runner = runner_of(step, plan, graph=measured)
        tensors = step_tensors(step)
        torch.manual_seed(5)
        boxed = [*tensors]
        found = dict(zip(step.outputs, runner.run(boxed), strict=True))
        assert not boxed
        drawn = torch.rand(1)
        assert all(torch.equal(found[name], value) for name, value in eager.items()), seed
        # of two random operators the generator's first states are kept, and its present one while one of them runs again
        measured_bytes = measured_peak_bytes(runner, tensors)
        assert plan.peak_bytes * 0.99 <= measured_bytes <= plan.peak_bytes + 3 * 5056 + 512
        torch.manual_seed(5)
        runner_of(step, keep_everything(measured), graph=measured).run([*tensors])
        assert torch.equal(torch.rand(1), drawn)  # running again has not moved the generator


def test_another_implementation_runs(step: CapturedStep, eager: dict[str, torch.Tensor]) -> None:
    """relu over its input: the batch norm's result is gone, and relu's backward reads relu's result as ever."""
    graph = step.step_graph
    relu = next(i for i, n in enumerate(graph.nodes) if n.target == "aten.relu.default")
    way = Alternative(name="in-place", inputs=graph.nodes[relu].inputs, time_s=0.0, over=graph.nodes[relu].inputs[0])
    nodes = [*graph.nodes]
    nodes[relu] = replace(nodes[relu], alternatives=(way,))
    changed = replace(graph, nodes=tuple(nodes))
    base = keep_everything(graph)
    runs = [(a.node, 0 if a.node == relu else -1) for a in base.actions]
    plan = finished(changed, runs, base.boundary, strategy="x")

    def over(call: fx.Node, x: torch.Tensor) -> torch.Tensor:
        assert call.name == nodes[relu].name
        return x.relu_()

    torch.manual_seed(5)
    runner = runner_of(step, plan, graph=changed, variants=Variants(alternatives={("aten.relu.default", "in-place"): over}))
    found = dict(zip(step.outputs, runner.run(step_tensors(step)), strict=True))
    assert all(torch.equal(found[name], value) for name, value in eager.items())
    with pytest.raises(UnknownName, match="no implementation 'in-place'"):
        runner_of(step, plan, graph=changed, variants=Variants())
    at = [a.node for a in plan.actions].index(relu)
    made = graph.storages[graph.nodes[relu].makes[0]].size_bytes
    assert simulate_step(changed, plan.actions).bytes_at[at] == simulate_step(graph, base.actions).bytes_at[at] - made



def test_optional_nodes_need_an_implementation(step: CapturedStep) -> None:
    graph = step.step_graph
    nodes = [*graph.nodes]
    nodes[graph.boundary - 1] = replace(nodes[graph.boundary - 1], name="extra", target="no.such", optional=True)
    changed = replace(graph, nodes=tuple(nodes))
    with pytest.raises(UnknownName, match=r"nothing implements no\.such"):
        runner_of(step, keep_everything(changed), graph=changed)


def test_wrong_arguments_and_failing_operators(step: CapturedStep) -> None:
    runner = runner_of(step, keep_everything(step.step_graph))
    with pytest.raises(UsageError, match="got 1 tensors"):
        runner.run([torch.zeros(1)])
    with pytest.raises(RunError, match=r"convolution: aten\.convolution\.default fails"):
        runner.run([torch.zeros(1) for _ in step_tensors(step)])
    with pytest.raises(CheckFailed):
        StepRunner(step.graph_module, step.step_graph, replace(keep_everything(step.step_graph), peak_bytes=1))


def test_costs_are_kept_on_disk(step: CapturedStep, measured: StepGraph, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    first = measure_step(step.graph_module, step.step_graph, rounds=1, costs=StepCosts(path))
    again = StepCosts(path)
    assert again.costs and measure_step(step.graph_module, step.step_graph, costs=again) == replace(first, evidence=again_evidence(first))
    assert all(n.time_s > 0 for n in first.nodes if n.makes and n.phase != "input")
    assert [n.workspace_bytes for n in first.nodes] == [n.workspace_bytes for n in measured.nodes]
    assert StepCosts(path, device="cuda").costs == {}  # another device's
    for text, said in (("nonsense", "not a file of step costs"), (path.read_text().replace('"version":1', '"version":9'), "version 9")):
        path.write_text(text)
        with pytest.raises(FormatError, match=said):
            StepCosts(path)
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(FormatError, match="larger than"):
        StepCosts(path)


def again_evidence(graph: StepGraph) -> str:
    return graph.evidence.replace("median of 1", "median of 5")


def test_measuring_refusals(step: CapturedStep) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        measure_step(step.graph_module, step.step_graph, rounds=0)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 3)
    y = graph.call_function(torch.ops.aten.mm.default, (x, x))  # shapes that cannot be multiplied
    y.meta["val"] = torch.zeros(2, 3)
    graph.output(([y],))
    module = fx.GraphModule({}, graph)
    with pytest.raises(RunError, match=r"mm_default: aten\.mm\.default cannot be measured alone"):
        measure_step(module, step_graph_of(module), rounds=1)
