"""Overhead against budget of several strategies for one training step: a table, and a drawing (self-contained SVG)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..io.quantity import show_size, show_time
from .svg import clean, cut, document, line, rect, text

__all__ = ["CurvePoint", "MemoryCurve", "curve_svg", "curve_text"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 420, 64, 48, 36, 150
COLORS = ("#b3261e", "#1f4e9c", "#0b7a3b", "#8a5a00", "#6a3d9a", "#20828a", "#c2477f", "#555555")


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A plan: its predicted peak and time. `label`: its options where they matter."""

    peak_bytes: int
    time_s: float
    label: str = ""


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True):
    """`points[strategy][i]`: its plan within `budgets[i]`, None where it found none. `floors_s[i]`: no plan within the budget takes less.

    `peers[name]`: plans that take no budget in bytes (PyTorch's own, single cuts), beside what `best` takes at no more than their peak.
    `plain_bytes`, `plain_s`: of keeping everything.
    """

    model: str
    plain_bytes: int
    plain_s: float
    budgets: tuple[int, ...]
    floors_s: tuple[float, ...]
    points: Mapping[str, tuple[CurvePoint | None, ...]]
    peers: tuple[tuple[str, CurvePoint, CurvePoint | None], ...]
    best: str
    evidence: str = ""
    notes: tuple[str, ...] = ()

    def overhead(self, time_s: float) -> float:
        return time_s / self.plain_s - 1 if self.plain_s else 0.0


def curve_text(curve: MemoryCurve) -> str:
    """One line per budget: overhead over keeping everything, in percent; then the peers."""
    names = list(curve.points)
    wide = max(11, *(len(n) for n in names)) if names else 11
    lines = [
        f"{curve.model}: keeping everything takes {show_size(curve.plain_bytes)} and {show_time(curve.plain_s)}",
        "time beyond that, by budget (-: no plan); bound: no plan takes less",
        f"{'budget':>10}  {'bound':>7}  " + "  ".join(f"{n:>{wide}}" for n in names),
    ]
    for i, budget in enumerate(curve.budgets):
        row = [_percent(curve, p.time_s if (p := curve.points[n][i]) else None) for n in names]
        floor = f"{curve.overhead(curve.floors_s[i]):.1%}"
        lines.append(f"{show_size(budget):>10}  {floor:>7}  " + "  ".join(f"{x:>{wide}}" for x in row))
    if curve.peers:
        lines += ["", f"{'':<24} {'peak':>9} {'time':>8}  {curve.best} at that peak"]
        for name, point, ours in curve.peers:
            said = _percent(curve, ours.time_s) if ours else "-"
            lines.append(f"{(name + ' ' + point.label).strip():<24} {show_size(point.peak_bytes):>9} {_percent(curve, point.time_s):>8}  {said}")
    if curve.evidence:
        lines += ["", f"times: {curve.evidence}"]
    return "\n".join([*lines, *curve.notes])


def _percent(curve: MemoryCurve, time_s: float | None) -> str:
    return "-" if time_s is None else f"{curve.overhead(time_s):.1%}"


def curve_svg(curve: MemoryCurve) -> str:
    """Budgets from right (most) to left, overhead upwards; the bound dashed, peers as dots. Equal curves give equal text."""
    shown = [p for row in curve.points.values() for p in row if p] + [p for _, p, _ in curve.peers]
    highest = max([curve.overhead(p.time_s) for p in shown] + [0.01])
    top = min(highest, 1.0) * 1.05
    bottom = min([curve.overhead(p.time_s) for p in shown] + [0.0])  # below 0: faster than the plain operators
    low, high = min([*curve.budgets, *(p.peak_bytes for p in shown)]), max([*curve.budgets, *(p.peak_bytes for p in shown)])
    span = max(high - low, 1)

    def x(size: float) -> float:
        return LEFT + (size - low) / span * (WIDTH - LEFT - RIGHT)

    def y(time_s: float) -> float:
        return HEIGHT - BOTTOM - (min(curve.overhead(time_s), top) - bottom) / (top - bottom) * (HEIGHT - BOTTOM - TOP)

    title = f"{cut(curve.model, 60)}: time beyond keeping everything, by peak"
    parts = [
        text(LEFT, 20, title, size=14, bold=True),
        f'<path d="M{LEFT} {TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" class="rule"/>',
    ]
    for k in range(5):
        size, share = low + span * k / 4, bottom + (top - bottom) * k / 4
        at = HEIGHT - BOTTOM - k / 4 * (HEIGHT - BOTTOM - TOP)
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{show_size(int(size))}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    bound = [(x(b), y(f)) for b, f in zip(curve.budgets, curve.floors_s, strict=True)]
    parts.append(line(bound, "#999999", width=2, dash="5 4"))
    legend = [("bound", "#999999")]
    for k, (name, row) in enumerate(curve.points.items()):
        color = COLORS[k % len(COLORS)]
        legend.append((name, color))
        parts.append(line(sorted({(x(p.peak_bytes), y(p.time_s)) for p in row if p}), color, width=2))
    for k, name in enumerate(dict.fromkeys(name for name, _, _ in curve.peers)):
        color = COLORS[(len(curve.points) + k) % len(COLORS)]
        legend.append((name, color))
        for other, p, _ in curve.peers:
            if other == name:
                said = clean(f"{name} {p.label}: {show_size(p.peak_bytes)}, {curve.overhead(p.time_s):.1%}")
                parts.append(f'<circle cx="{x(p.peak_bytes):.1f}" cy="{y(p.time_s):.1f}" r="4" fill="{color}"><title>{said}</title></circle>')
    for k, (name, color) in enumerate(legend):
        at = TOP + 16 * k
        parts += [rect(WIDTH - RIGHT + 14, at, 10, 10, fill=color), text(WIDTH - RIGHT + 30, at + 9, cut(name, 20))]
    return document(WIDTH, HEIGHT, parts, title=title, summary=curve_text(curve))
