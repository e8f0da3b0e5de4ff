"""The optimizer's update in a step graph: its temporaries are those measured, it does what torch does, and its costs are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshwright.capture.step import capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import UnknownName, Unsupported
from meshwright.probe.steps import optimizer as step_optimizer
from meshwright.probe.steps.costs import StepCosts, measure_step
from meshwright.probe.steps.optimizer import OPTIMIZERS, trained_parameters, updating, with_optimizer
from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    return StepCosts(tmp_path_factory.mktemp("costs") / "costs.json")


def captured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    return capture_step(model, [torch.randn(2, 64), torch.randn(2, 8)], loss="mse")


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_peak_with_the_update_is_the_measured_one_and_parameters_are_torchs(costs, name):
    step = captured()
    twin = copy.deepcopy(step.source.module)
    graph = with_optimizer(step, measure_step(step.graph_module, step.step_graph, costs=costs, rounds=1), name, costs)
    plan = keep_everything(graph)
    assert check_step_plan(graph, plan).ok and graph.nodes[plan.actions[-1].node].name == "optimizer"
    assert (graph.nodes[plan.actions[plan.peak_at].node].name == "optimizer") == (name == "adam")
    runner = runner_of(step, plan, graph=graph, variants=updating(step, name))
    update = OPTIMIZERS[name].make(list(twin.parameters()))
    runner.run(step_tensors(step))  # its state exists from here on
    assert measured_peak_bytes(runner, step_tensors(step)) == pytest.approx(plan.peak_bytes, rel=0.01)
    for _ in range(2):
        update.zero_grad()
        nn.functional.mse_loss(twin(step.source.inputs[0]), step.source.inputs[1]).backward()
        update.step()
    assert len(trained_parameters(step)) == 4
    assert all(torch.equal(a, b) for a, b in zip(step.source.module.parameters(), twin.parameters(), strict=True))


def test_costs_are_kept_and_what_cannot_be_is_refused(costs, monkeypatch):
    step = captured()
    graph = with_optimizer(step, step.step_graph, "adam", costs)
    monkeypatch.setattr(step_optimizer, "peak_of", lambda work, resident: pytest.fail("measured again"))
    assert with_optimizer(step, step.step_graph, "adam", StepCosts(costs.path)) == graph
    assert with_optimizer(step, step.step_graph, "none", costs) == step.step_graph
    with pytest.raises(UnknownName, match="no optimizer 'lion'"):
        with_optimizer(step, step.step_graph, "lion", costs)
    with pytest.raises(Unsupported, match="on processors only"):
        with_optimizer(step, step.step_graph, "sgd", StepCosts(device="cuda"))
