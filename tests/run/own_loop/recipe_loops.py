"""What ranks do in the tests of recipes in the own loop: steps of the plan, the same by hand, and by hand under DDP."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loop_rig import SAMPLES, batch_of, make_model, world
from torch import nn

import meshwright as mw
from meshwright.errors import MeshwrightError

NORM, DECAY, STEPS = 0.05, 0.7, 4
FULL = mw.Recipe(clip_norm=NORM, ema=DECAY, schedule="cosine:steps=8,warmup=2,end=0.1", no_decay=("bias", "1d"))
CASTS = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
RATE = {"adamw": 1e-2, "sgd": 0.1}


def optimizer_of(parameters: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=RATE[kind], weight_decay=0.3)
    return torch.optim.SGD(parameters, lr=RATE[kind], momentum=0.9)


def cosine(step: int) -> float:
    return step / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, (step - 2) / 6)))


def loss_of(model: nn.Module, batch: Any, wrapped: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy((wrapped or model)(batch[0]).flatten(0, 1), batch[1].flatten())


def given(step: int, dtype: torch.dtype) -> Any:
    """Targets that are left out, unlike many by rank, in float64; elsewhere all count, so that DDP's mean over ranks is the mean of the batch."""
    tokens, targets = batch_of(step)
    return tokens, targets if dtype is torch.float64 else targets.clamp(min=0)


def by_hand(recipe: mw.Recipe, dtype: torch.dtype, kind: str, *, steps: int = STEPS, ddp: bool = False) -> dict[str, Any]:
    """The loop that everybody writes, whole batches in one process, or under DDP with this rank's rows of them."""
    model = make_model().to(dtype)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and p.dim() > 1]
    free = [p for n, p in model.named_parameters() if "bias" in n or p.dim() <= 1]
    masters: dict[nn.Parameter, nn.Parameter] = {}
    if dtype is torch.bfloat16:
        masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    updated = list(masters.values()) or list(model.parameters())
    groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}] if recipe.no_decay else updated
    optimizer = optimizer_of(groups, kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine) if recipe.schedule else None
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)) if recipe.ema else None
    scaler = torch.amp.GradScaler("cpu") if recipe.precision == "fp16-autocast" else None
    cast = partial(torch.autocast, "cpu", dtype=CASTS[recipe.precision]) if recipe.precision in CASTS else nullcontext
    wrapped = nn.parallel.DistributedDataParallel(model) if ddp else None
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    for i in range(steps):
        batch = given(i, dtype)
        if ddp:
            part = SAMPLES // dist.get_world_size()
            batch = tuple(x[dist.get_rank() * part :][:part] for x in batch)
        model.zero_grad()
        with cast():
            loss = loss_of(model, batch, wrapped)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        for weight, master in masters.items():
            master.grad = weight.grad.float()
        if recipe.clip_norm:
            found["norms"].append(float(nn.utils.clip_grad_norm_(updated, NORM)))
        if recipe.clip_value:
            nn.utils.clip_grad_value_(updated, recipe.clip_value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            found["scales"].append(scaler.get_scale())
        with torch.no_grad():
            for weight, master in masters.items():
                weight.copy_(master)
        if average is not None:
            average.update_parameters(model)
        if scheduler is not None:
            scheduler.step()
        found["losses"].append(float(loss.detach()))
    averages = average.module.state_dict() if average is not None else {}
    return found | {"state": model.state_dict(), "averages": averages, "optimizer": optimizer.state_dict()}


def stepped(rank: int, group: Any, ranks: int, store: str, plan: Any, recipe: Any, dtype: torch.dtype, kind: str, more: dict[str, Any]) -> Any:
    """Steps of the plan; `more`: `saved` to begin with, `half` to save on the way, `ddp` for the same by hand on the same ranks."""
    with world(rank, ranks, store):
        model = make_model().to(dtype)
        optimizer = optimizer_of(model.parameters(), kind)
        step = mw.torch.parallelize(model, optimizer, plan)
        found: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "evaluated": [], "half": None}
        if (saved := more.get("saved")) is not None:
            step.load_optimizer_state_dict(saved["optimizer"][rank] if isinstance(saved["optimizer"], list) else saved["optimizer"])
            step.load_state_dict(saved["state"][rank] if isinstance(saved["state"], list) else saved["state"])
            step.steps = saved["steps"]
        for i in range(step.steps, STEPS):
            if more.get("evaluate"):
                found["evaluated"].append(float(step.evaluate(given(100 + i, dtype))))
            found["losses"].append(float(step(given(i, dtype))))
            found["norms"] += [x for k, x in step.metrics().items() if k == "gradient_norm"]
            found["scales"] += [x for k, x in step.metrics().items() if k == "loss_scale"]
            if step.steps == more.get("half"):
                found["half"] = copy.deepcopy({
                    "state": step.state_dict(), "optimizer": step.optimizer_state_dict(), "full": step.state_dict(full=True),
                    "full_optimizer": step.optimizer_state_dict(full=True),
                })  # fmt: skip
        found |= {"state": step.state_dict(full=True), "optimizer": step.optimizer_state_dict(full=True)}
        found["averages"] = step.average_state_dict() if recipe.ema else {}
        found["lr"] = [g["lr"] for g in optimizer.param_groups]
        if more.get("ddp"):
            found["ddp"] = by_hand(recipe, dtype, kind, ddp=True)
        return found


def refusals(rank: int, group: Any, ranks: int, store: str, plan: Any) -> list[str]:
    """What a step says, on every rank, to a loop that does what the plan does; and that it goes on afterwards."""
    with world(rank, ranks, store):
        model = make_model()
        optimizer = optimizer_of(model.parameters(), "adamw")
        step = mw.torch.parallelize(model, optimizer, plan)
        said = []

        def refused(call: Any) -> None:
            try:
                call()
            except MeshwrightError as error:
                said.append(f"{error.code}: {error}")

        with torch.autocast("cpu", dtype=torch.bfloat16):
            refused(lambda: step(batch_of(0)))
            refused(lambda: step.evaluate(batch_of(0)))
        with torch.no_grad():
            refused(lambda: step(batch_of(0)))
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 5.0
        refused(lambda: step(batch_of(0)))
        optimizer.param_groups[0]["lr"] = rate
        refused(step.average_state_dict)
        plain = {k: v for k, v in step.optimizer_state_dict(full=True).items() if k != "recipe"}
        refused(lambda: step.load_optimizer_state_dict(plain))
        step(batch_of(0))
        return said
