"""Which phase of a training step each step of its inlined program belongs to: what predictions, recordings and pages sum by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .calls import InlinedProgram
from .program import Kind, Part

__all__ = ["PHASES", "phases"]

PHASES = ("", "forward", "backward", "tensor-parallel", "pipeline", "gradient", "optimizer", "other", "context", "experts")


def phases(inlined: InlinedProgram) -> NDArray[np.int8]:
    """Phase of every step as an index into PHASES: by op, communicator (`tp…`, `batch…`, `dp…`, `tied…`), channel tag (`context…`, `experts…`),
    else pipeline."""
    p = inlined.program
    out = np.zeros(len(p.steps), np.int8)
    by_op = {"F": 1, "loss": 1, "R": 2, "B": 2, "I": 2, "W": 2, "encode": 5, "advance": 5, "decode": 5, "norm": 6, "optimizer": 6}
    of_op = np.array([by_op.get(name, 7) for name in p.ops.name] + [0], np.int8)
    compute = p.steps.kind == Kind.COMPUTE
    out[compute] = of_op[p.steps.op[compute]]
    of_comm = np.array([3 if name.startswith("tp") else 7 if name.startswith("batch") else 5 for name in p.comms.name] + [4], np.int8)
    transfer = p.steps.kind == Kind.TRANSFER
    out[transfer] = of_comm[inlined.comm[transfer]]
    tagged = np.array([8 if name.startswith("context") else 9 if name.startswith("experts") else 0 for name in p.comms.name] + [0], np.int8)
    channel = np.where(p.steps.chan_in >= 0, p.steps.chan_in, p.steps.chan_out)
    tags = np.concatenate([p.channels.tag, [-1]])
    own = transfer & (inlined.comm < 0) & (tagged[tags[channel]] > 0)
    out[own] = tagged[tags[channel]][own]
    local = transfer & ((p.steps.parts & (Part.RECV | Part.SEND)) == 0) & (inlined.comm < 0)
    out[local] = 2  # a local add of gradient parts
    return out


