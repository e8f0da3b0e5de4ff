"""Wirings of N nodes with d ports each, and the expansions that make larger ones: line graph, degree, Cartesian product.

A loop is a port that is wasted; parallel arcs are a link of so many times the rate. Both stay in the table of arcs, so that every node has `ports`
arcs in and out. The transpose of an expansion is the expansion of the transpose, so both directions are expanded at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arcs", "Wiring", "copies", "line_graph", "product", "widened"]

Arcs = NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Wiring:
    """`arcs[k] = (from, to)`. transitive: known to look the same from every node. paired: every arc has its reverse (two-way cables).

    made: the expansion it comes from: "line", "copies" or "power", the base, and how many copies or dimensions."""

    name: str
    nodes: int
    ports: int
    arcs: Arcs
    transitive: bool = False
    made: tuple[Literal["line", "copies", "power"], Wiring, int] | None = None

    @staticmethod
    def of(
        name: str, nodes: int, arcs: Iterable[tuple[int, int]] | Arcs, *, transitive: bool = False,
        made: tuple[Literal["line", "copies", "power"], Wiring, int] | None = None,
    ) -> Wiring:  # fmt: skip
        """Raises: ValueError when the nodes have unlike numbers of arcs, which is a mistake of a family."""
        table = np.asarray(arcs if isinstance(arcs, np.ndarray) else list(arcs), np.int32).reshape(-1, 2)
        ports = len(table) // nodes
        for side in (0, 1):
            if not (np.bincount(table[:, side], minlength=nodes) == ports).all():
                raise ValueError(f"{name}: nodes with unlike numbers of ports")
        return Wiring(name=name, nodes=nodes, ports=ports, arcs=table[np.lexsort((table[:, 1], table[:, 0]))], transitive=transitive, made=made)

    def transposed(self) -> Wiring:
        return Wiring.of(self.name, self.nodes, self.arcs[:, ::-1].copy(), transitive=self.transitive)

    @property
    def paired(self) -> bool:
        return bool((self.transposed().arcs == self.arcs).all())

    @property
    def peers(self) -> int:
        """Most others that one node sends to or receives from."""
        ends = np.array(list(self.links()), np.int64).reshape(-1, 2)
        return int(max(np.bincount(ends[:, side]).max(initial=0) for side in (0, 1)))

    @property
    def parallel(self) -> int:
        """Most arcs from one node to the same other."""
        return max(self.links().values(), default=0)

    def links(self) -> dict[tuple[int, int], int]:
        """(from, to) -> how many arcs; without loops."""
        found: dict[tuple[int, int], int] = {}
        for a, b in self.arcs.tolist():
            if a != b:
                found[a, b] = found.get((a, b), 0) + 1
        return found


def line_graph(base: Wiring) -> Wiring:
    """Nodes are the arcs of `base`; arc ab is joined to every arc bc. As many ports, `ports` times the nodes."""
    d = base.ports
    ends = base.arcs[:, 1].astype(np.int64)
    following = (ends[:, None] * d + np.arange(d)).ravel()  # arcs are sorted by where they begin: those of node b are b·d .. b·d + d - 1
    arcs = np.stack([np.repeat(np.arange(len(base.arcs)), d), following], 1)
    return Wiring.of(_repeated("L", base.name), base.nodes * d, arcs.astype(np.int32), made=("line", base, 1))


def _repeated(mark: str, name: str) -> str:
    """`L(x)` of `L(x)` is `L2(x)`."""
    head, paren, rest = name.partition("(")
    times = head[len(mark) :]
    if paren and head.startswith(mark) and (times == "" or times.isdigit()) and rest.endswith(")"):
        return f"{mark}{int(times or 1) + 1}({rest}"
    return f"{mark}({name})"


def copies(base: Wiring, count: int) -> Wiring:
    """`count` copies of every node; copies of u are joined to all copies of v where u is to v. Ports and nodes are multiplied."""
    n = base.arcs.astype(np.int64) * count
    own = np.arange(count)
    arcs = np.stack(np.broadcast_arrays(n[:, :1, None] + own[:, None], n[:, 1:, None] + own[None, :]), -1).reshape(-1, 2)
    return Wiring.of(f"{base.name}*{count}", base.nodes * count, arcs.astype(np.int32), transitive=base.transitive, made=("copies", base, count))


def product(first: Wiring, second: Wiring) -> Wiring:
    """Nodes are pairs; an arc changes one part by an arc of its factor. Ports add, nodes multiply."""
    n, m = first.nodes, second.nodes
    a, b = first.arcs.astype(np.int64), second.arcs.astype(np.int64)
    rows = (a[:, None, :] * m + np.arange(m)[None, :, None]).reshape(-1, 2)
    columns = (np.arange(n)[:, None, None] * m + b[None, :, :]).reshape(-1, 2)
    arcs = np.concatenate([rows, columns]).astype(np.int32)
    rule, base, dims = first.made or ("", first, 1)
    power = ("power", second, dims + 1 if rule == "power" else 2) if second is (base if rule == "power" else first) else None
    return Wiring.of(f"{first.name} x {second.name}", n * m, arcs, transitive=first.transitive and second.transitive, made=power)  # type: ignore[arg-type]


def widened(base: Wiring, ports: int) -> Wiring:
    """`base` with its links doubled, tripled, ... up to `ports` arcs of every node: to the same neighbours.

    What is left over goes to whole permutations of the base: any graph with equal ports is a union of them (Koenig)."""
    times, left = divmod(ports, base.ports)
    arcs, rest = [base.arcs] * times, base.arcs.tolist()
    for _ in range(left):
        chosen = _permutation(base.nodes, rest)
        arcs.append(np.array(chosen, np.int32))
        for arc in chosen:
            rest.remove(arc)
    return Wiring.of(f"{base.name}, {ports} ports", base.nodes, np.concatenate(arcs), transitive=base.transitive and not left)


def _permutation(nodes: int, arcs: list[list[int]]) -> list[list[int]]:
    """One arc out of every node, no two into the same, of a graph in which all have equally many."""
    out: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in arcs:
        out[a].append(b)
    of = [-1] * nodes  # the node whose arc enters
    for start in range(nodes):
        came, queue = {start: (-1, -1)}, [start]  # sender -> the receiver it was reached by, and who asked
        for a in queue:
            free = next((b for b in out[a] if of[b] < 0), None)
            if free is not None:
                while a >= 0:
                    (b, asked), of[free] = came[a], a
                    free, a = b, asked
                break
            for b in out[a]:
                if of[b] not in came:
                    came[of[b]] = b, a
                    queue.append(of[b])
    return [[a, b] for b, a in enumerate(of)]
