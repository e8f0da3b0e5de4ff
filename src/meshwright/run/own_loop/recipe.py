"""A plan's recipe in the owner's own loop: what the plan brings, what stays his, and what would come twice.

His are the optimizer (class, options, groups, learning rate) and any scheduler of it. The plan's are precision with its loss scale, clipping, the
moving average, masters of narrow weights; a schedule and parameters without weight decay where it has them. What both have is refused by name,
unless both say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import msgspec
import torch
from torch import nn

from ...errors import FormatError, UsageError
from ...job import Recipe, Training
from ...plan.optimizers import OPTIMIZERS, named, undecayed
from ...plan.plan import Plan
from ..train.scaling import LossScaler
from ..train.schedules import make_schedule
from ..train.update import Update
from .owned import OwnOptimizer

__all__ = [
    "load_recipe", "own_groups", "own_update", "recipe_of", "recipe_state", "require_own_rates", "require_plain_surroundings", "require_recipe_state",
]  # fmt: skip

STATE = "recipe"  # its place in the state of an optimizer


def recipe_of(plan: Plan) -> Recipe:
    """What a plan asks beyond its optimizer. Raises: FormatError for a plan that says something else."""
    try:
        return msgspec.convert(plan.job["training"], Training).asked
    except (KeyError, msgspec.ValidationError) as error:
        raise FormatError(f"not a training plan's job: {error}", where="plan.job") from None


def own_groups(job: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The owner's optimizer as the plan wants it, before anything is divided: one group becomes two where the plan has parameters without decay.

    Raises: UsageError where a scheduler, groups or options of the owner's do not go with the plan's.
    """
    scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False) or any("initial_lr" in g for g in optimizer.param_groups)
    if job.asked.schedule and scheduled:
        raise UsageError(
            f"the plan has a schedule of the learning rate ({job.asked.schedule}), and the optimizer has a scheduler", where="optimizer",
            hint="leave the scheduler out, or plan without a schedule; a state of the plan's goes to step.load_optimizer_state_dict",
        )  # fmt: skip
    _require_options(job, optimizer)
    if not job.asked.no_decay:
        return
    free = undecayed({n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}, job.asked.no_decay)
    name_of = {id(p): n for n, p in model.named_parameters()}
    if len(optimizer.param_groups) > 1:
        for number, group in enumerate(optimizer.param_groups):
            odd = next((n for p in group["params"] if (n := name_of.get(id(p), "")) in free and group.get("weight_decay", 0)), "")
            if odd:
                raise UsageError(
                    f"the plan has no weight decay for {odd!r}, group {number} of the optimizer has {group['weight_decay']:g}", where="optimizer",
                    hint="plan without no_decay: the optimizer's groups count; or give it one group, which the plan divides",
                )  # fmt: skip
        return
    if scheduled:
        raise UsageError(
            "the plan divides the optimizer's group (no_decay), and a scheduler was made of it before", where="optimizer",
            hint="make the scheduler after parallelize, or the two groups yourself and plan without no_decay",
        )  # fmt: skip
    (group,) = optimizer.param_groups
    rest = [p for p in group["params"] if name_of.get(id(p)) in free]
    group["params"] = [p for p in group["params"] if name_of.get(id(p)) not in free]
    optimizer.add_param_group({**{k: v for k, v in group.items() if k != "params"}, "params": rest, "weight_decay": 0.0})


def _require_options(job: Training, optimizer: torch.optim.Optimizer) -> None:
    """Options that the plan names are the optimizer's, or it is another than was meant."""
    asked = named(job.optimizer, where="plan")
    if asked.is_function or not asked.options:
        return
    kind = OPTIMIZERS[asked.name.lower()].torch_name
    wrong = {} if type(optimizer).__name__ == kind else {"class": (kind, type(optimizer).__name__)}
    for key, value in asked.options.items():
        found = [g.get(key) for g in optimizer.param_groups]
        if value not in found:
            wrong[key] = value, found[0]
    if wrong:
        what, (planned, own) = next(iter(wrong.items()))
        raise UsageError(
            f"the plan was made for {job.optimizer}, the optimizer has {what} {own}, not {planned}", where="optimizer",
            hint="make the optimizer so, or plan with it: meshwright.plan(..., optimizer=optimizer)",
            data={"planned": job.optimizer, "option": what},
        )  # fmt: skip


def own_update(job: Training, optimizer: OwnOptimizer) -> Update:
    """What ends a step: the owner's optimizer with what the plan asks around it. Raises: as `make_schedule`."""
    asked = job.asked
    scaler = LossScaler() if asked.precision == "fp16-autocast" else None
    schedule = make_schedule(asked.schedule, optimizer.optimizer)
    return Update(optimizer, schedule, asked.ema, asked.clip_norm, asked.clip_value, scaler, optimizer.masters)


# ---- before a step ---------------------------------------------------------------------------------------------------
def require_plain_surroundings(device: torch.device) -> None:
    """Raises: UsageError where the loop would cast what the plan casts, or keeps torch from computing gradients."""
    if torch.is_autocast_enabled(device.type):
        raise UsageError(
            "step(batch) is called under torch.autocast", where="step", hint="call it outside; the plan's own precision counts: Recipe(precision=...)"
        )
    if not torch.is_grad_enabled():
        raise UsageError("step(batch) is called where torch computes no gradients", where="step", hint="step.evaluate(batch) needs none")


def require_own_rates(update: Update) -> None:
    """Raises: UsageError where someone else than the plan's schedule has set a learning rate."""
    if update.schedule is None:
        return
    for number, (group, rate) in enumerate(zip(update.param_groups, update.schedule.get_last_lr(), strict=False)):
        if float(group["lr"]) != float(rate):
            raise UsageError(
                f"the learning rate of group {number} is {float(group['lr']):g}, the plan's schedule has set {float(rate):g}", where="optimizer",
                hint="leave schedulers and changes of the rate out of the loop, or plan without a schedule",
                data={"group": number, "found": float(group["lr"]), "scheduled": float(rate)},
            )  # fmt: skip


# ---- state -----------------------------------------------------------------------------------------------------------
def recipe_state(update: Update) -> dict[str, Any]:
    """What the recipe keeps beside the state of parameters, the same on every rank; nothing for a plan without one."""
    found: dict[str, Any] = {}
    if update.schedule is not None:
        found["schedule"] = deepcopy(update.schedule.state_dict())
    if update.scaler is not None:
        found["scaler"] = update.scaler.saved()
    if update.ema:
        found["ema"] = update.ema
    return {STATE: found} if found else {}


def require_recipe_state(update: Update, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe's part of a state. Raises: UsageError for a state that keeps other things than this plan's."""
    kept: Mapping[str, Any] = state.get(STATE, {})
    own = set(recipe_state(update).get(STATE, {}))
    if set(kept) != own:
        said = [", ".join(sorted(x)) or "nothing" for x in (kept, own)]
        raise UsageError(
            f"of the recipe the state keeps {said[0]}, this plan {said[1]}", where="load_optimizer_state_dict",
            hint=f"load a state of a plan with the same recipe; or leave out state[{STATE!r}] where the plan has none",
            data={"state": sorted(kept), "plan": sorted(own)},
        )  # fmt: skip
    return kept


def load_recipe(update: Update, kept: Mapping[str, Any]) -> None:
    """As `require_recipe_state` gave it."""
    if update.schedule is not None:
        update.schedule.load_state_dict(deepcopy(kept["schedule"]))
    if update.scaler is not None:
        update.scaler.resume(dict(kept["scaler"]))
