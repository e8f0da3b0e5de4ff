"""Embedding bags of a table plan, one rank's part: a module whose samples are this rank's and whose tables are everybody's.

    bags = ShardedTables(tables, shards, names, rank=r)
    pooled = bags({"user": (indices, offsets), ...})        # of this rank's samples: name -> [samples, columns]

Forward: indices go to the ranks that hold their rows, shards look up, pooled rows come back. Backward: gradients of pooled rows go to the holders.
Shards of rows give partial sums, which are added where they arrive; a mean is divided there, by all of the sample's lookups. The result is that of
whole `EmbeddingBag`s, but for the order of partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UsageError
from ...graph.embeddings import Shard, Tables

__all__ = ["ShardedTables"]

Bags = tuple[torch.Tensor, torch.Tensor]  # indices, and offsets of samples with the end behind them


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """All-to-all of flat pieces; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sends: list[int], takes: list[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = (sends, takes), group
        return _all_to_all(x, sends, takes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sends, takes = ctx.sizes
        return _all_to_all(gradients[0].contiguous(), takes, sends, ctx.group), None, None, None


def _all_to_all(x: torch.Tensor, sends: list[int], takes: list[int], group: Any) -> torch.Tensor:
    out = x.new_empty(sum(takes))
    dist.all_to_all_single(out, x, takes, sends, group=group)
    return out


class ShardedTables(nn.Module):  # type: ignore[misc]
    """Args: devices: names of ranks; rank: this one; weights: whole tables to take shards from (else drawn from `seed`, as all ranks draw them);
    operator: "embedding_bag", or "fbgemm" (float32; its backward pass takes an SGD step of `learning_rate` itself).

    Raises: UsageError for a table or device that is not there, or an operator that cannot."""

    def __init__(
        self, tables: Tables, shards: Sequence[Shard], devices: Sequence[str], *, rank: int, group: Any = None, dtype: torch.dtype = torch.float32,
        weights: Mapping[str, torch.Tensor] | None = None, seed: int = 0, operator: str = "embedding_bag", learning_rate: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__()
        unknown = {s.table for s in shards} - set(tables.number_of) | {s.device for s in shards} - set(devices)
        if unknown or operator not in ("embedding_bag", "fbgemm") or (operator == "fbgemm" and dtype is not torch.float32):
            what = f"there is no {sorted(unknown)[0]}" if unknown else f"operator {operator} cannot look up {dtype}"
            raise UsageError(what, where="tables", hint="tables and devices as in the plan; fbgemm for float32, else embedding_bag")
        self.tables, self.devices, self.rank, self.group, self.operator, self.dtype = tables, tuple(devices), rank, group, operator, dtype
        self.of_rank = [[s for s in shards if s.device == name] for name in devices]
        mine = self.of_rank[rank]
        self.sent_bytes = 0  # of pooled rows, by this rank, in the last forward pass
        parts = [_part(tables, s, weights, seed, dtype) for s in mine]
        if operator == "fbgemm":
            self._batched = _batched([(s.height, s.width) for s in mine], parts, learning_rate) if mine else None
        else:
            self.parts = nn.ParameterList(nn.Parameter(p) for p in parts)

    def shard_weights(self) -> list[torch.Tensor]:
        """Weights of this rank's shards, in the plan's order."""
        if self.operator == "fbgemm":
            return list(self._batched.split_embedding_weights()) if self._batched is not None else []
        return [p.detach() for p in self.parts]

    def forward(self, features: Mapping[str, Bags]) -> dict[str, torch.Tensor]:
        """This rank's samples of every table, each with equally many: (indices, offsets of one more than samples).

        Raises: UsageError for tables without indices, rows that do not exist, or unequal numbers of samples."""
        samples = self._samples(features)
        counts = torch.zeros(len(self.devices), dtype=torch.int64)
        counts[self.rank] = samples
        dist.all_reduce(counts, group=self.group)
        all_samples = counts.tolist()
        pooled = self._looked_up(*self._indices(features, all_samples), all_samples)
        mine, widths = sum(s.width for s in self.of_rank[self.rank]), [sum(s.width for s in held) for held in self.of_rank]
        sends, takes = [n * mine for n in all_samples], [samples * w for w in widths]
        self.sent_bytes = sum(n for r, n in enumerate(sends) if r != self.rank) * pooled.element_size()
        got = _Exchange.apply(pooled.reshape(-1), sends, takes, self.group).split(takes)
        found = {t.name: pooled.new_zeros(samples, t.dim) for t in self.tables.tables}
        for held, width, flat in zip(self.of_rank, widths, got, strict=True):
            for s, part in zip(held, flat.view(samples, width).split([s.width for s in held], 1), strict=True):
                whole = found[s.table]
                left, right = s.columns
                found[s.table] = whole + nn.functional.pad(part, (left, whole.shape[1] - right))
        for t in self.tables.tables:
            if t.mode == "mean":
                lengths = features[t.name][1].diff().clamp(min=1).to(pooled.dtype)
                found[t.name] = found[t.name] / lengths[:, None]
        return found

    def _samples(self, features: Mapping[str, Bags]) -> int:
        if lacking := [t.name for t in self.tables.tables if t.name not in features]:
            raise UsageError(f"there are no indices of table {lacking[0]}", where="features")
        found = {len(features[t.name][1]) - 1 for t in self.tables.tables}
        if len(found) != 1:
            raise UsageError(f"tables have {sorted(found)} samples", where="features", hint="a sample has a bag, maybe an empty one, in every table")
        for t in self.tables.tables:
            indices, offsets = features[t.name]
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < t.rows:
                raise UsageError(f"table {t.name} has {t.rows} rows, looked up are {int(indices.min())}..{int(indices.max())}", where="features")
            if int(offsets[0]) or int(offsets[-1]) != len(indices):
                raise UsageError(f"offsets of table {t.name} are not 0 to {len(indices)}", where="features", hint="one more than there are samples")
        return found.pop()

    def _indices(self, features: Mapping[str, Bags], all_samples: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of each of this rank's shards, the lookups of all samples: their numbers and their rows, counted from the shard's first."""
        lengths, rows = [], []
        for held in self.of_rank:
            for s in held:
                indices, offsets = features[s.table]
                inside = (indices >= s.rows[0]) & (indices < s.rows[1])
                ends = nn.functional.pad(inside.cumsum(0), (1, 0))
                lengths.append(ends[offsets].diff())
                rows.append(indices[inside] - s.rows[0])
        mine = len(self.of_rank[self.rank])
        own = all_samples[self.rank]
        sizes = [own * len(held) for held in self.of_rank]
        got_lengths = _all_to_all(_joined(lengths), sizes, [n * mine for n in all_samples], self.group)
        totals = got_lengths.split([n * mine for n in all_samples])
        at, sends = 0, []
        for held in self.of_rank:
            sends.append(sum(len(r) for r in rows[at : at + len(held)]))
            at += len(held)
        got_rows = _all_to_all(_joined(rows), sends, [int(x.sum()) for x in totals], self.group)
        # From each rank, shard by shard; wanted are shards, rank by rank.
        blocks = [x.view(mine, n) for x, n in zip(totals, all_samples, strict=True)]
        per_shard_rows: list[list[torch.Tensor]] = [[] for _ in range(mine)]
        for chunk, block in zip(got_rows.split([int(x.sum()) for x in totals]), blocks, strict=True):
            for k, part in enumerate(chunk.split(block.sum(1).tolist())):
                per_shard_rows[k].append(part)
        return [torch.cat([b[k] for b in blocks]) for k in range(mine)], [torch.cat(parts) for parts in per_shard_rows]

    def _looked_up(self, lengths: list[torch.Tensor], rows: list[torch.Tensor], all_samples: list[int]) -> torch.Tensor:
        """[all samples, this rank's columns]."""
        if not lengths:
            return torch.zeros(sum(all_samples), 0, dtype=self.dtype, requires_grad=True)
        offsets = [nn.functional.pad(x.cumsum(0), (1, 0)) for x in lengths]
        if self.operator == "fbgemm":
            starts = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
            every = torch.cat([*(o[:-1] + s for o, s in zip(offsets, starts[:-1], strict=True)), starts[-1:]])
            return self._batched(torch.cat(rows), every)  # type: ignore[misc]
        bag = nn.functional.embedding_bag
        return torch.cat([bag(r, p, o, mode="sum", include_last_offset=True) for p, r, o in zip(self.parts, rows, offsets, strict=True)], 1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def whole_table(tables: Tables, name: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The table that every rank draws from the seed."""
    number = tables.number_of[name]
    table = tables.tables[number]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.empty(table.rows, table.dim, dtype=dtype).uniform_(-1, 1, generator=generator)


def _part(tables: Tables, s: Shard, weights: Mapping[str, torch.Tensor] | None, seed: int, dtype: torch.dtype) -> torch.Tensor:
    whole = weights[s.table].to(dtype) if weights is not None else whole_table(tables, s.table, seed, dtype)
    return whole[s.rows[0] : s.rows[1], s.columns[0] : s.columns[1]].clone()


def _batched(shapes: Sequence[tuple[int, int]], parts: Sequence[torch.Tensor], learning_rate: float) -> Any:
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # type: ignore[import-not-found]
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except (ImportError, OSError) as error:
        raise UsageError(f"fbgemm is not here: {error}", where="operator", hint="operator embedding_bag, or pip install fbgemm-gpu-cpu") from None
    specs = [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes]
    made = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=learning_rate)
    for weight, part in zip(made.split_embedding_weights(), parts, strict=True):
        weight.copy_(part)
    return made
