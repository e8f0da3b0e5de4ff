"""Tensors behind the buffers of a pipeline program: activations and gradients at stage borders, and what a rank holds of them at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...plan.plan import ValueInfo
from ...program.program import Program
from ..executor.memory import RankMemory

__all__ = ["BORDERS", "PipelineMemory"]

BORDERS = {"in": -1, "out": 0, "gradin": 0, "gradout": -1}  # kind of buffer -> border, relative to the stage (border k lies after stage k)
FILLING = ("fillout", "fillin")  # what work in idle time tells other ranks: bytes without a meaning


class PipelineMemory(RankMemory):
    """`borders[k]`: a tensor like the output of stage k; sizes are its own, not the plan's. `persistent`: flat gradients by buffer name.

    `peak_bytes`: most bytes of border tensors at once, from the moment a receive is posted; `unused_peak`: most messages received or expected
    that no compute step has begun to use.
    """

    def __init__(
        self, program: Program, rank: int, device: torch.device, borders: Mapping[int, torch.Tensor], persistent: Mapping[str, torch.Tensor]
    ) -> None:
        self.borders = borders
        self.held_bytes = self.peak_bytes = 0
        self.unused: set[int] = set()
        self.unused_peak = 0
        super().__init__(program, rank, device, {}, persistent)

    def _describe(
        self, program: Program, buffer: int, values: Mapping[str, ValueInfo], persistent: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        name = program.buffers.name[buffer]
        kind, _, rest = name.partition(":")
        if kind in FILLING:
            super()._describe(program, buffer, values, {}, torch.uint8)
            return
        if kind not in BORDERS:
            super()._describe(program, buffer, values, persistent, next(iter(persistent.values())).dtype if persistent else dtype)
            return
        stage, _, microbatch = rest.partition(":")
        like = self.borders[int(stage) + BORDERS[kind]]
        self.by_name[name] = buffer
        size = like.numel() * like.element_size()
        self.infos[buffer] = self._info(name, kind, stage, int(microbatch), like.dtype, tuple(like.shape), like.numel(), size, size)

    def put_flat(self, buffer: int, flat: torch.Tensor) -> None:
        info = self.info(buffer)
        if self.flats[buffer] is None and info.kind:
            self._count(buffer, flat.numel() * flat.element_size())
            if info.kind in ("in", "gradin"):
                self.unused.add(buffer)
                self.unused_peak = max(self.unused_peak, len(self.unused))
        super().put_flat(buffer, flat)

    def put(self, buffer: int, tensor: torch.Tensor, *, shared: bool = False) -> None:
        if self.values[buffer] is None:
            self._count(buffer, tensor.numel() * tensor.element_size())
        super().put(buffer, tensor, shared=shared)

    def read(self, buffer: int) -> torch.Tensor | None:
        self.unused.discard(buffer)
        return super().read(buffer)

    def drop(self, buffer: int) -> None:
        info = self.infos[buffer]
        if info is not None and info.kind and self.values[buffer] is not None:
            self._count(buffer, -info.numel * info.dtype.itemsize)
        super().drop(buffer)

    def _count(self, buffer: int, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
