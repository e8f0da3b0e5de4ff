"""The norm of gradients: every rank that trains something has counted in it, once, when an optimizer reads it.

A rank's sum of squares stands for the ranks whose gradients it counts: itself; after an axis, all of that axis. The number in slot m of `norm:<axis>`
must be that of member m, so what the optimizer adds up stands for one rank of everything that is divided: tensor parts, pipeline indices that
train, and data replicas where they divide gradients. Which elements a rank counts of what several hold alike is arithmetic inside the step.
"""

from __future__ import annotations

from typing import NamedTuple

from ...plan.plan import TrainingLayout
from .data_groups import in_blocks
from .state import StepState

__all__ = ["Axis", "axes_of", "norm_steps", "require_norm", "squared"]

EVERY = -1


class Axis(NamedTuple):
    """`slots`: coordinates (pipeline, data, tensor) that each slot stands for; `own`: the rank's slot."""

    name: str
    slots: tuple[tuple[int, int, int], ...]
    own: int


def axes_of(layout: TrainingLayout, rank: int) -> tuple[Axis, ...]:
    """In the order of the rank's steps."""
    at = list(layout.coordinates(rank))
    first = at[1] - at[1] % layout.expert  # of those that divide experts with this rank; their groups come to the same
    members = {
        "data": [d for c in range(in_blocks(layout)) for d in range(c, layout.data, in_blocks(layout))] if layout.zero_level else [at[1]],
        "experts": [at[1]] if layout.zero_level else list(range(first, first + layout.expert)),
        "tensor": list(range(layout.tensor)),
        "pipeline": [p for p in range(layout.pipeline) if set(layout.held(p).params) - set(layout.frozen)],
    }
    found = []
    for name, place in (("data", 1), ("experts", 1), ("tensor", 2), ("pipeline", 0)):
        if len(members[name]) < 2:
            continue
        slots = [(*at[:place], m, *at[place + 1 :]) for m in members[name]]
        found.append(Axis(name, tuple((a, b, c) for a, b, c in slots), members[name].index(at[place])))
        at[place] = EVERY
    return tuple(found) or (Axis("own", ((at[0], at[1], at[2]),), 0),)


def norm_steps(layout: TrainingLayout, rank: int) -> list[tuple[str, str, int]]:
    """(name, graph, micro-batch) of the steps that a rank runs for it; none where nothing is asked or trained."""
    stage = layout.held(layout.coordinates(rank)[0])
    if not layout.step_end.norm or not set(stage.params) - set(layout.frozen):
        return []
    return [("norm", f"opt{stage.index}{f':{axis.name}' if i else ''}", -1) for i, axis in enumerate(axes_of(layout, rank))]


def squared(m: StepState, step: int, rank: int, op: int) -> bool:
    """A `norm` step after those before it; whether it is the rank's first, which squares gradients. Its slot is filled."""
    axes = axes_of(m.layout, rank)
    _, colon, name = m.p.ops.graph[op].partition(":")
    number = next((i for i, axis in enumerate(axes) if axis.name == name), 0) if colon else 0
    if number and not _holds(m, step, rank, axes[number - 1]):
        return False
    axis = axes[number]
    b = m.norms.get((rank, axis.name), -1)
    chunks = int(m.p.buffers.chunks[b]) if b >= 0 else 0
    own = chunks // len(axis.slots)
    written = m.p.ops.writes[op].reshape(-1, 3).tolist()
    if b < 0 or chunks % len(axis.slots) or written != [[b, axis.own * own, own]]:
        m.wrong(step, f"must fill slot {axis.own} of norm:{axis.name}, and no other")
        return False
    root, lo, hi = m.locate(b, axis.own * own, own, 0)
    m.store(root, lo, hi, [_number(m, axis, axis.own, k) for k in range(hi - lo)], step)
    return not number


def require_norm(m: StepState, step: int, rank: int) -> None:
    """The optimizer reads the sums of all."""
    _holds(m, step, rank, axes_of(m.layout, rank)[-1])


def _holds(m: StepState, step: int, rank: int, axis: Axis) -> bool:
    b = m.norms.get((rank, axis.name), -1)
    if b < 0 or not m.covers(step, b, "read"):
        m.wrong(step, f"does not read the whole of norm:{axis.name}")
        return False
    root, lo, hi = m.locate(b, 0, int(m.p.buffers.chunks[b]), 0)
    slot = max(1, (hi - lo) // len(axis.slots))
    for k in range(hi - lo):
        want = _number(m, axis, k // slot, k % slot)
        if m.memory[root][lo + k] != want:
            m.mismatch(step, b, lo + k, m.memory[root][lo + k], want)
            return False
    return True


def _number(m: StepState, axis: Axis, slot: int, cell: int) -> int:
    return 1 << 32 | m.quantity("norm", axis.name, cell, *axis.slots[slot])
