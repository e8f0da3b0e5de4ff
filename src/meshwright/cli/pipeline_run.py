"""`meshwright pipeline run`: a pipeline plan on real processes, measured beside simulated."""

from __future__ import annotations

import argparse

from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "walk a pipeline plan on real processes: measured beside simulated"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", help="a plan of `meshwright pipeline plan`")
    add("--stages", default="", metavar="FILE.py:FUNCTION", help="function(stages, microbatches) -> (modules, inputs, targets, loss); "
        "without it, stages only wait as long as the plan says")  # fmt: skip
    add("--steps", type=int, default=7, help="measured passes, after one that is not counted (default 7)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the ranks compute (default cpu)")
    add("--timeout", type=float, default=60.0, metavar="S", help="give up after this many seconds without progress (default 60)")
    add("--port", type=int, default=0, help="port of the ranks' rendezvous on this machine (default: any free one)")


def run(args: argparse.Namespace) -> Result:
    import msgspec

    from ..drive.plans import read_plan
    from ..errors import MissingExtra
    from ..io.quantity import show_time

    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("torch", extra="torch", needed_for="running a pipeline") from None
    from ..run.launch.rehearse import rehearse

    found = rehearse(read_plan(args.plan), stages=args.stages, steps=args.steps, device=args.device, timeout_s=args.timeout, port=args.port)
    said = "".join(f" {k}={v}" for k, v in found.options.items() if v)
    what = "paced stages" if found.stages == "paced" else f"stages of {found.stages}"
    lines = [f"{found.strategy}{said} on {found.ranks} processes, {found.microbatches} micro-batches, {what}"]
    action = "" if found.action_overhead_s is None else f"; one action: {show_time(found.action_overhead_s)} beyond its computation"
    lines.append(f"measured first: one message {show_time(found.message_s)}{action}")
    off = found.median_s / found.simulated_s - 1 if found.simulated_s else 0.0
    lines.append(
        f"simulated with these {show_time(found.simulated_s)}; measured {show_time(found.median_s)} (median of {len(found.measured_s)}, "
        f"{show_time(min(found.measured_s))} to {show_time(max(found.measured_s))})"
        + (f": {abs(off) * 100:.1f} % {'more' if off >= 0 else 'less'}" if found.stages == "paced" else "; ranks share this machine's cores")
    )
    lines.append(f"most messages received or expected and not yet used: {', '.join(map(str, found.unused_peak))}")
    if found.copies_equal is not None:
        lines.append(f"gradients of the copies of a stage: {'equal bit by bit' if found.copies_equal else 'DIFFERENT'}")
    if found.worst_difference is not None:
        lines.append(f"loss and gradients against a serial run: {found.worst_difference:.1e} apart at most")
    if found.kfac_done:
        done = ", ".join(f"{n} {kind}" for kind, n in found.kfac_done.items())
        apart = "" if found.kfac_difference is None else f"; preconditioned gradients {found.kfac_difference:.1e} apart from a serial step's at most"
        shared = f"; {show_time(found.shared_s)} per cycle to share inverses" if "sync" in found.kfac_done else ""
        lines.append(f"K-FAC in idle time: {done}{shared}; then {show_time(found.precondition_s)} of preconditioning per step{apart}")
    return Result(msgspec.to_builtins(found), "\n".join(lines), 4 if found.copies_equal is False else 0)
