"""What a real run left behind, as timelines on one clock and figures per rank: the other side of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..timeline import Timeline

__all__ = ["Measured"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run: one Timeline per recorded training step (spans of all ranks, seconds from the step's start), and figures per rank."""

    steps: Sequence[Timeline]
    step_s: Sequence[float]  # of all steps
    losses: Sequence[float]
    memory_peak_bytes: Sequence[int]  # peak of live tensor storage
    rss_peak_bytes: Sequence[int]
    cpu_s: Sequence[float]  # processor seconds of one step, mean over steps, all threads of the rank
    run_fabric: str
    pacing: str
    others_share: float  # share of the machine's cores that other programs used
    notes: Sequence[str] = ()
