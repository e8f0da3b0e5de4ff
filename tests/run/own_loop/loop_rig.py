"""A small model, its plans, a plain loop, and what ranks do in the tests of `parallelize`."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.errors import MeshwrightError

SAMPLES, STEPS, WIDTH = 8, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token in, token out; a head that may be tied to the embedding, which then lies on two stages."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(seed: int = 0, tied: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return Net(tied).double()


def batch_of(step: int, rows: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Every third row has targets that the loss ignores: replicas and micro-batches count differently."""
    tokens = torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].contiguous()
    targets[::3, :4] = -100
    return tokens[:, :-1].contiguous(), targets


def make_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Two groups: what decays and what does not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=1e-2)
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def plan_for(**options: Any) -> Any:
    """Made once for equal options; nobody changes it."""
    return _plan_for(tuple(sorted(options.items())))


@cache
def _plan_for(asked: tuple[tuple[str, Any], ...]) -> Any:
    options = dict(asked)
    dtype = options.pop("dtype", torch.float64)
    return mw.plan(
        make_model(tied=options.pop("tied", False)).to(dtype), batch_of(0), fabric=options.pop("fabric", "laptop:2"),
        **{"data": 1, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2} | options,
    )  # fmt: skip


@cache
def plain(steps: int = STEPS, *, kind: str = "adamw", tied: bool = False, first: int = 0) -> tuple[list[float], Any, Any]:
    """(losses, model state, optimizer state) of the loop that everybody writes."""
    model = make_model(tied=tied)
    optimizer = make_optimizer(model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for i in range(first, first + steps):
        x, y = batch_of(i)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@contextmanager
def world(rank: int, ranks: int, store: str):
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=180))
    dist.barrier()  # who raises at once must not be gone while others connect
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(rank: int, group: Any, ranks: int, store: str, plan: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Losses, full states and what became of the owner's objects after some steps; `more`: kind, tied, part, saved, apart."""
    with world(rank, ranks, store):
        model = make_model(seed=rank if more.get("apart") else 0, tied=more.get("tied", False))
        optimizer = make_optimizer(model, more.get("kind", "adamw"))
        before = {id(p) for p in model.parameters()}
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if more.get("early") else None
        step = mw.torch.parallelize(model, optimizer, plan)
        scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        losses, first, sharded = [], 0, None
        if "saved" in more:
            saved = more["saved"][rank]
            step.load_state_dict(saved["sharded"])
            step.load_optimizer_state_dict(saved["sharded_optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            first = step.steps
        lay = plan.layout
        for i in range(first, first + more.get("steps", STEPS)):
            batch = batch_of(i)
            if more.get("part"):
                replica = lay.coordinates(rank)[1]
                low = lay.first_sample(replica, 0)
                batch = tuple(x[low : low + step.batches.part] for x in batch)
            if more.get("zero_grad"):
                optimizer.zero_grad()
                model.zero_grad()
            losses.append(float(step(batch)))
            scheduler.step()
        sharded = copy.deepcopy({"sharded": step.state_dict(), "sharded_optimizer": step.optimizer_state_dict()})
        return {
            "losses": losses, "state": step.state_dict(full=True), "optimizer": step.optimizer_state_dict(full=True), **sharded,
            "scheduler": scheduler.state_dict(), "lr": [g["lr"] for g in optimizer.param_groups],
            "own": {n: p.detach().clone() for n, p in model.named_parameters()}, "same": {id(p) for p in model.parameters()} == before,
            "repr": repr(step),
        }  # fmt: skip


def said(rank: int, group: Any, ranks: int, store: str, plans: Any, case: str) -> tuple[str, str, dict[str, Any]]:
    """(code, message, data) of what is raised on this rank."""
    with world(rank, ranks, store):
        try:
            model = make_model()
            optimizer = make_optimizer(model)
            plan = plans[rank]
            if case == "another model":
                model = nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)).double()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if case == "one rank's model" and rank == 1:
                model = nn.Sequential(nn.Linear(4, 4))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = mw.torch.parallelize(model, optimizer, plan)
            if case == "rows":
                step(batch_of(0, 3))
            if case == "fails" and rank == 1:
                x, y = batch_of(0)
                step((x + 1000, y))
            step(batch_of(0))
            if case == "after":
                step(batch_of(1))
        except MeshwrightError as error:
            return error.code, str(error), error.data
        return "", "", {}
