"""Stage modules for the tests of pipelines: float64, of unequal widths, one without parameters, one with a frozen and a shared weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Shared(nn.Module):
    """A weight used twice, dropout-free; its bias frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(torch.relu(self.linear(x))))


def make(stages: int, microbatches: int) -> tuple[list[nn.Module], list[torch.Tensor], list[torch.Tensor], Callable[..., Any]]:
    torch.manual_seed(5)
    widths = [4 + k % 3 for k in range(stages + 1)]
    modules: list[nn.Module] = []
    for k in range(stages):
        a, b = widths[k], widths[k + 1]
        made: nn.Module = nn.Sequential(nn.LayerNorm(a), nn.Linear(a, b), nn.Tanh(), Shared(b))
        if k == 1:
            made = _Fold(a, b)
        modules.append(made.double())
    inputs = [torch.randn(3, widths[0], dtype=torch.float64) for _ in range(microbatches)]
    targets = [torch.randn(3, widths[-1], dtype=torch.float64) for _ in range(microbatches)]
    return modules, inputs, targets, nn.functional.mse_loss


class _Fold(nn.Module):
    """No parameters: repeats or cuts columns, bends them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.columns = [i % before for i in range(after)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x[:, self.columns] * 3)


def uneven(stages: int, microbatches: int) -> Any:
    modules, inputs, targets, loss = make(stages, microbatches)
    inputs[2] = inputs[2][:2]
    return modules, inputs, targets, loss


def growing(stages: int, microbatches: int) -> Any:
    """Every input has one shape, but a stage's output has as many rows as its input has positive ones."""
    modules, inputs, targets, loss = make(stages, microbatches)

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return modules[0](x)[x[:, 0] > 0]

    inputs[0][:, 0], inputs[1][:, 0] = 1.0, -1.0
    return [Rows(), *modules[1:]], inputs, targets, loss


def nested(stages: int, microbatches: int) -> Any:
    modules, inputs, targets, loss = make(stages, microbatches)

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x

    return [*modules[:-1], Pair()], inputs, targets, loss


def wrong_number(stages: int, microbatches: int) -> Any:
    modules, inputs, targets, loss = make(stages, microbatches)
    return modules[:-1], inputs, targets, loss


def not_four(stages: int, microbatches: int) -> Any:
    return make(stages, microbatches)[:3]


def mixed_dtypes(stages: int, microbatches: int) -> Any:
    modules, inputs, targets, loss = make(stages, microbatches)
    modules[0].register_parameter("extra", nn.Parameter(torch.zeros(2, dtype=torch.float32)))
    return modules, inputs, targets, loss


def slow(stages: int, microbatches: int) -> Any:
    """Lasts long enough to be interrupted; rank 1's process kills itself in the middle."""
    import os
    import signal

    modules, inputs, targets, loss = make(stages, microbatches)

    class Deadly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = modules[1], 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if torch.is_grad_enabled() and self.calls > 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return self.inner(x)

    return [modules[0], Deadly(), *modules[2:]], inputs, targets, loss
