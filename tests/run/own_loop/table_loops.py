"""A small recommender with placed tables, its plans, a plain loop of the owner's model, and what ranks do in `test_table_loops`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from loop_rig import world
from torch import nn

import meshwright as mw
from meshwright.graph.embeddings import Shard, Table, Tables
from meshwright.nn.tables import place_tables, whole_tables
from meshwright.plan.plan import Plan

STEPS, ROWS, CLIP = 20, 8, 0.3
SIZES = {"words": (40, 8, "sum", 3), "shops": (12, 4, "mean", 4), "user": (30, 16, "sum", 1), "flat": (25, 8, "mean", 2)}
CORNERS = {  # per table (part, rows, columns): cut by columns, by rows, and whole
    "words": [(0, (0, 40), (0, 4)), (1, (0, 40), (4, 8))], "shops": [(1, (0, 5), (0, 4)), (0, (5, 12), (0, 4))],
    "user": [(1, (0, 30), (0, 16))], "flat": [(0, (0, 25), (0, 8))],
}  # fmt: skip


class Clicks(nn.Module):
    """Bags of words (padded), of shops (averaged, some empty), one user, and a flat bag with offsets; two layers on top, each a stage's worth."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(40, 8, mode="sum", padding_idx=0)
        self.shops = nn.EmbeddingBag(12, 4, mode="mean", padding_idx=3)
        self.user, self.flat = nn.Embedding(30, 16), nn.EmbeddingBag(25, 8, mode="mean", include_last_offset=False)
        self.up, self.down = nn.Linear(36 + 3, 24), nn.Linear(24, 1)

    def forward(self, dense, ids):
        words, shops = self.words(ids[:, :3]), self.shops(ids[:, 3:7] % 12)
        offsets = torch.arange(ids.shape[0]) * 2
        flat = self.flat(ids[:, 7:9].reshape(-1) % 25, offsets)
        x = torch.cat([words, shops, self.user(ids[:, 9] % 30), flat, dense], 1)
        return self.down(torch.relu(self.up(x))).squeeze(1)


def tables_plan(parts: int) -> Plan:
    """No more of a plan than `place_tables` reads: who holds what."""
    import msgspec

    names = [f"cpu{i}" for i in range(parts)]
    tables = Tables(tables=tuple(Table(name=n, rows=r, dim=d, mode=m, most=k) for n, (r, d, m, k) in SIZES.items()), batch=ROWS)
    shards = [Shard(table=t, device=names[p % parts], rows=r, columns=c) for t, cuts in CORNERS.items() for p, r, c in cuts]
    job = {"tables": msgspec.to_builtins(tables), "shards": msgspec.to_builtins(shards)}
    return Plan(kind="tables", job=job, target_fabric={}, placement=tuple(names), programs={}, cycle=(), decisions={})


def model_of(*, parts: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Clicks().double()
    if parts:
        place_tables(model, tables_plan(parts))
    return model


def batch_of(step: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(40, (ROWS, 10), generator=g)
    ids[:, 7:9] %= 25
    ids[0, 3:7] = 3  # an empty bag
    return torch.randn(ROWS, 3, generator=g, dtype=torch.float64), ids, torch.randn(ROWS, generator=g, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@cache
def plan_for(layout: tuple[tuple[str, Any], ...]) -> Any:
    options = {"data": 2, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2, **dict(layout)}
    return mw.plan(model_of(parts=options.pop("parts", options["expert"])), batch_of(0), loss="mse", **options)


@cache
def plain(clip: float = 0.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = model_of(parts=0)
    optimizer, losses = optimizer_of(model), []
    for i in range(STEPS):
        *inputs, target = batch_of(i)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(*inputs), target)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def trained(rank: int, group: Any, ranks: int, store: str, plan: Any, parts: int) -> dict[str, Any]:
    import meshwright.torch

    with world(rank, ranks, store):
        model = model_of(parts=parts)
        step = meshwright.torch.parallelize(model, optimizer_of(model), plan, loss="mse")
        losses = [float(step(batch_of(i))) for i in range(STEPS)]
        held = {n: tuple(p.tensor.shape) for n, p in step.module.parameters.items()}
        return {"losses": losses, "state": whole_tables(model, step.state_dict(full=True)), "held": held}
