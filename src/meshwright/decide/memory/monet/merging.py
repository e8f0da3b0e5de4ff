"""The step graph as the integer programme sees it: views follow their storage, and chains whose middle nobody else reads are one operator.

An `Operator` is one or more forward nodes that always run together; the values between operators are storages. A forward node is merged with the one
that runs next when that one is its only reader, its result is no larger, and neither has another implementation: then whatever a plan does with the
first result it does as well, or better, with the second. Memory stays exact: an operator keeps one `Moment` per node, with the bytes inside it.
Backward nodes run once each, in their order; those that read no forward result belong to the stage of the last one that may.
A view that reads more than where it lies (sizes of another tensor) is no free companion of its storage: to be made, it needs what it reads. It is an
operator (or a backward node) of its own, which makes a mark: a storage of no bytes. Who reads the view reads its storages and the mark.
Source: the card of MONeT, section 3.1 and 3.8 (i). Deviation: values are storages, so an operator may make several of them (output and statistics).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property

import msgspec

from ....graph.step_graph import Alternative, StepGraph, StepNode, StepStorage

__all__ = ["Backward", "Implementation", "Merged", "Moment", "Operator", "Stage", "merged"]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """`reads`: forward storages. `over`: the storage it writes its result over, or -1."""

    alternative: int
    reads: frozenset[int]
    time_s: float
    workspace_bytes: int
    over: int = -1


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One node of an operator runs: `inner_bytes` made inside it so far (own results included), and the storages it or a later node still reads."""

    inner_bytes: int
    reads: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`nodes`: in the order they run, without views. `makes`: storages others may read. `once`: it cannot be run again.

    `optional`: the forward pass does not need it (what only some implementations, or only the backward pass, read).
    """

    nodes: tuple[int, ...]
    makes: tuple[int, ...]
    ways: tuple[Implementation, ...]
    moments: tuple[Moment, ...]
    optional: bool
    once: bool

    @property
    def reads(self) -> frozenset[int]:
        return frozenset[int]().union(*(w.reads for w in self.ways))


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One backward node. `bytes_alive`: everything but forward results while it runs, its own results included, workspace not."""

    node: int
    ways: tuple[Implementation, ...]
    bytes_alive: int
    made_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`first` may read forward results, the `rest` do not. `bytes_before`: alive besides forward results before `first` runs."""

    first: Backward
    rest: tuple[Backward, ...]
    bytes_before: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged:
    """`size`: bytes of each forward storage. `pinned`: held from its run to the end of the step. `held`: (storage, first stage, last stage)
    between which it must stay, because a backward view of it has several readers. `needed`: nodes that may have to run.
    `marks`: of the mark of each forward view that makes one, the forward storages in which that view lies.
    """

    graph: StepGraph
    operators: tuple[Operator, ...]
    stages: tuple[Stage, ...]
    size: dict[int, int]
    maker: dict[int, int]
    pinned: frozenset[int]
    held: tuple[tuple[int, int, int], ...]
    needed: frozenset[int]
    marks: dict[int, frozenset[int]]

    @property
    def fixed_bytes(self) -> int:
        return self.graph.fixed_bytes()

    @property
    def has_ways(self) -> bool:
        """Some node has more than one implementation."""
        backward = (b for s in self.stages for b in (s.first, *s.rest))
        return any(len(o.ways) > 1 for o in self.operators) or any(len(b.ways) > 1 for b in backward)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Operators that may read each storage, in order."""
        found: dict[int, list[int]] = {s: [] for s in self.size}
        for i, o in enumerate(self.operators):
            for s in o.reads & found.keys():
                found[s].append(i)
        return {s: tuple(users) for s, users in found.items()}

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last stage that may read each storage, for its backward node or to run an operator again; 0: only the forward pass does."""
        found = dict.fromkeys(self.size, 0)
        for t, stage in enumerate(self.stages, 1):
            for s in frozenset[int]().union(*(w.reads for w in stage.first.ways)):
                found[s] = max(found[s], t)
        # from the last operator back: what may run again in a stage may read its operands there
        for o in reversed(self.operators):
            if not o.once:
                again = max((found[s] for s in o.makes if s not in self.pinned), default=0)
                for s in o.reads:
                    found[s] = max(found[s], again)
        return found

    @cached_property
    def last_stage(self) -> dict[int, int]:
        """The last stage in which each storage may be held."""
        return {s: len(self.stages) if s in self.pinned else t for s, t in self.last_use.items()}

    @property
    def once_s(self) -> float:
        """Every operator that must run, once, each in its fastest way."""
        forward = sum(min(w.time_s for w in o.ways) for o in self.operators if not o.optional)
        return forward + sum(min(w.time_s for w in b.ways) for s in self.stages for b in (s.first, *s.rest)) + self.views_s

    @property
    def views_s(self) -> float:
        counted = {n for o in self.operators for n in o.nodes} | {b.node for s in self.stages for b in (s.first, *s.rest)}
        nodes = self.graph.nodes
        return sum(nodes[i].time_s for i in self.needed if i not in counted and not nodes[i].optional)


def needed_nodes(graph: StepGraph) -> frozenset[int]:
    """Nodes that the results (or changed tensors) depend on, and the optional ones that an implementation of such a node could read."""
    wanted = {*graph.results, *(i for i, n in enumerate(graph.nodes) if n.writes and not n.optional)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in wanted:
            wanted.update(graph.nodes[i].inputs, *(a.inputs for a in graph.nodes[i].alternatives))
    return frozenset(i for i in wanted if graph.nodes[i].phase != "input")


def _forward_must(graph: StepGraph, alternatives: bool) -> frozenset[int]:
    """Forward nodes that change a tensor, that draw random numbers for the step's results, or that the forward pass's own results depend on.

    By every implementation: what only some need is not among them.
    """
    nodes = graph.nodes

    def with_operands(wanted: set[int]) -> set[int]:
        for i in range(len(nodes) - 1, -1, -1):
            if i in wanted:
                wanted |= {*nodes[i].inputs}.intersection(*(a.inputs for a in nodes[i].alternatives if alternatives))
        return wanted

    writers = {i for i, n in enumerate(nodes) if n.writes and not n.optional}
    drawn = {i for i in with_operands({*graph.results} | writers) if nodes[i].random}
    return frozenset(with_operands({i for i in {*graph.results} | writers | drawn if nodes[i].phase == "forward"}))


def is_view(node: StepNode) -> bool:
    return not node.makes and not node.writes


def merged(graph: StepGraph, *, merge: bool = True, alternatives: bool = True, lossy: bool = True) -> Merged:
    """`merge`: chains become one operator. `alternatives`: other implementations may be chosen (plain ones only, otherwise), `lossy` ones too."""
    needed = needed_nodes(graph) if alternatives else _plainly_needed(graph)
    given = graph
    graph, marks = _marked(given)
    made_by = {s: i for i, n in enumerate(graph.nodes) for s in n.makes}
    forward = {s for s, i in made_by.items() if graph.nodes[i].phase == "forward"}
    written = {s for i, n in enumerate(graph.nodes) if i in needed for s in n.writes}
    reader = _Reader(graph, marks.keys(), forward, alternatives, lossy, _forward_must(graph, alternatives))
    chains = _chains(graph, needed, reader, merge)
    operators = tuple(reader.operator(chain, written) for chain in chains)
    maker = {s: i for i, o in enumerate(operators) for s in o.makes}
    stages, held = _stages(graph, needed, reader, made_by)
    pinned = {s for r in graph.results for s in graph.nodes[r].storages if s in maker}
    pinned |= {s for s in written if s in maker}
    return Merged(
        graph=given, operators=operators, stages=stages, size={s: graph.storages[s].size_bytes for s in maker}, maker=maker,
        pinned=frozenset(pinned), held=held, needed=needed, marks={s: places & maker.keys() for s, places in marks.items() if s in maker},
    )  # fmt: skip


def _marked(graph: StepGraph) -> tuple[StepGraph, dict[int, frozenset[int]]]:
    """The graph in which views that read a made result they do not lie in make a mark, and in which storages those views lie.

    Views of such a view lie where it does, its mark included.
    """
    nodes, storages = list(graph.nodes), list(graph.storages)
    made = {s for n in nodes for s in n.makes}
    marks: dict[int, frozenset[int]] = {}
    for i, n in enumerate(nodes):
        if not is_view(n):
            continue
        places = frozenset(n.storages)
        shown = [x for x in n.inputs if places & {*nodes[x].storages} and all(marks.get(s, places) <= places for s in nodes[x].storages)]
        if any(made & {*nodes[x].storages} for x in n.inputs if x not in shown):
            mine = (len(storages),)
            storages.append(StepStorage(size_bytes=0, owner=n.name))
            made.update(mine)
            marks[mine[0]] = places
            nodes[i] = msgspec.structs.replace(n, storages=(*n.storages, *mine), makes=mine)
        else:
            more = dict.fromkeys(s for x in shown for s in nodes[x].storages if s in marks)
            nodes[i] = msgspec.structs.replace(n, storages=(*n.storages, *more)) if more else n
    return msgspec.structs.replace(graph, nodes=tuple(nodes), storages=tuple(storages)) if marks else graph, marks


def _plainly_needed(graph: StepGraph) -> frozenset[int]:
    wanted = {*graph.results, *(i for i, n in enumerate(graph.nodes) if n.writes and not n.optional)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in wanted:
            wanted.update(graph.nodes[i].inputs)
    return frozenset(i for i in wanted if graph.nodes[i].phase != "input")


@dataclass(frozen=True)
class _Reader:
    graph: StepGraph
    marks: Set[int]
    forward: set[int]
    alternatives: bool
    lossy: bool
    must: frozenset[int]

    def storages(self, inputs: Iterable[int]) -> frozenset[int]:
        return frozenset(s for x in inputs for s in self.graph.nodes[x].storages if s in self.forward)

    def way(self, at: int, source: StepNode | Alternative) -> Implementation:
        over = -1
        if at >= 0 and isinstance(source, Alternative) and source.over >= 0:
            over = self.graph.nodes[source.over].storages[0]
        return Implementation(
            alternative=at, reads=self.storages(source.inputs), time_s=source.time_s, workspace_bytes=source.workspace_bytes, over=over
        )

    def ways(self, n: int) -> tuple[Implementation, ...]:
        node = self.graph.nodes[n]
        others = node.alternatives if self.alternatives else ()
        able = [i for i, a in enumerate(others) if (a.lossless or self.lossy) and (a.over < 0 or self.fits_over(node, a.over))]
        return (self.way(-1, node), *(self.way(i, others[i]) for i in able))

    def _results_twice(self, n: int) -> bool:
        """It makes a result of the step and more, and is read as a whole: run again, both copies of that result would be held."""
        graph = self.graph
        made = graph.nodes[n].makes
        if len(made) < 2 or not any({*made} & {*graph.nodes[r].storages} for r in graph.results):
            return False
        return any(n in x.inputs and not is_view(x) for x in graph.nodes[n + 1 :])

    def fits_over(self, node: StepNode, over: int) -> bool:
        """Only a made result of one storage of the same size is written over."""
        place, storages = [s for s in self.graph.nodes[over].storages if s not in self.marks], self.graph.storages
        same = len(place) == 1 and len(node.makes) == 1 and storages[place[0]].kind == "made"
        return same and storages[place[0]].size_bytes == storages[node.makes[0]].size_bytes

    def operator(self, chain: tuple[int, ...], written: set[int]) -> Operator:
        nodes, storages = self.graph.nodes, self.graph.storages
        last = nodes[chain[-1]]
        inside = {s for n in chain[:-1] for s in nodes[n].makes}
        once = any(nodes[n].writes or written & {*nodes[n].storages} or self._results_twice(n) for n in chain)
        if len(chain) == 1:
            made = sum(storages[s].size_bytes for s in last.makes)
            ways = self.ways(chain[0])
            moment = Moment(inner_bytes=made, reads=frozenset[int]().union(*(w.reads for w in ways)))
            return Operator(nodes=chain, makes=last.makes, ways=ways, moments=(moment,), optional=chain[0] not in self.must, once=once)
        moments: list[Moment] = []
        alive = 0
        for i, n in enumerate(chain):
            alive += sum(storages[s].size_bytes for s in nodes[n].makes)
            later = frozenset[int]().union(*(self.storages(nodes[x].inputs) for x in chain[i:])) - inside
            moments.append(Moment(inner_bytes=alive + nodes[n].workspace_bytes, reads=later))
            if i:  # the result before has had its only reader
                alive -= sum(storages[s].size_bytes for s in nodes[chain[i - 1]].makes)
        way = Implementation(alternative=-1, reads=moments[0].reads, time_s=sum(nodes[n].time_s for n in chain), workspace_bytes=0)
        return Operator(nodes=chain, makes=last.makes, ways=(way,), moments=tuple(moments), optional=chain[0] not in self.must, once=once)


def _chains(graph: StepGraph, needed: frozenset[int], reader: _Reader, merge: bool) -> list[tuple[int, ...]]:
    """Forward nodes that make or change something, in order, those that merge together."""
    order = [i for i, n in enumerate(graph.nodes) if i in needed and n.phase == "forward" and not is_view(n)]
    readers: dict[int, set[int]] = {}
    for i in needed:
        n = graph.nodes[i]
        if not is_view(n):
            for w in reader.ways(i):
                for s in w.reads:
                    readers.setdefault(s, set()).add(i)
    kept = {s for r in graph.results for s in graph.nodes[r].storages}

    def follows(a: int, b: int) -> bool:
        x, y = graph.nodes[a], graph.nodes[b]
        if len(x.makes) != 1 or len(y.makes) != 1 or x.alternatives or y.alternatives or x.writes or y.writes:
            return False
        if (a in reader.must) != (b in reader.must):
            return False
        (s,), (made,) = x.makes, y.makes
        if made in reader.marks:  # it goes with the storage that its view lies in: what it is made from may stay longer
            return False
        # merging loses nothing: the value between has one reader, and holding what is made of it never takes more bytes than holding it
        smaller = graph.storages[made].size_bytes <= graph.storages[s].size_bytes
        return smaller and readers.get(s) == {b} and s not in kept and not (x.random or y.random) and {*x.storages} == {s}

    chains: list[tuple[int, ...]] = []
    for i in order:
        if merge and chains and follows(chains[-1][-1], i):
            chains[-1] = (*chains[-1], i)
        else:
            chains.append((i,))
    return chains


def _stages(
    graph: StepGraph, needed: frozenset[int], reader: _Reader, made_by: dict[int, int]
) -> tuple[tuple[Stage, ...], tuple[tuple[int, int, int], ...]]:
    nodes, storages = graph.nodes, graph.storages
    order = [i for i, n in enumerate(nodes) if i in needed and n.phase == "backward"]
    last: dict[int, int] = {}
    endless = {s for r in graph.results for s in nodes[r].storages}
    for i in order:
        for inputs in (nodes[i].inputs, *(a.inputs for a in nodes[i].alternatives)):
            for x in inputs:
                last |= dict.fromkeys(nodes[x].storages, i)
        last |= dict.fromkeys(nodes[i].storages, i)
    alive = graph.fixed_bytes()
    ends: dict[int, list[int]] = {}
    for s, i in last.items():
        if s not in endless and s in made_by and nodes[made_by[s]].phase == "backward":
            ends.setdefault(i, []).append(s)
    found: list[tuple[Backward, int]] = []
    for i in order:
        n = nodes[i]
        made = sum(storages[s].size_bytes for s in n.makes)
        if not is_view(n):
            # a gradient may be written over only by its last reader
            ways = tuple(w for w in reader.ways(i) if w.over < 0 or w.over in reader.forward or (last[w.over] == i and w.over not in endless))
            found.append((Backward(node=i, ways=ways, bytes_alive=alive + made, made_bytes=made), alive))
        alive += made
        alive -= sum(storages[s].size_bytes for s in ends.get(i, ()))
    groups: list[list[tuple[Backward, int]]] = []
    for b, before in found:
        # a stage begins with each backward node that may read forward results; what is held cannot change before the next one
        if not groups or any(w.reads for w in b.ways):
            groups.append([])
        groups[-1].append((b, before))
    stages = tuple(Stage(first=g[0][0], rest=tuple(b for b, _ in g[1:]), bytes_before=g[0][1]) for g in groups)
    return stages, _held(graph, needed, reader, stages)


def _held(graph: StepGraph, needed: frozenset[int], reader: _Reader, stages: tuple[Stage, ...]) -> tuple[tuple[int, int, int], ...]:
    """(storage, first stage, last stage) of backward views of forward results with several readers: a backward node runs once."""
    stage_of = {b.node: t for t, s in enumerate(stages, 1) for b in (s.first, *s.rest)}
    roots: dict[int, set[int]] = {}
    found: dict[tuple[int, int], list[int]] = {}
    for i, n in enumerate(graph.nodes):
        if i not in needed or n.phase != "backward":
            continue
        over = set[int]().union(*(roots.get(x, set()) for inputs in (n.inputs, *(a.inputs for a in n.alternatives)) for x in inputs))
        if reader.marks >= {*n.makes} and not n.writes and reader.storages([i]):
            over.add(i)
            roots[i] = over
        if i in stage_of:
            for v in over:
                for s in reader.storages([v]):
                    found.setdefault((v, s), []).append(stage_of[i])
    return tuple(sorted({(s, min(t), max(t)) for (_, s), t in found.items() if min(t) < max(t)}))

