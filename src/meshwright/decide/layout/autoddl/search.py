"""Finding the best assignment on one mesh: exact where it can be, integer programme under a memory limit, coordinate descent otherwise.

Gradients that wait for a common all-reduce share its latency, which is no sum over edges. So the exact search runs once per family of axis sets
whose buckets are allowed, adds the latencies of the family, and takes the least: exact again (up to the rounding of pieces). On three axes, with
127 families, it runs with none and with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ....errors import Infeasible, TimeLimit
from ....kernels.effort import Deadline
from .descent import descend
from .eliminate import minimise
from .evaluate import Evaluation, evaluate
from .ilp import solve_ilp
from .model import Model, is_bucketed, reduced_axes
from .templates import TEMPLATES, allowed, kinds_of

__all__ = ["Found", "MeshSearch"]

FloatArray = NDArray[np.float64]
Edges = list[tuple[int, int, FloatArray]]
LAGRANGE_STEPS = 24  # prices of memory that are tried: raised until the plan fits, then bisected
MAX_PROGRAMME_WORK_S = 60.0  # counted work of the integer programme of a mesh, seconds of a quiet core (`kernels.highs`)


@dataclass(frozen=True)
class Found:
    """An assignment with what it costs. `exact`: no assignment on this mesh is faster in the model (and fits)."""

    what: str
    model: Model
    assignment: list[int]
    evaluation: Evaluation
    exact: bool = False


@dataclass
class MeshSearch:
    """All searches on one mesh. `limit_bytes` 0: no memory limit."""

    model: Model
    limit_bytes: int = 0
    _sets: dict[int, dict[tuple[int, ...], NDArray[np.bool_]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = self.model.network
        self.costs = [self.model.edge_costs(i) for i in range(len(network.edges))]
        for i, edge in enumerate(network.edges):
            if network.vertices[edge.source].kind == "param" and edge.value.gradient:
                self._sets[i] = self._bucket_masks(i)

    def _bucket_masks(self, index: int) -> dict[tuple[int, ...], NDArray[np.bool_]]:
        edge = self.model.network.edges[index]
        sources = [c.output for c in self.model.choices[edge.source]]
        readers = [c.inputs[edge.slot] for c in self.model.choices[edge.reader]]
        found: dict[tuple[int, ...], NDArray[np.bool_]] = {}
        for i, a in enumerate(sources):
            for j, b in enumerate(readers):
                if is_bucketed(a, b):
                    mask = found.setdefault(reduced_axes(a, b), np.zeros((len(sources), len(readers)), dtype=bool))
                    mask[i, j] = True
        return found

    def edges(self, family: Sequence[tuple[int, ...]] | None = None, *, kept_price: float = 0.0) -> Edges:
        """The edges with their seconds; buckets outside `family` are forbidden (None: all allowed). `kept_price`: seconds per byte kept."""
        found: Edges = []
        for i, edge in enumerate(self.model.network.edges):
            seconds, kept = self.costs[i]
            if kept_price:
                seconds = seconds + kept_price * kept
            if family is not None:
                for axes, mask in self._sets.get(i, {}).items():
                    if axes not in family:
                        seconds = np.where(mask, np.inf, seconds)
            found.append((edge.source, edge.reader, seconds))
        return found

    def families(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        axes = range(len(self.model.mesh.sizes))
        sets = [s for n in range(1, len(axes) + 1) for s in combinations(axes, n)]
        if len(sets) > 3:
            yield from ((), tuple(sets))
            return
        for n in range(len(sets) + 1):
            yield from combinations(sets, n)

    def _latency_s(self, family: Sequence[tuple[int, ...]]) -> float:
        """What the all-reduces of a family cost beyond their bytes."""
        item = max((self.model.network.edges[i].value.item for i in self._sets), default=4)
        size = 1 << 24
        whole = sum(self.model.bucket_time_s(size, item, axes) for axes in family)
        return whole - sum(self.model.bucket_time_s(size, item, axes, self.model._bytes_only) for axes in family)

    def exact(self, masks: Sequence[NDArray[np.bool_]] | None = None, *, price: float = 0.0) -> list[int] | None:
        """The best assignment of the (masked) space by elimination, with `price` seconds per byte of memory; None if tables grow too large."""
        vertices = [t + price * m for t, m in zip(self.model.times, self.model.memory, strict=True)]
        if masks is not None:
            vertices = [np.where(mask, v, np.inf) for v, mask in zip(vertices, masks, strict=True)]
        best: tuple[float, list[int]] | None = None
        for family in self.families():
            answer = minimise(vertices, self.edges(family, kept_price=price))
            if answer is None:
                return None if best is None else best[1]
            total = answer[0] + self._latency_s(family)
            if best is None or total < best[0]:
                best = (total, answer[1])
        return best[1] if best is not None and np.isfinite(best[0]) else None

    def found(self, what: str, assignment: list[int], *, exact: bool = False) -> Found:
        return Found(what, self.model, assignment, evaluate(self.model, assignment), exact)

    def fits(self, found: Found) -> bool:
        return not self.limit_bytes or found.evaluation.memory_bytes <= self.limit_bytes

    # ---- ways to search ----------------------------------------------------------------------------------------------
    def templates(self, names: Sequence[str] = TEMPLATES) -> Iterator[Found]:
        """The best plan of every template that is defined on this mesh."""
        for name in names:
            kinds = kinds_of(name, len(self.model.mesh.sizes))
            if kinds is None:
                continue
            masks = allowed(self.model, kinds)
            assignment = self.exact(masks)
            if assignment is not None:
                yield self.found(name, assignment)

    def best_exact(self) -> Found | None:
        """Elimination; where the result does not fit, with a price on memory that is raised until it does, then the integer programme."""
        assignment = self.exact()
        if assignment is None:
            return None
        first = self.found("exact", assignment, exact=len(self.model.mesh.sizes) <= 2)
        if self.fits(first):
            return first
        return self._priced_memory(first)

    def _priced_memory(self, first: Found) -> Found | None:
        low, high, best = 0.0, first.evaluation.time_s / max(1, first.evaluation.memory_bytes), None
        for _ in range(LAGRANGE_STEPS):
            middle = high if best is None else (low + high) / 2
            assignment = self.exact(price=middle)
            if assignment is None:
                break
            found = self.found("exact, memory priced", assignment)
            if self.fits(found):
                best = found if best is None or found.evaluation.time_s < best.evaluation.time_s else best
                high = middle
            elif best is None:
                low, high = high, high * 4
            else:
                low = middle
        return best

    def best_ilp(self) -> Found:
        """The integer programme, with the memory limit inside. Raises: Infeasible, TimeLimit."""
        memory = (self.model.memory, [kept for _, kept in self.costs], float(self.limit_bytes)) if self.limit_bytes else None
        assignment, proven = solve_ilp(self.model.times, self.edges(), memory=memory, deadline=Deadline.after(MAX_PROGRAMME_WORK_S))
        return self.found("ilp", assignment, exact=proven and len(self.model.mesh.sizes) <= 2 and not self._sets)

    def best_descent(self, starts: Sequence[Found], rng: np.random.Generator, restarts: int, *, pairs: bool) -> Found:
        vertices = self.model.times
        _, assignment = descend(vertices, self.edges(), [s.assignment for s in starts], rng=rng, restarts=restarts, pairs=pairs)
        return self.found("descent", assignment)


def least_memory(search: MeshSearch) -> int:
    """The least memory that elimination finds for any assignment of this mesh."""
    price = 1.0
    assignment = search.exact(price=price)
    return evaluate(search.model, assignment).memory_bytes if assignment is not None else 0


Way = Callable[[], Found | None]


def attempt(way: Way) -> Found | None:
    """A search that may find nothing in time or in memory."""
    try:
        return way()
    except (Infeasible, TimeLimit):
        return None
