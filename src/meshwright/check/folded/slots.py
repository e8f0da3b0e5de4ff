"""How the chunks of a training step's buffers must move from member to member of a fold: by the names of buffers and the layout alone.

A member's ops use the image of what the representative's use. That is right only where buffers move as their contents are divided: a whole group by
the part that the next replica owns, all parts of a value by a tensor rank's slot, blocks by the member that they go to. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from ...plan.plan import TrainingLayout
from ...program.program import FoldAxis, Program
from ..training.data_groups import Part
from ..verdict import Finding

__all__ = ["check_slots"]

WHOLE = ("weights", "gradients", "gathered", "gradfull")  # kinds of buffers that hold all of a group that replicas divide


def check_slots(
    p: Program, layout: TrainingLayout, axes: Sequence[FoldAxis], shift: np.ndarray[Any, Any], parts: Sequence[Part | None],
    holds_all: Sequence[bool], in_blocks: Container[str],
) -> list[Finding]:  # fmt: skip
    """`shift` (axes, buffers): as the fold says. `parts`: of every buffer's group, `holds_all`: whether it has slots for all tensor ranks."""
    context, replicas = layout.context, layout.data // layout.context
    for b in range(shift.shape[1]):
        name, part, chunks = p.buffers.name[b], parts[b], int(p.buffers.chunks[b])
        kind, _, rest = name.partition(":")
        wanted: dict[str, int] = {}
        if kind == "norm":
            wanted = {"data": replicas, "context": layout.data} if rest == "data" else {rest: layout.tensor} if rest == "tensor" else {}
        elif part is not None:
            divided = layout.zero_level > 0 and part.kind in WHOLE and bool(part.group)
            wanted = {"data": replicas, "context": layout.data} if divided else {}
        elif int(p.buffers.alias_of[b]) >= 0:
            wanted = {"context": context}
        elif holds_all[b]:
            wanted = {"tensor": layout.tensor}
        elif kind in ("act", "grad") and rest.rpartition(":")[0] in in_blocks:
            wanted = {"context": context}
        for row, axis in enumerate(axes):
            have, want = int(shift[row, b]), chunks // wanted[axis.name] if axis.name in wanted else 0
            if have != want:
                text = f"chunks of {p.buffer_name(b)} move by {have} from member to member of the axis {axis.name!r}, not by {want}"
                return [Finding(check="fold", message=text, witness={"rank": int(p.buffers.actor[b]), "buffer": b, "axis": axis.name})]
    return []
