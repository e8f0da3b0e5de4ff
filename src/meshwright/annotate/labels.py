"""What is found out about every slice: which step and stage it is of, which module caused it, and on what evidence."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..trace.trace import I32, Trace

__all__ = ["Evidence", "Labels", "Stage"]


class Stage(IntEnum):
    """Stages of a training step, in the order in which they are shown."""

    LOAD = 0
    FORWARD = 1
    LOSS = 2
    ZERO = 3
    BACKWARD = 4
    OPTIMIZER = 5
    OTHER = 6

    @property
    def title(self) -> str:
        return ("load data", "forward", "loss", "zero gradients", "backward", "optimizer", "other")[self]


class Evidence(IntEnum):
    """What says whose work a slice is, best first.

    EXACT: the trace itself: module slices, annotations of torch, sequence numbers and arrows to a forward operator with exact evidence.
    CAPTURED: alignment with the operators of one captured forward pass. STRUCTURAL: alignment with the module tree, or the place
    among known neighbours. FUZZY: names alone. NONE: nothing claims to know.
    """

    EXACT = 0
    CAPTURED = 1
    STRUCTURAL = 2
    FUZZY = 3
    NONE = 4


class Labels(msgspec.Struct):
    """Per slice; meant at heads of units and then copied to all in them. `module` -1: none. `operator`: of the captured sequence."""

    stage: NDArray[np.int8]
    module: I32
    evidence: NDArray[np.int8]
    operator: I32
    step: I32
    recompute: NDArray[np.bool_]
    shares: dict[int, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)  # head -> (module, weight): estimates of shared work

    @classmethod
    def blank(cls, trace: Trace) -> Labels:
        n = len(trace)
        return cls(
            stage=np.full(n, Stage.OTHER, np.int8), module=np.full(n, -1, np.int32), evidence=np.full(n, Evidence.NONE, np.int8),
            operator=np.full(n, -1, np.int32), step=np.full(n, -1, np.int32), recompute=np.zeros(n, bool),
        )  # fmt: skip

    def give(self, rows: NDArray[np.int64], *, stage: Stage, evidence: Evidence, module: I32 | int | None = None) -> None:
        self.stage[rows], self.evidence[rows] = stage, evidence
        if module is not None:
            self.module[rows] = module
