"""Direct exchange: every rank sends to every other what that one needs, all messages at once.

Cite: R. Thakur, W. Gropp, "Improving the Performance of Collective Operations in MPICH" (EuroPVM/MPI 2003), for the pairwise and spread
exchanges; one-shot and two-shot all-reduce are known as such from MSCCL++ (A. Shah and others, arXiv 2504.09014).
Left open by the paper: in which order a rank serves its peers. Our answer: rank i starts with i + 1, so that no rank is everybody's first.
Deviations: the one-shot all-reduce adds in rank order everywhere, so that all ranks hold the same bits (it receives into n - 1 scratch buffers).
Invariant: every block travels once, from where it is to where it is wanted.
Cost: n - 1 messages per rank in one round (two for the two-shot all-reduce); (n - 1) / n of the message, n - 1 whole messages for one-shot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ....program.fold import expand
from ....program.program import MAX_EXECUTED_STEPS, Program
from ..bounds.collective import collective_bound
from ..problem import OPERATIONS, CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, options_of
from .contract import refuse
from .direct_folded import alike_servers, folded_all_to_all, passes_on
from .rounds import Area, Move, Order, plan_rounds, resolve_order, reverse

__all__ = ["CITE", "DEVIATIONS", "Direct"]

CITE = Cite(
    key="thakur2003improving",
    title="Improving the Performance of Collective Operations in MPICH",
    authors="R. Thakur, W. Gropp",
    year=2003,
    venue="EuroPVM/MPI",
    doi="10.1007/978-3-540-39924-7_38",
)
MAX_UNFOLDED_PAIRS = 20_000  # of ranks: beyond, an all-to-all is folded where it can be; folded programs are not executed by the backend
DEVIATIONS = ("rank i serves i + 1 first", "one-shot sums are added in rank order at every rank")
Layout = tuple[list[list[Move]], dict[str, Area]]


def _peers(n: int, i: int) -> list[int]:
    return [(i + k) % n for k in range(1, n)]


def gather_round(n: int) -> list[Move]:
    """All-gather in one round."""
    return [Move(i, j, (i,), stream=(j - i) % n) for i in range(n) for j in _peers(n, i)]


def _one_shot(n: int) -> Layout:
    """Everyone sends everything to everyone; sums are made in rank order: own data moves out of the way first, unless it is the first."""
    send = [Move(i, j, (0,), (i,), target="work", stream=(j - i) % n) for i in range(n) for j in _peers(n, i)]
    aside = [Move(i, i, (0,), (i,), target="work") for i in range(1, n)]
    start = [Move(i, i, (0,), source="work") for i in range(1, n)]
    sums = [[Move(i, i, (k,), (0,), add=True, source="work") for i in range(n)] for k in range(1, n)]
    return [send, aside, start, *sums], {"data": Area("input", 1), "work": Area("scratch", n)}


def _layout(problem: CollectiveProblem, shots: int, ranks: list[int]) -> Layout:
    """`ranks[position]`: the rank there; the root of rooted operations is at position 0."""
    n, op = len(problem.ranks), problem.op
    others = range(1, n)
    blocks = {"data": Area("output" if op in ("all-gather", "broadcast", "gather") else "input", n, by_rank=True)}
    apart = {"input": Area("input", n, True), "output": Area("output", n, True)}
    if op == "all-gather":
        return [gather_round(n)], blocks
    if op == "reduce-scatter":
        return reverse([gather_round(n)]), blocks
    if op == "all-reduce":
        return _one_shot(n) if shots == 1 else ([*reverse([gather_round(n)]), gather_round(n)], {"data": Area("input", n)})
    if op == "all-to-all":
        own = [Move(i, i, (i,), source="input", target="output") for i in range(n)]
        sent = [Move(i, j, (j,), (i,), source="input", target="output", stream=(j - i) % n) for i in range(n) for j in _peers(n, i)]
        return [[*own, *sent]], apart
    if op == "scatter":
        return [[Move(0, i, (i,), stream=i) for i in others]], blocks
    if op == "gather":
        return [[Move(i, 0, (i,), stream=i) for i in others]], blocks
    if op == "broadcast":
        return [[Move(0, i, (0,), stream=i) for i in others]], {"data": Area("output", 1)}
    if op == "reduce":
        return [[Move(i, 0, (0,), add=True) for i in others]], {"data": Area("input", 1)}
    position = {rank: at for at, rank in enumerate(ranks)}
    moves = [Move(position[s], position[d], (0,), source="input", target="output") for d, s in enumerate(problem.peers) if s >= 0]
    return [[replace(m, stream=0 if m.src == m.dst else k) for k, m in enumerate(moves)]], {"input": Area("input", 1), "output": Area("output", 1)}


@dataclass(frozen=True, kw_only=True)
class Direct(CollectiveStrategy):
    """Options.

    shots: of the all-reduce: 1 = everything to everyone, 2 = reduce-scatter and all-gather; None = 1 where n - 1 messages take less
        time than the latency of one more round.
    order: `rank`, `servers` (ranks of a server together), or position -> rank: rank i starts with its successor.
    fold: store one server's steps for all, in an all-to-all of alike servers and some that differ; None = if the program gets large otherwise.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "direct"
    cite: ClassVar[Cite] = CITE
    folds: ClassVar[tuple[str, ...]] = ("all-to-all",)

    shots: int | None = None
    order: Order = "rank"
    fold: bool | None = None
    unroll: bool = True

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        return (cls(unroll=True, fold=False),) if use == "inlined" else super().variants(problem, use)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Every operation. Raises: Disconnected, Unsupported (pairs without a path), UsageError (options)."""
        bound = collective_bound(problem)
        if self.shots not in (None, 1, 2):
            raise UsageError(f"shots must be 1 or 2, got {self.shots}", where="direct")
        if problem.op not in OPERATIONS:
            raise refuse(problem, "direct exchange", OPERATIONS)
        n = len(problem.ranks)
        if (folded := self._folded(problem)) is not None:
            # Written out again, where some pass on for others: options that leave it open come to the same.
            options = options_of(replace(self, shots=1, order="rank", fold=True if folded.fold is not None else None))
            notes = {"ranks": n, "height": 1}
            return CollectivePlan(program=folded, bound=bound, strategy=self.name, options=options, notes=notes)
        if problem.op in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all") and 2 * n * (n - 1) > MAX_EXECUTED_STEPS:
            text = f"{n * (n - 1)} messages of {n} ranks are {2 * n * (n - 1)} steps, a program holds {MAX_EXECUTED_STEPS}"
            raise Unsupported(text, where="direct", hint="plan for fewer devices")
        order = list(resolve_order(problem, self.order, "direct"))
        placed = order
        if problem.op in ("broadcast", "reduce", "scatter", "gather"):
            start = order.index(problem.root)
            placed = order[start:] + order[:start]
        shots = self.shots or (_shots(problem) if problem.op == "all-reduce" else 1)
        rounds, areas = _layout(problem, shots, placed)
        chosen = replace(self, shots=shots, order=tuple(order), fold=False)
        return plan_rounds(problem, chosen, rounds, areas, order=placed, pack=False, name=self.name, bound=bound)

    def _folded(self, problem: CollectiveProblem) -> Program | None:
        """The folded program where it is asked for, or there are many steps. Raises: Unsupported where it is asked for and there is none."""
        n = len(problem.ranks)
        wanted = self.fold if self.fold is not None else problem.op == "all-to-all" and self.order == "rank" and n * n > MAX_UNFOLDED_PAIRS
        shift = alike_servers(problem) if self.fold is not False and problem.op == "all-to-all" and self.order == "rank" else None
        if shift is not None and (wanted or passes_on(problem, shift)):
            program = folded_all_to_all(problem, shift)
            return program if wanted else expand(program)
        if self.fold:
            text = "only an all-to-all in rank order of alike servers, whose ranks are equal runs, is folded"
            raise Unsupported(text, where="direct", hint="leave fold out")
        return None


def _shots(problem: CollectiveProblem) -> int:
    """One shot sends (n - 1) times the message, two shots 2 (n - 1) / n of it and one round more."""
    n, links = len(problem.ranks), problem.fabric.links
    latency_s = max(x.latency_s + x.library_latency_s for x in links) + (2 * problem.transport.per_message_s if problem.transport else 0.0)
    extra_s = (n - 1) * (1 - 2 / n) * problem.size_bytes / min(x.rate_Bps for x in links)
    return 1 if extra_s <= latency_s else 2
