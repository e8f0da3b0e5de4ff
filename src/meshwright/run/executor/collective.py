"""Runs a collective's program on real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import Unsupported, UsageError
from ...program.builder import ProgramBuilder
from ...program.calls import inline
from ...program.program import Program
from ...program.tables import I32
from .executor import Executor
from .lanes import fuse_lanes
from .memory import RankMemory
from .transport import Transport

__all__ = ["CollectiveRank", "callable_form", "run_collective"]


def callable_form(program: Program, name: str = "collective") -> Program:
    """The program as one call by every rank, inlined: repeats unrolled, every rank's own buffers named `buffer<i>` in table order."""
    b = ProgramBuilder(ranks=program.ranks, name=program.name)
    comm = b.comm(name, list(range(program.ranks)))
    own = [np.flatnonzero(program.buffers.actor == rank) for rank in range(program.ranks)]
    for rank in range(program.ranks):
        binds = []
        for local, buffer in enumerate(own[rank].tolist()):
            chunks = int(program.buffers.chunks[buffer]) * _slices(program, buffer)
            made = b.buffer(rank, chunks=chunks, chunk_bytes=int(program.buffers.chunk_bytes[buffer]), persistent=True, name=f"buffer{local}")
            binds.append((local, made, 0))
        b.lane(rank).call(b.call(comm, name, binds))
    return inline(b.build(), {name: program}).program


def _slices(program: Program, buffer: int) -> int:
    window = int(program.buffers.window[buffer])
    repeats = program.lanes.repeat[program.lanes.actor == program.buffers.actor[buffer]]
    repeat = int(repeats.max()) if len(repeats) else 1
    return min(window, repeat) if window else repeat


class CollectiveRank:
    """One rank of a collective, compiled once; `run()` may be called again and again. `tensors`: flat, by number of the rank's own buffer."""

    def __init__(
        self, program: Program, rank: int, tensors: Mapping[int, torch.Tensor], transport: Transport, orders: Sequence[I32] | None = None
    ) -> None:
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) != 1:
            raise UsageError("all buffers of a collective have one dtype", hint="pass tensors of one dtype")
        if any(c.reproducible == "exact" for c in program.contracts) and next(iter(dtypes)) != torch.int64:
            text = f"the program adds the integers of exact sums, not {next(iter(dtypes))}"
            raise Unsupported(text, where=program.name, hint="`run.group.integers` makes them, as MESHWRIGHT_REPRODUCIBLE=exact does")
        form = callable_form(program)
        self.memory = RankMemory(form, rank, next(iter(tensors.values())).device, {}, _named(form, rank, tensors), dtype=next(iter(dtypes)))
        self.executor = Executor(form, orders or fuse_lanes(form), rank, memory=self.memory, transport=transport)

    def run(self) -> None:
        self.executor.run()

    def buffer(self, local: int) -> torch.Tensor:
        """The flat tensor of the rank's own buffer number `local`."""
        flat = self.memory.flats[self.memory.by_name[f"buffer{local}"]]
        if flat is None:
            raise UsageError(f"buffer {local} takes part in no transfer")
        return flat


def run_collective(program: Program, rank: int, tensors: Mapping[int, torch.Tensor], transport: Transport) -> CollectiveRank:
    """Execute `program` once on this rank; `tensors` (flat) are its buffers by number in the rank's table order and are changed in place.

    Buffers that are not given are scratch. Sizes must be those of the program's chunks, padding included.
    Raises: Unsupported (the program cannot be executed), UsageError (sizes), `executor.StepFailed`.
    """
    made = CollectiveRank(program, rank, tensors, transport)
    made.run()
    return made


def _named(form: Program, rank: int, tensors: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    b, out = form.buffers, {}
    sizes: dict[str, Any] = {b.name[i]: int(b.chunks[i]) * int(b.chunk_bytes[i]) for i in np.flatnonzero(b.actor == rank).tolist()}
    for local, tensor in tensors.items():
        name = f"buffer{local}"
        needed = sizes.get(name, -1)
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != needed:
            raise UsageError(f"buffer {local} must be a flat tensor of {needed} bytes, got {tensor.numel() * tensor.element_size()}")
        out[name] = tensor
    return out
