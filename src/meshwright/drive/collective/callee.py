"""A collective's program as what other programs call."""

from __future__ import annotations

from ...program.calls import Callee
from ...program.program import Program

__all__ = ["bindable"]


def bindable(name: str, program: Program) -> Callee:
    contract = program.contract
    assert contract is not None, "collective strategies state their contract"
    buffer_actor = program.buffers.actor
    local = []
    for member, (buffer, _, _) in enumerate(contract.inputs):
        local.append(int((buffer_actor[:buffer] == member).sum()))
    buffer = contract.inputs[0][0]
    repeat = int(program.lanes.repeat.max()) if len(program.lanes) else 1
    return Callee(name, program, int(program.buffers.chunks[buffer]) * repeat, tuple(local))
