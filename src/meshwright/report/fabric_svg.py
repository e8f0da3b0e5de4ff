"""A fabric as a drawing: servers as boxes, devices and switches in them, links with a width by rate.

Self-contained SVG 1.1, no script, no outside font or image; every text from the fabric is escaped. Inside a server, switches
that reach out (NICs) stand above the devices, others (NVSwitch) below; devices that are linked directly stand in a circle.
Both directions of a cable are one line; a one-way link has an arrow head. Every line and node has a tooltip with the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import quoteattr

from ..fabric.fabric import Fabric
from ..io.quantity import show_rate, show_time
from .svg import clean, cut, document, text

__all__ = ["NODE_H", "NODE_W", "Arrangement", "arrangement", "fabric_svg", "short_name"]

MAX_DRAWN_DEVICES = 256  # further servers are named in a note
NODE_W, NODE_H, GAP = 74, 26, 16
_COLORS = {"NV": "#2f8f5b", "XGMI": "#c8473f", "NET": "#3b6fb6", "LO": "#808690"}  # others, PCIe: brown; to be told on white and on black
_OTHER = "#b07a2a"


@dataclass
class _Box:
    """One server (or, with an empty name, the network between servers) with the places of its nodes inside it."""

    name: str
    places: dict[str, tuple[float, float]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Where everything stands: centres of nodes by name, servers as boxes; devices that are not drawn."""

    width: float
    height: float
    places: dict[str, tuple[float, float]]
    boxes: list[_Box]
    left_out: int


def arrangement(fabric: Fabric) -> Arrangement:
    """At most 256 devices have a place, whole servers first."""
    drawn, left_out = _chosen(fabric)
    neighbours: dict[str, set[str]] = {name: set() for name in fabric.actor_names}
    for link in fabric.links:
        neighbours[link.src].add(link.dst)
        neighbours[link.dst].add(link.src)
    group_of = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    boxes = [_box(fabric, name, members, neighbours, group_of) for name, members in drawn.items()]
    network = [s.name for s in fabric.switches if s.group not in drawn or not s.group]
    width, height, places = _arrange(boxes, network)
    return Arrangement(width=width, height=height, places=places, boxes=boxes, left_out=left_out)


def fabric_svg(fabric: Fabric) -> str:
    """Draw the fabric; equal fabrics give equal text. At most 256 devices are drawn, whole servers first."""
    picture = arrangement(fabric)
    width, height, places, boxes, left_out = picture.width, picture.height, picture.places, picture.boxes, picture.left_out
    lines = _links(fabric, places)
    legend, legend_height = _legend(fabric, height)
    note = f"{left_out} more devices are not drawn" if left_out else ""
    title = fabric.name + (f" ({note})" if note else "")
    summary = f"{len(fabric.devices)} devices, {len(fabric.switches)} switches, {len(fabric.links)} links"
    body = [
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        text(16, 22, title, size=15, bold=True),
        *(_frame(box) for box in boxes if box.name),
        *lines,
        *(_node(fabric, name, place) for name, place in places.items()),
        *legend,
    ]
    return document(width, height + legend_height, body, title=title, summary=summary)


def _chosen(fabric: Fabric) -> tuple[dict[str, list[str]], int]:
    """Group -> names of its devices, for as many whole groups as fit; and how many devices are left out."""
    drawn: dict[str, list[str]] = {}
    count = 0
    for group, members in fabric.groups.items():
        room = MAX_DRAWN_DEVICES - count
        if drawn and len(members) > room:
            break
        drawn[group] = [fabric.devices[i].name for i in members[:room]]
        count += len(drawn[group])
    return drawn, len(fabric.devices) - count


# ---- places ------------------------------------------------------------------------------------------------------------
def _box(fabric: Fabric, name: str, devices: list[str], neighbours: dict[str, set[str]], group_of: dict[str, str]) -> _Box:
    switches = [s.name for s in fabric.switches if name and s.group == name]
    above = [s for s in switches if any(group_of[x] != name for x in neighbours[s])]
    below = [s for s in switches if s not in above]
    members = set(devices)
    box = _Box(name)
    step = NODE_W + GAP
    if any(neighbours[d] & members for d in devices):
        radius = max(90.0, len(devices) * step / (2 * math.pi))
        inner, across = 2 * radius + NODE_H, 2 * radius + NODE_W
        ring = [2 * math.pi * i / len(devices) - math.pi / 2 for i in range(len(devices))]
        shape = [(radius * math.cos(t), inner / 2 + radius * math.sin(t)) for t in ring]
    else:
        columns = min(8, len(devices))
        across = columns * step - GAP
        rows = -(-len(devices) // columns)
        inner = rows * (NODE_H + 2 * GAP) - 2 * GAP
        shape = [((i % columns - (columns - 1) / 2) * step, (i // columns) * (NODE_H + 2 * GAP) + NODE_H / 2) for i in range(len(devices))]
    box.width = max(across, max(len(above), len(below)) * step - GAP) + 2 * GAP
    y = 30.0
    for row in (above, None, below):
        if row is None:
            box.places |= {d: (box.width / 2 + dx, y + dy) for d, (dx, dy) in zip(devices, shape, strict=True)}
            y += inner + 70
        elif row:
            box.places |= {s: (box.width / 2 + (i - (len(row) - 1) / 2) * step, y + NODE_H / 2) for i, s in enumerate(row)}
            y += NODE_H + 70
    box.height = y - 70 + 20
    return box


def _arrange(boxes: list[_Box], network: list[str]) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Servers in rows of four under the network's switches; returns the width, the height and every node's place."""
    per_row = 4 if len(boxes) <= 8 else math.ceil(math.sqrt(len(boxes)))
    rows = [boxes[i : i + per_row] for i in range(0, len(boxes), per_row)]
    step = NODE_W + GAP
    width = max([sum(b.width + 24 for b in row) for row in rows] + [step * min(16, len(network)), 420]) + 24
    y = 44.0
    places: dict[str, tuple[float, float]] = {}
    for start in range(0, len(network), 16):
        line = network[start : start + 16]
        places |= {name: (width * (i + 1) / (len(line) + 1), y + NODE_H / 2) for i, name in enumerate(line)}
        y += NODE_H + GAP
    y += 70 if network else 0
    for row in rows:
        x = (width - sum(b.width + 24 for b in row) + 24) / 2
        for box in row:
            box.x, box.y = x, y
            places |= {name: (x + px, y + py) for name, (px, py) in box.places.items()}
            x += box.width + 24
        y += max(b.height for b in row) + 60
    return width, y - 40, places


# ---- marks -------------------------------------------------------------------------------------------------------------
def _frame(box: _Box) -> str:
    return (
        f'<g><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" class="panel" stroke="#c4c8cf"/>'
        f'<text x="{box.x + 10:.1f}" y="{box.y + 16:.1f}" class="soft">{clean(box.name)}</text></g>'
    )


def _node(fabric: Fabric, name: str, place: tuple[float, float]) -> str:
    x, y = place
    device = fabric.actor_of[name] < len(fabric.devices)
    fill, text_fill, rx = ("#20324d", "#ffffff", 4) if device else ("#ffffff", "#20324d", 13)
    short = short_name(name)
    return (
        f"<g><title>{clean(name)}</title>"
        f'<rect x="{x - NODE_W / 2:.1f}" y="{y - NODE_H / 2:.1f}" width="{NODE_W}" height="{NODE_H}" rx="{rx}" fill="{fill}" stroke="#5b7196"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="{text_fill}">{clean(short)}</text></g>'
    )


def short_name(name: str) -> str:
    """What fits in a node: the part after the server's name, at most 12 characters."""
    short = name.rpartition("/")[2]
    return cut(short, 12)


def _color(kind: str) -> str:
    return _COLORS.get(kind.rstrip("0123456789"), _OTHER)


def _stroke(rate: int, fabric: Fabric) -> float:
    """1 to 6 pixels, by the logarithm of the rate between the fabric's slowest and fastest link."""
    low, high = min(x.rate_Bps for x in fabric.links), max(x.rate_Bps for x in fabric.links)
    return 3.0 if low == high else 1 + 5 * math.log(rate / low) / math.log(high / low)


def _links(fabric: Fabric, places: dict[str, tuple[float, float]]) -> list[str]:
    pairs: dict[tuple[str, str], list[int]] = {}
    for index, link in enumerate(fabric.links):
        if link.src in places and link.dst in places:
            key = (link.dst, link.src) if (link.dst, link.src) in pairs else (link.src, link.dst)
            pairs.setdefault(key, []).append(index)
    labelled = len(pairs) <= 40
    marks: list[str] = []
    texts: list[str] = []
    for (a, b), indices in pairs.items():
        links = [fabric.links[i] for i in indices]
        (x1, y1), (x2, y2) = places[a], places[b]
        one_way = all(x.src == a for x in links)
        fastest = max(links, key=lambda x: x.rate_Bps)
        tip = "\n".join(f"{x.src} -> {x.dst}: {show_rate(x.rate_Bps)}, {show_time(x.latency_s)}, {x.kind}" for x in links)
        if one_way:
            x2, y2 = _border(x1, y1, x2, y2)
        marks.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_color(fastest.kind)}" stroke-opacity="0.75" '
            f'stroke-width="{_stroke(fastest.rate_Bps, fabric):.2f}"{" marker-end=" + quoteattr("url(#arrow)") if one_way else ""}>'
            f"<title>{clean(tip)}</title></line>"
        )
        if labelled:
            share = 0.42  # not in the middle, where the chords of a circle cross
            found = " / ".join(dict.fromkeys(show_rate(x.rate_Bps) for x in links))
            texts.append(
                f'<text x="{x1 + share * (x2 - x1):.1f}" y="{y1 + share * (y2 - y1) + 3:.1f}" text-anchor="middle" font-size="9" '
                f'class="halo" stroke-width="3" paint-order="stroke">{clean(found)}</text>'
            )
    return marks + texts


def _border(x1: float, y1: float, x2: float, y2: float) -> tuple[float, float]:
    """Where the line from (x1, y1) enters the node at (x2, y2), so that the arrow head is seen."""
    dx, dy = x2 - x1, y2 - y1
    reach = min(NODE_W / 2 / abs(dx) if dx else math.inf, NODE_H / 2 / abs(dy) if dy else math.inf, 1.0)
    return x2 - reach * dx, y2 - reach * dy


def _legend(fabric: Fabric, top: float) -> tuple[list[str], float]:
    """One line per kind and rate of link, at most 12."""
    classes: dict[tuple[str, int], int] = {}
    for link in fabric.links:
        classes[link.kind, link.rate_Bps] = classes.get((link.kind, link.rate_Bps), 0) + 1
    rows = sorted(classes.items(), key=lambda item: (-item[0][1], item[0][0]))
    marks: list[str] = []
    for i, ((kind, rate), count) in enumerate(rows[:12]):
        y = top + 10 + 18 * i
        marks.append(f'<line x1="20" y1="{y:.1f}" x2="64" y2="{y:.1f}" stroke="{_color(kind)}" stroke-width="{_stroke(rate, fabric):.2f}"/>')
        marks.append(f'<text x="74" y="{y + 4:.1f}">{clean(kind)}: {show_rate(rate)} per direction, {count} links</text>')
    if len(rows) > 12:
        marks.append(f'<text x="74" y="{top + 14 + 18 * 12:.1f}">and {len(rows) - 12} more kinds</text>')
    return marks, 18.0 * min(13, len(rows)) + 16
