"""What all drawings share: the frame of a self-contained SVG, texts that are escaped and cut, axes, colours for light and dark.

No script, no outside font or image. Colours that carry meaning are the same in both schemes and are named in a legend; ink, paper and lines
follow the reader's scheme by the classes `ink`, `soft`, `paper`, `panel`, `rule`, `halo` (texts without a colour: ink). Coordinates are
rounded, so equal inputs give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

__all__ = ["PALETTE", "clean", "cut", "document", "legend", "line", "rect", "text", "ticks"]

PALETTE = ("#3b6fb6", "#b3592e", "#2f8f5b", "#8a6bbf", "#b5942c", "#2c8c99", "#b34d78", "#6d7480")

_STYLE = """
svg { font-family: Helvetica, Arial, sans-serif; font-size: 11px; fill: #1d232b }
.paper { fill: #ffffff } .panel { fill: #f3f4f6 } .ink { fill: #1d232b } .soft { fill: #5a626d } .rule { stroke: #c4c8cf; fill: none }
.halo { stroke: #ffffff }
@media (prefers-color-scheme: dark) {
svg { fill: #e8ebef } .halo { stroke: #14181d }
.paper { fill: #14181d } .panel { fill: #1e242b } .ink { fill: #e8ebef } .soft { fill: #a3abb6 } .rule { stroke: #3d454f }
}
"""
_STEPS = (1.0, 2.0, 5.0)


def document(width: float, height: float, body: Iterable[str], *, title: str, summary: str) -> str:
    """The whole drawing. `title` and `summary` are what a screen reader says instead of it."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{clean(title)}</title>", f"<desc>{clean(summary)}</desc>", f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        *body, "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def clean(value: str) -> str:
    """Escaped, and without characters that no XML may hold."""
    return escape("".join(c if c in "\t\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value))


def cut(value: str, most: int) -> str:
    """At most `most` characters, the rest an ellipsis."""
    return value if len(value) <= most else value[: max(most - 1, 0)] + "…"


def text(x: float, y: float, value: str, *, kind: str = "ink", anchor: str = "", size: float = 0, bold: bool = False, fill: str = "") -> str:
    style = (f' text-anchor="{anchor}"' if anchor else "") + (f' font-size="{size:g}"' if size else "") + (' font-weight="bold"' if bold else "")
    colour = f'fill="{fill}"' if fill else f'class="{kind}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {colour}{style}>{clean(value)}</text>'


def rect(x: float, y: float, width: float, height: float, *, fill: str = "", kind: str = "", tip: str = "", rx: float = 0) -> str:
    look = (f' fill="{fill}"' if fill else "") + (f' class="{kind}"' if kind else "") + (f' rx="{rx:g}"' if rx else "")
    head = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"{look}'
    return f"{head}><title>{clean(tip)}</title></rect>" if tip else head + "/>"


def line(points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{style}/>'


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], *, width: float) -> tuple[list[str], float]:
    """Coloured boxes with their names, as many to a line as fit in `width`; and the height of it."""
    marks, at, row = [], x, 0
    for name, colour in entries:
        needs = 20 + 6.4 * len(name) + 14
        if at > x and at + needs > x + width:
            at, row = x, row + 1
        marks.append(rect(at, y + 17 * row, 11, 11, fill=colour, rx=2))
        marks.append(text(at + 16, y + 17 * row + 9.5, name))
        at += needs
    return marks, 17.0 * (row + 1) if entries else 0.0


def ticks(highest: float, about: int) -> list[float]:
    """Round values from 0 up to `highest`, roughly `about` of them."""
    if not (math.isfinite(highest) and highest > 0):
        return [0.0]
    raw = highest / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * s for s in _STEPS if power * s >= raw), power * 10)
    return [k * step for k in range(int(highest / step + 1e-9) + 1)]
