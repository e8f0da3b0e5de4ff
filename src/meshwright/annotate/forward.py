"""Whose work forward operators are: by the trace's module slices, else by the captured sequence, else by the module tree, else by names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace
from .captured import Aligned, CapturedSequence
from .compiled import CompiledSequence
from .labels import Evidence, Labels, Stage
from .repeated import gradients_of
from .slices import Units
from .spans import ModuleSpans
from .stages import Stretch
from .structural import StructuralMatch

__all__ = ["label_forward"]


def label_forward(
    trace: Trace, units: Units, stretches: Sequence[Stretch], labels: Labels, tree: ModuleTree | None, spans: ModuleSpans | None
) -> None:  # fmt: skip
    """Divide the stretches into what comes before the model, forward and loss, and name the modules.

    `labels.operator` is filled wherever a captured sequence fits, also beside better evidence.
    """
    captured = CapturedSequence(tree) if tree is not None and tree.operators else None
    sequence = CompiledSequence(tree) if captured is not None and tree is not None and units.compiled.any() else None
    structural = StructuralMatch(tree) if tree is not None else None
    gradients = None  # looked up where a tree is all there is
    loss = np.array(["loss" in n.lower() for n in trace.names], bool)
    for stretch in stretches:
        rows = stretch.rows
        if sequence is not None and units.compiled[rows].any():
            first, last = sequence.label(trace, rows, labels, Stage.FORWARD)
            if first >= 0:
                labels.give(rows[:first], stage=Stage.LOAD, evidence=Evidence.STRUCTURAL)
                labels.give(rows[last + 1 :], stage=Stage.LOSS if stretch.trains else Stage.OTHER, evidence=Evidence.CAPTURED)
                continue
        names = [trace.name_of(i) for i in rows.tolist()] if captured or structural else []
        aligned = captured.align(captured.numbers(names)) if captured else None
        if aligned is not None:
            labels.operator[rows] = aligned.operator
        if spans is not None and (spans.module[rows] >= 0).any():
            _by_spans(rows, labels, spans)
        elif aligned is not None:
            _divide(rows, labels, aligned, loss[trace.name[rows]], stretch, Evidence.CAPTURED)
        else:
            if gradients is None:
                gradients = gradients_of(trace, units)
            found = structural.align(names, gradients[rows]) if structural else None
            if found is not None:
                _divide(rows, labels, found, loss[trace.name[rows]], stretch, Evidence.STRUCTURAL)
            else:
                _by_names(rows, labels, loss[trace.name[rows]], stretch)


def _by_spans(rows: NDArray[np.int64], labels: Labels, spans: ModuleSpans) -> None:
    module = spans.module[rows]
    inside = np.flatnonzero(module >= 0)
    first, last = int(inside[0]), int(inside[-1])
    labels.give(rows[:first], stage=Stage.LOAD, evidence=Evidence.STRUCTURAL)
    labels.give(rows[first : last + 1], stage=Stage.FORWARD, evidence=Evidence.EXACT, module=module[first : last + 1])
    labels.give(rows[last + 1 :], stage=Stage.LOSS, evidence=Evidence.EXACT)
    # A loss that is a module of its own, outside the model.
    kinds = Counter(spans.tree.modules[m].kind for m in module[inside].tolist())
    for kind in [k for k in kinds if k.endswith("Loss")]:
        mine = np.array([m >= 0 and spans.tree.modules[m].kind == kind for m in module.tolist()], bool)
        labels.give(rows[mine], stage=Stage.LOSS, evidence=Evidence.EXACT)


def _divide(rows: NDArray[np.int64], labels: Labels, aligned: Aligned, loss: NDArray[np.bool_], stretch: Stretch, evidence: Evidence) -> None:
    first, last = aligned.first, aligned.last
    if evidence is Evidence.STRUCTURAL and stretch.trains and loss[first:].any():
        last = min(last, first + int(loss[first:].argmax()) - 1)
    labels.give(rows[:first], stage=Stage.LOAD, evidence=Evidence.STRUCTURAL)
    labels.give(rows[first : last + 1], stage=Stage.FORWARD, evidence=evidence, module=aligned.module[first : last + 1])
    labels.give(rows[last + 1 :], stage=Stage.LOSS if stretch.trains else Stage.OTHER, evidence=evidence)


def _by_names(rows: NDArray[np.int64], labels: Labels, loss: NDArray[np.bool_], stretch: Stretch) -> None:
    first = int(loss.argmax()) if stretch.trains and loss.any() else len(rows)
    labels.give(rows[:first], stage=Stage.FORWARD, evidence=Evidence.FUZZY)
    labels.give(rows[first:], stage=Stage.LOSS, evidence=Evidence.FUZZY)
