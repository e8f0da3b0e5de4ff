"""Expert layers on the page: who holds which experts, what is sent for them, loads over a run's steps as heat maps, and where copies would go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...decide.experts.replicas import place_replicas
from ...explain.numbers import bytes_text, seconds_text
from ...plan.context import among_experts, copies_in, layout_exchanges
from ...plan.plan import TrainingLayout
from .content import PageContent
from .html import Html, joined, shortened, source_link, table, tag

__all__ = ["experts_section"]

MAX_LAYERS = 64  # of tables and maps; large models have as many
MAX_COLUMNS, MAX_ROWS = 200, 64  # cells of a map: steps and experts beyond them are shown by the mean of neighbours
SHADES = 8  # of a map
CELL = 10

Loads = Sequence[Sequence[int]]  # of a step, of an expert


def experts_section(page: PageContent) -> Html | None:
    """None for plans without expert layers."""
    layout, parts = page.plan.layout, list[Html]()
    if page.plan.kind == "experts":
        parts.append(_choices(page.plan.decisions))
    if layout is not None and layout.expert > 1:
        parts += _dispatch(layout, page.plan.decisions.get("experts", {}))
    if page.run is not None and page.run.expert_loads:
        parts += _loads(page.run.expert_loads, layout.expert_ranks if layout is not None else 1)
    return joined(parts) if parts else None


def _choices(decisions: Mapping[str, Any]) -> Html:
    """Of a plan of one layer: what runs for which capacity."""
    every = (d["notes"]["choices"] for d in decisions.values() if isinstance(d, dict) and "choices" in d.get("notes", {}))
    found: list[dict[str, Any]] = next(every, [])
    rows = []
    for x in found:
        degree, chunks, algorithm = x["choice"]
        rows.append([
            f"up to {x['capacity']}", str(degree), str(chunks), str(algorithm), seconds_text(x["time_s"]), seconds_text(x["bound_s"]),
            f"{x['time_s'] / x['bound_s']:.3g}" if x["bound_s"] else "",
        ])  # fmt: skip
    heads = ["rows of an expert", "degree r", "chunks d", "exchange", "step", "bound of the degree", "times bound"]
    return table("Which program runs for which capacity", heads, rows, numbers=(1, 2, 4, 5, 6))


def _dispatch(layout: TrainingLayout, decision: Mapping[str, Any]) -> list[Html]:
    """Who holds what, and what a micro-batch sends for each layer."""
    n, shards = layout.expert, layout.expert_shards
    layers = sorted({s.param.rpartition(".")[0] for s in shards}) if shards is not msgspec.UNSET else []
    groups = layout.data // n
    said = (
        f"{n} neighbouring replicas divide the experts of {len(layers)} layers: the i-th of them holds the i-th {n}-th. "
        f"{groups} such groups hold the same experts and add up their gradients."
    )
    if layout.expert_ranks > n:
        said += f" The {layout.tensor} tensor ranks of a replica divide its part again: each sends and multiplies the rows of its own experts."
    options = decision.get("options", {})
    if options.get("range_s"):
        low, high = (seconds_text(x) for x in options["range_s"])
        said += f" Predicted for {options['routing']} routing; a step takes {low} with experts chosen alike and {high} with all tokens on one rank's."
    value = {v.name: v for v in layout.values}
    rows = []
    for x in layout_exchanges(layout):
        if among_experts(layout, x) and x.expected_bytes is not msgspec.UNSET:
            room = value[x.source].size_bytes // n
            each = ", ".join(bytes_text(b) for b in x.expected_bytes[:8]) + (" ..." if n > 8 else "")
            rows.append([shortened(x.source), "back" if x.target.endswith("/back") else "to the experts", each, bytes_text(room)])
    left = f", the first {2 * MAX_LAYERS} of {len(rows)}" if len(rows) > 2 * MAX_LAYERS else ""
    heads = ["rows of", "way", "expected to each member", "room for a member"]
    sent = table(f"What a micro-batch sends for its experts{left}", heads, rows[: 2 * MAX_LAYERS], numbers=(3,))
    return [tag("p", said), sent, *_copies(layout)]


def _copies(layout: TrainingLayout) -> list[Html]:
    """Which experts lie where beside their homes, and what that does for the busiest member."""
    rows = []
    for layer, x in list(copies_in(layout).items())[:MAX_LAYERS]:
        named = ", ".join(f"{e} on {m}" for e, m in x.copies[:6]) + (" ..." if len(x.copies) > 6 else "")
        rows.append([shortened(layer), named, f"{x.before_rows:,}", f"{x.busiest_rows:,}", f"{x.bound_rows:,}"])
    heads = ["layer", "copies", "busiest member without", "with", "bound"]
    said = "Weights of copies come with every micro-batch, and their gradients go home. The bound holds for any placement in as many places."
    return [table("Copies of hot experts, and rows of a micro-batch", heads, rows, numbers=(2, 3, 4)), tag("p", said, cls="note")] if rows else []


def _loads(loads: Mapping[str, Loads], ranks: int) -> list[Html]:
    """Maps of what each expert got, step by step, and the copies that would even it out."""
    shown = list(loads.items())[:MAX_LAYERS]
    most = max((n for _, steps in shown for rows in steps for n in rows), default=0)
    figures, rows = [], []
    for layer, steps in shown:
        total = [sum(x) for x in zip(*steps, strict=True)]
        hot = max(range(len(total)), key=lambda e: total[e])
        mean = sum(total) / len(total)
        even = f"{total[hot] / mean:.2f} times the mean" if mean else "no rows"
        said = f"{layer}: {len(steps)} steps, {len(total)} experts; expert {hot} got most, {even}"
        figures.append(tag("figure", tag("figcaption", shortened(said, 100)), _map(steps, most, said)))
        copies: list[object] = ["", "", ""]
        if ranks > 1 and len(total) % ranks == 0:
            made = place_replicas(total, ranks, 1)
            named = ", ".join(f"{e} on {r}" for e, r in made.copies[:6]) + (" ..." if len(made.copies) > 6 else "")
            copies = [f"{made.before:,}", f"{made.busiest:,} (bound {made.bound:,})", named or "none"]
        rows.append([shortened(layer), str(hot), even, *copies])
    heads = ["layer", "hottest expert", "its rows", "busiest rank", "with a copy a rank", "which copies"]
    about = f"Rows that each expert got, darker is more, {most:,} at most; left to right are steps, top to bottom experts. "
    return [
        tag("p", about, source_link("measured")), tag("div", *figures, cls="curves"),
        table("Loads of all recorded steps, and copies of hot experts that would even them out", heads, rows, numbers=(1, 3)),
        tag("p", "`meshwright experts compare --loads expert-loads.json` of the run's folder says whether copies pay.", cls="note"),
    ]  # fmt: skip


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """Means of as many neighbours as are needed."""
    each = -(-len(values) // most)
    return [sum(values[i : i + each]) / len(values[i : i + each]) for i in range(0, len(values), each)]


def _map(steps: Loads, most: int, said: str) -> Html:
    """A drawing with a path for every shade."""
    columns = [_thinned(rows, MAX_ROWS) for rows in steps]
    cells = list(zip(*(_thinned(row, MAX_COLUMNS) for row in zip(*columns, strict=True)), strict=True))  # of a step, of an expert
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for x, column in enumerate(cells):
        for y, n in enumerate(column):
            paths[-(-int(n * SHADES) // max(1, most))].append(f"M{x * CELL} {y * CELL}h{CELL}v{CELL}h-{CELL}z")
    drawn = [
        tag("path", d=Html("".join(p)), cls="heat", fill_opacity=f"{i / SHADES:.3f}") for i, p in enumerate(paths) if p and i
    ]  # fmt: skip
    wide, high = len(cells) * CELL, len(cells[0]) * CELL if cells else CELL
    return tag("svg", *drawn, viewBox=f"0 0 {wide} {high}", preserveAspectRatio="none", role="img", aria_label=said, cls="map")
