"""What a rank leaves behind, and which plan it belongs to. Without torch: a run is read and compared where none is installed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from ...plan.plan import Plan, TrainingLayout

__all__ = ["ModuleRun", "RankRecording", "RestartBytes", "StepRecord", "expert_loads", "numbers", "plan_identity"]


class RestartBytes(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Counted by one rank that resumed. `reused`: read from its device's own files; `stored`: from storage that all ranks share; `verified`: read
    once more to check digests, not among the others."""

    needed_bytes: int = 0
    reused_bytes: int = 0
    stored_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    verified_bytes: int = 0


class ModuleRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive calls of one innermost module in a segment, or their backward. `module`: its path, "" at the root, "loss" for the loss."""

    segment: str
    module: str
    backward: bool


class StepRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One training step on one rank; seconds on the run's clock. `starts_s`, `ends_s` by position in the recording's `order` (or empty).

    Data is loaded from `start_s` to `data_end_s`. `marks`: numbers of the module runs in the order in which they began, at `marks_s`.
    """

    step: int
    start_s: float
    end_s: float
    cpu_s: float  # of the thread that walks the program
    process_cpu_s: float  # of the process: the transport's threads too
    profiled: bool = False  # slowed by measuring memory
    traced: bool = False  # slowed by torch.profiler
    data_end_s: float | None = None
    shape: int = 0  # of a plan of several: 0 the plan's own, the largest
    evaluated_s: float | None = None  # an evaluation after this step ended then
    starts_s: list[float] = []
    ends_s: list[float] = []
    marks: list[int] = []
    marks_s: list[float] = []


class RankRecording(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str = "meshwright.recording"
    version: int = 1
    rank: int
    host: str
    clock: str = ""  # equal on ranks whose times are on one clock; "" in older recordings
    order: list[int]  # program steps in the order in which they were walked
    steps: list[StepRecord]
    losses: list[float | None] = []  # of this replica, on ranks that compute the loss
    evaluations: list[tuple[int, float | None]] = []  # (steps done, loss on the evaluation data), likewise
    evaluation_batches: int = 0  # global batches of an evaluation
    memory_peak_bytes: int = 0  # live tensor storage
    rss_peak_bytes: int = 0
    parameters_bytes: int = 0
    restart: RestartBytes | None = None
    module_runs: list[ModuleRun] = []
    expert_rows: dict[str, list[list[int]]] = {}  # by layer, step by step, rows of every expert from this rank's tokens
    expert_dropped: dict[str, int] = {}  # by layer, choices of this rank's tokens that found no place in a buffer, in all steps


def numbers(losses: Iterable[float | None]) -> list[float]:
    """Losses as a document gives them back: JSON has no number that is not finite, and None is what is left of one."""
    return [math.nan if x is None else x for x in losses]


class _Counted(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def expert_rows(self) -> dict[str, list[list[int]]]: ...


def expert_loads(recordings: Sequence[_Counted], layout: TrainingLayout) -> dict[str, list[list[int]]]:
    """By layer and step, rows that every expert got of all ranks' tokens. Tensor-parallel ranks route the same tokens: the first counts."""
    found: dict[str, list[list[int]]] = {}
    for r in recordings:
        if layout.coordinates(r.rank)[2]:
            continue
        for layer, steps in r.expert_rows.items():
            before = found.get(layer, [[0] * len(rows) for rows in steps])
            found[layer] = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(before, steps, strict=False)]
    return found


def plan_identity(plan: Plan) -> str:
    """Digest of everything that decides a run's numbers: model, optimizer, seed, layout and programs. Costs and fabrics do not."""
    parts = [
        plan.job.get("training"), plan.job.get("graph_fingerprint"), plan.layout, [c.program for c in plan.cycle], sorted(plan.programs), plan.seed,
        *((s.inputs, s.layout) for s in plan.shapes),
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
