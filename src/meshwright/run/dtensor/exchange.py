"""The collectives of a sharding plan, by messages between the ranks of one mesh axis, every byte counted.

Gathers, scatters and all-to-all send each piece once, straight to whom it is for; an all-reduce is a reduce-scatter of equal parts of the flat
tensor and a gather of the sums. So the bytes a rank sends are those of `decide.layout.autoddl.redistribute.step_sent`, uneven pieces included, on
gloo and on NCCL alike. Summands are added in rank order: every rank gets the same bits, and the same ones in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["AxisGroup", "Counters", "Wires"]



@dataclass
class Counters:
    """Bytes and messages sent by this rank, by reason; `float_elements`: of them those whose size is the run's precision."""

    sent_bytes: dict[str, int] = field(default_factory=dict)
    float_elements: dict[str, int] = field(default_factory=dict)
    messages: int = 0

    def add(self, reason: str, tensor: Tensor) -> None:
        self.sent_bytes[reason] = self.sent_bytes.get(reason, 0) + tensor.numel() * tensor.element_size()
        if tensor.is_floating_point():
            self.float_elements[reason] = self.float_elements.get(reason, 0) + tensor.numel()
        self.messages += 1

    def clear(self) -> None:
        self.sent_bytes, self.float_elements, self.messages = {}, {}, 0


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of this rank's group on an axis, in axis order; `index` is this rank's place. `group` None: the world."""

    ranks: tuple[int, ...]
    index: int
    group: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Wires:
    """One `AxisGroup` per mesh axis, and the counters."""

    axes: Sequence[AxisGroup]
    counters: Counters = field(default_factory=Counters)

    def exchange(self, axis: int, out: Sequence[Tensor | None], into: Sequence[Tensor | None], reason: str) -> None:
        """Send `out[i]` to the i-th rank of the axis and receive `into[i]` from it; None and empty tensors are not sent. Contiguous tensors only."""
        on = self.axes[axis]
        jobs = []
        for i, tensor in enumerate(into):
            if i != on.index and tensor is not None and tensor.numel():
                jobs.append(dist.P2POp(dist.irecv, tensor, on.ranks[i], on.group))
        for i, tensor in enumerate(out):
            if i != on.index and tensor is not None and tensor.numel():
                self.counters.add(reason, tensor)
                jobs.append(dist.P2POp(dist.isend, tensor, on.ranks[i], on.group))
        for work in dist.batch_isend_irecv(jobs) if jobs else ():
            work.wait()

    def gather(self, axis: int, mine: Tensor, shapes: Sequence[Sequence[int]], reason: str) -> list[Tensor]:
        """The pieces of all ranks of the axis, in axis order; `shapes` are theirs."""
        on = self.axes[axis]
        mine = mine.contiguous()
        pieces = [mine if i == on.index else mine.new_empty(tuple(s)) for i, s in enumerate(shapes)]
        self.exchange(axis, [mine] * on.size, pieces, reason)
        return pieces

    def scatter_sum(self, axis: int, parts: Sequence[Tensor], reason: str, *, maximum: bool = False) -> Tensor:
        """The sum (or maximum) over ranks of the part that belongs to this one; `parts[i]` is what this rank adds to rank i's."""
        on = self.axes[axis]
        sent = [p.contiguous() for p in parts]
        mine = sent[on.index]
        arrived = [mine if i == on.index else torch.empty_like(mine) for i in range(on.size)]
        self.exchange(axis, sent, arrived, reason)
        add: Callable[[Tensor, Tensor], Tensor] = torch.maximum if maximum else torch.add
        total = arrived[0]
        for other in arrived[1:]:
            total = add(total, other)
        return total

    def all_reduce(self, axis: int, mine: Tensor, reason: str, *, maximum: bool = False) -> Tensor:
        """Sum (or maximum) over the ranks of the axis."""
        on = self.axes[axis]
        flat = mine.reshape(-1)
        step = -(-flat.numel() // on.size)
        parts = [flat[min(i * step, flat.numel()) : min((i + 1) * step, flat.numel())] for i in range(on.size)]
        own = self.scatter_sum(axis, parts, reason, maximum=maximum)
        pieces = self.gather(axis, own, [p.shape for p in parts], reason)
        return torch.cat(pieces).view(mine.shape)

    def all_to_all(self, axis: int, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], reason: str) -> list[Tensor]:
        """`parts[i]` goes to rank i; returns what came from each, with the given shapes."""
        on = self.axes[axis]
        sent = [p.contiguous() for p in parts]
        arrived = [sent[on.index] if i == on.index else sent[0].new_empty(tuple(s)) for i, s in enumerate(shapes)]
        self.exchange(axis, sent, arrived, reason)
        return arrived
