"""Two levels: inside every server first, then between servers.

Cite: N. T. Karonis, B. R. de Supinski, I. Foster, W. Gropp, E. Lusk, J. Bresnahan, "Exploiting hierarchy in parallel computer networks to optimize
collective operation performance" (IPDPS 2000), for leaders; the two-step all-to-all is known from NCCL users and Tutel (arXiv 2206.03382).
Left open by the paper: servers of different sizes, interleaved ranks. Our answer: any grouping works; in the all-to-all, the proxy of a destination
inside another server is the rank whose local number agrees with it (modulo the server's size).
Deviations: large messages are cut into pieces that overlap the levels; leaders exchange by Bruck's rounds, which need no power of two.
Invariant: between servers every block travels once per server, inside a server along a binomial tree under the leader.
Cost: 2 ceil(log2 g) + 2 ceil(log2 servers) rounds for an all-reduce; the leader's port carries what its server exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from .bruck import all_gather_rounds
from .contract import refuse
from .nearness import islands
from .rooted_tree import choose_pieces, require_pieces, tree_parents
from .rounds import Area, Move, plan_rounds, reverse

__all__ = ["CITE", "DEVIATIONS", "Hierarchical", "groups_of", "leader_rounds", "overlapped", "servers_of"]

CITE = Cite(
    key="karonis2000exploiting",
    title="Exploiting Hierarchy in Parallel Computer Networks to Optimize Collective Operation Performance",
    authors="N. T. Karonis, B. R. de Supinski, I. Foster, W. Gropp, E. Lusk, J. Bresnahan",
    year=2000,
    venue="International Parallel and Distributed Processing Symposium",
    doi="10.1109/IPDPS.2000.846009",
)
DEVIATIONS = ("pieces overlap the levels", "leaders exchange by Bruck's rounds")
OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "scatter", "gather", "all-to-all")
Groups = list[list[int]]
Rounds = list[list[Move]]


def groups_of(problem: CollectiveProblem) -> Groups:
    """The fabric's servers, where it says which device is in which; otherwise what its narrowest links separate."""
    servers = servers_of(problem)
    return servers if 1 < len(servers) < len(problem.ranks) else islands(problem)


def servers_of(problem: CollectiveProblem) -> Groups:
    """Ranks of every server, servers in order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(problem.ranks):
        found.setdefault(problem.fabric.device(name).group, []).append(rank)
    return list(found.values())


# ---- one level -----------------------------------------------------------------------------------------------------------
def _children(g: int, v: int) -> list[int]:
    """Children of v in the binomial tree over g positions, the largest subtree first."""
    low = v & -v if v else 1 << g.bit_length()
    return [v + (1 << k) for k in reversed(range(low.bit_length() - 1)) if v + (1 << k) < g]


def _subtree(g: int, v: int) -> list[int]:
    return [v, *(x for c in _children(g, v) for x in _subtree(g, c))]


def _levels(g: int) -> list[list[tuple[int, int]]]:
    """(parent, child) edges of the binomial tree by round, the root's largest subtree first."""
    return [[(v, v + (1 << k)) for v in range(0, g - (1 << k), 2 << k)] for k in reversed(range((g - 1).bit_length()))]


def _down(groups: Groups, blocks: Sequence[Sequence[int]] | None, everything: Sequence[int]) -> Rounds:
    """Leaders hand `everything` to their servers, except what a subtree contributed itself (`blocks` of every rank)."""
    rounds: Rounds = [[] for _ in range(max((len(g) - 1).bit_length() for g in groups))]
    for group in groups:
        levels = _levels(len(group))
        for at, edges in enumerate(levels, len(rounds) - len(levels)):
            for parent, child in edges:
                known = {b for v in _subtree(len(group), child) for b in blocks[group[v]]} if blocks else set[int]()
                rounds[at].append(Move(group[parent], group[child], tuple(b for b in everything if b not in known)))
    return rounds


def _up(groups: Groups, blocks: Sequence[Sequence[int]]) -> Rounds:
    """Ranks hand their blocks to the leader of their server."""
    rounds: Rounds = [[] for _ in range(max((len(g) - 1).bit_length() for g in groups))]
    for group in groups:
        for at, edges in enumerate(reversed(_levels(len(group)))):
            for parent, child in edges:
                sent = sorted(b for v in _subtree(len(group), child) for b in blocks[group[v]])
                rounds[at].append(Move(group[child], group[parent], tuple(sent)))
    return rounds


def _between(leaders: Sequence[int], blocks: Sequence[Sequence[int]]) -> Rounds:
    """All-gather among leaders of what they hold."""
    return [
        [replace(m, src=leaders[m.src], dst=leaders[m.dst], blocks=tuple(sorted(x for b in m.blocks for x in blocks[b]))) for m in step]
        for step in all_gather_rounds(len(leaders))
    ]


# ---- operations ------------------------------------------------------------------------------------------------------------
def _gather_rounds(groups: Groups, n: int) -> Rounds:
    """All-gather: to the leaders, among the leaders, from the leaders."""
    own = [[r] for r in range(n)]
    return [*_up(groups, own), *_between([g[0] for g in groups], groups), *_down(groups, own, range(n))]


def _scatter_rounds(groups: Groups) -> Rounds:
    """The first leader is the root: it serves the other leaders one after another, and every leader its server."""
    root = groups[0][0]
    rounds: Rounds = [[Move(root, g[0], tuple(sorted(g))) for g in groups[1:]]]
    inner: Rounds = [[] for _ in range(max((len(g) - 1).bit_length() for g in groups))]
    for group in groups:
        for at, edges in enumerate(_levels(len(group))):
            inner[at] += [Move(group[p], group[c], tuple(sorted(group[v] for v in _subtree(len(group), c)))) for p, c in edges]
    return rounds + inner


def _broadcast_rounds(groups: Groups, blocks: Sequence[int]) -> Rounds:
    leaders = [g[0] for g in groups]
    return [*_in_stream(_down([leaders], None, blocks), 1), *_down(groups, None, blocks)]


def leader_rounds(groups: Groups, first: int) -> Rounds:
    """One piece of an all-reduce: blocks first .. first + servers - 1 up to the leaders, around among them, and down."""
    leaders = [g[0] for g in groups]
    blocks = range(first, first + len(groups))
    down = _in_stream(_down(groups, None, blocks), 0)
    exchange = _between(leaders, [[b] for b in blocks])
    across = [_in_stream([step], k)[0] for k, step in enumerate([*reverse(exchange), *exchange], 2)]
    return [*_in_stream(reverse(down), 1), *across, *down]


def _in_stream(rounds: Rounds, stream: int) -> Rounds:
    return [[replace(m, stream=stream) for m in step] for step in rounds]


def overlapped(pieces: Sequence[Rounds]) -> Rounds:
    """Piece i runs i rounds behind the first; the phases of a piece have lanes of their own, so that pieces do not wait for each other."""
    length = max(map(len, pieces))
    out: Rounds = [[] for _ in range(length + len(pieces) - 1)]
    for late, rounds in enumerate(pieces):
        for k, step in enumerate(rounds):
            out[late + k] += step
    return out


def _two_step(groups: Groups, n: int) -> tuple[Rounds, int]:
    """All-to-all: (rounds, blocks of work space). First to the proxy in the own server, then one message per pair of servers and proxy."""
    home = {r: (g, at) for g, group in enumerate(groups) for at, r in enumerate(group)}
    first: list[Move] = []
    second: list[Move] = []
    most = 0
    for g, group in enumerate(groups):
        slots: dict[int, list[int]] = {q: [] for q in group}  # destinations in other servers, by proxy
        for d in range(n):
            if home[d][0] != g:
                slots[group[home[d][1] % len(group)]].append(d)
        for q, destinations in slots.items():
            place = {d: k * len(group) for k, d in enumerate(destinations)}
            most = max(most, len(destinations) * len(group))
            for at, s in enumerate(group):
                first.append(Move(s, q, (q,), (s,), source="input", target="output"))
                if destinations:
                    first.append(Move(s, q, tuple(destinations), tuple(place[d] + at for d in destinations), source="input", target="work", stream=1))
            for d in destinations:
                second.append(Move(q, d, tuple(range(place[d], place[d] + len(group))), tuple(group), source="work", target="output", stream=2))
    return [first, second], most


@dataclass(frozen=True, kw_only=True)
class Hierarchical(CollectiveStrategy):
    """Options.

    groups: ranks of every group, its leader first; None = the fabric's servers, or what its narrowest links separate. The root of a rooted operation
        leads its group.
    pieces: parts of the message that overlap (all-reduce, broadcast, reduce); None = chosen.
    pack: scattered blocks become one message through a staging buffer.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "hierarchical"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    groups: tuple[tuple[int, ...], ...] | None = None
    pieces: int | None = None
    pack: bool = True
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Every operation but permute. Raises: Disconnected, Unsupported, UsageError (options)."""
        bound, n, op = collective_bound(problem), len(problem.ranks), problem.op
        require_pieces(self.pieces, "hierarchical")
        if op not in OPS:
            raise refuse(problem, "a hierarchy", OPS)
        groups = groups_of(problem) if self.groups is None else [list(g) for g in self.groups]
        if sorted(r for g in groups for r in g) != list(range(n)) or not all(groups):
            raise UsageError(f"groups must hold every rank of 0..{n - 1} once, got {self.groups}", where="hierarchical")
        rooted = op in ("broadcast", "reduce", "scatter", "gather")
        ordered = _root_first(groups, problem.root) if rooted else groups
        pieces = 1
        if op in ("all-reduce", "broadcast", "reduce"):
            pieces = self.pieces or choose_pieces(problem, [_tree(ordered, n)])
        rounds, areas = _layout(op, ordered, n, pieces)
        chosen = replace(self, groups=tuple(map(tuple, groups)), pieces=pieces)
        notes = {"servers": len(groups), "pieces": pieces}
        return plan_rounds(problem, chosen, rounds, areas, order=range(n), pack=self.pack, name=self.name, bound=bound, notes=notes)


def _root_first(groups: Groups, root: int) -> Groups:
    """The root's group first, and the root first in it."""
    home = next(g for g in groups if root in g)
    return [[root, *(r for r in home if r != root)], *(g for g in groups if g is not home)]


def _tree(groups: Groups, n: int) -> list[int]:
    """The tree that a broadcast from the first leader takes, as parents per rank."""
    parents = [-1] * n
    leaders = [g[0] for g in groups]
    for level in [*groups, leaders]:
        for at, parent in enumerate(tree_parents(len(level), "binomial")):
            if parent >= 0:
                parents[level[at]] = level[parent]
    return parents


def _layout(op: str, groups: Groups, n: int, pieces: int) -> tuple[Rounds, dict[str, Area]]:
    if op == "all-reduce":
        count = len(groups)
        return overlapped([leader_rounds(groups, p * count) for p in range(pieces)]), {"data": Area("input", pieces * count)}
    if op in ("broadcast", "reduce"):
        rounds = [_broadcast_rounds(groups, [p]) for p in range(pieces)]
        if op == "reduce":
            return overlapped([reverse(r) for r in rounds]), {"data": Area("input", pieces)}
        return overlapped(rounds), {"data": Area("output", pieces)}
    if op == "all-to-all":
        rounds_, most = _two_step(groups, n)
        areas = {"input": Area("input", n, True), "output": Area("output", n, True)}
        return rounds_, areas | ({"work": Area("scratch", most)} if most else {})
    rounds_ = _scatter_rounds(groups) if op in ("scatter", "gather") else _gather_rounds(groups, n)
    if op == "gather":
        rounds_ = [[replace(m, src=m.dst, dst=m.src) for m in step] for step in reversed(rounds_)]
    if op == "reduce-scatter":
        rounds_ = reverse(rounds_)
    return rounds_, {"data": Area("output" if op in ("all-gather", "gather") else "input", n, by_rank=True)}
