"""Spanning trees inside given capacities: switches are split off, trees are packed, logical edges become physical paths again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....errors import CheckFailed
from ....kernels.edgesplit import Split, remove_switches
from ....kernels.effort import NEVER, Deadline
from ....kernels.treepack import TreeBatch, pack_trees
from ....kernels.treepack_lower import exchange_parents

__all__ = ["DEFECT", "Path", "Tree", "lowered", "merged", "pack_capacities", "zipped"]

MAX_SQUARED_TREES_TIMES_RANKS = 1 << 28  # work of exchanging parents between all pairs of trees; larger forests stay as they are
DEFECT = "this is a defect of the planner: please report it with the fabric file"
Path = tuple[int, ...]  # nodes from the sender to the receiver, both included


@dataclass(frozen=True)
class Tree:
    """`units` equal out-trees of `root`. `order`: ranks in the order they join; `paths[v]` from parent[v] to v (root: empty).

    Parents and paths are of all ranks; of a tree that joins few of them, by rank of those only.
    """

    root: int
    units: int
    parent: tuple[int, ...] | Mapping[int, int]
    order: tuple[int, ...]
    paths: tuple[Path, ...] | Mapping[int, Path]

    @property
    def every_path(self) -> tuple[Path, ...]:
        return self.paths if isinstance(self.paths, tuple) else tuple(self.paths.values())

    @property
    def depths(self) -> dict[int, int]:
        """Hops from the root to every rank."""
        depth = {self.root: 0}
        for v in self.order[1:]:
            depth[v] = depth[self.parent[v]] + 1
        return depth

    @property
    def height(self) -> int:
        return max(self.depths.values())


def merged(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """Equal trees counted together, in order of first appearance."""
    units: dict[Tree, int] = {}
    for tree in trees:
        one = replace(tree, units=1)
        units[one] = units.get(one, 0) + tree.units
    return tuple(replace(one, units=count) for one, count in units.items())


def lowered(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """The trees after exchanging parents where that brings devices nearer to the roots: same loads, same roots. Not if they are too many."""
    if len(trees) < 2 or len(trees) ** 2 * len(trees[0].parent) > MAX_SQUARED_TREES_TIMES_RANKS:
        return tuple(trees)
    units = np.array([tree.units for tree in trees], np.int32)
    parent, donor, depth = exchange_parents(np.array([tree.parent for tree in trees], np.int32), units)
    # Should the highest tree have grown on the way, all stay as they were: height is what fills the pipeline.
    if depth.max() > max(tree.height for tree in trees):
        return tuple(trees)
    out = []
    for t, tree in enumerate(trees):
        order = tuple(sorted(tree.order, key=depth[t].tolist().__getitem__))
        paths = tuple(trees[d].paths[v] for v, d in enumerate(donor[t].tolist()))
        out.append(Tree(tree.root, tree.units, tuple(parent[t].tolist()), order, paths))
    return merged(out)


def pack_capacities(
    nodes: int, capacities: Mapping[tuple[int, int], int], ranks: int, demand: Mapping[int, int], group: Sequence[int], *,
    names: Sequence[str] = (), deadline: Deadline = NEVER,
) -> tuple[Tree, ...]:  # fmt: skip
    """`demand[r]` trees rooted at every rank r (ranks are the nodes below `ranks`), no arc used more often than its capacity.

    Raises: Unsupported (unbalanced switches), TimeLimit, CheckFailed (the demand exceeds some cut).
    """
    held = dict(capacities)
    logical = remove_switches(nodes, held, list(range(ranks)), demand, group, names=names, deadline=deadline)
    batches = pack_trees(ranks, logical.arcs, demand, deadline=deadline)
    pools = _path_pools(held, logical.splits)
    return tuple(tree for batch in batches for tree in _with_paths(batch, pools))


# ---- back to physical paths ------------------------------------------------------------------------------------
class _Pool:
    """Physical paths of one logical arc, with how many trees each may carry; first in, first out."""

    def __init__(self) -> None:
        self.items: deque[tuple[Path, int]] = deque()

    def put(self, path: Path, amount: int) -> None:
        self.items.append((path, amount))

    def take(self, amount: int) -> list[tuple[Path, int]]:
        taken = []
        while amount:
            if not self.items:
                raise CheckFailed("a logical edge carries more trees than its physical paths", hint=DEFECT)
            path, there = self.items.popleft()
            used = min(there, amount)
            taken.append((path, used))
            if used < there:
                self.items.appendleft((path, there - used))
            amount -= used
        return taken


def _path_pools(capacities: dict[tuple[int, int], int], splits: Sequence[Split]) -> dict[tuple[int, int], _Pool]:
    pools: dict[tuple[int, int], _Pool] = {}
    for arc, amount in capacities.items():
        pools.setdefault(arc, _Pool()).put(arc, amount)
    # In the order in which switches were split: a later split may use edges that an earlier one made, whose pools are filled by then.
    for split in splits:
        first = pools[split.src, split.switch].take(split.amount)
        second = pools[split.switch, split.dst].take(split.amount)
        # Capacity that goes into a switch and straight back is cancelled: no tree needs it.
        if split.src == split.dst:
            continue
        pool = pools.setdefault((split.src, split.dst), _Pool())
        for (before, after), amount in zipped([first, second]):
            pool.put(_without_loops(before + after[1:]), amount)
    return pools


def zipped(lists: Sequence[Sequence[tuple[Path, int]]]) -> list[tuple[list[Path], int]]:
    """Cut several lists of (path, amount) with equal totals at the union of their borders."""
    queues = [deque(items) for items in lists]
    out = []
    while queues and queues[0]:
        amount = min(queue[0][1] for queue in queues)
        out.append(([queue[0][0] for queue in queues], amount))
        for queue in queues:
            path, there = queue.popleft()
            if there > amount:
                queue.appendleft((path, there - amount))
    return out


def _without_loops(path: Path) -> Path:
    """A path that comes back to a node skips what lies between: fewer links, so no load grows."""
    out: list[int] = []
    for node in path:
        if node in out:
            del out[out.index(node) :]
        out.append(node)
    return tuple(out)


def _with_paths(batch: TreeBatch, pools: dict[tuple[int, int], _Pool]) -> list[Tree]:
    parent, order = tuple(int(p) for p in batch.parent), tuple(int(v) for v in batch.order)
    children = order[1:]
    taken = [pools[parent[v], v].take(batch.count) for v in children]
    found = []
    # Equal trees whose edges take different paths: each run of units with the same paths becomes a tree of its own.
    for paths, amount in zipped(taken):
        by_child = dict(zip(children, paths, strict=True))
        found.append(Tree(batch.root, amount, parent, order, tuple(by_child.get(v, ()) for v in range(len(parent)))))
    return found
