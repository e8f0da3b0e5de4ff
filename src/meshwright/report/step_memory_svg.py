"""Memory over a planned training step: bytes alive operator by operator, the peak and the budget marked, forward and backward told apart."""

from __future__ import annotations

import numpy as np

from ..explain.numbers import bytes_text, seconds_text
from ..graph.step_graph import StepGraph, StepPlan
from ..simulate.step_memory import simulate_step
from .memory_svg import LEFT, RIGHT, TOP, memory_panel
from .svg import PALETTE, cut, document, line, text

__all__ = ["step_memory_svg"]

WIDTH, HEIGHT = 960, 360
BELOW_HEIGHT = 54  # pixels below the panel: ticks, names of the passes
PEAK = "#b3261e"


def step_memory_svg(graph: StepGraph, plan: StepPlan) -> str:
    """Operators stand where they run, each as wide as it takes by the graph's costs. Equal plans give equal text.

    Raises: UsageError for a plan that is none of this graph.
    """
    run = simulate_step(graph, plan.actions, boundary=plan.boundary)
    ways = [graph.nodes[a.node] if a.alternative < 0 else graph.nodes[a.node].alternatives[a.alternative] for a in plan.actions]
    starts = np.concatenate([[0.0], np.cumsum([way.time_s for way in ways])])
    if starts[-1] <= 0:  # without costs every operator is as wide as any other
        starts = np.arange(len(ways) + 1, dtype=np.float64)
    end, alive = float(starts[-1]) or 1.0, np.asarray(run.bytes_at or (graph.fixed_bytes(),), np.float64)
    x, y, width, height = float(LEFT), float(TOP + 16), float(WIDTH - LEFT - RIGHT), float(HEIGHT - TOP - 16 - BELOW_HEIGHT)
    top = float(max(run.peak_bytes, plan.budget_bytes or 0)) or 1.0
    marks, _ = memory_panel([("", starts[:-1] if ways else starts, alive)], end_s=end, top_bytes=top, x=x, y=y, width=width, height=height)

    def at(position: int) -> float:
        return x + float(starts[position]) / end * width

    def level(size_bytes: float) -> float:
        return y + height - size_bytes / top * height

    fixed = graph.fixed_bytes()
    marks += [line([(x, level(fixed)), (x + width, level(fixed))], PALETTE[-1], dash="2 3"), _named(x + 6, level(fixed) - 4, "always there")]
    if plan.budget_bytes is not None:
        marks.append(line([(x, level(plan.budget_bytes)), (x + width, level(plan.budget_bytes))], PALETTE[1], dash="6 4"))
        marks.append(_named(x + 6, level(plan.budget_bytes) + 13, f"budget {bytes_text(plan.budget_bytes)}"))
    turn = at(min(plan.boundary, len(ways)))
    marks.append(f'<path class="rule" d="M{turn:.1f} {y:.1f} v{height:.1f}"/>')
    for name, left, right in (("forward", x, turn), ("backward and update", turn, x + width)):
        marks += [text((left + right) / 2, y + height + 34, name, kind="soft", anchor="middle")] if right - left > 7 * len(name) else []
    said = f"peak {bytes_text(run.peak_bytes)}" + (f" at {_operator(graph, plan, run.peak_at)}" if ways else "")
    place = at(run.peak_at)
    marks.append(f'<circle cx="{place:.1f}" cy="{level(run.peak_bytes):.1f}" r="4" fill="{PEAK}"/>')
    late = place > x + width / 2
    marks.append(text(place + (-8 if late else 8), y - 5, cut(said, 90), anchor="end" if late else "", fill=PEAK))
    head = f"{cut(graph.name, 60)}: memory over the step, {plan.strategy}"
    whole = f"{said}; the step takes {seconds_text(plan.time_s)}, {len(ways)} operators; always there {bytes_text(fixed)}"
    return document(WIDTH, HEIGHT, [text(LEFT, 24, head, size=15, bold=True), *marks], title=head, summary=whole)


def _named(x: float, y: float, value: str) -> str:
    return text(x, y, value, kind="soft")


def _operator(graph: StepGraph, plan: StepPlan, position: int) -> str:
    node = graph.nodes[plan.actions[position].node]
    return f"{node.phase} {node.name}" + (f" of {node.module}" if node.module else "")
