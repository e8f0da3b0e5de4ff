"""`meshwright layout run`: train with a layout plan, one process per device, and count what is sent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .frame import Result

if TYPE_CHECKING:
    from ..run.dtensor.run import LayoutResult

HELP = "train as a layout plan says, compare with the serial run, count every byte"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, nargs="+", help="plans made by `meshwright layout plan`; several take turns step by step")
    run_arguments(parser)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed ones (default 1)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="learning rate (default 0.01)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cpu (gloo, default) or cuda (NCCL)")
    parser.add_argument("--dtype", default="", choices=["", "float32", "float64"], help="precision (default: the model's)")
    parser.add_argument("--verify", action="store_true", help="compare loss and gradients of a step with the serial run")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="end the ranks after this long (default 300)")


def run(args: argparse.Namespace) -> Result:
    from ..run.dtensor.run import read_layout, run_layout

    plans = [read_layout(p) for p in args.plan]
    found = run_layout(
        plans, steps=args.steps, warmup=args.warmup, learning_rate=args.learning_rate, device=args.device, dtype=args.dtype, verify=args.verify,
        timeout_s=args.timeout,
    )  # fmt: skip
    document = {"schema": "meshwright.layout-run", "version": 1, "runs": [row(r) for r in found]}
    return Result(document, "\n".join(map(line, found)), 0 if all(good(r, args.dtype) for r in found) else 1)


def good(result: LayoutResult, dtype: str) -> bool:
    """Bytes as planned and, if it was asked for, equal to the serial run within 1e-9 (float64) or 1e-3 (the rest)."""
    apart = max(result.loss_apart or 0.0, result.gradients_apart or 0.0)
    return result.bytes_equal and apart <= (1e-9 if dtype == "float64" else 1e-3)


def row(result: LayoutResult) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(result), "time_s": result.time_s}


def line(result: LayoutResult) -> str:
    from ..io.quantity import show_size, show_time

    sent = sum(sum(s.values()) for s in result.sent_bytes) / len(result.sent_bytes)
    mesh = " x ".join(map(str, result.mesh))
    text = f"{result.strategy} {mesh}: {show_time(result.time_s)} per step (predicted {show_time(result.predicted_s)})"
    text += f", each rank sent {show_size(round(sent))}"
    text += ", as planned" if result.bytes_equal else ", NOT what was planned"
    if result.loss_apart is not None and result.gradients_apart is not None:
        text += f"; from the serial run: loss {result.loss_apart:.1e}, gradients {result.gradients_apart:.1e}"
    return text
