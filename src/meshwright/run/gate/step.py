"""What one training step makes, as its owner would run it: the module eagerly, the loss, its backward, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import msgspec
import torch

from ...capture.losses import Objective
from ...capture.precision import casting
from ...capture.resolve import ModelSource, build_model, user_code
from ...job import Training
from ..train.update import make_update
from .widened import Widened

__all__ = ["Owner", "Part", "Step"]


@dataclass
class Step:
    """Loss, and by name every gradient, every buffer afterwards and every parameter after the optimizer."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """Samples that go through the module together; `weight`: what their loss counts for; `random`: entered around the forward pass.

    `loss`: of (module, inputs), in place of the owner's own. `afresh`: buffers are what they were at first, as another replica has them.
    """

    inputs: Sequence[torch.Tensor]
    weight: float = 1.0
    random: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    loss: Callable[[torch.nn.Module, Sequence[torch.Tensor]], torch.Tensor] | None = None
    afresh: bool = False

    def doubled(self) -> Part:
        return replace(self, inputs=[x.double() if x.is_floating_point() else x for x in self.inputs])


class Owner:
    """The owner's module, built anew for every step that is asked of it: its function is called as he would call it, with the job's seed."""

    def __init__(self, job: Training, *, wide: bool) -> None:
        self.job, self.wide = job, wide
        self.initial = self.build()

    def build(self) -> ModelSource:
        source = build_model(self.job.model, device="cpu", seed=self.job.seed, sizes=self.job.sizes or (), dtype=self.job.dtype)
        if self.wide:
            source.module.double()
        return source

    @contextmanager
    def own_code(self) -> Iterator[None]:
        """Around everything that runs the owner's code."""
        with user_code(self.job.model, self.job.model.rpartition(":")[0]), Widened() if self.wide else nullcontext():
            yield

    def moving(self) -> Training:
        """The job without a schedule that begins at rate 0: parameters that stay say nothing of an optimizer."""
        asked = self.job.asked
        if not asked.schedule or any(g["lr"] for g in make_update(self.job, [*self.parameters().items()]).param_groups):
            return self.job
        return msgspec.structs.replace(self.job, recipe=msgspec.structs.replace(asked, schedule=""))

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self.initial.module.named_parameters())

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(self.initial.module.named_buffers())

    def loss(self, parts: Sequence[Part]) -> float:
        """The sum of the parts' weighted losses, before any training."""
        source, total = self.build(), 0.0
        objective = Objective(source.module, self.job.loss, calling=source.calling)
        with self.own_code(), torch.no_grad():
            for part in parts:
                with part.random(), casting(self.job.asked.autocast):
                    total += part.weight * float(objective(*(x.clone() for x in part.inputs)))
        return total

    def step(self, parts: Sequence[Part], *, jitter: float = 0.0) -> Step:
        """One optimizer step on the sum of the parts' weighted losses. Raises: CaptureError for what the owner's code raises.

        Gradients are those before clipping, and with loss scaling those of the scaled loss. `jitter`: they are changed by so much, relative, before
        the optimizer sees them.
        """
        source, total = self.build(), 0.0
        module = source.module
        objective = Objective(module, self.job.loss, calling=source.calling)
        update = make_update(self.job, list(module.named_parameters()))
        scale = update.scaler.scale if update.scaler is not None else 1.0
        update.optimizer.zero_grad()
        first = {n: b.detach().clone() for n, b in module.named_buffers()}
        with self.own_code():
            for part in parts:
                for n, b in module.named_buffers() if part.afresh else ():
                    b.data.copy_(first[n])
                with part.random(), casting(self.job.asked.autocast):
                    inputs = [x.clone() for x in part.inputs]
                    loss = (objective(*inputs) if part.loss is None else part.loss(module, inputs)) * part.weight
                    if loss.requires_grad:  # within, for activation checkpoints draw again
                        (loss * scale).backward()
                total += float(loss.detach())
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            trained = [p for p in module.parameters() if p.grad is not None]
            generator = torch.Generator().manual_seed(0)
            for p in trained if jitter else ():
                p.grad += p.grad.abs().max() * jitter * torch.randn(p.grad.shape, generator=generator, dtype=p.grad.dtype)
            update.clipped_step(trained, lambda: torch.nn.utils.get_total_norm([p.grad for p in trained]))
        return Step(total, gradients, dict(module.named_buffers()), {n: p.detach() for n, p in module.named_parameters()})
