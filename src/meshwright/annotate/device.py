"""Whose work kernels, copies and fills on a device are: that of the operator that launched them, by correlation ids."""

from __future__ import annotations

import numpy as np

from ..trace import Trace
from .labels import Evidence, Labels
from .slices import Units

__all__ = ["label_device"]


def label_device(trace: Trace, units: Units, labels: Labels) -> None:
    """Copy the labels of the launching operator's unit; by the external id where there is no correlation.

    A kernel keeps its operator's evidence: the link is exact, as the module is where the operator's is.
    """
    kernels = np.flatnonzero(units.kernel)
    if not len(kernels):
        return
    launcher = np.full(len(kernels), -1, np.int64)
    launches = np.flatnonzero(units.runtime & (units.head >= 0))
    for key, sources in (("correlation", launches), ("external_id", np.flatnonzero(units.operator))):
        ids = getattr(trace, key)
        usable = sources[ids[sources] > 0]
        order = usable[np.argsort(ids[usable], kind="stable")]
        open_ = np.flatnonzero((launcher < 0) & (ids[kernels] > 0))
        if not len(order) or not len(open_):
            continue
        wanted = ids[kernels[open_]]
        at = np.minimum(np.searchsorted(ids[order], wanted), len(order) - 1)
        fits = ids[order[at]] == wanted
        launcher[open_[fits]] = units.head[order[at[fits]]]
    known = launcher >= 0
    rows, by = kernels[known], launcher[known]
    for column in (labels.stage, labels.module, labels.evidence, labels.operator, labels.step, labels.recompute):
        column[rows] = column[by]
    labels.shares.update({int(row): labels.shares[int(head)] for row, head in zip(rows, by, strict=True) if int(head) in labels.shares})
    labels.evidence[kernels[~known]] = Evidence.NONE
