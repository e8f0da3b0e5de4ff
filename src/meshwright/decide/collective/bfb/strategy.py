"""BFB: breadth-first broadcasts. Every shard takes all its shortest ways, divided so that no port works longer than it must.

Cite: L. Zhao, S. Pal, T. Chugh, W. Wang, J. Fantl, P. Basu, J. Khoury, A. Krishnamurthy, "Efficient Direct-Connect Topologies for Collective
Communications" (NSDI 2025, arXiv 2202.03356), section 5.
Left open by the paper: how many pieces a shard is cut into. Our answer: the fewest, up to an option, with which whole pieces lose least.
Deviations: exact rational numbers by cuts, no linear programs; links of unlike rates; no barrier between steps: a piece is passed on as soon as
it is there; ranks with switches between them have a way of the narrowest link (shared links are then not in the division).
Invariant: before step t a rank has every shard from up to t - 1 hops away; it gets each shard from t hops away once.
Cost: as many steps as the diameter; on direct links of equal rate the step's time is its busiest port's; O(ranks · diameter) maximum flows of a
rank's ports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Self

import numpy as np

from ....bound import Bound
from ....cite import Cite
from ....errors import Disconnected, Unsupported, UsageError
from ....fabric.fabric import Fabric
from ..bounds.collective import collective_bound
from ..classic.rounds import Area, Move, plan_rounds, reverse
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, require_operation
from .loads import Division, Ports, breadth_first, distances, divide

__all__ = ["BFB", "CITE", "DEVIATIONS", "Steps", "ways"]

CITE = Cite(
    key="zhao2025directconnect", title="Efficient Direct-Connect Topologies for Collective Communications",
    authors="L. Zhao, S. Pal, T. Chugh, W. Wang, J. Fantl, P. Basu, J. Khoury, A. Krishnamurthy", year=2025, venue="NSDI",
    url="https://arxiv.org/abs/2202.03356",
)  # fmt: skip
DEVIATIONS = ("exact divisions by cuts", "unlike rates", "no barrier between steps", "ways through switches count as links")
# Receives of a way that are posted before their messages are due. A receiver's answer that there is a place lies behind all data that goes the other
# way over the same connection: with two, the third message of a way came a whole step late (K(4,4), 4 MiB: 490 ms, 395 with all posted at once).
AHEAD = 8
WORTH_SAYING = 1.01  # times the bound: from there on a plan says why it must stay above
MAX_PIECES = 12  # that are tried: 12 divides into halves, thirds and quarters, which is what ports of up to four links ask for


MAX_RANKS_OF_AUTO = 128  # every shard reaches every rank by a message of its own: 32,512 steps, a second to plan
MAX_RANKS = 512  # 523,264 steps and more, half a minute


@dataclass(frozen=True)
class Steps:
    """An all-gather: per step and rank the classes of shards that arrive, and how long each step takes with pieces as small as one likes."""

    senders: list[Ports]
    arrivals: list[list[dict[int, list[int]]]]  # [rank][step]
    times: list[list[Fraction]]  # [rank][step], a shard over a way of rate 1 takes 1
    tight: list[dict[str, Any]]  # per step the busiest rank's certificate

    @staticmethod
    def of(senders: list[Ports], names: tuple[str, ...]) -> Steps:
        hops = distances(senders)
        if hops.min() < 0:
            v, u = (int(x) for x in np.argwhere(hops < 0)[0])
            raise Unsupported(
                f"{names[v]} does not reach {names[u]} over ranks and switches alone", data={"from": names[v], "to": names[u]},
                hint="name the devices between them too, or use --strategy forestcoll",
            )  # fmt: skip
        arrivals = [breadth_first(senders, hops, u) for u in range(len(senders))]
        division = _divisions(senders)
        found = [[division(u, {mask: len(shards) for mask, shards in classes.items()}) for classes in steps] for u, steps in enumerate(arrivals)]
        tight = []
        for t in range(max(map(len, found))):
            u = max((u for u in range(len(found)) if t < len(found[u])), key=lambda u: (found[u][t].time, -u))
            ports = sorted(senders[u])
            tight.append({"rank": names[u], "ports": [names[ports[k]] for k in found[u][t].ports], "shards": found[u][t].shards})
        return Steps(senders, arrivals, [[d.time for d in row] for row in found], tight)

    def time(self, pieces: int = 0) -> Fraction:
        """Of all steps, each as long as its busiest rank; with so many whole pieces to a shard (equal rates at every rank; else a lower bound)."""
        total = Fraction(0)
        for t in range(len(self.tight)):
            total += max(self._whole(u, row[t], pieces) for u, row in enumerate(self.times) if t < len(row))
        return total

    def _whole(self, u: int, time: Fraction, pieces: int) -> Fraction:
        rates = set(self.senders[u].values())
        rate = min(rates)
        return Fraction(ceil(time * rate * pieces), pieces * rate) if pieces and len(rates) == 1 else time

    def least(self) -> tuple[int, Division]:
        """The rank whose ports have the most to bring in all steps together: along shortest ways nothing is done sooner, with barriers or without."""
        division, whole = _divisions(self.senders), []
        for u, steps in enumerate(self.arrivals):
            counts = Counter[int]()
            for classes in steps:
                counts.update({mask: len(shards) for mask, shards in classes.items()})
            whole.append(division(u, counts))
        return max(enumerate(whole), key=lambda at: (at[1].time, -at[0]))

    def rounds(self, pieces: int) -> list[list[Move]]:
        """The messages: each way has a stream of its own, so that ports work at once."""
        way = {(w, u): k for k, (u, w) in enumerate((u, w) for u, ports in enumerate(self.senders) for w in sorted(ports))}
        out: list[list[Move]] = [[] for _ in self.tight]
        for u, steps in enumerate(self.arrivals):
            for t, classes in enumerate(steps):
                found = divide({mask: len(shards) for mask, shards in classes.items()}, self.senders[u], pieces)
                blocks: dict[int, list[int]] = {}
                for mask, shards in classes.items():
                    row = [v * pieces + i for v in shards for i in range(pieces)]
                    for w in sorted(self.senders[u]):
                        count = found.sent.get((mask, w), 0)
                        blocks.setdefault(w, []).extend(row[:count])
                        row = row[count:]
                out[t] += [Move(w, u, tuple(sorted(some)), stream=way[w, u]) for w, some in blocks.items() if some]
        return out


@dataclass(frozen=True, kw_only=True)
class BFB(CollectiveStrategy):
    """Options.

    pieces: of a shard, so that it can take several ways at once; None = the fewest up to `MAX_PIECES` that lose least.
    pack: pieces of a message that do not lie together are packed into a staging buffer; False = one message per run of pieces.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "bfb"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = ("all-gather", "reduce-scatter", "all-reduce")

    pieces: int | None = None
    pack: bool = False
    unroll: bool = True

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        """On direct connections; among switches it is the direct exchange."""
        if problem.fabric.switches or len(problem.ranks) > MAX_RANKS_OF_AUTO or use not in ("alone", "inlined"):
            return ()
        return (cls(), cls(pack=True)) if use == "alone" else (cls(),)

    @property
    def label(self) -> str:
        return "bfb packed" if self.pack else "bfb"

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (other operations, uneven shards, ranks that reach each other only over other devices), UsageError."""
        bound = collective_bound(problem)
        require_operation(problem, self.name, self.operations)
        if self.pieces is not None and not 1 <= self.pieces <= 1024:
            raise UsageError(f"pieces must be 1..1024, got {self.pieces}", where="bfb")
        if len(problem.ranks) > MAX_RANKS:
            raise Unsupported(f"bfb writes a message for every pair of ranks, of at most {MAX_RANKS}", hint="use --strategy forestcoll or ring")
        senders = ways(problem.fabric, problem.ranks)
        receivers: list[Ports] = [{u: ports[v] for u, ports in enumerate(senders) if v in ports} for v in range(len(senders))]
        gather, scatter = problem.op != "reduce-scatter", problem.op != "all-gather"
        # A reduce-scatter is an all-gather on the reversed ways, played backwards.
        parts = [Steps.of(way, problem.ranks) for way, asked in ((receivers, scatter), (senders, gather)) if asked]
        pieces = self.pieces or _pieces(parts)
        rounds = reverse(parts[0].rounds(pieces)) if scatter else []
        rounds += parts[-1].rounds(pieces) if gather else []
        n = len(problem.ranks)
        areas = {"data": Area("output" if problem.op == "all-gather" else "input", n * pieces)}
        rate = max(sum(ports.values()) for ports in senders)
        notes = {
            "steps": sum(len(part.tight) for part in parts), "pieces": pieces, "ports_tight": [part.tight for part in parts],
            # of the message at the rate of all ports together: the paper's T_B, with these pieces and with the smallest
            "bandwidth_factor": float(sum(part.time(pieces) for part in parts) * rate / n),
            "bandwidth_factor_least": str(sum(part.time() for part in parts) * rate / n),
        }  # fmt: skip
        if problem.op != "all-reduce":
            notes |= _gap(problem, parts[0], bound)
        chosen = replace(self, pieces=pieces)
        return plan_rounds(problem, chosen, rounds, areas, order=tuple(range(n)), pack=self.pack, name=self.name, bound=bound, notes=notes,
            ahead=AHEAD,
        )  # fmt: skip


def _divisions(senders: list[Ports]) -> Callable[[int, Mapping[int, int]], Division]:
    """`divide` for ranks and their counts of shards by class; ranks alike are divided alike."""
    known: dict[Any, Division] = {}

    def division(u: int, counts: Mapping[int, int]) -> Division:
        rates = tuple(rate for _, rate in sorted(senders[u].items()))
        key = rates, tuple(sorted(counts.items()))
        if key not in known:
            known[key] = divide(counts, dict(enumerate(rates)))
        return known[key]

    return division


def _gap(problem: CollectiveProblem, part: Steps, bound: Bound) -> dict[str, Any]:
    """Why a plan along shortest ways stays above the bound, where it must: ports of one rank that alone can carry so many shards."""
    u, found = part.least()
    least_s = float(found.time * problem.size_bytes / len(problem.ranks))
    if least_s <= WORTH_SAYING * float(bound):
        return {}
    ports = [problem.ranks[w] for k, w in enumerate(sorted(part.senders[u])) if k in found.ports]
    return {"shortest_ways": {"least_s": least_s, "rank": problem.ranks[u], "shards": found.shards, "ports": ports}}


def _pieces(parts: list[Steps]) -> int:
    return min(range(1, MAX_PIECES + 1), key=lambda pieces: (sum(part.time(pieces) for part in parts), pieces))


def ways(fabric: Fabric, ranks: tuple[str, ...]) -> list[Ports]:
    """[rank] -> who has a way straight to it, over links and switches but no device, and the rate of its narrowest link."""
    number = {fabric.actor_of[name]: i for i, name in enumerate(ranks)}
    devices = len(fabric.devices)
    through = any(fabric.switches)
    found: list[dict[int, int]] = [{} for _ in ranks]
    for a, i in number.items():
        if through:
            goals = [b for b in number if b != a]
        else:
            goals = [fabric.link_ends[x][1] for x in fabric.out_links[a] if fabric.link_ends[x][1] in number]
        for b in goals:
            try:
                path = fabric.route(a, b)
            except Disconnected:
                continue
            if all(fabric.link_ends[x][1] >= devices for x in path[:-1]):
                found[number[b]][i] = min(fabric.links[x].rate_Bps for x in path)
    return list(found)
