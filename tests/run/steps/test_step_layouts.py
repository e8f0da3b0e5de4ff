"""Steps whose images lie channels last: the bits of eager mode in that layout, measured peaks as predicted, and the choice between layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import meshwright.probe.steps.priced as pricing
from meshwright.capture.losses import Objective, has_images
from meshwright.capture.step import capture_step
from meshwright.cli import main
from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible, UnknownName
from meshwright.probe.steps.choices import with_variants
from meshwright.probe.steps.costs import StepCosts, _order, measure_step
from meshwright.probe.steps.fit import largest_batch, planned_in_any, refusal
from meshwright.probe.steps.in_place import _plans_with_ways
from meshwright.probe.steps.measured import MeasuredStep, measured_step, measured_steps
from meshwright.run.steps.step import measured_peak_bytes, runner_of, step_tensors

MODEL = """
import torch
from torch import nn

def convolutions(batch_size=8):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Flatten(), nn.Linear(8 * 8 * 8, 5))
    return net, (torch.randn(batch_size, 3, 16, 16), torch.randint(5, (batch_size,)))

class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 8 * 8, 5)

    def forward(self, x):
        return self.last(self.first(x).view(x.shape[0], -1))

def viewed(batch_size=4):
    return Viewed(), (torch.randn(batch_size, 3, 8, 8), torch.randint(5, (batch_size,)))

def rows(batch_size=4):
    return nn.Linear(6, 5), (torch.randn(batch_size, 6), torch.randint(5, (batch_size,)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("layouts")
    (found / "nets.py").write_text(MODEL)
    return found


class Mixed(nn.Module):
    """Convolutions of images or volumes, also transposed, a normalisation, a pooling, a concatenation."""

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.pool = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.first, self.norm, self.second = conv(3, width, 3, padding=1), norm(width), conv(width, width, 1)
        self.up, self.last = up(width, width, 2, stride=2), conv(2 * width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.norm(self.first(x)))
        b = self.up(torch.relu(self.second(self.pool(a))))
        return self.last(torch.cat([a, b], 1)).flatten(2).mean(2)


@given(dims=st.sampled_from([2, 3]), width=st.integers(2, 9), rows=st.integers(1, 4), side=st.sampled_from([4, 6]), share=st.floats(0.3, 1.0))
@settings(max_examples=8, deadline=None)
def test_the_bits_of_eager_mode_in_that_layout(dims: int, width: int, rows: int, side: int, share: float) -> None:
    torch.manual_seed(width)
    module = Mixed(dims, width)
    inputs = (torch.randn(rows, 3, *[side] * dims), torch.randint(4, (rows,)))
    step = capture_step(module, inputs, channels_last=True)
    assert step.channels_last and has_images(inputs) and not has_images(inputs[1:])
    graph = measure_step(step.graph_module, step.step_graph, costs=StepCosts(), rounds=1)
    full = keep_everything(graph)
    try:
        plan = FusionAware(effort=20_000).plan(graph, int(share * full.peak_bytes), rng=np.random.default_rng(0))
    except Infeasible:
        plan = full
    runner = runner_of(step, plan, graph=graph)
    found = dict(zip(step.outputs, runner.run(step_tensors(step)), strict=True))
    module.zero_grad()
    loss = Objective(module, "cross-entropy", channels_last=True)(*inputs)
    loss.backward()
    assert torch.equal(found["loss"], loss.detach())
    assert all(torch.equal(found[f"gradient:{name}"], p.grad) for name, p in module.named_parameters())
    assert measured_peak_bytes(runner, step_tensors(step)) == plan.peak_bytes


def test_other_implementations_in_that_layout() -> None:
    """What is offered as exact has the bits of the plain step, and plans with it need what they say."""
    torch.manual_seed(0)
    module, inputs = Mixed(2, 8), (torch.randn(8, 3, 32, 32), torch.randint(4, (8,)))
    step, costs = capture_step(module, inputs, channels_last=True), StepCosts()
    graph = measure_step(step.graph_module, step.step_graph, costs=costs, rounds=1)
    full = keep_everything(graph)
    plain = runner_of(step, full, graph=graph).run(step_tensors(step))
    joint = with_variants(step, graph, costs=costs)
    for share in (0.85, 0.7):
        plan = Monet().plan(joint, int(share * full.peak_bytes), rng=np.random.default_rng(0))
        runner = runner_of(step, plan, graph=joint)
        assert all(torch.equal(a, b) for a, b in zip(plain, runner.run(step_tensors(step)), strict=True) if a is not None)
        assert measured_peak_bytes(runner, step_tensors(step)) == plan.peak_bytes


def test_the_layouts_of_a_step(folder: Path) -> None:
    model, costs = f"{folder}/nets.py:convolutions", folder / "costs.json"
    (given_,) = measured_steps(model, costs=costs, implementations="exact")
    both = measured_steps(model, costs=costs, implementations="rounding")
    assert {m.layout for m in both} == {"given", "channels-last"} and both[0].plain == both[1].plain
    assert keep_everything(given_.plain).time_s > 0 and given_.layout == "given"
    own = {layout: measured_step(model, costs=costs, channels_last=layout == "channels-last") for layout in ("given", "channels-last")}
    assert min(own, key=lambda layout: keep_everything(own[layout].plain).time_s) == both[0].layout
    (asked,) = measured_steps(model, costs=costs, layout="channels-last")
    assert asked.layout == "channels-last" and not asked.graph.notes
    (one,) = measured_steps(model, costs=costs, layout="given", implementations="rounding")
    assert one.layout == "given"
    with pytest.raises(UnknownName, match="no layout 'sideways'"):
        measured_steps(model, costs=costs, layout="sideways")


@pytest.mark.parametrize(("net", "why"), [("viewed", "view"), ("rows", "no input is a batch of images")])
def test_a_model_that_has_one_layout_only(folder: Path, net: str, why: str) -> None:
    model, costs = f"{folder}/nets.py:{net}", folder / "costs.json"
    (asked,) = measured_steps(model, costs=costs, layout="channels-last")
    assert asked.layout == "given" and any("not laid out channels last" in n and why in n for n in asked.graph.notes)
    (fastest,) = measured_steps(model, costs=costs, implementations="rounding")
    assert fastest.layout == "given" and not fastest.graph.notes


def steps_of(folder: Path, rows: int) -> tuple[MeasuredStep, ...]:
    return measured_steps(f"{folder}/nets.py:convolutions", costs=folder / "costs.json", layout="fastest", batch_size=rows)


def test_the_first_layout_that_fits(folder: Path) -> None:
    steps = sorted(steps_of(folder, 8), key=lambda m: keep_everything(m.graph).peak_bytes)
    less, more = (keep_everything(m.graph).peak_bytes for m in steps)
    if less < more:
        assert planned_in_any(steps[::-1], less, "keep")[0] is steps[0]
    assert planned_in_any(steps[::-1], more, "keep")[0] is steps[1]
    with pytest.raises(Infeasible) as refused:
        planned_in_any(steps, less // 4, "keep")
    assert len(refused.value.data["others"]) == 1 and json.dumps(refused.value.data)


def test_the_largest_batch_in_any_layout(folder: Path) -> None:
    at = {rows: steps_of(folder, rows) for rows in range(1, 5)}
    budget = max(keep_everything(m.graph).peak_bytes for m in at[3])
    found = largest_batch(at.__getitem__, budget, "keep")
    assert found.batch_size == max(rows for rows, steps in at.items() if min(keep_everything(m.graph).peak_bytes for m in steps) <= budget)


def test_a_refusal_in_all_layouts_is_proved_in_all() -> None:
    data = {"bound_bytes": 20, "others": [{"bound_bytes": 5, "order_bound_bytes": 12, "message": "too much"}]}
    assert refusal(3, Infeasible("too many", data=data), 10)[0] == "operators in the graph's order"
    data = {"bound_bytes": 20, "others": [{"bound_bytes": 5, "message": "too much"}]}
    assert refusal(3, Infeasible("too many", data=data), 10)[0] == ""


def test_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "plan", "--model", f"{folder}/nets.py:convolutions", "--costs", str(folder / "costs.json"), "--budget", "90%"]
    assert main([*words, "--layout", "channels-last", "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "channels-last" and found["measured_peak_bytes"] == found["peak_bytes"]
    assert main([*words, "--layout", "channels-last"]) == 0
    assert "images channels last, and what is computed from them" in capsys.readouterr().out
    assert main([*words, "--layout", "sideways"]) == 2
    assert "there are: given, channels-last, fastest" in capsys.readouterr().err


def test_a_step_that_cannot_run_here_is_priced_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "free_bytes", lambda: 1000)
    found = measured_step(f"{folder}/nets.py:convolutions", costs=folder / "costs.json")
    assert any("operators were timed alone: a whole step takes" in n for n in found.graph.notes)


@pytest.mark.parametrize("last", [False, True])
def test_every_implementation_lays_its_result_out_as_the_plain_one(last: bool) -> None:
    """Who looks at a result by a view looks at it as captured. Pooling by offsets, which knows one order only, is not offered in another."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 5))
    step, costs = capture_step(module, (torch.randn(16, 3, 32, 32), torch.randint(5, (16,))), channels_last=last), StepCosts()
    alone = measure_step(step.graph_module, step.step_graph, costs=costs, rounds=1)
    joint = with_variants(step, alone, costs=costs, rounding=True)
    calls = {n.name: n for n in step.graph_module.graph.nodes}
    names = {a.name for n in joint.nodes for a in n.alternatives}
    assert "in_place" in names and (not any("pool_argmax" in name for name in names) if last else any(name.startswith("channels") for name in names))
    plain = runner_of(step, keep_everything(alone), graph=alone).run(step_tensors(step))
    for plan in _plans_with_ways(joint):
        runner = runner_of(step, plan, graph=joint)
        values = runner.values_of(step_tensors(step))
        for k, a in enumerate(plan.actions):
            runner.run_actions(values, {}, k, k + 1)
            node = joint.nodes[a.node]
            if node.name in calls and isinstance(values[a.node], torch.Tensor) and isinstance(calls[node.name].meta["val"], torch.Tensor):
                shown, found = calls[node.name].meta["val"], values[a.node]
                assert shown.shape != found.shape or _order(shown) == _order(found), (node.name, a.alternative)
        results = [values[i] for i in runner.outputs if i is not None]
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip([x for x in plain if x is not None], results, strict=True))
