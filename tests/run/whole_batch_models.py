"""Models whose loss looks at the whole batch, as their papers have it; all return their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BATCH, EXPERTS = 8, 4, 3
Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _tower() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def _pair() -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = _tower(), _tower(), nn.Parameter(torch.tensor(1.0))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.scale.exp() * i @ t.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip() -> Built:
    return Clip(), _pair()


class Views(nn.Module):
    """SimCLR: both views of a sample among all others; rows of a replica lie apart in what is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _tower(), nn.Linear(WIDTH, WIDTH)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.head(self.body(torch.cat([one, other]))), dim=1)
        n = len(one)
        scores = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def views() -> Built:
    return Views(), _pair()


class Skips(nn.Module):
    """What a U-Net does: its skip connection joins channels, not samples; a dice loss over all pixels of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chance = self.head(torch.cat([x, torch.tanh(self.down(x))], 1)).softmax(1)
        wanted = F.one_hot(y[:, 0].long().clamp(0, 2), 3).to(x.dtype)
        return 1 - 2 * (chance * wanted).sum() / (chance.sum() + wanted.sum())


def skips() -> Built:
    return Skips(), _pair()


class Centred(nn.Module):
    """A buffer that forward changes at its beginning and, by a mean over samples, at its end; the loss reads it (DINO's centre)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _tower()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.centre.mul_(0.9).add_(0.1)
        made = self.body(x)
        self.centre.add_(made.detach().mean(0), alpha=0.1)
        return (made - self.centre - y).pow(2).mean()


def centred() -> Built:
    return Centred(), _pair()


class Labelled(nn.Module):
    """Supervised contrast: whole numbers travel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.body(x), dim=1)
        alike = y[:, None] == y[None, :]
        scores = (z @ z.t()).log_softmax(1)
        return -((scores * alike).sum(1) / alike.sum(1)).mean()


def labelled() -> Built:
    return Labelled(), (torch.randn(BATCH, WIDTH), torch.randint(3, (BATCH,)))


class Twins(nn.Module):
    """Barlow twins and VICReg: correlations and deviations over the batch, which are sums over it."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.body, self.spread = _tower(), spread

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = self.body(one), self.body(other)
        if self.spread:
            kept = [F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b)]
            return F.mse_loss(a, b) + kept[0] + kept[1]
        a, b = ((z - z.mean(0)) / ((z - z.mean(0)).square().mean(0) + 1e-5).sqrt() for z in (a, b))
        cross = a.t() @ b / len(a)
        return (torch.diagonal(cross) - 1).square().sum() + 0.01 * cross.triu(1).square().sum()


def twins() -> Built:
    return Twins(False), _pair()


def spread() -> Built:
    return Twins(True), _pair()


class Hardest(nn.Module):
    """Triplets with the hardest of the batch, by distances of all to all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _tower()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        apart = (z[:, None] - z[None]).square().sum(-1)
        alike = y[:, None] == y[None]
        furthest = apart.masked_fill(~alike, -1.0).amax(1)
        nearest = apart.masked_fill(alike, 1e3).amin(1)
        return F.relu(furthest - nearest + 1).mean()


def hardest() -> Built:
    return Hardest(), (torch.randn(BATCH, WIDTH), torch.tensor([0, 1, 0, 1]))


class Switch(nn.Module):
    """Two layers of experts with the balance loss of Switch Transformers, beside a loss of each token; `biased`: a buffer follows the counts."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(_tower() for _ in range(EXPERTS)) for _ in range(2))
        for i in range(2):
            self.register_buffer(f"bias{i}", torch.zeros(EXPERTS))
        self.biased = biased

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        balance = x.new_zeros(())
        for bias, router, experts in zip((self.bias0, self.bias1), self.routers, self.experts, strict=True):
            flat = x.reshape(-1, WIDTH)
            shares = router(flat).softmax(-1)
            chosen = F.one_hot((shares + bias).argmax(-1), EXPERTS)
            counts = chosen.to(shares.dtype).mean(0)
            balance = balance + EXPERTS * (counts * shares.mean(0)).sum()
            if self.biased and self.training:
                bias.add_(0.01 * (counts.mean() - counts))
            mixed = sum(e(flat) * (shares * chosen)[:, i : i + 1] for i, e in enumerate(experts))
            x = x + mixed.view_as(x)
        return F.mse_loss(x, y) + 0.1 * balance


def switch() -> Built:
    return Switch(), (torch.randn(BATCH, 3, WIDTH), torch.randn(BATCH, 3, WIDTH))


def biased() -> Built:
    return Switch(biased=True), (torch.randn(BATCH, 3, WIDTH), torch.randn(BATCH, 3, WIDTH))
