"""A small model with converted expert layers, its plans, a plain loop of the owner's model, and what ranks do in `test_expert_loops`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from loop_rig import world
from owner_models import Model

import meshwright as mw
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.drive.training.pipeline import PipelineWanted
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.nn import convert_experts
from meshwright.plan.routing import Routing

STEPS, ROWS, CLIP = 20, 8, 0.7


class Attentive(Model):
    """With causal attention of two heads first, so that positions can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24, bias=False)  # a bias of keys changes nothing: its gradient is rounding alone

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def model_of(dtype: torch.dtype, *, converted: bool, seed: int = 0, attentive: bool = False, factor: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = (Attentive if attentive else Model)().to(dtype)
    if converted:
        convert_experts(model, capacity_factor=factor)
    return model


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(17, (ROWS, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@cache
def plan_for(dtype: str, layout: tuple[tuple[str, Any], ...]) -> Any:
    options = {"data": 2, "tensor": 1, "pipeline": 1, "zero": 0, "microbatch": 2, **dict(layout)}
    context, sequence, schedule = options.pop("context", 1), options.pop("sequence", None), options.pop("schedule", "")
    if spare := options.pop("spare", 0):  # devices so slow that copies pay
        fabric, loads = mw.read_fabric(options["fabric"]), Routing(measured=(("blocks.*.experts", (40, 3, 3, 2)),))
        options["fabric"] = replace(fabric, devices=tuple(replace(d, flops=dict.fromkeys(d.flops, 100_000)) for d in fabric.devices))
    if context > 1 or sequence or spare or schedule:
        names = ("data", "tensor", "pipeline", "microbatch", "expert")
        asked = {n: options.pop(n) for n in names if n in options} | ({"spare": spare, "routing": loads} if spare else {})
        options["wishes"] = [LayoutWanted(context=context, tensor_options=TensorOptions(sequence=sequence), **asked), PipelineWanted(name=schedule)]
    model = model_of(getattr(torch, dtype), converted=True, attentive=context > 1)
    return mw.plan(model, batch_of(0), loss=loss_of, **options)


@cache
def plain(dtype: str, steps: int = STEPS, clip: float = 0.0, attentive: bool = False) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """(losses, model state, optimizer state) of the owner's own model, whose experts run one after the other."""
    model = model_of(getattr(torch, dtype), converted=False, attentive=attentive)
    optimizer, losses = optimizer_of(model), []
    for i in range(steps):
        x, y = batch_of(i)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), optimizer.state_dict()


def trained(rank: int, group: Any, ranks: int, store: str, plan: Any, dtype: str, saved: Any = None, steps: int = STEPS) -> dict[str, Any]:
    import meshwright.torch

    with world(rank, ranks, store):
        attentive = plan.layout.context > 1
        model = model_of(getattr(torch, dtype), converted=True, seed=rank, attentive=attentive)
        optimizer = optimizer_of(model)
        if rank == 0:
            torch.manual_seed(0)
            model.load_state_dict(model_of(getattr(torch, dtype), converted=False, attentive=attentive).state_dict())
        step = meshwright.torch.parallelize(model, optimizer, plan, loss=loss_of)
        first = 0
        if saved is not None:
            step.load_state_dict(saved["state"])
            step.load_optimizer_state_dict(saved["optimizer"])
            first = saved["steps"]
        losses = [float(step(batch_of(i))) for i in range(first, first + steps)]
        held = {n: tuple(p.tensor.shape) for n, p in step.module.parameters.items() if ".experts." in n}
        return {
            "losses": losses, "state": step.state_dict(full=True), "optimizer": step.optimizer_state_dict(full=True), "held": held,
            "evaluated": float(step.evaluate(batch_of(99))), "steps": first + steps,
        }  # fmt: skip
