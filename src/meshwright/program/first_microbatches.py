"""The first micro-batches of a training program: the same program without the steps of all later ones.

Under 1F1B every stage's order of the first m micro-batches is 1F1B's own order of m, so what is left is the program of a step of m micro-batches,
and in the steady state every further one takes as long as the one before: from two such programs follows the time of a step of any number.
What waited for a step that is gone (sums of gradients for the last backward) waits for its like of the last micro-batch that is left: the last step
of its lane with the same operator, or the same buffers but for the micro-batch; where there is none, for the last step before it that is left.
Which micro-batch a step belongs to is in its operator, or in the name of the buffer that it moves (docs/formats.md).
Cost: O(steps).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import Unsupported
from .kept_steps import kept_steps
from .program import Kind, Program

__all__ = ["first_microbatches"]

KINDS = (  # of buffers that are of one micro-batch
    "saved", "act", "grad", "gradpart", "actall", "actagain", "actsum", "remade", "remadeall", "remadesum", "gradall", "inputs",
)  # fmt: skip


def first_microbatches(p: Program, count: int) -> Program:
    """`p` is a training program with its calls, folded or not, whose weights are not divided. Raises: Unsupported for any other."""
    if not p.buffers.name or (len(p.lanes) and int(p.lanes.repeat.max()) > 1):
        raise Unsupported("micro-batches cannot be told apart", where=p.name, hint="give a training program with named buffers")
    of_buffer = np.array([_number(name) for name in p.buffers.name], np.int64)
    s, n = p.steps, len(p.steps)
    mine = np.full(n, -1, np.int64)
    compute, call = s.kind == Kind.COMPUTE, s.kind == Kind.CALL
    of_op = np.where(np.array([name in ("F", "R", "B") for name in p.ops.name], bool), p.ops.microbatch, -1)
    mine[compute] = of_op[s.op[compute]]
    first_bound = p.calls.binds.ptr[:-1] + 1  # (callee's buffer, buffer, chunk): all that a call binds is of one micro-batch, or of none
    mine[call] = of_buffer[p.calls.binds.values[first_bound]][s.op[call]] if len(p.calls) else -1
    moved = np.append(of_buffer, -1)
    rest = ~(compute | call)
    mine[rest] = np.maximum(moved[s.src_buffer[rest]], moved[s.dst_buffer[rest]])
    steps = mine < count
    # a step that stays may wait for one that goes: then for the last one left before it in that lane which does the same for another micro-batch
    return kept_steps(p, steps, of_buffer < count, lambda target, start, left: _like(p, target, steps, start, left))


def _number(name: str) -> int:
    kind, _, rest = name.partition(":")
    number = rest.rpartition(":")[2]
    return int(number) if kind in KINDS and number.isdigit() else -1


def _like(p: Program, target: int, steps: NDArray[np.bool_], start: int, otherwise: int) -> int:
    wanted = _signature(p, target)
    return next((i for i in range(otherwise, start - 1, -1) if steps[i] and _signature(p, i) == wanted), otherwise)


def _signature(p: Program, step: int) -> tuple[object, ...]:
    """What a step is, whatever its micro-batch."""
    s = p.steps
    kind, op = int(s.kind[step]), int(s.op[step])
    if kind == Kind.COMPUTE:
        return kind, p.ops.name[op], p.ops.graph[op]
    moved = [int(s.src_buffer[step]), int(s.dst_buffer[step])]
    if kind == Kind.CALL:
        moved = p.calls.binds[op].reshape(-1, 3)[:, 1].tolist()
    return kind, int(s.parts[step]), *(p.buffers.name[b].rpartition(":")[0] if b >= 0 else "" for b in moved)
