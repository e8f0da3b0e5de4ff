"""From decisions per stage to the straight line of runs: views as they are needed, nothing that nobody reads, results dropped after their last use.

Source: the card of MONeT, section 3.9. Invariant: what the line holds at any moment is contained in what the decisions hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .merging import Implementation, Merged, Operator, is_view

__all__ = ["Decisions", "Run", "decisions_of", "runs_of"]

Run = tuple[int, int]  # (node, alternative or -1)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """`operators[t]`: (operator, way) that run in stage t, in order; `backward[node]`: the way of each backward node (default: its plain one).
    `stays`: (stage, storage) that views go on lying in, though the operator that makes it may run again for another result."""

    operators: tuple[tuple[tuple[int, int], ...], ...]
    backward: dict[int, int] = field(default_factory=dict)
    stays: frozenset[tuple[int, int]] = frozenset()


def runs_of(m: Merged, decisions: Decisions) -> tuple[list[Run], int]:
    """The runs, and how many of them are the forward pass."""
    line = _Line(m)
    for t, chosen in enumerate(decisions.operators):
        line.stays = line.results | {s for u, s in decisions.stays if u == t}
        for i, w in chosen:
            line.operator(m.operators[i], w)
        if t == 0:
            for r in m.graph.results:
                if m.graph.nodes[r].phase == "forward":
                    line.ensure(r)
            line.boundary = len(line.runs)
            continue
        stage = m.stages[t - 1]
        for b in (stage.first, *stage.rest):
            line.run(b.node, b.ways[decisions.backward.get(b.node, 0)].alternative)
            line.parts(b.node)
    for r in m.graph.results:
        line.ensure(r)
    return _read_only(m, line.runs, line.boundary)


def decisions_of(m: Merged, runs: Sequence[Run], boundary: int) -> Decisions:
    """What a straight line of runs decides: the other way of `runs_of`. An operator runs where the last of its nodes does.

    Where a chain was not run as a whole, or by an implementation that the programme leaves out, the decisions are near it only.
    """
    last = {o.nodes[-1]: i for i, o in enumerate(m.operators)}
    stage = {s.first.node: t for t, s in enumerate(m.stages, 1)}
    ways = {b.node: b.ways for s in m.stages for b in (s.first, *s.rest)}
    chosen: list[dict[int, int]] = [{} for _ in range(len(m.stages) + 1)]
    backward: dict[int, int] = {}
    waiting: dict[int, int] = {}
    # what runs again in backward belongs to the stage whose first node comes next
    for at, (n, alternative) in enumerate(runs):
        if n in last:
            i = last[n]
            (chosen[0] if at < boundary else waiting)[i] = _way(m.operators[i].ways, alternative)
        elif n in ways:
            backward[n] = _way(ways[n], alternative)
            if n in stage:
                chosen[stage[n]], waiting = waiting, {}
    return Decisions(operators=tuple(tuple(sorted(c.items())) for c in chosen), backward={n: w for n, w in backward.items() if w})


def _way(ways: Sequence[Implementation], alternative: int) -> int:
    return next((w for w, x in enumerate(ways) if x.alternative == alternative), 0)


class _Line:
    def __init__(self, m: Merged) -> None:
        self.m, self.runs, self.boundary = m, list[Run](), 0
        self.valid = {i for i, n in enumerate(m.graph.nodes) if n.phase == "input"}
        self.stays: set[int] = set()
        self.lies: dict[int, list[int]] = {}
        self.results = {s for r in m.graph.results if is_view(m.graph.nodes[r]) for s in m.graph.nodes[r].storages}
        for i, n in enumerate(m.graph.nodes):
            for s in n.storages:
                self.lies.setdefault(s, []).append(i)

    def ensure(self, x: int) -> None:
        """The result of x is there: it ran, or it is a view and runs now."""
        node = self.m.graph.nodes[x]
        if x in self.valid:
            return
        assert is_view(node), f"{node.name} is read and was not run"  # the decisions broke one of the programme's rows
        self.run(x, -1)

    def run(self, n: int, alternative: int) -> None:
        nodes = self.m.graph.nodes
        way = nodes[n] if alternative < 0 else nodes[n].alternatives[alternative]
        for x in way.inputs:
            self.ensure(x)
        self.runs.append((n, alternative))
        over = nodes[way.over].storages if alternative >= 0 and nodes[n].alternatives[alternative].over >= 0 else ()  # type: ignore[union-attr]
        for s in (*(s for s in nodes[n].makes if s not in self.stays), *over):
            # results of an earlier run are not read again; a backward view cannot run twice, so it keeps its old storage
            self.valid -= {x for x in self.lies[s] if nodes[x].phase == "forward" or not is_view(nodes[x])}
        self.valid.add(n)

    def operator(self, o: Operator, w: int) -> None:
        for n in o.nodes:
            self.run(n, o.ways[w].alternative)
            self.parts(n)

    def parts(self, n: int) -> None:
        """The parts of a tuple are taken at once, so that each of them can go by itself."""
        nodes = self.m.graph.nodes
        if len(nodes[n].storages) > 1:
            for x in sorted({x for s in nodes[n].makes for x in self.lies[s]}):
                mine = x in self.m.needed and x not in self.valid and n in nodes[x].inputs
                if mine and is_view(nodes[x]) and nodes[x].phase == nodes[n].phase:
                    self.run(x, -1)


def _read_only(m: Merged, runs: Sequence[Run], boundary: int) -> tuple[list[Run], int]:
    """Without forward runs whose result nobody reads; what draws random numbers draws them in the forward pass."""
    nodes = m.graph.nodes
    wanted = {*m.graph.results}
    kept: list[Run] = []
    first = boundary
    # from the end: a run is read by the runs behind it, up to the next run of the same node
    for at in range(len(runs) - 1, -1, -1):
        n, alternative = runs[at]
        if n in wanted or nodes[n].writes or (nodes[n].random and at < boundary):
            wanted.discard(n)
            wanted.update((nodes[n] if alternative < 0 else nodes[n].alternatives[alternative]).inputs)
            kept.append(runs[at])
        elif at < boundary:
            first -= 1
    return kept[::-1], first
