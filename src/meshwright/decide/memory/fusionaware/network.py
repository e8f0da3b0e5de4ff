"""What to save by one minimum cut between forward and backward, fusion in mind.

Every node n is an arc n_in -> n_out of the cost of saving it, every use an arc n_out -> user_in without limit. The source feeds what exists or
must not run again, the sink takes what only backward can compute. The nodes whose arcs the least cut takes are saved; what lies behind them runs
again, inside the kernels of its users where it can be fused with them.
Source: H. He, S. Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023, and torch's partitioner (the weights
1.1^distance and 2 for an extra write, and the bans below). Deviations: with `by_storage`, views of anything are free to make again and never saved
for themselves, and what backward reads of a parameter or an input costs nothing; torch counts the bytes of each view.

Bans on running again: `intensive` (library kernels), `unknown` (operators not in the list), `random`, `materialised` (a backward user, through views,
cannot be fused with it, so it would be written out anyway), `reduction` (result at most a quarter of its operands), `far` (read early and late
with an unfusible call between), `chain` (more than 100 calls from where a fusible chain began). All but the first and `random` off: least memory
without computing a product twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import Infeasible, UnknownName
from ....graph.step_graph import StepGraph, StepPlan
from ....kernels.maxflow import FlowNetwork, checked_capacities
from ..lifetimes import lifetimes_of
from ..problem import StepStrategy
from ..step import size_text
from .fusibility import fusible, is_compute_intensive, is_fusible, is_recomputable, is_view

__all__ = ["BANS", "CITE", "MIN_MEMORY", "MinCut", "SavedSet", "saved_set"]

CITE = Cite(
    key="fusionaware", title="Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", authors="He, Yu", year=2023,
    venue="MLSys 2023",
)  # fmt: skip
BANS = ("intensive", "unknown", "random", "materialised", "reduction", "far", "chain")
MIN_MEMORY = ("intensive", "random")
# Calls from where a fusible chain began after which its nodes are banned: torch's own limit, against kernels that compute long chains anew.
MAX_CHAIN_POSITIONS = 100
# Distance from backward up to which a node's weight grows (1.1 per call): torch's own limit, which keeps weights finite.
MAX_DISTANCE = 100


@dataclass(frozen=True, kw_only=True)
class SavedSet:
    """`nodes`: saved, placeholders included. `new_bytes`: of the storages the step makes that hold them, those of its results aside.

    `value`: of the cut. `banned`: node -> which ban keeps it from running again.
    """

    nodes: tuple[int, ...]
    new_bytes: int
    value: int
    banned: dict[int, str] = field(default_factory=dict)


def saved_set(
    graph: StepGraph, *, bans: Collection[str] = BANS, distance: bool = True, write_twice: bool = True, by_storage: bool = True
) -> SavedSet:
    """Raises: UnknownName for a ban that does not exist; Infeasible when something that must be saved cannot be (names a node on the way)."""
    unknown = sorted(set(bans) - set(BANS))
    if unknown:
        raise UnknownName(f"there is no ban {unknown[0]!r}", where="bans", hint=f"there are: {', '.join(BANS)}")
    net = _Network(graph, frozenset(bans), distance, write_twice, by_storage)
    return net.solve()


class _Network:
    def __init__(self, graph: StepGraph, bans: frozenset[str], distance: bool, write_twice: bool, by_storage: bool) -> None:
        self.graph, self.bans, self.distance, self.write_twice, self.by_storage = graph, bans, distance, write_twice, by_storage
        nodes = graph.nodes
        self.users: list[list[int]] = [[] for _ in nodes]
        for i, n in enumerate(nodes):
            for x in n.inputs:
                self.users[x].append(i)
        self.tangents = {i for i, n in enumerate(nodes) if n.phase == "input" and any(graph.storages[s].kind == "tangent" for s in n.storages)}
        closure = set(self.tangents)
        for i, n in enumerate(nodes):
            if any(x in closure for x in n.inputs):
                closure.add(i)
        self.closure = closure  # cannot be computed without the tangents
        self.backward = closure | {r for r in graph.results if r >= graph.boundary}
        # what draws random numbers runs in forward, whoever reads it, so that the sequence of draws stays
        forward = {i for i, n in enumerate(nodes) if (n.writes or n.random) and i not in closure}
        forward.update(r for r in graph.results if r not in self.backward)
        for i in range(len(nodes) - 1, -1, -1):
            if i in forward:
                forward.update(nodes[i].inputs)
        self.forward = forward
        # calls from a node to the nearest use by backward: saving early, then, is dearer than saving late
        self.far = [0] * len(nodes)
        for i in range(len(nodes) - 1, -1, -1):
            self.far[i] = 0 if i not in forward else min((self.far[u] + 1 for u in self.users[i]), default=10**9)

    def cost(self, i: int) -> int | None:
        """Of saving; None: cannot be saved."""
        node = self.graph.nodes[i]
        own = [s for s in node.storages if self.graph.storages[s].kind == "made"]
        if node.phase == "input":
            return 0 if self.by_storage else sum(self.graph.storages[s].size_bytes for s in node.storages)
        if not node.storages or len(node.makes) > 1:
            return None  # a number, or a tuple, whose items are saved
        if self.by_storage and not own:
            return 0
        base = next((x for x in node.inputs if set(self.graph.nodes[x].storages) & set(node.storages)), None)
        if self.by_storage and is_view(node) and base is not None and len(self.graph.nodes[base].storages) == 1:
            return None
        size = sum(self.graph.storages[s].size_bytes for s in node.storages)
        weight = int(size * 1.1 ** max(min(self.far[i], MAX_DISTANCE), 1)) if self.distance else size
        written = all(fusible(node, self.graph.nodes[u]) for u in self.users[i])
        return weight * 2 if self.write_twice and written else weight

    def why_banned(self, i: int) -> str | None:
        nodes, node = self.graph.nodes, self.graph.nodes[i]
        if "intensive" in self.bans and is_compute_intensive(node):
            return "intensive"
        if "random" in self.bans and node.random:
            return "random"
        if "unknown" in self.bans and not is_recomputable(node):
            return "unknown"
        if "materialised" in self.bans and self._written_in_backward(i):
            return "materialised"
        if "reduction" in self.bans and node.makes:
            size = sum(self.graph.storages[s].size_bytes for s in node.storages)
            if size * 4 < sum(self.graph.storages[s].size_bytes for x in node.inputs for s in nodes[x].storages):
                return "reduction"
        return None

    def _written_in_backward(self, i: int) -> bool:
        stack, seen = [i], {i}
        while stack:
            x = stack.pop()
            for u in self.users[x]:
                if u in self.forward and is_view(self.graph.nodes[u]) and u not in seen:
                    seen.add(u)
                    stack.append(u)
                elif u not in self.forward and not fusible(self.graph.nodes[x], self.graph.nodes[u]):
                    return True
        return False

    def banned(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for i in sorted(self.forward):
            node = self.graph.nodes[i]
            why = None if node.phase == "input" or (is_view(node) and not node.random) else self.why_banned(i)
            if why:
                found[i] = why
        if "far" in self.bans:
            self._ban_far(found)
        if "chain" in self.bans:
            self._ban_chains(found)
        return found

    def _ban_far(self, found: dict[int, str]) -> None:
        """What a fusible user reads that comes after an unfusible call on what was read before: that user runs in forward only."""
        nodes = self.graph.nodes
        unfusible = [i for i in sorted(self.forward) if nodes[i].phase != "input" and not is_fusible(nodes[i])]
        for i in sorted(self.forward):
            if nodes[i].phase == "input":
                continue
            uses = sorted(u for u in self.users[i] if u in self.forward)
            close = [u for u in uses if fusible(nodes[i], nodes[u])]
            if not uses:
                continue
            barrier = next((x for x in unfusible if x > uses[0]), None)
            for u in close:
                if barrier is not None and u > barrier and not is_view(nodes[u]):
                    found.setdefault(u, "far")

    def _ban_chains(self, found: dict[int, str]) -> None:
        """Walks fusible chains that begin at what is read in backward; a node far from its chain's start, with no other chain open, is banned."""
        nodes = self.graph.nodes
        order = {i: k for k, i in enumerate(sorted(self.forward))}
        seen: set[int] = set()
        for start in sorted(self.forward):
            if nodes[start].phase == "input" or start in seen:
                continue
            frontier = sorted([start])
            while frontier:
                i = frontier.pop(0)
                if i in seen:
                    continue
                seen.add(i)
                if not frontier and order[i] - order[start] > MAX_CHAIN_POSITIONS and not is_view(nodes[i]):
                    found.setdefault(i, "chain")
                    break
                for u in self.users[i]:
                    if u in self.forward and fusible(nodes[i], nodes[u]) and u not in frontier and u not in found:
                        frontier = sorted([*frontier, u])

    def solve(self) -> SavedSet:
        nodes = self.graph.nodes
        banned = self.banned()
        costs = {i: self.cost(i) for i in range(len(nodes)) if i not in self.closure}
        endless = sum(c for c in costs.values() if c) + 1
        arcs: dict[tuple[int, int], int] = {}
        for i, c in costs.items():
            arcs[2 + 2 * i, 3 + 2 * i] = endless if c is None else c
            for u in self.users[i]:
                arcs[3 + 2 * i, 2 + 2 * u] = endless
            # fed by the source: it exists or must not run again, so the cut passes behind where it begins
            if i in banned or nodes[i].phase == "input":
                arcs[0, 2 + 2 * i] = endless
            if i in self.backward:
                arcs[3 + 2 * i, 1] = endless
        for i in self.closure:
            arcs[2 + 2 * i, 1] = endless
        checked_capacities([endless], what="bytes to save")
        tails, heads = (np.array([arc[k] for arc in arcs], np.int64) for k in (0, 1))
        network = FlowNetwork.of_arrays(2 + 2 * len(nodes), tails, heads, np.array([*arcs.values()], np.int64))
        value = network.max_flow(0, 1, limit=endless)
        if value >= endless:
            stuck = next((i for i in banned if costs[i] is None), next(iter(banned), 0))
            raise Infeasible(
                "must be saved, and cannot be", where=nodes[stuck].name, hint="allow it to run again", data={"ban": banned.get(stuck, "")}
            )
        side = network.source_side()
        # the cut goes through the nodes whose own arc it takes; arcs of uses are without limit and never in it
        saved = tuple(i for i in costs if side[2 + 2 * i] and not side[3 + 2 * i])
        out = {s for r in self.graph.results for s in nodes[r].storages}
        held = {s for i in saved for s in nodes[i].storages if self.graph.storages[s].kind == "made"} - out
        return SavedSet(nodes=saved, new_bytes=sum(self.graph.storages[s].size_bytes for s in held), value=value, banned=banned)


@dataclass(frozen=True, kw_only=True)
class MinCut(StepStrategy):
    """One cut, whatever the budget: with all bans about what torch's partitioner does, with `MIN_MEMORY` the least bytes with no product twice."""

    name: ClassVar[str] = "mincut"
    cite: ClassVar[Cite] = CITE
    budgeted: ClassVar[bool] = False

    bans: tuple[str, ...] = BANS
    distance: bool = True
    write_twice: bool = True
    by_storage: bool = True

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: UnknownName; Infeasible when its one plan needs more than the budget, or what must be saved cannot be."""
        found = saved_set(graph, bans=self.bans, distance=self.distance, write_twice=self.write_twice, by_storage=self.by_storage)
        lives = lifetimes_of(graph)
        held = lives.drop_all()
        held[sorted({s for i in found.nodes for s in graph.nodes[i].storages if lives.maker[s] >= 0})] = 0
        plan = lives.plan(
            held, strategy=self.name, options={"bans": list(self.bans), "new_bytes": found.new_bytes}, budget_bytes=budget_bytes,
        )  # fmt: skip
        assert plan is not None
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise Infeasible(
                f"the cut's plan needs {size_text(plan.peak_bytes)}, the budget is {size_text(budget_bytes)}", where=graph.name,
                hint="fewer bans, or a strategy that takes a budget", data={"least_bytes": plan.peak_bytes, "budget_bytes": budget_bytes},
            )  # fmt: skip
        return plan
