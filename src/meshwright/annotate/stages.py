"""The stages of a training loop: load data, forward, loss, zero gradients, backward, optimizer; and where one step ends and the next begins.

Backward is told by the autograd engine's own slices, loading, zeroing and the optimizer by torch's annotations; what remains between is
forward and loss, told apart by modules where those are known. `ProfilerStep#k` slices are steps; without them a step ends where
new forward work follows an optimizer or a backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kernels.pieces import places
from ..trace.trace import Trace
from ..trace.vocabulary import LOADING, STEP
from .labels import Evidence, Labels, Stage
from .slices import Units, around

__all__ = ["Stretch", "annotated_stage", "find_stages", "find_steps", "stage_at"]

_UNKNOWN = -1  # in place of a `Stage`
_ANNOTATED = {
    Stage.LOAD: LOADING,
    Stage.ZERO: re.compile(r"^Optimizer\.zero_grad|^\W*zero[ _-]?grad\w*\W*$", re.IGNORECASE),
    Stage.OPTIMIZER: re.compile(r"^Optimizer\.step|^\W*optim\w*([ _-]?step)?\W*$", re.IGNORECASE),
    Stage.BACKWARD: re.compile(r"^\W*(backward|bwd)([ _-]?(pass|step))?\W*$", re.IGNORECASE),
    Stage.FORWARD: re.compile(r"^DistributedDataParallel\.forward|^\W*(forward|fwd)([ _-]?(pass|step))?\W*$", re.IGNORECASE),
    Stage.LOSS: re.compile(r"^\W*((calc\w*|compute)?[ _-]?loss|criterion)\W*$", re.IGNORECASE),
}
_SEEDS_BACKWARD = re.compile(r"^aten::(ones_like|_local_scalar_dense)$")


class Stretch(msgspec.Struct, frozen=True):
    """Consecutive operators of one step that may be forward and loss; `trains`: backward follows."""

    rows: NDArray[np.int64]
    trains: bool


def find_steps(trace: Trace) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """(numbers, starts in ns) of the profiler's steps in order of time; empty if it did not mark any."""
    matches = [STEP.match(name) for name in trace.names]
    rows = np.flatnonzero(trace.where_name(np.array([m is not None for m in matches], bool)) & ~trace.in_category("gpu_user_annotation"))
    number = np.array([int(m[1]) if m else -1 for m in matches], np.int64)[trace.name[rows]] if len(rows) else rows
    first: dict[int, int] = {}
    for start, said in zip(trace.start_ns[rows].tolist(), number.tolist(), strict=True):
        first[said] = min(start, first.get(said, start))
    found = {start: said for said, start in first.items()}
    starts = sorted(found)
    return tuple(found[s] for s in starts), np.array(starts, np.int64)


def find_stages(trace: Trace, units: Units, labels: Labels, module: NDArray[np.int32] | None) -> list[Stretch]:
    """Fill in the stages that the trace itself tells, and the steps; what is left to divide into forward and loss is returned.

    `module`: per slice, by the trace's own module slices (None: it has none).
    """
    rows = units.rows[(units.outer[units.rows] < 0) & ~units.kernel[units.rows] & ~units.communication[units.rows]]
    told = annotated_stage(trace, units)[rows]
    kind = np.where(units.evaluate[rows], int(Stage.BACKWARD), told)
    if module is not None:
        kind = np.where((kind == _UNKNOWN) & (module[rows] >= 0), int(Stage.FORWARD), kind)
    _, starts = find_steps(trace)
    step = np.searchsorted(starts, trace.start_ns[rows], side="right").astype(np.int32) - 1 if len(starts) else np.zeros(len(rows), np.int32)
    runs = list(_runs(kind, step))
    if not len(starts):
        _count_steps(runs, kind, step)
    labels.step[rows] = step
    fixed = np.isin(kind, [Stage.LOAD, Stage.ZERO, Stage.BACKWARD, Stage.OPTIMIZER])
    for stage in (Stage.LOAD, Stage.ZERO, Stage.BACKWARD, Stage.OPTIMIZER):
        labels.give(rows[kind == stage], stage=stage, evidence=Evidence.EXACT)
    stretches = []
    trains = set(step[kind == Stage.BACKWARD].tolist())
    befores = _neighbours(runs, kind, step, fixed)
    afters = _neighbours(runs[::-1], kind, step, fixed)[::-1]
    for (low, high), before, after in zip(runs, befores, afters, strict=True):
        if fixed[low]:
            continue
        part = rows[low:high]
        known = (kind[low:high] != _UNKNOWN).any()
        if after == Stage.BACKWARD or known or int(step[low]) not in trains:
            if after == Stage.BACKWARD and before == Stage.BACKWARD and not known and (trace.sequence[part] < 0).all():
                labels.give(part, stage=Stage.BACKWARD, evidence=Evidence.STRUCTURAL)  # what hooks run between two nodes
                continue
            seeds = _seed(trace, part) if after == Stage.BACKWARD else 0
            labels.give(part[len(part) - seeds :], stage=Stage.BACKWARD, evidence=Evidence.STRUCTURAL)
            if len(part) > seeds:
                stretches.append(Stretch(part[: len(part) - seeds], after == Stage.BACKWARD))
        elif before == Stage.BACKWARD and after == Stage.OPTIMIZER:
            labels.give(part, stage=Stage.OPTIMIZER, evidence=Evidence.STRUCTURAL)  # clipping of gradients
    return stretches


def annotated_stage(trace: Trace, units: Units) -> NDArray[np.int64]:
    """Stage that torch's or the user's annotation around each slice names, or the slice itself if it is one; the innermost one; -1 for none."""
    may = (units.annotation | ~units.operator) & ~units.ignored & ~trace.in_category("python_function")
    stage_of_name = np.full(len(trace.names), _UNKNOWN, np.int64)
    for i in np.flatnonzero(np.bincount(trace.name[may])).tolist():  # not the long ones of kernels
        for stage, pattern in _ANNOTATED.items():
            if pattern.search(trace.names[i]):
                stage_of_name[i] = stage
    marks = may & (stage_of_name[trace.name] >= 0)
    nearest = np.where(marks, np.arange(len(trace)), around(trace, marks))
    return np.where(nearest >= 0, stage_of_name[trace.name[np.maximum(nearest, 0)]], _UNKNOWN)


def _runs(kind: NDArray[np.int64], step: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Ranges of equal step in which either all is one fixed stage, or nothing is (forward, loss and unknown together)."""
    free = np.isin(kind, [_UNKNOWN, Stage.FORWARD, Stage.LOSS])
    group = np.where(free, _UNKNOWN, kind)
    if not len(kind):
        return
    change = np.flatnonzero((group[1:] != group[:-1]) | (step[1:] != step[:-1])) + 1
    bounds = [0, *change.tolist(), len(kind)]
    yield from pairwise(bounds)


def _neighbours(runs: list[tuple[int, int]], kind: NDArray[np.int64], step: NDArray[np.int32], fixed: NDArray[np.bool_]) -> list[int]:
    """The fixed stage of each step last met before every run, zeroing aside."""
    found, last, of_step = [], _UNKNOWN, -1
    for low, _ in runs:
        if step[low] != of_step:
            last, of_step = _UNKNOWN, int(step[low])
        found.append(last)
        if fixed[low] and kind[low] != Stage.ZERO:
            last = int(kind[low])
    return found


def _count_steps(runs: list[tuple[int, int]], kind: NDArray[np.int64], step: NDArray[np.int32]) -> None:
    """Number the steps of a trace without marks: loading or forward work after an optimizer (or, without one, after backward) begins one."""
    optimizes = bool((kind == Stage.OPTIMIZER).any())
    ends = Stage.OPTIMIZER if optimizes else Stage.BACKWARD
    now, over = 0, False
    for low, high in runs:
        stage = int(kind[low])
        if over and stage not in (Stage.ZERO, Stage.OPTIMIZER, Stage.BACKWARD):
            now, over = now + 1, False
        elif stage == ends:
            over = True
        step[low:high] = now


def _seed(trace: Trace, rows: NDArray[np.int64]) -> int:
    """How many of the last operators only begin backward: the gradient of the loss with respect to itself."""
    count = 0
    while count < min(2, len(rows)) and _SEEDS_BACKWARD.match(trace.name_of(int(rows[len(rows) - 1 - count]))):
        count += 1
    return count


def stage_at(
    trace: Trace, units: Units, labels: Labels, time_ns: NDArray[np.int64], until_ns: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Stage and step under way at some times: those of the last outermost operator of the host that began by then.

    With `until_ns`: those of the next one, where it begins before that.
    """
    rows = units.rows[(units.outer[units.rows] < 0) & ~units.kernel[units.rows] & (labels.evidence[units.rows] != Evidence.NONE)]
    if not len(rows):
        return np.full(len(time_ns), Stage.OTHER, np.int8), np.zeros(len(time_ns), np.int32)
    at = places(trace.start_ns[rows], time_ns, right=True) - 1
    if until_ns is not None:
        following = np.minimum(at + 1, len(rows) - 1)
        at = np.where(trace.start_ns[rows[following]] < until_ns, following, at)
    _, starts = find_steps(trace)
    step = np.searchsorted(starts, time_ns, side="right") - 1 if len(starts) else labels.step[rows[np.maximum(at, 0)]]
    stage = np.where(at >= 0, labels.stage[rows[np.maximum(at, 0)]], Stage.OTHER)
    return stage.astype(np.int8), np.asarray(step, np.int32)
