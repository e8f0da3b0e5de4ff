"""How the chunks of a training step's buffers must move from member to member of a fold: by the names of buffers and the layout alone.

A member's ops use the image of what the representative's use. That is right only where buffers move as their contents are divided: a whole group by
the part that the next replica owns, all parts of a value by a tensor rank's slot, blocks by the member that they go to. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import Unsupported
from ...plan.plan import TrainingLayout
from ...program.program import FoldAxis, Program
from ..training.cells import EXPERTS
from ..training.data_groups import Part
from ..verdict import Finding

__all__ = ["Near", "check_slots", "near_axis"]

WHOLE = ("weights", "gradients", "gathered", "gradfull")  # kinds of buffers that hold all of a group that replicas divide


class Near(NamedTuple):
    """The axis of the fold of neighbouring data replicas: of those that divide positions or experts, or share a server; else no name and size 1."""

    name: str
    size: int


def near_axis(layout: TrainingLayout) -> Near:
    """Raises: Unsupported where some divide positions and some experts."""
    if layout.context > 1 and layout.expert > 1:
        raise Unsupported("replicas that divide experts and positions are not proved folded")
    if layout.context > 1 or layout.expert > 1:
        return Near("context", layout.context) if layout.context > 1 else Near("experts", layout.expert)
    return Near("server", layout.server_replicas) if layout.server_replicas else Near("", 1)


def check_slots(
    p: Program, layout: TrainingLayout, axes: Sequence[FoldAxis], shift: np.ndarray[Any, Any], parts: Sequence[Part | None],
    holds_all: Sequence[bool], in_blocks: Container[str],
) -> list[Finding]:  # fmt: skip
    """`shift` (axes, buffers): as the fold says. `parts`: of every buffer's group, `holds_all`: whether it has slots for all tensor ranks."""
    near = near_axis(layout)
    replicas = layout.data // near.size
    everyone = {near.name: near.size, "data": layout.data}  # the next neighbour has the next block, the next of the others the next part of it
    blocks = {"data": replicas}
    if layout.copies_in_servers:  # the other way: parts in rank order
        everyone, blocks = {near.name: layout.data, "data": replicas}, {near.name: near.size}
    for b in range(shift.shape[1]):
        name, part, chunks = p.buffers.name[b], parts[b], int(p.buffers.chunks[b])
        kind, _, rest = name.partition(":")
        wanted: dict[str, int] = {}
        if kind == "norm":
            wanted = {"data": everyone, "tensor": {"tensor": layout.tensor}, "experts": {near.name: near.size}}.get(rest, {})
        elif part is not None:
            divided = layout.zero_level > 0 and part.kind in WHOLE and bool(part.group)
            # Neighbours that divide experts have other ones in a group of experts: it is divided among those with the same.
            wanted = {} if not divided else {"data": replicas} if part.group.partition(":")[0].endswith(EXPERTS) else everyone
        elif int(p.buffers.alias_of[b]) >= 0:
            wanted = blocks
        elif holds_all[b]:
            wanted = {"tensor": layout.tensor}
        elif kind in ("act", "remade", "grad") and rest.rpartition(":")[0] in in_blocks:
            wanted = {near.name: near.size}
        for row, axis in enumerate(axes):
            have, want = int(shift[row, b]), chunks // wanted[axis.name] if axis.name in wanted else 0
            if have != want:
                text = f"chunks of {p.buffer_name(b)} move by {have} from member to member of the axis {axis.name!r}, not by {want}"
                return [Finding(check="fold", message=text, witness={"rank": int(p.buffers.actor[b]), "buffer": b, "axis": axis.name})]
    return []
