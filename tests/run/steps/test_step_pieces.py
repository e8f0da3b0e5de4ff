"""Operators in pieces beside the plain ones: the same numbers for any sizes, and whole steps with the implementations that measuring chose."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import fx, nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import UnknownName
from meshwright.graph.step_graph import StepGraph, StepPlan, plain_target, replaced_target
from meshwright.probe.steps.choices import with_variants
from meshwright.probe.steps.costs import StepCosts, measure_step
from meshwright.run.steps.pieces import BATCH_NORM_BACKWARD, CONVOLUTION, CONVOLUTION_BACKWARD, POOL, POOL_BACKWARD, in_pieces, parts  # fmt: skip
from meshwright.run.steps.step import Variants, measured_peak_bytes, runner_of, step_tensors
from meshwright.run.steps.variants import register

aten = torch.ops.aten


def called(function: object, *args: object) -> tuple[fx.Node, list[torch.Tensor], object]:
    """The call as an FX node, its distinct tensors, and its plain result."""
    graph, tensors = fx.Graph(), list[torch.Tensor]()

    def place(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        tensors.append(x)
        return graph.placeholder(f"x{len(tensors)}")

    node = graph.call_function(function, tuple(place(a) for a in args))  # type: ignore[arg-type]
    node.meta["val"] = function(*args)  # type: ignore[operator]
    return node, tensors, node.meta["val"]


def close(found: object, expected: object) -> None:
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]  # type: ignore[call-overload]
    for a, b in pairs:
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(5, 3, 9, 8, 6), (7, 4, 6, 6, 4)])
def test_convolutions_by_images_and_channels(pieces: int, shape: tuple[int, int, int, int, int]) -> None:
    torch.manual_seed(pieces)
    n, inside, height, width, outside = shape
    x, w, b = torch.randn(n, inside, height, width), torch.randn(outside, inside, 3, 3), torch.randn(outside)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node, tensors, plain = called(aten.convolution.default, x, w, b, *how)
    close(in_pieces(CONVOLUTION, f"images {pieces}")(node, *tensors), plain)  # type: ignore[misc]
    g = torch.randn_like(plain)  # type: ignore[call-overload]
    for mask in ([True, False, False], [False, True, True], [False, True, False]):
        node, tensors, plain = called(aten.convolution_backward.default, g, x, w, [outside], *how, mask)
        close(in_pieces(CONVOLUTION_BACKWARD, f"images {pieces}")(node, *tensors), plain)  # type: ignore[misc]
        if not mask[0]:
            close(in_pieces(CONVOLUTION_BACKWARD, f"channels {pieces}")(node, *tensors), plain)  # type: ignore[misc]


def test_an_inputs_gradient_over_the_outputs() -> None:
    x, w, g = torch.randn(5, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(5, 4, 6, 6)
    node, tensors, plain = called(aten.convolution_backward.default, g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
    found = in_pieces(CONVOLUTION_BACKWARD, "images 5 over")(node, *tensors)  # type: ignore[misc]
    assert found[0].data_ptr() == g.data_ptr()
    close(tuple(found), plain)


@pytest.mark.parametrize("pieces", [1, 3, 6])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_normalisations_gradient_by_channels(pieces: int, weighted: bool) -> None:
    torch.manual_seed(0)
    x, g, w = torch.randn(4, 6, 5, 7), torch.randn(4, 6, 5, 7), torch.rand(6) + 0.5 if weighted else None
    _, mean, rstd = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
    args = (g, x, w, None, None, mean, rstd, True, 1e-5, [True, weighted, weighted])
    node, tensors, plain = called(aten.native_batch_norm_backward.default, *args)
    found = in_pieces(BATCH_NORM_BACKWARD, f"channels {pieces}")(node, *tensors)  # type: ignore[misc]
    close(found[: 1 + 2 * weighted], plain[: 1 + 2 * weighted])  # type: ignore[index]


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", range(40))
def test_pooling_by_places_in_windows(seed: int) -> None:
    """Any geometry that torch takes, ties, infinities and NaN among the values: the same values and gradients to the last bit."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kernel = [draw.randint(1, 4), draw.randint(1, 4)]
    stride = draw.choice([[], [draw.randint(1, 3), draw.randint(1, 3)]])
    padding, dilation = [draw.randint(0, k // 2) for k in kernel], [draw.randint(1, 2), draw.randint(1, 2)]
    x = torch.randn(draw.randint(1, 3), draw.randint(1, 3), draw.randint(8, 13), draw.randint(8, 13))
    x = (x * 2).round() if draw.random() < 0.5 else x
    if draw.random() < 0.4:
        x[torch.rand_like(x) < 0.1] = draw.choice([float("nan"), float("-inf"), float("inf")])
    node, tensors, plain = called(aten.max_pool2d_with_indices.default, x, kernel, stride, padding, dilation, draw.random() < 0.5)
    y, packed = in_pieces(POOL, "offsets")(node, *tensors)  # type: ignore[misc]
    assert torch.equal(y.nan_to_num(7.0), plain[0].nan_to_num(7.0)) and packed.numel() == -(-y.numel() // 2)  # type: ignore[index]
    g = torch.randn_like(y)
    back = aten.max_pool2d_with_indices_backward.default
    node, tensors, expected = called(back, g, x, kernel, stride, padding, dilation, node.args[5], plain[1])  # type: ignore[index]
    assert torch.equal(in_pieces(POOL_BACKWARD, "offsets")(node, g, packed), expected)  # type: ignore[misc, arg-type]


def test_pieces_are_all_of_it_and_none_is_empty() -> None:
    for whole in range(1, 12):
        for pieces in range(1, 15):
            found = [i for s in parts(whole, pieces) for i in range(whole)[s]]
            assert found == list(range(whole)) and all(s.stop > s.start for s in parts(whole, pieces))


@pytest.mark.parametrize("name", ["images", "images 0", "images x", "images 2 under", "channels 2 over", "rows 2", "images 9999999999"])
def test_what_has_no_such_name(name: str) -> None:
    assert in_pieces(CONVOLUTION_BACKWARD, name) is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.batch, self.head = nn.BatchNorm2d(16), nn.Linear(16 * 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.batch(self.one(x)))
        x = torch.relu(self.two(x) + x)
        return self.head(nn.functional.max_pool2d(torch.relu(self.three(x)), 2).flatten(1))


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    torch.manual_seed(0)
    return capture_step(Net(), (torch.randn(32, 3, 16, 16), torch.arange(32) % 5), name="net")


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> StepCosts:
    return StepCosts(tmp_path_factory.mktemp("costs") / "costs.json")


@pytest.fixture(scope="module")
def measured(step: CapturedStep, costs: StepCosts) -> StepGraph:
    return measure_step(step.graph_module, step.step_graph, costs=costs, rounds=1)


def results(step: CapturedStep, graph: StepGraph, plan: StepPlan) -> list[torch.Tensor]:
    return [x.clone() for x in runner_of(step, plan, graph=graph).run(step_tensors(step)) if x is not None]


@pytest.mark.parametrize("rounding", [False, True])
def test_plans_with_what_measuring_chose(step: CapturedStep, measured: StepGraph, costs: StepCosts, rounding: bool) -> None:
    graph = with_variants(step, measured, costs=costs, rounding=rounding)
    names = {a.name.partition(" ")[0] for n in graph.nodes for a in n.alternatives} | {
        n.target.partition(" ")[0] for n in graph.nodes if plain_target(n.target) != n.target
    }
    assert "images" in names or "channels" in names
    assert rounding or all(a.lossless for n in graph.nodes for a in n.alternatives)
    keep = keep_everything(measured)
    least = Monet(exact_operators=0, effort=400).plan(graph, None, rng=np.random.default_rng(0))
    assert least.peak_bytes < 0.6 * keep.peak_bytes
    plan = Monet(exact_operators=0, effort=400).plan(graph, (least.peak_bytes + keep.peak_bytes) // 2, rng=np.random.default_rng(0))
    expected = results(step, measured, keep)
    for one in (least, plan):
        for a, b in zip(results(step, graph, one), expected, strict=True):
            assert torch.equal(a, b) if not rounding else torch.allclose(a, b, rtol=1e-3, atol=1e-5)
        assert abs(measured_peak_bytes(runner_of(step, one, graph=graph), step_tensors(step)) / one.peak_bytes - 1) < 0.02


def test_what_was_measured_is_kept(step: CapturedStep, measured: StepGraph, costs: StepCosts) -> None:
    graph = with_variants(step, measured, costs=costs)
    assert costs.path is not None
    again = StepCosts(Path(costs.path))
    assert with_variants(step, measured, costs=again) == graph and again.costs == costs.costs


def test_a_replaced_operator_runs_and_without_its_implementation_is_refused(step: CapturedStep, measured: StepGraph) -> None:
    at = next(i for i, n in enumerate(measured.nodes) if n.target == CONVOLUTION)
    node = msgspec.structs.replace(measured.nodes[at], target=replaced_target(CONVOLUTION, "images 4"))
    graph = msgspec.structs.replace(measured, nodes=(*measured.nodes[:at], node, *measured.nodes[at + 1 :]))
    with pytest.raises(UnknownName, match="has no implementation 'images 4'"):
        runner_of(step, keep_everything(graph), graph=graph, variants=Variants())
    found = runner_of(step, keep_everything(graph), graph=graph, variants=register(graph, Variants())).run(step_tensors(step))
    for a, b in zip((x for x in found if x is not None), results(step, measured, keep_everything(measured)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
