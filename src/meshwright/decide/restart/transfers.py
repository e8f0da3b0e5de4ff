"""Which byte comes from where: the own device first, then another rank, then storage.

Left open by elastic trainers: which of several ranks that hold the same part sends it. Our answer: one in the same server if there is one, of those
the one that has least to send so far. Every part is cut where sources change, so nothing is fetched twice.
Invariant: the pieces of a rank are disjoint and make up exactly what it needs, but for what is listed as lost. The result follows from the problem
alone, so every rank of a run works out the same table. Cost: O(ranks · tensors of a rank · files that hold one).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...cite import FOLKLORE, Cite
from ...errors import Infeasible
from ...plan.regions import Box, elements, intersection, minus
from .problem import STORAGE, LostPart, Piece, RestartProblem, Transfers, TransferStrategy

__all__ = ["NearestCopy", "plan_transfers", "require_complete"]


def plan_transfers(problem: RestartProblem) -> Transfers:
    made = _Transfers(problem)
    for rank, needs in enumerate(problem.needs):
        for tensor in sorted(needs):
            made.fill(rank, tensor, [box for box in needs[tensor] if elements([box])])
    return made.result()


class _Transfers:
    def __init__(self, problem: RestartProblem) -> None:
        self.problem = problem
        ranks = len(problem.needs)
        self.pieces: list[Piece] = []
        self.lost: list[LostPart] = []
        self.sent = [0] * ranks
        self.home = {file: tuple(r for d in devices if (r := problem.rank_of.get(d)) is not None) for file, devices in problem.homes.items()}

    def fill(self, rank: int, tensor: str, missing: list[Box]) -> None:
        """Own files, then other ranks', then storage."""
        holders = self.problem.holders.get(tensor, [])
        for file, region in holders:
            if missing and rank in self.home.get(file, ()):
                missing = self.take(rank, tensor, file, rank, region, missing)
        near = self.problem.servers[rank] if self.problem.servers else ""
        while missing:
            found = [
                (not near or self.problem.servers[source] != near, self.sent[source], source, file, region)
                for file, region in holders
                for source in self.home.get(file, ())
                if any(intersection(a, b) is not None for a in region for b in missing)
            ]
            if not found:
                break
            _, _, source, file, region = min(found, key=lambda x: x[:4])
            missing = self.take(rank, tensor, file, source, region, missing)
        for file, region in holders:
            if missing and file in self.problem.stored:
                missing = self.take(rank, tensor, file, STORAGE, region, missing)
        for box in missing:
            had = tuple(file for file, region in holders if any(intersection(held, box) is not None for held in region))
            self.lost.append(LostPart(rank, tensor, box, had))

    def take(self, rank: int, tensor: str, file: str, source: int, region: Iterable[Box], missing: list[Box]) -> list[Box]:
        """What is missing afterwards."""
        for held in region:
            for box in list(missing):
                common = intersection(held, box)
                if common is not None:
                    self.pieces.append(Piece(rank, tensor, common, file, source))
                    if source >= 0 and source != rank:
                        self.sent[source] += self.problem.size_bytes(tensor, common)
            missing = minus(missing, held)
        return missing

    def result(self) -> Transfers:
        p, ranks = self.problem, len(self.problem.needs)
        reused, received, stored = [0] * ranks, [0] * ranks, [0] * ranks
        links: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            size = p.size_bytes(piece.tensor, piece.box)
            kind = reused if piece.source == piece.rank else stored if piece.source == STORAGE else received
            kind[piece.rank] += size
            if piece.source != piece.rank:
                links[piece.source, piece.rank] = links.get((piece.source, piece.rank), 0) + size
        needed = tuple(sum(p.size_bytes(t, *region) for t, region in needs.items()) for needs in p.needs)
        return Transfers(
            pieces=tuple(self.pieces), lost=tuple(self.lost), needed_bytes=needed, reused_bytes=tuple(reused), received_bytes=tuple(received),
            stored_bytes=tuple(stored), sent_bytes=tuple(self.sent), links=dict(sorted(links.items())),
        )  # fmt: skip


def require_complete(problem: RestartProblem, found: Transfers, holder_names: Mapping[str, str]) -> None:
    """`holder_names`: file -> who had it, in words.

    Raises: Infeasible (exit 3) that names every tensor of which a part is lost, the part, and which replicas would have had it.
    """
    if not found.lost:
        return
    parts: dict[tuple[str, Box], LostPart] = {(x.tensor, x.box): x for x in found.lost}
    rows: list[dict[str, Any]] = [
        {
            "tensor": t, "range": [list(r) for r in box], "size_bytes": problem.size_bytes(t, box),
            "replicas": [holder_names.get(f, f) for f in x.files],
        }
        for (t, box), x in sorted(parts.items())
    ]  # fmt: skip
    replicas = sorted({name for row in rows for name in row["replicas"]})
    tensors = sorted({t for t, _ in parts})
    size = sum(problem.size_bytes(t, box) for t, box in parts)
    named = ", ".join(tensors[:4]) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
    had = f"only {' and '.join(replicas[:8])} had them" if replicas else "no file has them"
    raise Infeasible(
        f"{size} bytes of {len(tensors)} tensors are lost: {named}; {had}", where="checkpoint shards",
        hint="a checkpoint on shared storage (--checkpoint), or one of those replicas brought back, would supply them",
        data={"lost_bytes": size, "lost": rows[:4096], "replicas": replicas},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NearestCopy(TransferStrategy):
    """The own device's copy, then one in the same server, then any, then storage. No options."""

    name: ClassVar[str] = "nearest-copy"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, problem: RestartProblem) -> Transfers:
        return plan_transfers(problem)
