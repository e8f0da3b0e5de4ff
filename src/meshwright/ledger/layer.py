"""Bytes that one rank keeps for backward, operator by operator, for one micro-batch of a described transformer.

Cite: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023 (arXiv 2205.05198), section 4.
Equal to what autograd saves, storage by storage (tests/ledger): in the paper's terms sbh(34 + 5as/h) for a layer, plus the statistics of the
norms, which the paper leaves out (8 or 16 bytes a token), and token numbers and targets at the ends.
Conventions: residuals in the activations' dtype; biases add nothing; the causal mask is a constant and not counted; where
tensor parallelism does not divide, the fullest rank counts; KV heads that do not suffice for all ranks are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .transformer import SplitLayout, Transformer

__all__ = ["Kept", "embedding_ledger", "head_ledger", "layer_ledger", "total_bytes"]

INDEX_BYTES = 8  # token numbers and targets are int64
MIN_LOSS_BYTES = 4  # softmax of the loss and log-sum-exp are float32 at least
Split = Literal["tensor", "sequence", "whole"]


@dataclass(frozen=True)
class Kept:
    """What `operator` keeps: `size_bytes` on one rank. `split` says by what it shrinks with tensor parallelism; `core`: part of core attention."""

    operator: str
    what: str
    size_bytes: int
    split: Split
    core: bool = False


@dataclass(frozen=True)
class _Sizes:
    """Elements on one rank: tokens of a micro-batch in split and unsplit regions, and the shares of every width."""

    tokens: int  # s · b
    region_tokens: int  # of norms and dropouts: s / t · b under sequence parallelism
    rows: int  # s
    batch: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    region: Split


def _sizes(model: Transformer, layout: SplitLayout) -> _Sizes:
    t, b, s = layout.tensor, layout.microbatch_size, model.sequence
    return _Sizes(
        tokens=s * b,
        region_tokens=(-(-s // t) if layout.sequence_parallel else s) * b,
        rows=s,
        batch=b,
        heads=-(-model.heads // t),
        key_heads=-(-model.key_heads // t),
        inner=-(-model.inner // t),
        vocabulary=-(-model.vocabulary // t),
        region="sequence" if layout.sequence_parallel else "whole",
    )


def layer_ledger(model: Transformer, layout: SplitLayout) -> tuple[Kept, ...]:
    """One block, nothing recomputed."""
    z = _sizes(model, layout)
    e, region = model.element_bytes, z.region
    residual = z.region_tokens * model.hidden
    drop = ((Kept("dropout", "mask", model.mask_bytes * residual, region),) if model.dropout else ())
    return (
        *_norm("norm1", model, z),
        Kept("qkv", "input", e * residual, region),
        *_attention(model, z),
        Kept("out", "input", e * z.tokens * z.heads * model.width, "tensor"),
        *(_named(k, "attention.dropout") for k in drop),
        *_norm("norm2", model, z),
        *_mlp(model, z, residual),
        *(_named(k, "mlp.dropout") for k in drop),
    )


def _named(kept: Kept, operator: str) -> Kept:
    return Kept(operator, kept.what, kept.size_bytes, kept.split, kept.core)


def _norm(name: str, model: Transformer, z: _Sizes) -> tuple[Kept, ...]:
    tokens, h = z.region_tokens, model.hidden
    parts: tuple[tuple[str, int], ...]
    if model.norm == "rmsnorm-composite":
        wide = max(model.element_bytes, MIN_LOSS_BYTES)
        parts = (("input", wide * tokens * h), ("normalised", wide * tokens * h), ("statistics", wide * tokens))
    else:
        count = 2 if model.norm == "layernorm" else 1
        parts = (("input", model.element_bytes * tokens * h), ("statistics", count * model.statistics_bytes * tokens))
    return tuple(Kept(name, what, size, z.region) for what, size in parts)


def _attention(model: Transformer, z: _Sizes) -> tuple[Kept, ...]:
    e, d = model.element_bytes, model.width
    query = Kept("attention", "Q", e * z.tokens * z.heads * d, "tensor")
    key = Kept("attention", "K", e * z.tokens * z.key_heads * d, "tensor")
    value = Kept("attention", "V", e * z.tokens * z.key_heads * d, "tensor")
    if model.attention == "flash":
        return query, key, value, Kept("attention", "log-sum-exp", MIN_LOSS_BYTES * z.tokens * z.heads, "tensor", core=True)
    if z.heads != z.key_heads:  # eager products need K and V once per head of Q
        key = Kept("attention", "K, repeated", e * z.tokens * z.heads * d, "tensor")
        value = Kept("attention", "V, repeated", e * z.tokens * z.heads * d, "tensor")
    scores = z.heads * z.rows * z.rows * z.batch
    kept = [query, key, value, Kept("softmax", "output", e * scores, "tensor", core=True)]
    if model.dropout:
        kept.append(Kept("softmax.dropout", "mask", model.mask_bytes * scores, "tensor", core=True))
        kept.append(Kept("attention", "probabilities after dropout", e * scores, "tensor", core=True))
    return tuple(kept)


def _mlp(model: Transformer, z: _Sizes, residual: int) -> tuple[Kept, ...]:
    e = model.element_bytes
    inner = e * z.tokens * z.inner
    first = Kept("up", "input", e * residual, z.region)
    last = Kept("down", "input", inner, "tensor")
    if model.activation == "relu":
        return first, last  # its output is the input of `down`
    if model.activation == "gelu":
        return first, Kept("gelu", "input", inner, "tensor"), last
    gate, up = Kept("silu", "gate", inner, "tensor"), Kept("product", "up", inner, "tensor")
    if model.activation == "swiglu-fused":
        return first, gate, up, last
    return first, gate, Kept("product", "silu of gate", inner, "tensor"), up, last


def embedding_ledger(model: Transformer, layout: SplitLayout) -> tuple[Kept, ...]:
    """The first stage's extras."""
    z = _sizes(model, layout)
    kept = [Kept("embedding", "token numbers", INDEX_BYTES * z.tokens, "whole")]
    if model.positions == "learned":
        kept.append(Kept("embedding", "position numbers", INDEX_BYTES * z.rows, "whole"))
    if model.dropout:
        kept.append(Kept("embedding.dropout", "mask", model.mask_bytes * z.region_tokens * model.hidden, z.region))
    return tuple(kept)


def head_ledger(model: Transformer, layout: SplitLayout) -> tuple[Kept, ...]:
    """The last stage's extras: final norm, head, loss (softmax over the vocabulary in float32)."""
    z = _sizes(model, layout)
    return (
        *_norm("norm", model, z),
        Kept("head", "input", model.element_bytes * z.region_tokens * model.hidden, z.region),
        Kept("loss", "softmax of logits", max(model.element_bytes, MIN_LOSS_BYTES) * z.tokens * z.vocabulary, "tensor"),
        Kept("loss", "targets", INDEX_BYTES * z.tokens, "whole"),
        Kept("loss", "weight", max(model.element_bytes, MIN_LOSS_BYTES), "whole"),
    )


def total_bytes(kept: tuple[Kept, ...]) -> int:
    return sum(k.size_bytes for k in kept)
