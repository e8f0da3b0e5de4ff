"""transformers' `Trainer` on a plan: `PlannedTrainer(..., plan=plan)`, under torchrun on the plan's ranks.

Each optimizer step of the Trainer is one step of the plan: `training_step` hands it the global batch, and the update that the Trainer asks for
afterwards has been done. Every rank reads the global batch (`per_device_train_batch_size` times the world must be the plan's); incomplete ones are
left out. Losses, logging, callbacks, schedulers, saving and resuming are the Trainer's own; saved models are whole, in the model's names.

Clipping and bf16 are the plan's (`Recipe(clip_norm=..., precision="bf16-autocast")`); `max_grad_norm` says the same number, `bf16` the same or
nothing. Where no rank holds the whole model, `evaluate` gives the loss by the plan's own forward passes. Not supported, and refused: gradient
accumulation of the Trainer's (set `gradient_accumulation_steps=1`), another `max_grad_norm` or precision, `fp16` (plan it), schedules of the plan
(the Trainer has its own), `label_smoothing_factor` and `compute_loss_func` (the plan's loss counts), FSDP and DeepSpeed; predictions and metrics
where no rank holds the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ...drive.plans import read_plan
from ...errors import MissingExtra, Unsupported, UsageError
from ...plan.plan import Plan
from .parallelize import parallelize
from .recipe import recipe_of
from .shapes import Pad
from .step import ParallelStep

try:
    import transformers
    from safetensors.torch import load_file
    from transformers.trainer_utils import EvalLoopOutput
except ImportError as error:
    raise MissingExtra("transformers", extra="transformers", needed_for="PlannedTrainer") from error

__all__ = ["PlannedTrainer", "Shuffled"]

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the Trainer's own names


class _Planned(nn.Module):  # type: ignore[misc]
    """The model as the Trainer gets it back: something else than the model, so that nothing is wrapped around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Shuffled(Sampler):  # type: ignore[misc]
    """Every epoch's order from seed and epoch alone: the same at all ranks, and after a resume."""

    def __init__(self, size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
        return iter(torch.randperm(self.size, generator=generator).tolist())


class PlannedTrainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose steps are the plan's. `plan`: of `meshwright.plan(model, one global batch of the collator, ...)`, or a file;
    `planned_loss`: the loss function that was planned with, if there was one. `pad`: as of `parallelize`, for a plan of several shapes; the collator
    may then leave every batch as long as its longest sample.

    Raises: UsageError for arguments of the Trainer that would train something else (the hint says what to set), and what `parallelize` raises.
    """

    def __init__(
        self, *args: Any, plan: Plan | str | Path, planned_loss: Callable[..., Any] | None = None, pad: Pad = None, **options: Any
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else read_plan(plan)
        self.planned_loss, self.pad = planned_loss, pad
        self.planned_step: ParallelStep | None = None
        super().__init__(*args, **options)
        self._require_plain()
        held = self.eval_dataset if str(getattr(self.args.eval_strategy, "value", self.args.eval_strategy)) != "no" else None
        for dataset in held.values() if isinstance(held, dict) else [held] if held is not None else []:
            self._require_evaluation(dataset)

    def _require_plain(self) -> None:
        layout, given = self.plan.layout, self.args
        if layout is None:
            raise UsageError(f"the plan is of a {self.plan.kind}", where="plan", hint="a plan of meshwright.plan")
        recipe = recipe_of(self.plan)
        samples = given.per_device_train_batch_size * given.world_size
        wrong = [
            (given.gradient_accumulation_steps != 1, "gradient_accumulation_steps", "set it to 1: the plan has its own micro-batches"),
            (float(given.max_grad_norm or 0) != recipe.clip_norm, "max_grad_norm", f"set it to {recipe.clip_norm:g}, the plan's Recipe.clip_norm"),
            (bool(given.fp16), "fp16", "leave it off, and plan with Recipe(precision='fp16-autocast')"),
            (bool(given.bf16) and recipe.precision != "bf16-autocast", "bf16", f"leave it off: the plan's precision is {recipe.precision}"),
            (bool(recipe.schedule), "lr_scheduler_type", "plan without a schedule: the Trainer has its own"),
            (bool(given.label_smoothing_factor), "label_smoothing_factor", "plan with a loss that smooths"),
            (self.compute_loss_func is not None, "compute_loss_func", "plan with that loss"),
            (bool(self.is_fsdp_enabled or self.is_deepspeed_enabled), "fsdp/deepspeed", "the plan divides the model"),
            (samples != layout.global_batch, "per_device_train_batch_size", f"times the world it is {samples}, the plan has {layout.global_batch}"),
        ]  # fmt: skip
        for is_wrong, name, hint in wrong:
            if is_wrong:
                raise UsageError(f"a PlannedTrainer does not take this {name}", where=f"TrainingArguments.{name}", hint=hint)

    def get_train_dataloader(self) -> Any:
        """Global batches, the same at every rank."""
        layout, dataset = self.plan.layout, self.train_dataset
        assert layout is not None
        if dataset is None:
            raise UsageError("there is no train_dataset", where="PlannedTrainer", hint="give one")
        streamed = isinstance(dataset, IterableDataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = None if streamed else Shuffled(len(dataset), seed, lambda: int(self.state.epoch or 0))
        return DataLoader(
            dataset, batch_size=layout.global_batch, sampler=sampler, drop_last=True, num_workers=self.args.dataloader_num_workers,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
        )  # fmt: skip

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training or isinstance(model, _Planned):
            return model.module if isinstance(model, _Planned) and not training else model
        if self.planned_step is None:
            self.planned_step = parallelize(model, self.optimizer, self.plan, loss=self.planned_loss, pad=self.pad)
            self.planned_step.optimizer.ignore_calls = True
        return _Planned(model)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert self.planned_step is not None
        model.train()
        self.planned_step.steps = self.state.global_step
        loss = self.planned_step(self._prepare_inputs(inputs))
        return loss.to(self.args.device, torch.float32)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model)  # the step has clipped

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Where the plan computes it; gradients are zero again."""
        assert self.planned_step is not None
        return self.planned_step.metrics().get("gradient_norm")

    def _get_num_items_in_batch(self, *args: Any, **options: Any) -> None:
        """None: losses are means of what the model is given. With a count, the Trainer multiplies an evaluation's loss by its processes."""

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share: every rank is given the global batch, and the Trainer adds up the ranks'."""
        return float(super().floating_point_ops(inputs) / self.args.world_size)

    def _holds_all(self) -> bool:
        layout = self.plan.layout
        return layout is None or (layout.tensor == 1 and layout.pipeline == 1 and layout.zero_level < 3)

    def _require_evaluation(self, dataset: Any, description: str = "") -> None:
        """Raises: Unsupported where this dataset could not be evaluated."""
        layout = self.plan.layout
        samples = 0 if isinstance(dataset, IterableDataset) else len(dataset)
        if self._holds_all() or layout is None:
            return
        if description == "Prediction" or self.compute_metrics is not None or not samples or samples % layout.global_batch:
            raise Unsupported(
                "no rank holds the whole model under this plan: only the loss of whole global batches is evaluated", where="PlannedTrainer.evaluate",
                hint=f"a dataset of a multiple of {layout.global_batch} samples and no compute_metrics; or save the model and evaluate it by itself, "
                "or plan with tensor=1, pipeline=1 and zero below 3",
            )  # fmt: skip

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> Any:
        layout, step = self.plan.layout, self.planned_step
        if step is None or layout is None or self._holds_all():
            return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        dataset = dataloader.dataset
        samples = len(dataset)
        self._require_evaluation(dataset, description)
        batches = DataLoader(dataset, batch_size=layout.global_batch, collate_fn=dataloader.collate_fn)
        losses = [float(step.evaluate(self._prepare_inputs(batch))) for batch in batches]
        metrics = {f"{metric_key_prefix}_loss": sum(losses) / len(losses)}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)

    # ---- saving: whole, by rank 0; all ranks put it together ---------------------------------------------------------
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.planned_step is None:
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        state = {n: x.clone() for n, x in self.planned_step.state_dict(full=True).items()}
        self._save(output_dir or self.args.output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.planned_step is not None
        state = self.planned_step.optimizer_state_dict(full=True)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER))  # noqa: PTH118
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))  # noqa: PTH118

    def _load_best_model(self) -> None:
        """Into the ranks' parts: the module itself may have empty parameters here."""
        assert self.planned_step is not None
        files = sorted(Path(str(self.state.best_model_checkpoint)).glob("model*.safetensors"))
        self.planned_step.load_state_dict({name: x for file in files for name, x in load_file(file).items()})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER).is_file():
            return
        assert self.planned_step is not None
        self.planned_step.load_optimizer_state_dict(torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, map_location="cpu", weights_only=True))
