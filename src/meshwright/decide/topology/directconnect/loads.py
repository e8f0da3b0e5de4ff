"""What breadth-first broadcasts cost on a wiring, in whole numbers: steps, and the load of the busiest port set in each.

At step t a node receives the shards of all nodes t hops away, from neighbours t - 1 hops from their owner. By Hall's theorem the least load is the
largest, over sets S of ports, of the shards that only ports in S can bring, over the size of S. Every shard is masked by its usable ports, masks are
counted, counts of subsets are summed: exact, and the set that is largest is the certificate of its step. Nodes with more ports than `MAX_MASK_PORTS`
are divided by cuts instead (`kernels.port_division`), with the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ....errors import Disconnected
from ....kernels.port_division import divide
from .wiring import Wiring

__all__ = ["MAX_MASK_PORTS", "Cost", "Tight", "busiest", "gather_cost", "subset_sums"]

MAX_MASK_PORTS = 12  # of a node: 4,096 sets; with more, cuts take less time and memory
MAX_BLOCK_CELLS = 1 << 18  # (node, shard) pairs that are masked at once: some 10 MB; with 16 times as many, half of the time goes for fresh pages


@dataclass(frozen=True)
class Tight:
    """A step's certificate: `shards` shards reach `node` by links from `senders` alone, which are `links` links."""

    node: int
    senders: tuple[int, ...]
    shards: int
    links: int


@dataclass(frozen=True)
class Cost:
    """`load`: shards over the busiest link, summed over steps. With N nodes and d ports the bandwidth factor T_B is d · load / N, in M/B.

    hops: between two nodes, on average: of uniform all-to-all traffic no more than 1 / hops of what all ports carry can leave its source.
    """

    load: Fraction
    tight: tuple[Tight, ...]
    hops: Fraction

    @property
    def steps(self) -> int:
        return len(self.tight)


def _ports(wiring: Wiring) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(senders, links)[node, k]: the k-th neighbour that sends to the node, and over how many links; -1 and 0 where there are fewer."""
    into: list[dict[int, int]] = [{} for _ in range(wiring.nodes)]
    for (a, b), count in wiring.links().items():
        into[b][a] = count
    width = max(1, max(map(len, into)))
    senders, links = np.full((wiring.nodes, width), -1), np.zeros((wiring.nodes, width), np.int64)
    for u, row in enumerate(into):
        for k, (w, count) in enumerate(sorted(row.items())):
            senders[u, k], links[u, k] = w, count
    return senders, links


def subset_sums(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[..., S]: the sum of `counts[..., mask]` over masks within S; the last axis has 2^k entries."""
    sums = counts.copy()
    width = sums.shape[-1].bit_length() - 1
    for k in range(width):
        halves = sums.reshape(*sums.shape[:-1], -1, 2, 1 << k)
        halves[..., 1, :] += halves[..., 0, :]
    return sums


def busiest(sums: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[Fraction, int]:
    """The largest `sums[S] / sizes[S]` over sets of size > 0, and the first such set; both are lists over sets."""
    best, at = Fraction(0), 0
    for size in np.unique(sizes[sizes > 0]).tolist():
        own = np.where(sizes == size, sums, -1)
        where = int(own.argmax())
        if Fraction(int(own[where]), size) > best:
            best, at = Fraction(int(own[where]), size), where
    return best, at


def gather_cost(wiring: Wiring) -> Cost:
    """Of an all-gather; that of a reduce-scatter is the transposed wiring's. Of a transitive wiring one node stands for all.

    Raises: Disconnected, naming a cut.
    """
    n = wiring.nodes
    senders, links = _ports(wiring)
    front = np.eye(n, dtype=bool)  # [u, v]: u received v's shard in the last step
    seen = front.copy()
    looked = np.arange(1 if wiring.transitive else n)
    load, tight, hops = Fraction(0), [], 0
    while not seen.all():
        rows: list[tuple[Fraction, Tight]] = []
        new = np.empty_like(front)
        for block in np.array_split(np.arange(n), -(-n * n // MAX_BLOCK_CELLS)):
            new[block] = _received(front, senders[block]) & ~seen[block]
            own = block[: max(0, len(looked) - int(block[0]))]
            if len(own):
                rows.append(_step(front, new, senders, links, own))
        if not new.any():
            raise _cut(wiring, seen)
        load += max(row[0] for row in rows)
        tight.append(max(rows, key=lambda row: row[0])[1])
        hops += len(tight) * int(np.count_nonzero(new))
        seen |= new
        front = new
    return Cost(load, tuple(tight), Fraction(hops, n * (n - 1)))


def _received(front: NDArray[np.bool_], senders: NDArray[np.int64]) -> NDArray[np.bool_]:
    got = np.zeros((len(senders), len(front)), bool)
    for k in range(senders.shape[1]):
        got |= front[senders[:, k]] & (senders[:, k] >= 0)[:, None]
    return got


def _step(
    front: NDArray[np.bool_], new: NDArray[np.bool_], senders: NDArray[np.int64], links: NDArray[np.int64], nodes: NDArray[np.int64]
) -> tuple[Fraction, Tight]:
    """The busiest of these nodes in one step."""
    width = senders.shape[1]
    if width > MAX_MASK_PORTS:
        return max((_divided(front, new, senders[u], links[u], int(u)) for u in nodes), key=lambda row: row[0])
    masks = np.zeros((len(nodes), len(front)), np.uint16)
    for k in range(width):
        able = front[senders[nodes, k]] & (senders[nodes, k] >= 0)[:, None] & new[nodes]
        masks |= able.astype(np.uint16) << np.uint16(k)
    flat = masks.astype(np.int64) + (np.arange(len(nodes)) << width)[:, None]
    counts = np.bincount(flat.ravel(), minlength=len(nodes) << width).reshape(len(nodes), -1)
    counts[:, 0] = 0
    sums = subset_sums(counts)
    best: tuple[Fraction, Tight] = (Fraction(0), Tight(int(nodes[0]), (), 0, 0))
    kinds, kind_of = np.unique(links[nodes], axis=0, return_inverse=True)
    for i, kind in enumerate(kinds):  # nodes whose links are alike share their sets' sizes
        alike = np.flatnonzero(kind_of.ravel() == i)
        sizes = subset_sums(_single(kind))
        value, at = busiest(sums[alike].max(axis=0), sizes)
        if value > best[0]:
            u = int(nodes[alike[int(sums[alike, at].argmax())]])
            best = value, Tight(u, tuple(int(w) for k, w in enumerate(senders[u]) if at >> k & 1), int(sums[alike, at].max()), int(sizes[at]))
    return best


def _single(links: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sizes of sets of one port, 0 for all others."""
    sizes = np.zeros(1 << len(links), np.int64)
    sizes[1 << np.arange(len(links))] = links
    return sizes


def _divided(
    front: NDArray[np.bool_], new: NDArray[np.bool_], senders: NDArray[np.int64], links: NDArray[np.int64], u: int
) -> tuple[Fraction, Tight]:
    able = front[senders[senders >= 0]] & new[u]
    classes, counts = np.unique(able[:, new[u]].T, axis=0, return_counts=True)
    masks = {sum(1 << k for k, yes in enumerate(row) if yes): int(count) for row, count in zip(classes.tolist(), counts, strict=True)}
    if not masks:
        return Fraction(0), Tight(u, (), 0, 0)
    ports = {k: int(count) for k, count in enumerate(links[senders >= 0])}
    found = divide(masks, ports)
    return found.time, Tight(u, tuple(int(senders[k]) for k in found.ports), found.shards, sum(ports[k] for k in found.ports))


def _cut(wiring: Wiring, seen: NDArray[np.bool_]) -> Disconnected:
    u, v = (int(x) for x in np.argwhere(~seen)[0])
    inside = [int(x) for x in np.flatnonzero(~seen[:, v])]
    return Disconnected(
        f"{wiring.name}: no way from node {v} to node {u}", where="wiring", hint="no link enters the nodes of `to` from outside",
        data={"from": [x for x in range(wiring.nodes) if x not in set(inside)][:64], "to": inside[:64]},
    )  # fmt: skip
