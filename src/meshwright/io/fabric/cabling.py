"""Lists of cables for those who plug them: CSV, one line per cable or fibre, and Graphviz."""

from __future__ import annotations

from collections.abc import Sequence

from ...fabric.fabric import Fabric

__all__ = ["cabling_csv", "graphviz", "moves_csv"]


def _cables(fabric: Fabric) -> list[tuple[str, str, int, str]]:
    """(from, to, rate, ways): a link and the link back of equal rate are one cable."""
    links = [(x.src, x.dst, x.rate_Bps) for x in fabric.links]
    left = dict.fromkeys(links, 0)
    for link in links:
        left[link] += 1
    found = []
    for a, b, rate in links:
        if not left[a, b, rate]:
            continue
        left[a, b, rate] -= 1
        both = left.get((b, a, rate), 0) > 0
        if both:
            left[b, a, rate] -= 1
        found.append((a, b, rate, "both ways" if both else "one way"))
    return found


def cabling_csv(fabric: Fabric) -> str:
    """Header `from,from_port,to,to_port,rate_Bps,ways`; ports count from 0, one-way fibres in and out each on their own."""
    used: dict[tuple[str, str], int] = {}

    def port(name: str, side: str) -> int:
        used[name, side] = used.get((name, side), -1) + 1
        return used[name, side]

    rows = ["from,from_port,to,to_port,rate_Bps,ways"]
    for a, b, rate, ways in _cables(fabric):
        out, into = ("out", "in") if ways == "one way" else ("both", "both")
        rows.append(f"{a},{port(a, out)},{b},{port(b, into)},{rate},{ways}")
    return "\n".join(rows) + "\n"


def moves_csv(names: Sequence[str], unplugged: Sequence[tuple[int, int]], plugged: Sequence[tuple[int, int]]) -> str:
    """Header `do,from,to`: links to unplug, then links to plug; a two-way cable is a line each way."""
    rows = [f"{what},{names[a]},{names[b]}" for what, links in (("unplug", unplugged), ("plug", plugged)) for a, b in links]
    return "\n".join(["do,from,to", *rows]) + "\n"


def graphviz(fabric: Fabric) -> str:
    """`dot` draws it: accelerators as ellipses, switches as boxes, cables that carry both ways without arrow heads."""
    lines = [f'digraph "{fabric.name}" {{']
    lines += [f'  "{x.name}";' for x in fabric.devices]
    lines += [f'  "{x.name}" [shape=box];' for x in fabric.switches]
    for a, b, _, ways in _cables(fabric):
        lines.append(f'  "{a}" -> "{b}"' + (" [dir=none];" if ways == "both ways" else ";"))
    return "\n".join([*lines, "}"]) + "\n"
