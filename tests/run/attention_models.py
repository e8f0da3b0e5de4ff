"""Attention and feed-forward layers in the forms in which published models write them: small, in float64, one block each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 6, 32, 4, 24
SIZE = WIDTH // HEADS


class Rms(nn.Module):
    """As LLaMA's: every operator by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def halves_slice(x: torch.Tensor) -> torch.Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def halves_chunk(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairs_stack(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class Rotary(nn.Module):
    """Positions turned into angles of pairs of features; `form` is how it is written. Takes and gives (batch, heads, positions, features)."""

    def __init__(self, form: str, size: int = SIZE) -> None:
        super().__init__()
        self.form = form
        angles = torch.outer(torch.arange(LENGTH).double(), 1.0 / 100 ** (torch.arange(0, size, 2).double() / size))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "complex":
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * self.turns).flatten(3).type_as(x)
        half = x.shape[-1] // 2
        cos, sin = self.cos[:, :half], self.sin[:, :half]
        if self.form == "in_place":
            a, b = x.chunk(2, -1)
            first, second = a * cos, b * cos
            first.addcmul_(-sin, b)
            second.addcmul_(sin, a)
            return torch.cat((first, second), -1)
        if self.form == "partial":
            turned, rest = x[..., :half], x[..., half:]
            return torch.cat((turned * cos + halves_slice(turned) * sin, rest), -1)
        turn = {"slice": halves_slice, "chunk": halves_chunk, "stack": pairs_stack}[self.form]
        return x * self.cos[None, None] + turn(x) * self.sin[None, None]


class Attention(nn.Module):
    def __init__(
        self, rotary: str = "slice", groups: int = HEADS, repeat: str = "expand", norm: str = "", packed: bool = False, core: str = "sdpa"
    ) -> None:
        super().__init__()
        self.groups, self.repeat, self.packed, self.core = groups, repeat, packed, core
        self.widths = [HEADS * SIZE, groups * SIZE, groups * SIZE]
        if packed:
            self.qkv = nn.Linear(WIDTH, sum(self.widths))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, w, bias=False) for w in self.widths)
        self.q_norm, self.k_norm = (nn.RMSNorm(SIZE) if norm == "rms_norm" else Rms(SIZE) if norm else nn.Identity() for _ in range(2))
        self.rotary = Rotary(rotary)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH)) if core == "learned_bias" else None
        self.table = nn.Embedding(8, HEADS) if core == "relative" else None
        self.register_buffer("slopes", torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("distance", (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(0, 7))
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).split(self.widths, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.view(b, n, -1, SIZE) for y in (q, k, v))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = self.rotary(q), self.rotary(k)
        copies = HEADS // self.groups
        if copies > 1 and self.repeat == "expand":
            k, v = (y[:, :, None].expand(b, self.groups, copies, n, SIZE).reshape(b, HEADS, n, SIZE) for y in (k, v))
        elif copies > 1 and self.repeat == "interleave":
            k, v = (y.repeat_interleave(copies, 1) for y in (k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, n, -1))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.core == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.repeat == "native")
        if self.core in ("slopes", "learned_bias"):
            mask = self.slopes if self.bias is None else self.bias
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None].expand(q.shape[0], -1, -1, -1))
        if self.core == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)
        scores = q @ k.transpose(2, 3) * SIZE**-0.5
        if self.table is not None:
            scores = scores + self.table(self.distance).permute(2, 0, 1)[None]
        scores = scores + torch.full((LENGTH, LENGTH), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        return F.dropout(F.softmax(scores, -1, dtype=torch.float64).to(q.dtype), 0.0, self.training) @ v


class Latent(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, keys and values; the turned part of the keys is one for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm, self.q_up = nn.Linear(WIDTH, 16, bias=False), Rms(16), nn.Linear(16, HEADS * 12, bias=False)
        self.kv_down, self.kv_norm, self.kv_up = nn.Linear(WIDTH, 16 + 4, bias=False), Rms(16), nn.Linear(16, HEADS * 16, bias=False)
        self.rotary = Rotary("slice", 4)
        self.out = nn.Linear(HEADS * 8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(b, n, HEADS, 12).transpose(1, 2)
        q, q_turned = q.split([8, 4], -1)
        latent, k_turned = self.kv_down(x).split([16, 4], -1)
        k, v = self.kv_up(self.kv_norm(latent)).view(b, n, HEADS, 16).transpose(1, 2).split([8, 8], -1)
        k_turned = self.rotary(k_turned.view(b, 1, n, 4)).expand(*k.shape[:-1], -1)
        y = F.scaled_dot_product_attention(torch.cat((q, self.rotary(q_turned)), -1), torch.cat((k, k_turned), -1), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class Conv1D(nn.Module):
    """GPT-2's linear: the weight lies the other way round."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.2), nn.Parameter(torch.randn(outputs) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Gpt2Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*x.shape[:-1], -1, SIZE).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*y.shape[:-2], -1).contiguous())


class BloomAttention(nn.Module):
    """BLOOM's: positions as slopes per head, added in `baddbmm` over samples times heads; weights turned by hand, as Falcon's are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("slopes", torch.randn(HEADS, 1, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        fused = (x @ self.qkv.weight.T).view(b, n, HEADS, 3, SIZE)
        q, k, v = (fused[..., i, :].transpose(1, 2).reshape(b * HEADS, n, SIZE) for i in range(3))
        slopes = self.slopes.repeat(b, 1, 1)
        scores = slopes.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=SIZE**-0.5).view(b, HEADS, n, n)
        y = torch.bmm(scores.softmax(-1).view(b * HEADS, n, n), v).view(b, HEADS, n, SIZE).transpose(1, 2).reshape(b, n, WIDTH)
        return y @ self.out.weight.T


class TorchAttention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class FeedForward(nn.Module):
    def __init__(self, form: str = "gated") -> None:
        super().__init__()
        self.form = form
        wide = 2 * WIDTH
        if form == "conv1d":
            self.up, self.down = Conv1D(wide, WIDTH), Conv1D(WIDTH, wide)
        else:
            self.up, self.down = nn.Linear(WIDTH, wide * (2 if form == "packed" else 1), bias=False), nn.Linear(wide, WIDTH, bias=False)
            self.gate = nn.Linear(WIDTH, wide, bias=False) if form == "gated" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "conv1d":
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1) if self.gate is None else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.tokens, self.first, self.second = nn.Embedding(VOCABULARY, WIDTH), Rms(WIDTH), Rms(WIDTH)
        self.attention, self.feed_forward = attention, feed_forward
        self.last, self.head = Rms(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.attention(self.first(x))
        return self.head(self.last(x + self.feed_forward(self.second(x))))


class Encoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first)
        self.tokens, self.batch_first = nn.Embedding(VOCABULARY, WIDTH), batch_first
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x)


# What is split of each at tensor degree 2: every matrix, but for those named.
KEPT_WHOLE = {
    "multi_query": {"attention.k.weight", "attention.v.weight"}, "multi_query_native": {"attention.k.weight", "attention.v.weight"},
    "latent": {"attention.q_down.weight", "attention.kv_down.weight"},
    "relative": {"attention.table.weight"}, "learned_bias": {"attention.bias"},
}  # fmt: skip
ATTENTION = {
    "rotary_slice": {}, "rotary_chunk": {"rotary": "chunk"}, "rotary_stack": {"rotary": "stack"}, "rotary_complex": {"rotary": "complex"},
    "rotary_partial": {"rotary": "partial"}, "rotary_in_place": {"rotary": "in_place"}, "grouped_expand": {"groups": 2},
    "grouped_interleave": {"groups": 2, "repeat": "interleave"}, "grouped_native": {"groups": 2, "repeat": "native"}, "multi_query": {"groups": 1},
    "multi_query_native": {"groups": 1, "repeat": "native"}, "eager": {"core": "eager"}, "eager_grouped": {"core": "eager", "groups": 2},
    "normed": {"norm": "rms_norm"},
    "normed_grouped": {"norm": "by hand", "groups": 2}, "packed_normed": {"norm": "by hand", "groups": 2, "packed": True},
    "packed_grouped": {"groups": 2, "packed": True}, "einsum": {"core": "einsum"}, "slopes": {"core": "slopes"},
    "learned_bias": {"core": "learned_bias"}, "relative": {"core": "relative"},
}  # fmt: skip


def _made(module: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return module.double(), (torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH)))


OTHERS = {
    "latent": lambda: Block(Latent(), FeedForward()), "packed_gate": lambda: Block(Attention(), FeedForward("packed")),
    "bloom": lambda: Block(BloomAttention(), FeedForward()),
    "gpt2": lambda: Block(Gpt2Attention(), FeedForward("conv1d")), "torch_attention": lambda: Block(TorchAttention(False), FeedForward()),
    "torch_attention_weights": lambda: Block(TorchAttention(True), FeedForward()), "encoder": lambda: Encoder(True),
    "encoder_sequence_first": lambda: Encoder(False),
}  # fmt: skip
NAMES = (*ATTENTION, *OTHERS)


def __getattr__(name: str):  # every name of NAMES is a model function
    if name in ATTENTION:
        return lambda: _made(Block(Attention(**ATTENTION[name]), FeedForward()))
    if name in OTHERS:
        return lambda: _made(OTHERS[name]())
    raise AttributeError(name)
