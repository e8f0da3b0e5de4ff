"""Transformers written out plainly, whose saved bytes the formulas must give: any kernel choice, and one rank's share of tensor parallelism.

One rank is run alone: what the collectives would bring is faked (a gather repeats the own slice, a scatter takes it), so values are
meaningless and sizes are exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.ledger.transformer import SplitLayout, Transformer

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class GatheredLinear(torch.autograd.Function):
    """Column-parallel linear under sequence parallelism: keeps the own slice only and gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return F.linear(x.repeat(1, parts, 1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = x.repeat(1, ctx.parts, 1)
        flat = grad.flatten(0, 1)
        return (grad @ weight)[:, : x.shape[1]], flat.t() @ whole.flatten(0, 1), flat.sum(0), None


class Column(nn.Linear):
    def __init__(self, inputs: int, outputs: int, parts: int) -> None:
        super().__init__(inputs, outputs)
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parts == 1:
            return F.linear(x, self.weight, self.bias)
        return GatheredLinear.apply(x, self.weight, self.bias, self.parts)


class Dropout(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.on, self.native = model.dropout, model.mask_bytes == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return x
        return torch.native_dropout(x, 0.1, True)[0] if self.native else F.dropout(x, 0.1)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight)


def norm(model: Transformer) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.norm == "layernorm" else RMSNorm(model.hidden)


class Attention(nn.Module):
    def __init__(self, model: Transformer, layout: SplitLayout) -> None:
        super().__init__()
        self.model, t = model, layout.tensor
        self.heads, self.keys, self.width = -(-model.heads // t), -(-model.key_heads // t), model.width
        parts = t if layout.sequence_parallel else 1
        self.parts = parts
        self.qkv = Column(model.hidden, (self.heads + 2 * self.keys) * self.width, parts)
        self.out = nn.Linear(self.heads * self.width, model.hidden)
        self.softmax_dropout, self.dropout = Dropout(model), Dropout(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        packed = self.qkv(x).view(batch, -1, self.heads + 2 * self.keys, self.width).transpose(1, 2)
        q, k, v = packed.split([self.heads, self.keys, self.keys], 1)
        if self.model.attention != "flash":
            # copies of their own, so that what is kept does not depend on which of the three is viewed and which is copied
            q, k, v = (y.contiguous() for y in (q, k, v))
        if self.model.attention == "flash":  # on views: its result then lies as `out` reads it, and is kept once
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.keys)
        else:
            if self.heads != self.keys:
                k, v = (z.repeat_interleave(self.heads // self.keys, 1) for z in (k, v))
            scores = q @ k.transpose(-1, -2) / self.width**0.5
            mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
            y = self.softmax_dropout(torch.softmax(scores + mask, -1)) @ v
        y = self.out(y.transpose(1, 2).reshape(batch, -1, self.heads * self.width))
        return self.dropout(y[:, : y.shape[1] // self.parts])


class MLP(nn.Module):
    def __init__(self, model: Transformer, layout: SplitLayout) -> None:
        super().__init__()
        self.kind, inner = model.activation, -(-model.inner // layout.tensor)
        self.parts = layout.tensor if layout.sequence_parallel else 1
        self.up = Column(model.hidden, inner, self.parts)
        self.gate = Column(model.hidden, inner, self.parts) if model.gated else None
        self.down = nn.Linear(inner, model.hidden)
        self.dropout = Dropout(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.gate is not None:
            y = F.silu(self.gate(x)) * y
        else:
            y = F.gelu(y) if self.kind == "gelu" else F.relu(y)
        y = self.down(y)
        return self.dropout(y[:, : y.shape[1] // self.parts])


class Block(nn.Module):
    def __init__(self, model: Transformer, layout: SplitLayout) -> None:
        super().__init__()
        self.norm1, self.attention = norm(model), Attention(model, layout)
        self.norm2, self.mlp = norm(model), MLP(model, layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """With its loss: `forward(tokens, targets)`."""

    def __init__(self, model: Transformer, layout: SplitLayout | None = None) -> None:
        super().__init__()
        layout = layout or SplitLayout()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(model.sequence, model.hidden) if model.positions == "learned" else None
        self.dropout = Dropout(model)
        self.blocks = nn.ModuleList(Block(model, layout) for _ in range(model.layers))
        self.norm = norm(model)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets.flatten())


def build(model: Transformer, layout: SplitLayout | None = None, batch: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    module = GPT(model, layout).to(DTYPES[model.element_bytes])
    tokens = torch.randint(model.vocabulary, (batch, model.sequence + 1))
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


SIZES = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 96}
SHAPES: dict[str, Transformer] = {
    "paper": Transformer(**SIZES, statistics_bytes=2),
    "noise_masks": Transformer(**SIZES, mask_bytes=2, statistics_bytes=2),
    "plain": Transformer(**SIZES, dropout=False, element_bytes=4),
    "double": Transformer(**SIZES, mask_bytes=8, element_bytes=8, statistics_bytes=8),
    "grouped": Transformer(**SIZES, kv_heads=2, dropout=False, element_bytes=4),
    "llama": Transformer(
        **SIZES, kv_heads=2, ffn=160, attention="flash", activation="swiglu", norm="rmsnorm-composite", dropout=False, positions="none"
    ),
    "relu": Transformer(**SIZES, ffn=100, head_width=24, activation="relu", attention="flash", dropout=False, element_bytes=4),
}


def paper() -> Any:
    return build(SHAPES["paper"])


def noise_masks() -> Any:
    return build(SHAPES["noise_masks"])


def plain() -> Any:
    return build(SHAPES["plain"])


def double() -> Any:
    return build(SHAPES["double"])


def grouped() -> Any:
    return build(SHAPES["grouped"])


def llama() -> Any:
    return build(SHAPES["llama"])


def relu() -> Any:
    return build(SHAPES["relu"])
