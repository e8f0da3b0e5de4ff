"""A table plan for torchrec: what its `ShardingPlan` holds, as JSON (docs/formats.md). `run.tables.torchrec` makes the object of it.

torchrec has whole tables on a rank, runs of columns on ranks, and equal blocks of rows on all ranks; other cuts are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import Unsupported
from ...graph.embeddings import Shard, Table, Tables

__all__ = ["SCHEMA", "VERSION", "torchrec_document"]

SCHEMA, VERSION = "meshwright.torchrec", 1


def torchrec_document(tables: Tables, shards: Sequence[Shard], devices: Sequence[str]) -> dict[str, Any]:
    """`plan`: module -> table -> its sharding. A table's name is split at its last dot, `embedding_bags` of a collection left out.

    Raises: Unsupported naming the table that torchrec cannot cut so."""
    rank_of = {name: r for r, name in enumerate(devices)}
    plan: dict[str, dict[str, Any]] = {}
    for table in tables.tables:
        held = sorted((s for s in shards if s.table == table.name), key=lambda s: (s.rows, s.columns))
        kind = _kind(table, held, rank_of)
        module, _, name = table.name.rpartition(".")
        module = module.removesuffix("embedding_bags").rstrip(".")
        plan.setdefault(module, {})[name] = {
            "sharding_type": kind, "compute_kernel": "fused", "ranks": [rank_of[s.device] for s in held],
            "sharding_spec": {"shards": [
                {"shard_offsets": [s.rows[0], s.columns[0]], "shard_sizes": [s.height, s.width], "placement": f"rank:{rank_of[s.device]}/cpu"}
                for s in held
            ]},
        }  # fmt: skip
    return {"schema": SCHEMA, "version": VERSION, "world_size": len(devices), "batch": tables.batch, "plan": plan}


def _kind(table: Table, held: Sequence[Shard], rank_of: dict[str, int]) -> str:
    if len(held) == 1:
        return "table_wise"
    if all(s.rows == (0, table.rows) for s in held):
        return "column_wise"
    block = -(-table.rows // len(rank_of))
    equal = [(min(r * block, table.rows), min((r + 1) * block, table.rows)) for r in range(len(rank_of))]
    if len(held) == len(equal) and all(s.rows == equal[rank_of[s.device]] and s.columns == (0, table.dim) for s in held):
        return "row_wise"
    raise Unsupported(
        f"table {table.name} is cut in rows that are not equal blocks on all ranks, which torchrec has not", where=f"table {table.name}",
        hint="devices with more memory, so that columns alone are cut; or run the plan with meshwright.run.tables",
    )  # fmt: skip
