"""Models for the tests of tensor parallelism: small, in float64, with what is awkward to split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH = 2, 6


class Attention(nn.Module):
    """Grouped-query attention, written in the ways that models write it."""

    def __init__(self, width: int, heads: int, groups: int, style: str, dropout: float = 0.0, size: int = 4) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.style, self.dropout = heads, groups, size, style, dropout
        rows = (heads * size, groups * size, groups * size)
        if style == "packed":
            self.qkv = nn.Linear(width, sum(rows))
        else:
            self.q, self.k, self.v = (nn.Linear(width, r, bias=style != "expand") for r in rows)
        self.out = nn.Linear(heads * size, width, bias=style != "expand")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        h, g, d = self.heads, self.groups, self.size
        q, k, v = self.qkv(x).split([h * d, g * d, g * d], dim=-1) if self.style == "packed" else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.view(b, n, -1, d).transpose(1, 2) for y in (q, k, v))
        p = self.dropout if self.training else 0.0
        if self.style == "expand":
            k, v = (y[:, :, None].expand(b, g, h // g, n, d).reshape(b, h, n, d) for y in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        elif self.style == "repeat":
            k, v = (y.repeat_interleave(h // g, dim=1) for y in (k, v))
            mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1) / d**0.5).masked_fill(~mask, float("-inf"))
            y = F.dropout(scores.softmax(-1), p, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != g)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int, packed: bool, dropout: float) -> None:
        super().__init__()
        self.packed, self.dropout = packed, nn.Dropout(dropout)
        if packed:
            self.both = nn.Linear(width, 2 * hidden)
        else:
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1) if self.packed else (self.gate(x), self.up(x))
        return self.down(self.dropout(F.silu(gate) * up))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int, style: str, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, groups, style, dropout)
        self.mlp = SwiGLU(width, hidden, style == "packed", dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """`loss`: options of the cross-entropy that the module computes itself; None leaves it to the job."""

    def __init__(
        self, *, vocabulary: int, width: int, heads: int, groups: int, hidden: int, layers: int = 1, style: str = "expand", dropout: float = 0.0,
        tied: bool = False, bias: bool = False, padding: int | None = None, loss: dict | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.positions = nn.Embedding(LENGTH, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden, style, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.loss = loss
        if loss and loss.get("weight"):
            self.register_buffer("class_weight", 0.5 + torch.rand(vocabulary))

    def forward(self, tokens: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.loss is None:
            return logits
        options = {k: v for k, v in self.loss.items() if k != "weight"}
        weight = self.class_weight if self.loss.get("weight") else None
        if options.get("reduction") == "none":
            return F.cross_entropy(logits.transpose(1, 2), target, weight=weight, **options).square().mean()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight=weight, **options)


def _made(vocabulary: int, **options: object) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    module = Decoder(vocabulary=vocabulary, **options).double()
    tokens = torch.randint(vocabulary, (BATCH, LENGTH + 1))
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


EVEN = {"width": 16, "heads": 4, "groups": 4, "hidden": 24}
ODD = {"width": 20, "heads": 5, "groups": 5, "hidden": 21}


def even():
    return _made(32, **EVEN, style="packed", layers=2)


def odd_tied():
    """Five heads, 21 columns, 37 tokens, one of them padding; the head is the table."""
    return _made(37, **ODD, style="packed", tied=True, padding=3, dropout=0.2, layers=2)


def partly_frozen():
    """A norm that every rank has whole, the bias of a row, and a matrix whose columns ranks divide are not trained."""
    module, batch = _made(32, **EVEN, style="packed", layers=2)
    for p in (*module.blocks[0].norm1.parameters(), module.blocks[0].mlp.down.bias, module.blocks[1].attention.qkv.weight):
        p.requires_grad_(False)
    return module, batch


def grouped_expand():
    return _made(32, width=16, heads=8, groups=2, hidden=24, style="expand", dropout=0.1)


def grouped_repeat():
    return _made(30, width=16, heads=6, groups=3, hidden=24, style="repeat", dropout=0.1, bias=True)


def grouped_packed():
    return _made(32, width=16, heads=8, groups=2, hidden=24, style="packed", dropout=0.1)


def grouped_native():
    """`enable_gqa`, separate projections."""
    return _made(32, width=16, heads=8, groups=2, hidden=24, style="native")


SMOOTH = {"label_smoothing": 0.1, "ignore_index": 5}


def smoothed():
    return _made(33, **EVEN, loss=SMOOTH, tied=True)


def weighted():
    return _made(33, **EVEN, loss={**SMOOTH, "weight": True})


def every_loss():
    return _made(34, **EVEN, loss={"reduction": "none", "ignore_index": -1, "label_smoothing": 0.2})


def summed():
    return _made(32, **EVEN, loss={"reduction": "sum"})


class Linears(nn.Module):
    """Two linear layers and nothing between: a linear operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 10, bias=False), nn.Linear(10, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x * self.scale)) * 1.0


def linears():
    return Linears().double(), (torch.randn(BATCH, 8, dtype=torch.float64), torch.randn(BATCH, 8, dtype=torch.float64))


class Scanned(nn.Module):
    """A cumulative sum over the features between two linear layers: nothing that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fourth(F.gelu(self.third(self.second(self.first(x).cumsum(-1)))))


def scanned():
    return Scanned().double(), (torch.randn(BATCH, 8, dtype=torch.float64), torch.randn(BATCH, 8, dtype=torch.float64))


# ---- sequence parallelism -------------------------------------------------------------------------------------------
class RootMeanSquare(nn.Module):
    """Written out, as models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Feed(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = RootMeanSquare(width), nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Feeds(nn.Module):
    """Feed-forward blocks over tokens that are laid out in another way between them (`style`), or meet in the middle ("pooled").

    flat: samples and positions in one dimension. turned: positions first. pooled: the mean over positions is added to each, and classified in
    the end by a norm that the blocks' end uses as well. scaled: a whole parameter per position multiplies.
    """

    def __init__(self, style: str, *, width: int = 16, hidden: int = 24, vocabulary: int = 32, dropout: float = 0.1, length: int = LENGTH) -> None:
        super().__init__()
        self.style = style
        self.tokens = nn.Embedding(vocabulary, width)
        self.first, self.second = Feed(width, hidden, dropout), Feed(width, hidden, dropout)
        self.norm = RootMeanSquare(width)
        if style == "pooled":
            self.mix = nn.Linear(width, width)
        if style == "scaled":
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, length * width).view(length, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.style == "flat":
            b, n, h = x.shape
            x = self.second(self.first(x.reshape(b * n, h)))
            return self.head(self.norm(x)).reshape(b, n, -1)
        if self.style == "turned":
            return self.head(self.norm(self.second(self.first(x.transpose(0, 1))))).transpose(0, 1)
        if self.style == "scaled":
            return self.head(self.norm(self.second(self.first(x * self.scale) * self.scale)))
        x = self.first(x)
        x = self.second(x + self.mix(x.mean(1, keepdim=True)))
        return self.head(self.norm(self.norm(x).mean(1)))


def _feeds(style: str, **options: object) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    module = Feeds(style, **options).double()
    tokens = torch.randint(32, (BATCH, LENGTH))
    return module, (tokens, tokens[:, 0].clone() if style == "pooled" else tokens.clone())


def flat():
    return _feeds("flat")


def turned():
    return _feeds("turned", dropout=0.0)


def scaled():
    return _feeds("scaled")


def pooled():
    return _feeds("pooled")
