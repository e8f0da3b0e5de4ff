"""Puts the page together: sections, packed data, style and script in one file that loads nothing and runs nothing else.

The content policy names the one style and the one script by their digests and forbids everything else, connections included. Data stands in
script elements of a type that is never run; in it `<`, `>` and `&` are written as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from ... import __version__
from ...errors import MeshwrightError, Unsupported
from ...program.program import Program
from .content import PageContent
from .controls import fabric_section, section, timeline_section
from .curves import memory_section, run_section
from .evidence import sources
from .fabric import fabric_picture, link_ends
from .html import Html, joined, tag
from .modules import modules_section
from .packed import clean, pack
from .sections import alternatives, breakdown_section, decisions, layout_table, summary
from .spans import TimelineView, timeline_view
from .transfers import Transfers, transfers

__all__ = ["MAX_PAGE_BYTES", "Page", "report_page"]

MAX_PAGE_BYTES = 8_000_000  # of a page: what does not fit is drawn with fewer spans
SCRIPTS = ("format.js", "unpack.js", "colors.js", "overview.js", "gestures.js", "timeline.js", "spans.js", "transfers.js", "main.js")
MIN_SPANS = 4_000  # a page that is too large is made again with fewer, not below this


@dataclass(frozen=True, kw_only=True)
class Page:
    """`spans` of the timelines in all, `shown` as so many; `notes` say what was joined or left out."""

    html: str
    spans: int
    shown: int
    messages: int
    notes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.html.encode())


def report_page(page: PageContent, *, most_spans: int = 250_000) -> Page:
    """The page; equal content gives equal text. What does not fit into MAX_PAGE_BYTES is joined into fewer spans.

    Raises: Unsupported for a plan that does not fit even so.
    """
    while True:
        made = _page(page, most_spans)
        if made.size_bytes <= MAX_PAGE_BYTES:
            return made
        if most_spans <= MIN_SPANS:
            hint = "report on a part of the fabric"
            what = f"the page would have {made.size_bytes:,} bytes, at most {MAX_PAGE_BYTES:,} are written"
            raise Unsupported(what, where=page.plan_file, hint=hint)
        most_spans //= 2


def _page(page: PageContent, most_spans: int) -> Page:
    collective, ran = page.plan.kind == "collective", page.run
    view = timeline_view(page.inlined.program, [page.timeline], collective=collective, most_spans=most_spans)
    views = [("target", f"Predicted for {page.timeline.run_fabric}", view)]
    if page.run is not None:
        c = page.run.comparison
        pair = timeline_view(page.run.inlined.program, [c.predicted, c.typical_step()], most_spans=most_spans)
        views.insert(0, ("run", f"Predicted and measured on {c.measured.run_fabric}", pair))
    moved = _transfers(page, view)
    data = {name: _timeline_block(page, v, title) for name, title, v in views}
    blocks = [_data(f"data-{name}", block) for name, block in data.items()]
    if moved is not None:
        blocks.append(_data("data-transfers", _transfer_block(page, view, moved)))
    picture, left_out = fabric_picture(page.fabric, page.timeline.link_busy_s, page.timeline.makespan_s)
    sections = [
        section("summary", "Summary", summary(page)),
        section("timeline", "Timeline", timeline_section([(name, title) for name, title, _ in views], views[0][2])),
        section("where", "Where the time goes", breakdown_section(page)) if not collective else None,
        section("fabric", "Fabric and transfers", fabric_section(page, picture, left_out, moved)),
        section("memory", "Memory", memory_section(page)) if not collective else None,
        section("run", "The run", run_section(page)) if page.run is not None else None,
        section("modules", "Modules and bottlenecks", modules_section(ran.measured)) if ran is not None and ran.measured is not None else None,
        section("layout", "Layout", layout_table(page)),
        section("others", "Alternatives and the bound", alternatives(page)),
        section("decisions", "Decisions", decisions(page)),
        section("sources", "Where every number comes from", sources(page)),
    ]
    notes = tuple(dict.fromkeys(n for _, _, v in views for n in v.notes))
    html = _document(page, [s for s in sections if s is not None], blocks)
    total = sum(int(v.count.sum()) for _, _, v in views)
    return Page(html=html, spans=total, shown=sum(len(v.start) for _, _, v in views), messages=len(moved.src) if moved else 0, notes=notes)


# ---- data ---------------------------------------------------------------------------------------------------------------
def _data(id: str, content: dict[str, Any]) -> Html:
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for raw, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(raw, escaped)
    return Html(f'<script type="application/json" id="{id}">{text}</script>')


def _timeline_block(page: PageContent, view: TimelineView, title: str) -> dict[str, Any]:
    columns = {
        "start": view.start, "duration": view.duration, "name": view.name, "category": view.category, "step": view.step, "iteration": view.iteration,
    }  # fmt: skip
    if len(view.count) and int(view.count.max()) > 1:
        columns |= {"count": view.count, "busy": np.minimum(view.busy, (1 << 31) - 1)}
    whos = list(dict.fromkeys(row.who for row in view.rows))
    named = {who: page.rank_name(int(who.removeprefix("rank "))) if who.startswith("rank ") else who for who in whos}
    return {
        "title": clean(title), "tick_s": view.tick_s, "end": view.end, "categories": view.categories, "notes": list(view.notes),
        "groups": [clean(named[who]) for who in whos],
        "rows": [[whos.index(row.who), row.origin, clean(row.lane), row.role, row.first, row.last] for row in view.rows],
        "packed": pack(columns, {"names": view.names}),
    }  # fmt: skip


def _transfers(page: PageContent, view: TimelineView) -> Transfers | None:
    """None of a folded program, whose stored lanes stand for many, and where nothing is sent."""
    program: Program = page.inlined.program
    if program.fold is not None or not len(view.trace.flows):
        return None
    return transfers(program, view.trace, view.trace_category, page.fabric, page.plan.placement, view.tick_s)


def _transfer_block(page: PageContent, view: TimelineView, moved: Transfers) -> dict[str, Any]:
    columns = {
        "src": moved.src, "dst": moved.dst, "start": moved.start, "end": moved.end, "size": moved.size_bytes, "what": moved.what,
        "category": moved.category, "route": moved.route,
    }  # fmt: skip
    return {
        "tick_s": view.tick_s, "actors": [clean(name) for name in page.plan.placement], "ranks": page.ranks, "links": link_ends(page.fabric),
        "link_names": [[clean(x.src), clean(x.dst)] for x in page.fabric.links], "routes": [list(r) for r in moved.routes],
        "received": list(moved.received), "received_bytes": list(moved.received_bytes), "left_out": moved.left_out, "categories": view.categories,
        "packed": pack(columns, {"whats": moved.whats}),
    }  # fmt: skip


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _document(page: PageContent, sections: list[Html], blocks: list[Html]) -> str:
    style = _asset("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    policy = Html(f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'")
    titles = {
        "summary": "Summary", "timeline": "Timeline", "where": "Time", "fabric": "Fabric", "memory": "Memory", "run": "Run", "modules": "Modules",
        "layout": "Layout", "others": "Alternatives", "decisions": "Decisions", "sources": "Sources",
    }  # fmt: skip
    left_out = {"run"} if page.run is None else set()
    left_out |= {"modules"} if page.run is None or page.run.measured is None else set()
    left_out |= {"where", "memory"} if page.plan.kind == "collective" else set()
    links = [tag("li", tag("a", text, href=f"#{name}")) for name, text in titles.items() if name not in left_out]
    fabric = str(page.plan.target_fabric.get("name", ""))
    parts = {
        "policy": tag("meta", http_equiv="Content-Security-Policy", content=policy),
        "title": tag("title", f"{page.title} on {fabric} - meshwright"),
        "style": Html(style), "script": Html(script),
        "heading": tag("h1", page.title),
        "subtitle": tag("p", f"{page.plan.kind} plan for {page.ranks} ranks on {fabric}, from {page.plan_file}"),
        "links": joined(links), "sections": joined(sections), "data": joined(blocks),
        "footer": tag("p", f"Written by meshwright {__version__}. This page loads nothing and sends nothing."),
    }  # fmt: skip
    html = _asset("page.html")
    for name, part in parts.items():
        before, marker, after = html.partition(f"<!-- {name} -->")
        if not marker:
            raise MeshwrightError(f"the page's template lacks {name}", hint="install meshwright again")
        html = before + part + after
    return html
