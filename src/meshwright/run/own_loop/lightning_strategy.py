"""A Lightning strategy on a plan: `Trainer(strategy=PlannedStrategy(plan), devices=N)`, automatic optimization with one optimizer.

The plan is of the module's own `training_step`: `meshwright.plan(TrainingStep(module), batch, optimizer=..., ...)`, `batch` being a global one. Each
data replica gets its part of the data from Lightning's sampler (a loader's batch size is then the replica's part; stages and tensor-parallel ranks of
one replica get the same), or, with `use_distributed_sampler=False`, every rank the global batches. Checkpoints are whole, in the module's names, and
any plan of the module resumes from them.

`training_step` is traced once and not called again. What it logs of the loss it returns is logged at every step; what else it logs or counts is not
repeated, and is named in a warning. Callbacks see the loss as the batch's output. Where it reads `batch_idx`, `global_step` or `current_epoch`, which
a trace would keep as they are, it is refused. Validation needs a plan under which ranks hold the whole module. `gradient_clip_val` (of either
algorithm) and `precision` (bf16-mixed, 16-mixed) are taken where they are the plan's own (`Recipe(clip_norm=..., precision=...)`). Not supported, and
refused: other values of these, manual optimization, several optimizers, `accumulate_grad_batches`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ...capture.live import copied
from ...drive.plans import read_plan
from ...errors import MissingExtra, Unsupported, UsageError
from ...plan.plan import Plan
from .parallelize import parallelize
from .recipe import recipe_of
from .shapes import Pad
from .step import ParallelStep

try:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError as error:
    raise MissingExtra("lightning", extra="lightning", needed_for="PlannedStrategy") from error

__all__ = ["PlannedStrategy", "TrainingStep"]

MIXED = {"bf16-autocast": "bf16-mixed", "fp16-autocast": "16-mixed"}  # Lightning's names
PREFIX = "module."  # of the module's names within `TrainingStep`


Logged = list[tuple[str, Any, dict[str, Any]]]  # name, value, options of `self.log`
_LOGGED: ContextVar[Logged | None] = ContextVar("what training_step logs", default=None)


def _changing(what: str) -> NoReturn:
    raise Unsupported(
        f"training_step reads {what}, which changes from step to step; a planned step is traced once", where="LightningModule.training_step",
        hint="give it as a tensor of the batch, or compute what depends on it in a callback",
    )  # fmt: skip


def _counted(name: str, _: object) -> NoReturn:
    _changing(f"self.{name}")


class _BatchIndex:
    """In the place of `batch_idx`: it may be passed on, and not be read."""

    def _read(self, *_: Any) -> NoReturn:
        _changing("batch_idx")

    __index__ = __int__ = __float__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __add__ = __radd__ = __sub__ = __rsub__ = _read
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __neg__ = _read
    __eq__ = __ne__ = _read
    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def _traced_surroundings(module: nn.Module) -> Iterator[None]:
    """Without a trainer: `self.log` notes what it is given, and what a trainer counts is refused."""

    def log(_: Any, name: str, value: Any, *args: Any, **options: Any) -> None:
        if (found := _LOGGED.get()) is not None:
            found.append((name, value, dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)) | options))

    own = type(module)
    watched = {"log": log, **{name: property(partial(_counted, name)) for name in ("global_step", "current_epoch")}}
    module.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "__qualname__": own.__qualname__, **watched})
    try:  # this module alone: others of its class may be training
        yield
    finally:
        module.__class__ = own


class TrainingStep(nn.Module):  # type: ignore[misc]
    """A LightningModule as a module whose forward is its `training_step`: what is planned."""

    returns_loss = True  # of a batch that is a tuple, too

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor, **named: torch.Tensor) -> Any:
        batch: Any = named or (tensors if len(tensors) > 1 else tensors[0])
        function = self.module.training_step
        index = (_BatchIndex(),) if is_param_in_hook_signature(function, "batch_idx", min_args=2) else ()
        with _traced_surroundings(self.module):
            return function(batch, *index)

    def logs_of(self, batch: Any) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
        """What a copy of the module without values logs: names and options of what is the returned loss itself, and the other names."""
        said: Logged = []
        token = _LOGGED.set(said)
        try:
            with torch.no_grad():
                made = self(**batch) if isinstance(batch, Mapping) else self(*batch) if isinstance(batch, (list, tuple)) else self(batch)
                loss = made["loss"] if isinstance(made, Mapping) else made
                return [(n, o) for n, x, o in said if x is loss], [n for n, x, _ in said if x is not loss]
        except Exception as error:  # by value: not all modules run without
            lines = str(error).strip().splitlines() or ["no message"]
            warnings.warn(
                f"what training_step logs of its loss is not known, and not logged: on tensors without values it fails with {type(error).__name__}: "
                f"{lines[0]}", stacklevel=2,
            )  # fmt: skip
        finally:
            _LOGGED.reset(token)
        return [], [n for n, *_ in said]


class PlannedStrategy(DDPStrategy):  # type: ignore[misc]
    """`plan`: of `TrainingStep(module)`, or a file; `pad`: as of `parallelize`, for a plan of several shapes.

    Raises: UsageError for settings of the Trainer that would train something else, and what
    `parallelize` raises, when fitting begins."""

    def __init__(self, plan: Plan | str | Path, *, pad: Pad = None, **options: Any) -> None:
        super().__init__(**options)
        self.pad = pad
        self.plan = plan if isinstance(plan, Plan) else read_plan(plan)
        if self.plan.layout is None:
            raise UsageError(f"the plan is of a {self.plan.kind}", where="PlannedStrategy", hint="a plan of meshwright.plan")
        self.planned_step: ParallelStep | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = self.plan.layout
        assert layout is not None
        return {"num_replicas": layout.data, "rank": layout.coordinates(self.global_rank)[1]}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def configure_ddp(self) -> None:
        """Nothing is wrapped around the module."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        module, recipe = self.lightning_module, recipe_of(self.plan)
        clip, precision = float(trainer.gradient_clip_val or 0.0), str(self.precision_plugin.precision)
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        planned = recipe.clip_value if by_value else recipe.clip_norm
        wrong = [
            (not module.automatic_optimization, "manual optimization", "let the module optimize automatically"),
            (len(self.optimizers) != 1, f"{len(self.optimizers)} optimizers", "give one"),
            (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches", "the plan has its own micro-batches"),
            (clip not in (0.0, planned), f"gradient_clip_val={clip:g}", f"the plan's clipping counts, and is {planned:g}: Recipe(clip_norm=...)"),
            (precision not in ("32-true", MIXED.get(recipe.precision)), f"precision {precision}", f"the plan's counts, and is {recipe.precision}"),
        ]  # fmt: skip
        for is_wrong, name, hint in wrong:
            if is_wrong:
                raise UsageError(f"a PlannedStrategy does not take {name}", where="Trainer", hint=hint)
        self._described: nn.Module | None = copied(TrainingStep(module), torch.device("meta"))
        self._of_loss: list[tuple[str, dict[str, Any]]] = []
        self.planned_step = parallelize(TrainingStep(module), self.optimizers[0], self.plan, pad=self.pad)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.planned_step is not None
        module = self.lightning_module
        if self._described is not None:
            batch = move_data_to_device(args[0], torch.device("meta"))
            (self._of_loss, others), self._described = self._described.logs_of(batch), None
            if others and self.is_global_zero:
                warnings.warn(
                    f"training_step logs {', '.join(dict.fromkeys(others))}, which a planned step does not compute: "
                    "log them in validation_step or in a callback", stacklevel=2,
                )  # fmt: skip
        self.planned_step.steps = module.trainer.global_step
        loss = self.planned_step(args[0]).to(self.root_device, torch.float32)
        for name, options in self._of_loss:
            module.log(name, loss, **options)
        return loss

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The step has done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure runs the step, which updates."""
        assert self.planned_step is not None
        found = closure()
        self.planned_step.optimizer.optimizer._opt_called = True
        return found

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        layout = self.plan.layout
        assert layout is not None
        if self.planned_step is not None and (layout.tensor > 1 or layout.pipeline > 1 or layout.zero_level == 3):
            raise Unsupported(
                "no rank holds the whole module under this plan", where="PlannedStrategy.validation_step",
                hint="Trainer(limit_val_batches=0, num_sanity_val_steps=0), or plan with tensor=1, pipeline=1 and zero below 3",
            )  # fmt: skip
        return super().validation_step(*args, **kwargs)

    # ---- checkpoints: whole; all ranks put them together ---------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.planned_step is None:
            found: dict[str, Any] = super().lightning_module_state_dict()
            return found
        return {name.removeprefix(PREFIX): x for name, x in self.planned_step.state_dict(full=True).items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.planned_step is not None
        return self.planned_step.optimizer_state_dict(full=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.planned_step is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            self.planned_step.load_state_dict({f"{PREFIX}{name}": x for name, x in checkpoint["state_dict"].items()})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.planned_step is not None
        self.planned_step.load_optimizer_state_dict(checkpoint["optimizer_states"][0])
