"""Two-way wirings of two steps from finite fields: Slim Fly and PolarFly.

Cite: B. McKay, M. Miller, J. Siran, "A note on large graphs of diameter two and given maximum degree" (J. Combin. Theory B 74, 1998), as M. Besta and
T. Hoefler, "Slim Fly" (SC 2014), wire it; P. Erdos, A. Renyi (1962) and W. Brown (1966), as K. Lakhotia and others, "PolarFly" (SC 2022), wire it.
Left open by the papers: schedules. Our answer: as for every wiring.
Deviations: nodes are accelerators, not switches; a PolarFly's q + 1 self-conjugate points keep one port each as a loop.
Invariant: no two nodes are more than two links apart. Cost: field tables of q x q.
"""

from __future__ import annotations

from itertools import product as cross
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from .wiring import Wiring

__all__ = ["Field", "polar_fly", "slim_fly"]


class Field:
    """Of q elements 0 .. q - 1, written to the base p: `add`, `times`, [q, q] tables; `powers` of an element that makes all others but 0."""

    add: NDArray[np.int64]
    times: NDArray[np.int64]
    powers: list[int]

    def __init__(self, q: int, p: int, degree: int) -> None:
        digits = np.array(list(cross(range(p), repeat=degree)))[:, ::-1]  # of element i: the lowest first
        weights = p ** np.arange(degree)
        self.add = (digits[:, None, :] + digits[None, :, :]) % p @ weights
        for tail in digits:  # x to the degree is this; where powers of x make everything, it is a field
            powers = self._powers(tail, p, degree, q)
            if len(set(powers)) == q - 1 and 0 not in powers:
                break
        self.powers = powers
        log = np.zeros(q, np.int64)
        log[powers] = np.arange(q - 1)
        self.times = np.array(powers)[(log[:, None] + log[None, :]) % (q - 1)]
        self.times[0, :] = self.times[:, 0] = 0

    @staticmethod
    def _powers(tail: NDArray[np.int64], p: int, degree: int, q: int) -> list[int]:
        """1, x, x^2, ... of x (degree one: of the number `tail`)."""
        found, now = [], np.eye(1, degree, dtype=np.int64)[0]
        for _ in range(q - 1):
            found.append(int(now @ p ** np.arange(degree)))
            now = (np.append(0, now[:-1]) + now[-1] * tail) % p
        return found

    @staticmethod
    def of(q: int) -> Field | None:
        """None where q is no power of a prime."""
        p = next((p for p in range(2, isqrt(q) + 1) if q % p == 0), q)
        degree = 1
        while p**degree < q:
            degree += 1
        return Field(q, p, degree) if q > 1 and p**degree == q else None


def slim_fly(nodes: int, ports: int) -> Wiring | None:
    """Of 2 q^2 nodes with (3q - d) / 2 ports, q = 4w + d a power of a prime; None where that is none.

    Nodes are (side, row, place): in a row they are joined by differences that are half of the powers of the field's generator, on the other side by
    these times the generator; and (0, x, y) to (1, m, c) where y = m x + c.
    """
    q = isqrt(nodes // 2)
    rest = (q + 1) % 4 - 1
    if 2 * q * q != nodes or q < 3 or 2 * ports != 3 * q - rest or rest == 2 or (field := Field.of(q)) is None:
        return None
    turn = q // 2 if rest == -1 else q  # even powers up to it, then odd ones: as many as there are, and the negative of each
    half = [i for i in range(q - 1) if (i < turn) == (i % 2 == 0)]
    apart = [(s, field.powers[(i + s) % (q - 1)]) for s in (0, 1) for i in half]
    add, times, at = field.add, field.times, np.arange(nodes).reshape(2, q, q)
    arcs = [(int(at[s, x, y]), int(at[s, x, add[y, d]])) for s, d in apart for x, y in cross(range(q), repeat=2)]
    for x, m, c in cross(range(q), repeat=3):
        a, b = int(at[0, x, add[times[m, x], c]]), int(at[1, m, c])
        arcs += [(a, b), (b, a)]
    return Wiring.of(f"Slim Fly {q}", nodes, arcs)


def polar_fly(nodes: int, ports: int) -> Wiring | None:
    """The points of a plane over q = ports - 1 elements, joined where they are orthogonal; None where that is none."""
    q = ports - 1
    if q < 2 or nodes != q * q + q + 1 or (field := Field.of(q)) is None:
        return None
    points = [(1, a, b) for a, b in cross(range(q), repeat=2)] + [(0, 1, a) for a in range(q)] + [(0, 0, 1)]
    x, y, z = np.array(points).T
    products = field.add[field.add[field.times[x[:, None], x], field.times[y[:, None], y]], field.times[z[:, None], z]]
    return Wiring.of(f"PolarFly {q}", nodes, np.argwhere(products == 0).astype(np.int32))
