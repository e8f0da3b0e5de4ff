"""Best moves and swaps of pieces between devices until none helps; and plans again from where shards lie, under a limit of moved bytes.

Left open: the papers end with their greedy plan. Invariant: no plan gets dearer, memory limits and the limit of moved bytes hold after each step.
Cost: O(n · D + n²/2) evaluations per round, swaps only with the slowest device's pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cite import FOLKLORE, Cite
from ...errors import Infeasible, Unsupported
from ...kernels.effort import time_is_up
from .problem import F64, I64, Piece, TablePlan, TableProblem, TableStrategy, fitting, halves

__all__ = ["FewestMoves", "refine"]

LEAST_GAIN = 1e-4  # of the cost, below which a step is not taken: nets know their costs no better
MAX_STEPS = 20_000  # moves and swaps looked at in a round
EVEN = 0.02  # weight of how evenly devices work, beside the slowest one's time: two that are equally slow are left one after the other


def refine(
    problem: TableProblem, pieces: Sequence[Piece], on: Sequence[int], *, rounds: int, most_moved: float = np.inf, moved: F64 | None = None
) -> tuple[tuple[Piece, ...], tuple[int, ...], int]:  # fmt: skip
    """Pieces and their devices after at most so many steps, and the plans looked at. `moved` [n, D]: bytes that a piece on a device has to move."""
    at, embedded, size = np.array(on, np.int64), problem.embed(pieces), problem.bytes_of(pieces)
    width = np.array([p.kind[2] for p in pieces], np.float64)
    sums, columns = problem.sums(pieces, at)
    held = np.bincount(at, weights=size, minlength=problem.devices)
    devices, looked = np.arange(problem.devices), 0
    price = np.zeros((len(pieces), problem.devices)) if moved is None else moved
    phases = problem.phases(sums, columns)
    best = _value(phases.total_s, phases)
    for _ in range(rounds):
        if time_is_up():
            break
        slow = int((phases.compute_s + phases.backward_s + phases.forward_s).argmax())
        mine = np.flatnonzero(at == slow)
        i, to = (x.ravel() for x in np.meshgrid(np.arange(len(pieces)), devices, indexing="ij"))
        keep = (to != at[i]) & (held[to] + size[i] <= problem.memory[to])
        i, to = i[keep], to[keep]
        a, b = (x.ravel() for x in np.meshgrid(mine, np.flatnonzero(at != slow), indexing="ij"))
        fits = (held[slow] - size[a] + size[b] <= problem.memory[slow]) & (held[at[b]] - size[b] + size[a] <= problem.memory[at[b]])
        a, b = a[fits], b[fits]
        first, second = np.concatenate([i, a]), np.concatenate([np.full(len(i), -1), b])
        target = np.concatenate([to, at[b]])
        source = at[first]
        more = price[first, target] - price[first, source]
        more += np.where(second >= 0, price[second, source] - price[second, target], 0.0)
        allowed = price[np.arange(len(at)), at].sum() + more <= max(most_moved, price[np.arange(len(at)), at].sum())
        chosen = np.flatnonzero(allowed)
        if len(chosen) > MAX_STEPS:  # of very many pieces a sample, spread evenly
            chosen = chosen[np.linspace(0, len(chosen) - 1, MAX_STEPS).astype(int)]
        first, second, target, source = first[chosen], second[chosen], target[chosen], source[chosen]
        if not len(first):
            break
        new_sums, new_columns = _moved(sums, columns, embedded, width, first, second, source, target)
        tried = problem.phases(new_sums, new_columns)
        value = _value(tried.total_s, tried)
        looked += len(value)
        k = int(value.argmin())
        if not value[k] < best * (1 - LEAST_GAIN):
            break
        at[first[k]] = target[k]
        if second[k] >= 0:
            at[second[k]] = source[k]
        sums, columns = problem.sums(pieces, at)
        held = np.bincount(at, weights=size, minlength=problem.devices)
        phases = problem.phases(sums, columns)
        best = _value(phases.total_s, phases)
    return tuple(pieces), tuple(at.tolist()), looked


def _value(total: F64, phases: object) -> F64:
    works = phases.compute_s + phases.backward_s  # type: ignore[attr-defined]  # the forward exchange is mostly waiting for the slowest
    return total + EVEN * np.sqrt((works**2).mean(-1))  # type: ignore[no-any-return]


def _moved(
    sums: F64, columns: F64, embedded: F64, width: F64, first: I64, second: I64, source: I64, target: I64
) -> tuple[F64, F64]:  # fmt: skip
    """Sums and columns of every plan in which `first` goes from source to target, and `second` (where it is not -1) the other way."""
    k = np.arange(len(first))
    new_sums, new_columns = np.repeat(sums[None], len(k), 0), np.repeat(columns[None], len(k), 0)
    for piece, a, b in ((first, source, target), (second, target, source)):
        real = piece >= 0
        r, p = k[real], piece[real]
        new_sums[r, a[real]] -= embedded[a[real], p]
        new_sums[r, b[real]] += embedded[b[real], p]
        new_columns[r, a[real]] -= width[p]
        new_columns[r, b[real]] += width[p]
    return np.where(np.abs(new_sums) < 1e-12, 0.0, new_sums), new_columns


@dataclass(frozen=True, kw_only=True)
class FewestMoves(TableStrategy):
    """The plan that runs now, made better by moves and swaps within the limit of moved bytes. Options. rounds: of moves and swaps at most; cuts: how
    often shards are halved at most, so that parts of them can move."""

    name: ClassVar[str] = "fewest-moves"
    cite: ClassVar[Cite] = FOLKLORE

    rounds: int = 200
    cuts: int = 2

    def plan(self, problem: TableProblem, *, rng: np.random.Generator) -> TablePlan:
        """Raises: Unsupported without a plan to start from; Infeasible where devices that are gone leave more to move than may be moved."""
        if not problem.start:
            raise Unsupported("there is no plan to start from", hint="give the plan that runs now with --from PLAN")
        plans = [self._from(problem, cuts) for cuts in range(self.cuts + 1)]
        return min(plans, key=lambda p: p.cost_s)

    def _from(self, problem: TableProblem, cuts: int) -> TablePlan:
        """With each shard halved so often first, so that parts of it can go."""
        names, number_of = {d.name: k for k, d in enumerate(problem.fabric.devices)}, problem.tables.number_of
        old = {s.table for s in problem.start}
        lies = [(Piece(number_of[s.table], s.rows, s.columns), names.get(s.device, -1)) for s in problem.start if s.table in number_of]
        for _ in range(cuts):
            lies = [(part, d) for piece, d in lies for part in (halves(piece) or (piece,))]
        new = [p for p in fitting(problem) if problem.tables.tables[p.table].name not in old]
        pieces, on = [p for p, _ in lies] + new, [d for _, d in lies] + [-1] * len(new)
        price = np.zeros((len(pieces), problem.devices))
        for i, (p, d) in enumerate(lies):
            price[i] = p.kind[1] * p.kind[2] * problem.tables.weight_bytes
            if d >= 0:
                price[i, d] = 0.0
        _settle(problem, pieces, on)
        forced = float(price[np.arange(len(on)), on].sum())
        most = np.inf if problem.move_bytes is None else float(problem.move_bytes)
        if forced > most:
            raise Infeasible(
                f"{forced:.0f} bytes lie on devices that are gone, {most:.0f} may be moved", where="moved bytes", hint=f"allow {forced:.0f} bytes",
                data={"needed_bytes": forced, "allowed_bytes": most},
            )  # fmt: skip
        done, where, looked = refine(problem, pieces, on, rounds=self.rounds, most_moved=most, moved=price)
        return problem.judged(self, done, where, evaluations=looked, notes={"forced_bytes": forced, "cuts": cuts})


def _settle(problem: TableProblem, pieces: Sequence[Piece], on: list[int]) -> None:
    """Pieces that lie nowhere (-1) go, the largest first, to the device with room that they make least slow. Raises: Infeasible."""
    size = problem.bytes_of(pieces)
    held = np.zeros(problem.devices)
    for i, d in enumerate(on):
        if d >= 0:
            held[d] += size[i]
    for i in sorted((i for i, d in enumerate(on) if d < 0), key=lambda i: -size[i]):
        free = np.flatnonzero(held + size[i] <= problem.memory)
        if not len(free):
            name = problem.tables.tables[pieces[i].table].name
            raise Infeasible(
                f"no device has room for {size[i]:.0f} bytes of table {name}", where=f"table {name}", hint="plan anew, without --from",
                data={"needed_bytes": float(size[i])},
            )  # fmt: skip
        settled = [(p, d) for p, d in zip(pieces, on, strict=True) if d >= 0]
        sums = problem.sums([p for p, _ in settled], np.array([d for _, d in settled], np.int64))[0] if settled else np.zeros((problem.devices, 1))
        costs = problem.compute_s(sums + problem.embed([pieces[i]])[:, 0])
        on[i] = int(free[costs[free].argmin()])
        held[on[i]] += size[i]
