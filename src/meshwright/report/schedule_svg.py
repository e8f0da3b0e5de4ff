"""A schedule as a picture: ranks from top to bottom, time from left to right, memory below on the same axis.

A rank has one row for what it computes, coloured by what it is (forward, backward, ...) and numbered by micro-batch where there is room, and
thin rows below it for messages under way. Several stages on one rank alternate between a full and a lighter shade. Works for every timeline:
of pipelines, whole training steps and collectives, predicted or measured; without the program, phases take the place of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..explain.numbers import seconds_text
from ..program.program import Kind, Part, Program
from ..timeline import Timeline, Transfers
from .memory_svg import memory_curves, memory_panel
from .svg import PALETTE, cut, document, legend, rect, text, ticks

__all__ = ["schedule_svg"]

F64 = NDArray[np.float64]
WIDTH, LEFT, RIGHT, TOP = 1120, 84, 20, 52
TALL, THIN, GAP = 24, 6, 8  # pixels: a row of steps, one of messages, between ranks
MAX_RANKS = 64  # rows of ranks that are drawn
MAX_BARS = 20_000  # at most four times as many spans are drawn, and a fifth of it with tips
MAX_THIN_ROWS = 4  # of messages under a rank's row; what overlaps more is left out
MEMORY_HEIGHT = 120  # pixels of the panel below the schedule

# What a bar is -> (name in the legend, colour). Compute by the op's name, messages by phase.
_KINDS = {
    "F": ("forward", "#3b6fb6"), "B": ("backward", "#2f8f5b"), "I": ("backward: input", "#1f9d8f"), "W": ("backward: weights", "#b5942c"),
    "optimizer": ("optimizer", "#8a6bbf"), "loss": ("loss", "#b34d78"),
    "forward": ("forward", "#3b6fb6"), "backward": ("backward", "#2f8f5b"), "send": ("messages", "#7a8797"),
    "pipeline": ("pipeline messages", "#9aa3af"), "gradient": ("gradient messages", "#b3592e"),
    "tensor-parallel": ("tensor-parallel messages", "#2c8c99"),
}  # fmt: skip
_MESSAGES = ("send", "pipeline", "gradient", "tensor-parallel")
_LIGHTER = {colour: f"#{''.join(f'{(int(colour[i : i + 2], 16) + 255) // 2:02x}' for i in (1, 3, 5))}" for _, colour in _KINDS.values()}


@dataclass(frozen=True)
class _Bar:
    start_s: float
    end_s: float
    kind: str
    colour: str
    label: str = ""
    tip: str = ""


@dataclass
class _Row:
    """One rank: computations, and messages in as few thin lines as hold them without overlap."""

    compute: list[_Bar] = field(default_factory=list)
    thin: list[list[_Bar]] = field(default_factory=list)
    hidden: int = 0


def schedule_svg(timeline: Timeline, program: Program | None = None, *, title: str = "") -> str:
    """`program`: the one whose step ids the timeline has (calls inlined). At most 64 ranks are drawn. Equal inputs give equal text."""
    rows, used, left_out = _rows(timeline, program)
    end = timeline.makespan_s or (float(timeline.spans.end_s.max()) if len(timeline.spans) else 0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / end
    head = title or f"schedule, {timeline.origin} on {timeline.run_fabric}"
    panels: list[str] = []
    bars: list[str] = []
    y = float(TOP)
    drawn = 0
    for rank, row in rows.items():
        lines = ([(row.compute, TALL)] if row.compute or not row.thin else []) + [(thin, THIN) for thin in row.thin]
        panels.append(rect(LEFT, y, WIDTH - LEFT - RIGHT, sum(high for _, high in lines), kind="panel"))
        panels.append(text(LEFT - 8, y + min(sum(high for _, high in lines), TALL) / 2 + 4, f"rank {rank}", anchor="end"))
        for shown, high in lines:
            bars += _bars(shown, y, high, scale, tips=drawn + len(shown) <= MAX_BARS // 5)
            drawn += len(shown)
            y += high
        y += GAP
    for value in ticks(end, 8):
        x = LEFT + value * scale
        panels.append(f'<path class="rule" d="M{x:.1f} {TOP - 4} V{y - GAP + 4:.1f}" stroke-dasharray="2 3"/>')
        bars.append(text(x, y + 10, seconds_text(value), kind="soft", anchor="middle"))
    y += 24
    keys, tall = legend(LEFT, y, list(dict.fromkeys(used.values())), width=WIDTH - LEFT - RIGHT)
    y += tall + 12
    curves, words = memory_curves(timeline), ""
    below: list[str] = []
    if curves:
        below, words = memory_panel(curves, end_s=timeline.makespan_s, x=LEFT, y=y + 10, width=WIDTH - LEFT - RIGHT, height=MEMORY_HEIGHT)
        more, tall = legend(LEFT, y + MEMORY_HEIGHT + 36, [(f"memory of {w}", PALETTE[i]) for i, (w, _, _) in enumerate(curves)],
                            width=WIDTH - LEFT - RIGHT)  # fmt: skip
        below += more
        y += MEMORY_HEIGHT + 36 + tall + 8
    said = _subtitle(rows, timeline, left_out)
    top = [text(16, 24, cut(head, 110), size=15, bold=True), text(16, 41, said, kind="soft")]
    summary = ". ".join(x for x in (said, _busy(rows, end), words) if x)
    return document(WIDTH, y, [*top, *panels, *bars, *keys, *below], title=head, summary=summary)


# ---- what is drawn -----------------------------------------------------------------------------------------------------
def _rows(timeline: Timeline, program: Program | None) -> tuple[dict[int, _Row], dict[str, tuple[str, str]], int]:
    """Rank -> its bars; kind -> (name, colour) for the legend; ranks that are not drawn."""
    spans = timeline.spans
    ranks = np.unique(spans.rank)
    known = ranks[ranks < program.ranks] if program is not None else ranks
    rows = {int(r): _Row() for r in known[:MAX_RANKS]}
    used: dict[str, tuple[str, str]] = {}
    shades: dict[tuple[int, int], bool] = {}
    for rank, step, start, end, phase, given in _intervals(timeline, program):
        row = rows.get(rank)
        if row is None or end <= start:
            continue
        kind, label, what, stage = _what(program, step, phase, given)
        if kind not in used:
            name, colour = _look(kind, used)
            waits = program is None and kind in _MESSAGES  # sends and receives cannot be told apart then, and receives begin with waiting
            used[kind] = (f"{name}, with waiting" if waits else name, colour)
        colour = used[kind][1]
        if stage >= 0 and shades.setdefault((rank, stage), bool(sum(r == rank for r, _ in shades) % 2)):
            colour = _LIGHTER.get(colour, colour)
        bar = _Bar(start, end, kind, colour, label, f"{what}: {seconds_text(start)} + {seconds_text(end - start)}")
        if _is_compute(program, step, kind):
            row.compute.append(bar)
        else:
            _place(row, bar)
    return rows, used, len(known) - len(rows)


def _intervals(timeline: Timeline, program: Program | None) -> Iterator[tuple[int, int, float, float, str, str]]:
    """(rank, step, start, end, phase, name) of what is drawn, by start: computations, and messages while they move.

    A receive begins when it is posted, so its span says little: messages are drawn where they are sent, and where the timeline has transfers
    from the first link to the last.
    """
    spans = timeline.spans
    zero = float(spans.start_s.min()) if len(spans) else 0.0
    start, end = spans.start_s - zero, spans.end_s - zero
    chosen = np.ones(len(spans), np.bool_)
    if program is not None:
        step = np.maximum(spans.step, 0)
        sends = (program.steps.kind[step] == Kind.TRANSFER) & ((program.steps.parts[step] & Part.SEND) > 0)
        chosen = (spans.step < 0) | (program.steps.kind[step] == Kind.COMPUTE) | sends
        if timeline.transfers is not None:
            start, end = _moving(timeline, timeline.transfers, start, end, zero)
    order = np.lexsort((end, start))
    for i in order[chosen[order]][: 4 * MAX_BARS].tolist():
        phase, name = spans.phase[i] if spans.phase else "", spans.name[i] if spans.name else ""
        yield int(spans.rank[i]), int(spans.step[i]), float(start[i]), float(end[i]), phase, name


def _moving(timeline: Timeline, t: Transfers, start: F64, end: F64, zero: float) -> tuple[F64, F64]:
    """Start and end of every span; of one that sends, when its message is on links."""
    width = int(max(timeline.spans.iteration.max(initial=0), t.iteration.max(initial=0))) + 1
    keys, which = np.unique(t.step.astype(np.int64) * width + t.iteration, return_inverse=True)
    first, last = np.full(len(keys), np.inf), np.full(len(keys), -np.inf)
    np.minimum.at(first, which, t.start_s - zero)
    np.maximum.at(last, which, t.end_s - zero)
    mine = timeline.spans.step.astype(np.int64) * width + timeline.spans.iteration
    at = np.minimum(np.searchsorted(keys, mine), max(len(keys) - 1, 0))
    found = keys[at] == mine if len(keys) else np.zeros(len(mine), np.bool_)
    return np.where(found, first[at], start) if len(keys) else start, np.where(found, last[at], end) if len(keys) else end


def _is_compute(program: Program | None, step: int, kind: str) -> bool:
    if program is None or step < 0:
        return kind not in _MESSAGES
    return int(program.steps.kind[step]) == Kind.COMPUTE


def _what(program: Program | None, step: int, phase: str, given: str) -> tuple[str, str, str, int]:
    """(kind, label, tooltip, stage) of a span."""
    if program is None or step < 0:
        return (phase or given or "other"), "", cut(given or phase or "step", 60), -1
    if int(program.steps.kind[step]) == Kind.COMPUTE:
        ops, op = program.ops, int(program.steps.op[step])
        microbatch = int(ops.microbatch[op])
        what = f"{ops.name[op]} {ops.graph[op]}".strip() + (f" micro-batch {microbatch}" if microbatch >= 0 else "")
        return ops.name[op] or "compute", str(microbatch) if microbatch >= 0 else "", cut(what, 60), int(ops.stage[op])
    said = program.describe(step)
    kind = phase if phase in _MESSAGES and len(program.ops) else "send"
    return kind, "", cut(said[said.index("(") + 1 : -1], 80), -1


def _look(kind: str, used: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Name and colour: known kinds have theirs, others take the next of the palette in the order in which they come."""
    if kind in _KINDS:
        return _KINDS[kind]
    return used.get(kind) or (cut(kind, 24), PALETTE[(3 + sum(k not in _KINDS for k in used)) % len(PALETTE)])


def _place(row: _Row, bar: _Bar) -> None:
    for bars in row.thin:
        if bars[-1].end_s <= bar.start_s:
            bars.append(bar)
            return
    if len(row.thin) < MAX_THIN_ROWS:
        row.thin.append([bar])
    else:
        row.hidden += 1


# ---- marks -------------------------------------------------------------------------------------------------------------
def _bars(bars: list[_Bar], y: float, height: float, scale: float, *, tips: bool) -> list[str]:
    """Bars of one line; runs of what is too narrow to be told apart are drawn as one."""
    out: list[str] = []
    i = 0
    while i < len(bars):
        bar, end = bars[i], bars[i].end_s
        i += 1
        while i < len(bars) and bars[i].kind == bar.kind and (bars[i].end_s - bar.start_s) * scale < 1.0:
            end = max(end, bars[i].end_s)
            i += 1
        x, width = LEFT + bar.start_s * scale, max((end - bar.start_s) * scale, 0.3)
        inner = 1 if height > THIN else 0.5
        out.append(rect(x, y + inner, max(width - 0.4, 0.3), height - 2 * inner, fill=bar.colour, tip=bar.tip if tips else ""))
        if bar.label and height > THIN and width > 5 + 6 * len(bar.label):
            light = bar.colour in _LIGHTER.values()
            out.append(text(x + width / 2, y + height / 2 + 4, bar.label, anchor="middle", fill="#1d232b" if light else "#ffffff"))
    return out


def _subtitle(rows: dict[int, _Row], timeline: Timeline, left_out: int) -> str:
    hidden = sum(row.hidden for row in rows.values())
    said = f"{seconds_text(timeline.makespan_s)}, {len(rows) + left_out} ranks"
    said += "; numbers are micro-batches" if any(bar.label for row in rows.values() for bar in row.compute) else ""
    said += f"; {left_out} more ranks are not drawn" if left_out else ""
    return said + (f"; {hidden} messages beside others are not drawn" if hidden else "")


def _busy(rows: dict[int, _Row], end: float) -> str:
    if not any(row.compute for row in rows.values()):
        return ""
    said = [f"rank {rank} {100 * sum(b.end_s - b.start_s for b in row.compute) / end:.0f} %" for rank, row in rows.items()]
    return f"time spent computing: {', '.join(said[:16])}{' ...' if len(said) > 16 else ''}"
