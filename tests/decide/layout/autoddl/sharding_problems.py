"""Problems for the search: nets as functions, fabrics, random cost tables."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from meshwright.cost import Cost, Transport
from meshwright.decide.layout.autoddl import ShardingProblem
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.graph.graph import OpGraph


def chain(*widths: int, batch: int = 32) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b), *([nn.ReLU()] if i < len(widths) - 2 else [])]
    return nn.Sequential(*layers), (torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,)))


def fc() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return chain(256, 128, 128)


def fc_uneven() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return chain(50, 37, 21, batch=10)


def wide() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Products of equal sides: two axes beat one."""
    return chain(1024, 1024, 1024, 1024, batch=1024)


class Branches(nn.Module):
    """A value with three readers, a residual, normalisation, an operator that nobody can split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.inner(x)))
        z = y + torch.sort(y, dim=1).values * y.mean(0)
        return self.outer(z)


def branches() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Branches(), (torch.randn(8, 16), torch.randint(8, (8,)))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(torch.relu(self.a(x)), 0.3, self.training))


def dropped() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Dropped(), (torch.randn(8, 12), torch.randint(8, (8,)))


class Shared(nn.Module):
    """Values that several operators read, that one reads twice, or that come back from inside of one operator in two parts (rms_norm); an operator
    that gives what it got (dropout in evaluation), one without a result (the assertion before `to`), parts of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(16, 32), nn.Parameter(torch.rand(32))
        self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        u = self.b(nn.functional.rms_norm(y, (32,), self.scale)) + y
        v, half = nn.functional.dropout(u, 0.5, False), u[:, :16]
        p, q = (v * v + y).chunk(2, -1)
        z = torch.cat([q, p, q], -1)[:, :32] * torch.cat([half, half], -1) + half.mean(1, keepdim=True)
        return self.c(z * y + nn.functional.rms_norm(v, (32,)) * self.scale + (q.amax(1, keepdim=True) > 1).to(y.dtype))


def shared() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Shared(), (torch.randn(24, 16), torch.randint(8, (24,)))


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        torch.relu_(y.view(4, 16))
        return y


def overwrites() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Overwrites(), (torch.randn(8, 8), torch.randint(8, (8,)))


@lru_cache
def graph_of(net: str) -> OpGraph:
    from captured import captured  # ranks load this file as a model's, without the tests' path

    return captured(f"{__file__}:{net}", scalable=False)


def star(devices: int, *, mbit: int = 100, flops: int = 10**11, memory: int = 0) -> Fabric:
    rate = mbit * 125_000
    row = tuple(Device(name=f"n{i}", kind="cpu", flops={"fp32": flops}, memory_bandwidth_Bps=10**10, memory_bytes=memory) for i in range(devices))
    links = tuple(x for d in row for x in (Link(src=d.name, dst="s", rate_Bps=rate), Link(src="s", dst=d.name, rate_Bps=rate)))
    return Fabric(name="star", devices=row, switches=(Switch(name="s"),), links=links)


COST = Cost(per_call_s=1e-6, transport=Transport(per_message_s=1e-5))


def problem(net: str, devices: int = 4, **more: object) -> ShardingProblem:
    fabric = more.pop("fabric", None) or star(devices)
    return ShardingProblem(graph=graph_of(net), fabric=fabric, cost=COST, **more)  # type: ignore[arg-type]


def one_long_sample() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A causal decoder whose sample is longer than its weights are wide: dividing positions sends least."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
    import llama

    return llama.build(layers=1, width=16, heads=2, kv_heads=1, hidden=32, vocabulary=32, sequence=256, batch=1)
