"""The norm of all gradients on one rank: what it answers for, squared, and the numbers of the others, added up in a fixed order.

Of what several ranks hold alike, one counts: the first tensor index of a parameter that is whole on all, the first that holds a row of key-value
heads that several hold, the first of neighbours that divide experts where all of them hold it, the first pipeline index of a parameter that several
stages use, the first of the copies of a stage. Where data replicas divide gradients each counts its own part, else every replica counts all, and all
come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Unsupported
from ...plan.plan import TrainingLayout
from ...plan.shards import expert_shards, part_ranges
from ...program.program import Program
from .sharded_state import ParameterShard, Piece

__all__ = ["GradientNorm", "counted"]


def counted(layout: TrainingLayout, rank: int, p: ParameterShard) -> torch.Tensor | bool:
    """Which elements of the rank's (tensor-parallel) part of a parameter it counts: all, none, or those of a mask."""
    pipeline, data, tensor = layout.coordinates(rank)
    if layout.mates(pipeline)[0] != pipeline:
        return False
    if next(family[0] for family in layout.families() if p.name in layout.held(family[0]).params) != pipeline:
        return False
    experts = p.name in {s.param for s in expert_shards(layout)}
    if not layout.zero_level and data % layout.expert and not experts:
        return False
    if layout.tensor == 1 or (experts and p.name in {s.param for s in layout.shards}):
        return True
    if p.shard is None or experts:
        return tensor == 0
    extent = p.full_shape[p.shard.axis]
    before = torch.zeros(extent, dtype=torch.bool)
    for part in range(tensor):
        for low, high in part_ranges(extent, p.shard, part, layout.tensor):
            before[low:high] = True
    rows = torch.cat([~before[low:high] for low, high in part_ranges(extent, p.shard, tensor, layout.tensor)])
    if bool(rows.all()):
        return True
    shape = [1] * len(p.full_shape)
    shape[p.shard.axis] = len(rows)
    local = [*p.full_shape]
    local[p.shard.axis] = len(rows)
    return rows.view(shape).expand(local).contiguous()


@dataclass
class GradientNorm:
    """Of one rank. `slots`: the plan's `norm:` buffers by number, flat float64s; `total`: of the last step, on the device."""

    program: Program
    layout: TrainingLayout
    rank: int
    updated: Sequence[tuple[ParameterShard, torch.nn.Parameter, Piece | None]]
    slots: dict[str, torch.Tensor]
    total: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.whole: list[torch.Tensor] = []  # gradients of which all is counted
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (gradient, mask)
        for p, tensor, piece in self.updated:
            mine, gradient = counted(self.layout, self.rank, p), tensor.grad
            assert gradient is not None, "gradients lie in the plan's buffers"
            if isinstance(mine, torch.Tensor):
                mask = mine.reshape(-1)[piece.first : piece.stop].view(gradient.shape) if piece is not None else mine
                self.parts.append((gradient, mask.to(gradient.device)))
            elif mine:
                self.whole.append(gradient)

    def compile(self, op: int) -> Callable[[], None]:
        """One `norm` step."""
        ops, names = self.program.ops, self.program.buffers.name
        ((buffer, first, _),) = ops.writes[op].reshape(-1, 3).tolist()
        before = next((b for b in ops.reads[op].reshape(-1, 3)[:, 0].tolist() if names[b].startswith("norm:")), -1)
        slot = self.flat(names[buffer])[first : first + 1]
        made = self.squares if before < 0 else self.sum_of(before)

        def act() -> None:
            slot.copy_(made())

        return act

    def flat(self, name: str) -> torch.Tensor:
        if name not in self.slots:
            raise Unsupported(
                f"the program has no buffer {name!r} on rank {self.rank}",
                hint="program and layout of the plan are of different plans: make it again",
            )  # fmt: skip
        return self.slots[name]

    def squares(self) -> torch.Tensor:
        """The own sum of squares."""
        found = [_square(g) for g in self.whole] + [_square(g * mask) for g, mask in self.parts]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)

    def sum_of(self, buffer: int) -> Callable[[], torch.Tensor]:
        """Of the members' numbers, in their order: each number stands in the first chunk of its slot."""
        name = self.program.buffers.name[buffer]
        flat, members = self.flat(name), self.members(name.partition(":")[2])
        numbers = flat[:: len(flat) // members]
        return lambda: numbers.sum()  # in the members' order

    def members(self, axis: str) -> int:
        lay = self.layout
        training = sum(not set(lay.held(p).params) <= set(lay.frozen) for p in range(lay.pipeline))
        return {"data": lay.data, "experts": lay.expert, "tensor": lay.tensor, "pipeline": training}.get(axis, 1)

    def final(self, op: int) -> Callable[[], torch.Tensor]:
        """The norm, from what the optimizer's op reads; a float64 of no dimension."""
        ops, names = self.program.ops, self.program.buffers.name
        last = next((b for b in ops.reads[op].reshape(-1, 3)[:, 0].tolist() if names[b].startswith("norm:")), -1)
        if last < 0:
            raise Unsupported("the program sums no norm of gradients", where=f"rank {self.rank}", hint="make the plan again")
        sum_of = self.sum_of(last)

        def norm() -> torch.Tensor:
            self.total = sum_of().sqrt()
            return self.total

        return norm


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """In at least single precision, as torch's norm of it."""
    dtype: Any = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(gradient, dtype=dtype).double().square()
