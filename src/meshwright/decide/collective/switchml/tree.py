"""Which switch sums what: for a root switch, the tree of switches that add between it and the ranks, and what each link carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ....errors import Disconnected
from ....fabric.fabric import Fabric

__all__ = ["SwitchTree", "choose_roots", "switch_tree", "tree_time"]


@dataclass(frozen=True)
class SwitchTree:
    """Numbers are the fabric's actors. `parent[v]`: who sums for rank or switch v, -1 for the root; `order`: switches, root first.

    `links`: those that carry the data, up and down, once each.
    """

    root: int
    parent: dict[int, int]
    order: tuple[int, ...]
    links: tuple[int, ...]

    def children(self, v: int) -> list[int]:
        return [u for u, p in self.parent.items() if p == v]

    @property
    def height(self) -> int:
        """Switches between a rank and the root, the root counted."""

        def depth(v: int) -> int:
            return 0 if v == self.root else 1 + depth(self.parent[v])

        return max(map(depth, self.parent))


def switch_tree(fabric: Fabric, ranks: Sequence[int], root: int, able: frozenset[int]) -> SwitchTree | None:
    """The tree of routes to the root: the first able switch on the way is the parent. None where a way passes a device or there is none."""
    parent, links, todo, order = {root: -1}, list[int](), list(ranks), [root]
    devices = len(fabric.devices)
    while todo:
        v = todo.pop(0)
        if v in parent:
            continue
        try:
            up = fabric.route(v, root)
        except Disconnected:
            return None
        ends = [fabric.link_ends[x][1] for x in up]
        if any(e < devices for e in ends):
            return None
        stop = next(i for i, e in enumerate(ends) if e in able)
        parent[v] = ends[stop]
        try:
            down = fabric.route(ends[stop], v)
        except Disconnected:
            return None
        if any(fabric.link_ends[x][1] < devices for x in down[:-1]):
            return None
        links += [*up[: stop + 1], *down]
        if ends[stop] not in parent and ends[stop] not in todo:
            todo.append(ends[stop])
            order.append(ends[stop])
    tree = SwitchTree(root, parent, tuple(order), tuple(links))
    return tree if all(_reaches(parent, v, root) for v in parent) else None


def _reaches(parent: dict[int, int], v: int, root: int) -> bool:
    for _ in parent:
        if v == root:
            return True
        v = parent[v]
    return v == root


def tree_time(fabric: Fabric, trees: Sequence[SwitchTree]) -> Fraction:
    """Seconds per byte of the whole message that the busiest link needs, the message in equal shards over the trees."""
    load: dict[int, int] = defaultdict(int)
    for tree in trees:
        for x in tree.links:
            load[x] += 1
    return max(Fraction(count, fabric.links[x].rate_Bps * len(trees)) for x, count in load.items())


def choose_roots(fabric: Fabric, trees: Sequence[SwitchTree], most: int | None) -> list[SwitchTree]:
    """Trees that share the message: the quickest, then one more for as long as that is quicker; `most`: exactly so many, the quickest so found."""
    chosen: list[SwitchTree] = []
    left = list(trees)
    while left and (most is None or len(chosen) < most):
        best = min(left, key=lambda tree: (tree_time(fabric, [*chosen, tree]), tree.height, tree.root))
        if most is None and chosen and tree_time(fabric, [*chosen, best]) >= tree_time(fabric, chosen):
            break
        chosen.append(best)
        left.remove(best)
    return chosen
