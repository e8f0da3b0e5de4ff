"""The forward passes of a training program: the same ranks, stages, messages and collectives without backward, gradients and the optimizer's step.

Kept are the steps that make activations: `F`, what brings activations to other stages (`act`) or to all parts of a split one (`actall`, `actsum`),
and what gathers weights that a kept step reads (`gathered`); docs/formats.md has the names. Nothing is planned anew: a step that is kept moves the
same bytes between the same ranks. Order on a rank stays what it was: what came after a step that is gone, in its lane or by `after`, comes after
all that this one came after.
Invariant: a step reads what a kept step has written, or what lives between steps (weights, inputs); channels keep both ends of every message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from .kept_steps import kept_steps
from .program import Kind, Program
from .tables import Csr

__all__ = ["forward_only"]

ACTIVATIONS = ("act", "actall", "actsum")  # kinds of buffers that forward passes fill


def forward_only(p: Program) -> Program:
    """`p` is a training program with its calls, not folded. Raises: Unsupported for any other."""
    if not p.buffers.name or "F" not in p.ops.name or p.fold is not None:
        raise Unsupported("has no forward passes of its own", where=p.name, hint="give a training program with named buffers, of all its ranks")
    kinds = [name.partition(":")[0] for name in p.buffers.name]
    forward = np.array([name == "F" for name in p.ops.name], bool)
    filled = np.array([kind in ACTIVATIONS for kind in kinds], bool)
    for op in np.flatnonzero(forward).tolist():
        for buffer in p.ops.reads[op].reshape(-1, 3)[:, 0].tolist():
            filled[buffer] |= kinds[buffer] == "gathered"
    s = p.steps
    kept = s.kind == Kind.NOP
    compute, call, transfer = (s.kind == kind for kind in (Kind.COMPUTE, Kind.CALL, Kind.TRANSFER))
    kept[compute] = forward[s.op[compute]]
    for step in np.flatnonzero(call).tolist():
        kept[step] = filled[p.calls.binds[int(s.op[step])].reshape(-1, 3)[:, 1]].all()
    kept[transfer] = filled[np.where(s.dst_buffer >= 0, s.dst_buffer, s.src_buffer)[transfer]]
    waits = _waits(p, kept)
    after = Csr.of(waits)
    steps = replace(s, after_ptr=after.ptr, after_step=after.values, after_lag=np.zeros(len(after.values), np.int32))
    return kept_steps(replace(p, steps=steps), kept, np.ones(len(p.buffers), bool))


def _waits(p: Program, kept: NDArray[np.bool_]) -> list[list[int]]:
    """For every step that is kept the kept steps that it waits for, the last of each lane; those of its own lane are left out."""
    lane, starts = p.lane_of_step().tolist(), set(p.lanes.start.tolist())
    ptr: list[int] = p.steps.after_ptr.tolist()
    on: list[int] = p.steps.after_step.tolist()
    stays: list[bool] = kept.tolist()
    through: dict[int, dict[int, int]] = {}  # of steps that go: lane -> last kept step that they came after

    def before(step: int) -> list[int]:
        return on[ptr[step] : ptr[step + 1]] + ([step - 1] if step not in starts else [])

    def merged(targets: Iterable[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for target in targets:
            for where, last in ({lane[target]: target} if stays[target] else through[target]).items():
                found[where] = max(found.get(where, -1), last)
        return found

    for first in np.flatnonzero(~kept).tolist():
        open_steps = [first]
        while open_steps:
            missing = [t for t in before(open_steps[-1]) if not stays[t] and t not in through]
            if missing:
                open_steps += missing
            else:
                step = open_steps.pop()
                through[step] = merged(before(step))
    return [[t for where, t in sorted(merged(before(i)).items()) if where != lane[i]] if stays[i] else [] for i in range(len(stays))]
