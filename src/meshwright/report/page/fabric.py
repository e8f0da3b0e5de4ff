"""The fabric on the page: the drawing of `fabric show --svg` with links by how busy they are, in classes that the page's style colours.

The lines of a cable carry both directions' numbers; how busy it is is said by width, by colour and, where there is room, in percent.
`link_ends` has the places of every directed link, for the page to draw transfers over.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...explain.numbers import share_text
from ...fabric.fabric import Fabric
from ...io.quantity import show_rate, show_time
from ...simulate.network import link_names
from ..fabric_fold import drawn
from ..fabric_svg import NODE_H, NODE_W, arrangement, short_name
from .html import Html, joined, shortened, table, tag
from .packed import clean

__all__ = ["fabric_picture", "link_ends", "link_table"]

MAX_LABELLED_CABLES = 48  # that carry their percentage
MAX_LISTED_LINKS = 24  # in the table, the busiest first


def fabric_picture(whole: Fabric, busy_of_s: Mapping[str, float], makespan_s: float) -> tuple[Html, str]:
    """The drawing, and what it leaves out. Of many alike servers one is drawn, each of its links as busy as the busiest that it stands for."""
    found = drawn(whole)
    fabric, picture, names = found.fabric, arrangement(found.fabric), link_names(found.fabric)
    busy_s: dict[str, float] = {}
    for name, k in zip(link_names(whole), found.stands_for, strict=True):
        if k >= 0 and name in busy_of_s:
            busy_s[names[k]] = max(busy_s.get(names[k], 0.0), busy_of_s[name])
    cables: dict[tuple[str, str], list[int]] = {}
    for k, link in enumerate(fabric.links):
        if link.src in picture.places and link.dst in picture.places:
            cables.setdefault((min(link.src, link.dst), max(link.src, link.dst)), []).append(k)
    lines, labels = [], []
    for (a, b), members in cables.items():
        share = max((busy_s.get(names[k], 0.0) / makespan_s if makespan_s else 0.0) for k in members)
        (x1, y1), (x2, y2) = picture.places[a], picture.places[b]
        tip = "; ".join(_said(fabric, k, busy_s.get(names[k]), makespan_s) for k in members)
        lines.append(tag("line", tag("title", tip), cls=f"cable load{min(int(share * 5), 4) if share else 'none'}", x1=_n(x1), y1=_n(y1), x2=_n(x2),
                         y2=_n(y2), stroke_width=f"{1.5 + 6 * min(share, 1):.1f}"))  # fmt: skip
        if share > 0.005 and len(cables) <= MAX_LABELLED_CABLES:
            at = 0.42  # not in the middle, where the chords of a circle cross
            place = {"x": _n(x1 + at * (x2 - x1)), "y": _n(y1 + at * (y2 - y1) + 3)}
            labels.append(tag("text", f"{100 * share:.0f} %", cls="load", text_anchor="middle", **place))
    frames = [
        tag("g", tag("rect", cls="server", x=_n(b.x), y=_n(b.y), width=_n(b.width), height=_n(b.height), rx=8),
            tag("text", shortened(b.name, 28), cls="server", x=_n(b.x + 10), y=_n(b.y + 16)))
        for b in picture.boxes if b.name
    ]  # fmt: skip
    nodes = [_node(fabric, name, x, y) for name, (x, y) in picture.places.items()]
    top = 30  # where the drawing of `fabric show` has its title
    svg = tag(
        "svg", *frames, *lines, tag("g", id="moving"), *nodes, *labels, id="fabric-picture", role="img", aria_labelledby="fabric-caption",
        viewBox=f"0 {top} {picture.width:.0f} {picture.height - top:.0f}", width=f"{picture.width:.0f}", height=f"{picture.height - top:.0f}",
    )  # fmt: skip
    said = "Servers that are alike are drawn once; a line is as busy as the busiest that it stands for." if fabric is not whole else ""
    return svg, f"{said} {picture.left_out} more devices are not drawn.".strip() if picture.left_out else said


def _n(value: float) -> str:
    return f"{value:.1f}"


def _node(fabric: Fabric, name: str, x: float, y: float) -> Html:
    device = fabric.actor_of[name] < len(fabric.devices)
    box = tag("rect", x=_n(x - NODE_W / 2), y=_n(y - NODE_H / 2), width=NODE_W, height=NODE_H, rx=4 if device else 13)
    text = tag("text", short_name(clean(name)), x=_n(x), y=_n(y + 4), text_anchor="middle")
    return tag("g", tag("title", name), box, text, cls="device" if device else "switch")


def _said(fabric: Fabric, k: int, busy: float | None, makespan_s: float) -> str:
    link = fabric.links[k]
    said = f"{link.src} to {link.dst}: {show_rate(link.rate_Bps)}, {show_time(link.latency_s)}, {link.kind}"
    if busy is None or not makespan_s:
        return f"{said}, not used"
    return f"{said}, busy {share_text(busy / makespan_s)} of the time ({show_time(busy)})"


def link_ends(fabric: Fabric) -> list[list[float] | None]:
    """Per directed link [x1, y1, x2, y2] in the drawing; None where an end is not drawn."""
    places = arrangement(drawn(fabric).fabric).places
    return [
        [round(v, 1) for v in (*places[x.src], *places[x.dst])] if x.src in places and x.dst in places else None for x in fabric.links
    ]  # fmt: skip


def link_table(fabric: Fabric, busy_s: Mapping[str, float], makespan_s: float) -> Html:
    """The busiest links in numbers."""
    names = link_names(fabric)
    used = sorted((k for k, n in enumerate(names) if busy_s.get(n)), key=lambda k: (-busy_s[names[k]], k))
    rows = [
        [shortened(names[k].replace("->", " to ")), fabric.links[k].kind, show_rate(fabric.links[k].rate_Bps), show_time(busy_s[names[k]]),
         share_text(busy_s[names[k]] / makespan_s)]
        for k in used[:MAX_LISTED_LINKS]
    ]  # fmt: skip
    more = f"; {len(used) - MAX_LISTED_LINKS} more are used" if len(used) > MAX_LISTED_LINKS else ""
    caption = f"Busiest of {len(names)} links{more}"
    if not rows:
        return joined([tag("p", "No link carries anything.")])
    return table(caption, ["link", "kind", "rate", "busy", "of the time"], rows, numbers=(2, 3, 4))
