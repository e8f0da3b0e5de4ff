"""Which ranks are near each other: the widths of a fabric's cuts, as nested groups.

Actors that are joined by the widest links belong together first, then what the next widest links join, and so on (single linkage, which is what a
maximum spanning tree says about widest paths). Trees and hierarchies whose neighbours are near cross narrow links as seldom as they can, whatever
the order in which the ranks were given. Where all links are alike, everything is one group and the order is that of the ranks.
"""

from __future__ import annotations

from ..problem import CollectiveProblem

__all__ = ["islands", "near_order"]

Groups = list[list[int]]


def _levels(problem: CollectiveProblem) -> list[Groups]:
    """Groups of ranks, from every rank alone to all that is joined; a group's ranks lie as in the groups that it joined, first rank first."""
    fabric = problem.fabric
    rates: dict[tuple[int, int], int] = {}
    for link in fabric.links:
        pair = fabric.actor_of[link.src], fabric.actor_of[link.dst]
        rates[pair] = rates.get(pair, 0) + link.rate_Bps
    width: dict[tuple[int, int], int] = {}
    for (a, b), rate in rates.items():
        width[min(a, b), max(a, b)] = min(rate, rates.get((b, a), rate))  # the slower direction
    home = list(range(len(fabric.actor_names)))
    members: dict[int, list[int]] = {i: [] for i in home}
    for rank, name in enumerate(problem.ranks):
        members[fabric.actor_of[name]] = [rank]

    def root(x: int) -> int:
        while home[x] != x:
            home[x] = home[home[x]]
            x = home[x]
        return x

    levels = [[[rank] for rank in range(len(problem.ranks))]]
    for rate in sorted(set(width.values()), reverse=True):
        together: dict[int, list[list[int]]] = {}
        before = {a: members[a] for a in range(len(home)) if home[a] == a and members[a]}
        for (a, b), w in width.items():
            if w == rate and root(a) != root(b):
                home[root(b)] = root(a)
        for actor, ranks in before.items():
            together.setdefault(root(actor), []).append(ranks)
        for actor, parts in together.items():
            members[actor] = [rank for part in sorted(parts) for rank in part]
        found = sorted(members[actor] for actor in together)
        if len(found) < len(levels[-1]):
            levels.append(found)
    return levels


def near_order(problem: CollectiveProblem) -> tuple[int, ...]:
    """Position -> rank: the ranks of every group together, at all widths."""
    return tuple(rank for group in _levels(problem)[-1] for rank in group)


def islands(problem: CollectiveProblem) -> Groups:
    """The groups that only the narrowest links join; all ranks as one group where no link is narrower than the others that join ranks."""
    levels = _levels(problem)
    if len(levels[-1]) > 1:  # disconnected: whoever plans finds out and says so
        return levels[-1]
    return levels[-2] if len(levels) > 2 else levels[-1]
