"""Flags that say how a job is trained: optimizer, schedule, average of the weights."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgspec import UnsetType

    from ..job import Recipe, Training
    from ..plan.precision import Precision

__all__ = ["precision_of", "recipe_arguments", "recipe_of", "require_made"]


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is trained", "part of the plan: a run follows it, and a checkpoint belongs to it")
    group.add_argument(
        "--optimizer", default="adamw", metavar="NAME[:OPTION=VALUE,...]",
        help="adamw (default), sgd, any of torch.optim, with options: adamw:weight_decay=0.1,betas=0.9,0.95; or module:function, called with the "
        "model's (name, parameter) pairs and the learning rate",
    )  # fmt: skip
    group.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate (default 0.001)")
    group.add_argument(
        "--no-decay", default="", metavar="PATTERN,...",
        help="no weight decay for parameters with one of these in their names, e.g. bias,norm; with * as a pattern; 1d: of at most one dimension",
    )  # fmt: skip
    group.add_argument(
        "--schedule", default="", metavar="NAME[:OPTION=VALUE,...]",
        help="of the learning rate: cosine:steps=1000,warmup=100,end=0.1, linear, constant, inverse-sqrt, any of torch.optim.lr_scheduler, or "
        "module:function, called with the optimizer",
    )  # fmt: skip
    group.add_argument("--clip-norm", type=float, default=0.0, metavar="NORM", help="scale gradients so that the norm of all is at most this")
    group.add_argument("--clip-value", type=float, default=0.0, metavar="VALUE", help="clip every element of the gradients to this")
    group.add_argument(
        "--precision", choices=("fp32", "mixed", "bf16-autocast", "fp16-autocast"), default="fp32",
        help="fp32 (default); mixed: weights and messages in bfloat16, the optimizer on float32 masters, as `layout search` has it; or forward and "
        "loss under torch.autocast, float16 with dynamic loss scaling",
    )  # fmt: skip
    group.add_argument(
        "--batch-statistics", choices=("global",), default="",
        help="global: BatchNorm, contrasts and balance losses see the whole batch, which the replicas share within the step; one micro-batch each",
    )  # fmt: skip
    group.add_argument(
        "--reproducible", choices=("run", "tree"), default="run",
        help="tree: gradients are one fold over the step's micro-batches, so that training has equal bits at 1, 2, 4, ... ranks (needs --microbatch)",
    )  # fmt: skip
    group.add_argument("--ema", type=float, default=0.0, metavar="DECAY", help="keep a moving average of the weights, e.g. 0.999")


def recipe_of(args: argparse.Namespace) -> Recipe | UnsetType:
    """What the flags ask for; unset where that is nothing."""
    from msgspec import UNSET

    from ..job import Recipe

    autocast = args.precision.endswith("-autocast")
    if (autocast and args.model is None) or (args.precision != "fp32" and args.cost == "measured"):
        from ..errors import UsageError

        why = "operators are measured in float32" if args.cost == "measured" else "a captured graph has the precision in which it was captured"
        raise UsageError(why, where="--precision", hint="give --model, and another --cost")
    patterns = tuple(p.strip() for p in args.no_decay.split(",") if p.strip())
    made = Recipe(
        no_decay=patterns, schedule=args.schedule, ema=args.ema, clip_norm=args.clip_norm, clip_value=args.clip_value,
        precision=args.precision if autocast else "fp32",
        batch_statistics=args.batch_statistics, reproducible=args.reproducible,
    )
    return UNSET if made == Recipe() else made


def precision_of(args: argparse.Namespace) -> Precision | None:
    """Of the layout, where `--precision mixed` asks for one; None: that of the captured graph."""
    from ..plan.narrowed import with_optimizer
    from ..plan.precision import MIXED

    return with_optimizer(MIXED, args.optimizer.partition(":")[0]) if args.precision == "mixed" else None


def require_made(job: Training) -> None:
    """Makes the optimizer and the schedule once, of nothing, and looks the loss up, so that what is refused is told before a model is captured.

    Raises: as `make_optimizer`, `make_schedule` and `loss_function`.
    """
    from ..capture.losses import loss_function
    from ..run.train.update import require_update

    require_update(job)
    loss_function(job.loss)
