"""Nets with one operator that cannot be traced, or that the meta device makes otherwise, between layers that can."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations


class Body(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), middle, nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.relu(self.first(x)))))


def _with(middle: nn.Module):
    return Body(middle), (torch.randn(4, 4), torch.randint(0, 3, (4,)))


class Weighted(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8)), function

    def forward(self, x):
        return self.function(x, self.weight)


def least_squares():
    return _with(Weighted(lambda x, w: torch.linalg.lstsq(w, x.T).solution.T))


def gradient_within():
    return _with(Weighted(lambda x, w: torch.func.grad(lambda v: (torch.tanh(v @ w) ** 2).sum())(x)))


def orthogonal():
    return _with(nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 4)), nn.Linear(4, 8)))


def orthogonal_square():
    return _with(parametrizations.orthogonal(nn.Linear(8, 8)))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x, targets, lengths):
        scores = self.layers(x).log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(scores, targets, torch.full((x.shape[0],), x.shape[1]), lengths)


def speech():
    return Speech(), (torch.randn(4, 9, 3), torch.randint(1, 5, (4, 3)), torch.tensor([3, 2, 1, 3]))


class Averaged(nn.Module):
    """Kept whole, and told a number that follows the batch."""

    def forward(self, x, samples):
        return x + x[torch.nonzero(x.sum(1) > -1e9)[:, 0]].sum(0) / samples


class Averaging(Body):
    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(torch.tanh(self.middle(y, y.shape[0])))


class Router(nn.Module):
    """As JetMoE's: how many rows each expert gets is a list of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        chosen = self.layer(x).argmax(-1)
        return chosen.sort().indices, torch.bincount(chosen, minlength=3).tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        order, sizes = self.router(x)
        made = torch.cat([expert(part) for expert, part in zip(self.experts, x[order].split(sizes), strict=True)])
        return x + torch.zeros_like(x).index_add(0, order, made)


def routed():
    return _with(Experts())


def averaging():
    return Averaging(Averaged()), (torch.randn(4, 4), torch.randint(0, 3, (4,)))


class Packed(nn.Module):
    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.lstm, self.padded = nn.LSTM(4, 8, batch_first=True), padded

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1] if self.padded else None)
        return made


class Sequences(nn.Module):
    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), Packed(padded), nn.Linear(8, 3)

    def forward(self, x, lengths):
        return self.last(self.middle(torch.tanh(self.first(x)), lengths).sum(1))


def packed():
    return Sequences(True), (torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4]), torch.randint(0, 3, (4,)))


def packed_to_the_longest():
    return Sequences(False), (torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4]), torch.randint(0, 3, (4,)))


class Teacher(nn.Module):
    def __init__(self, picks: bool) -> None:
        super().__init__()
        self.own, self.picks = nn.Linear(8, 8), picks
        self.teacher = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.own.weight, alpha=0.1)
            told = self.teacher(x)
        return (self.own(x) + told)[torch.nonzero(told.sum(1) > -1e9)[:, 0]] if self.picks else self.own(x) + told


def teacher():
    return _with(Teacher(False))


def teacher_in_region():
    return _with(Teacher(True))


def teacher_in_opaque():
    model, inputs = _with(Teacher(False))
    model.register_full_backward_hook(lambda *_: None)
    return model, inputs


class Softened(torch.autograd.Function):
    """A gradient of the owner's, in his loss."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


def own_gradient_in_the_loss(output, target):
    return torch.nn.functional.cross_entropy(Softened.apply(output), target)


def traced():
    return _with(nn.Linear(8, 8))
