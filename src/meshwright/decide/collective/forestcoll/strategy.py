"""Spanning trees that use every link of the bottleneck fully: throughput-optimal collectives on any fabric.

Cite: ForestColl (arXiv 2402.06787); forerunner "Bandwidth optimal pipeline schedule" (arXiv 2305.18461).
Left open by the paper: how many pieces to pipeline (our answer: the square-root rule on the trees' height and the cost of a message),
whether devices outside the collective may relay (only where the ranks are not connected without them), which splits to
prefer (shares over servers at offsets 1, 2, 4, ..., which keeps trees low), when fewer trees are better (when so many leave the pipeline unfilled).
Deviations: the optimum is found by Newton's iteration on cuts instead of a binary search; splitting and packing as in
`kernels.edgesplit` and `kernels.treepack`; packed trees exchange parents until they are low (`kernels.treepack_lower`)
and then swap entries until latency counts least (`arrival`), or leave slow ways time where that ends earlier (`latency_relief`). All-reduce is
reduce-scatter plus all-gather over the same forest, pipelined; that is optimal for each half, and for the whole only where the bound printed
beside it says so (the paper's combined optimum needs an LP).
Invariant: every root has k trees per weight, every tree spans all ranks, no link carries more than U · rate trees; tested at run time.
Cost: O(ranks) max-flows for the bound, O(splits · ranks) for switch removal, O(ranks) per tree for packing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from ....cite import Cite
from ....errors import Disconnected, TimeLimit, Unsupported
from ....kernels.effort import Deadline
from ....program.program import MAX_EXECUTED_STEPS
from ..bounds.collective import collective_bound
from ..memo import remember
from ..problem import PIECES_BESIDE, ROOTED, CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, options_of, require_operation
from ..rates import RateGraph, rate_graph, with_relays
from ..trees.lower import Lowering, lower_parts
from ..trees.shards import shard_table
from ..trees.symmetry import alike, sinks_of_each_kind
from .arrival import HopTimes, quicker, without_way_back
from .cut_and_pace import Way, best_way, timed
from .finish_time import finish_s
from .forest import MAX_FEW_RANKS, MIN_SHARE_OF_OPTIMUM, Forest, build_forest, smallest_stretch
from .latency_relief import IDLE_PER_LATENCY_FACTOR, at_home, may_relieve, relief_of, relieved, require_relief
from .odd_servers import odd_forest
from .one_root import one_root_forest
from .paths import gather_forest
from .pieces import depth_of, evenly_cut, large_parts, lead_of, require_numbers, rounded, wanted_pieces
from .prepared import Late, Prepared, is_uneven, lowering_of, notes_of, parts_of, servers_of, uses_way_back, weights_of
from .throughput_estimate import LARGE_MESSAGE_BYTES, MAX_TRIED_RANKS, filled, most_steps, worth_of
from .windows import in_windows, most_folded_steps, require_window

__all__ = ["CITE", "DEVIATIONS", "ForestColl"]

CITE = Cite(
    key="zhao2024forestcoll",
    title="ForestColl: Throughput-Optimal Collective Communications on Heterogeneous Network Fabrics",
    authors="L. Zhao and others",
    year=2024,
    venue="arXiv 2402.06787",
    url="https://arxiv.org/abs/2402.06787",
)
DEVIATIONS = (
    "Newton's iteration on cuts instead of a binary search",
    "splits are applied first and tested afterwards, whole matchings at a time",
    "one tree is finished before the next is begun",
    "packed trees exchange parents until they are low, and entries until the latest data arrives early",
    "among many ranks, trees of two hops that enter a server several times, where ranks can be rotated",
    "ways of more hops may be some pieces ahead of shorter ones",
    "for large messages, trees may leave links behind long latencies idle for so long, and load the others a little more",
    "all-reduce is reduce-scatter plus all-gather; the combined linear program is not solved",
)
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "scatter", "gather")
MAX_EXPLICIT_STEPS = 20_000  # executed steps: larger programs use `repeat` and batches of trees, unless told otherwise
MIN_TRIED_PIECES = 32  # plans of fewer pieces are not tried on the simulator: the shortest try has as many
COARSER_FACTORS = (2, 8)  # units per channel that are tried beside the finest, as multiples of those
MIN_PACE_PIECES = 4  # pieces that a paced rank's longest way may be ahead, at least
LEADING = ("reduce-scatter", "reduce")  # where ranks have much to pass on before it takes the slow way; other operations take it first anyway
MAX_STEPS_PER_PIECE = 1 << 21  # steps of one piece, not folded: beyond it fewer trees are taken, if they need not be exactly optimal
MIN_PIECES_LEFT = 128  # channels are made finer as long as the program's size leaves so many pieces; more pieces only with the finest channels
FEWER_TREES_FACTOR = 4  # where the exact number of trees leaves few pieces, other numbers up to so many times `max_trees` are estimated ...
MAX_FEWER_BUILT = 3  # ... and so many of them built, the most promising first
RELIEVED_TREES_FACTOR = 2  # as FEWER_TREES_FACTOR, where slow ways are left time: more trees leave too few pieces
MAX_UNLIKE_TREES = 4  # of a root's trees about so many differ, for the estimate of channels before trees are built
MAX_THIN_TREES = 1024  # trees of one root that are tried
MORE_TREES_FACTORS = (1, 2, 3, 4, 6, 8)  # numbers of thinner trees of one root that are tried, as multiples of the fewest


@dataclass(frozen=True, kw_only=True)
class ForestColl(CollectiveStrategy):
    """Options.

    trees: k, trees per root and weight; None = the exact optimum if it needs at most `max_trees`, else the best of 1..max_trees; where many leave
        too few pieces to fill the pipeline, the best for that of up to 4 · max_trees.
    pieces: pipeline pieces per tree; None = chosen from height, latency and message cost, at most `max_pieces`.
    unroll: pieces as explicit chunks (repeat 1), or as iterations of repeated lanes; None = explicit unless the program gets large.
    quantum: most equal trees that share a channel; None = as few as the program's size allows, because links that share their rate evenly
        between messages let large batches lag.
    relay: may devices outside the collective forward? None = only if the ranks are not connected otherwise.
    depth: messages a channel may hold; None = enough of DEPTHS to cover the latency of a hop.
    pace: pieces that a rank's longest way may be ahead of its others, 0 = all lanes go as they can; None = the depth.
    lead: paced, pieces that it is ahead of ways with fewer hops; None = as many as outlast a network's latency, where that ends earlier.
    window: folded, servers that a tree serves at once, 0 = all; None = all, or `windows.WINDOW_SERVERS` where so many leave few pieces.
    structure: try trees over servers before the general method; None = yes, and for one root or few ranks the lower of both.
    back: may trees of one root use links that lead into its server? None = unless trees without them do as well.
    relief: so many times the extra latency of slow links that trees leave them idle (`latency_relief`), 0 = none; None = for large all-gathers
        and reduce-scatters among few ranks, if that ends earlier on the simulator.
    fold: store one server's lanes for all, where servers are alike and equal runs of ranks; None = if the program gets large otherwise.
    """

    name: ClassVar[str] = "forestcoll"
    cite: ClassVar[Cite] = CITE
    searches: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = OPERATIONS
    folds: ClassVar[tuple[str, ...]] = OPERATIONS

    trees: int | None = None
    max_trees: int = 8
    pieces: int | None = None
    max_pieces: int = 4096
    unroll: bool | None = None
    quantum: int | None = None
    relay: bool | None = None
    fold: bool | None = None
    depth: int | None = None
    pace: int | None = None
    lead: int | None = None
    window: int | None = None
    structure: bool | None = None
    back: bool | None = None
    relief: int | None = None

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        ways = {"beside": (cls(unroll=True, fold=False),), "beside, in iterations": (cls(unroll=False, pieces=PIECES_BESIDE, fold=False),)}
        return ways.get(use) or super().variants(problem, use)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (unbalanced switches, rates beyond 63 bits), TimeLimit, UsageError (options)."""
        require_operation(problem, self.name, OPERATIONS, uneven=True)
        require_numbers({"trees": self.trees, "max_trees": self.max_trees, "max_pieces": self.max_pieces}, self.pieces, self.lead, self.depth)
        require_relief(problem, self.relief)
        bound = collective_bound(problem)
        best, ready, way = self._best(problem, problem.deadline())
        forests, parts, units, fold = ready.forests, ready.parts, ready.units, ready.servers > 1
        weight, uneven, quantum, pieces = weights_of(problem), is_uneven(problem), way.quantum, way.pieces
        parts, steps = ready.cut(quantum)
        unroll = uneven or (self.unroll if self.unroll is not None else pieces * steps <= MAX_EXPLICIT_STEPS)
        depth = self.depth or min(pieces, max(depth_of(problem, forests, pieces), way.lead))
        how = lowering_of(problem, forests[0], units, pieces, unroll, ready.servers, depth)
        how = replace(how, pace=way.pace, lead=way.lead, window=way.window)
        if uneven:
            table = shard_table(problem, units, pieces)
            how = replace(how, table=table, shard_units=tuple(w * units for w in weight), chunk_bytes=table.chunk_bytes)
            program = lower_parts(parts, how)
        else:
            program = ready.program(how, quantum)
        trees = forests[0].k if forests[0].k == forests[-1].k else None
        chosen = replace(best, trees=trees, pieces=pieces, unroll=unroll, quantum=quantum, relay=ready.relay, fold=fold, depth=depth, pace=way.pace)
        structure, back = forests[0].method != "general", uses_way_back(problem, ready)
        chosen = replace(chosen, lead=way.lead, window=way.window, structure=structure, back=back, relief=best.relief or 0)
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes_of(problem, ready, pieces))

    def _best(self, problem: CollectiveProblem, deadline: Deadline) -> Planned:
        """The options with forests that leave slow ways time, where those end first on the simulator; else as they are."""
        ready = self._prepared(problem, deadline)

        @cache
        def as_is() -> Planned:
            return self, ready, self._way(problem, ready)

        if replace(self, max_trees=8, max_pieces=4096) != ForestColl() or not may_relieve(problem, ready):
            return as_is()

        @cache
        def with_trees(trees: int) -> Planned:
            other = replace(self, relief=IDLE_PER_LATENCY_FACTOR, trees=trees)
            prepared = other._prepared(problem, deadline)
            return other, prepared, other._way(problem, prepared)

        def time_s(planned: Planned) -> float:
            return timed(problem, planned[1], planned[2].quantum, self._in_way(problem, *planned[1:]))[0]

        def pays(trees: int) -> bool:
            forest, at_s = ready.forests[0], time_s(with_trees(trees))
            seconds = HopTimes(problem.fabric, forest.graph, turned=problem.op == "reduce-scatter")
            return at_s < finish_s(forest, seconds, problem.size_bytes) or at_s < time_s(as_is())

        def in_time(trees: int | None) -> int | None:
            if deadline.past:
                raise Late(ready)
            return trees

        def best() -> int | None:
            of = replace(problem, size_bytes=LARGE_MESSAGE_BYTES // problem.element_bytes * problem.element_bytes, shard_bytes=None)
            other = replace(self, relief=IDLE_PER_LATENCY_FACTOR)
            return in_time(relief_of(of, ready, RELIEVED_TREES_FACTOR * self.max_trees, lambda k: replace(other, trees=k)._prepared(of, deadline)))

        def paying() -> int | None:
            trees = remember(problem.fabric, ("relief", *asked, self), best)
            return in_time(trees if trees and pays(trees) else None)

        asked = problem.op, problem.ranks, problem.element_bytes, problem.transport
        try:
            trees = remember(problem.fabric, ("relief pays", *asked, problem.size_bytes, self), paying)
        except Late:
            return as_is()
        return with_trees(trees) if trees else as_is()

    def _prepared(self, problem: CollectiveProblem, deadline: Deadline) -> Prepared:
        """Forests and parts, remembered between sizes. What the deadline may have cut short is not kept."""

        def make() -> Prepared:
            forests, relay = self._forests(problem, deadline)
            servers = servers_of(forests)
            steps = sum(2 * f.distinct * len(problem.ranks) for f in forests)
            fixed = forests[0].symmetry.fixed if forests[0].symmetry and servers > 1 else ()
            fold = servers > 1 and not is_uneven(problem) and (self.fold if self.fold is not None else bool(fixed) or steps > MAX_EXPLICIT_STEPS)
            if self.fold and not fold:
                raise Unsupported("these trees cannot be folded: servers are not alike, or their ranks no equal runs in order", hint="leave fold out")
            parts, units = parts_of(problem, forests, stored=fold)
            found = Prepared(problem.op, forests, relay, servers if fold else 1, parts, units, len(problem.ranks), fixed if fold else ())
            if deadline.past:
                raise Late(found)
            return found

        weight = tuple(weights_of(problem)) if problem.shard_bytes is not None else ()
        asked = problem.op, problem.ranks, problem.root * (problem.op in ROOTED), weight, is_uneven(problem)
        try:
            of = self.trees, self.max_trees, self.structure, self.relay, self.fold, self.back, self.relief
            return remember(problem.fabric, ("forests", asked, of), make)
        except Late as late:
            return late.found

    def _way(self, problem: CollectiveProblem, ready: Prepared) -> Way:
        """Quantum, pieces and pace: as asked, or of some ways the best. Tried for a power of four of bytes, and remembered: the sizes up to the
        next one take the same quantum and pace."""
        if any(x is not None for x in (self.quantum, self.pace, self.pieces, self.lead, self.window)) or self.unroll or is_uneven(problem):
            return self._ways(problem, ready)[0]

        def make() -> Way:
            return best_way(sample, ready, self._ways(sample, ready), lambda way: self._in_way(sample, ready, way))

        # The largest power of four that is no larger: all sizes up to the next one take the way found for it.
        sample_bytes = 1 << 2 * ((problem.size_bytes.bit_length() - 1) // 2)
        sample = replace(problem, size_bytes=max(sample_bytes // problem.element_bytes, 1) * problem.element_bytes, shard_bytes=None)
        if len(ways := self._ways(problem, ready)) == 1:
            return ways[0]
        asked = problem.op, problem.ranks, problem.root * (problem.op in ROOTED), sample.size_bytes, problem.element_bytes, problem.transport
        built = tuple((f.k, f.distinct, f.height) for f in ready.forests)  # a deadline may have cut them short
        found = remember(problem.fabric, ("way", asked, built, self), make)
        alike_ways = (way for way in ways if (way.quantum, bool(way.pace), way.lead > 1) == (found.quantum, bool(found.pace), found.lead > 1))
        return next(alike_ways, ways[0])

    def _in_way(self, problem: CollectiveProblem, ready: Prepared, way: Way) -> Lowering:
        depth = self.depth or min(way.pieces, max(depth_of(problem, ready.forests, way.pieces), way.lead))
        how = lowering_of(problem, ready.forests[0], ready.units, way.pieces, False, ready.servers, depth)
        return replace(how, pace=way.pace, lead=way.lead, window=way.window)

    def _ways(self, problem: CollectiveProblem, ready: Prepared) -> list[Way]:
        """Ways worth a try: the finest channels that leave MIN_PIECES_LEFT, not paced, paced, with a lead; coarser ones, paced, with more pieces."""
        forests = ready.forests
        roots, folded = sum(map(bool, weights_of(problem))), most_folded_steps(ready) if ready.servers > 1 else 0
        most = MAX_EXPLICIT_STEPS if self.unroll else folded or min(most_steps(len(problem.ranks), roots), MAX_EXECUTED_STEPS)
        held: dict[str, Any] = {"most": self.max_pieces, "depth": self.depth}
        wanted = self.pieces or wanted_pieces(problem, forests, sum(weights_of(problem)) * ready.units, **held)
        largest, whole = max(p.units for p in ready.parts), ready.limbs or forests[0].method == "paths"  # paths copy nothing: cuts gain nothing
        first = self.quantum or (largest if whole else ready.quantum(most // min(wanted, MIN_PIECES_LEFT)))

        def way(quantum: int, paced: bool, leads: bool = False) -> Way:
            parts, steps = ready.cut(quantum)
            possible = min(wanted_pieces(problem, forests, large_parts(parts) * ready.servers, **held), most // steps)
            pieces = self.pieces or max(1, rounded(ready, possible) // (self.lead or 1)) * (self.lead or 1)
            lead = self.lead or (lead_of(problem, forests, pieces, steps) if leads and not self.depth else 1)
            depth = self.depth or min(pieces, max(depth_of(problem, forests, pieces), lead))  # else ranks of unlike longest ways block each other
            pace = self.pace if self.pace is not None else max(depth, MIN_PACE_PIECES, 2 * lead * (lead > 1)) * paced
            window, pieces = in_windows(ready, pieces, self.window, fixed=self.pieces is not None)
            pieces = self.pieces or evenly_cut(problem, ready, pieces, window)
            return Way(quantum, pieces, pace if pieces > 1 and not window else 0, lead, window)

        require_window(ready, self.window)
        plain = way(first, False)
        if self.quantum is not None or self.pieces is not None or wanted < MIN_TRIED_PIECES or plain.window or ready.limbs:
            return [plain]
        coarser = sorted({min(first * times, largest) for times in COARSER_FACTORS} - {first}) if largest > first else []
        leading = [way(first, True, True)] if problem.op in LEADING else []
        return [plain, way(first, True), *leading, *(way(quantum, True) for quantum in coarser)]

    def _forests(self, problem: CollectiveProblem, deadline: Deadline) -> tuple[list[Forest], bool]:
        """The forests needed: for reductions on the reversed graph, for broadcasts on the graph; and whether devices relay."""

        def make(relay: bool) -> list[Forest]:
            return self._forests_on(problem, rate_graph(problem.fabric, problem.ranks, relay=relay), deadline)

        return with_relays(problem.fabric, problem.ranks, self.relay, make)

    def _forests_on(self, problem: CollectiveProblem, graph: RateGraph, deadline: Deadline) -> list[Forest]:
        weight = weights_of(problem)
        if problem.op in ("scatter", "gather"):
            turned = problem.op == "scatter"
            way = graph.reversed() if turned else graph
            if not sum(w for r, w in enumerate(weight) if r != problem.root):
                raise Unsupported(f"the root of this {problem.op} owns everything: nothing is sent", hint="leave it out")
            return [gather_forest(way, problem.root, weight, trees=self.trees, max_trees=self.max_trees, deadline=deadline, turned=turned)]

        def build(home: RateGraph) -> Forest:
            seconds = HopTimes(problem.fabric, home, turned=home is not graph)
            of = relieved(home, weight, seconds, self.relief or 0)
            tried: dict[int, tuple[Forest, float]] = {}  # with the key's own forest, so that its identity is not used again

            def hastened(forest: Forest, *, hurried: bool = False) -> Forest:
                return forest if deadline.past else quicker(forest, seconds, hurried=hurried)

            def worth(forest: Forest) -> float:
                if id(forest) not in tried:
                    tried[id(forest)] = forest, worth_of(hastened(forest, hurried=True), seconds)
                return tried[id(forest)][1]

            others = (self.trees, self.structure, self.back, self.relief) != (None, None, None, None)  # trees that are asked for
            if of.ranks > MAX_FEW_RANKS and not is_uneven(problem) and (self.fold or (self.fold is None and not others)):
                few: dict[str, Any] = {"max_trees": self.max_trees, "deadline": deadline}
                images = one_root_forest(of, weight, trees=self.trees, **few) if sum(weight) == 1 else odd_forest(of, **few)
                if images is not None and self.trees in (None, images.k) and (problem.op != "all-reduce" or graph.mirrored):
                    return images
            pruned = without_way_back(of, weight.index(1)) if sum(weight) == 1 and self.back is not True else None
            if self.back is False and pruned is None:
                raise Unsupported("no link leads back into the root's server, or trees need those that do", hint="leave back out")
            if self.structure is not None or self.trees is not None:
                least = pruned if pruned is not None and self.back is False else of
                return at_home(hastened(self._lower_of_both(least, weight, deadline)), home, self.relief)
            if sum(weight) == 1:
                return hastened(self._low(of, pruned, weight, worth, deadline))
            return at_home(hastened(self._fewer(self._lower_of_both(of, weight, deadline), weight, worth, deadline)), home, self.relief)

        if problem.op in ("all-gather", "broadcast"):
            return [build(graph)]
        if problem.op in ("reduce-scatter", "reduce"):
            return [build(graph.reversed())]
        up = build(graph.reversed())
        return [up, up if graph.mirrored else build(graph)]

    def _lower_of_both(self, graph: RateGraph, weight: list[int], deadline: Deadline) -> Forest:
        """Trees over servers, or where ranks are few and nothing is to be folded, those of the general method if they are lower."""
        structure = True if self.structure is None else self.structure
        most = max(1, MAX_STEPS_PER_PIECE // (2 * graph.ranks * sum(weight)))
        few = most < self.max_trees and not alike(graph, weight)
        # Alike servers are folded, so their programs store one server's steps only; others must keep to the limit with all.
        held = min(most, self.max_trees) if few else self.max_trees
        first = build_forest(graph, weight, trees=self.trees, max_trees=held, deadline=deadline, structure=structure, strict=few)
        if self.trees is None and first.symmetry is None and first.k > most and not few:
            first = build_forest(graph, weight, max_trees=min(most, self.max_trees), deadline=deadline, structure=structure, strict=True)
        if self.structure is not None or self.fold or first.method == "general" or graph.ranks > MAX_FEW_RANKS:
            return first
        if first.height <= 2:  # trees over servers are no lower: one hop to enter a server, one inside it
            return first
        try:
            second = build_forest(graph, weight, trees=first.k, deadline=deadline, structure=False)
        except (TimeLimit, Unsupported):
            return first
        return min((first, second), key=lambda f: (-f.ratio, f.height, f.distinct))

    def _fewer(self, first: Forest, weight: list[int], worth: Callable[[Forest], float], deadline: Deadline) -> Forest:
        """Fewer trees where so many leave too few pieces to fill the pipeline: of the numbers that promise most, the best when built."""
        graph, sinks = first.graph, sinks_of_each_kind(first.graph, weight)
        promise: dict[int, float] = {}
        short = graph.ranks <= MAX_TRIED_RANKS and worth(first) < float(MIN_SHARE_OF_OPTIMUM)
        for trees in range(1, min(FEWER_TREES_FACTOR * self.max_trees, first.k - 1) + 1 if short else 1):
            ratio = trees * first.optimum / smallest_stretch(graph, weight, trees, first.optimum, sinks)
            # As in `worth_of`, between unlike trees counted once and all trees, before either is known.
            channels = sum(weight) * (trees * min(trees, MAX_UNLIKE_TREES)) ** 0.5
            promise[trees] = float(ratio) * filled(graph.ranks, sum(map(bool, weight)), channels, first.height)
        best = first
        for trees in sorted(promise, key=lambda trees: (-promise[trees], trees))[:MAX_FEWER_BUILT]:
            if deadline.past:
                break
            try:
                found = replace(self, trees=trees)._lower_of_both(graph, weight, deadline)
            except (TimeLimit, Unsupported):
                continue
            best = max(best, found, key=worth)
        return best

    def _low(self, graph: RateGraph, pruned: RateGraph | None, weight: list[int], worth: Callable[[Forest], float], deadline: Deadline) -> Forest:
        """Of one root: more and thinner trees branch where few thick ones must be chains, at the same optimum. The best of some."""
        best = base = build_forest(graph, weight, max_trees=self.max_trees, deadline=deadline)
        local = max(Counter(graph.group[: graph.ranks]).values())
        small = graph.ranks <= MAX_FEW_RANKS
        ways = (True, False) if small else (True,) if base.method != "general" else ()
        # One less than a server's ranks, or than all: as many as a root can feed at once.
        for times in sorted({*(MORE_TREES_FACTORS if small else (2, 3)), local - 1, *((graph.ranks - 1,) if small and pruned is None else ())} - {0}):
            for structure in ways:
                if base.k * times > MAX_THIN_TREES or deadline.past:
                    break
                try:
                    found = build_forest(pruned or graph, weight, trees=base.k * times, deadline=deadline, structure=structure)
                except (Disconnected, Unsupported):
                    continue  # whole trees leave a switch unbalanced
                if found.ratio >= best.ratio and (-found.ratio, -worth(found), found.height) < (-best.ratio, -worth(best), best.height):
                    best = found
        return self._fewer(best, weight, worth, deadline)


Planned = tuple[ForestColl, Prepared, Way]
