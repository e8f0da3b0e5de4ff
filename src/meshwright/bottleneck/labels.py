"""Which stage of the loop and which module every slice of a trace belongs to, as arrays that the breakdown reads.

An annotation of the trace gives them exactly; without one they come from what the profiler wrote itself: ranges of the data loader, the
optimizer and modules, `nn.Module` slices, and autograd's sequence numbers from backward to forward operators.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kernels.pieces import inherit
from ..trace.trace import ABSENT, Trace
from ..trace.vocabulary import DEVICE, LOADING
from .classify import MODULE_RANGE, MODULE_SLICE, OPTIMIZER_RANGE
from .lanes import Stage

__all__ = ["Labels", "own_labels"]

_BACKWARD = re.compile(r"^autograd::engine|Backward\d*$|^torch::autograd::AccumulateGrad|^CompiledFunctionBackward")
_LOSS = re.compile(r"loss", re.IGNORECASE)


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """A stage and a module per row of the trace. `modules[0]` is "" (no module known); `kinds`: class of a module's path."""

    stage: NDArray[np.int8]
    module: NDArray[np.int32]
    modules: tuple[str, ...]
    kinds: dict[str, str] = msgspec.field(default_factory=dict)


def own_labels(trace: Trace) -> Labels:
    """Labels from the trace alone."""
    names, count = trace.names, len(trace)
    stage_of_name = np.full(len(names), -1, np.int32)
    module_of_name = np.full(len(names), -1, np.int32)
    modules: dict[str, int] = {"": 0}
    for i in np.flatnonzero(np.bincount(trace.name[~trace.in_category(*DEVICE)])).tolist():  # not the long ones of kernels
        name = names[i]
        if LOADING.search(name):
            stage_of_name[i] = Stage.DATA
        elif OPTIMIZER_RANGE.search(name):
            stage_of_name[i] = Stage.OPTIMIZER
        elif _BACKWARD.search(name):
            stage_of_name[i] = Stage.BACKWARD
        found = MODULE_RANGE.match(name) or MODULE_SLICE.match(name)
        if found:
            module_of_name[i] = modules.setdefault(found[1], len(modules))
        if found or name == "DistributedDataParallel.forward":
            stage_of_name[i] = Stage.LOSS if _LOSS.search(name) else Stage.FORWARD
    stage, module = stage_of_name[trace.name], module_of_name[trace.name]
    backward = (trace.sequence != ABSENT) & (trace.forward_thread > 0)
    stage = np.where((stage < 0) & backward, np.int32(Stage.BACKWARD), stage)
    loss = np.array([n.startswith("aten::") and bool(_LOSS.search(n)) for n in names], bool)[trace.name] if count else np.zeros(0, bool)
    stage = np.where((stage < 0) & loss, np.int32(Stage.LOSS), stage)
    inherit(trace.parent, stage)
    inherit(trace.parent, module)
    operators = trace.in_category("cpu_op")
    engine = _autograds(trace, stage, operators)[trace.track]
    stage = np.where((stage < 0) & operators, np.where(engine, np.int32(Stage.BACKWARD), np.int32(Stage.FORWARD)), stage)
    module = _backward_modules(trace, stage, module)
    return Labels(stage=np.maximum(stage, 0).astype(np.int8), module=np.maximum(module, 0), modules=tuple(modules))


def _autograds(trace: Trace, stage: NDArray[np.int32], operators: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tracks are threads of the autograd engine: nodes of backward run there, no annotation, and no operator that makes a node."""
    counts = [
        np.bincount(trace.track[rows], minlength=len(trace.tracks)) > 0
        for rows in (
            operators & (stage == Stage.BACKWARD), trace.in_category("user_annotation"),
            operators & (stage != Stage.BACKWARD) & (trace.sequence != ABSENT) & (trace.forward_thread <= 0),
        )
    ]  # fmt: skip
    return counts[0] & ~counts[1] & ~counts[2]


def _backward_modules(trace: Trace, stage: NDArray[np.int32], module: NDArray[np.int32]) -> NDArray[np.int32]:
    """Backward operators get the module of the forward operator with their sequence number (the last one with it before them)."""
    known = trace.sequence != ABSENT
    forward = np.flatnonzero(known & (stage != Stage.BACKWARD) & (module >= 0))
    backward = np.flatnonzero(known & (stage == Stage.BACKWARD) & (module < 0))
    if not len(forward) or not len(backward):
        return module
    order = np.argsort(trace.sequence[forward], kind="stable")
    keys = trace.sequence[forward][order]
    at = np.searchsorted(keys, trace.sequence[backward])
    at = np.minimum(at, len(keys) - 1)
    same = keys[at] == trace.sequence[backward]
    out = module.copy()
    out[backward[same]] = module[forward[order[at[same]]]]
    inherit(trace.parent, out)
    return out
