"""Recursive halving and doubling: log n exchanges with partners at distances 1, 2, 4, ...

Cite: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19(1), 2005); R. Rabenseifner
(ICCS 2004) for the all-reduce made of a reduce-scatter by halving and an all-gather by doubling.
Left open by the paper: which partner comes first on a fabric with near and far ranks. Our answer: an option; by default the largest messages go
to the nearest partners where blocks may be numbered freely (all-reduce), else blocks stay contiguous (far partners first).
Deviations: what does not lie together is packed into a staging buffer; positions may be any order of the ranks; `radix` r generalises both to
r - 1 partners per round, as BCube does (C. Guo and others, SIGCOMM 2009).
Invariant: with p = 2^floor(log2 n) ranks in the core, each of log2 p rounds halves (doubles) what a rank still has to reduce (to get); the
n - p ranks outside hand their data to a partner in the core before and get the result after.
Cost: O(n log n) messages; 2 log2 p messages and 2 (p - 1) / p of the message per rank for an all-reduce, log2 p whole messages for
`RecursiveDoubling`; one whole message more before and after where n is no power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from .contract import refuse
from .rounds import Area, Move, Order, plan_rounds, resolve_order

__all__ = ["CITE", "DEVIATIONS", "HalvingDoubling", "RecursiveDoubling", "doubling_rounds", "halving_rounds", "whole_rounds"]

CITE = Cite(
    key="thakur2005optimization",
    title="Optimization of Collective Communication Operations in MPICH",
    authors="R. Thakur, R. Rabenseifner, W. Gropp",
    year=2005,
    venue="International Journal of High Performance Computing Applications 19(1)",
    doi="10.1177/1094342005051521",
)
DEVIATIONS = ("scattered blocks are packed into a staging buffer", "any order of ranks", "any radix")
OPS = ("all-reduce", "all-gather", "reduce-scatter")


@dataclass(frozen=True)
class _Core:
    """The power of `radix` of positions that exchange: core rank c plays position `at[c]` and stands for positions `members[c]`."""

    at: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(n: int, radix: int = 2) -> _Core:
        p = radix ** _digits(n, radix)
        few, more = divmod(n, p)  # positions of a core rank lie together, so that their blocks do
        starts = [c * few + min(c, more) for c in range(p + 1)]
        members = [tuple(range(a, b)) for a, b in pairwise(starts)]
        return _Core(tuple(m[0] for m in members), tuple(members))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(position in the core, a partner outside)."""
        return [(m[0], out) for m in self.members for out in m[1:]]


def _digits(n: int, radix: int) -> int:
    """Largest k with radix^k <= n."""
    k = 0
    while radix ** (k + 1) <= n:
        k += 1
    return k


def _weights(p: int, near: bool, radix: int) -> list[int]:
    """Weights of the digits in which partners differ, round by round: the first exchanges most."""
    up = [radix**k for k in range(_digits(p, radix))]
    return up if near else up[::-1]


def _held(p: int, c: int, done: Sequence[int], radix: int) -> list[int]:
    """Core numbers that agree with c in the digits done."""
    return [x for x in range(p) if all(x // w % radix == c // w % radix for w in done)]


def _partner(c: int, w: int, shift: int, radix: int) -> int:
    """c with its digit of weight w moved on by `shift`."""
    digit = c // w % radix
    return c + ((digit + shift) % radix - digit) * w


def halving_rounds(n: int, *, near: bool, radix: int) -> list[list[Move]]:
    """Reduce-scatter: position i ends with the sum of block i."""
    core = _Core.of(n, radix)
    p, done, rounds = len(core.at), list[int](), list[list[Move]]()
    # Ranks beyond a power of the radix give all they have to a partner in the core, which halves for both, and get their block at the end.
    if core.pairs:
        rounds.append([Move(out, into, tuple(range(n)), add=True, stream=out - into) for into, out in core.pairs])
    for w in _weights(p, near, radix):
        step = []
        for c in range(p):
            held = _held(p, c, done, radix)  # what c still adds up; of these it gives away all but the radix-th part in this round
            for shift in range(1, radix):
                other = _partner(c, w, shift, radix)
                away = [x for x in held if x // w % radix == other // w % radix]
                step.append(Move(core.at[c], core.at[other], _blocks(core, away), add=True, stream=shift))
        rounds.append(step)
        done.append(w)
    if core.pairs:
        rounds.append([Move(into, out, (out,), stream=out - into) for into, out in core.pairs])
    return rounds


def doubling_rounds(n: int, *, near: bool, radix: int) -> list[list[Move]]:
    """All-gather, the mirror image of `halving_rounds`: `near` means that the last, largest exchange is with the nearest partners."""
    core = _Core.of(n, radix)
    p, rounds = len(core.at), list[list[Move]]()
    if core.pairs:
        rounds.append([Move(out, into, (out,), stream=out - into) for into, out in core.pairs])
    weights = _weights(p, near, radix)
    for k in reversed(range(len(weights))):
        step = []
        for c in range(p):
            blocks = _blocks(core, _held(p, c, weights[: k + 1], radix))
            step += [Move(core.at[c], core.at[_partner(c, weights[k], shift, radix)], blocks, stream=shift) for shift in range(1, radix)]
        rounds.append(step)
    if core.pairs:
        rounds.append([Move(into, out, tuple(b for b in range(n) if b != out), stream=out - into) for into, out in core.pairs])
    return rounds


def _blocks(core: _Core, numbers: list[int]) -> tuple[int, ...]:
    return tuple(sorted(b for c in numbers for b in core.members[c]))


def rabenseifner_rounds(n: int, *, near: bool, radix: int) -> tuple[list[list[Move]], int]:
    """All-reduce: (rounds, blocks). Core ranks only own blocks; those with near partners first are numbered by reversed digits, so that what is
    exchanged always lies together."""
    core = _Core.of(n, radix)
    p = len(core.at)
    weights = _weights(p, True, radix)
    label = [sum(c // w % radix * turned for w, turned in zip(weights, reversed(weights), strict=True)) if near else c for c in range(p)]
    everything = tuple(range(p))

    def labelled(rounds: list[list[Move]]) -> list[list[Move]]:
        return [
            [replace(m, src=core.at[m.src], dst=core.at[m.dst], blocks=tuple(sorted(label[b] for b in m.blocks))) for m in step] for step in rounds
        ]

    rounds = [[Move(out, into, everything, add=True, stream=out - into) for into, out in core.pairs]] if core.pairs else []
    rounds += labelled(halving_rounds(p, near=near, radix=radix)) + labelled(doubling_rounds(p, near=near, radix=radix))
    if core.pairs:
        rounds.append([Move(into, out, everything, stream=out - into) for into, out in core.pairs])
    return rounds, p


def whole_rounds(n: int) -> list[list[Move]]:
    """All-reduce by recursive doubling: partners exchange and add everything they have; every rank of the core adds the same pairs."""
    core = _Core.of(n)
    p = len(core.at)
    rounds = [[Move(out, into, (0,), add=True) for into, out in core.pairs]] if core.pairs else []
    rounds += [[Move(core.at[c], core.at[c ^ w], (0,), add=True) for c in range(p)] for w in _weights(p, True, 2)]
    if core.pairs:
        rounds.append([Move(into, out, (0,)) for into, out in core.pairs])
    return rounds


def by_numbers(problem: CollectiveProblem, order: Order) -> bool:
    """A power of two of ranks, in the order of their contributions' numbers."""
    n, placed = len(problem.ranks), resolve_order(problem, order, "halving-doubling")
    return not n & (n - 1) and all((problem.numbers or range(n))[rank] == at for at, rank in enumerate(placed))


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(CollectiveStrategy):
    """Options.

    near: the largest messages go to the nearest partners; None = for all-reduce only (elsewhere blocks would have to be packed).
    radix: r - 1 partners per round and log_r n rounds: r = 2 is Rabenseifner's algorithm, larger r that of BCube.
    order: `rank`, `servers` (ranks of a server together), or position -> rank.
    pack: scattered blocks become one message through a staging buffer; False = one message per stretch.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "halving-doubling"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    near: bool | None = None
    radix: int = 2
    order: Order = "rank"
    pack: bool = True
    unroll: bool = True

    def sums_by_tree(self, problem: CollectiveProblem) -> bool:
        """Nearest numbers first, a power of two of them: every exchange adds the two halves of an aligned block."""
        return problem.op == "all-reduce" and self.near is not False and self.radix == 2 and by_numbers(problem, self.order)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """All-reduce (Rabenseifner), reduce-scatter, all-gather. Raises: Disconnected, Unsupported, UsageError (order)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        if problem.op not in OPS:
            raise refuse(problem, "halving and doubling", OPS)
        if self.radix < 2:
            raise UsageError(f"radix must be >= 2, got {self.radix}", where="halving-doubling")
        near = problem.op == "all-reduce" if self.near is None else self.near
        order = resolve_order(problem, self.order, "halving-doubling")
        if problem.op == "all-reduce":
            rounds, blocks = rabenseifner_rounds(n, near=near, radix=self.radix)
            areas = {"data": Area("input", blocks)}
        else:
            rounds = (doubling_rounds if problem.op == "all-gather" else halving_rounds)(n, near=near, radix=self.radix)
            areas = {"data": Area("output" if problem.op == "all-gather" else "input", n, by_rank=True)}
        chosen = replace(self, near=near, order=order)
        return plan_rounds(problem, chosen, rounds, areas, order=order, pack=self.pack, name=self.name, bound=bound)


@dataclass(frozen=True, kw_only=True)
class RecursiveDoubling(CollectiveStrategy):
    """The latency-optimal all-reduce: log2 n exchanges of the whole message. Options: `order` as in HalvingDoubling; `unroll`: no other form."""

    name: ClassVar[str] = "recursive-doubling"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = ("all-reduce",)

    order: Order = "rank"
    unroll: bool = True

    def sums_by_tree(self, problem: CollectiveProblem) -> bool:
        return problem.op == "all-reduce" and by_numbers(problem, self.order)

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (other operations), UsageError (order)."""
        bound = collective_bound(problem)
        if problem.op != "all-reduce":
            raise refuse(problem, "recursive doubling", ("all-reduce",))
        order = resolve_order(problem, self.order, "recursive-doubling")
        rounds = whole_rounds(len(problem.ranks))
        areas = {"data": Area("input", 1)}
        return plan_rounds(problem, replace(self, order=order), rounds, areas, order=order, pack=False, name=self.name, bound=bound)
