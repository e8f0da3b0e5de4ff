"""What a rank does in the tests with other people's frameworks: `python zoo_loops.py WHICH FOLDER STEPS fresh|resume`, under torchrun or alone.

With a `plan.json` in the folder it runs that; without one it trains with the framework's own step, on the same samples.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, ROWS = 8, 32
CLIP = 0.05  # below the norm of all gradients
PAD: dict[str, float] | None = None  # `pad_loops` sets it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, features=None, labels=None, **ignored):  # to such a model the Trainer gives the number of targets
        out = self.down(torch.tanh(self.norm(self.up(features))))
        return {"loss": F.cross_entropy(out, labels), "logits": out}

    def floating_point_ops(self, inputs, *options):
        return 1000 * len(inputs["labels"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"features": torch.randn(8, generator=generator), "labels": torch.randint(4, (), generator=generator)} for _ in range(ROWS)]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {k: torch.stack([r[k] for r in rows]) for k in rows[0]}


def plan_of(ranks: int, **degrees: int) -> Any:
    import meshwright as mw

    options: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "recipe": mw.Recipe(clip_norm=CLIP)}
    return mw.plan(make_model(), collate(dataset()[:SAMPLES]), fabric=f"laptop:{ranks}", **options | degrees)


def trainer(folder: Path, steps: int, plan: Any, resume: bool, best: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    import transformers

    import meshwright as mw

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else plan.layout.ranks if plan is not None else 1
    watched: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    } if best else {}  # fmt: skip
    given = transformers.TrainingArguments(
        **watched,
        output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=SAMPLES // world, learning_rate=1e-2, lr_scheduler_type="linear",
        max_grad_norm=CLIP, logging_steps=1, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    model = make_model()
    common: dict[str, Any] = {"model": model, "args": given, "train_dataset": dataset(), "data_collator": collate}
    common["eval_dataset"] = dataset()[: 2 * SAMPLES]
    made = mw.torch.PlannedTrainer(**common, plan=plan, pad=PAD) if plan is not None else InOrder(**common)
    made.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3") if resume else None)
    losses = [x["loss"] for x in made.state.log_history if "loss" in x]
    losses += [x["eval_loss"] for x in made.state.log_history if "eval_loss" in x]
    losses.append(made.evaluate()["eval_loss"])
    losses.append(float(made.state.total_flos))
    state = made.planned_step.state_dict(full=True) if plan is not None else model.state_dict()
    made.save_model(str(folder / "model"))
    return losses, state


def lightning_module() -> Any:
    import lightning.pytorch as lightning

    class Own(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch):
            made = self.net(**batch)
            self.log("own_loss", made["loss"], on_step=True)
            self.log("largest", made["logits"].max())
            return made["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Own()


def changing_modules() -> dict[str, Any]:
    """By what its training_step reads: a module that trains otherwise from step to step."""
    own = type(lightning_module())

    class ByIndex(own):  # type: ignore[misc, valid-type]
        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"] * (2.0 if batch_idx % 2 else 1.0)

    class ByStep(own):  # type: ignore[misc, valid-type]
        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"] * min(1.0, self.global_step / 10)

    class ByEpoch(own):  # type: ignore[misc, valid-type]
        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"] * (1.0 if self.current_epoch == 0 else 0.5)

    return {"batch_idx": ByIndex(), "self.global_step": ByStep(), "self.current_epoch": ByEpoch()}


def lightning_plan(ranks: int, **degrees: int) -> Any:
    import meshwright as mw

    step = mw.torch.TrainingStep(lightning_module())
    options: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "recipe": mw.Recipe(clip_norm=CLIP)}
    return mw.plan(step, collate(dataset()[:SAMPLES]), fabric=f"laptop:{ranks}", **options | degrees)


def lightning_loop(folder: Path, steps: int, plan: Any, resume: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import Callback

    import meshwright as mw

    losses = []

    class Told(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            losses.append(float(outputs["loss"]))
            assert float(trainer.callback_metrics["own_loss"]) == losses[-1]
            if trainer.global_step == 3 and not resume:
                trainer.save_checkpoint(str(folder / "third.ckpt"))

    ranks = plan.layout.ranks if plan is not None else 1
    loader = torch.utils.data.DataLoader(dataset(), batch_size=SAMPLES, collate_fn=collate)
    strategy = mw.torch.PlannedStrategy(plan, pad=PAD) if plan is not None else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[Told()], use_distributed_sampler=False,
        gradient_clip_val=CLIP,
    )  # fmt: skip
    module = lightning_module()
    trainer.fit(module, loader, ckpt_path=str(folder / "third.ckpt") if resume else None)
    return losses, trainer.strategy.lightning_module_state_dict()


def refused(folder: Path) -> dict[str, str]:
    """What is said to arguments that would train something else, by their names."""
    import transformers
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import meshwright as mw
    from meshwright.errors import MeshwrightError

    plan, found = plan_of(1), {}
    wrong = {
        "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "bf16": True, "per_device_train_batch_size": 3,
    }  # fmt: skip
    for name, value in wrong.items():
        good = {"max_grad_norm": CLIP, "per_device_train_batch_size": SAMPLES, "report_to": [], "use_cpu": True}
        given = transformers.TrainingArguments(output_dir=str(folder / "out"), **good | {name: value})
        try:
            mw.torch.PlannedTrainer(model=make_model(), args=given, train_dataset=dataset(), data_collator=collate, plan=plan)
        except MeshwrightError as error:
            found[name] = f"{error.code}: {error} ({error.hint})"
    good = {"max_grad_norm": CLIP, "per_device_train_batch_size": SAMPLES, "report_to": [], "use_cpu": True, "eval_strategy": "steps"}
    try:  # not after the steps before the first evaluation
        mw.torch.PlannedTrainer(
            model=make_model(), args=transformers.TrainingArguments(output_dir=str(folder / "out"), **good), train_dataset=dataset(),
            eval_dataset=dataset()[:5], data_collator=collate, plan=plan_of(2, pipeline=2, data=1),
        )  # fmt: skip
    except MeshwrightError as error:
        found["eval_dataset"] = f"{error.code}: {error} ({error.hint})"
    for name, module in changing_modules().items():
        try:
            mw.plan(mw.torch.TrainingStep(module), collate(dataset()[:SAMPLES]), fabric="laptop:1", tensor=1, pipeline=1)
        except MeshwrightError as error:
            found[name] = f"{error.code}: {error}"
    for name, options in {"mixed_precision": {"mixed_precision": "bf16"}, "accumulation": {"gradient_accumulation_steps": 2}}.items():
        model = make_model()
        AcceleratorState._reset_state(True)  # what was made before it is of another precision
        try:
            mw.torch.accelerated(Accelerator(cpu=True, **options), model, torch.optim.SGD(model.parameters()), plan)
        except MeshwrightError as error:
            found[name] = f"{error.code}: {error}"
    return found


def InOrder(**options: Any) -> Any:
    """The plain Trainer on the same order of samples, dropping what a planned one drops."""
    import transformers
    from torch.utils.data import DataLoader

    from meshwright.run.own_loop.transformers_trainer import Shuffled

    class Own(transformers.Trainer):
        def get_train_dataloader(self):
            sampler = Shuffled(ROWS, self.args.seed, lambda: int(self.state.epoch or 0))
            return DataLoader(self.train_dataset, batch_size=SAMPLES, sampler=sampler, drop_last=True, collate_fn=collate)

    return Own(**options)


def accelerated_loop(folder: Path, steps: int, plan: Any, resume: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, losses = dataset(), []
    if plan is not None:
        import meshwright as mw

        step = mw.torch.accelerated(accelerator, model, optimizer, plan, pad=PAD)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    accelerator.register_for_checkpointing(scheduler)
    first = 0
    if resume:
        accelerator.load_state(str(folder / "saved"))
        first = step.steps
    for i in range(first, steps):
        batch = collate([rows[(i * SAMPLES + k) % ROWS] for k in range(SAMPLES)])
        if plan is not None:
            loss = step(batch)
        else:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
        if plan is not None and i == 2 and not resume:
            accelerator.save_state(str(folder / "saved"))
    return losses, step.state_dict(full=True) if plan is not None else model.state_dict()


def main() -> None:
    which, folder, steps, resume = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
    if which == "refused":
        (folder / "refused.json").write_text(json.dumps(refused(folder)))
        return
    plan = None
    if (folder / "plan.json").is_file():
        import meshwright as mw

        plan = mw.read_plan(folder / "plan.json")
    loops = {"trainer": trainer, "best": partial(trainer, best=True), "accelerate": accelerated_loop, "lightning": lightning_loop}
    losses, state = loops[which](folder, steps, plan, resume)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(state, folder / "state.pt")
        (folder / "losses.json").write_text(json.dumps(losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
