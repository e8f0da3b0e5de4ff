"""Edge splitting: remove switches from a capacitated graph without losing rooted connectivity.

Source: J. Bang-Jensen, A. Frank, B. Jackson, "Preserving and increasing local edge-connectivity in mixed graphs" (SIAM J.
Discrete Math. 8(2), 1995) for the existence; the use for collectives is ForestColl (arXiv 2402.06787).
Deviations: the amount to split is not computed in advance from two flows per device. It is applied at its maximum, all sinks
are swept once, and on failure it is lowered by exactly the deficit of the cut found (every violated cut loses one unit per
unit split). Whole matchings of a switch's neighbours are split at once and halved on failure. Small shares are split first, over
offsets 1, 2, 4, ..., because splitting at the maximum makes rings and rings make tall trees.
Invariant: after every accepted step each terminal v has max-flow(s, v) >= sum of the demands, where s feeds each terminal its demand.
Cost: O(splits) sweeps of one flow per terminal; a switch with two neighbours costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CheckFailed, TimeLimit, Unsupported
from .effort import NEVER, Deadline
from .maxflow import FlowNetwork, Sweep

__all__ = ["Split", "SplitGraph", "remove_switches"]

Arcs = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Split:
    """`amount` units of the arcs (src, switch) and (switch, dst) became the arc (src, dst); src == dst: they were dropped."""

    src: int
    switch: int
    dst: int
    amount: int


@dataclass(frozen=True)
class SplitGraph:
    """Arcs between terminals only, and the splits in the order in which they were made."""

    arcs: Arcs
    splits: tuple[Split, ...]


def remove_switches(
    nodes: int,
    arcs: Mapping[tuple[int, int], int],
    terminals: Sequence[int],
    demand: Mapping[int, int],
    group: Sequence[int],
    *,
    names: Sequence[str] = (),
    deadline: Deadline = NEVER,
) -> SplitGraph:
    """Split off every node that is not a terminal.

    Args: `arcs` capacities; `demand[r]` trees rooted at terminal r (absent: none); `group[a]` the server of node a, used only to choose
    among equally good splits; `names` for messages; `deadline` in monotonic seconds.
    Raises: TimeLimit; Unsupported when a switch takes in more than it gives out or the reverse, or when no split is left;
    CheckFailed when the graph does not satisfy the demand to begin with.
    """
    job = _Splitting(nodes, dict(arcs), list(terminals), dict(demand), group, names, deadline)
    return job.run()


class _Splitting:
    def __init__(
        self, nodes: int, arcs: Arcs, terminals: list[int], demand: dict[int, int], group: Sequence[int], names: Sequence[str], deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self.nodes, self.arcs, self.terminals, self.demand, self.group, self.names = nodes, arcs, terminals, demand, group, names
        self.need = sum(demand.values())
        self.sinks = np.array(terminals, np.int32)
        self.splits: list[Split] = []
        self.into: list[set[int]] = [set() for _ in range(nodes)]
        self.out: list[set[int]] = [set() for _ in range(nodes)]
        for (u, v), capacity in arcs.items():
            if capacity:
                self.out[u].add(v)
                self.into[v].add(u)

    def run(self) -> SplitGraph:
        switches = [v for v in range(self.nodes) if v not in set(self.terminals)]
        for w in switches:
            self._require_balanced(w)
        while switches:
            # The fewest neighbours first: wires vanish without a test, and splitting others lowers what is left.
            switches.sort(key=lambda w: (len(self.into[w] | self.out[w]), w))
            w = switches.pop(0)
            if len(self.into[w] | self.out[w]) <= 2:
                self._contract(w)
            else:
                self._split_off(w)
        return SplitGraph({arc: c for arc, c in self.arcs.items() if c}, tuple(self.splits))

    def _name(self, v: int) -> str:
        return self.names[v] if v < len(self.names) else f"node {v}"

    def _require_balanced(self, w: int) -> None:
        taken, given = sum(self.arcs[u, w] for u in self.into[w]), sum(self.arcs[w, t] for t in self.out[w])
        if taken != given:
            raise Unsupported(
                f"switch {self._name(w)} receives {taken} units but sends {given}: tree packing needs balanced switches",
                hint="give each cable of the switch equal rates in both directions, or use --strategy ring",
                data={"switch": self._name(w), "in": taken, "out": given},
            )

    def _move(self, u: int, w: int, t: int, amount: int) -> None:
        for arc, change in (((u, w), -amount), ((w, t), -amount), ((u, t), amount)):
            if arc[0] == arc[1]:
                continue
            value = self.arcs.get(arc, 0) + change
            self.arcs[arc] = value
            if value:
                self.out[arc[0]].add(arc[1])
                self.into[arc[1]].add(arc[0])
            else:
                self.out[arc[0]].discard(arc[1])
                self.into[arc[1]].discard(arc[0])
        self.splits.append(Split(u, w, t, amount))

    def _contract(self, w: int) -> None:
        """A switch with at most two neighbours is a wire: a cut passes it at its narrower end, so no flow has to be tested."""
        for u in sorted(self.into[w]):
            for t in sorted(self.out[w]):
                amount = min(self.arcs.get((u, w), 0), self.arcs.get((w, t), 0))
                if u != t and amount:
                    self._move(u, w, t, amount)
        for u in sorted(self.into[w]):
            self._move(u, w, u, min(self.arcs[u, w], self.arcs.get((w, u), 0)))

    # ---- a switch with three neighbours or more -----------------------------------------------------------------
    def _split_off(self, w: int) -> None:
        neighbours = sorted(self.into[w] | self.out[w], key=lambda v: (self.group[v], v))
        preferred = self._preferred(neighbours)
        # Small shares over many partners first: one partner for everything would make a ring of it, and rings make tall trees.
        shares = {u: -(-self.arcs[u, w] // max(len(preferred), 1)) for u in self.into[w]}
        everything = _rotations(neighbours)
        dropped = [[(u, u) for u in neighbours]]
        # From what is wanted to what is possible: between servers in small shares, then without limit, then any pair, then dropping units
        # that go back where they came from.
        for batches, limit in ((preferred, shares), (preferred, None), (everything, None), (dropped, None)):
            if not self.into[w]:
                break
            self._try(w, batches, limit)
        if self.into[w] or self.out[w]:
            raise Unsupported(
                f"no admissible split is left at switch {self._name(w)}",
                hint="some device receives more than it sends, or the reverse; make links full duplex, or use --strategy ring",
                data={"switch": self._name(w)},
            )

    def _preferred(self, neighbours: list[int]) -> list[list[tuple[int, int]]]:
        """Pairs that leave the server, position by position, at server offsets 1, 2, 4, ...; inside one server all pairs."""
        servers: dict[int, list[int]] = {}
        for v in neighbours:
            servers.setdefault(self.group[v], []).append(v)
        rows = list(servers.values())
        if len(rows) == 1:
            return _rotations(rows[0])
        batches = []
        for offset in _doubling(len(rows)):
            batch = []
            for g, row in enumerate(rows):
                other = rows[(g + offset) % len(rows)]
                batch += list(zip(row, other, strict=False))
            batches.append(batch)
        return batches

    def _try(self, w: int, batches: list[list[tuple[int, int]]], shares: dict[int, int] | None) -> None:
        pairs = [pair for batch in batches for pair in batch if pair[0] in self.into[w] and pair[1] in self.out[w]]
        if not pairs:
            return
        network = self._network(pairs)
        for batch in batches:
            wanted = []
            for u, t in batch:
                amount = min(self.arcs.get((u, w), 0), self.arcs.get((w, t), 0), shares[u] if shares and u in shares else 1 << 62)
                if amount > 0:
                    wanted.append((u, t, amount))
            stack = [wanted] if wanted else []
            while stack:
                if self.deadline.past:
                    raise TimeLimit(
                        "the time limit was reached before all switches were removed",
                        hint="raise the time limit, or use --strategy ring",
                    )  # fmt: skip
                part = stack.pop()
                shortfall = self._accept(network, w, part)
                if not shortfall:
                    continue
                if len(part) > 1:
                    # One of many pairs breaks a cut: halve until it stands alone. A single pair is lowered by the deficit of the cut found:
                    # each unit less gives that cut one unit back.
                    stack += [part[len(part) // 2 :], part[: len(part) // 2]]
                elif part[0][2] > shortfall:
                    stack.append([(part[0][0], part[0][1], part[0][2] - shortfall)])

    def _network(self, pairs: list[tuple[int, int]]) -> FlowNetwork:
        """All arcs with room for the pairs, and node `nodes` as the source that feeds every terminal its demand."""
        arcs = {arc: c for arc, c in self.arcs.items() if c}
        for u, t in pairs:
            if u != t:
                arcs.setdefault((u, t), 0)
        for r in self.terminals:
            if self.demand.get(r, 0):
                arcs[self.nodes, r] = self.demand[r]
        network = FlowNetwork.of(self.nodes + 1, arcs)
        first = network.sweep(self.nodes, self.sinks, self.need)
        if first.failed >= 0:
            raise CheckFailed(
                f"{self._name(first.failed)} can receive only {first.flow} of {self.need} units before a switch is removed",
                hint="this is a defect of the planner: please report it with the fabric file",
            )
        return network

    def _accept(self, network: FlowNetwork, w: int, part: list[tuple[int, int, int]]) -> int:
        """Split all of `part` if every terminal keeps its flow; else change nothing and return by how much it fell short."""
        self._apply(network, w, part, 1)
        outcome: Sweep = network.sweep(self.nodes, self.sinks, self.need)
        if outcome.failed < 0:
            for u, t, amount in part:
                self._move(u, w, t, amount)
            return 0
        self._apply(network, w, part, -1)
        return self.need - outcome.flow

    def _apply(self, network: FlowNetwork, w: int, part: list[tuple[int, int, int]], sign: int) -> None:
        us, ts, amounts = (np.array(column, np.int64) * (sign if i == 2 else 1) for i, column in enumerate(zip(*part, strict=True)))
        here = np.full(len(us), w, np.int64)
        # A node may occur in several pairs of one batch, so the updates must add up.
        np.subtract.at(network.capacity, network.slots(us, here), amounts)
        np.subtract.at(network.capacity, network.slots(here, ts), amounts)
        keep = us != ts
        np.add.at(network.capacity, network.slots(us[keep], ts[keep]), amounts[keep])


def _doubling(count: int) -> list[int]:
    """Offsets 1..count-1, powers of two first."""
    powers = [1 << i for i in range(count.bit_length()) if 1 << i < count]
    return powers + [d for d in range(1, count) if d not in powers]


def _rotations(row: list[int]) -> list[list[tuple[int, int]]]:
    return [[(row[i], row[(i + d) % len(row)]) for i in range(len(row))] for d in _doubling(len(row))]
