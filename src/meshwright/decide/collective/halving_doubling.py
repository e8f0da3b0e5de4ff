"""Recursive halving and doubling: log n exchanges with partners at distances 1, 2, 4, ...

Cite: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19(1), 2005); R. Rabenseifner
(ICCS 2004) for the all-reduce made of a reduce-scatter by halving and an all-gather by doubling.
Left open by the paper: which partner comes first on a fabric with near and far ranks. Our answer: an option; by default the largest messages go
to the nearest partners where blocks may be numbered freely (all-reduce), else blocks stay contiguous (far partners first).
Deviations: what does not lie together is packed into a staging buffer; positions may be any order of the ranks.
Invariant: with p = 2^floor(log2 n) ranks in the core, each of log2 p rounds halves (doubles) what a rank still has to reduce (to get); the
n - p ranks outside hand their data to a partner in the core before and get the result after.
Cost: O(n log n) messages; 2 log2 p messages and 2 (p - 1) / p of the message per rank for an all-reduce, log2 p whole messages for
`RecursiveDoubling`; one whole message more before and after where n is no power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...cite import Cite
from .bounds import collective_bound
from .classic_contract import refuse
from .classic_rounds import Area, Move, Order, plan_rounds, resolve_order
from .problem import CollectivePlan, CollectiveProblem

__all__ = ["CITE", "DEVIATIONS", "HalvingDoubling", "RecursiveDoubling", "doubling_rounds", "halving_rounds", "whole_rounds"]

CITE = Cite(
    key="thakur2005optimization",
    title="Optimization of Collective Communication Operations in MPICH",
    authors="R. Thakur, R. Rabenseifner, W. Gropp",
    year=2005,
    venue="International Journal of High Performance Computing Applications 19(1)",
    doi="10.1177/1094342005051521",
)
DEVIATIONS = ("scattered blocks are packed into a staging buffer", "any order of ranks")
OPS = ("all-reduce", "all-gather", "reduce-scatter")


@dataclass(frozen=True)
class _Core:
    """The power of two of positions that exchange: core rank c plays position `at[c]` and stands for positions `members[c]`."""

    at: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(n: int) -> _Core:
        p = 1 << n.bit_length() - 1
        extra = n - p  # the first 2 * extra positions are pairs (core, outside), so that blocks of a pair lie together
        members = [(2 * c, 2 * c + 1) for c in range(extra)] + [(c + extra,) for c in range(extra, p)]
        return _Core(tuple(m[0] for m in members), tuple(members))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(position in the core, its partner outside)."""
        return [(m[0], m[1]) for m in self.members if len(m) == 2]


def _distances(p: int, near: bool) -> list[int]:
    """Distances of the halving rounds: the first exchanges half of everything."""
    up = [1 << k for k in range(p.bit_length() - 1)]
    return up if near else up[::-1]


def _held(p: int, c: int, done: list[int]) -> list[int]:
    """Core numbers that agree with c in the bits of the distances done."""
    mask = sum(done)
    return [x for x in range(p) if not (x ^ c) & mask]


def halving_rounds(n: int, *, near: bool) -> list[list[Move]]:
    """Reduce-scatter: position i ends with the sum of block i."""
    core = _Core.of(n)
    p, done, rounds = len(core.at), list[int](), list[list[Move]]()
    if core.pairs:
        rounds.append([Move(out, into, tuple(range(n)), add=True) for into, out in core.pairs])
    for d in _distances(p, near):
        step = []
        for c in range(p):
            away = [x for x in _held(p, c, done) if (x ^ c) & d]
            step.append(Move(core.at[c], core.at[c ^ d], _blocks(core, away), add=True))
        rounds.append(step)
        done.append(d)
    if core.pairs:
        rounds.append([Move(into, out, (out,)) for into, out in core.pairs])
    return rounds


def doubling_rounds(n: int, *, near: bool) -> list[list[Move]]:
    """All-gather, the mirror image of `halving_rounds`: `near` means that the last, largest exchange is with the nearest partner."""
    core = _Core.of(n)
    p, rounds = len(core.at), list[list[Move]]()
    if core.pairs:
        rounds.append([Move(out, into, (out,)) for into, out in core.pairs])
    distances = _distances(p, near)
    for k in reversed(range(len(distances))):
        rounds.append([Move(core.at[c], core.at[c ^ distances[k]], _blocks(core, _held(p, c, distances[: k + 1]))) for c in range(p)])
    if core.pairs:
        rounds.append([Move(into, out, tuple(b for b in range(n) if b != out)) for into, out in core.pairs])
    return rounds


def _blocks(core: _Core, numbers: list[int]) -> tuple[int, ...]:
    return tuple(sorted(b for c in numbers for b in core.members[c]))


def rabenseifner_rounds(n: int, *, near: bool) -> tuple[list[list[Move]], int]:
    """All-reduce: (rounds, blocks). Core ranks only own blocks; those with near partners first are numbered by reversed bits, so that what is
    exchanged always lies together."""
    core = _Core.of(n)
    p = len(core.at)
    bits = p.bit_length() - 1
    label = [int(f"{c:0{bits}b}"[::-1], 2) if near and bits else c for c in range(p)]
    everything = tuple(range(p))

    def labelled(rounds: list[list[Move]]) -> list[list[Move]]:
        return [
            [replace(m, src=core.at[m.src], dst=core.at[m.dst], blocks=tuple(sorted(label[b] for b in m.blocks))) for m in step] for step in rounds
        ]

    rounds = [[Move(out, into, everything, add=True) for into, out in core.pairs]] if core.pairs else []
    rounds += labelled(halving_rounds(p, near=near)) + labelled(doubling_rounds(p, near=near))
    if core.pairs:
        rounds.append([Move(into, out, everything) for into, out in core.pairs])
    return rounds, p


def whole_rounds(n: int) -> list[list[Move]]:
    """All-reduce by recursive doubling: partners exchange and add everything they have; every rank of the core adds the same pairs."""
    core = _Core.of(n)
    p = len(core.at)
    rounds = [[Move(out, into, (0,), add=True) for into, out in core.pairs]] if core.pairs else []
    rounds += [[Move(core.at[c], core.at[c ^ d], (0,), add=True) for c in range(p)] for d in _distances(p, True)]
    if core.pairs:
        rounds.append([Move(into, out, (0,)) for into, out in core.pairs])
    return rounds


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling:
    """Options.

    near: the largest messages go to the nearest partners; None = for all-reduce only (elsewhere blocks would have to be packed).
    order: `rank`, `servers` (ranks of a server together), or position -> rank.
    pack: scattered blocks become one message through a staging buffer; False = one message per stretch.
    unroll: there is no other form.
    """

    near: bool | None = None
    order: Order = "rank"
    pack: bool = True
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """All-reduce (Rabenseifner), reduce-scatter, all-gather. Raises: Disconnected, Unsupported, UsageError (order)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        if problem.op not in OPS:
            raise refuse(problem, "halving and doubling", OPS)
        near = problem.op == "all-reduce" if self.near is None else self.near
        order = resolve_order(problem, self.order, "halvingdoubling")
        if problem.op == "all-reduce":
            rounds, blocks = rabenseifner_rounds(n, near=near)
            areas = {"data": Area("input", blocks)}
        else:
            rounds = (doubling_rounds if problem.op == "all-gather" else halving_rounds)(n, near=near)
            areas = {"data": Area("output" if problem.op == "all-gather" else "input", n, by_rank=True)}
        chosen = replace(self, near=near, order=order)
        return plan_rounds(problem, chosen, rounds, areas, order=order, pack=self.pack, name="halvingdoubling", bound=bound)


@dataclass(frozen=True, kw_only=True)
class RecursiveDoubling:
    """The latency-optimal all-reduce: log2 n exchanges of the whole message. Options: `order` as in HalvingDoubling; `unroll`: no other form."""

    order: Order = "rank"
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (other operations), UsageError (order)."""
        bound = collective_bound(problem)
        if problem.op != "all-reduce":
            raise refuse(problem, "recursive doubling", ("all-reduce",))
        order = resolve_order(problem, self.order, "recursivedoubling")
        rounds = whole_rounds(len(problem.ranks))
        areas = {"data": Area("input", 1)}
        return plan_rounds(problem, replace(self, order=order), rounds, areas, order=order, pack=False, name="recursivedoubling", bound=bound)
