"""Flags of every command that plans the training step of a model function."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..probe.steps.measured import MeasuredStep

__all__ = ["arguments", "measured", "strategy"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """`--model` and what belongs to it. `--batch`, `--budget` and `--strategy` are the command's own."""
    group = parser.add_argument_group(
        "a model's whole step", "--budget counts everything on the device: parameters, gradients, optimizer state, activations, workspaces; "
        "60% or 0.6 is that share of the peak without recomputation. --strategy: auto (default) or a name, see docs/memory.md",
    )  # fmt: skip
    group.add_argument("--model", help="the model function, FILE.py:function or module:function")
    group.add_argument("--loss", default="cross-entropy", help="cross-entropy (default), mse, output, or module:function")
    group.add_argument("--optimizer", default="none", help="optimizer whose state is counted: none (default), sgd, momentum, adam")
    group.add_argument(
        "--implementations", default="exact", metavar="KINDS",
        help="what operators may run as: exact (default: others with the same bits: in place, in pieces, packed), rounding, bf16, int8 (those too, "
        "by commas), host (results may wait in the host's memory, too), or plain",
    )  # fmt: skip
    group.add_argument(
        "--layout", default="", help="memory layout of images: given, channels-last, or fastest (tries both; default where rounding is allowed)"
    )  # fmt: skip
    group.add_argument("--costs", type=Path, help="file that keeps measured operator costs (default: the user's cache folder)")
    group.add_argument("--seed", type=int, default=0, help="seed of the model's construction and of the planner (default 0)")


def measured(args: argparse.Namespace, *, batch: int | None = None, device: str = "fake") -> tuple[MeasuredStep, ...]:
    """In the layouts that it may have, the faster one first."""
    from ..decide.memory import strategy as named
    from ..probe.steps.measured import measured_steps

    wanted = strategy(args)
    chooses = wanted == "auto" or named(wanted, "step", where="--strategy", also=("auto",)).chooses_ways
    return measured_steps(
        args.model, loss=args.loss, batch_size=batch or args.batch, optimizer=args.optimizer, costs=args.costs, seed=args.seed, device=device,
        implementations=args.implementations if chooses else "plain", layout=args.layout,
    )


def strategy(args: argparse.Namespace) -> str:
    return args.strategy or "auto"
