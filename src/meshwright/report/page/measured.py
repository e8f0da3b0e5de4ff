"""The page of what was measured, without a plan: traces of torch.profiler or a run's recording; two of them stand side by side.

A rank's row holds, at every instant, the one thing that stands for it (`bottleneck.tiles`): computing before communication before copies. Where there
is a device, a second row has what its host does. Of two runs, the rows of a rank stand below each other on one axis of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...bottleneck.breakdown import Breakdown
from ...bottleneck.diff import Diff
from ...bottleneck.lanes import STAGES, Activities, Kind, RankView
from ...bottleneck.table import COLUMNS
from ...bottleneck.tiles import tiles
from ...explain.numbers import seconds_text, share_text
from ...io.trace.slices import Slices, Trace
from .assembled import assembled, data_block
from .controls import section, timeline_section
from .document import Page
from .html import Html, figure_of, joined, shortened, table, tag
from .modules import modules_section
from .spans import TimelineView, rows_view, timeline_block

__all__ = ["Side", "measured_page"]

I64 = NDArray[np.int64]
HEADS = {
    "compute_s": "computing", "copy_s": "copies", "exposed_s": "exposed communication", "transfer_s": "host to device",
    "data_stall_s": "loading data", "host_s": "host", "idle_s": "idle",
}  # fmt: skip
CATEGORIES = ("forward", "backward", "loss", "optimizer", "load data", "communication", "copy", "host", "other")
MAX_CHANGES = 40  # rows of the table of differences
MAX_RANKS = 128  # rows of the table of ranks


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run: what it is called, and where its time went."""

    name: str
    found: Breakdown


def measured_page(sides: Sequence[Side], diff: Diff | None = None) -> Page:
    """The page of one run, or of two with what changed between them (`diff`). Equal content gives equal text."""
    view = _view(sides)
    first, title = sides[0], " and ".join(s.name for s in sides)
    parts = [
        ("summary", "Summary", "Summary", _summary(sides, diff)),
        ("timeline", "Timeline", "Timeline", timeline_section([("run", title)], view)),
        ("changes", "Changes", "What changed", _changes(sides, diff) if diff is not None else None),
        ("where", "Time", "Where the time goes", joined(_times(s) for s in sides)),
        *(_modules(s, k, several=len(sides) > 1) for k, s in enumerate(sides)),
        ("sources", "Sources", "Where every number comes from", _sources(sides)),
    ]  # fmt: skip
    ranks = max(len(s.found.views) for s in sides)
    steps = max(t.steps for t in first.found.times)
    subtitle = f"{steps} measured step{'s' if steps > 1 else ''} on {ranks} rank{'s' if ranks > 1 else ''}"
    html = assembled(
        title, subtitle, title, [(id, nav, section(id, head, content)) for id, nav, head, content in parts if content is not None],
        [data_block("data-run", timeline_block(view, title, lambda rank: f"rank {rank}"))],
    )  # fmt: skip
    return Page(html=html, spans=int(view.count.sum()), shown=len(view.start), messages=0, notes=view.notes)


def _modules(side: Side, number: int, *, several: bool) -> tuple[str, str, str, Html]:
    of = f" of {side.name}" if several else ""
    content = modules_section(side.found, side.name if several else "")
    return f"modules{number or ''}", f"Modules{of}", f"Modules and bottlenecks{of}", content


# ---- timeline ------------------------------------------------------------------------------------------------------------
def _view(sides: Sequence[Side]) -> TimelineView:
    """Rows of all ranks, those of both runs below each other; every run begins at 0."""
    kept: dict[int, tuple[str, str, str, str]] = {}
    names: dict[str, int] = {}
    columns: list[tuple[I64, ...]] = []
    zeros = [min(int(v.host.start[0]) for v in s.found.views) for s in sides]
    ranks = sorted({v.rank for s in sides for v in s.found.views})
    for rank in ranks:
        for side, zero in zip(sides, zeros, strict=True):
            view = next((v for v in side.found.views if v.rank == rank), None)
            if view is None:
                continue
            rows = [("", "compute", tiles(view))] + ([("host", "other", view.host)] if view.device is not None else [])
            for lane, role, pieces in rows:
                number = len(kept)
                kept[number] = (f"rank {rank}", side.name if len(sides) > 1 else "measured", lane, role)
                columns.append(_columns(number, view, pieces, zero, names))
    track, start, end, name, category = (np.concatenate(c) for c in zip(*columns, strict=True))
    none = np.full(len(track), -1, np.int64)
    slices = Slices(track=track, start_s=start / 1e9, end_s=end / 1e9, name=name, category=category, step=none, iteration=none * 0)
    trace = Trace("measured", names=names)
    return rows_view(slices, category, kept, CATEGORIES, trace, category)


def _columns(track: int, view: RankView, pieces: Activities, zero: int, names: dict[str, int]) -> tuple[I64, ...]:
    """Track, start, end, name and category of what is not idle."""
    shown = pieces.take(~np.isin(pieces.kind, (Kind.IDLE, Kind.SYNC)))
    stage = np.array([CATEGORIES.index(s) if s in CATEGORIES else len(CATEGORIES) - 1 for s in STAGES], np.int64)[shown.stage]
    conditions = [
        np.isin(shown.kind, (Kind.WAIT, Kind.COLLECTIVE)), np.isin(shown.kind, (Kind.COPY, Kind.TRANSFER)), shown.kind == Kind.DATA,
        np.isin(shown.kind, (Kind.HOST, Kind.LAUNCH)),
    ]  # fmt: skip
    category = np.select(conditions, [CATEGORIES.index(c) for c in ("communication", "copy", "load data", "host")], stage).astype(np.int64)
    said = np.array([names.setdefault(_said(view, m, n, k), len(names)) for m, n, k in _unique(shown)], np.int64)
    keys, inverse = np.unique(_keys(shown), return_inverse=True)
    return np.full(len(shown), track, np.int64), shown.start - zero, shown.end - zero, said[inverse.reshape(-1)] if len(keys) else said, category


def _keys(pieces: Activities) -> I64:
    return (pieces.module.astype(np.int64) + 1) << 40 | (pieces.name.astype(np.int64) + 1) << 8 | pieces.kind.astype(np.int64)


def _unique(pieces: Activities) -> list[tuple[int, int, int]]:
    """(module, name, kind) of every key, in the order of keys."""
    return [((k >> 40) - 1, (k >> 8 & 0xFFFFFFFF) - 1, k & 0xFF) for k in np.unique(_keys(pieces)).tolist()]


def _said(view: RankView, module: int, name: int, kind: int) -> str:
    what = view.names[name] if 0 <= name < len(view.names) else Kind(kind).name.lower()
    where = view.modules[module] if 0 <= module < len(view.modules) else ""
    return f"{what} in {where}" if where else what


# ---- words and tables ----------------------------------------------------------------------------------------------------
def _summary(sides: Sequence[Side], diff: Diff | None) -> Html:
    said = [tag("p", " ".join(_opening(s, named=len(sides) > 1)), cls="lead") for s in sides]
    if diff is not None and diff.changes:
        most, change_s = diff.changes[0], diff.b_s - diff.a_s
        word = "longer" if change_s > 0 else "shorter"
        more = f"A step is {seconds_text(abs(change_s))} {word} in {sides[1].name} than in {sides[0].name}"
        said.insert(0, tag("p", f"{more}; {' / '.join(most.leaf)} changed most, by {_signed(most.delta_s)}.", cls="lead"))
    figures = [figure_of(seconds_text(s.found.step_s), f"a step of {s.name}", "measured") for s in sides]
    figures += [
        figure_of(share_text(_mean(s, "exposed_s") / (s.found.step_s or 1.0)), f"exposed communication of {s.name}", "measured") for s in sides
    ]
    warnings = [tag("p", w, cls="note") for s in sides for w in s.found.warnings]
    return joined([*said, tag("dl", *figures, cls="figures"), *warnings])


def _opening(side: Side, *, named: bool) -> list[str]:
    """What limits the step, by how much, what to do."""
    found = side.found
    spent = {HEADS[c]: _mean(side, c) for c in COLUMNS}
    most = max(spent, key=lambda c: spent[c])
    whole = found.step_s or 1.0
    said = [f"{side.name if named else 'A step'} takes {seconds_text(found.step_s)}; {share_text(spent[most] / whole)} of it is {most}."]
    if found.causes and found.causes[0].gain_s > 0:
        first = found.causes[0]
        said.append(f"The largest thing that can go is {first.kind} at {first.where}: up to {seconds_text(first.gain_s)} per step.")
        said.append(f"What to do: {first.advice}.")
    else:
        said.append("Nothing stands out that could go.")
    return said


def _mean(side: Side, column: str) -> float:
    return sum(t.total[column] for t in side.found.times) / max(len(side.found.times), 1)


def _times(side: Side) -> Html:
    rows = [[f"rank {t.rank}", seconds_text(t.step_s), *(seconds_text(t.total[c]) if t.total[c] else "" for c in COLUMNS)]
            for t in side.found.times[:MAX_RANKS]]  # fmt: skip
    left = len(side.found.times) - len(rows)
    caption = f"{side.name}: time of a step by rank" + (f", the first {len(rows)}; {left} more" if left else "")
    return table(caption, ["rank", "step", *HEADS.values()], rows, numbers=range(1, 9))


def _changes(sides: Sequence[Side], diff: Diff) -> Html:
    rows = [[shortened(" / ".join(c.leaf), 90), seconds_text(c.a_s), seconds_text(c.b_s), _signed(c.delta_s)] for c in diff.changes[:MAX_CHANGES]]
    rest = diff.changes[MAX_CHANGES:]
    if rest:
        a_s, b_s = sum(c.a_s for c in rest), sum(c.b_s for c in rest)
        rows.append([f"{len(rest)} more", seconds_text(a_s), seconds_text(b_s), _signed(b_s - a_s)])
    rows.append(["all", seconds_text(diff.a_s), seconds_text(diff.b_s), _signed(diff.b_s - diff.a_s)])
    heads = ["stage, module, what it does", *(s.name for s in sides), "change"]
    return joined([tag("p", "Seconds of a step, mean over ranks; the changes add up to that of the step."),
                   table("What changed most", heads, rows, numbers=(1, 2, 3))])  # fmt: skip


def _signed(time_s: float) -> str:
    return ("+" if time_s > 0 else "") + seconds_text(time_s)


def _sources(sides: Sequence[Side]) -> Html:
    files = [tag("p", f"{s.name}, rank {v.rank}: {v.source}") for s in sides for v in s.found.views[:MAX_RANKS]]
    said = "From recordings of the steps themselves. What a recording costs is in them; ranks are put on one clock by the collectives they share."
    return tag("dl", tag("dt", "measured", id="source-measured", cls="source measured"), tag("dd", tag("p", said), *files), cls="sources")
