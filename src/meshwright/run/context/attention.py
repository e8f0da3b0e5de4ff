"""Attention over positions that several ranks hold, in steps between which blocks travel. See `plan.context` for the names of the steps.

Cite: `plan.context.RING`, `plan.context.ULYSSES`; the merge of blocks by their log-sum-exp is that of Milakov and Gimelshein, arXiv:1805.02867.
Shapes: query [batch, heads, s, d], key [batch, groups, s, d], value [batch, groups, s, w], with s this rank's positions in the order of
`plan.context.position_ranges`; heads are a multiple of groups (grouped-query attention), and only groups travel.
Left open by the paper: how rounds that are separate steps of a program differentiate. Our answer: what a round hands on, [batch, heads, s, w + 2], is
(result so far, log-sum-exp so far, unused). The "gradient" that comes back for it is (gradient of the result, its product with the result, the final
log-sum-exp), which is what every round needs beside its block; a round hands it back as it got it. Nothing else of a round is kept.
Invariant (tested): results and gradients are those of attention over the whole sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...plan.context import TILE_ELEMENTS, position_ranges

__all__ = ["RingSpec", "context_heads", "context_join", "context_out", "context_part", "context_unite", "ring_block", "ring_end"]



FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Piece(NamedTuple):
    """Queries that see keys: all, those of a causal mask, or those of a mask (True, or what is added to scores)."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class RingSpec:
    """Rank `part` of `parts` attends to the block of rank `source`. `keys`: width of a key."""

    part: int
    parts: int
    source: int
    keys: int
    causal: bool
    scale: float

    def pieces(self, s: int, mask: torch.Tensor | None) -> list[Piece]:
        """Queries and keys that have anything to do with each other. `mask`: of this rank's queries, by all positions."""
        everything, first, second = slice(0, s), slice(0, s // 2), slice(s // 2, s)
        if mask is not None:
            of_block = context_part(mask, -1, _ranges(mask.shape[-1], self.source, self.parts))
            cut = [_piece(of_block, rows, keys) for rows in (first, second) for keys in (first, second)] if mask.dtype == torch.bool else []
            return [x for x in cut if x is not None] or [Piece(everything, everything, False, of_block)]
        if not self.causal or self.source == self.part:
            return [Piece(everything, everything, self.causal)]
        # Of an earlier rank's chunks the first is before all of ours and the second behind; of ours the second is behind both of a later rank's.
        return [Piece(everything, first) if self.source < self.part else Piece(second, everything)]


def _piece(mask: torch.Tensor, queries: slice, keys: slice) -> Piece | None:
    """None where nothing is seen; without a mask where everything is, or what a causal mask lets through."""
    part = mask[..., queries, keys]
    if not bool(part.any()):
        return None
    if bool(part.all()):
        return Piece(queries, keys)
    causal = torch.equal(part, torch.ones_like(part).tril())
    return Piece(queries, keys, causal, None if causal else part)


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> list[tuple[slice, int]]:
    """(rows, keys that they may see) so that a tile's scores are few."""
    batch, heads, rows, _ = q.shape
    step = max(1, min(rows, TILE_ELEMENTS // max(1, batch * heads * k.shape[2])))
    return [(slice(a, min(a + step, rows)), min(a + step, rows) if causal else k.shape[2]) for a in range(0, rows, step)]


def _scores(q: torch.Tensor, k: torch.Tensor, rows: slice, seen: int, scale: float, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries of the tile by group, scaled scores): [batch, groups, repeats x rows, ...]."""
    batch, groups, repeats = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    tile = q[:, :, rows].reshape(batch, groups, -1, q.shape[3])
    scores = torch.matmul(tile * scale, k[:, :, :seen].transpose(2, 3))
    if piece.causal:
        at = torch.arange(rows.start, rows.stop, device=q.device).repeat(repeats)
        scores.masked_fill_(torch.arange(seen, device=q.device) > at[:, None], -math.inf)
    elif piece.mask is not None:
        own = piece.mask[:, :, rows].repeat(1, 1, repeats, 1)
        scores = scores.masked_fill_(~own, -math.inf) if own.dtype == torch.bool else scores + own
    return tile, scores


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _attend(q: torch.Tensor, kv: torch.Tensor, before: torch.Tensor | None, spec: RingSpec, mask: torch.Tensor | None) -> torch.Tensor:
    """The result so far with this block merged in."""
    batch, heads, s, _ = q.shape
    k, v = _wide(kv[..., : spec.keys]), _wide(kv[..., spec.keys :])
    width = v.shape[3]
    if before is None:
        after = k.new_zeros(batch, heads, s, width + 2)
        after[..., width] = -math.inf
    else:
        after = before.clone()
    for piece in spec.pieces(s, mask):
        mine, keys, values, into = _wide(q[:, :, piece.queries]), k[:, :, piece.keys], v[:, :, piece.keys], after[:, :, piece.queries]
        if _fused(mine, values, piece):
            found, own, *_ = FORWARD(mine, *_per_head(heads, keys, values), 0.0, piece.causal, scale=spec.scale)
            _merge(into, found, own)
            continue
        for rows, seen in _tiles(mine, keys, piece.causal):
            _, scores = _scores(mine, keys, rows, seen, spec.scale, piece)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest.clamp_min(torch.finfo(k.dtype).min)).exp_()  # of a row that sees nothing: zero
            total = weights.sum(-1, keepdim=True)
            shape = (batch, heads, rows.stop - rows.start)
            result = (torch.matmul(weights, values[:, :, :seen]) / total.clamp_min(torch.finfo(k.dtype).tiny)).reshape(*shape, width)
            _merge(into[:, :, rows], result, (largest + total.log()).reshape(shape))
    return after


def _merge(so_far: torch.Tensor, result: torch.Tensor, own: torch.Tensor) -> None:
    """Add the result over other keys, whose log-sum-exp is `own`, to rows of what is handed on."""
    width = result.shape[3]
    merged = torch.logaddexp(so_far[..., width], own)
    finite = merged.clamp_min(torch.finfo(merged.dtype).min)  # of a row that has seen nothing yet
    so_far[..., :width] *= (so_far[..., width] - finite).exp().unsqueeze(-1)
    so_far[..., :width] += result * (own - finite).exp().unsqueeze(-1)
    so_far[..., width] = merged


def _fused(q: torch.Tensor, v: torch.Tensor, piece: Piece) -> bool:
    """Whether torch has a kernel that does not write the scores down, and tells their log-sum-exp."""
    return piece.mask is None and q.device.type == "cpu" and q.shape[3] == v.shape[3] and min(q.shape) > 0


def _per_head(heads: int, *each: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values repeated for the query heads that read them."""
    return [x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x.contiguous() for x in each]


def _gradients(
    q: torch.Tensor, kv: torch.Tensor, told: torch.Tensor, spec: RingSpec, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the queries, of the block); `told`: (gradient of the result, its product with the result, the final log-sum-exp)."""
    k, v = _wide(kv[..., : spec.keys]), _wide(kv[..., spec.keys :])
    dq, dkv = torch.zeros_like(q, dtype=k.dtype), torch.zeros_like(kv, dtype=k.dtype)
    for piece in spec.pieces(q.shape[2], mask):
        mine, here, keys, values = _wide(q[:, :, piece.queries]), told[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys]
        into = dq[:, :, piece.queries], dkv[:, :, piece.keys, : spec.keys], dkv[:, :, piece.keys, spec.keys :]
        (_add_fused if _fused(mine, values, piece) else _add_tiles)(mine, keys, values, here, into, spec.scale, piece)
    return dq.to(q.dtype), dkv.to(kv.dtype)


Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gradients of queries, keys and values, which are added to


def _add_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, told: torch.Tensor, into: Into, scale: float, piece: Piece) -> None:
    width, repeats = v.shape[3], q.shape[1] // k.shape[1]
    gradient, product = told[..., :width].contiguous(), told[..., width]
    # The kernel asks for the whole result only to multiply it with its gradient: any tensor with that product will do.
    result = gradient * torch.where(product == 0, 0, product / gradient.square().sum(-1)).unsqueeze(-1)
    total = told[..., width + 1].contiguous()
    found = BACKWARD(gradient, q.contiguous(), *_per_head(q.shape[1], k, v), result, total, 0.0, piece.causal, scale=scale)
    for x, y in zip(into, (found[0], *(g.unflatten(1, (k.shape[1], repeats)).sum(2) for g in found[1:])), strict=True):
        x += y


def _add_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, told: torch.Tensor, into: Into, scale: float, piece: Piece) -> None:
    width = v.shape[3]
    for rows, seen in _tiles(q, k, piece.causal):
        tile, scores = _scores(q, k, rows, seen, scale, piece)
        here = told[:, :, rows].reshape(*tile.shape[:3], width + 2)
        weights = scores.sub_(here[..., width + 1 :]).exp_()
        into[2][:, :, :seen] += torch.matmul(weights.transpose(2, 3), here[..., :width])
        change = torch.matmul(here[..., :width], v[:, :, :seen].transpose(2, 3)).sub_(here[..., width : width + 1]).mul_(weights).mul_(scale)
        into[0][:, :, rows] += torch.matmul(change, k[:, :, :seen]).reshape(q.shape[0], q.shape[1], -1, q.shape[3])
        into[1][:, :, :seen] += torch.matmul(change.transpose(2, 3), tile)


class _Block(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, before: torch.Tensor | None, spec: RingSpec, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(q, kv, mask)
        ctx.spec = spec
        return _attend(q, kv, before, spec, mask)

    @staticmethod
    def backward(ctx: Any, told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        q, kv, mask = ctx.saved_tensors
        dq, dkv = _gradients(q, kv, told, ctx.spec, mask)
        return dq, dkv, told if ctx.needs_input_grad[2] else None, None, None


class _End(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, before: torch.Tensor | None, spec: RingSpec, mask: torch.Tensor | None
    ) -> torch.Tensor:
        after = _attend(q, kv, before, spec, mask)
        out = after[..., :-2].to(q.dtype, copy=True)
        ctx.save_for_backward(q, kv, out, after[..., -2].clone(), mask)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        q, kv, out, total, mask = ctx.saved_tensors
        wide = _wide(gradient)
        told = torch.cat([wide, (wide * _wide(out)).sum(-1, keepdim=True), total.unsqueeze(-1)], -1)
        dq, dkv = _gradients(q, kv, told, ctx.spec, mask)
        return dq, dkv, told if ctx.needs_input_grad[2] else None, None, None


def ring_block(
    q: torch.Tensor, kv: torch.Tensor, before: torch.Tensor | None, spec: RingSpec, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """One round, not the last: what it hands on. `mask`: of this rank's queries, by all positions in their own order; True is seen, or added."""
    found: torch.Tensor = _Block.apply(q, kv, before, spec, mask)
    return found


def ring_end(q: torch.Tensor, kv: torch.Tensor, before: torch.Tensor | None, spec: RingSpec, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The last round: the result, [batch, heads, s, w]."""
    found: torch.Tensor = _End.apply(q, kv, before, spec, mask)
    return found


def context_join(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Key and value as one block that travels: [batch, groups, s, d + w]."""
    return torch.cat([k, v], -1)


def context_part(x: torch.Tensor, dim: int, ranges: list[list[int]]) -> torch.Tensor:
    """This rank's positions of what it has whole."""
    return torch.cat([x.narrow(dim, low, high - low) for low, high in ranges], dim)


def context_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int) -> torch.Tensor:
    """What every rank needs of this rank's positions, [parts, elements]: queries of its heads, keys and values of the groups that these read."""
    shares = []
    heads, groups = q.shape[1] // parts, k.shape[1]
    for d in range(parts):
        low, high = _groups_of(groups, d, parts)
        shares.append(torch.cat([q[:, d * heads : (d + 1) * heads].reshape(-1), k[:, low:high].reshape(-1), v[:, low:high].reshape(-1)]))
    return torch.stack(shares)


def _groups_of(groups: int, part: int, parts: int) -> tuple[int, int]:
    """Groups that the heads of a rank read: its share of them, or the one that it shares with other ranks."""
    low = part * groups // parts
    return low, max(low + 1, (part + 1) * groups // parts)


def context_heads(
    came: torch.Tensor, mask: torch.Tensor | None, batch: int, s: int, sizes: list[int], causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention of this rank's heads over all positions; [parts, elements] again, by the ranks whose positions they are.

    `sizes`: heads, groups, width of keys, width of values, on one rank.
    """
    heads, groups, keys, width = sizes
    parts = came.shape[0]
    counts = [batch * heads * s * keys, batch * groups * s * keys, batch * groups * s * width]
    q, k, v = (
        _in_order(x.reshape(parts, batch, h, s, w))
        for x, h, w in zip(came.split(counts, 1), (heads, groups, groups), (keys, keys, width), strict=True)
    )
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=heads != groups)
    return torch.stack([context_part(found, 2, _ranges(parts * s, r, parts)).reshape(-1) for r in range(parts)])


def _ranges(extent: int, part: int, parts: int) -> list[list[int]]:
    return [[*r] for r in position_ranges(extent, 1, part, parts)]


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """[parts, batch, heads, s, width] by rank -> [batch, heads, parts x s, width] by position."""
    half = x.shape[3] // 2
    first, second = x[:, :, :, :half], x[:, :, :, half:].flip(0)
    return torch.cat([y for pieces in (first, second) for y in pieces.unbind(0)], 2)


def context_unite(back: torch.Tensor, batch: int, s: int, heads: int) -> torch.Tensor:
    """Every rank's heads for this rank's positions, put together: [batch, heads, s, width]."""
    parts = back.shape[0]
    return back.reshape(parts, batch, heads // parts, s, -1).transpose(0, 1).reshape(batch, heads, s, -1)
