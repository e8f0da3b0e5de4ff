"""gTopk: selections are merged in pairs up a binomial tree, each merge keeping the k largest; the root's are broadcast down again.

Cite: S. Shi, Q. Wang, K. Zhao, Z. Tang, Y. Wang, X. Huang, X. Chu, "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks" (ICDCS 2019).
Left open by the paper: what becomes of entries that a merge drops after others were added to them. Our answer: the partial sum goes into the residual
of the rank that merged; every rank clears all that it sent. So no mass is lost, whatever merges drop.
Invariant: the root sends and receives 2k log P words, one after the other. Cost: 2 log P rounds, two messages each (a count, then entries).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar

from ....cite import Cite
from ....program.builder import StepRef
from .phases import Phases, planned
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy

__all__ = ["CITE", "DEVIATIONS", "GTopk"]

CITE = Cite(
    key="shi2019gtopk", title="A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
    authors="Shaohuai Shi, Qiang Wang, Kaiyong Zhao, Zhenheng Tang, Yuxin Wang, Xiang Huang, Xiaowen Chu", year=2019, venue="ICDCS 2019",
)  # fmt: skip
DEVIATIONS = ("dropped sums return to the residual of who dropped them",)


@dataclass(frozen=True, kw_only=True)
class GTopk(SparseStrategy):
    """Options. period: steps between exact thresholds."""

    name: ClassVar[str] = "gtopk"
    cite: ClassVar[Cite] = CITE

    kinds: ClassVar[tuple[str, ...]] = ("steady", "thresholds")

    period: int = 32

    def plan(self, problem: SparseProblem) -> SparsePlan:
        words = 2 * problem.k * ceil(log2(len(problem.ranks))) * problem.entry_bytes / 8  # the root's
        return planned(self, problem, words)

    def phases(self, sizes: SparseSizes, kind: str) -> Phases:
        n, k = sizes.ranks, sizes.k
        p = Phases(sizes, "gtopk", regions=1)
        kept = p.select(exact="thresholds" in kind)
        p.headers()
        counts = [p.b.buffer(r, chunks=1, chunk_bytes=8, name=f"count:{r}") for r in range(n)]

        def send(source: int, target: int, into: int, name: str, sent: list[StepRef], taken: list[StepRef]) -> StepRef:
            """A count, then so many entries."""
            counted = p.move(source, target, (counts[source], 0), (counts[target], 0), 1, -1, sent=sent, taken=taken).got
            size = p.symbol(f"{name} {source}->{target}", k, k)
            return p.move(source, target, (kept[source], 0), (into, 0), 1, size, sent=sent, taken=[counted]).got

        distance = 1
        while distance < n:
            for r in range(0, n - distance, 2 * distance):
                other, merged = p.room(r, 1, k, f"other{distance}"), p.room(r, 1, 2 * k, f"merged{distance}")
                got = send(r + distance, r, other, "up", p.ready[r + distance], p.ready[r])
                p.ready[r] = [p.op(r, ("tree", "merge"), [(kept[r], 0, 1), (other, 0, 1)], [(merged, 0, 1)], 48 * k, after=[*p.ready[r], got])]
                kept[r] = merged
            distance *= 2
        while distance > 1:
            distance //= 2
            for r in range(0, n - distance, 2 * distance):
                child = r + distance
                result = p.room(child, 1, k, "below")
                got = send(r, child, result, "down", p.ready[r], p.ready[child])
                kept[child], p.ready[child] = result, [got]
        for r in range(n):
            p.op(r, ("result", "decode"), [(kept[r], 0, 1)], [(p.outputs[r], 0, 1)], 24 * k, after=p.ready[r])
        p.promise()
        return p
