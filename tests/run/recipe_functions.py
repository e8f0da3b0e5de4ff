"""Optimizers and schedules as a user writes them."""

from __future__ import annotations

import torch


def by_depth(named, learning_rate, factor=0.9):
    """Rates that fall with depth: counts the parameters of the whole model, and looks at whole shapes."""
    last = len(named) - 1
    groups = [{"params": [p], "lr": learning_rate * factor ** (last - i), "weight_decay": 0.2 * (p.dim() > 1)} for i, (_, p) in enumerate(named)]
    return torch.optim.AdamW(groups, lr=learning_rate)


class Slow(torch.optim.Optimizer):
    """Its rate is a value of its groups that it changes itself."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "done": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["done"])


def slow(named, learning_rate):
    return Slow([p for _, p in named], learning_rate)


def eager(named, learning_rate):
    made = Slow([p for _, p in named], learning_rate)
    for _, p in named:
        made.state[p]["there"] = torch.zeros(())
    return made


def foreign(named, learning_rate):
    return Slow([torch.nn.Parameter(torch.zeros(3))], learning_rate)


def newton(named, learning_rate):
    return torch.optim.LBFGS([p for _, p in named], lr=learning_rate)


def stairs(optimizer, every=2):
    return torch.optim.lr_scheduler.StepLR(optimizer, every)


def nothing(optimizer):
    return 3


def of_another(optimizer):
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 1)
