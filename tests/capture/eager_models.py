"""Model functions that eager PyTorch runs and that tracing has to look at twice: each holds one cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))


class NoGrad(Linears):
    """A region without gradients whose results are used, and one that only counts."""

    def forward(self, x):
        with torch.no_grad():
            kept = self.a(x)
            self.count += 1
        y = self.b(x)
        with torch.no_grad():
            self.count.add_(kept.detach().mean())
        return y + kept


class InPlaceWithoutGradient(Linears):
    """What leads to parameters is changed where there are no gradients, and a gradient is taken within."""

    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            y.mul_(2)
            weight = self.b.weight.abs()
            with torch.enable_grad():
                inner = self.b(x) * 3
        return y * weight.sum() + inner


class SwitchesGradients(Linears):
    def forward(self, x):
        torch.set_grad_enabled(False)
        y = self.a(x)
        torch.set_grad_enabled(True)
        return self.b(y)


class Autocast(Linears):
    """Nested regions, a weight that is used twice, operators that autocast leaves alone, and one made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.einsum("bi,ij->bj", x, self.a.weight)
            y = self.a(self.a(self.norm(y)))
            with torch.autocast("cpu", enabled=False):
                y = self.b(y.float())
            with torch.no_grad():
                scale = self.b(y).softmax(-1)
            return (self.b(y) * scale).float()


class Checkpointed(Linears):
    reentrant = False

    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class Vmapped(Linears):
    def forward(self, x):
        mask = torch.vmap(lambda i: torch.vmap(lambda j: i >= j)(torch.arange(WIDTH)))(torch.arange(WIDTH))
        return torch.vmap(lambda row: self.a(row) * 2)(x) @ torch.where(mask, self.b.weight, 0.0)


class Parametrized(nn.Module):
    """Spectral norm, whose power iteration changes buffers, and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.b = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class ConvertsItself(Linears):
    """Converts its modules, and what it computes, to the types that they have: the router of transformers' Switch Transformers."""

    def forward(self, x):
        self.a = self.a.to(torch.float32)
        y = self.a(x.to(torch.float32))
        with torch.no_grad():
            same = y.to(x.dtype)
        return self.b(y.float()).type_as(x) + same


class AsksWhetherExported(Linears):
    """Makes a mask only where it is not compiled, and reads it always: a fault of many of transformers' classes."""

    def forward(self, x):
        mask = None if torch.compiler.is_compiling() or torch.compiler.is_exporting() else torch.ones(WIDTH)
        return self.b(self.a(x) * mask[None])


class Experts(nn.Module):
    """Rows go where their values send them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class OwnGradient(Linears):
    def forward(self, x):
        return self.b(Tripled.apply(self.a(x)))


class HookedTensor(Linears):
    def forward(self, x):
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return self.b(y)


class HookedModule(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, given, gradients: tuple(g * 2 for g in given))

    def forward(self, x):
        return self.b(self.a(x))


def hooked_root():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), CAUSES["HookedModule"]())
    net.register_full_backward_pre_hook(lambda module, gradients: tuple(g * 3 for g in gradients))
    return net, (torch.randn(4, WIDTH), torch.randn(4, WIDTH))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        return self.gru(y)[0][:, -1]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.ConvTranspose1d(4, 1, 1))

    def forward(self, x):
        return self.net(x.unsqueeze(1)).squeeze(1)


class Attention(nn.Module):
    """scaled_dot_product_attention plain, causal, with masks of both kinds, and with fewer heads for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mha = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        h = x.unsqueeze(1) * torch.arange(1.0, 4.0)[None, :, None]
        q, k, v = (t.view(len(x), 3, 2, 2).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keep = torch.ones(3, 3, dtype=torch.bool).tril()
        y = y + F.scaled_dot_product_attention(q, k, v, attn_mask=keep) + F.scaled_dot_product_attention(q, k, v, attn_mask=keep.float())
        y = y + F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True, scale=0.5)
        h = y.transpose(1, 2).reshape(len(x), 3, WIDTH)
        return self.mha(h, h, h, need_weights=False)[0].sum(1)


class ChangedThroughViews(Linears):
    """Changes in place that later calls see through other views of the same memory."""

    def forward(self, x):
        y = self.a(x)
        head, flat = y[:, :2], y.view(-1)
        head.mul_(self.b.weight[0, :2])
        y[:, 3] = x[:, 0]
        y[1:, 1:3].add_(flat[0])
        flat[2:6].zero_()
        y.view(1, -1, WIDTH).permute(2, 0, 1).transpose(0, 1)[0].mul_(3)
        moved = torch.zeros_like(x)
        moved[:, 1:] = y[:, :-1]
        moved[:, 0] = 2.0
        return self.b(y) + head.sum() * flat.mean() + moved


class DropsInPlace(Linears):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.0, inplace=True).add_(1).relu_())


class TiedAndFrozen(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)
        self.c.weight = self.a.weight
        self.b.requires_grad_(False)

    def forward(self, x):
        return self.c(F.leaky_relu_(self.b(self.a(x))))


class Constants(Linears):
    """Constants of Python's making, a random table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x):
        return self.b(self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.table)


class OddConstants(Linears):
    """A mask and turns as people keep them: infinite and complex numbers in tensors that are no buffers, and a complex argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.tensor([0.0, float("-inf"), float("nan"), 1.0])
        self.turns = torch.polar(torch.ones(2), torch.arange(2.0))

    def forward(self, x):
        y = torch.view_as_complex(self.a(x).reshape(-1, 2, 2)) * self.turns * (0.5 + 1j)
        return self.b(torch.view_as_real(y).flatten(1) + self.mask.nan_to_num().softmax(0))


class AssignsBuffers(Linears):
    """Gives buffers new tensors, reads old and new ones, through one of which a gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.a(x)
        before, self.calls = self.mean, self.calls + 1
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        self.last = y.mean(0)
        return self.b(y + self.mean - 0.3 * before) * self.calls + self.last


CAUSES: dict[str, type[nn.Module]] = {
    c.__name__: c
    for c in (
        NoGrad, InPlaceWithoutGradient, SwitchesGradients, Autocast, Checkpointed, CheckpointedReentrantly, Vmapped, Parametrized, Experts,
        OwnGradient, HookedTensor, HookedModule, Recurrent, Convolutions, Attention, TiedAndFrozen, Constants, ChangedThroughViews, DropsInPlace,
        AssignsBuffers, ConvertsItself, AsksWhetherExported, OddConstants,
    )
}  # fmt: skip
WHOLE = {"Experts", "OwnGradient", "HookedTensor", "HookedModule"}  # what is kept whole


def _model(kind: type[nn.Module]) -> Callable[[], Any]:
    def make():
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), kind(), nn.Linear(WIDTH, WIDTH))
        return net, (torch.randn(4, WIDTH), torch.randn(4, WIDTH))

    return make


globals().update({name: _model(kind) for name, kind in CAUSES.items()})


# ---- outputs and inputs that are no plain tensors ----
@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Bag(nn.Module):
    """Keyword inputs and, where labels come, its own loss; `form` says what its output is."""

    def __init__(self, form: str = "dataclass") -> None:
        super().__init__()
        self.form = form
        self.table, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, tokens=None, weights=None, labels=None, scale=1.0, extra=None):
        logits = self.head((self.table(tokens) * weights.unsqueeze(-1)).sum(1)) * scale
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if extra is not None:
            logits = logits + extra["bias"][0].unsqueeze(-1)
        if self.form == "dictionary":
            return {"hidden": logits * 2, "logits": logits, "loss": loss}
        if self.form == "tuple":
            return (logits, (logits * 2,)) if loss is None else (loss, logits)
        return Output(loss, logits)


def bag_inputs() -> dict[str, Any]:
    return {"labels": torch.randint(5, (4,)), "tokens": torch.randint(7, (4, 3)), "weights": torch.rand(4, 3)}


def bag():
    return Bag(), bag_inputs()


def bag_dictionary():
    return Bag("dictionary"), {**bag_inputs(), "scale": 2.0, "extra": None}


def bag_tuple():
    return Bag("tuple"), ((torch.randint(7, (4, 3)),), {"weights": torch.rand(4, 3), "labels": torch.randint(5, (4,))})


def bag_nested():
    inputs = {"tokens": torch.randint(7, (4, 3)), "weights": torch.rand(4, 3), "extra": {"bias": (torch.rand(4),)}}
    return Bag(), {**inputs, "target": torch.randint(5, (4,))}


def bag_in_order():
    return Bag("tuple"), (torch.randint(7, (4, 3)), torch.rand(4, 3), torch.randint(5, (4,)))


def loss_of_all(output, target):
    return F.cross_entropy(output.logits, target) + output.logits.square().mean()


def unequal_keywords():
    return Bag(), {**bag_inputs(), "weights": torch.rand(3, 3)}


def nothing_but_flags():
    return Bag(), {"scale": 2.0}


def one_tensor_twice():
    x = torch.rand(2, WIDTH)
    return nn.Linear(WIDTH, WIDTH), (x, x)
