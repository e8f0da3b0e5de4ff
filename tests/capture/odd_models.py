"""Model functions for tests: unusual but legal ones, ones that cannot be traced, and wrong ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

NOT_A_FUNCTION = 3


def rows(width: int = 8, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, width), torch.randint(5, (batch,))


class DropoutAndConstants(nn.Module):
    """Dropout, an in-place operator, a constant made in forward, a buffer that is not saved, a frozen parameter, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 5)
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("offset", torch.zeros(16), persistent=False)
        self.scale = torch.full((16,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x), inplace=True) * self.scale + self.offset * self.frozen
        y = F.dropout(y, 0.25, self.training) + torch.tensor(0.5)
        return self.second(F.dropout(y, 0.0, self.training))


def dropout_and_constants():
    return DropoutAndConstants(), rows()


class Gated(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.sum().item() > 0:  # control flow by value: cannot be traced
            return y * 2
        return y


def value_dependent():
    return Gated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))), rows()


def value_dependent_huge():
    """As above with 4 GB of parameters: too many to run it for real."""
    return nn.Sequential(nn.Linear(8, 2**26), Gated(nn.Linear(2**26, 8))), rows()


class Counting(nn.Module):
    """Sets an attribute while it runs: torch.export refuses it, AOTAutograd does not care."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x)
        return self.last


def sets_an_attribute():
    return Counting(), rows()


class InnerGradient(nn.Module):
    """Takes a gradient inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.layer(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + g.square().sum()


def inner_gradient():
    return InnerGradient(), rows()


class Unfit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def shapes_do_not_fit():
    return Unfit(), rows()


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = [float(r) for r in torch.linspace(0, 0.5, 3)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(r)) for r in rates), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def reads_values_when_built():
    return ReadsValues(), rows()


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), target)


def own_loss():
    return OwnLoss(), rows()


def raises():
    raise RuntimeError("no weights here")


def needs_an_argument(width):
    return nn.Linear(width, 5), rows()


def not_a_pair():
    return nn.Linear(8, 5)


def not_a_module():
    return "model", rows()


def no_inputs():
    return nn.Linear(8, 5), ()


def number_as_input():
    return nn.Linear(8, 5), (torch.randn(4, 8), 3)


def scalar_as_input():
    return nn.Linear(8, 5), (torch.randn(4, 8), torch.tensor(1.0))


def unequal_batches():
    return nn.Linear(8, 5), (torch.randn(4, 8), torch.zeros(3, dtype=torch.long))


def one_input():
    return nn.Linear(8, 5), (torch.randn(4, 8),)


def per_row_loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def linear():
    return nn.Linear(8, 5), rows()


class Quadratic(nn.Module):
    """Compares every row with every other: its sizes are not affine in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return torch.softmax(y @ y.T, dim=1) @ y


def rows_by_rows():
    return Quadratic(), rows(batch=3)


class Halving(nn.Module):
    """One more layer when the batch is even: other calls at other batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return torch.tanh(y) if x.shape[0] % 2 == 0 else y


def other_calls():
    return Halving(), rows(batch=3)


class Flexible(nn.Module):
    """FlexAttention, which torch cannot train on a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.inside(x).chunk(3, -1))
        return self.outside(flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs()).transpose(1, 2).flatten(2))


def flexible():
    return Flexible(), (torch.randn(2, 4, 16), torch.randn(2, 4, 16))
