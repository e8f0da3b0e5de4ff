"""Whose work the kernels of a compiled graph are (`torch.compile`): one kernel may do several modules' work, and says only which operators it fuses.

Calls that Inductor leaves to a library (`aten::addmm`, `aten::convolution`) are anchors: their sequence is aligned with the captured
operators, inner ones too, and in backward with what those operators' gradients call, in reverse. A fused kernel lies between two anchors;
the captured operators between those that it names (`triton_poi_fused_add_gelu_1`) are the modules that share it, in equal parts per
operator: an estimate, marked as one. Where none of them is found there, it is the innermost module around both anchors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..trace.module_tree import ModuleTree
from ..trace.trace import Trace
from .captured import between
from .labels import Evidence, Labels, Stage

__all__ = ["FUSED", "CompiledSequence"]

FUSED = re.compile(r"(?:cpp|triton(?:_[a-z0-9]+)?)_fused_(.*?)(?:_\d+)?$")
_TWICE = {"addmm": "mm", "mm": "mm", "bmm": "bmm", "baddbmm": "bmm"}  # an operator with two gradients, and what computes each


class CompiledSequence:
    """The captured operators, inner ones too, forward and as backward would run them."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        flat = [(name.removeprefix("aten::"), o.module) for o in tree.operators for name in (o.name, *o.inner)]
        self.forward = flat
        self.backward = [(name, module) for done, module in reversed(flat) for name in _gradients(done)]

    def label(self, trace: Trace, rows: NDArray[np.int64], labels: Labels, stage: Stage) -> tuple[int, int]:
        """Name the modules of the units of a compiled stretch; returns (first, last) place that was aligned, (-1, -1) if none was."""
        captured = self.backward if stage is Stage.BACKWARD else self.forward
        names = [trace.name_of(r) for r in rows.tolist()]
        fused = [FUSED.search(n) for n in names]
        places = [i for i, match in enumerate(fused) if match is None]
        number: dict[str, int] = {}
        ours = np.array([number.setdefault(names[i].removeprefix("aten::"), len(number)) for i in places], np.int32)
        known = [i for i, (name, _) in enumerate(captured) if name in number]
        theirs = np.array([number[captured[i][0]] for i in known], np.int32)
        from ..kernels.align import common_subsequence  # loads numba, which a trace alone does not need

        left, right = common_subsequence(ours, theirs)
        at = np.full(len(names), -1, np.int64)  # place in the captured sequence
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            at[places[a]] = known[b]
        anchored = np.flatnonzero(at >= 0)
        module = np.full(len(names), -1, np.int32)
        module[anchored] = [captured[i][1] for i in at[anchored].tolist()]
        shares: dict[int, tuple[tuple[int, int], ...]] = {}
        for i, match in enumerate(fused):
            if match is not None:
                before, after = at[:i][at[:i] >= 0], at[i:][at[i:] >= 0]
                window = captured[int(before[-1]) + 1 if len(before) else 0 : int(after[0]) if len(after) else len(captured)]
                found = _sharing(match[1], window)
                if found:
                    module[i] = found[0][0]
                    shares[i] = found
        labelled = np.flatnonzero(module >= 0)
        if not len(labelled):
            return -1, -1
        filled = between(self.tree, module)
        good = np.flatnonzero(filled >= 0)
        labels.give(rows[good], stage=stage, evidence=Evidence.STRUCTURAL, module=filled[good])
        labels.give(rows[anchored], stage=stage, evidence=Evidence.STRUCTURAL if stage is Stage.BACKWARD else Evidence.CAPTURED)
        for i, found in shares.items():
            if len(found) > 1:
                labels.shares[int(rows[i])] = found
        return int(labelled[0]), int(labelled[-1])


def _gradients(name: str) -> Sequence[str]:
    if name in _TWICE:
        return _TWICE[name], _TWICE[name]
    return (f"{name}_backward", {"relu": "threshold_backward"}.get(name, name))


def _sharing(text: str, window: Sequence[tuple[str, int]]) -> tuple[tuple[int, int], ...]:
    """(module, operators) of the captured operators that the kernel's name holds, most first."""
    held = f"_{text}_"
    found = Counter(module for name, module in window if f"_{name.strip('_')}_" in held)
    return tuple(found.most_common())
