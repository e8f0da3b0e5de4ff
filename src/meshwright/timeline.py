"""A timeline: spans, counters and flows, the same for a simulation and for a real run.

Spans of a program's steps carry the step id and iteration, so that a prediction and a measurement of the same program join
on (rank, step, iteration). Columns, not objects: a million spans are a handful of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .notebook_repr import repr_html

__all__ = ["Spans", "Timeline", "Transfers"]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Equal-length columns. `step` is -1 for spans that belong to no program step (data loading, framework)."""

    rank: NDArray[np.int32]
    lane: NDArray[np.int32]
    step: NDArray[np.int32]
    iteration: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    name: Sequence[str] = ()  # one per span, or empty: then the step's own name is shown
    phase: Sequence[str] = ()  # "forward" | "backward" | "tensor-parallel" | "pipeline" | "gradient" | "optimizer" | ...

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Which message was on which link when: one row per message and link it passed, by link, then start."""

    links: Sequence[str]  # names
    rate_Bps: NDArray[np.float64]  # per name
    link: NDArray[np.int32]  # per row: index of the name
    step: NDArray[np.int32]  # that sent it
    iteration: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.link)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`origin` says whether it happened or would happen; `run_fabric` names the fabric whose times these are."""

    origin: Literal["simulated", "measured"]
    run_fabric: str
    spans: Spans
    makespan_s: float
    memory_peak_bytes: Sequence[int] = ()  # per rank
    link_busy_s: Mapping[str, float] = field(default_factory=dict)
    transfers: Transfers | None = None  # where they were asked for
    counters: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)  # name -> (t, value)
    critical_path: Sequence[tuple[int, int]] = ()  # (step, iteration) from first to last
    slack_s: NDArray[np.float64] | None = None  # per step: how much later it may end without moving the makespan
    attributes: Mapping[str, Any] = field(default_factory=dict)
    _repr_html_ = repr_html
