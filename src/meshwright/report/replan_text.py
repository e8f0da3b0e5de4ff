"""A plan made again after a loss: the new step, what restarting moves and takes, and from how many steps on it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..explain.numbers import bytes_text, seconds_text
from .plan_text import plan_document

if TYPE_CHECKING:
    from ..drive.training.replan import Candidate, TrainReplan

__all__ = ["replan_document", "replan_text"]


def _row(c: Candidate, chosen: Candidate) -> dict[str, Any]:
    t = c.transfers
    return {
        "what": c.name, "devices": len(c.evaluated.placement), "time_s": c.step_s, "restart_s": c.restart.time_s,
        "restart_bound_s": float(c.restart.bound_s),
        "reused_bytes": sum(t.reused_bytes), "received_bytes": sum(t.received_bytes), "stored_bytes": sum(t.stored_bytes),
        "lost": len(t.lost), "breaks_even_steps": chosen.breaks_even_after(c),
    }  # fmt: skip


def replan_document(found: TrainReplan, *, path: str = "") -> dict[str, Any]:
    return {
        **plan_document(found.plan, path=path), "schema": "meshwright.train.replan", "version": 1, "old_time_s": found.old_time_s,
        "restart": found.plan.decisions["restart"], "candidates": [_row(c, found.chosen) for c in found.candidates],
    }  # fmt: skip


def replan_text(found: TrainReplan, *, written: str = "") -> str:
    c, t = found.chosen, found.chosen.transfers
    layout = c.evaluated.layout
    total = sum(t.needed_bytes)
    lines = [
        f"layout       data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} on {layout.ranks} devices "
        f"({', '.join(filter(None, (c.evaluated.candidate.schedule, str(c.evaluated.candidate.division), c.evaluated.placement_name)))})",
        f"step         {seconds_text(c.step_s)}, before {seconds_text(found.old_time_s)}",
        f"restart      {seconds_text(c.restart.time_s)}, bound {seconds_text(float(c.restart.bound_s))} ({c.restart.bound_where})",
        f"bytes        {bytes_text(total)} needed: {bytes_text(sum(t.reused_bytes))} reused in place, "
        f"{bytes_text(sum(t.received_bytes))} from other ranks, {bytes_text(sum(t.stored_bytes))} from the checkpoint",
    ]
    even = c.breaks_even_after(found.quickest)
    if found.quickest.evaluated.identity == c.evaluated.identity:
        lines.append("break-even   no candidate restarts faster")
    elif even is not None:
        q = found.quickest
        lines.append(f"break-even   {even} steps, against {q.name}: restart {seconds_text(q.restart.time_s)}, step {seconds_text(q.step_s)}")
    else:
        lines.append(f"break-even   none: {found.quickest.name} is no slower per step, and restarts in {seconds_text(found.quickest.restart.time_s)}")
    lines.append("candidates   step        restart     moved       layout")
    for x in found.candidates[:6]:
        lines.append(
            f"             {seconds_text(x.step_s):<11} {seconds_text(x.restart.time_s):<11} {bytes_text(x.transfers.moved_bytes):<11} {x.name}"
        )
    return "\n".join(lines) + (f"\nplan written to {written}" if written else "")
