"""Decoders over sequences that ranks divide: small, in float64. Forms of positions, heads, masks and losses in which published models have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, WIDTH, HEADS, VOCABULARY = 2, 16, 4, 21
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self, *, groups: int, rotary: bool, repeat: str, causal: bool | str, length: int, scale: float | None, packed: bool) -> None:
        super().__init__()
        self.groups, self.repeat, self.causal, self.scale, self.rotary = groups, repeat, causal, scale, rotary
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.packed = packed
        self.kv = nn.Linear(WIDTH, 2 * groups * SIZE, bias=False) if packed else nn.ModuleList(nn.Linear(WIDTH, groups * SIZE) for _ in range(2))
        angles = torch.outer(torch.arange(length).double(), 1.0 / 100 ** (torch.arange(0, SIZE, 2).double() / SIZE)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rotary:
            return x
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, SIZE).transpose(1, 2)
        if self.packed:
            k, v = self.kv(x).view(batch, length, 2, self.groups, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            k, v = (linear(x).view(batch, length, self.groups, SIZE).transpose(1, 2) for linear in self.kv)
        q, k, times = self.turned(q), self.turned(k), HEADS // self.groups
        if self.repeat == "interleave":
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        elif self.repeat == "expand":
            k, v = (y[:, :, None].expand(batch, self.groups, times, length, SIZE).reshape(batch, HEADS, length, SIZE) for y in (k, v))
        mask = None
        if self.causal == "window":  # made of positions, as transformers does
            at = torch.arange(length)
            mask = ((at[:, None] >= at) & (at[:, None] - at < 5))[None, None].expand(batch, 1, length, length)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal is True, scale=self.scale, enable_gqa=self.repeat == "native")
        return self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self, dropout: float, **attention: object) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(**attention)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.silu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    def __init__(self, *, learned: bool, layers: int, tied: bool, own_loss: bool, length: int, dropout: float, **attention: object) -> None:
        super().__init__()
        self.tokens, self.own_loss = nn.Embedding(VOCABULARY, WIDTH), own_loss
        self.positions = nn.Embedding(length, WIDTH) if learned else None
        self.blocks = nn.ModuleList(Block(dropout, length=length, **attention) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()  # as transformers has it: the next token, over every border of chunks
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def _made(
    length: int = 16, *, groups: int = 2, rotary: bool = True, repeat: str = "native", causal: bool | str = True, scale: float | None = None,
    learned: bool = False, layers: int = 2, tied: bool = False, own_loss: bool = False, dropout: float = 0.0, packed: bool = True,
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:  # fmt: skip
    attention = {"groups": groups, "rotary": rotary, "repeat": repeat, "causal": causal, "scale": scale, "packed": packed}
    model = Decoder(learned=learned, layers=layers, tied=tied, own_loss=own_loss, length=length, dropout=dropout, **attention).double()
    tokens = torch.randint(VOCABULARY, (BATCH, length + 1))
    return model, (tokens[:, :-1].contiguous(), (tokens[:, :-1] if own_loss else tokens[:, 1:]).contiguous())


def llama():
    """Rotary, grouped key-value heads."""
    return _made()


def three():
    """A length for three ranks, and one layer."""
    return _made(12, layers=1, groups=1)


def three_deep():
    """The same with several layers, whose blocks of keys all wait for backward, and as many of them as heads."""
    return _made(48, layers=3, groups=HEADS)


def gpt():
    """Learned positions, a tied head, dropout."""
    return _made(rotary=False, learned=True, groups=4, tied=True, dropout=0.2)


def learned():
    """`gpt` without dropout."""
    return _made(rotary=False, learned=True, groups=4, tied=True)


def interleaved():
    return _made(repeat="interleave", layers=1)


def expanded():
    return _made(repeat="expand", layers=1)


def both_ways():
    """No causal mask, another scale."""
    return _made(causal=False, scale=0.4, layers=1)


def separate():
    """Queries, keys and values by linears of their own, which tensor-parallel ranks split by heads."""
    return _made(packed=False, layers=1)


def shared_head():
    """Fewer key-value heads than tensor-parallel ranks."""
    return _made(packed=False, groups=1, layers=1)


def window():
    """A mask of all pairs of positions: each sees five."""
    return _made(causal="window", layers=1)


def shifted():
    """A loss of its own: labels are the tokens, shifted inside."""
    return _made(own_loss=True, layers=1)


def odd_length():
    return _made(10, layers=1)
