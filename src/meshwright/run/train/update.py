"""What happens at the end of a training step on one rank: the optimizer, then the moving average of the weights, then the schedule's next rate.

The average of a weight lies among the optimizer's state of it (`weight_average`), so checkpoints keep it, and lay it out anew, like any moment. It
begins as the weights after the first step, as torch.optim.swa_utils.AveragedModel does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import UsageError
from ...job import Training
from ...plan.optimizers import named
from .clip import clip_to_norm, clip_to_value
from .masters import Masters, StateOfWeights
from .optimizers import make_optimizer
from .scaling import LossScaler
from .schedules import fast_forward, make_schedule

__all__ = ["AVERAGE", "Update", "make_update", "require_update"]

AVERAGE = "weight_average"

Plain = bool | int | float | str | None | list[Any]


@dataclass
class Update:
    """In place of the optimizer alone; `state` and `param_groups` are the optimizer's, state by the weights that the rank holds."""

    optimizer: Any  # torch.optim.Optimizer
    schedule: Any = None  # torch.optim.lr_scheduler.LRScheduler
    ema: float = 0.0
    clip_norm: float = 0.0
    clip_value: float = 0.0
    scaler: LossScaler | None = None
    masters: Masters = field(default_factory=Masters)

    @property
    def state(self) -> Any:
        return StateOfWeights(self.optimizer, self.masters) if self.masters.of else self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    def step(self, *, skipped: bool = False) -> None:
        """`skipped`: parameters stay, for a gradient was not finite."""
        averages = self._taken_averages() if self.ema else {}
        if not skipped:
            self.optimizer.step()
            self.masters.give_weights()
        if self.ema:
            self._average(averages)
        if self.schedule is not None:
            self.schedule.step()

    def clipped_step(self, weights: Sequence[torch.nn.Parameter], norm: Callable[[], torch.Tensor] | None) -> None:
        """`step` with the gradients clipped first. `norm` gives that of all gradients of the model."""
        self.masters.take_gradients()
        gradients = [g for w in weights if (g := self.masters.updated(w).grad) is not None]
        total = norm() if norm is not None else None
        finite = True
        if self.scaler is not None and total is not None:
            finite = bool(total.isfinite())
            for g in gradients:
                g.mul_(1.0 / self.scaler.scale)
            total /= self.scaler.scale
        if total is not None and self.clip_norm:
            clip_to_norm(gradients, total, self.clip_norm)
        if self.clip_value:
            clip_to_value(gradients, self.clip_value)
        self.step(skipped=not finite)
        if self.scaler is not None:
            self.scaler.update(finite)

    def _taken_averages(self) -> dict[int, torch.Tensor]:
        """Out of the optimizer's state: where it finds some of a parameter, it takes its own to be made already."""
        return {id(p): state.pop(AVERAGE) for p, state in self.optimizer.state.items() if AVERAGE in state}

    def _average(self, before: dict[int, torch.Tensor]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                found = before.get(id(p))
                self.optimizer.state[p][AVERAGE] = p.detach().clone() if found is None else found.lerp_(p.detach(), 1 - self.ema)

    def saved(self) -> dict[str, Plain]:
        """What groups hold beside their parameters, by `group:<number>:<name>`: values that a document can hold."""
        found: dict[str, Plain] = {}
        for i, group in enumerate(self.param_groups):
            for key, value in group.items():
                plain = value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
                if key != "params" and _is_plain(plain):
                    found[f"group:{i}:{key}"] = list(plain) if isinstance(plain, tuple) else plain
        return found | (self.scaler.saved() if self.scaler is not None else {})

    def resume(self, saved: dict[str, Any], steps: int) -> None:
        """As they were after so many steps. `saved`: as `saved()` gave it, among other things."""
        if self.schedule is not None:
            fast_forward(self.schedule, steps)
        if self.scaler is not None:
            self.scaler.resume(saved)
        for i, group in enumerate(self.param_groups):
            for key, value in group.items():
                name = f"group:{i}:{key}"
                if name not in saved:
                    continue
                if isinstance(value, torch.Tensor):
                    value.fill_(saved[name])
                else:
                    group[key] = tuple(saved[name]) if isinstance(value, tuple) else saved[name]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(x) for x in value)
    finite = not isinstance(value, float) or value - value == 0  # a document has no infinity
    return value is None or (isinstance(value, (bool, int, float, str)) and finite)


def make_update(job: Training, named_parameters: Any, *, whole: Any = None) -> Update:
    """As `make_optimizer` and `make_schedule`, by what the job asks."""
    asked = job.asked
    masters = Masters()
    optimizer = make_optimizer(job.optimizer, masters.given(named_parameters), job.learning_rate, whole=whole, no_decay=asked.no_decay)
    scaler = LossScaler() if asked.precision == "fp16-autocast" else None
    return Update(optimizer, make_schedule(asked.schedule, optimizer), asked.ema, asked.clip_norm, asked.clip_value, scaler, masters)


def require_update(job: Training) -> None:
    """Raises what `make_update` would of names and options; functions of the user's are not called."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(0))], lr=job.learning_rate)
    if ":" not in named(job.optimizer, where="--optimizer").name:
        optimizer = make_optimizer(job.optimizer, [], job.learning_rate)
    if ":" not in named(job.asked.schedule, where="--schedule").name:
        schedule = make_schedule(job.asked.schedule, optimizer)
        try:
            fast_forward(schedule, 1 if schedule is not None else 0)
        except (TypeError, ValueError) as error:
            raise UsageError(f"these options do not fit: {error}", where=job.asked.schedule) from None
