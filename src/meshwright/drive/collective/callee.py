"""A collective's program as what other programs call."""

from __future__ import annotations

from ...program.calls import Callee
from ...program.fold import plain_buffers
from ...program.program import Program

__all__ = ["bindable"]


def bindable(name: str, program: Program) -> Callee:
    contract = program.contract
    assert contract is not None, "collective strategies state their contract"
    actor, _ = plain_buffers(program)
    local = [int((actor[:buffer] == member).sum()) for member, (buffer, _, _) in enumerate(contract.inputs)]
    buffer = contract.inputs[0][0]  # of rank 0, which is stored first
    repeat = int(program.lanes.repeat.max()) if len(program.lanes) else 1
    return Callee(name, program, int(program.buffers.chunks[buffer]) * repeat, tuple(local))
