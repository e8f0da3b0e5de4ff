"""Planning again when a part of the fabric is down or slow, and what that costs against the whole fabric.

A NIC or link that is lost makes one server unlike the others, and schedules for unlike servers are dear to find. But where that server's
links are the bottleneck, the others gain nothing from what they have more: the fabric in which every server lacks the same part
(`levelled`) has the same bound, its servers are alike, and its schedule runs on the fabric as it is, optimally. That is tried first and
kept only where both bounds are equal; the plan is simulated and checked on the fabric as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from ...bound import Bound
from ...cite import Cite
from ...decide.collective import CollectivePlan, CollectiveProblem, CollectiveStrategy, ForestColl, collective_bound
from ...decide.collective.bounds.bandwidth import bandwidth_bound
from ...decide.collective.forestcoll.forest import build_forest
from ...decide.collective.problem import Ranked
from ...decide.collective.program_time import simulated_time_s
from ...decide.collective.rates import rate_graph
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.edit import edited, find_part
from ...fabric.fabric import Fabric
from ...plan.plan import Plan
from .job import plan_collective

__all__ = ["AlikeForestColl", "Replan", "levelled", "reduced_problem", "replan"]

# Ranks up to which unlike servers are planned for beside alike ones: every step of such plans is simulated, which grows quickly.
MAX_BESIDE_RANKS = 32
# Ranks up to which unlike servers get as many trees as the optimum needs; beyond, one tree per root leaves steps for more pieces.
MAX_UNLIKE_RANKS = 256
# Pieces that fill the pipelines of a large cluster, where ForestColl by itself stops earlier.
FILLING_PIECES = 16
SPREAD = ("all-gather", "reduce-scatter", "all-reduce")  # every rank is a root
# Pieces of plans for alike servers: on a fabric that is not alike every step is simulated, and 64 come within 2 % of the bound.
MAX_PIECES = 64


@dataclass(frozen=True, kw_only=True)
class Replan:
    """The plan for what is left, its ranking, and the bounds of the whole fabric and of what is left."""

    whole: CollectiveProblem
    now: CollectiveProblem
    whole_bound: Bound
    now_bound: Bound
    plan: Plan
    ranked: list[Ranked]

    @property
    def lost(self) -> Fraction:
        """Share of the whole fabric's throughput (by the bounds: bytes per second at best) that is gone; negative if none is."""
        before = self.whole.size_bytes / self.whole_bound.exact
        return 1 - self.now.size_bytes / self.now_bound.exact / before


def levelled(fabric: Fabric, down: Sequence[str], slow: Mapping[str, Fraction]) -> Fabric | None:
    """The fabric in which every server has lost what one has; None where a part is no NIC or link of one server, or servers are named apart."""
    try:
        everywhere_down = {twin: None for name in down for twin in _twins(fabric, name)}
        everywhere_slow = {twin: factor for name, factor in slow.items() for twin in _twins(fabric, name)}
        return edited(fabric, list(everywhere_down), everywhere_slow)
    except (UsageError, Infeasible):
        return None


def _twins(fabric: Fabric, name: str) -> list[str]:
    """The part and its namesakes in all servers: `box3/nic2` -> `box0/nic2`, `box1/nic2`, ..."""
    part = find_part(fabric, name)
    if any(fabric.actor_of[a] < len(fabric.devices) for a in part.actors):
        raise UsageError("is a device; only NICs and links can be taken out of all servers", where=name)
    groups = [g for g in fabric.groups if g and (name.startswith(f"{g}/") or f"->{g}/" in name)]
    if len(groups) != 1:
        raise UsageError("does not belong to one server", where=name)
    twins = [name.replace(f"{groups[0]}/", f"{g}/") for g in fabric.groups]
    for twin in twins:
        find_part(fabric, twin)
    return twins


def reduced_problem(problem: CollectiveProblem, fabric: Fabric) -> CollectiveProblem:
    """The same collective among those ranks that are left. Raises: UsageError where the root, a peer or a shard's owner is gone, or one is left."""
    left = {d.name for d in fabric.devices}
    ranks = tuple(r for r in problem.ranks if r in left)
    if len(ranks) == len(problem.ranks):
        return replace(problem, fabric=fabric)
    gone = next(r for r in problem.ranks if r not in left)
    if len(ranks) < 2:
        raise UsageError(f"{len(ranks)} device is left of {len(problem.ranks)}", hint="a collective needs two; name fewer parts")
    if problem.peers or problem.shard_bytes is not None:
        what = "peers" if problem.peers else "shards"
        raise UsageError(f"{gone} is taken out, and the {what} name it", hint=f"give {what} for the devices that are left")
    if problem.op in ("broadcast", "reduce", "scatter", "gather"):
        if problem.ranks[problem.root] not in left:
            raise UsageError(f"the root {problem.ranks[problem.root]} is taken out", hint="choose another with --root")
        return replace(problem, fabric=fabric, ranks=ranks, root=ranks.index(problem.ranks[problem.root]))
    return replace(problem, fabric=fabric, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class AlikeForestColl(CollectiveStrategy):
    """A candidate: ForestColl on the levelled fabric, where that loses nothing. `down`, `slow`: the parts that one server lost."""

    name: ClassVar[str] = ForestColl.name
    cite: ClassVar[Cite] = ForestColl.cite

    down: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()  # (part, fraction)
    whole: Fabric | None = None
    pieces: int | None = None

    @property
    def label(self) -> str:
        return f"{self.name} on alike servers"

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Unsupported where servers cannot be levelled or levelling would cost throughput; what ForestColl raises."""
        level = None if self.whole is None else levelled(self.whole, self.down, {name: Fraction(x) for name, x in self.slow})
        if level is None:
            raise Unsupported("not all servers can be made alike", hint="only a NIC or a link of one server can be taken out of all")
        as_level = replace(problem, fabric=level)
        op = "all-gather" if problem.op == "all-reduce" else problem.op  # ForestColl's all-reduce is as fast as its two halves
        now = collective_bound(problem)
        with_all, with_fewer = (bandwidth_bound(replace(p, op=op)) for p in (problem, as_level))
        if with_fewer.exact > with_all.exact:
            lost = 100 * float(1 - with_all.exact / with_fewer.exact)
            raise Unsupported(f"making all servers alike would cost {lost:.3g} % of throughput", hint="plan for the fabric as it is")
        found = self._fastest(as_level, rng)
        return replace(found, bound=now, notes={**found.notes, "planned_on": level.name})

    def _fastest(self, problem: CollectiveProblem, rng: np.random.Generator) -> CollectivePlan:
        """ForestColl's own choice, or all the trees of the optimum, in its pieces or FILLING_PIECES of them: alike servers are quick to simulate."""
        trees = build_forest(rate_graph(problem.fabric, problem.ranks), [1] * len(problem.ranks)).k
        own = ForestColl(pieces=self.pieces, max_pieces=MAX_PIECES)
        tries = [own]
        if problem.op in SPREAD and self.pieces is None:
            tries += [replace(own, trees=trees), replace(own, trees=trees, pieces=FILLING_PIECES)]
        plans = [x.plan(problem, rng=rng) for x in tries]
        return min(plans, key=lambda plan: simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport))


@dataclass(frozen=True, kw_only=True)
class OneTreeForestColl(ForestColl):
    """ForestColl with one tree per root: a little below the optimum, with few steps, so that many pieces fit."""

    trees: int | None = 1

    @property
    def label(self) -> str:
        return f"{self.name} with one tree per root"


def replan(problem: CollectiveProblem, down: Sequence[str], slow: Mapping[str, Fraction], *, candidates: Sequence[CollectiveStrategy] = ()) -> Replan:
    """Plans `problem` for its fabric without the parts `down` and with the parts `slow` at a fraction of their rate.

    Candidates default to the levelled fabric's ForestColl; where that does not apply, ForestColl with trees at the optimum and with one tree per
    root (above MAX_UNLIKE_RANKS ranks the latter alone): fewer trees leave steps for more pieces, which a large fabric gains more from.
    Raises: Disconnected naming the cut where what is left does not hang together; as `edited`, `reduced_problem`, `plan_collective`.
    """
    if not down and not slow:
        raise UsageError("--without or --degrade is missing: no part is down or slow", hint="name parts with --without or --degrade")
    fabric = edited(problem.fabric, down, slow)
    now = reduced_problem(problem, fabric)
    whole_bound, now_bound = collective_bound(problem), collective_bound(now)
    plan, ranked = _plan(problem, now, down, slow, candidates)
    return Replan(whole=problem, now=now, whole_bound=whole_bound, now_bound=now_bound, plan=plan, ranked=ranked)


def _plan(
    problem: CollectiveProblem, now: CollectiveProblem, down: Sequence[str], slow: Mapping[str, Fraction], given: Sequence[CollectiveStrategy]
) -> tuple[Plan, list[Ranked]]:
    if given:
        return plan_collective(now, candidates=given)
    alike = AlikeForestColl(down=tuple(down), slow=tuple((name, str(x)) for name, x in slow.items()), whole=problem.fabric)
    ranks = len(now.ranks)
    try:
        return plan_collective(now, candidates=[alike] if ranks > MAX_BESIDE_RANKS else [alike, ForestColl()])
    except Unsupported:
        one_tree = OneTreeForestColl()
        return plan_collective(now, candidates=[ForestColl(), one_tree] if ranks <= MAX_UNLIKE_RANKS else [one_tree])
