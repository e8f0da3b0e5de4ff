"""Candidates on unlike devices: sequences of kinds over the stages of a pipeline, and pipelines of one kind each side by side.

Cite: Um et al., "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs", USENIX ATC 2024 (device sequences, load balance by speed);
Strati et al., Sailor, SOSP 2025 (tensor degrees stay in a server; zones).
Sequences: every pipeline passes through the kinds in one order; a stage has one kind, layers are divided by its speed (`split`).
Side by side: a pipeline has one kind; faster ones get more micro-batches, so that all end together. Kinds in different zones are different kinds.
Weights and gradients are gathered every micro-batch (sharding 2, 3) only among replicas with equal NICs: tables price a rank's own.
Pruning: tensor degrees of neighbours differ at most by a factor of two. Subsets of the kinds are tried too: a slow kind may cost more than it gives.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import ClassVar

from ....cite import Cite
from ....profile.layer_profile import Entry
from ....profile.layer_table import LayerChoice
from ....profile.network import MAX_PASSES, ProfiledLayout, ProfiledStage, Replica
from .candidate import Candidate, Demands, Judged, LayersStrategy, Pool, Problem
from .split import split_layers

__all__ = ["CITE", "Fleet", "fleet_candidates", "share_microbatches"]

CITE = Cite(
    key="um2024metis",
    title="Metis: Fast Automatic Distributed Training on Heterogeneous GPUs",
    year=2024,
    venue="USENIX ATC '24",
)
# Kinds of device in one pipeline, at most: every order of them is tried.
MAX_SEQUENCE_KINDS = 4


def share_microbatches(microbatches: int, first_s: Sequence[float], each_s: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches per pipeline, each at least one, so that the last to end ends as early as can be.

    Pipeline i with m of them takes first_s[i] + (m - 1) · each_s[i]. Exact: the next one goes where it ends first.
    """
    counts = [1] * len(first_s)
    heap = [(first_s[i] + each_s[i], i) for i in range(len(first_s))]
    heapq.heapify(heap)
    for _ in range(microbatches - len(first_s)):
        end, i = heapq.heappop(heap)
        counts[i] += 1
        heapq.heappush(heap, (end + each_s[i], i))
    return tuple(counts)


def fleet_candidates(problem: Problem) -> Iterator[Candidate]:
    """Every candidate uses at least two pools, and all devices of each."""
    for size in range(2, min(len(problem.pools), MAX_SEQUENCE_KINDS) + 1):
        for pools in combinations(problem.pools, size):
            if all(p.kind.nics for p in pools):
                yield from _sequences(problem, pools)
                yield from _side_by_side(problem, pools)


def _degrees(problem: Problem, pools: Sequence[Pool]) -> Iterator[tuple[int, ...]]:
    for degrees in product(*(problem.tensors(p.kind.name) for p in pools)):
        if max(degrees) <= 2 * min(degrees):
            yield degrees


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _sequences(problem: Problem, pools: Sequence[Pool]) -> Iterator[Candidate]:
    for degrees in _degrees(problem, pools):
        counts = [p.kind.devices // t for p, t in zip(pools, degrees, strict=True)]
        for data in _divisors(min(counts)):
            if any(c % data for c in counts) or sum(counts) // data > problem.table.layers:
                continue
            for order in permutations(range(len(pools))):
                columns = [
                    Replica(device=pools[k].kind.name, tensor=degrees[k], zone=pools[k].kind.zone) for k in order for _ in range(counts[k] // data)
                ]
                yield from _judged(problem, [tuple(columns)] * data, " > ".join(pools[k].kind.name for k in order))


def _side_by_side(problem: Problem, pools: Sequence[Pool]) -> Iterator[Candidate]:
    for degrees in _degrees(problem, pools):
        counts = [p.kind.devices // t for p, t in zip(pools, degrees, strict=True)]
        for stages in _divisors(min(counts)):
            if any(c % stages for c in counts) or stages > problem.table.layers:
                continue
            columns = [
                (Replica(device=p.kind.name, tensor=t, zone=p.kind.zone),) * stages
                for p, t, c in zip(pools, degrees, counts, strict=True) for _ in range(c // stages)
            ]  # fmt: skip
            yield from _judged(problem, columns, " | ".join(p.kind.name for p in pools))


def _judged(problem: Problem, columns: Sequence[tuple[Replica, ...]], what: str) -> Iterator[Candidate]:
    """One candidate per micro-batch: layers by speed, micro-batches by speed, the fastest choice that fits."""
    data = len(columns)
    for microbatch in problem.microbatches:
        total, rest = divmod(problem.global_batch, microbatch)
        entries = {Entry(r.device, microbatch, r.tensor) for c in columns for r in c}
        if rest or total < data or any(e not in problem.table.rows for e in entries) or total * len(columns[0]) > MAX_PASSES:
            continue
        best: tuple[float, Candidate] | None = None
        nearest: tuple[float, Candidate] | None = None  # to fitting: what the search names where nothing fits
        even = all(len({problem.table.outside_Bps.get(c[s].device) for c in columns}) == 1 for s in range(len(columns[0])))
        for choice in problem.choices:
            if choice.tensor or bool(choice.sharding) != (data > 1) or choice.sharding == 2 or (choice.sharding > 1 and not even):
                continue
            found = _one(problem, columns, microbatch, total, choice, what)
            estimate = problem.estimate(found)
            if estimate.over_bytes > 0:
                if nearest is None or estimate.over_bytes < nearest[0]:
                    nearest = (estimate.over_bytes, found)
            elif best is None or estimate.time_s < best[0]:
                best = (estimate.time_s, found)
        chosen = best or nearest
        if chosen is not None:
            yield chosen[1]


def _one(problem: Problem, columns: Sequence[tuple[Replica, ...]], microbatch: int, total: int, choice: LayerChoice, what: str) -> Candidate:
    data, stages = len(columns), len(columns[0])
    distinct = list(dict.fromkeys(columns))
    times = {}
    for r in dict.fromkeys(r for c in distinct for r in c):
        a = problem.table.priced(Entry(r.device, microbatch, r.tensor), choice, data)
        times[r] = a["forward_s"] + a["backward_s"]
    # all pipelines divide layers alike, so the one that takes longest is divided well; the faster ones get more micro-batches instead
    slowest = max(distinct, key=lambda c: float(sum(times[r].sum() for r in c)))
    layers = split_layers([times[r] for r in slowest])
    starts = [sum(layers[:s]) for s in range(stages)]
    spans = {c: [float(times[r][a : a + n].sum()) for r, a, n in zip(c, starts, layers, strict=True)] for c in distinct}
    counts = share_microbatches(total, [sum(spans[c]) for c in columns], [max(spans[c]) for c in columns])
    made = tuple(ProfiledStage(layers=n, replicas=tuple(c[s] for c in columns)) for s, n in enumerate(layers))
    tensors = "/".join(str(t) for t in dict.fromkeys(r.tensor for c in distinct for r in c))
    name = f"{what} dp{data} tp{tensors} pp{stages} mb{microbatch}"
    layout = ProfiledLayout(stages=made, microbatch=microbatch, microbatches=counts, name=name)
    return Candidate(layout, (choice,) * problem.table.layers, Fleet.name)


@dataclass(frozen=True, kw_only=True)
class Fleet(LayersStrategy):
    """Several kinds of device together. No options."""

    name: ClassVar[str] = "mixed"
    cite: ClassVar[Cite] = CITE
    mixes: ClassVar[bool] = True
    quick: ClassVar[bool] = True

    def plan(self, problem: Problem, demands: Demands, judged: Sequence[Judged] = ()) -> Iterable[Candidate]:
        return fleet_candidates(problem)
