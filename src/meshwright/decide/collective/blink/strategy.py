"""Spanning trees packed into whatever links an allocation has: broadcast, reduce, all-reduce and their kin on parts of servers.

Cite: Blink (MLSys 2020, arXiv 1910.04940).
Left open by the paper: where the trees' weights are equally good (our answer: fewest trees, then lowest), which root an undirected tree gets
(the one that makes it lowest), when one hop or one tree beats many (the simulator decides, at the size asked for), how chunks are chosen on
a fabric that is only described (searched on the simulator; `tuned_chunk_bytes` is the rule for real runs).
Deviations: switches, NICs and relaying devices lie on paths between ranks, so trees are packed by paths and any fabric can be planned for;
all-gather and reduce-scatter pack trees of every root together, scatter and gather pack shortest-path trees whose links carry the blocks
below them; an exact packing of undirected trees by matroid union is an option; links of two kinds are only kept in separate trees where
changing channels costs time (`switch_channel_s`), else the mixed packing competes too.
Invariant: every tree spans all ranks; loads are counted exactly; the packing is within theta of the optimum or says by how much it is not.
Cost: O(m log m / epsilon^2) cheapest trees per packing, an integer program over at most 160 trees, some twenty simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from ....bound import Bound, Certificate
from ....cite import Cite
from ....errors import Disconnected, Unsupported, UsageError
from ....kernels.effort import Deadline
from ....kernels.strength import strength
from ....program.program import Program
from ..bounds.collective import collective_bound
from ..memo import in_pieces, remember
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of, require_operation
from ..program_time import simulated_time_s
from ..rates import RateGraph, rate_graph
from ..trees.lower import Lowering, lower_parts, tree_steps
from .blocks import block_steps, lower_blocks
from .chunks import fastest_count
from .three_phase import three_phase_set
from .tree_sets import SHAPE_OF, TreeSet, channel_graphs, channel_set, few_exact_trees, one_hop_set, one_tree_set, packed_set, parts_of, per_root

__all__ = ["CITE", "DEVIATIONS", "Blink"]

CITE = Cite(
    key="wang2020blink",
    title="Blink: Fast and Generic Collectives for Distributed ML",
    authors="G. Wang and others",
    year=2020,
    venue="MLSys 2020, arXiv 1910.04940",
    url="https://arxiv.org/abs/1910.04940",
)
DEVIATIONS = (
    "trees are packed by paths through switches, so any fabric can be planned for",
    "all-gather and reduce-scatter pack the trees of all roots together; scatter and gather pack shortest-path trees",
    "with more than two servers every unit is added up in one server instead of in all",
    "the simulator chooses among packed trees, one hop, one tree, three phases and channels, and the number of pieces",
)
FORMS = ("trees", "one-hop", "one-tree", "three-phase", "channels")
MAX_RANKS = 64  # packing by weights looks at all pairs of ranks in every one of thousands of rounds
MAX_EXPLICIT_STEPS = 60_000  # executed steps up to which pieces are written out; beyond, lanes repeat
MAX_SIMULATED_STEPS = 200_000  # executed steps of a candidate's simulation, of which there are some twenty; it bounds the number of pieces


@dataclass(frozen=True, kw_only=True)
class Blink(CollectiveStrategy):
    """Options.

    form: "trees" (packed), "one-hop", "one-tree", "three-phase" (all-reduce over several servers) or "channels" (device links and all others,
        each with trees of its own); None = the fastest on the simulator.
    epsilon: step of the multiplicative weights. theta: share of the optimum's rate that few trees may give up.
    exact: pack undirected trees exactly (all-reduce on devices joined directly); None = both ways where few trees do it.
    parts: pieces of a tree's share that follow each other; None = searched on the simulator, at most `max_parts`.
    unroll: pieces as explicit chunks, or as iterations of repeated lanes; None = explicit unless the program gets large.
    relay: may devices outside the collective forward? None = only if the ranks are not connected otherwise.
    switch_channel_s: time to start the slower channel (disabling peer access, say); above 0 no tree may mix the two.
    """

    name: ClassVar[str] = "blink"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = tuple(SHAPE_OF)
    searches: ClassVar[bool] = True

    form: str | None = None
    epsilon: float = 0.1
    theta: float = 0.05
    exact: bool | None = None
    parts: int | None = None
    max_parts: int = 512
    unroll: bool | None = None
    relay: bool | None = None
    switch_channel_s: float = 0.0

    @classmethod
    def applies(cls, problem: CollectiveProblem) -> bool:
        return problem.op in cls.operations and len(problem.ranks) <= MAX_RANKS

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected; Unsupported (operation, more than 64 ranks, a form that does not apply, exact trees where none are known);
        UsageError (options)."""
        self._require_sense()
        bound = _bound(problem)
        require_operation(problem, self.name, self.operations)
        if len(problem.ranks) > MAX_RANKS:
            raise Unsupported(
                f"packing trees by weights for {len(problem.ranks)} ranks takes too long, at most {MAX_RANKS}",
                hint="use --strategy forestcoll, or blueconnect", data={"ranks": len(problem.ranks)},
            )  # fmt: skip
        deadline = problem.deadline()
        sets, relay = self._sets(problem, deadline)
        best: tuple[float, int, TreeSet, int] | None = None
        judged: dict[str, float | None] = {}
        # The fastest links first: then the time found soon rules out sets whose bytes alone take longer.
        for trees in sorted(sets, key=lambda s: -s.rate_Bps):
            name = trees.form + (", exact" if trees.exact else "")
            judged[name] = None
            if best is not None and (problem.size_bytes / trees.rate_Bps > best[0] or deadline.past):
                continue  # its links alone take longer, or the time is up
            pieces, time_s, steps = self._chunked(problem, trees)
            judged[name] = time_s
            if best is None or (time_s, steps) < best[:2]:
                best = time_s, steps, trees, pieces
        assert best is not None
        _, _, trees, pieces = best
        unroll = self.unroll if self.unroll is not None else pieces * _steps(problem, trees) <= MAX_EXPLICIT_STEPS
        program = self._program(problem, trees, pieces, unroll=unroll)
        chosen = replace(self, form=trees.form, exact=trees.exact, parts=pieces, unroll=unroll, relay=relay)
        notes = {**trees.facts, "form": trees.form, "depth": trees.depth, "pieces": pieces, "rate_Bps": float(trees.rate_Bps), "forms_s": judged}
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes)

    def _require_sense(self) -> None:
        for option, value in (("parts", self.parts), ("max_parts", self.max_parts)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="blink")
        for option, share in (("epsilon", self.epsilon), ("theta", self.theta)):
            if not 0 < share < 1:
                raise UsageError(f"{option} must lie between 0 and 1, got {share}", where="blink")
        if self.form is not None and self.form not in FORMS:
            raise UsageError(f"no form {self.form!r}", where="blink", hint=f"forms: {', '.join(FORMS)}")
        if not 0 <= self.switch_channel_s < float("inf"):
            raise UsageError(f"switch_channel_s must be >= 0, got {self.switch_channel_s}", where="blink")

    # ---- sets of trees ----------------------------------------------------------------------------------------------------
    def _sets(self, problem: CollectiveProblem, deadline: Deadline) -> tuple[list[TreeSet], bool]:
        """All sets that apply (or the one asked for), and whether devices relay."""
        everyone = len(problem.ranks) == len(problem.fabric.devices)
        tries = [False, True] if self.relay is None and not everyone else [bool(self.relay)]
        for relay in tries:
            try:
                return self._sets_on(problem, rate_graph(problem.fabric, problem.ranks, relay=relay), relay, deadline), relay
            except Disconnected as error:
                if relay == tries[-1]:  # the bound found no cut, so only trees that need links both ways can fail
                    text = f"no tree of links that go both ways joins the ranks: {error.message}"
                    raise Unsupported(text, hint="use --strategy forestcoll", data=error.data) from None
        raise AssertionError("one of the tries returns or raises")

    def _sets_on(self, problem: CollectiveProblem, graph: RateGraph, relay: bool, deadline: Deadline) -> list[TreeSet]:
        """Cheap sets first; once the time is up, those not yet made are left out."""
        packing: dict[str, Any] = {"epsilon": self.epsilon, "theta": self.theta}
        halves = channel_graphs(problem, relay=relay) if self.form in (None, "channels") or self.switch_channel_s else None
        best = halves[0] if halves is not None and self.switch_channel_s > 0 else graph
        exact = problem.op == "all-reduce" and few_exact_trees(best) if self.exact is None else self.exact
        key = "blink", problem.op, problem.ranks, problem.root, relay, self.epsilon, self.theta, self.switch_channel_s
        makers: list[tuple[str, bool, Callable[[], TreeSet | None]]] = []  # (form, exact, what makes it)
        if not self.exact:
            makers.append(("one-tree", False, lambda: one_tree_set(problem, graph)))
            makers.append(("one-hop", False, lambda: one_hop_set(problem, graph)))
            makers.append(("trees", False, lambda: packed_set(problem, best, exact=False, **packing)))
            if problem.op == "all-reduce":
                makers.append(("three-phase", False, lambda: three_phase_set(problem, graph, **packing)))
        if exact:
            makers.append(("trees", True, lambda: packed_set(problem, best, exact=True, **packing)))
        if halves is not None and not self.exact:
            makers.append(("channels", False, lambda: self._channels(problem, halves)))
        found: list[TreeSet | None] = []
        for form, whole, make in makers:
            if self.form in (None, form) and not (any(found) and deadline.past):
                sized = problem.size_bytes if form == "channels" else 0  # how much each kind of links gets depends on the size
                found.append(remember(problem.fabric, (*key, form, whole, sized), make))
        sets = [s for s in found if s is not None]
        if not sets:
            raise Unsupported(
                f"the form {self.form!r} does not apply to this {problem.op}",
                hint="leave `form` off: one-hop needs a path between all pairs, three-phase several servers, channels two kinds of links that each "
                "join all ranks", data={"form": self.form},
            )  # fmt: skip
        return sets

    def _channels(self, problem: CollectiveProblem, halves: tuple[RateGraph, RateGraph]) -> TreeSet | None:
        how: dict[str, Any] = {"epsilon": self.epsilon, "theta": self.theta, "exact": False}
        key = "blink channel", problem.op, problem.ranks, problem.root, self.epsilon, self.theta
        fast = remember(problem.fabric, (*key, "fast", halves[0].names), lambda: packed_set(problem, halves[0], **how))
        slow = remember(problem.fabric, (*key, "slow", halves[1].names), lambda: packed_set(problem, halves[1], **how))
        return channel_set(problem, fast, slow, self.switch_channel_s)

    # ---- pieces and programs ----------------------------------------------------------------------------------------------
    def _chunked(self, problem: CollectiveProblem, trees: TreeSet) -> tuple[int, float, int]:
        """(pieces, simulated seconds, executed steps) as asked for, or in the number of pieces that is fastest.

        Simulated with lanes that repeat: the same messages in the same order as written out.
        """
        steps: dict[int, int] = {}

        def time_of(pieces: int) -> float:
            program = self._program(problem, trees, pieces, unroll=False)
            steps[pieces] = program.executed_steps
            return simulated_time_s(program, problem.fabric, problem.ranks, problem.transport)

        if self.parts is not None:
            time_s = time_of(self.parts)
            return self.parts, time_s, steps[self.parts]
        shards = len(problem.ranks) if per_root(problem.op) or problem.op in ("scatter", "gather") else 1
        units = sum(t.units for t in trees.trees)
        most_steps = MAX_EXPLICIT_STEPS if self.unroll else MAX_SIMULATED_STEPS
        elements = problem.size_bytes // problem.element_bytes
        # A piece is at least one element of every unit, and the pieces' steps stay within what a simulation may have.
        most = min(self.max_parts, max(1, most_steps // max(1, _steps(problem, trees))), max(1, elements // max(units, shards)))
        pieces, time_s = fastest_count(time_of, most if trees.depth > 1 or problem.op == "all-reduce" else 1)
        return pieces, time_s, steps[pieces]

    def _program(self, problem: CollectiveProblem, trees: TreeSet, pieces: int, *, unroll: bool) -> Program:
        """Lowered once for all sizes; how often lanes repeat and how long chunks are is written in afterwards."""
        # Lanes that repeat have the same steps however often; only one piece is a special case, since nothing then follows.
        shape = pieces if unroll else min(pieces, 2)
        which = trees.graph.names, trees.form, trees.trees
        key = "blink program", problem.op, problem.ranks, problem.root, problem.element_bytes, which, shape, unroll
        program = remember(problem.fabric, key, lambda: _lowered(problem, trees, shape, unroll))
        return in_pieces(program, 1 if unroll else pieces, _chunk_bytes(problem, trees, pieces))


def _lowered(problem: CollectiveProblem, trees: TreeSet, pieces: int, unroll: bool) -> Program:
    if problem.op in ("scatter", "gather"):
        return lower_blocks(problem, trees, pieces=pieces, unroll=unroll)
    parts, units = parts_of(problem, trees, single=trees.form != "channels")
    shards = len(problem.ranks) if per_root(problem.op) else 1
    how = Lowering(
        fabric=problem.fabric, ranks=problem.ranks, names=trees.graph.names, op=problem.op, root=problem.root, shards=shards, units=units,
        pieces=pieces, unroll=unroll, chunk_bytes=_chunk_bytes(problem, trees, pieces), name=f"blink {problem.op}",
    )  # fmt: skip
    return lower_parts(parts, how)


def _chunk_bytes(problem: CollectiveProblem, trees: TreeSet, pieces: int) -> int:
    """Bytes of a chunk, whole elements: the message over shards or blocks, units and pieces, rounded up."""
    units = sum(t.units for t in trees.trees)  # of all shards together, where ranks root their own
    blocks = len(problem.ranks) if problem.op in ("scatter", "gather") else 1
    return -(-(problem.size_bytes // problem.element_bytes) // (blocks * units * pieces)) * problem.element_bytes


def _steps(problem: CollectiveProblem, trees: TreeSet) -> int:
    key = "blink steps", problem.op, problem.ranks, trees.form, trees.trees
    return remember(problem.fabric, key, lambda: _counted(problem, trees))


def _counted(problem: CollectiveProblem, trees: TreeSet) -> int:
    if problem.op in ("scatter", "gather"):
        return block_steps(trees)
    parts, _ = parts_of(problem, trees, single=trees.form != "channels")
    return tree_steps(parts)


def _bound(problem: CollectiveProblem) -> Bound:
    """The common bound, or the partition that the strength proves where that is better (all-reduce on devices joined directly)."""
    common = collective_bound(problem)
    if problem.op != "all-reduce":
        return common
    graph = rate_graph(problem.fabric, problem.ranks)
    if graph.nodes > graph.ranks or graph.ranks > MAX_RANKS:
        return common
    both: dict[tuple[int, int], int] = {}
    for (u, v), rate in graph.arcs.items():
        pair = (min(u, v), max(u, v))
        both[pair] = both.get(pair, 0) + rate
    parts = strength(graph.ranks, both).parts
    where = {v: i for i, part in enumerate(parts) for v in part}
    entering = sum(rate for (u, v), rate in both.items() if where[u] != where[v]) * graph.unit_Bps
    # The `partition` certificate (`bounds.bandwidth`): every element enters parts 2 (p - 1) times.
    time = Fraction(2 * (len(parts) - 1) * problem.size_bytes, entering)
    if time <= common.exact:
        return common
    data = {
        "parts": [[graph.names[v] for v in part] for part in parts], "entering_Bps": str(entering), "demand": "all-reduce", "ranks": graph.ranks,
        "devices": list(problem.ranks), "size_bytes": problem.size_bytes,
    }  # fmt: skip
    return Bound(quantity="all-reduce time", value=str(time), unit="s", certificate=Certificate(kind="partition", data=data))
