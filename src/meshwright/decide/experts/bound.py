"""The least time of a step of an expert layer: per degree, and of any choice.

Cite: cuts of the network, as for collectives; the bytes that must cross one are counted here, section 3.2 of Tutel (arXiv 2206.03382) counts totals.
Left open by the paper: the bound. Our answer: for every device and every server, what must come in and go out at least, over the rate of its links;
and the experts' own work. Copies of one row for several slices count once, since an exchange may copy behind the cut; of sums to come, one part.
Deviations: latencies and messages' overheads are left out, so the bound holds for every algorithm and every overlap.
Invariant: no program of that degree is simulated faster; `any` is the least over the degrees.
Cost: O(degrees · cuts · ranks · experts · shares).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ...cost import assumed_cost
from .problem import Choice, ExpertProblem

__all__ = ["ExpertBound", "expert_bound"]


@dataclass(frozen=True, kw_only=True)
class ExpertBound:
    """Seconds of a step at a degree: `forward` and `backward` (0 in inference), each with what it follows from: "experts", or a cut by name."""

    degree: int
    forward: Fraction
    backward: Fraction
    why: tuple[str, str]

    @property
    def time_s(self) -> Fraction:
        return self.forward + self.backward


def expert_bound(problem: ExpertProblem, capacity: int, degree: int | None = None) -> ExpertBound:
    """Of one degree, or of whichever is least. Raises: UsageError for a degree that the layer does not have."""
    if degree is None:
        return min((expert_bound(problem, capacity, r) for r in problem.shape.degrees), key=lambda b: (b.time_s, b.degree))
    problem.shape.require(Choice(degree, 1, "linear"), capacity)
    forward, why = _least(problem, capacity, degree, backward=False)
    backward, later = _least(problem, capacity, degree, backward=True) if problem.passes == "training" else (Fraction(0), "")
    return ExpertBound(degree=degree, forward=forward, backward=backward, why=(why, later))


def _least(problem: ExpertProblem, capacity: int, degree: int, *, backward: bool) -> tuple[Fraction, str]:
    shape, fabric, cost = problem.shape, problem.fabric, problem.cost or assumed_cost(problem.fabric)
    work = shape.work(Choice(degree, 1, "linear"), capacity, backward=backward)
    best = max(Fraction(cost.price("", work, fabric.device(name)).time_s) for name in problem.ranks), "experts"
    for name, inside, actors in _cuts(problem):
        comes, goes = crossing_bytes(problem, capacity, degree, inside, backward=backward)
        rates = [sum(x.rate_Bps for x in fabric.links if (x.dst in actors) != (x.src in actors) and (x.dst in actors) == inward) for inward in (1, 0)]
        for size, rate, way in ((comes, rates[0], "into"), (goes, rates[1], "out of")):
            if size and rate and Fraction(size, rate) > best[0]:
                best = Fraction(size, rate), f"{way} {name}"
    return best


def _cuts(problem: ExpertProblem) -> Iterator[tuple[str, frozenset[int], frozenset[str]]]:
    """(name, ranks inside, actors inside): every device, and every server that does not hold all of them."""
    fabric = problem.fabric
    for rank, name in enumerate(problem.ranks):
        yield name, frozenset([rank]), frozenset([name])
    for group in fabric.groups:
        inside = frozenset(r for r, name in enumerate(problem.ranks) if fabric.device(name).group == group)
        if 1 < len(inside) < len(problem.ranks):
            actors = [d.name for d in fabric.devices if d.group == group] + [s.name for s in fabric.switches if s.group == group]
            yield group, inside, frozenset(actors)


def crossing_bytes(problem: ExpertProblem, capacity: int, degree: int, inside: frozenset[int], *, backward: bool) -> tuple[int, int]:
    """(bytes that must enter, bytes that must leave) the ranks `inside` in one pass, at least."""
    shape = problem.shape
    outside = frozenset(range(shape.ranks)) - inside
    return tuple(_entering(problem, capacity, degree, a, b, backward=backward) for a, b in ((inside, outside), (outside, inside)))  # type: ignore[return-value]


def _entering(problem: ExpertProblem, capacity: int, degree: int, inside: frozenset[int], outside: frozenset[int], *, backward: bool) -> int:
    shape = problem.shape
    total = 0
    for size, elements in ((shape.group(degree), shape.slice_elements), (shape.whole_group(degree), shape.whole_slice_elements)):
        for first in range(0, shape.ranks, size):
            members = frozenset(range(first, first + size))
            here, there = len(members & inside), len(members & outside)
            if here and there:  # forward: the others' slices; backward: of the sums that end here, what the others add
                total += (here if backward else there) * elements
    if degree:
        copies = shape.shares // degree
        width_there, width_back = (shape.output, shape.model) if backward else (shape.model, shape.output)
        rows = shape.local * (capacity // copies)
        for first in range(0, shape.ranks, shape.shares):
            for copy in range(copies):
                holders = frozenset(first + copy + q * copies for q in range(degree))
                if holders & inside:
                    total += len(outside) * rows * width_there
                if holders & outside:
                    total += len(inside) * rows * width_back
    return total * shape.element_bytes
