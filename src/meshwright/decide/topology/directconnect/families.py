"""Base wirings of a given size: complete (bipartite) graphs, rings, Hamming graphs, tori, generalized Kautz, de Bruijn, known small graphs, and
those of `geometries`.

Each family answers for (nodes, ports) with the wirings it has there; `paired` asks for two-way cables only. Circulants, and Cayley digraphs at large,
are searched (`cayley`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as cross
from math import gcd

from .geometries import polar_fly, slim_fly
from .wiring import Wiring, product

__all__ = ["base_wirings", "complete", "de_bruijn", "generalized_kautz", "hamming", "ring", "torus"]

# Distance-regular graphs by their cycle and chords (LCF notation: node i is joined to i + chord, chords repeat), all with three ports.
LCF = {
    "Heawood": (14, (5, -5)), "Pappus": (18, (5, 7, -7, 7, -7, -5)), "Desargues": (20, (5, -5, 9, -9)),
    "Tutte-Coxeter": (30, (-13, -9, 7, -7, 9, 13)),
}  # fmt: skip


def complete(m: int) -> Wiring:
    return Wiring.of(f"K{m}", m, [(a, b) for a in range(m) for b in range(m) if a != b], transitive=True)


def complete_bipartite(m: int) -> Wiring:
    sides = [(a, m + b) for a in range(m) for b in range(m)]
    return Wiring.of(f"K{m},{m}", 2 * m, sides + [(b, a) for a, b in sides], transitive=True)


def ring(m: int, *, paired: bool) -> Wiring:
    """One way, or both ways; two nodes both ways have two links."""
    arcs = [(a, (a + 1) % m) for a in range(m)]
    return Wiring.of(f"{'ring' if paired else 'one-way ring'} {m}", m, arcs + [(b, a) for a, b in arcs] * paired, transitive=True)


def hamming(dims: int, side: int) -> Wiring:
    """Nodes are words; joined where they differ in one letter. Of side 2 it is the hypercube."""
    found = complete(side)
    for _ in range(dims - 1):
        found = product(found, complete(side))
    return Wiring.of(f"H({dims},{side})", found.nodes, found.arcs, transitive=True)


def torus(sides: tuple[int, ...], twist: int = 0) -> Wiring:
    """A grid with closed rows; `twist` (two dimensions): a column that is closed enters `twist` columns further."""
    strides = [1] * len(sides)
    for i in range(len(sides) - 2, -1, -1):
        strides[i] = strides[i + 1] * sides[i + 1]
    arcs = []
    for at in cross(*map(range, sides)):
        for axis, side in enumerate(sides):
            to = list(at)
            to[axis] = (at[axis] + 1) % side
            if twist and axis == 0 and to[0] == 0:
                to[1] = (to[1] + twist) % sides[1]
            a, b = (sum(x * s for x, s in zip(w, strides, strict=True)) for w in (at, to))
            arcs += [(a, b), (b, a)]
    name = "x".join(map(str, sides)) + (f"+{twist}" if twist else "")
    nodes = strides[0] * sides[0]
    return Wiring.of(f"torus {name}", nodes, arcs, transitive=True)


def generalized_kautz(nodes: int, ports: int) -> Wiring:
    """Imase and Itoh: x is joined to -d x - a mod N, a = 1 .. d. For any N; loops are ports wasted."""
    return Wiring.of(f"Kautz({ports},{nodes})", nodes, [(x, (-ports * x - a) % nodes) for x in range(nodes) for a in range(1, ports + 1)])


def de_bruijn(ports: int, letters: int, *, mended: bool) -> Wiring:
    """Words of so many letters, shifted. mended: the loops at words of one letter become a cycle through these words."""
    nodes = ports**letters
    arcs = [(x, (x * ports + a) % nodes) for x in range(nodes) for a in range(ports)]
    if mended:
        alike = [a * (nodes - 1) // (ports - 1) for a in range(ports)]
        arcs = [(a, b) for a, b in arcs if a != b] + [(x, alike[(i + 1) % ports]) for i, x in enumerate(alike)]
    return Wiring.of(f"{'mended ' if mended else ''}de Bruijn({ports},{letters})", nodes, arcs)


def _known(nodes: int, ports: int) -> Iterator[Wiring]:
    for name, (order, chords) in LCF.items():
        if (order, 3) == (nodes, ports):
            cycle = [(i, (i + 1) % order) for i in range(order)]
            arcs = cycle + [(b, a) for a, b in cycle] + [(i, (i + chords[i % len(chords)]) % order) for i in range(order)]
            yield Wiring.of(name, order, arcs, transitive=True)
    if (nodes, ports) == (10, 3):
        outer = [(i, (i + 1) % 5) for i in range(5)] + [(i, i + 5) for i in range(5)] + [(5 + i, 5 + (i + 2) % 5) for i in range(5)]
        yield Wiring.of("Petersen", 10, outer + [(b, a) for a, b in outer], transitive=True)
    if nodes == ports + 2 and nodes % 2 == 0:  # octahedron and its kin: all but the opposite
        yield Wiring.of(f"octahedron {nodes}", nodes, [(a, b) for a in range(nodes) for b in range(nodes) if (a - b) % (nodes // 2)], transitive=True)


def _grids(nodes: int, dims: int, least: int = 3) -> Iterator[tuple[int, ...]]:
    if dims == 1:
        if nodes >= least:
            yield (nodes,)
        return
    for side in range(least, nodes + 1):
        if nodes % side == 0:
            for rest in _grids(nodes // side, dims - 1, side):
                yield (side, *rest)


def base_wirings(nodes: int, ports: int, *, paired: bool) -> list[Wiring]:
    """All that the families have of that size, each family once; `paired`: those whose arcs come in pairs."""
    found: list[Wiring] = []
    if nodes < 2 or ports < 1:
        return found
    if nodes == ports + 1:
        found.append(complete(nodes))
    if nodes == 2 * ports:
        found.append(complete_bipartite(ports))
    if ports == 1 and not paired:
        found.append(ring(nodes, paired=False))
    if ports == 2:
        found.append(ring(nodes, paired=True))
    for dims in range(2, ports + 1):
        side = ports // dims + 1
        if (side - 1) * dims == ports and side**dims == nodes:
            found.append(hamming(dims, side))
    if ports % 2 == 0 and ports >= 4:
        found += [torus(sides) for sides in _grids(nodes, ports // 2)]
        if ports == 4:
            found += [torus((r, c), twist) for r, c in _grids(nodes, 2) for twist in range(1, c // 2 + 1) if gcd(twist, c) in (1, twist)]
    found += _known(nodes, ports)
    found += [w for w in (slim_fly(nodes, ports), polar_fly(nodes, ports)) if w is not None]
    if not paired and ports >= 2:
        found.append(generalized_kautz(nodes, ports))
        letters = 1
        while ports**letters < nodes:
            letters += 1
        if ports**letters == nodes and letters > 1:
            found += [de_bruijn(ports, letters, mended=mended) for mended in (False, True)]
    return found
