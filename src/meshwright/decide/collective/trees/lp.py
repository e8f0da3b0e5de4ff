"""The linear program behind joint packing: how much every arc carries for every demand, by cut generation.

A demand has members (nodes), a size, and what it does: `spread` (every member's share reaches all members), `collect` (the mirror image: sums
of everybody's contributions), or both (all-reduce, whose shares w[r] are free). In units of the demand's size, with sum w = 1:

    minimise T  such that  background + sum over demands of size · (spread + collect) <= rate · T         on every arc
    spread: for every node set A that misses a member:  spread leaving A + sum of w[r], r not in A  >= 1
    collect: the same on the reversed graph
    at every node that is no member (a switch, a relay):  what enters equals what leaves, separately for spread and for collect; without these
    rows at switches that copy (spread) or add (collect) the optimum is only a limit: whole trees need not reach it

Cut rows are added when a max-flow finds them violated. Where `mirrored` (every arc has a twin of equal rate and every demand is an all-reduce),
collect is the reverse of spread: averaging a solution with its mirror image shows that nothing is lost.
Answers are floats; `exact` makes rationals of them. The duals of the rate rows are the arcs' prices (`allreduce_prices`).
Source: derived from Edmonds' branching theorem and ForestColl's all-reduce program (arXiv 2402.06787), which has a flow per member instead.
Cost: a few rounds of one linear program and one flow per member and demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ....errors import Infeasible, TimeLimit
from ....kernels.effort import NEVER, Deadline
from ....kernels.highs import require_optimal, row_duals, solver, values
from ....kernels.maxflow import FlowNetwork

__all__ = ["Arc", "Demand", "Packing", "PackingProblem", "solve_packing"]

Arc = tuple[int, int]
FLOW_UNITS = 1 << 40  # units of one demand's size: floats become whole numbers of them for the max-flows
MAX_CUT_SHORTFALL = 1e-7  # share of a demand's size by which a cut may miss it: HiGHS meets its rows no better
# Prices of secondary aims, against the time: of equal times the least traffic, loads that are alike both ways, and shares that are alike
# (many roots make low trees). All are so far below the time's price of 1 that they only choose among optima.
HOP_PRICE = 1e-6
WAY_PRICE = 1e-5
SHARE_PRICE = 1e-4
MAX_ROUNDS = 400  # of cut generation, then it is given up; 2 to 5 are usual


@dataclass(frozen=True)
class Demand:
    """`weight[i]` is the share of members[i] (sum 1); None: free, only for all-reduce. `size` in any unit common to all demands."""

    members: tuple[int, ...]
    size: Fraction = Fraction(1)
    spread: bool = True
    collect: bool = False
    weight: tuple[Fraction, ...] | None = None
    nodes: frozenset[int] | None = None  # nodes it may pass through besides its members; None = all
    copying: frozenset[int] = frozenset()  # nodes that may send more than they receive when spreading (multicast)
    adding: frozenset[int] = frozenset()  # nodes that may receive more than they send when collecting (aggregation)


@dataclass(frozen=True)
class PackingProblem:
    nodes: int
    rate: dict[Arc, int]
    demands: tuple[Demand, ...]
    mirrored: bool = False
    background: dict[Arc, Fraction] = field(default_factory=dict)  # loads that are there anyway, in sizes

    def arcs_of(self, demand: Demand) -> list[Arc]:
        """Arcs that a demand may use."""
        if demand.nodes is None:
            return list(self.rate)
        here = demand.nodes | set(demand.members)
        return [(u, v) for u, v in self.rate if u in here and v in here]


@dataclass(frozen=True)
class Packing:
    """`time` in size / rate units; per demand: `weight` by member, loads of `spread` and `collect` by arc (in sizes); `price` by arc."""

    time: float
    weight: tuple[tuple[float, ...], ...]
    spread: tuple[dict[Arc, float], ...]
    collect: tuple[dict[Arc, float], ...]
    price: dict[Arc, float]
    rounds: int
    rows: int


@dataclass
class _Flow:
    """One direction of one demand: columns of its arcs, in the orientation in which data spreads from members to members."""

    members: tuple[int, ...]
    weight: tuple[float, ...] | None
    first_weight: int  # column of the first share, if they are free
    column: dict[Arc, int]
    unbalanced: frozenset[int]
    order: list[int] = field(default_factory=list)

    def network(self, nodes: int) -> FlowNetwork:
        return FlowNetwork.of(nodes + 1, dict.fromkeys(self.column, 0) | {(nodes, r): 0 for r in self.members})


def solve_packing(problem: PackingProblem, *, what: str, deadline: Deadline = NEVER, even: bool = True) -> Packing:
    """Solve the linear program. `even`: among the optima prefer alike shares and loads, which make low trees but larger denominators.

    Raises: Infeasible when some member cannot be reached (callers test connectivity first), TimeLimit, Unsupported (the solver gave up).
    """
    return _Program(problem, what, deadline, even).run()


class _Program:
    def __init__(self, problem: PackingProblem, what: str, deadline: Deadline, even: bool) -> None:
        import highspy

        self.problem, self.what, self.deadline, self.even = problem, what, deadline, even
        self.inf = highspy.kHighsInf
        self.top = max(problem.rate.values())
        self.biggest = max(d.size for d in problem.demands)
        self.columns = 3  # T, the largest free share, the largest load one way over rate
        self.first_weight: list[int] = []
        self.spread: list[dict[Arc, int]] = []
        self.collect: list[dict[Arc, int]] = []
        self.flows: list[_Flow] = []
        for demand in problem.demands:
            self._number(demand)
        self.lp = solver(random_seed=0)
        self._add_columns()
        self.capacity_arcs = self._add_capacities()
        self._add_shares()
        self.balances = sum(self._add_balances(flow) for flow in self.flows)
        self.seen: set[tuple[int, tuple[bool, ...]]] = set()
        for number, flow in enumerate(self.flows):
            for v in flow.members:
                self._add_cut(number, tuple(u != v for u in range(problem.nodes)))

    # ---- columns: T, then per demand shares and arcs ---------------------------------------------------------------
    def _number(self, demand: Demand) -> None:
        first = self.columns
        if demand.weight is None:
            self.columns += len(demand.members)
        self.first_weight.append(first if demand.weight is None else -1)
        arcs = self.problem.arcs_of(demand)
        fixed = None if demand.weight is None else tuple(float(w) for w in demand.weight)
        for wanted, kept, reverse in ((demand.spread, self.spread, False), (demand.collect and not self.problem.mirrored, self.collect, True)):
            kept.append({})
            if wanted:
                kept[-1].update({arc: self.columns + i for i, arc in enumerate(arcs)})
                self.columns += len(arcs)
                turned = {(v, u) if reverse else (u, v): c for (u, v), c in kept[-1].items()}
                self.flows.append(_Flow(demand.members, fixed, first, turned, demand.adding if reverse else demand.copying, list(demand.members)))

    def _add_columns(self) -> None:
        n = self.columns
        self.lp.addVars(n, np.zeros(n), np.full(n, self.inf))
        cost = np.zeros(n)
        cost[0] = 1.0
        if self.even:
            cost[1], cost[2] = SHARE_PRICE, WAY_PRICE
        total_rate = sum(self.problem.rate.values()) / self.top
        for demand, *maps in zip(self.problem.demands, self.spread, self.collect, strict=True):
            for column in (c for one in maps for c in one.values()):
                cost[column] = HOP_PRICE * float(demand.size / self.biggest) / total_rate
        self.lp.changeColsCost(n, np.arange(n, dtype=np.int32), cost)

    # ---- rows ------------------------------------------------------------------------------------------------------
    def _row(self, low: float, high: float, terms: dict[int, float]) -> None:
        self.lp.addRow(low, high, len(terms), np.fromiter(terms, np.int32), np.fromiter(terms.values(), np.float64))

    def _add_capacities(self) -> list[Arc]:
        """Rows `traffic <= rate · T`, the first rows of the program."""
        for (u, v), rate in self.problem.rate.items():
            terms = {0: -rate / self.top}
            for demand, spread, collect in zip(self.problem.demands, self.spread, self.collect, strict=True):
                share = float(demand.size / self.biggest)
                used = [spread.get((u, v)), collect.get((u, v))]
                # Collecting is spreading turned round, so an arc also carries what spreads over its twin.
                if self.problem.mirrored and demand.collect:
                    used.append(spread.get((v, u)))
                for column in used:
                    if column is not None:
                        terms[column] = terms.get(column, 0.0) + share
            self._row(-self.inf, -float(self.problem.background.get((u, v), 0) / self.biggest), terms)
        for spread, collect in zip(self.spread, self.collect, strict=True) if self.even else ():
            for (u, v), c in (*spread.items(), *collect.items()):
                self._row(-self.inf, 0.0, {c: 1.0, 2: -self.problem.rate[u, v] / self.top})
        return list(self.problem.rate)

    def _add_shares(self) -> None:
        for demand, first in zip(self.problem.demands, self.first_weight, strict=True):
            if first >= 0:
                self._row(1.0, 1.0, {first + i: 1.0 for i in range(len(demand.members))})
                for i in range(len(demand.members)) if self.even else ():
                    self._row(-self.inf, 0.0, {first + i: 1.0, 1: -1.0})

    def _add_balances(self, flow: _Flow) -> int:
        inside = set(flow.members) | flow.unbalanced
        rows: dict[int, dict[int, float]] = {}
        for (u, v), column in flow.column.items():
            for node, sign in ((u, -1.0), (v, 1.0)):
                if node not in inside:
                    rows.setdefault(node, {})[column] = sign
        for node in sorted(rows):
            self._row(0.0, 0.0, rows[node])
        return len(rows)

    def _add_cut(self, number: int, inside: tuple[bool, ...]) -> bool:
        """The row of one node set; False if it is there already."""
        if (number, inside) in self.seen:
            return False
        self.seen.add((number, inside))
        flow = self.flows[number]
        # Each share that starts inside must leave at least once. Shares sum to one, so: leaving + shares of roots outside >= 1.
        terms = {c: 1.0 for (u, v), c in flow.column.items() if inside[u] and not inside[v]}
        need = 1.0
        for i, r in enumerate(flow.members):
            if not inside[r]:
                if flow.weight is None:
                    terms[flow.first_weight + i] = 1.0
                else:
                    need -= flow.weight[i]
        if not terms:
            raise Infeasible(f"{self.what}: no link leaves a set of nodes that must send", hint="name a connected part of the devices")
        self._row(need, self.inf, terms)
        return True

    # ---- rounds ----------------------------------------------------------------------------------------------------
    def run(self) -> Packing:
        networks = [flow.network(self.problem.nodes) for flow in self.flows]
        rounds = 0
        while True:
            rounds += 1
            require_optimal(self.lp, what=self.what, deadline=self.deadline)
            x = values(self.lp)
            added = sum(self._separate(number, network, x) for number, network in enumerate(networks))
            if not added:
                return self._packing(x, rounds)
            if rounds >= MAX_ROUNDS:
                raise TimeLimit(f"{self.what}: the cut search did not end after {rounds} rounds", hint="use --strategy forestcoll")

    def _separate(self, number: int, network: FlowNetwork, x: Sequence[float]) -> int:
        """Add the violated cuts of one flow, at most one per member."""
        flow, source = self.flows[number], self.problem.nodes
        arcs = list(flow.column)
        amount = [max(0, round(x[c] * FLOW_UNITS)) for c in flow.column.values()]
        shares = flow.weight or x[flow.first_weight : flow.first_weight + len(flow.members)]
        network.capacity[:] = 0
        network.capacity[network.slots([u for u, _ in arcs], [v for _, v in arcs])] = amount
        network.capacity[network.slots([source] * len(flow.members), flow.members)] = [max(0, round(w * FLOW_UNITS)) for w in shares]
        # Cuts are exact statements whatever proposed them, so rounding can only cost a round, never a wrong row.
        need = FLOW_UNITS - int(MAX_CUT_SHORTFALL * FLOW_UNITS)
        added = 0
        for v in flow.order:
            if network.max_flow(source, v, limit=need) < need:
                side = network.source_side()
                added += self._add_cut(number, tuple(bool(s) for s in side[:source]))
        return added

    def _packing(self, x: Sequence[float], rounds: int) -> Packing:
        duals = row_duals(self.lp)
        weight, spread, collect = [], [], []
        for number, demand in enumerate(self.problem.demands):
            first = self.first_weight[number]
            fixed = demand.weight
            weight.append(tuple(float(w) for w in fixed) if fixed is not None else tuple(x[first : first + len(demand.members)]))
            spread.append({arc: x[c] for arc, c in self.spread[number].items()})
            mirror = {(v, u): x[c] for (u, v), c in self.spread[number].items()} if demand.collect and self.problem.mirrored else {}
            collect.append(mirror or {arc: x[c] for arc, c in self.collect[number].items()})
        price = {arc: max(0.0, -duals[i]) for i, arc in enumerate(self.capacity_arcs)}
        time = x[0] * float(self.biggest) / self.top
        return Packing(time, tuple(weight), tuple(spread), tuple(collect), price, rounds, self.lp.getNumRow())

