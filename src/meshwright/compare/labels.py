"""Stages and modules of a trace's slices for the breakdown, by the annotation; where it knows nothing, by what the profiler wrote itself."""

from __future__ import annotations

import numpy as np

from ..annotate import Evidence, label
from ..annotate import Stage as Annotated
from ..annotate.stages import annotated_stage
from ..bottleneck.labels import Labels, own_labels
from ..bottleneck.lanes import Stage
from ..kernels.pieces import inherit
from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace

__all__ = ["annotated_labels"]

_STAGE = {
    Annotated.LOAD: Stage.DATA, Annotated.FORWARD: Stage.FORWARD, Annotated.LOSS: Stage.LOSS, Annotated.ZERO: Stage.OPTIMIZER,
    Annotated.BACKWARD: Stage.BACKWARD, Annotated.OPTIMIZER: Stage.OPTIMIZER, Annotated.OTHER: Stage.OTHER,
}  # fmt: skip


def annotated_labels(trace: Trace, tree: ModuleTree | None = None) -> Labels:
    """Labels of every slice. Without `tree` modules are those that the trace names."""
    own, found = own_labels(trace), label(trace, tree)
    said = found.labels.evidence != Evidence.NONE  # of heads of units; what lies in them is theirs
    of_stage = np.array([_STAGE[s] for s in Annotated], np.int32)
    stage = np.where(said, of_stage[found.labels.stage], np.int32(-1))
    told = annotated_stage(trace, found.units)  # what lies between units inside an annotation is of its stage, as the annotation has it
    stage = np.where((stage < 0) & (told >= 0), of_stage[np.maximum(told, 0)], stage).astype(np.int32)
    known = np.where(said, found.labels.module, np.int32(-1)).astype(np.int32)
    inherit(trace.parent, stage)
    inherit(trace.parent, known)
    stage = np.where(stage <= Stage.OTHER, own.stage, stage).astype(np.int8)
    if found.tree is None:
        return Labels(stage=stage, module=own.module, modules=own.modules)
    paths = {"": 0, **{m.path: i + 1 for i, m in enumerate(found.tree.modules) if m.path}}
    number = np.array([paths[m.path] for m in found.tree.modules], np.int32)
    by_name = np.array([paths.setdefault(m, len(paths) + 1) for m in own.modules], np.int32)
    module = np.where(known >= 0, number[np.maximum(known, 0)], by_name[own.module]).astype(np.int32)
    table = [""] * (max(paths.values()) + 1)
    for path, i in paths.items():
        table[i] = path
    kinds = {m.path: m.kind for m in found.tree.modules}
    return Labels(stage=stage, module=module, modules=tuple(table), kinds=kinds)
