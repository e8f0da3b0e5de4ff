"""Models for the tests of the gate: each with one cause for which a plan could train something else, and plain ones; in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH, LENGTH, CLASSES = 8, 8, 6, 12

Model = tuple[nn.Module, tuple[torch.Tensor, ...]]


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(CLASSES, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH, LENGTH))


class MLP(nn.Module):
    def __init__(self, hidden: int = 16, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH), nn.Dropout(dropout)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Language(nn.Module):
    """Logits for every token."""

    def __init__(self, tied: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.body = MLP()
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(ids))))


class Attending(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


# ---- plain models ---------------------------------------------------------------------------------------------------
def mlp() -> Model:
    return MLP(), vectors()


def deep() -> Model:
    return MLP(depth=4), vectors()


def dropping() -> Model:
    return MLP(dropout=0.25), vectors()


def language() -> Model:
    return Language(), tokens()


def tied() -> Model:
    return Language(tied=True), tokens()


def attending() -> Model:
    return Attending(), tokens()


# ---- the owner's own gradients ----------------------------------------------------------------------------------------
class _Reversed(torch.autograd.Function):
    """Identity whose gradient is turned round and halved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradient


class Reversing(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](_Reversed.apply(self.blocks[0](x)))


class TensorHook(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        if y.requires_grad:
            y.register_hook(lambda g: 3 * g)
        return self.blocks[1](y)


class _Reversible(torch.autograd.Function):
    """As reversible layers have it: backward runs the layer again, and lets autograd put gradients where the layer's parameters are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # puts
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversible.apply(self.first(x), self.layer)


def reversible() -> Model:
    model = MLP()
    model.blocks[1] = nn.Sequential(Reversible(), model.blocks[1])
    return model, vectors()


def reversible_outermost() -> Model:
    return Reversible(), vectors()


def reversing() -> Model:
    return Reversing(), vectors()


def tensor_hook() -> Model:
    return TensorHook(), vectors()


def module_hook() -> Model:
    model = MLP()
    model.blocks[1].register_full_backward_hook(lambda m, given, out: tuple(None if g is None else 2 * g for g in given))
    return model, vectors()


class NodeHook(MLP):
    """A hook on a node of the backward graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[0](x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(lambda given, out: tuple(None if g is None else 2 * g for g in given))
        return self.blocks[1](y)


class Packed(MLP):
    """What backward needs is kept in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.to(x.dtype)):
            y = self.blocks[0](x)
        return self.blocks[1](y)


def node_hook() -> Model:
    return NodeHook(), vectors()


def packed() -> Model:
    return Packed(), vectors()


def forward_hooks() -> Model:
    model = MLP()
    model.blocks[0].register_forward_hook(lambda m, given, kwargs, out: 2 * out, with_kwargs=True)
    model.blocks[1].register_forward_pre_hook(lambda m, given: (3 * given[0],))
    return model, vectors()


def early_module_hook() -> Model:
    model = MLP()
    model.blocks[1].register_full_backward_pre_hook(lambda m, out: (2 * out[0],))
    return model, vectors()


def accumulated_hook() -> Model:
    model = MLP()
    model.blocks[0][0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))
    return model, vectors()


CALLS = itertools.count(1)


class Counting(MLP):
    """Multiplies by what it draws from an iterator, whose place no value of the module or of its globals shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * next(CALLS))


def counting() -> Model:
    return Counting(), vectors()


def parameter_hook() -> Model:
    model = MLP()
    model.blocks[0][0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return model, vectors()


class OwnLanguage(Language):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _Reversed.apply(super().forward(ids))


def own_language() -> Model:
    return OwnLanguage(), tokens()


class PaddedLater:
    """Samples of which those after the first eight have padding of unlike length."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids, targets = torch.randint(CLASSES, (2, LENGTH), generator=generator)
        if index >= BATCH:
            targets[index % LENGTH :] = -100
        return ids, targets


def padded_later() -> PaddedLater:
    return PaddedLater()


# ---- what looks at the whole batch ------------------------------------------------------------------------------------
class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Convolved(nn.Module):
    """Three forms of it: with all, without weights, without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1),
            nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + x


class NormedLanguage(Language):
    def __init__(self) -> None:
        super().__init__(norm=False)
        self.shared = nn.BatchNorm1d(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.embed(ids).transpose(1, 2)).transpose(1, 2))


class Noisy(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class SeldomNoisy(MLP):
    """Leaves out a path so seldom that a step says nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.rand(len(x), 1).gt(1e-6))


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x[:, None])[0][:, 0]


def recurrent() -> Model:
    return Recurrent(0.0), vectors()


def recurrent_dropping() -> Model:
    return Recurrent(0.5), vectors()


def seldom_noisy() -> Model:
    return SeldomNoisy(), vectors()


class NoisyOwn(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversed.apply(super().forward(x))


class RoundedInside(MLP):
    """Normalises in float32 whatever it is given, as many language models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32) + torch.zeros(1, dtype=torch.float32) + torch.full((1,), 0.1)
        return super().forward((wide * torch.rsqrt(wide.float().square().mean(-1, keepdim=True) + 1e-6)).type_as(x))


class NarrowInside(MLP):
    """A matrix that is neither parameter nor buffer, so that it stays float32."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.eye(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.held[0])


class Centred(MLP):
    """Subtracts the mean over its batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 0.3 * x.mean(0))


class CentredHooked(TensorHook):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 0.3 * x.mean(0))


class LowRank(nn.Module):
    """Gradients of fewer directions than their matrices have: what a factorisation makes of the others is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x[:, :2]))


def centred() -> Model:
    return Centred(), vectors()


def centred_hooked() -> Model:
    return CentredHooked(), vectors()


def low_rank() -> Model:
    return LowRank(), vectors()


def instance_norm() -> Model:
    """Nothing of the step depends on other samples, but what it remembers does."""
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, 4)), norm, nn.Flatten()), vectors()


class Diverged(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sub(100).log()


class DivergedWhole(MLP):
    """A gradient that the micro-batches after the first have none of: what is no number spreads otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return torch.cat([found[:1].sub(100).log() if len(x) > 2 else found[:1] * 0, found[1:]])


def diverged_whole() -> Model:
    return DivergedWhole(), vectors()


def diverged() -> Model:
    return Diverged(), vectors()


def convolved() -> Model:
    return Convolved(), vectors()


def normed_language() -> Model:
    return NormedLanguage(), tokens()


def batch_norm() -> Model:
    return Normed(), vectors()


def noisy() -> Model:
    return Noisy(), vectors()


def noisy_own() -> Model:
    """Random numbers in a model that is not traced, for the gradient of its own."""
    return NoisyOwn(), vectors()


def rounded_inside() -> Model:
    return RoundedInside(), vectors()


def narrow_inside() -> Model:
    return NarrowInside(), vectors()


# ---- losses -----------------------------------------------------------------------------------------------------------
def _rows(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.reshape(-1, output.shape[-1]), target.reshape(-1)


def added_up_where_positive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum, which is kept whole as it picks rows by their values."""
    rows = (target.sum(1) > -1e9).nonzero()[:, 0]
    return F.mse_loss(output[rows], target[rows], reduction="sum")


def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Class 0 is padding."""
    return F.cross_entropy(*_rows(output, target), ignore_index=0)


def ignoring_most(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """So many targets are ignored that some micro-batches have none left."""
    return F.cross_entropy(*_rows(output, torch.where(target < CLASSES - 1, -100, target)))


def ignoring_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*_rows(output, torch.full_like(target, -100)))


def class_weights(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*_rows(output, target), weight=torch.arange(1, CLASSES + 1, dtype=output.dtype), label_smoothing=0.1)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(1, CLASSES + 1, dtype=torch.float32))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(*_rows(output, target), weight=self.weight.to(output.dtype))


weighted_module = Weighted()


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*_rows(output, target), reduction="sum")


def negative_log(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output.log_softmax(-1).reshape(-1, CLASSES), target.reshape(-1), ignore_index=1)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    mask = (target > 3).to(each.dtype)
    return (each * mask).sum() / mask.sum().clamp(min=1)


def masked_means(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    mask = (target > 3).to(each.dtype)
    return (each * mask).mean() / mask.mean()


def two_terms(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One term counts its targets, the other is a mean."""
    return F.cross_entropy(*_rows(output, target), ignore_index=0) + 0.01 * output.square().mean()


def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As causal language models take it: the next token, the first left out."""
    return F.cross_entropy(output[:, :-1].reshape(-1, CLASSES), target[:, 1:].reshape(-1), ignore_index=2)


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


def sum_and_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Two terms, of which one adds up over micro-batches."""
    return F.mse_loss(output, target, reduction="sum") + F.mse_loss(output, target)


def mean_by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / output.numel()


def huber(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.huber_loss(output, target)


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Every sample against all others of its batch."""
    return F.cross_entropy(output @ target.T, torch.arange(len(output), device=output.device))


def summed_contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A contrast beside a sum over samples, which counts as before."""
    return contrast(output, target) + 0.01 * (output - target).square().sum()


def balance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A penalty on the mean over the batch, as balance losses of experts have."""
    return F.mse_loss(output, target) + output.softmax(-1).mean(0).square().sum()


def by_the_root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target).sqrt()


# ---- optimizers -------------------------------------------------------------------------------------------------------
Named = Iterable[tuple[str, nn.Parameter]]


class _Simple(torch.optim.Optimizer):
    """An update from all gradients: `rule(gradients, parameters)` gives one step per parameter."""

    def __init__(self, named: Named, lr: float, rule: Callable[..., list[torch.Tensor]]) -> None:
        super().__init__([p for _, p in named], {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p, step in zip(trained, self.rule([p.grad for p in trained], trained), strict=True):
                p.sub_(group["lr"] * step)


def momentum(named: Named, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named] or [nn.Parameter(torch.zeros(0))], lr=lr, momentum=0.9, weight_decay=0.1)


def elementwise(named: Named, lr: float) -> torch.optim.Optimizer:
    return _Simple(named, lr, lambda gs, ps: [g.sign() + 0.1 * p for g, p in zip(gs, ps, strict=True)])


def clipping(named: Named, lr: float) -> torch.optim.Optimizer:
    """Clips the norm of all gradients inside."""

    def rule(gs: list[torch.Tensor], ps: list[torch.Tensor]) -> list[torch.Tensor]:
        norm = sum(g.square().sum() for g in gs) ** 0.5
        return [g / norm for g in gs]

    return _Simple(named, lr, rule)


def lars(named: Named, lr: float) -> torch.optim.Optimizer:
    """A trust ratio per parameter."""
    return _Simple(named, lr, lambda gs, ps: [g * (p.norm() + 1e-3) / (g.norm() + 1e-9) for g, p in zip(gs, ps, strict=True)])


def rows(named: Named, lr: float) -> torch.optim.Optimizer:
    """A second moment per row and column of matrices, as Adafactor keeps it."""

    def factored(g: torch.Tensor) -> torch.Tensor:
        if g.dim() != 2:
            return g.sign()
        square = g.square() + 1e-12
        return g / (square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()).sqrt()

    return _Simple(named, lr, lambda gs, ps: [factored(g) for g in gs])


def orthogonal(named: Named, lr: float) -> torch.optim.Optimizer:
    """Matrices are made orthogonal, as Muon does."""

    def turned(g: torch.Tensor) -> torch.Tensor:
        if g.dim() != 2:
            return g.sign()
        u, _, v = torch.linalg.svd(g, full_matrices=False)
        return u @ v

    return _Simple(named, lr, lambda gs, ps: [turned(g) for g in gs])


def newton_schulz(named: Named, lr: float) -> torch.optim.Optimizer:
    """Nearly orthogonal matrices by a polynomial, as Muon has them: no rounding decides where a gradient has fewer directions than its matrix."""

    def turned(g: torch.Tensor) -> torch.Tensor:
        if g.dim() != 2:
            return g
        x = g / (g.norm() + 1e-7)
        for _ in range(5):
            y = x @ x.T
            x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
        return x

    return _Simple(named, lr, lambda gs, ps: [turned(g) for g in gs])
