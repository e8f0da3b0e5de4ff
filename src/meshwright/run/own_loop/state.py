"""State of a parallel step: a rank's own part, or the whole put together from all ranks' parts.

A sharded state is `{"meshwright": {...whose it is}, "tensors": {name: this rank's part}}`; the whole model's has the names of `model.state_dict()`.
To put a whole together every rank says what it has (`_Held`); of each different part the first rank that has it sends it to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...errors import PlanMismatch, Unsupported, UsageError
from ...plan.plan import Plan
from ...plan.shards import divided_parameters, local_shape
from ..recording.recording import plan_identity
from ..tensor.sharding import put_part
from ..train.masters import MASTER
from ..train.segments import RankModule
from ..train.sharded_state import ParameterShard, Piece
from ..train.update import AVERAGE, Update
from ..train.work import TrainingWork
from .buffers import whole_buffers
from .owned import OwnOptimizer, divide
from .recipe import load_recipe, recipe_state, require_recipe_state

__all__ = ["average_state", "load_model", "load_optimizer", "model_state", "optimizer_state"]

Entry = tuple[ParameterShard, Piece | None, torch.Tensor]


class Stated(Protocol):
    """What has a state: a parallel step."""

    plan: Plan
    rank: int
    model: nn.Module
    module: RankModule
    optimizer: OwnOptimizer
    update: Update
    group: Any
    steps: int

    @property
    def work(self) -> TrainingWork: ...

    def changing(self) -> Mapping[str, int]: ...


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tensor `name` of shape `full`: of part `tensor` of it (-1: all have the same), flattened, the elements
    `first` to `stop`."""

    name: str
    dtype: str
    full: tuple[int, ...]
    tensor: int
    first: int
    stop: int


class _Scalar(msgspec.Struct, frozen=True, array_like=True):
    """State that is no tensor."""

    name: str
    value: Any


def model_state(step: Stated, *, full: bool) -> dict[str, Any]:
    module = step.module
    if not full:
        if step.work.compressed.tensors():
            raise Unsupported("gradient codecs keep what was not sent yet, which this state does not hold", where="state_dict", hint="full=True")
        tensors = {p.name: tensor.detach() for p, tensor, _ in module.kept()} | {n: b.detach() for n, b in module.buffers.items()}
        return {"meshwright": _whose(step), "tensors": tensors}
    return _by_own_names(step, _gathered(step, {p.name: (p, piece, tensor.detach()) for p, tensor, piece in module.kept()}))


def average_state(step: Stated) -> dict[str, Any]:
    """The whole model's state with the moving averages in place of the weights that have them."""
    if not step.update.ema:
        raise UsageError("the plan keeps no average of the weights", where="average_state_dict", hint="plan with Recipe(ema=0.999)")
    if not step.steps:
        raise UsageError("there is no average before the first step", where="average_state_dict", hint="call it after a step")
    module, states = step.module, _states(step)
    kept = {p.name: (p, piece, tensor.detach()) for p, tensor, piece in module.kept()}
    averages = {p.name: (p, piece, states[id(tensor)][AVERAGE]) for p, tensor, piece in module.updated()}
    return _by_own_names(step, _gathered(step, kept) | _gathered(step, averages))


def _states(step: Stated) -> dict[int, Mapping[str, Any]]:
    """State of what this rank updates, by the weight's id."""
    return {
        id(weight): {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in state.items()} for weight, state in step.update.state.items()
    }


def _by_own_names(step: Stated, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """As `model.state_dict()` gives it; `whole`: parameters by the plan's names. Buffers are those of the stages that change them."""
    found: dict[str, Any] = {}
    layout, moved = step.plan.layout, dict[str, torch.Tensor]()
    if step.group is not None and layout is not None and layout.pipeline > 1:
        ranks = [dist.get_global_rank(step.group, r) for r in range(layout.ranks)]
        moved = whole_buffers(step.module.buffers, step.changing(), ranks, step.group)
    first = {id(x): n for n, x in reversed(list(step.model.named_parameters(remove_duplicate=False)))}
    for name, value in step.model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.nn.Parameter):
            own = first[id(value)]
            found[name] = whole[own] if own in whole else value.detach().cpu()
        else:
            found[name] = moved.get(name, value.detach().cpu()) if isinstance(value, torch.Tensor) else value
    return found


def load_model(step: Stated, state: Mapping[str, Any]) -> None:
    module = step.module
    sharded = "meshwright" in state
    given: Mapping[str, Any] = state["tensors"] if sharded else _first_names(step, state)
    if sharded:
        _require_own(step, state["meshwright"], "state_dict")
    expected = {p.name: (p, piece, tensor) for p, tensor, piece in module.kept()}
    buffers = {n: b for n, b in step.model.named_buffers() if not sharded or n in module.buffers}
    kept_by_state = set(step.model.state_dict(keep_vars=True))
    missing = [n for n in expected if n not in given] + [n for n in buffers if n not in given and (sharded or n in kept_by_state)]
    known = {n for n, _ in step.model.named_parameters(remove_duplicate=False)} | {n for n, _ in step.model.named_buffers()} | kept_by_state
    foreign = [n for n in given if n not in known]
    if missing or foreign:
        what = f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}, which the model does not have"
        raise UsageError(f"the state {what}", where="load_state_dict", hint="it is of another model", data={"missing": missing, "foreign": foreign})
    ready = []
    for name, (of, piece, target) in expected.items():
        value, full = given[name], of.full_shape
        shape = tuple(target.shape) if sharded else full
        if tuple(value.shape) != shape:
            raise UsageError(f"{name} is {tuple(value.shape)}, expected {shape}", where="load_state_dict", hint="it is of another model")
        ready.append((target, value if sharded else divide(value, of, piece)))
    ready += [(b, given[n]) for n, b in buffers.items() if n in given]
    with torch.no_grad():
        for target, value in ready:
            target.copy_(value)
    step.optimizer.masters.follow_weights()
    if sharded:
        step.steps = int(state["meshwright"]["steps"])


def optimizer_state(step: Stated, *, full: bool) -> dict[str, Any]:
    optimizer, states, recipe = step.optimizer, _states(step), recipe_state(step.update)
    updated = {p.name: (p, piece, tensor) for p, tensor, piece in step.module.updated()}
    if not full:
        own = {name: states[id(tensor)] for name, (_, _, tensor) in updated.items() if id(tensor) in states}
        return {"meshwright": _whose(step), "state": own, "param_groups": optimizer.settings(), **recipe}
    divided: dict[str, Entry] = {}
    scalars: list[_Scalar] = []
    for name, (of, piece, tensor) in updated.items():
        for key, value in states.get(id(tensor), {}).items():
            if not isinstance(value, torch.Tensor):
                scalars.append(_Scalar(f"{name}\n{key}", value))
            elif value.shape == tensor.shape:
                divided[f"{name}\n{key}"] = (of, piece, value)
            else:
                divided[f"{name}\n{key}"] = (ParameterShard(name, torch.nn.Parameter(value, requires_grad=False), tuple(value.shape)), None, value)
    numbers = {name: i for i, name in enumerate(n for names in optimizer.names for n in names)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**_gathered(step, divided), **_scalars(step, scalars)}.items():
        name, _, what = key.partition("\n")
        state.setdefault(numbers[name], {})[what] = value
    groups = [dict(g) | {"params": [numbers[n] for n in names]} for g, names in zip(optimizer.settings(), optimizer.names, strict=True)]
    return {"state": dict(sorted(state.items())), "param_groups": groups, **recipe}


def load_optimizer(step: Stated, state: Mapping[str, Any]) -> None:
    optimizer = step.optimizer
    updated = {p.name: (p, piece, tensor) for p, tensor, piece in step.module.updated()}
    groups: Sequence[Mapping[str, Any]] = state.get("param_groups", ())
    if len(groups) != len(optimizer.names):
        raise UsageError(
            f"the state has {len(groups)} parameter groups, the optimizer {len(optimizer.names)}", where="load_optimizer_state_dict",
            hint="it is of another optimizer",
        )  # fmt: skip
    sharded = "meshwright" in state
    recipe = require_recipe_state(step.update, state)
    if sharded:
        _require_own(step, state["meshwright"], "optimizer_state_dict")
        found: dict[str, Mapping[str, Any]] = dict(state["state"])
    else:
        found = {}
        for group, names in zip(groups, optimizer.names, strict=True):
            if len(group.get("params", ())) != len(names):
                raise UsageError(
                    f"a group of the state has {len(group.get('params', ()))} parameters, the optimizer's {len(names)}",
                    where="load_optimizer_state_dict", hint="it is of another model",
                )  # fmt: skip
            found |= {n: state["state"][i] for i, n in zip(group["params"], names, strict=True) if i in state["state"]}
    new: dict[torch.Tensor, dict[str, Any]] = {}
    masters: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, (of, piece, tensor) in updated.items():
        held = optimizer.masters.updated(tensor)
        for key, value in found.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                if not sharded and value.dim() and tuple(value.shape) == of.full_shape:
                    value = divide(value, of, piece)
                value = value.detach().clone()
                if value.shape == tensor.shape:
                    value = value.to(held.device, held.dtype if value.is_floating_point() and held is not tensor else value.dtype)
            if key == MASTER and held is not tensor:
                masters.append((held, value))
            else:
                new.setdefault(held, {})[key] = value
    optimizer.state.clear()
    optimizer.state.update(new)
    with torch.no_grad():
        for master, value in masters:
            master.copy_(value)
    load_recipe(step.update, recipe)
    for own, group in zip(optimizer.optimizer.param_groups, groups, strict=True):
        own.update({k: v for k, v in group.items() if k != "params"})


# ---- whose a part is -------------------------------------------------------------------------------------------------
def _whose(step: Stated) -> dict[str, Any]:
    return {"plan": plan_identity(step.plan), "rank": step.rank, "steps": step.steps}


def _require_own(step: Stated, whose: Mapping[str, Any], what: str) -> None:
    if whose.get("plan") != plan_identity(step.plan) or whose.get("rank") != step.rank:
        other = "another plan" if whose.get("plan") != plan_identity(step.plan) else f"rank {whose.get('rank')}"
        raise PlanMismatch(
            f"the state is a part of {other}, this is rank {step.rank}", where=f"load_{what}",
            hint=f"every rank loads its own part; {what}(full=True) can be loaded by any rank of any plan of the model",
        )  # fmt: skip


def _first_names(step: Stated, state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole model's state by the names that plans use: a tied parameter's first."""
    first = {id(x): n for n, x in reversed(list(step.model.named_parameters(remove_duplicate=False)))}
    names = {n: first[id(x)] for n, x in step.model.named_parameters(remove_duplicate=False)}
    return {names.get(n, n): v for n, v in state.items()}


# ---- the whole of all parts ------------------------------------------------------------------------------------------
def _gathered(step: Stated, mine: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """Whole tensors by name, on the processor of every rank."""
    layout = step.plan.layout
    assert layout is not None
    held = [
        _Held(
            name, str(x.dtype).removeprefix("torch."), of.full_shape, -1 if of.shard is None else of.part,
            piece.first if piece else 0, piece.stop if piece else x.numel(),
        )
        for name, (of, piece, x) in mine.items()
    ]  # fmt: skip
    tables = _all(step, held, _Held)
    senders: dict[_Held, int] = {}
    for rank, table in enumerate(tables):
        for part in table:
            senders.setdefault(part, rank)
    shards = {name: (x.shard, x.parts) for name, x in divided_parameters(layout, step.rank).items()}
    whole: dict[str, torch.Tensor] = {}
    locals_: dict[tuple[str, int], torch.Tensor] = {}
    for part in sorted(senders, key=lambda p: (p.name, p.tensor, p.first)):
        dtype: torch.dtype = getattr(torch, part.dtype)
        shard, parts = shards.get(part.name.partition("\n")[0], (None, 1)) if part.tensor >= 0 else (None, 1)
        if part.name not in whole:
            whole[part.name] = torch.empty(part.full, dtype=dtype)
        key = part.name, part.tensor
        if key not in locals_:
            shape = part.full if shard is None else local_shape(part.full, shard.axis, shard, part.tensor, parts)
            locals_[key] = whole[part.name] if shard is None else torch.empty(shape, dtype=dtype)
        message = torch.empty(part.stop - part.first, dtype=dtype)
        if senders[part] == step.rank:
            message.copy_(mine[part.name][2].reshape(-1))
        if step.group is not None and message.numel():
            dist.broadcast(message, dist.get_global_rank(step.group, senders[part]), step.group)
        locals_[key].view(-1)[part.first : part.stop] = message
    for (name, tensor), local in locals_.items():
        if tensor >= 0:
            shard, parts = shards[name.partition("\n")[0]]
            put_part(whole[name], local, shard.axis, shard, tensor, parts)
    return whole


def _scalars(step: Stated, mine: Sequence[_Scalar]) -> dict[str, Any]:
    return {x.name: x.value for table in reversed(_all(step, mine, _Scalar)) for x in table}


def _all(step: Stated, mine: Sequence[Any], kind: Any) -> list[list[Any]]:
    """What every rank has, by rank."""
    if step.group is None:
        return [list(mine)]
    data = torch.frombuffer(bytearray(msgspec.json.encode(list(mine))), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(step.group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), step.group)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, step.group)
    return [msgspec.json.decode(bytes(x[: int(s)].numpy()), type=list[kind]) for x, s in zip(found, sizes, strict=True)]
