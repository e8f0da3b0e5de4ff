"""Markup around what the script draws: the timeline with its buttons and table, the fabric with its stepper."""

from __future__ import annotations

from .content import PageContent
from .fabric import link_table
from .html import Html, joined, tag
from .spans import TimelineView
from .transfers import Transfers

__all__ = ["fabric_section", "section", "timeline_section"]


def section(id: str, title: str, content: Html) -> Html:
    return tag("section", tag("h2", title, id=f"{id}-title"), content, id=id, aria_labelledby=f"{id}-title")


def _button(id: str, text: str, label: str) -> Html:
    return tag("button", text, type="button", id=id, aria_label=label, title=label)


def _choice(id: str, label: str, options: list[tuple[str, str]]) -> Html:
    return tag("label", label, " ", tag("select", *(tag("option", text, value=value) for value, text in options), id=id))


def timeline_section(titles: list[tuple[str, str]], view: TimelineView) -> Html:
    buttons = [
        _button("zoom-in", "+", "zoom in"), _button("zoom-out", "−", "zoom out"), _button("pan-left", "◀", "earlier"),
        _button("pan-right", "▶", "later"), _button("zoom-all", "all", "show all of it"),
    ]  # fmt: skip
    kinds = [("all", "all"), ("step", "alike ranks once"), ("compute", "computing"), ("comm", "communication"), ("link", "links")]
    choices = [_choice("rows-shown", "rows", kinds)]
    if len(titles) > 1:
        choices.insert(0, _choice("view", "show", titles))
    find = tag("label", "find ", tag("input", id="find", type="search", size=14, autocomplete="off", spellcheck="false"))
    keys = (
        "Drag or use the arrow keys to move; plus and minus, pinch, or Ctrl and the wheel to zoom; Home and End for the first and last moment; "
        "Enter zooms to the chosen span, comma and full stop choose the one before and after. "
        "Close spans are drawn as one, as tall as they fill its time, until you zoom in."
    )
    rows = tag("div", tag("canvas", id="rows"), tag("div", id="rows-height"), id="rows-scroll", tabindex="0", role="group", aria_label="rows")
    said = {"aria_label": "timeline", "aria_describedby": "timeline-keys timeline-status"}
    canvas = tag("div", tag("canvas", id="overview"), rows, id="timeline-box", tabindex="0", role="application", **said)
    heads = ("span", "kind", "where", "start", "takes", "other timeline")
    head = tag("thead", tag("tr", *(tag("th", h, scope="col", cls="number" if h in ("start", "takes", "other timeline") else None) for h in heads)))
    spans = tag(
        "table", tag("caption", "Visible spans, longest first", id="spans-caption"), head, tag("tbody", id="spans-body"), cls="lines", id="spans"
    )
    pages = tag("p", _button("spans-before", "◀", "longer ones"), " ", tag("span", id="spans-page"), " ", _button("spans-after", "▶", "shorter ones"))
    return joined([
        tag("div", tag("div", *buttons, cls="buttons"), *choices, find, cls="controls"),
        tag("ul", id="legend", cls="key"), canvas, tag("p", keys, id="timeline-keys", cls="note"),
        tag("p", id="timeline-status", role="status", aria_live="polite"), tag("div", id="chosen", aria_live="polite"),
        tag("p", " ".join(f"{n}." for n in view.notes), id="timeline-notes", cls="note"),
        tag("div", spans, cls="wide", tabindex="0", role="region", aria_labelledby="spans-caption"), pages,
        tag("noscript", tag("p", "The timeline needs a script; tables and drawings below do not.")),
    ])  # fmt: skip


def fabric_section(page: PageContent, picture: Html, left_out: str, moved: Transfers | None) -> Html:
    said = f"Fabric {page.fabric.name}: width and colour of a line say how much of the time its busier direction carries something."
    if left_out:
        said += f" {left_out}"
    drawing = tag("figure", tag("div", picture, cls="wide", tabindex="0", role="region", aria_labelledby="fabric-caption"),
                  tag("figcaption", said, id="fabric-caption"))  # fmt: skip
    parts = [drawing]
    if moved is not None:
        limit = f" Only the first {len(moved.src):,} of {len(moved.src) + moved.left_out:,} messages are on the page." if moved.left_out else ""
        controls = [
            _button("step-first", "|◀", "before the first"), _button("step-back", "◀", "one step back"),
            _button("step-forward", "▶", "one step forward"), _button("step-last", "▶|", "after the last"),
            _button("step-play", "play", "play or stop"),
        ]  # fmt: skip
        slider = tag("input", type="range", id="step-slider", min="0", max="0", value="0", aria_label="step")
        shown = tag("table", tag("caption", "Messages that arrive at this step", id="step-caption"),
                    tag("thead", tag("tr", *(tag("th", h, scope="col") for h in ("from", "to", "what", "bytes", "over")))),
                    tag("tbody", id="step-body"), cls="lines", id="step-table")  # fmt: skip
        parts.append(tag(
            "div", tag("h3", "Step through the transfers"),
            tag("p", f"A step is a moment at which something arrives. Thick arrows arrive now, thin ones are under way.{limit}"),
            tag("div", tag("div", *controls, cls="buttons"), _choice("step-kind", "of", [("all", "all kinds")]), slider, cls="controls"),
            tag("p", id="step-status", role="status", aria_live="polite"), tag("div", id="step-progress"),
            tag("div", shown, cls="wide", tabindex="0", role="region", aria_labelledby="step-caption"), id="stepper",
        ))  # fmt: skip
    elif page.inlined.program.fold is not None:
        parts.append(tag("p", "Transfers are not listed one by one: symmetric ranks are stored once, and each line here stands for many."))
    return joined([*parts, link_table(page.fabric, page.timeline.link_busy_s, page.timeline.makespan_s)])
