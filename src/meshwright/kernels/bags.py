"""Embedding tables that lie in parts, as operators of fixed shapes: what a captured graph holds of them, so that plans can spread them over ranks.

Cite: as `decide.tables.neuroshard`; the order of exchanges is torchrec's: rows' numbers to the holders, pooled rows back.
Left open there: ranks that hold unlike tables and run one program. Our answer: a *pack* `[parts, slots]` holds all tables; part i is what holder i
has, its shards one after the other, filled up with zeros to the longest part. Numbers of rows travel with the number of the part that they are meant
for, so a rank that has some parts of the pack knows which.
Deviations: blocks are as long as the longest holder's, so messages of shorter holders carry zeros; the slowest holder's are as long as without them.
Gradients are dense in the rank's own part. Invariant: outputs and gradients are those of whole `EmbeddingBag`s, but for the order of sums over row
shards.
Cost: O(lookups x columns), and the part's size in backward.

Ids are [blocks, B, L + 1] for B samples: lookups of all shards of a part side by side, counted from the shard's first row, -1 for none; last the
part's number. Rows are [blocks, B, C]. With n ranks, block i of what came is rank i's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ..plan.packing import Packing, Place, packing_of

__all__ = ["bag_ids", "pooled", "table_bag", "table_ids", "table_lookups", "table_rows", "table_sums"]


# ---- lookups to blocks -------------------------------------------------------------------------------------------
def _known(indices: torch.Tensor, rows: int, padding: int, name: str) -> torch.Tensor:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
        raise RuntimeError(f"table {name} has rows 0 to {rows - 1}, looked up are {int(indices.min())} to {int(indices.max())}")
    return torch.where(indices == padding, -1, indices)


@torch.library.custom_op("meshwright::table_lookups", mutates_args=())  # type: ignore[untyped-decorator]
def table_lookups(ids: torch.Tensor, rows: int, padding: int, name: str) -> torch.Tensor:
    """Rows of a table, -1 for its padding row (`padding` -1: it has none). Raises: RuntimeError for rows that are not there."""
    return _known(ids, rows, padding, name)


@torch.library.custom_op("meshwright::bag_ids", mutates_args=())  # type: ignore[untyped-decorator]
def bag_ids(
    indices: torch.Tensor, offsets: torch.Tensor, first: int, bags: int, most: int, rows: int, padding: int, name: str
) -> torch.Tensor:
    """Bags `first` to `first + bags` of flat indices as [bags, most], -1 behind the last lookup; else as `table_lookups`. offsets: where bags begin;
    the last ends at the next offset, or at the end. Raises: RuntimeError for a bag with more lookups."""
    ends = torch.cat([offsets, offsets.new_tensor([indices.numel()])])[first + 1 : first + bags + 1]
    begins = offsets[first : first + bags]
    lengths = ends - begins
    if bags and int(lengths.max()) > most:
        why = f"a bag of table {name} has {int(lengths.max())} lookups, it was placed for {most} at most"
        raise RuntimeError(f"{why}: place the tables on example inputs that have as many")
    if not indices.numel() or not most:
        return indices.new_full((bags, most), -1)
    places = torch.arange(most, device=indices.device)
    at = (begins[:, None] + places).clamp(max=indices.numel() - 1)
    inside = places < lengths[:, None]
    _known(indices[at][inside], rows, -1, name)
    found = indices[at]
    return torch.where(inside & (found != padding), found, -1)


@table_lookups.register_fake  # type: ignore[untyped-decorator]
def _(ids: torch.Tensor, rows: int, padding: int, name: str) -> torch.Tensor:
    return torch.empty_like(ids)


@bag_ids.register_fake  # type: ignore[untyped-decorator]
def _(indices: torch.Tensor, offsets: torch.Tensor, first: int, bags: int, most: int, rows: int, padding: int, name: str) -> torch.Tensor:
    return indices.new_empty(bags, most)


@torch.library.custom_op("meshwright::table_ids", mutates_args=())  # type: ignore[untyped-decorator]
def table_ids(ids: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """Of every table the rows [B, lookups] that samples meet, -1 for none: as blocks for the holders."""
    packing = packing_of(numbers)
    found = ids[0].new_full((packing.parts, len(ids[0]), packing.longest + 1), -1)
    found[:, :, -1] = torch.arange(packing.parts, device=found.device)[:, None]
    for p in packing.places:
        x = ids[p.table]
        inside = (x >= p.rows[0]) & (x < p.rows[1])
        found[p.part, :, p.lookup : p.lookup + x.shape[1]] = torch.where(inside, x - p.rows[0], -1)
    return found


@table_ids.register_fake  # type: ignore[untyped-decorator]
def _(ids: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    packing = packing_of(numbers)
    return ids[0].new_empty(packing.parts, ids[0].shape[0], packing.longest + 1)


# ---- a holder's lookups ------------------------------------------------------------------------------------------
def _held(ids: torch.Tensor, own: int, packing: Packing) -> list[tuple[int, Place, torch.Tensor]]:
    """(which of this rank's parts, shard, its lookups [sources x B, lookups])."""
    found = []
    for e in range(own):
        mine = ids[e::own]
        # All say the same part; of a rank that is measured alone, those of others are zeros.
        for p in packing.of_part(int(mine[:, 0, -1].max())):
            found.append((e, p, mine[:, :, p.lookup : p.lookup + packing.lookups[p.table]].reshape(-1, packing.lookups[p.table])))
    return found


def _bag(looked: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    valid = looked >= 0
    ends = functional.pad(valid.sum(1).cumsum(0), (1, 0))
    return functional.embedding_bag(looked[valid], weight, ends, mode="sum", include_last_offset=True)


@torch.library.custom_op("meshwright::table_rows", mutates_args=())  # type: ignore[untyped-decorator]
def table_rows(ids: torch.Tensor, pack: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Sums of the rows that came, [blocks, B, C]. pack: this rank's parts [own, slots]; own divides the blocks."""
    packing, (own, _), (blocks, samples, _) = packing_of(numbers), pack.shape, ids.shape
    out = pack.new_zeros(blocks, samples, packing.columns)
    for e, p, looked in _held(ids, own, packing):
        weight = pack[e, p.slot : p.slot + p.elements].view(p.height, p.width)
        out[e::own, :, p.column : p.column + p.width] = _bag(looked, weight).view(-1, samples, p.width)
    return out


@torch.library.custom_op("meshwright::table_rows_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _table_rows_backward(grad: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int], own: int, slots: int) -> torch.Tensor:
    packing, found = packing_of(numbers), grad.new_zeros(own, slots)
    for e, p, looked in _held(ids, own, packing):
        valid = looked >= 0
        rows = grad[e::own, :, p.column : p.column + p.width].reshape(-1, p.width).repeat_interleave(valid.sum(1), 0)
        found[e, p.slot : p.slot + p.elements].view(p.height, p.width).index_add_(0, looked[valid], rows)
    return found


@table_rows.register_fake  # type: ignore[untyped-decorator]
def _(ids: torch.Tensor, pack: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    return pack.new_empty(ids.shape[0], ids.shape[1], packing_of(numbers).columns)


@_table_rows_backward.register_fake  # type: ignore[untyped-decorator]
def _(grad: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int], own: int, slots: int) -> torch.Tensor:
    return grad.new_empty(own, slots)


def _rows_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ids, pack, ctx.numbers = inputs
    ctx.shape = tuple(pack.shape)
    ctx.save_for_backward(ids)


def _rows_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return None, torch.ops.meshwright.table_rows_backward(grad, ids, ctx.numbers, *ctx.shape), None


table_rows.register_autograd(_rows_backward, setup_context=_rows_setup)


# ---- pooled rows of the samples ----------------------------------------------------------------------------------
def _divisors(ids: torch.Tensor, packing: Packing) -> dict[int, torch.Tensor]:
    """Of tables whose rows are averaged: lookups of every sample, at least 1. ids: as they were sent."""
    found: dict[int, torch.Tensor] = {}
    for p in packing.places:
        if packing.means[p.table] and p.columns[0] == 0:
            met = (ids[p.part, :, p.lookup : p.lookup + packing.lookups[p.table]] >= 0).sum(1)
            found[p.table] = found.get(p.table, 0) + met
    return {t: x.clamp(min=1)[:, None] for t, x in found.items()}


@torch.library.custom_op("meshwright::table_sums", mutates_args=())  # type: ignore[untyped-decorator]
def table_sums(rows: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """What came back, [parts, B, C], as pooled rows of all tables side by side, [B, columns of all]. ids: as they were sent."""
    packing = packing_of(numbers)
    found = rows.new_zeros(rows.shape[1], sum(packing.dims))
    for p in packing.places:
        at = packing.first(p.table) + p.columns[0]
        found[:, at : at + p.width] += rows[p.part, :, p.column : p.column + p.width]
    for t, divisor in _divisors(ids, packing).items():
        found[:, packing.first(t) : packing.first(t) + packing.dims[t]] /= divisor
    return found


@torch.library.custom_op("meshwright::table_gives", mutates_args=())  # type: ignore[untyped-decorator]
def _table_gives(grad: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """The adjoint of `table_sums`."""
    packing = packing_of(numbers)
    divisors = _divisors(ids, packing)
    found = grad.new_zeros(packing.parts, grad.shape[0], packing.columns)
    for p in packing.places:
        at = packing.first(p.table) + p.columns[0]
        part = grad[:, at : at + p.width]
        found[p.part, :, p.column : p.column + p.width] = part / divisors[p.table] if p.table in divisors else part
    return found


@table_sums.register_fake  # type: ignore[untyped-decorator]
def _(rows: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    return rows.new_empty(rows.shape[1], sum(packing_of(numbers).dims))


@_table_gives.register_fake  # type: ignore[untyped-decorator]
def _(grad: torch.Tensor, ids: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    packing = packing_of(numbers)
    return grad.new_empty(packing.parts, grad.shape[0], packing.columns)


def _sums_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ids, ctx.numbers = inputs
    ctx.save_for_backward(ids)


def _sums_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.meshwright.table_gives(grad, ids, ctx.numbers), None, None


table_sums.register_autograd(_sums_backward, setup_context=_sums_setup)


# ---- one table, until a captured graph brings all together -------------------------------------------------------
def pooled(ids: torch.Tensor, pack: torch.Tensor, packing: Packing, table: int) -> torch.Tensor:
    """Pooled rows of one table, [B, columns], of the whole pack, by plain calls that autograd knows."""
    found = pack.new_zeros(ids.shape[0], packing.dims[table])
    for p in (p for p in packing.places if p.table == table):
        looked = torch.where((ids >= p.rows[0]) & (ids < p.rows[1]), ids - p.rows[0], -1)
        part = _bag(looked, pack[p.part, p.slot : p.slot + p.elements].view(p.height, p.width))
        found = found + functional.pad(part, (p.columns[0], packing.dims[table] - p.columns[1]))
    return found / (ids >= 0).sum(1).clamp(min=1)[:, None] if packing.means[table] else found


@torch.library.custom_op("meshwright::table_bag", mutates_args=())  # type: ignore[untyped-decorator]
def table_bag(ids: torch.Tensor, pack: torch.Tensor, numbers: Sequence[int], table: int) -> torch.Tensor:
    """As `pooled`, without a gradient: a captured graph has `table_ids`, `table_rows` and `table_sums` of all tables in its place."""
    return pooled(ids, pack, packing_of(numbers), table)


@table_bag.register_fake  # type: ignore[untyped-decorator]
def _(ids: torch.Tensor, pack: torch.Tensor, numbers: Sequence[int], table: int) -> torch.Tensor:
    return pack.new_empty(ids.shape[0], packing_of(numbers).dims[table])
