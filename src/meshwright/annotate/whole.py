"""A trace, labelled: every slice with its step, stage and module, and the time folded into a tree."""

from __future__ import annotations

import msgspec
import numpy as np

from ..cite import Cite
from ..kernels.stages import stage
from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace
from .backward import label_backward
from .device import label_device
from .fold import fold
from .forward import label_forward
from .labels import Evidence, Labels
from .result import Annotation
from .segments import segments
from .slices import Units, units
from .spans import ModuleSpans, module_spans
from .stages import find_stages, find_steps, stage_at

__all__ = ["CITE", "Labelled", "annotate", "label"]

CITE = Cite(
    key="snider2023hotline", title="Hotline Profiler: Automatic Annotation and A Multi-Scale Timeline for Visualizing Time-Use in DNN Training",
    year=2023, venue="MLSys",
)  # fmt: skip


class Labelled(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of every slice before time is folded; `tree`: the modules, given or named by the trace."""

    units: Units
    labels: Labels
    tree: ModuleTree | None
    spans: ModuleSpans | None


def label(trace: Trace, tree: ModuleTree | None = None) -> Labelled:
    """Label every slice. Without `tree`, modules are those that the trace itself names, if any."""
    found = units(trace)
    labels = Labels.blank(trace)
    spans = module_spans(trace, tree)
    known = spans.tree if spans is not None else tree
    stretches = find_stages(trace, found, labels, None if spans is None else spans.module)
    label_forward(trace, found, stretches, labels, known, spans)
    if tree is not None and tree.operators and spans is not None:
        # Which numbered instance is which module is settled better by what the alignment says of the operators inside.
        aligned = np.where(labels.operator >= 0, np.array([o.module for o in tree.operators], np.int32)[np.maximum(labels.operator, 0)], -1)
        spans = module_spans(trace, tree, aligned.astype(np.int32))
        label_forward(trace, found, stretches, labels, known, spans)
    label_backward(trace, found, labels, known, spans)
    _inner(trace, found, labels)
    label_device(trace, found, labels, spans)
    return Labelled(units=found, labels=labels, tree=known, spans=spans)


@stage("finding modules in the trace")
def annotate(trace: Trace, tree: ModuleTree | None = None) -> Annotation:
    """Label every slice and fold the time into a tree."""
    told = label(trace, tree)
    found, labels, known, spans = told.units, told.labels, told.tree, told.spans
    device_track = _device_tracks(trace, found)
    cut = segments(trace, found.ignored)
    root = fold(trace, found, labels, cut, known, spans, find_steps(trace)[0], device_track)
    shown = [t for t in range(len(trace.tracks)) if not found.ignored[trace.rows(t)].all()]
    windows = {t: int(cut.length_ns[cut.track == t].sum()) for t in shown}
    return Annotation(trace=trace, tree=known, units=found, labels=labels, root=root, track_ns=windows)


def _inner(trace: Trace, found: Units, labels: Labels) -> None:
    """Units inside others take their step and stage; collectives on threads of their own take those under way when they begin."""
    outermost = found.outer.copy()
    while True:
        further = np.where(outermost >= 0, found.outer[np.maximum(outermost, 0)], -1)
        if (further < 0).all():
            break
        outermost = np.where(further >= 0, further, outermost)
    nested = found.rows[outermost[found.rows] >= 0]
    labels.step[nested] = labels.step[outermost[nested]]
    alone = found.rows[(outermost[found.rows] < 0) & (labels.step[found.rows] < 0) & ~found.kernel[found.rows]]
    stage, step = stage_at(trace, found, labels, trace.start_ns[alone])
    labels.stage[alone], labels.step[alone] = stage, step
    exchanging = nested[found.communication[nested]]
    labels.stage[exchanging] = labels.stage[outermost[exchanging]]
    labels.evidence[found.rows[found.communication[found.rows]]] = Evidence.EXACT  # a collective says that it is one


def _device_tracks(trace: Trace, found: Units) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([bool(found.kernel[trace.rows(t)].any()) for t in range(len(trace.tracks))], bool)
