"""Backward convolutions in two: the same gradients to the last bit, and the input is free before its gradient is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.capture.step import CapturedStep, capture_step
from meshwright.decide.memory.step import keep_everything
from meshwright.run.steps.step import runner_of, step_tensors

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "plain": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 9)),
    "without bias": (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 9)),
    "strided": (nn.Conv2d(4, 6, 5, stride=2, padding=2), (2, 4, 11, 8)),
    "one by one": (nn.Conv2d(16, 64, 1), (3, 16, 7, 7)),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
    "groups": (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 9)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8, padding=1), (2, 8, 9, 9)),
    "transposed": (nn.ConvTranspose2d(4, 3, 2, stride=2), (2, 4, 5, 5)),
    "one dimension": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 13)),
    "three dimensions": (nn.Conv3d(2, 3, 3), (2, 2, 5, 6, 7)),
}


class Twice(nn.Module):
    """The convolution after another operator, so that its input has a gradient."""

    def __init__(self, convolution: nn.Module, channels: int) -> None:
        super().__init__()
        self.scale, self.convolution = nn.Parameter(torch.linspace(0.5, 1.5, channels)), convolution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.convolution(x * self.scale.view(1, -1, *[1] * (x.dim() - 2)))).flatten(1)


def captured(module: nn.Module, shape: tuple[int, ...]) -> CapturedStep:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return capture_step(module, (x, torch.randn_like(module(x))), loss="mse")


def backward_calls(step: CapturedStep) -> list[str]:
    return [n.name for n in step.step_graph.nodes if n.target == "aten.convolution_backward.default"]


@pytest.mark.parametrize("case", CASES)
def test_both_halves_give_the_bits_of_autograd(case: str) -> None:
    convolution, shape = CASES[case]
    module = Twice(convolution, shape[1])
    step = captured(module, shape)
    assert [x.rpartition("_")[2] for x in backward_calls(step)] == ["weight", "input"]
    found = dict(zip(step.outputs, runner_of(step, keep_everything(step.step_graph)).run(step_tensors(step)), strict=True))
    step.objective(*step.source.inputs).backward()
    for name, p in module.named_parameters():
        assert p.grad is not None and torch.equal(found[f"gradient:{name}"], p.grad), name
        p.grad = None


def test_the_inputs_gradient_does_not_read_the_input() -> None:
    step = captured(Twice(*_of("plain")), (2, 4, 9, 9))
    nodes = {n.name: n for n in step.step_graph.nodes}
    weight, given = (nodes[x] for x in backward_calls(step))
    product = next(i for i, n in enumerate(step.step_graph.nodes) if n.target == "aten.mul.Tensor" and n.phase == "forward")
    assert product in weight.inputs and product not in given.inputs


def test_what_makes_no_gradient_of_the_input_stays_whole() -> None:
    step = captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (2, 3, 6, 6))
    assert len(backward_calls(step)) == 1 and not backward_calls(step)[0].endswith(("weight", "input"))


def test_frozen_weights_leave_one_half() -> None:
    module = Twice(*_of("plain"))
    module.convolution.requires_grad_(False)
    assert [x.rpartition("_")[2] for x in backward_calls(captured(module, (2, 4, 9, 9)))] == ["input"]
    module.convolution.requires_grad_(True)


def test_another_order_of_dimensions_stays_whole() -> None:
    module = Twice(*_of("plain")).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    step = capture_step(module, (x, torch.randn_like(module(x))), loss="mse")
    assert len(backward_calls(step)) == 1
    module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _of(case: str) -> tuple[nn.Module, int]:
    convolution, shape = CASES[case]
    return convolution, shape[1]
