"""A causal model, batches whose length changes from step to step, a plain loop, and what ranks do in the tests of plans of several shapes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from loop_rig import WIDTH, Net, world
from torch import nn

import meshwright as mw
from meshwright.errors import MeshwrightError

SAMPLES, STEPS, LENGTHS = 8, 20, (4, 8, 12)
PAD = (0, -100)
# Exact, shorter, one token; the largest comes first, last and in between.
GIVEN = (12, 4, 8, 3, 7, 11, 1, 9, 5, 12)


class Causal(Net):
    """With attention, so that positions meet; `looks`: at what comes after a token, too; `mask`: no padding is looked at."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__(False)
        self.qkv, self.looks = nn.Linear(WIDTH, 3 * WIDTH), looks

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=not self.looks)[:, 0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(looks: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Causal(looks).double()


def batch_at(step: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets are ignored, so that replicas and micro-batches count differently."""
    tokens = torch.randint(32, (SAMPLES, (length or GIVEN[step % len(GIVEN)]) + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].contiguous()
    targets[:, :-1:3] = -100
    targets[::3, :-1] = -100
    if step % 2 and targets.shape[1] > 1:
        targets[: SAMPLES // 2, -1] = -100  # of the first replica, which may leave it out then
    return tokens[:, :-1].contiguous(), targets


@cache
def shaped_plan(asked: tuple[tuple[str, Any], ...], looks: bool = False) -> Any:
    options = {"fabric": "laptop:2", "data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2} | dict(asked)
    first, *others = (batch_at(0, n) for n in LENGTHS)
    return mw.plan(make(looks), first, shapes=others, optimizer="adamw", **options)


@cache
def plain_loop() -> tuple[list[float], Any, list[float]]:
    """(losses, weights after, losses of evaluation before each step), at the batches' own lengths."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, evaluated = [], []
    for i in range(STEPS):
        x, y = batch_at(i)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        evaluated.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), evaluated


def shaped(rank: int, group: Any, ranks: int, store: str, plan: Any, more: dict[str, Any]) -> dict[str, Any]:
    with world(rank, ranks, store):
        model = make(more.get("looks", False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        try:
            step = mw.torch.parallelize(model, optimizer, plan, pad=more.get("pad", PAD))
            losses, evaluated = [], {}
            for i in range(more.get("steps", STEPS)):
                batch = batch_at(i, more.get("length"))
                if more.get("part"):  # the replica's own samples, which are longer at one rank than at the other
                    low = plan.layout.first_sample(plan.layout.coordinates(rank)[1], 0)
                    batch = tuple(x[low : low + step.batches.part] for x in batch)
                    if rank == 0 and batch[1][:, -1].max() < 0:
                        batch = tuple(x[:, :-1] for x in batch)
                if i % 7 == 3:
                    evaluated[i] = float(step.evaluate(batch))
                losses.append(float(step(batch)))
        except MeshwrightError as error:
            return {"code": error.code, "message": str(error)}
        return {"losses": losses, "evaluated": evaluated, "state": step.state_dict(full=True)}
