"""How gradients of data replicas are summed and what of the training state they divide: buckets, and segments cut so that buckets get ready one
after the other.

Cite: see CITE (levels); buckets in the order in which backward completes them, the last one small, are those of Li et al., "PyTorch Distributed"
(VLDB 13(12), 2020).
Left open by the papers: where a stage may be cut. Our answer: between any two operators with single results; of the places at which a bucket
is about full, the one that the fewest bytes cross.
Deviations: a bucket ends at a cut, so it may be larger than asked for where one operator holds more; a parameter that several buckets' operators
use is a bucket of its own if it fills a quarter of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...cite import Cite
from ...errors import UsageError
from ...plan.plan import GradientBucket, Segment

__all__ = ["CITE", "PLAIN", "DataSharding", "bucket_size", "cut_run", "gradient_buckets"]

CITE = Cite(
    key="rajbhandari2020zero",
    title="ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    authors="S. Rajbhandari, J. Rasley, O. Ruwase, Y. He",
    year=2020,
    venue="SC '20, arXiv:1910.02054",
)
# Bytes of one bucket, unless another size is asked for: what PyTorch's DDP takes.
MAX_BUCKET_BYTES = 25 << 20
# Buckets of the stage with the most parameters, at least: with fewer, too little is gathered or reduced while the stage computes.
MIN_BUCKETS = 4
# Share of a bucket beyond full up to which a better place to cut is looked for.
MAX_OVERFILL_SHARE = 0.5


@dataclass(frozen=True, order=True)
class DataSharding:
    """`level` 0 to 3, see `TrainingLayout`; `bucket_bytes` 0: chosen; `copied`: the schedule will have copies of the stages, which sum gradients
    where there are no other replicas; `whole`: what is divided are whole parameters, for optimizers that look at all of one. Raises: UsageError."""

    level: int = 0
    overlap: bool = False
    bucket_bytes: int = 0
    copied: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if self.level not in (0, 1, 2, 3):
            raise UsageError(f"the sharding level must be 0, 1, 2 or 3, got {self.level}", where="--zero")
        if self.bucket_bytes < 0:
            raise UsageError(f"a bucket must have at least 1 byte, got {self.bucket_bytes}", where="--bucket")

    @property
    def cuts(self) -> bool:
        """Whether stages are cut where buckets end."""
        return self.overlap or self.level > 1

    def __str__(self) -> str:
        return f"ZeRO {self.level}, {'overlapped' if self.overlap else 'not overlapped'}"


PLAIN = DataSharding()


def bucket_size(sharding: DataSharding, stage_bytes: Sequence[int], least: int) -> int:
    """Bytes up to which buckets are filled. `least`: of one that is chosen here."""
    if not sharding.cuts:
        return 1 << 62
    return sharding.bucket_bytes or max(1, least, min(MAX_BUCKET_BYTES, -(-max(stage_bytes, default=1) // MIN_BUCKETS)))


def cut_run(parameter_bytes: Sequence[int], crossing_bytes: Sequence[int], allowed: Sequence[bool], size: int) -> list[int]:
    """Positions 0 < i < n at which a run of n operators is cut, so that each part but the last fills a bucket.

    `parameter_bytes[i]`: of operator i, counted where first used; `crossing_bytes[i]`, `allowed[i]`: of the border before operator i.
    """
    cuts: list[int] = []
    start, n = 0, len(parameter_bytes)
    while start < n:
        filled, at = 0, start
        while at < n and filled < size:
            filled += parameter_bytes[at]
            at += 1
        end, more = at, filled
        while end < n and more <= size * (1 + MAX_OVERFILL_SHARE):
            more += parameter_bytes[end]
            end += 1
        choices = [i for i in range(at, end + 1) if i < n and allowed[i]]
        if not choices:
            choices = [i for i in range(end, n) if allowed[i]][:1]
        if not choices:
            return cuts
        start = min(choices, key=lambda i: (crossing_bytes[i], i))
        if not sum(parameter_bytes[start:]):
            return cuts  # what is left has nothing to sum
        cuts.append(start)
    return cuts


def gradient_buckets(stage: int, segments: Sequence[Segment], bytes_of: Mapping[str, int], shared: frozenset[str], size: int) -> list[GradientBucket]:
    """A stage's buckets. `segments` in forward order; `bytes_of`: trainable parameters; `shared`: those that other stages use too."""
    first: dict[str, str] = {}  # the segment whose backward is the last to add to it
    users: dict[str, int] = {}
    for s in segments:
        for p in s.params:
            first.setdefault(p, s.key)
            users[p] = users.get(p, 0) + 1
    mine = [p for p in first if p in bytes_of and p not in shared]
    alone = [p for p in mine if users[p] > 1 and size < 1 << 62 and 4 * bytes_of[p] >= size]
    found: list[GradientBucket] = []
    filling: list[str] = []
    for s in reversed(segments):
        filling += [p for p in mine if first[p] == s.key and p not in alone]
        if sum(bytes_of[p] for p in filling) >= size:
            found.append(GradientBucket(stage=stage, params=tuple(filling)))
            filling = []
        found += [GradientBucket(stage=stage, params=(p,)) for p in alone if first[p] == s.key]
    return found + ([GradientBucket(stage=stage, params=tuple(filling))] if filling else [])
