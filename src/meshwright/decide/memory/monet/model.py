"""The joint integer programme: in every stage which forward operators run and how, what is held, and how the stage's backward node runs.

Names follow the card of MONeT, section 3.2: `R[t, i]` operator i runs in stage t, `S[t, s]` storage s is held when stage t begins, `X[t, i, w]` it
runs in way w (the card's RF and IP: another algorithm, or in place), `M[t, w]` the stage's backward node runs in way w. Stage 0 is the forward pass.
`H[t, s, q]`: s is held when the q-th of its readers that may run in stage t runs (the last q: while the backward node runs). It is the card's
keep_t, Local_j and SM in one, and exact: s is alive after its maker as long as a later reader of the stage, the backward node or the next stage
wants it, and no longer. Deviations: a stored operand of the stage's backward node may go right after it (the card wants it in S[t+1] too).
Memory rows: (a) and (b), one per operator that may run in a stage and node of it; (c) per backward node.
Cost: O(stages x operators) binaries, O(stages x operators x storages) non-zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ....kernels.highs import SCALE, solver
from .merging import Backward, Implementation, Merged, Operator, Stage

__all__ = ["Expression", "JointModel", "Limits"]



@dataclass
class Expression:
    """A sum of variables and a constant."""

    terms: dict[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def add(self, other: Expression, factor: float = 1.0) -> Expression:
        for v, x in other.terms.items():
            self.terms[v] = self.terms.get(v, 0.0) + factor * x
        self.constant += factor * other.constant
        return self

    def plus(self, other: Expression, factor: float = 1.0) -> Expression:
        return Expression(dict(self.terms), self.constant).add(other, factor)


def _total(parts: Iterable[Expression]) -> Expression:
    found = Expression()
    for p in parts:
        found.add(p)
    return found


ZERO, ONE = Expression(), Expression(constant=1.0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most bytes at any moment, most bytes of forward results held when the backward pass begins (None: any), and what is least."""

    peak_bytes: int | None = None
    kept_bytes: int | None = None
    least: Literal["seconds", "peak"] = "seconds"


class JointModel:
    """Columns and rows of one integer programme; `highs()` gives the solver, the dictionaries read its answer."""

    def __init__(self, m: Merged, limits: Limits) -> None:
        self.m, self.limits = m, limits
        self.last = m.last_stage
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[Expression, float]] = []  # expression <= bound
        self.R: dict[tuple[int, int], Expression] = {}
        self.S: dict[tuple[int, int], Expression] = {}
        self.X: dict[tuple[int, int, int], Expression] = {}
        self.M: dict[tuple[int, int], Expression] = {}  # (backward node, way)
        self.H: dict[tuple[int, int], list[Expression]] = {}
        self.stays: dict[tuple[int, int], list[Expression]] = {}
        self.readers: dict[tuple[int, int], list[int]] = {}
        seconds = m.once_s or 1.0
        # the step's seconds, and all its bytes, become SCALE, so that the solver's absolute tolerances are tiny shares of them
        self.time_unit = seconds / SCALE
        self.byte_unit = max(sum(m.size.values()), *(s.first.bytes_alive for s in m.stages), 1) / SCALE
        self.peak = self._variable(cost=1.0, whole=False, upper=float("inf")) if limits.least == "peak" else None
        self.stages = (None, *m.stages)
        for t in range(len(self.stages)):
            self._choices(t)
        for t in range(len(self.stages)):
            self._holding(t)
            self._flow(t)
            self._stay(t)
            self._memory(t)
        self._kept()

    def _variable(self, *, cost: float = 0.0, whole: bool = True, upper: float = 1.0) -> Expression:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return Expression({len(self.cost) - 1: 1.0})

    def _second(self, time_s: float) -> float:
        return 0.0 if self.peak is not None else time_s / self.time_unit

    def _row(self, left: Expression, right: Expression | float) -> None:
        """left <= right"""
        moved = left.plus(right, -1.0) if isinstance(right, Expression) else left
        bound = (0.0 if isinstance(right, Expression) else right) - moved.constant
        terms = {v: x for v, x in moved.terms.items() if x}
        if terms or bound < 0:
            self.rows.append((Expression(terms), bound))

    def _choices(self, t: int) -> None:
        """Variables of what runs in stage t, in which way, and what is held when it begins."""
        m, stage = self.m, self.stages[t]
        for i, o in enumerate(m.operators):
            if t == 0 and not o.optional:
                run = ONE
                if len(o.ways) == 1:
                    self.R[t, i] = self.X[t, i, 0] = run
                    continue
            # nothing it makes is read from this stage on, or it must not run twice
            elif t and (o.once or max((m.last_use[s] for s in o.makes if s not in m.pinned), default=0) < t):
                continue
            else:
                run = self._variable(cost=self._second(o.ways[0].time_s) if len(o.ways) == 1 else 0.0)
            self.R[t, i] = run
            if t and o.optional and m.graph.nodes[o.nodes[0]].random:  # random numbers are drawn in the forward pass first, in the captured order
                self._row(run, self.R[0, i])
            self._ways(t, i, o, run)
        if stage is None:
            return
        for s, last in self.last.items():
            if last >= t:
                self.S[t, s] = ONE if s in m.pinned else self._variable()
        for b in (stage.first, *stage.rest):
            found = [self._variable(cost=self._second(w.time_s)) for w in b.ways] if len(b.ways) > 1 else [ONE]
            for w, x in enumerate(found):
                self.M[b.node, w] = x
            if len(found) > 1:
                self._row(ONE, _total(found))

    def _ways(self, t: int, i: int, o: Operator, run: Expression) -> None:
        if len(o.ways) == 1:
            self.X[t, i, 0] = run
            return
        for w, way in enumerate(o.ways):
            self.X[t, i, w] = self._variable(cost=self._second(way.time_s))
        total = _total(self.X[t, i, w] for w in range(len(o.ways)))
        self._row(total, run)
        self._row(run, total)

    def _reading(self, t: int, i: int, s: int) -> Expression:
        """Operator i reads s in stage t."""
        ways = self.m.operators[i].ways
        if all(s in w.reads for w in ways):
            return self.R[t, i]
        return _total(self.X[t, i, w] for w, way in enumerate(ways) if s in way.reads)

    def _used(self, b: Backward, s: int) -> Expression:
        """The backward node reads s."""
        if all(s in w.reads for w in b.ways):
            return ONE
        return _total(self.M[b.node, w] for w, way in enumerate(b.ways) if s in way.reads)

    def _holding(self, t: int) -> None:
        m, stage = self.m, self.stages[t]
        for s in m.size:
            if self.last[s] < t:
                continue
            wants = [self.S.get((t + 1, s), ONE if s in m.pinned else ZERO)]
            if stage is not None and any(s in w.reads for w in stage.first.ways):
                wants.append(self._used(stage.first, s))
            held = [self._covering(wants)]
            readers = [i for i in m.readers[s] if (t, i) in self.R]
            # from the last reader backwards: s is held while one runs when that one reads it, or when it is held after it
            for i in reversed(readers):
                held.insert(0, self._covering([self._reading(t, i, s), held[0]]))
            self.H[t, s], self.readers[t, s] = held, readers

    def _covering(self, wants: list[Expression]) -> Expression:
        """At least each of them: the expression itself where one suffices."""
        wants = [w for w in wants if w.terms or w.constant]
        if any(not w.terms and w.constant >= 1 for w in wants):
            return ONE
        if len(wants) <= 1:
            return wants[0] if wants else ZERO
        # no binary is needed: rows only ever want it small, so the largest of the wants, which is 0 or 1, is as good as any value
        top = self._variable(whole=False)
        for w in wants:
            self._row(w, top)
        return top

    def _there(self, t: int, s: int) -> Expression:
        """s can be read in stage t: it runs, or it was held."""
        return self.R.get((t, self.m.maker[s]), ZERO).plus(self.S.get((t, s), ZERO))

    def _flow(self, t: int) -> None:
        """What is read or held on is there; what is written over is not read any more."""
        m, stage = self.m, self.stages[t]
        for s in m.size:
            if self.last[s] < t:
                continue
            there = self._there(t, s)
            if (t + 1, s) in self.S:
                self._row(self.S[t + 1, s], there)
            for i in self.readers[t, s]:
                self._row(self._reading(t, i, s), there)
            if stage is not None and any(s in w.reads for w in stage.first.ways):
                self._row(self._used(stage.first, s), there)
            # held or made, not both: a second copy of s would never be wanted
            if (t, m.maker[s]) in self.R and (t, s) in self.S and len(m.operators[m.maker[s]].makes) == 1:
                self._row(there, 1.0)
        for mark, places in m.marks.items():
            for s in places if (t + 1, mark) in self.S else ():
                self._row(self.S[t + 1, mark], self.S[t + 1, s])
        for s, first, last in m.held:
            if first < t <= last and (t, s) in self.S:
                self._row(ONE, self.S[t, s])
        for i, o in enumerate(m.operators):
            for w, way in enumerate(o.ways):
                if way.over >= 0 and (t, i) in self.R:
                    self._over(self.X[t, i, w], self._after(t, way.over, i) if way.over in m.size else ONE)
        for b in (stage.first, *stage.rest) if stage is not None else ():
            for w, way in enumerate(b.ways):
                if way.over in m.size:
                    self._over(self.M[b.node, w], self.S.get((t + 1, way.over), ONE if way.over in m.pinned else ZERO))

    def _over(self, way: Expression, wanted: Expression) -> None:
        self._row(way.plus(wanted), 1.0)

    def _at(self, t: int, s: int, i: int) -> Expression:
        """s is held while operator i runs in stage t, i being one of its readers or not; s was made before."""
        readers = self.readers[t, s]
        return self.H[t, s][sum(r < i for r in readers)]

    def _after(self, t: int, s: int, i: int) -> Expression:
        return self.H[t, s][sum(r <= i for r in self.readers[t, s])]

    def _memory(self, t: int) -> None:
        m, stage = self.m, self.stages[t]
        before = m.fixed_bytes if stage is None else stage.bytes_before
        there = [s for s in m.size if self.last[s] >= t]
        for j, o in enumerate(m.operators):
            if (t, j) not in self.R:
                continue
            own = self._own(t, o, j)
            for moment in o.moments:
                left = Expression(constant=before).add(own).add(self.R[t, j], moment.inner_bytes)
                for s in there:
                    if m.maker[s] > j:
                        left.add(self.S.get((t, s), ZERO), m.size[s])
                    elif m.maker[s] < j:
                        left.add(self._at(t, s, j) if s in moment.reads else self._after(t, s, j), m.size[s])
                    elif len(o.makes) == 1 or (t and s in m.pinned):  # a result of the step stays beside what is made anew
                        left.add(self.S.get((t, s), ZERO), m.size[s])
                    elif (t, s) in self.stays:  # and so does what a view lies in that is not made anew
                        left.add(self._covering(self.stays[t, s]), m.size[s])
                self._fits(left)
        if stage is not None:
            self._backward_memory(t, stage, there)

    def _stay(self, t: int) -> None:
        """What views go on lying in, though its maker may run again in stage t for another of its results."""
        for mark, places in self.m.marks.items():
            for s in places if (t, mark) in self.S else ():
                self.stays.setdefault((t, s), []).append(self.S[t, mark])
        for s, first, last in self.m.held:
            if first < t <= last:
                self.stays.setdefault((t, s), []).append(ONE)

    def _own(self, t: int, o: Operator, j: int) -> Expression:
        """Workspace, less what is written over."""
        found = Expression()
        for w, way in enumerate(o.ways):
            saved = self.m.size[o.makes[0]] if way.over >= 0 else 0
            found.add(self.X[t, j, w], way.workspace_bytes - saved)
        return found

    def _backward_memory(self, t: int, stage: Stage, there: list[int]) -> None:
        m = self.m
        held = _weighted((self.H[t, s][-1], m.size[s]) for s in there)
        self._fits(held.add(Expression(constant=stage.first.bytes_alive)).add(self._extra(stage.first)))
        later = _weighted((self.S.get((t + 1, s), ONE if s in m.pinned else ZERO), m.size[s]) for s in there)
        # nodes that run in one way only differ by a constant: the row of the largest implies the others
        plain = [b.bytes_alive + b.ways[0].workspace_bytes for b in stage.rest if len(b.ways) == 1]
        if plain:
            self._fits(later.plus(Expression(constant=max(plain))))
        for b in stage.rest:
            if len(b.ways) > 1:
                self._fits(later.plus(Expression(constant=b.bytes_alive)).add(self._extra(b)))

    def _extra(self, b: Backward) -> Expression:
        def more(w: Implementation) -> int:
            return w.workspace_bytes - (b.made_bytes if w.over >= 0 else 0)

        return _weighted((self.M[b.node, w], more(way)) for w, way in enumerate(b.ways))

    def _fits(self, left: Expression) -> None:
        if self.peak is None and self.limits.peak_bytes is None:
            return
        scaled = Expression({v: x / self.byte_unit for v, x in left.terms.items()}, left.constant / self.byte_unit)
        self._row(scaled, self.peak if self.peak is not None else (self.limits.peak_bytes or 0) / self.byte_unit)

    def _kept(self) -> None:
        if self.limits.kept_bytes is not None:
            held = _weighted((x, self.m.size[s]) for (t, s), x in self.S.items() if t == 1)
            scaled = Expression({v: x / self.byte_unit for v, x in held.terms.items()}, held.constant / self.byte_unit)
            self._row(scaled, self.limits.kept_bytes / self.byte_unit)

    def highs(self, **options: Any) -> Any:
        """The solver with the whole programme in it."""
        import highspy

        model = solver(**options)
        n = len(self.cost)
        model.addVars(n, np.zeros(n), np.array(self.upper))
        model.changeColsCost(n, np.arange(n, dtype=np.int32), np.array(self.cost))
        whole = np.flatnonzero(self.whole).astype(np.int32)
        model.changeColsIntegrality(len(whole), whole, np.array([highspy.HighsVarType.kInteger] * len(whole)))
        starts = np.cumsum([0, *(len(e.terms) for e, _ in self.rows)])[:-1].astype(np.int32)
        index = np.array([v for e, _ in self.rows for v in e.terms], np.int32)
        value = np.array([x for e, _ in self.rows for x in e.terms.values()])
        most = np.array([b for _, b in self.rows])
        model.addRows(len(most), np.full(len(most), -highspy.kHighsInf), most, len(index), starts, index, value)
        return model

    def constant_s(self) -> float:
        """Seconds that no variable counts: what runs once in any case, in its only way."""
        m = self.m
        forward = sum(o.ways[0].time_s for i, o in enumerate(m.operators) if self.X.get((0, i, 0)) is ONE)
        backward = sum(b.ways[0].time_s for s in m.stages for b in (s.first, *s.rest) if len(b.ways) == 1)
        return forward + backward + m.views_s


def _weighted(parts: Iterable[tuple[Expression, float]]) -> Expression:
    found = Expression()
    for e, x in parts:
        found.add(e, x)
    return found
