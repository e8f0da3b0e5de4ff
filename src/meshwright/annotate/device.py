"""Whose work kernels, copies and fills on a device are: that of the operator that launched them, by correlation ids."""

from __future__ import annotations

import numpy as np

from ..trace.launching import launched
from ..trace.trace import I64, Trace
from .labels import Evidence, Labels
from .slices import Units
from .spans import ModuleSpans
from .stages import stage_at

__all__ = ["label_device"]


def label_device(trace: Trace, units: Units, labels: Labels, spans: ModuleSpans | None) -> None:
    """Copy the labels of the launching operator's unit; by the external id where there is no correlation. What was launched outside operators (a
    CUDA graph) is of the stage under way at its launch, and of the module whose span is around it.

    A kernel keeps its operator's evidence: the link is exact, as the module is where the operator's is.
    """
    kernels = np.flatnonzero(units.kernel)
    if not len(kernels):
        return
    calls = np.flatnonzero(units.runtime)
    found, place = launched(trace, calls, kernels, trace.correlation)
    call = np.full(len(kernels), -1, np.int64)
    call[place[::-1]] = found[::-1]  # the first of several
    launcher = np.where(call >= 0, units.head[np.maximum(call, 0)], -1).astype(np.int64)
    open_ = np.flatnonzero(launcher < 0)
    operator = _matched(trace.external_id, np.flatnonzero(units.operator), kernels[open_])
    launcher[open_] = np.where(operator >= 0, units.head[np.maximum(operator, 0)], -1)
    known = launcher >= 0
    rows, by = kernels[known], launcher[known]
    for column in (labels.stage, labels.module, labels.evidence, labels.operator, labels.step, labels.recompute):
        column[rows] = column[by]
    _share(units, labels, kernels, found, place)
    labels.shares.update({int(row): labels.shares[int(head)] for row, head in zip(rows, by, strict=True) if int(head) in labels.shares})
    labels.evidence[kernels[~known]] = Evidence.NONE
    alone = ~known & (call >= 0)
    rows, by = kernels[alone], call[alone]
    labels.stage[rows], labels.step[rows] = stage_at(trace, units, labels, trace.start_ns[by])
    labels.evidence[rows] = Evidence.STRUCTURAL
    if spans is not None:
        labels.module[rows] = spans.module[by]
        labels.evidence[rows[spans.module[by] >= 0]] = Evidence.EXACT


def _share(units: Units, labels: Labels, kernels: I64, found: I64, place: I64) -> None:
    """Kernels whose number several launches have are shared by the modules of all, in equal parts."""
    several = np.flatnonzero(np.bincount(place, minlength=len(kernels)) > 1)
    for i in several.tolist():
        heads = units.head[found[place == i]]
        owners = np.where(heads >= 0, labels.module[np.maximum(heads, 0)], -1).tolist()
        labels.shares[int(kernels[i])] = tuple((int(m), owners.count(m)) for m in dict.fromkeys(owners))


def _matched(ids: I64, sources: I64, wanted: I64) -> I64:
    """For each row of `wanted` the first of `sources` with the same positive id, or -1."""
    usable = sources[ids[sources] > 0]
    order = usable[np.argsort(ids[usable], kind="stable")]
    if not len(order):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(ids[order], ids[wanted]), len(order) - 1)
    return np.where((ids[order[at]] == ids[wanted]) & (ids[wanted] > 0), order[at], -1)
