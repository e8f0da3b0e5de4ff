"""Models of many small blocks, alike and not, for capture with some of them left out. Every function returns (module, (x, target))."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Net = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Block(nn.Module):
    def __init__(self, width: int = 8, extra: int = 0, inner: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.register_buffer("scale", torch.ones(width))
        self.extra = extra

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(self.norm(x * self.scale)))
        for _ in range(self.extra):
            y = y.sin() + 0.5
        return x + F.dropout(self.down(y), 0.1, self.training)


class Attention(nn.Module):
    """Heads over positions that all blocks share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.kv, self.o, self.mlp = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width), Block(width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        q, (k, v) = self.q(x) * turn, self.kv(x).chunk(2, dim=-1)
        return self.mlp(x + self.o(F.scaled_dot_product_attention(q, k * turn, v)))


class Stack(nn.Module):
    """`how` puts the blocks together."""

    def __init__(self, blocks: list[nn.Module], how: Callable[[Stack, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.layers, self.last, self.how = nn.Linear(4, 8), nn.ModuleList(blocks), nn.Linear(8, 3), how
        self.shared = nn.Parameter(torch.ones(8))
        self.register_buffer("turn", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.how(self, self.first(x)))


def chained(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x, self.turn)
    return x


def glued(self: Stack, x: torch.Tensor) -> torch.Tensor:
    """Work between the blocks, with a parameter that all share; its gradient is a sum over all of them."""
    for layer in self.layers:
        x = layer(x, self.turn) * self.shared + 0.1 * x
    return x


def remembered(self: Stack, x: torch.Tensor) -> torch.Tensor:
    """Blocks from the sixth on add what the others made: its gradient is a sum over them."""
    memory = x
    for layer in self.layers[:6]:
        memory = layer(memory)
    for layer in self.layers[6:]:
        x = layer(x + memory)
    return x


def remembered_late(self: Stack, x: torch.Tensor) -> torch.Tensor:
    memory = x
    for layer in self.layers[:9]:
        memory = layer(memory)
    for layer in self.layers[9:]:
        x = layer(x + memory)
    return x


def collected(self: Stack, x: torch.Tensor) -> torch.Tensor:
    """Everything that was on the way is read at the end."""
    seen = []
    for layer in self.layers:
        x = layer(x)
        seen.append(x.mean())
    return x + torch.stack(seen).sum()


def skipping(self: Stack, x: torch.Tensor) -> torch.Tensor:
    """Every block reads the two before it."""
    before = x
    for layer in self.layers:
        x, before = layer(x) + before, x
    return x


def twice(self: Stack, x: torch.Tensor) -> torch.Tensor:
    return chained(self, chained(self, x))


def tied(count: int) -> list[nn.Module]:
    blocks = [Block() for _ in range(count)]
    for b in blocks[1:]:
        b.up.weight = blocks[0].up.weight
    return blocks


def net(blocks: list[nn.Module], how: Callable[[Stack, torch.Tensor], torch.Tensor] = chained) -> Net:
    torch.manual_seed(0)
    return Stack(blocks, how), (torch.randn(4, 5, 4), torch.randn(4, 5, 3))


def glue() -> Net:
    return net([Block() for _ in range(8)], glued)


def two_stacks() -> Net:
    """Experts after three dense layers, as it were: of another kind first."""
    return net([*(Block(extra=1) for _ in range(3)), *(Attention() for _ in range(7))])


def in_turns() -> Net:
    return net([Block(extra=k % 3 == 2) for k in range(19)])


def memory() -> Net:
    return net([Block() for _ in range(13)], remembered)


def long_memory() -> Net:
    """The run is among those that make it."""
    return net([Block() for _ in range(13)], remembered_late)


def tied_weight() -> Net:
    return net(tied(9))


def one_differs() -> Net:
    return net([Block(extra=k == 4) for k in range(9)])


def wider() -> Net:
    return net([Block(inner=16 if k == 5 else 12) for k in range(9)])


def from_afar() -> Net:
    return net([Block() for _ in range(9)], collected)


def over_two() -> Net:
    return net([Block() for _ in range(9)], skipping)


def run_twice() -> Net:
    return net([Block() for _ in range(9)], twice)
