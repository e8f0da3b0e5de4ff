"""What torch's sac_milp is told of a captured step, and that what it decides is a plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware.fused import priced
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.step import keep_everything
from meshwright.graph.step_graph import StepGraph
from meshwright.probe.steps import sac_plans as sac

ROWS, WIDTH = 64, 16
ONE = 4 * ROWS * WIDTH  # bytes of an activation


def captured() -> tuple[CapturedStep, StepGraph]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid()) for _ in range(3)))
    step = capture_step(net, [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)], loss="mse", name="net")
    return step, priced(step.step_graph, {}, flops_per_s=1e11, bytes_per_s=1e10)


def test_modules_in_the_order_they_run_with_their_bytes():
    step, graph = captured()
    lives = lifetimes_of(graph)
    info = sac.module_info(lives, sac._parts(step, lives))
    blocks = [f"Root.{i}" for i in range(3)]
    assert info["mod_order"]["fw_pre_order"] == ["Root", *(x for b in blocks for x in (b, f"{b}.0", f"{b}.1", f"{b}.2"))]
    assert info["mod_order"]["fw_post_order"] == [x for b in blocks for x in (f"{b}.0", f"{b}.1", f"{b}.2", b)] + ["Root"]
    of = {s["fqn"]: s for s in info["mod_stats"]}
    parameters = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    assert of["Root"]["param_per_module"] == parameters + 2 * ONE
    for i, b in enumerate(blocks):
        # autograd saves what tanh and sigmoid give; the latter is what the block gives
        assert (of[b]["sac_memory"], of[b]["act_fw_per_module"], of[b]["output_per_module"]) == (3 * ONE, ONE, ONE)
        assert of[b]["act_total"] == 2 * ONE * (i + 1) and not of[b]["is_leaf"] and of[f"{b}.1"]["is_leaf"]
        assert of[b]["slopes"][-1] >= of[b]["slopes"][0] >= 0
        assert of[b]["grad_total"] <= (2 - i) * parameters // 3
    assert 0 == of[blocks[2]]["grad_total"] <= of[blocks[1]]["grad_total"] < of[blocks[0]]["grad_total"]


def test_what_it_decides_is_a_plan(monkeypatch):
    step, graph = captured()
    asked = []

    def policy(stats, share):
        asked.append((stats.func_names, stats.memory, share))
        return [0] * len(stats.memory)

    tools = SimpleNamespace(
        parse_module_info=lambda info: info, get_peak_memory_runtime_baseline=lambda tree: (1 << 30, 0.0), SACStats=SimpleNamespace,
        sac_milp=lambda tree, budget: ({"Root.0": 0.75, "Root.1": 0.75}, 0.0, 0) if budget > 0.5 else ({}, 0.0, -1),
        get_optimal_checkpointing_policy_per_module=policy,
    )  # fmt: skip
    monkeypatch.setattr(sac, "sac_tools", lambda: tools)
    (plan,) = sac.sac_plans(step, graph=graph, shares=(0.8, 0.4))
    assert plan.strategy == "torch sac_milp" and plan.options == {"budget": 0.8} and not check_step_plan(graph, plan).findings
    assert [a[1:] for a in asked] == [([ONE] * 3, 0.25)] * 2
    targets = [graph.nodes[a.node].target for a in plan.actions[plan.boundary :]]
    assert targets.count("aten.tanh.default") == 2 and targets.count("aten.sigmoid.default") == 0
    assert len(plan.saved) < len(keep_everything(graph).saved)


def test_it_runs_with_pulp():
    pytest.importorskip("pulp")
    step, graph = captured()
    plans = sac.sac_plans(step, graph=graph)
    assert all(not check_step_plan(graph, p).findings for p in plans)
