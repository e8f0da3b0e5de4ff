"""What any schedule must compute again: the operand knapsack with the chains it implies. A floor for any size of network.

When the backward pass begins, at most `budget` bytes of forward results exist. An operand that backward needs and that is not among them is made
again at least once, from operands of which the same holds. Minimising the time of that over what is held, and over implementations, bounds every
schedule from below. Tightened by every moment of the forward pass (what is held at its end is held since it was made), and by the same
argument between backward nodes around which most else is alive: what is held while one of them runs fits, was held at the one before or made again
since, and what is read until the next and not held is made again, so an operator may count once per part of the backward pass.
What it holds, and by which implementations, is where the search for a plan begins (`searching`).
Source: the card of MONeT, section 3.8, where the knapsack has no chains. Cost: an integer programme of O(operators) binaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ....errors import TimeLimit
from ....kernels.highs import SCALE, solve, solver, values
from .merging import Backward, Merged, Operator

__all__ = ["ROUNDED_DOWN", "Closure", "closure", "floor_bytes"]

# Share of the step's time by which the knapsack's answer may miss its optimum; the floor is its bound, so it holds at any gap.
MAX_GAP_SHARE = 1e-3
# Backward nodes at which the argument is repeated, at most: each adds columns for everything held and run again there.
MAX_CUTS = 6
# The floor is lowered by this factor, for the rounding of the solver's sums.
ROUNDED_DOWN = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class Closure:
    """`held`: storages held when backward begins; `forward`: (operator, way) in the forward pass; `backward`: the ways of nodes that do not
    run plainly."""

    floor_s: float
    held: frozenset[int]
    forward: tuple[tuple[int, int], ...]
    backward: dict[int, int]


def floor_bytes(m: Merged) -> int:
    """No schedule peaks lower: every node runs once beside its operands and what is alive in any case."""
    least = m.fixed_bytes
    for o in m.operators:
        if not o.optional:
            least = max(least, m.fixed_bytes + min(_alone(m, o, w) for w in range(len(o.ways))))
    for s in m.stages:
        for b in (s.first, *s.rest):
            least = max(least, min(b.bytes_alive + _extra(b, w) + sum(m.size[x] for x in b.ways[w].reads | m.pinned) for w in range(len(b.ways))))
    return least


def _alone(m: Merged, o: Operator, w: int) -> int:
    way = o.ways[w]
    saved = m.size[o.makes[0]] if way.over >= 0 else 0
    most = max(x.inner_bytes + sum(m.size[s] for s in (x.reads & way.reads if len(o.ways) > 1 else x.reads)) for x in o.moments)
    return most + way.workspace_bytes - saved


def _extra(b: Backward, w: int) -> int:
    return b.ways[w].workspace_bytes - (b.made_bytes if b.ways[w].over >= 0 else 0)


def _worth(o: Operator) -> list[int]:
    """Ways to run it again of which none reads all that another does and takes as long; what a way writes over does not count here."""
    found: list[int] = []
    for w, way in enumerate(o.ways):
        if not any(o.ways[x].reads <= way.reads and o.ways[x].time_s <= way.time_s for x in found):
            found = [x for x in found if not (way.reads <= o.ways[x].reads and way.time_s <= o.ways[x].time_s)] + [w]
    return found


class _Rows:
    """Columns and rows of one integer programme; a term is (column, factor)."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[list[tuple[int, float]], float]] = []

    def column(self, cost: float = 0.0, *, whole: bool = True) -> int:
        self.cost.append(cost)
        self.whole.append(whole)
        return len(self.cost) - 1

    def most(self, terms: list[tuple[int, float]], bound: float) -> None:
        self.rows.append((terms, bound))

    def highs(self, offset: float, **options: Any) -> Any:
        import highspy

        model = solver(**options)
        n = len(self.cost)
        model.addVars(n, np.zeros(n), np.ones(n))
        model.changeColsCost(n, np.arange(n, dtype=np.int32), np.array(self.cost))
        whole = np.flatnonzero(self.whole).astype(np.int32)
        model.changeColsIntegrality(len(whole), whole, np.array([highspy.HighsVarType.kInteger] * len(whole)))
        model.changeObjectiveOffset(offset)
        starts = np.cumsum([0, *(len(t) for t, _ in self.rows)])[:-1].astype(np.int32)
        index = np.array([v for t, _ in self.rows for v, _ in t], np.int32)
        value = np.array([x for t, _ in self.rows for _, x in t])
        model.addRows(
            len(self.rows), np.full(len(self.rows), -highspy.kHighsInf), np.array([b for _, b in self.rows]), len(index), starts, index, value
        )
        return model


class _Model:
    def __init__(self, m: Merged, budget_bytes: int) -> None:
        self.m, self.rows = m, _Rows()
        rows = self.rows
        self.second = SCALE / (m.once_s or 1.0)
        self.byte = SCALE / max(sum(m.size.values()), 1)
        self.budget = budget_bytes
        wanted = {s for s, t in m.last_use.items() if t} | m.pinned
        self.held = {s: rows.column() for s in wanted}
        self.forward: dict[tuple[int, int], int] = {}
        self.offset = m.views_s
        for i, o in enumerate(m.operators):
            if o.optional or len(o.ways) > 1:
                self.forward |= {(i, w): rows.column(way.time_s * self.second) for w, way in enumerate(o.ways)}
                mine = [(self.forward[i, w], 1.0) for w in range(len(o.ways))]
                rows.most(mine, 1.0)
                if not o.optional:
                    rows.most([(v, -1.0) for v, _ in mine], -1.0)
            else:
                self.offset += o.ways[0].time_s
        self.backward: dict[tuple[int, int], int] = {}
        for stage in m.stages:
            for b in (stage.first, *stage.rest):
                self._backward(b)
        self._held_from_forward()
        self._forward_moments()
        # between two cuts the same argument: what is held at the first, or made again since, is all there is for the second
        cuts = [0, *self._heaviest()]
        before = self.held
        for k, t in enumerate(cuts):
            until = cuts[k + 1] if k + 1 < len(cuts) else len(m.stages)
            again = self._between(t, until, before)
            if k + 1 < len(cuts):
                before = self._cut(until, before, again)

    def _heaviest(self) -> list[int]:
        """The stage at which most would be alive if everything were kept, in each of `MAX_CUTS` parts of the backward pass."""
        m, n = self.m, len(self.m.stages)
        alive = [s.first.bytes_alive for s in m.stages]
        for s, last in m.last_stage.items():
            for t in range(last):
                alive[t] += m.size[s]
        ends = [n * i // MAX_CUTS for i in range(MAX_CUTS + 1)]
        parts = [range(low, max(high, low + 1)) for low, high in pairwise(ends)] if n else []
        found = {max(part, key=lambda t: (alive[t], -t)) for part in parts}
        return [t + 1 for t in sorted(found) if alive[t] > self.budget]

    def _backward(self, b: Backward) -> None:
        if len(b.ways) == 1:
            self.offset += b.ways[0].time_s
            return
        for w, way in enumerate(b.ways):
            self.backward[b.node, w] = self.rows.column(way.time_s * self.second)
        self.rows.most([(self.backward[b.node, w], -1.0) for w in range(len(b.ways))], -1.0)

    def _held_from_forward(self) -> None:
        """What is held was made in the forward pass, and not written over there."""
        m = self.m
        for s, v in self.held.items():
            i = m.maker[s]
            if s in m.pinned:
                self.rows.most([(v, -1.0)], -1.0)
            if m.operators[i].optional:
                self.rows.most([(v, 1.0), *((self.forward[i, w], -1.0) for w in range(len(m.operators[i].ways)))], 0.0)
        for (i, w), v in self.forward.items():
            way = m.operators[i].ways[w]
            if way.over in self.held:
                self.rows.most([(v, 1.0), (self.held[way.over], 1.0)], 1.0)
            for j in (j for j in m.readers.get(way.over, ()) if j > i):  # it must be the last reader
                readers = [(self.forward[j, x], 1.0) for x, w2 in enumerate(m.operators[j].ways) if way.over in w2.reads and (j, x) in self.forward]
                self.rows.most([(v, 1.0), *readers], 1.0 if readers else 0.0)
            for s in way.reads:
                maker = m.maker[s]
                if m.operators[maker].optional:
                    self.rows.most([(v, 1.0), *((self.forward[maker, x], -1.0) for x in range(len(m.operators[maker].ways)))], 0.0)

    def _between(self, after: int, until: int, held: dict[int, int]) -> dict[tuple[int, int], int]:
        """(operator, way) -> whether it runs again after stage `after` and no later than for stage `until`, when `held` is what there is before.

        What these stages read, or what runs again for them, is held or made again.
        """
        m = self.m
        again = {
            (i, w): self.rows.column(o.ways[w].time_s * self.second)
            for i, o in enumerate(m.operators) if not o.once and any(m.last_use[s] > after and s not in m.pinned for s in o.makes)
            for w in _worth(o)
        }  # fmt: skip
        for stage in m.stages[after:until]:
            b = stage.first
            for s in sorted(frozenset[int]().union(*(w.reads for w in b.ways))):
                self._at_most(*self._reads(b, s), self._sources(held, again, s))
        for i, o in enumerate(m.operators):
            mine = [w for w in _worth(o) if (i, w) in again]
            # an operator counts once in a part, by whichever way, so the ways that read s are one reader of it
            for s in sorted(frozenset[int]().union(*(o.ways[w].reads for w in mine))):
                self._at_most([(again[i, w], 1.0) for w in mine if s in o.ways[w].reads], 0.0, self._sources(held, again, s))
        return again

    def _reads(self, b: Backward, s: int) -> tuple[list[tuple[int, float]], float]:
        """Terms and constant whose sum is 1 when the backward node reads s."""
        if all(s in w.reads for w in b.ways):
            return [], 1.0
        return [(self.backward[b.node, w], 1.0) for w, way in enumerate(b.ways) if s in way.reads], 0.0

    def _at_most(self, terms: list[tuple[int, float]], constant: float, sources: list[tuple[int, float]]) -> None:
        self.rows.most([*terms, *((v, -x) for v, x in sources)], -constant)

    def _sources(self, held: dict[int, int], again: dict[tuple[int, int], int], s: int) -> list[tuple[int, float]]:
        i = self.m.maker[s]
        terms = [(held[s], 1.0)] if s in held else []
        return terms + [(again[i, w], 1.0) for w in range(len(self.m.operators[i].ways)) if (i, w) in again]

    def _forward_moments(self) -> None:
        m = self.m
        for j, o in enumerate(m.operators):
            if o.optional:
                continue
            for moment in o.moments:
                reads = moment.reads if len(o.ways) == 1 else frozenset.intersection(*(w.reads for w in o.ways))
                # alive here for sure: what this operator or a later one reads. Of the rest, what is held until backward.
                later = [s for s in m.size if m.maker[s] < j and (s in reads or self._surely_read(s, j))]
                terms = [(v, m.size[s] * self.byte) for s, v in self.held.items() if m.maker[s] < j and s not in later]
                alive = m.fixed_bytes + moment.inner_bytes + sum(m.size[s] for s in later)
                alive += o.ways[0].workspace_bytes if len(o.ways) == 1 else 0
                if len(o.ways) > 1:
                    terms += [(self.forward[j, w], self.byte * (way.workspace_bytes - (m.size[o.makes[0]] if way.over >= 0 else 0)))
                              for w, way in enumerate(o.ways)]  # fmt: skip
                self.rows.most(terms, (self.budget - alive) * self.byte)
        self.rows.most([(v, m.size[s] * self.byte) for s, v in self.held.items()], (self.budget - m.fixed_bytes) * self.byte)

    def _surely_read(self, s: int, j: int) -> bool:
        """A forward operator after j reads it, whatever is chosen."""
        m = self.m
        return any(i > j and not m.operators[i].optional and all(s in w.reads for w in m.operators[i].ways) for i in m.readers[s])

    def _cut(self, t: int, before: dict[int, int], again: dict[tuple[int, int], int]) -> dict[int, int]:
        """What is held while stage t runs fits: it was held before, or was made again since."""
        m = self.m
        first = m.stages[t - 1].first
        # a share of a storage may count as held: that only lowers the bound, and saves the solver as many binaries per cut
        held = {s: self.rows.column(whole=False) for s, last in m.last_stage.items() if last >= t}
        for s, v in held.items():
            self._at_most([(v, 1.0)], 0.0, self._sources(before, again, s))
            if s in m.pinned:
                self.rows.most([(v, -1.0)], -1.0)
        for s in sorted(frozenset[int]().union(*(w.reads for w in first.ways))):
            self._at_most(*self._reads(first, s), [(held[s], 1.0)])
        alive = first.bytes_alive + (_extra(first, 0) if len(first.ways) == 1 else 0)
        more = [(self.backward[first.node, w], _extra(first, w) * self.byte) for w in range(len(first.ways))] if len(first.ways) > 1 else []
        self.rows.most([*((v, m.size[s] * self.byte) for s, v in held.items()), *more], (self.budget - alive) * self.byte)
        return held


def closure(m: Merged, budget_bytes: int, *, nodes: int, seed: int = 0) -> Closure:
    """`nodes`: branch-and-bound nodes; where they end without an answer, nothing is chosen, but the floor stands.

    Raises: Infeasible: no schedule of the step stays within the budget (up to the solver's tolerance).
    """
    model = _Model(m, budget_bytes)
    highs = model.rows.highs(model.offset * model.second, mip_rel_gap=MAX_GAP_SHARE, mip_max_nodes=nodes, random_seed=seed)
    try:
        solve(highs, what="operand knapsack")
    except TimeLimit:
        x = [0.0] * len(model.rows.cost)
    else:
        x = values(highs)
    floor = float(highs.getInfo().mip_dual_bound) / model.second * ROUNDED_DOWN
    forward = []
    for i, o in enumerate(m.operators):
        chosen = [w for w in range(len(o.ways)) if (i, w) in model.forward and x[model.forward[i, w]] > 0.5]
        if chosen or (i, 0) not in model.forward:
            forward.append((i, chosen[0] if chosen else 0))
    return Closure(
        floor_s=max(floor, m.once_s * ROUNDED_DOWN), held=frozenset(s for s, v in model.held.items() if x[v] > 0.5 and s not in m.marks),
        forward=tuple(forward),
        backward={n: w for (n, w), v in model.backward.items() if w and x[v] > 0.5},
    )  # fmt: skip
