"""What stands on the page of a plan, and of its run: sections and packed data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported
from ...kernels.stages import stage
from ...program.program import Program
from .assembled import assembled, data_block
from .content import PageContent
from .controls import fabric_section, section, timeline_section
from .curves import memory_section, run_section
from .evidence import sources
from .experts import experts_section
from .fabric import fabric_picture, link_ends
from .modules import modules_section
from .packed import clean, pack
from .sections import alternatives, breakdown_section, decisions, layout_table, summary
from .spans import TimelineView, timeline_block, timeline_view
from .transfers import Transfers, transfers

__all__ = ["MAX_PAGE_BYTES", "Page", "report_page"]

MAX_PAGE_BYTES = 8_000_000  # of a page: what does not fit is drawn with fewer spans
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


@stage("drawing the page")
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
    blocks = [data_block(f"data-{name}", timeline_block(v, title, page.rank_name)) for name, title, v in views]
    if moved is not None:
        blocks.append(data_block("data-transfers", _transfer_block(page, view, moved)))
    picture, left_out = fabric_picture(page.fabric, page.timeline.link_busy_s, page.timeline.makespan_s)
    sections = [
        ("summary", "Summary", "Summary", summary(page)),
        ("timeline", "Timeline", "Timeline", timeline_section([(name, title) for name, title, _ in views], views[0][2])),
        ("where", "Time", "Where the time goes", breakdown_section(page) if not collective else None),
        ("fabric", "Fabric", "Fabric and transfers", fabric_section(page, picture, left_out, moved)),
        ("memory", "Memory", "Memory", memory_section(page) if not collective else None),
        ("run", "Run", "The run", run_section(page) if ran is not None else None),
        ("modules", "Modules", "Modules and bottlenecks", modules_section(ran.measured) if ran is not None and ran.measured is not None else None),
        ("experts", "Experts", "Experts", experts_section(page)),
        ("layout", "Layout", "Layout", layout_table(page)),
        ("others", "Alternatives", "Alternatives and the bound", alternatives(page)),
        ("decisions", "Decisions", "Decisions", decisions(page)),
        ("sources", "Sources", "Where every number comes from", sources(page)),
    ]
    notes = tuple(dict.fromkeys(n for _, _, v in views for n in v.notes))
    fabric = str(page.plan.target_fabric.get("name", ""))
    html = assembled(
        page.title, f"{page.plan.kind} plan for {page.ranks} ranks on {fabric}, from {page.plan_file}", f"{page.title} on {fabric}",
        [(id, name, section(id, title, content)) for id, name, title, content in sections if content is not None], blocks,
    )  # fmt: skip
    total = sum(int(v.count.sum()) for _, _, v in views)
    return Page(html=html, spans=total, shown=sum(len(v.start) for _, _, v in views), messages=len(moved.src) if moved else 0, notes=notes)


# ---- data ---------------------------------------------------------------------------------------------------------------
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
