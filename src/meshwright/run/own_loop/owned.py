"""What the owner keeps and we use: his module's parameters and buffers, and his optimizer object.

A parameter that this rank holds whole is the owner's own parameter, updated in place. One that other ranks hold, or of which this rank has a part, is
emptied in his module: nobody can read stale values. His optimizer keeps its groups, options, state and schedulers; the tensors in it become those
that this rank updates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...capture.resolve import place_of
from ...capture.user_gradients import refuse_parameter_hooks
from ...drive.training.own_model import optimizer_name
from ...errors import UsageError
from ...io.shard_file import crc32_of
from ...plan.plan import TrainingLayout
from ..executor.held_groups import holds_group
from ..tensor.sharding import take_part
from ..train.masters import Masters
from ..train.optimizer_trial import own_looks_beyond, refused
from ..train.optimizers import require_no_closure
from ..train.segments import RankModule
from ..train.sharded_state import ParameterShard, Piece
from .step_loss import ACCUMULATE

__all__ = ["OwnOptimizer", "Reached", "divide", "equal_weights", "release_others", "require_plain"]


def require_plain(model: nn.Module, optimizer: torch.optim.Optimizer, layout: TrainingLayout) -> None:
    """Raises: Unsupported, naming it, for what a step would leave out: gradient hooks, closures, optimizers that look beyond one element."""
    for name, p in model.named_parameters():
        if p.is_meta:
            raise UsageError(f"parameter {name} is on the meta device", where="model", hint="initialise the weights, or load them: they are trained")
    refuse_parameter_hooks(model, "model")
    require_no_closure(optimizer)
    kind, degrees = type(optimizer), (layout.zero_level + 1, layout.tensor, layout.expert, layout.pipeline)
    if max(degrees) > 1 and optimizer_name(optimizer)[0].startswith("live:"):
        beyond = own_looks_beyond(optimizer, dict(model.named_parameters()), layout)
        if beyond is not None:
            raise refused(kind.__name__, beyond, where=place_of(kind))


def equal_weights(model: nn.Module, group: Any) -> list[str]:
    """Every rank's module gets rank 0's values where they differ; returns the names of what differed anywhere. All ranks call this.

    Raises: UsageError where the modules have other parameters.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    what = zlib.crc32(repr([(n, tuple(x.shape), str(x.dtype)) for n, x in named.items()]).encode())
    whats = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(whats, torch.tensor([what]), group)
    if any(int(w) != what for w in whats):
        raise UsageError("the ranks' modules have different parameters", where="model", hint="build the same model on every rank")
    sums = torch.tensor([crc32_of(x) for x in named.values()], dtype=torch.int64)
    found = [torch.zeros_like(sums) for _ in whats]
    dist.all_gather(found, sums, group)
    differing = [name for i, name in enumerate(named) if any(int(f[i]) != int(found[0][i]) for f in found)]
    with torch.no_grad():
        for name in differing:
            values = named[name].detach().cpu().contiguous()
            dist.broadcast(values, dist.get_global_rank(group, 0) if group is not None else 0, group)
            named[name].copy_(values)
    return differing


def release_others(model: nn.Module, module: RankModule, layout: TrainingLayout) -> None:
    """Empties the owner's parameters that others hold, or of which this rank holds a part. What no stage uses stays."""
    used = {name for stage in layout.stages for name in stage.params}
    for name, p in model.named_parameters():
        held = module.parameters.get(name)
        if name in used and (held is None or held.tensor is not p):
            p.data = p.data.new_empty(0)


def divide(whole: torch.Tensor, of: ParameterShard, piece: Piece | None) -> torch.Tensor:
    """This rank's part of something of a parameter's full shape; a copy, or the whole itself."""
    local = whole if of.shard is None else take_part(whole, of.shard.axis, of.shard, of.part, of.parts)
    return local if piece is None else local.reshape(-1)[piece.first : piece.stop].clone().view(piece.tensor.shape)


class Reached:
    """Which parameters backward reached since the last update, on any rank. What could not be traced may reach others at every step; in a plain loop
    those that it does not reach have no gradient, and optimizers leave them as they are."""

    def __init__(self, module: RankModule, group: Any) -> None:
        """`group`: of the ranks that hold the same parameters, parts of them included."""
        holds_group(self)
        self.group, self.updated = group, [(p.name, tensor) for p, tensor, _ in module.updated()]
        self.names = [p.name for p in module.trained()]
        self._seen: set[str] = set()  # emptied before a step: one that is left out does not ask
        for p in module.trained():
            p.tensor.register_post_accumulate_grad_hook(lambda _, name=p.name: self._seen.add(name))

    def forget(self) -> None:
        self._seen.clear()

    def take(self) -> set[str]:
        """Names; all ranks of the group call it."""
        mask = torch.tensor([n in self._seen for n in self.names], dtype=torch.uint8)
        if self.group is not None:
            dist.all_reduce(mask, dist.ReduceOp.MAX, group=self.group)
        return {n for n, reached in zip(self.names, mask.tolist(), strict=True) if reached}


class OwnOptimizer:
    """The owner's optimizer over what this rank updates. `step()` is what the plan's program calls; called by the owner it is refused, or, where a
    framework does it after every step, ignored (`ignore_calls`). `masters`: of narrow weights, which it updates in their place. `reached`: where
    parameters may be without a gradient."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, module: RankModule, masters: Masters, reached: Reached | None = None
    ) -> None:
        self.optimizer, self.ignore_calls, self.masters, self.reached = optimizer, False, masters, reached
        self.names: list[list[str]] = []  # of the owner's groups, in his order
        masters.given((p.name, tensor) for p, tensor, _ in module.updated())
        self._hand_over(model, module)
        self._update: Callable[[], Any] = type(optimizer).step.__get__(optimizer)
        self._refuse_calls()

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.optimizer.param_groups
        return found

    def begin(self) -> None:
        """Before a step."""
        if self.reached is not None:
            self.reached.forget()

    def step(self) -> None:
        without: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if self.reached is not None:
            names = self.reached.take()
            absent = [self.masters.updated(x) for name, x in self.reached.updated if name not in names]
            without = [(x, x.grad) for x in absent]
            for x, _ in without:
                x.grad = None
        self._update()
        for x, gradient in without:
            x.grad = gradient
        self.optimizer._opt_called = True  # schedulers warn without it

    def _hand_over(self, model: nn.Module, module: RankModule) -> None:
        name_of = {id(p): name for name, p in model.named_parameters()}
        updated = {p.name: (p, tensor, piece) for p, tensor, piece in module.updated()}
        old, optimizer = dict(self.optimizer.state), self.optimizer
        optimizer.state.clear()
        for group in optimizer.param_groups:
            names = []
            for p in group["params"]:
                if id(p) not in name_of:
                    raise UsageError(
                        f"the optimizer updates a parameter of shape {tuple(p.shape)} that the model does not have", where="optimizer",
                        hint="make it from model.parameters() of the module that is given",
                    )  # fmt: skip
                names.append(name_of[id(p)])
            kept: list[torch.Tensor] = []
            for p, name in zip(group["params"], names, strict=True):
                if name not in updated:
                    continue
                of, tensor, piece = updated[name]
                held = self.masters.updated(tensor)
                kept.append(held)
                if p in old:
                    optimizer.state[held] = {
                        k: divide(v, of, piece).to(held.dtype)
                        if isinstance(v, torch.Tensor) and tuple(v.shape) == of.full_shape
                        else v
                        for k, v in old[p].items()
                    }
            group["params"] = kept
            self.names.append(names)

    def _refuse_calls(self) -> None:
        def step(*_: Any, **__: Any) -> None:
            if not self.ignore_calls:
                raise UsageError("step(batch) has updated the parameters already", where="optimizer.step", hint=ACCUMULATE)

        step._wrapped_by_lr_sched = getattr(self.optimizer.step, "_wrapped_by_lr_sched", False)  # type: ignore[attr-defined]
        self.optimizer.step = step

    def settings(self) -> list[Mapping[str, Any]]:
        """Of every group all but its tensors."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
