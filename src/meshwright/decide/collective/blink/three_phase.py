"""The three-phase all-reduce of several servers, as trees: reduce inside servers, exchange between their roots, broadcast inside.

Source: Blink (arXiv 1910.04940), section on multiple servers. Every unit of the message picks in each server one locally packed tree and one
local root (a rank at a network port); the roots of a unit form a star around the root of the server that adds it up, so a unit is
one spanning tree over all ranks: climbed it is phase one and half of two, descended the other half and three. Pieces stream through.
Left open by the paper: which root and tree a unit takes. Our answer: smooth weighted round robin, trees by packed weight and roots by their
share of the server's ports, servers adding up in turn; servers need not be alike (3 and 5 GPUs): the number of units is global.
Deviations: with more than two servers a unit is added up in one of them instead of everywhere, which moves 2 (H - 1) / H of the message
through each server instead of H - 1 times the message.
Invariant: every unit's tree spans all ranks; load on every link is counted exactly and decides the number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ....errors import Disconnected
from ..classic.hierarchical import servers_of
from ..problem import CollectiveProblem
from ..rates import RateGraph
from .graph import canonical
from .pack import pack
from .tree_sets import Chosen, TreeSet, chosen_tree, own_path, set_rate, switch_path

__all__ = ["port_shares", "three_phase_set"]

# Units of the message that are tried, apart from one full turn of all servers and roots: each is a spanning tree over all ranks.
MAX_UNITS = 128
Path = tuple[int, ...]


class _Local:
    """One server: its ranks, its packed trees as paths between neighbours, its roots with shares."""

    def __init__(self, members: list[int], trees: list[tuple[dict[tuple[int, int], Path], int]], roots: list[tuple[int, Fraction]]) -> None:
        self.members, self.trees, self.roots = members, trees, roots


def three_phase_set(problem: CollectiveProblem, graph: RateGraph, *, epsilon: float, theta: float) -> TreeSet | None:
    """The plan's trees; None for one server, servers of one rank each, or a server whose ranks its own links do not join."""
    servers = servers_of(problem)
    if len(servers) < 2 or all(len(s) == 1 for s in servers):
        return None
    shares = port_shares(problem, graph, servers)
    locals_: list[_Local] = []
    for members, share in zip(servers, shares, strict=True):
        inside = _local_trees(graph, members, epsilon, theta)
        if inside is None:
            return None
        locals_.append(_Local(members, inside, share))
    best: tuple[Fraction, int, list[Chosen]] | None = None
    # One full turn: every root of the largest server once while each server adds up.
    period = max(len(local.roots) for local in locals_) * len(servers)
    for count in sorted({*range(1, 25), *(period * i for i in range(1, 5))}):
        if count > MAX_UNITS and count != period:
            continue
        trees = _units(problem, graph, locals_, count)
        if trees is None:
            return None
        rate = set_rate(problem, graph, trees)
        if best is None or rate > best[0] * Fraction(103, 100):  # more units are more steps: they must gain 3 %
            best = rate, count, trees
    assert best is not None
    roots = [[problem.ranks[r] for r, _ in x.roots] for x in locals_]
    facts = {"servers": [len(s) for s in servers], "units": best[1], "trees": len(best[2]), "roots": roots}
    return TreeSet("three-phase", graph, tuple(best[2]), best[0], facts)


def _local_trees(graph: RateGraph, members: list[int], epsilon: float, theta: float) -> list[tuple[dict[tuple[int, int], Path], int]] | None:
    """Undirected trees packed over the server's own links; one empty tree for a single rank; None if they do not join the ranks."""
    if len(members) == 1:
        return [({}, 1)]
    inside = members + [v for v in range(graph.ranks, graph.nodes) if graph.group[v] == graph.group[members[0]]]
    number = {v: i for i, v in enumerate(inside)}
    arcs = {(number[u], number[v]): rate for (u, v), rate in graph.arcs.items() if u in number and v in number}
    part = RateGraph(tuple(graph.names[v] for v in inside), len(members), tuple(graph.group[v] for v in inside), arcs, graph.unit_Bps)
    try:
        allocation, order = canonical(part)
        packing = pack(allocation, "all-reduce", epsilon=epsilon, theta=theta)
    except Disconnected:
        return None
    found = []
    for tree, units in zip(packing.trees, packing.units, strict=True):
        paths = [tuple(inside[order[x]] for x in path) for path in (*tree.down, *tree.up) if path]
        found.append(({(path[0], path[-1]): path for path in paths}, units))
    return found


def port_shares(problem: CollectiveProblem, graph: RateGraph, servers: Sequence[Sequence[int]]) -> list[list[tuple[int, Fraction]]]:
    """Per server the ranks that reach other servers without passing a device, with their share of the ports' rate.

    A link used by several of a server's ranks counts for each in equal parts. All ranks, equally, where none has a path of its own.
    """
    found = []
    for h, members in enumerate(servers):
        routes: dict[int, list[Path]] = {}
        for place, rank in enumerate(members):
            for other, theirs in enumerate(servers):
                if other == h:
                    continue
                peers = [theirs[(place + i) % len(theirs)] for i in range(len(theirs))]
                ways = ((switch_path(problem, graph, rank, p), switch_path(problem, graph, p, rank)) for p in peers)
                pair = next(((a, b) for a, b in ways if a and b), None)
                if pair is None:
                    routes.pop(rank, None)
                    break
                routes.setdefault(rank, []).extend(pair)
        users: dict[tuple[int, int], set[int]] = {}
        for rank, paths in routes.items():
            for path in paths:
                for hop in pairwise(path):
                    users.setdefault(hop, set()).add(rank)
        rate = {
            rank: min(Fraction(graph.arcs[hop], len(users[hop])) for path in paths for hop in pairwise(path))
            for rank, paths in routes.items()
        }  # fmt: skip
        total = sum(rate.values(), Fraction(0))
        found.append([(r, x / total) for r, x in sorted(rate.items())] if rate else [(r, Fraction(1, len(members))) for r in members])
    return found


def _round_robin(shares: Sequence[Fraction], count: int) -> list[int]:
    """Indices such that every prefix is close to the shares: each turn the one that is furthest behind."""
    given = [0] * len(shares)
    out = []
    for turn in range(1, count + 1):
        i = max(range(len(shares)), key=lambda i: (shares[i] * turn - given[i], -i))
        given[i] += 1
        out.append(i)
    return out


def _units(problem: CollectiveProblem, graph: RateGraph, servers: list[_Local], count: int) -> list[Chosen] | None:
    picks = []
    for local in servers:
        total = sum(units for _, units in local.trees)
        picks.append((_round_robin([Fraction(u, total) for _, u in local.trees], count), _round_robin([s for _, s in local.roots], count)))
    widest = max(len(local.roots) for local in servers)
    out: list[Chosen] = []
    for unit in range(count):
        # Servers add up in turn; where there are units enough, for as many units at a time as there are roots, so that each adds up for all roots.
        adder = unit // widest % len(servers) if count >= widest * len(servers) else unit % len(servers)
        heads = [local.roots[pick[1][unit]][0] for local, pick in zip(servers, picks, strict=True)]
        down: list[Path] = [()] * graph.ranks
        up: list[Path] = [()] * graph.ranks
        for local, pick, head in zip(servers, picks, heads, strict=True):
            _hang(local.trees[pick[0][unit]][0], head, down, up)
            if head != heads[adder]:
                there, back = own_path(problem, graph, heads[adder], head), own_path(problem, graph, head, heads[adder])
                if there is None or back is None:
                    return None
                down[head], up[head] = there, back
        out.append(chosen_tree(heads[adder], 1, down, up))
    return out


def _hang(paths: dict[tuple[int, int], Path], root: int, down: list[Path], up: list[Path]) -> None:
    """Direct a local tree away from `root`."""
    todo, seen = [root], {root}
    for u in todo:
        for a, v in sorted(paths):
            if a == u and v not in seen:
                seen.add(v)
                down[v], up[v] = paths[u, v], paths[v, u]
                todo.append(v)
