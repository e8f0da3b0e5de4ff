"""Memory over time, per rank: a curve that goes up where a buffer comes to life and down where it dies."""

from __future__ import annotations

import re

import numpy as np

from ..explain.numbers import bytes_text, seconds_text
from ..timeline import Timeline
from .svg import PALETTE, document, legend, line, rect, text, ticks

__all__ = ["memory_curves", "memory_panel", "memory_svg"]

MAX_CURVES = len(PALETTE)
MAX_POINTS = 1200  # of a curve: more are thinned to the highest of each stretch
_RANK = re.compile(r"memory of rank (\d+)$")
LEFT, RIGHT, TOP = 92, 24, 44

Curve = tuple[str, np.ndarray, np.ndarray]  # whose, seconds, bytes from then on


def memory_svg(timeline: Timeline, *, title: str = "", width: float = 960, height: float = 320) -> str:
    """The curves of the ranks that need most. Equal timelines give equal text."""
    curves = memory_curves(timeline)
    marks, note = memory_panel(curves, end_s=timeline.makespan_s, x=LEFT, y=TOP, width=width - LEFT - RIGHT, height=height - TOP - 66)
    head = title or f"memory over time, {timeline.origin}"
    keys, tall = legend(LEFT, height - 20, [(whose, PALETTE[i]) for i, (whose, _, _) in enumerate(curves)], width=width - LEFT - RIGHT)
    body = [text(LEFT, 24, head, size=15, bold=True), *marks, *keys]
    return document(width, height + max(0.0, tall - 17), body, title=head, summary=note)


def memory_curves(timeline: Timeline) -> list[Curve]:
    """Equal curves once, of the ranks with the highest peaks; at most as many as there are colours."""
    found: dict[tuple[bytes, bytes], list[int]] = {}
    for name, (time_s, value) in timeline.counters.items():
        if (match := _RANK.search(name)) and len(time_s):
            found.setdefault((np.asarray(time_s, np.float64).tobytes(), np.asarray(value, np.float64).tobytes()), []).append(int(match[1]))
    highest = sorted(found.items(), key=lambda item: (-float(np.frombuffer(item[0][1]).max()), item[1]))[:MAX_CURVES]
    return [(_whose(ranks), np.frombuffer(t), np.frombuffer(v)) for (t, v), ranks in sorted(highest, key=lambda item: item[1])]


def _whose(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}{f', ... ({len(ranks)})' if len(ranks) > 4 else ''}"


def memory_panel(
    curves: list[Curve], *, end_s: float, x: float, y: float, width: float, height: float, top_bytes: float = 0.0
) -> tuple[list[str], str]:
    """The curves in a box whose left is 0 s and whose right is the end; and what they say. `top_bytes`: what the box must hold beside them."""
    if not curves:
        return [text(x, y + 20, "no memory was recorded", kind="soft")], "no memory was recorded"
    end = max(end_s, max(float(t[-1]) for _, t, _ in curves)) or 1.0
    top = max(top_bytes, max(float(v.max()) for _, _, v in curves)) or 1.0
    marks = [rect(x, y, width, height, kind="panel")]
    for value in ticks(top, 4):
        at = y + height - value / top * height
        marks += [f'<path class="rule" d="M{x:.1f} {at:.1f} h{width:.1f}"/>', text(x - 6, at + 4, bytes_text(value), kind="soft", anchor="end")]
    for value in ticks(end, 6):
        marks.append(text(x + value / end * width, y + height + 15, seconds_text(value), kind="soft", anchor="middle"))
    for i, (_, time_s, amounts) in enumerate(curves):
        points: list[tuple[float, float]] = []
        before: float | None = None
        for when, amount in zip(*_thinned(time_s, amounts), strict=True):
            px, py = x + when / end * width, y + height - amount / top * height
            points += [(px, py)] if before is None else [(px, before), (px, py)]
            before = py
        points.append((x + width, before if before is not None else y + height))
        marks.append(line(points, PALETTE[i]))
    peaks = ", ".join(f"{whose} {bytes_text(float(v.max()))}" for whose, _, v in curves)
    return marks, f"memory peaks: {peaks}"


def _thinned(time_s: np.ndarray, value: np.ndarray) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points; each stands for the highest of its stretch, so that no peak is lost."""
    if len(time_s) <= MAX_POINTS:
        return time_s.tolist(), value.tolist()
    first = np.linspace(0, len(time_s), MAX_POINTS, endpoint=False).astype(np.int64)
    return time_s[first].tolist(), np.maximum.reduceat(value, first).tolist()
