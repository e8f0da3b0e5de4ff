"""What it costs to bring a tensor from one SBP state to another: collectives on one axis at a time, the cheapest sequence of them.

Cite: AutoDDL, section on communication cost; the table of bytes per device (n = bytes of the piece that the axis group shares, p devices):

    S -> S' all-to-all n(p-1)/p²   S -> B all-gather n(p-1)/p   P -> S reduce-scatter n(p-1)/p   P -> B all-reduce 2n(p-1)/p
    B -> S, B -> P, S -> P: nothing is sent

Left open by the paper: which sequences are legal on several axes, and uneven sizes. Our answers: splits of one dimension nest in axis order, so an
axis may begin or end a split of dimension d only while no later axis splits d (otherwise pieces would not be contiguous: (B, S0) -> (S0, S0) is no
local slice); bytes are counted piece by piece, per rank, as `torch.chunk` cuts them. The sequence is a shortest path (Dijkstra) over the lattice
of states; n is the size of the piece at each step.
Invariant: with equal pieces the bytes are those of the table exactly; the cost obeys the triangle inequality.
Cost: at most (r+2)^k states for a tensor of rank r on k axes; one Dijkstra per source, kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from ....plan.sbp import State, kind_of, local_shape, split_of, valid
from .mesh import Mesh

__all__ = ["Redistributor", "Step", "shortest_paths", "step_messages", "step_sent"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One collective: `axis` of the mesh goes from type `source` to `target`; the other axes stay. `before` and `after` are whole states."""

    axis: int
    before: State
    after: State

    @property
    def source(self) -> str:
        return self.before[self.axis]

    @property
    def target(self) -> str:
        return self.after[self.axis]

    @property
    def name(self) -> str:
        return kind_of(self.source, self.target)


def _allowed(before: State, axis: int, target: str) -> bool:
    source = before[axis]
    if source == target or (source[0] in "PM" and target[0] in "PM"):
        return False
    ends = split_of(source), split_of(target)
    if ends[0] is not None and ends[1] is not None and ends[0][0] == ends[1][0]:
        return False  # other blocks of the same dimension: by way of another split, or whole
    for kind in (source, target):
        split = split_of(kind)
        if split is not None and any((other := split_of(k)) is not None and other[0] == split[0] for k in before[axis + 1 :]):
            return False
    return True


def _pieces(count: int, parts: int) -> list[int]:
    step = -(-count // parts)
    return [max(0, min(step, count - i * step)) for i in range(parts)]


@lru_cache(maxsize=1 << 16)
def step_sent(shape: tuple[int, ...], step: Step, sizes: tuple[int, ...], at: tuple[int, ...]) -> int:
    """Elements that the rank at mesh coordinates `at` sends in a step."""
    parts, name = sizes[step.axis], step.name
    if name == "local" or parts == 1:
        return 0
    mine = prod(local_shape(shape, step.before, sizes, at))
    if name == "all-gather":
        return (parts - 1) * mine
    if name == "all-reduce":
        own = _pieces(mine, parts)[at[step.axis]]
        return (mine - own) + (parts - 1) * own
    if name == "reduce-scatter":
        return mine - prod(local_shape(shape, step.after, sizes, at))
    dim, blocks = split_of(step.target) or (0, 1)
    # all-to-all: everything but the share of its own piece that lies in its own part of the new split
    extent = local_shape(shape, step.before, sizes, at)[dim]
    own = blocks * _pieces(extent // blocks, parts)[at[step.axis]]
    return mine - mine // extent * own if extent else 0


def step_messages(step: Step, sizes: Sequence[int]) -> int:
    """Messages that a rank sends in a step."""
    parts = sizes[step.axis]
    return {"local": 0, "all-reduce": 2 * (parts - 1)}.get(step.name, parts - 1)


@dataclass
class Redistributor:
    """Costs and paths on one mesh; answers are kept."""

    mesh: Mesh
    _trees: dict[tuple[tuple[int, ...], int, State, tuple[str, ...]], dict[State, tuple[float, Step | None]]] = field(default_factory=dict)
    _lattices: dict[tuple[tuple[int, ...], int, tuple[str, ...]], tuple[dict[State, int], FloatArray]] = field(default_factory=dict)

    def step_time_s(self, shape: tuple[int, ...], item: int, step: Step) -> float:
        """Seconds of one step for a tensor of `shape` with `item` bytes per element: the rank that sends most."""
        if step.name == "local":
            return 0.0
        sizes = self.mesh.sizes
        zero = [0] * len(sizes)
        sent = max(step_sent(shape, step, sizes, (*zero[: step.axis], i, *zero[step.axis + 1 :])) for i in range(sizes[step.axis]))
        link = self.mesh.axes[step.axis]
        rounds = 2 if step.name == "all-reduce" else 1
        return rounds * link.latency_s + step_messages(step, sizes) * link.per_message_s + sent * item * link.s_per_byte

    def cost_s(self, shape: tuple[int, ...], item: int, source: State, target: State) -> float:
        """Seconds from `source` to `target` (states as values: S, B, P, M); infinite if there is no way (from a sum to a maximum)."""
        found = self._tree(shape, item, source, target).get(target)
        return found[0] if found else float("inf")

    def path(self, shape: tuple[int, ...], item: int, source: State, target: State) -> tuple[Step, ...]:
        """The cheapest steps, in order. Equal costs: fewer steps, then the first in axis order. Raises: KeyError if there is no way."""
        tree = self._tree(shape, item, source, target)
        steps: list[Step] = []
        at = target
        while at != source:
            step = tree[at][1]
            assert step is not None
            steps.append(step)
            at = step.before
        return tuple(reversed(steps))

    def table(self, shape: tuple[int, ...], item: int, sources: Sequence[State], targets: Sequence[State]) -> FloatArray:
        """Costs from every source (rows) to every target (columns), all shortest paths at once."""
        types = _types(shape, (k for s in (*sources, *targets) for k in s))
        index, costs = self._lattice(shape, item, tuple(types))
        return costs[np.ix_([index[s] for s in sources], [index[t] for t in targets])]

    def _lattice(self, shape: tuple[int, ...], item: int, types: tuple[str, ...]) -> tuple[dict[State, int], FloatArray]:
        key = (shape, item, types)
        if key not in self._lattices:
            sizes = self.mesh.sizes
            states = [s for s in product(types, repeat=len(sizes)) if valid(shape, s, sizes)]
            index = {s: i for i, s in enumerate(states)}
            costs = np.full((len(states), len(states)), np.inf)
            np.fill_diagonal(costs, 0.0)
            for i, state in enumerate(states):
                for axis in range(len(sizes)):
                    for target in types:
                        j = index.get((*state[:axis], target, *state[axis + 1 :]))
                        if j is not None and _allowed(state, axis, target):
                            costs[i, j] = self.step_time_s(shape, item, Step(axis, state, states[j]))
            self._lattices[key] = (index, shortest_paths(costs))
        return self._lattices[key]

    def _tree(self, shape: tuple[int, ...], item: int, source: State, target: State) -> dict[State, tuple[float, Step | None]]:
        types = tuple(_types(shape, (*source, *target)))
        key = (shape, item, source, types)
        if key not in self._trees:
            self._trees[key] = self._dijkstra(shape, item, source, types)
        return self._trees[key]

    def _dijkstra(self, shape: tuple[int, ...], item: int, source: State, types: Sequence[str]) -> dict[State, tuple[float, Step | None]]:
        done: dict[State, tuple[float, Step | None]] = {}
        best: dict[State, tuple[float, int]] = {source: (0.0, 0)}
        heap: list[tuple[float, int, int, State, Step | None]] = [(0.0, 0, 0, source, None)]
        count = 0
        while heap:
            cost, steps, _, state, via = heapq.heappop(heap)
            if state in done:
                continue
            done[state] = (cost, via)
            for axis in range(len(state)):
                for target in types:
                    after = (*state[:axis], target, *state[axis + 1 :])
                    if after in done or not _allowed(state, axis, target) or not valid(shape, after, self.mesh.sizes):
                        continue
                    step = Step(axis, state, after)
                    rank = (cost + self.step_time_s(shape, item, step), steps + 1)
                    if after not in best or rank < best[after]:
                        best[after] = rank
                        count += 1
                        heapq.heappush(heap, (*rank, count, after, step))
        return done


def shortest_paths(costs: FloatArray) -> FloatArray:
    """All-pairs shortest paths of a dense matrix, by squaring it in the (min, +) algebra until nothing changes."""
    while True:
        better = costs.copy()
        for k in range(len(costs)):
            np.minimum(better, costs[:, k, None] + costs[None, k, :], out=better)
        if np.array_equal(better, costs):
            return better
        costs = better


def _types(shape: Sequence[int], ends: Iterable[str]) -> list[str]:
    """Types that a path may pass through: all plain ones, and those of its ends (P or M)."""
    given = set(ends)
    plain = ["B", *(f"S{d}" for d in range(len(shape))), *(["M"] if "M" in given else []), *(["P"] if "P" in given or "M" not in given else [])]
    return plain + sorted(k for k in given if k not in plain)
