"""Tutel: parallelism, overlap and exchange of an expert layer, switchable between two steps.

Cite: C. Hwang and others, "Tutel: Adaptive Mixture-of-Experts at Scale" (MLSys 2023, arXiv 2206.03382).
Left open by the paper: the order of trials, capacities that the parts do not divide. Our answer: trials begin with what the simulator predicts to be
fastest; capacity is rounded to a multiple that suits every candidate, so that a change of choice changes no output.
Deviations: with as many experts as ranks or more there is r = 0 too; exchanges may be those of any planned collective.
Invariant: all candidates of a layer have the same weight layout and the same capacity.
Cost: degrees · chunks · algorithms candidates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import ClassVar

from ...cite import Cite
from ...errors import UsageError
from .problem import MAX_CHUNKS, Choice, ExpertPlan, ExpertProblem, ExpertStrategy

__all__ = ["CITE", "DEVIATIONS", "Tutel", "alignment_of"]

CITE = Cite(
    key="hwang2023tutel",
    title="Tutel: Adaptive Mixture-of-Experts at Scale",
    authors="C. Hwang, W. Cui, Y. Xiong, Z. Yang, Z. Liu, H. Hu, Z. Wang, R. Salas, J. Jose, P. Ram, J. Chau, P. Cheng, F. Yang, M. Yang, Y. Xiong",
    year=2023,
    venue="MLSys",
    url="https://arxiv.org/abs/2206.03382",
)
DEVIATIONS = ("trials in the order of a prediction", "one alignment for all candidates", "r = 0 with many experts too")


def alignment_of(shares: int, chunks: tuple[int, ...]) -> int:
    """Multiple of the capacity that every number of chunks in `chunks` can cut for every degree."""
    from math import lcm

    return shares * lcm(*chunks)


@dataclass(frozen=True, kw_only=True)
class Tutel(ExpertStrategy):
    """Options. degrees: r to try, None = all; chunks: overlap degrees; algorithms: of the exchanges; window: capacities that share a choice."""

    name: ClassVar[str] = "tutel"
    cite: ClassVar[Cite] = CITE

    degrees: tuple[int, ...] | None = None
    chunks: tuple[int, ...] = (1, 2, 4)
    algorithms: tuple[str, ...] = ("linear", "2dh")
    window: int = 128

    def plan(self, problem: ExpertProblem) -> ExpertPlan:
        """Raises: UsageError for degrees that the layer does not have, and for chunks out of range."""
        shape = problem.shape
        if not self.chunks or not all(1 <= d <= MAX_CHUNKS for d in self.chunks):
            raise UsageError(f"must be 1..{MAX_CHUNKS}, got {list(self.chunks)}", where="chunks")
        if not self.algorithms or self.window < 1:
            raise UsageError("needs an algorithm and a window of at least 1", where="tutel")
        for r in self.degrees or ():
            shape.require(Choice(r, 1, "linear"), shape.shares)
        # Without tokens to send there is nothing to overlap; one algorithm gathers.
        found = [
            Choice(r, d, a)
            for r, d, a in product(self.degrees or shape.degrees, self.chunks, self.algorithms)
            if r or d == self.chunks[0] == min(self.chunks)
        ]
        if shape.ranks == 1:
            found = [c for c in found if c.degree and c.algorithm == self.algorithms[0]]
        options = asdict(self) | {"degrees": sorted({c.degree for c in found})}
        return ExpertPlan(candidates=tuple(found), strategy=self.name, window=self.window, options=options)
