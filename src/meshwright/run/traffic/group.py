"""One group of gradients: flat buffer, codec and its state, and the exchange over a process group.

Order of use in every step: `put` each gradient (or `leave_out`), `encode`, `exchange`, `decode`, read the means in `parts`, `begin`. `exchange` may
run on another thread; it touches the codec's state only in codecs with several rounds, between `encode` and `decode`.
Left open by the paper: payloads whose size the data decide. Our answer: lengths are gathered first, then payloads padded to the longest. And a
gradient that one rank refuses: it sends NaN in its place, so the others do not wait for it, and every rank refuses in `decode`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...codec.codec import CodecSpec
from ...errors import NotFinite, Unsupported
from ...kernels.select import INFINITE
from ..codecs import At, Payload, State, make_codec
from ..codecs.base import NonFinite
from ..codecs.devices import kernels_of
from ..codecs.saved import Group
from .exchange import add_up, gather

__all__ = ["GroupExchange"]

Received = Payload | list[torch.Tensor]


class GroupExchange:
    """`names`, `shapes`: of its tensors, in the order in which they lie in the buffer: `flat`, where they lie in one already."""

    def __init__(
        self, index: int, spec: CodecSpec, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, nonfinite: NonFinite,
        flat: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.index, self.spec, self.names, self.shapes, self.nonfinite = index, spec, tuple(names), tuple(shapes), nonfinite
        self.codec = make_codec(spec, self.shapes, name=f"group {index} ({self.names[0]} to {self.names[-1]})", nonfinite=nonfinite)
        self.state: State = self.codec.new_state()
        sizes = [torch.Size(s).numel() for s in shapes]
        self.flat = torch.zeros(sum(sizes), dtype=dtype) if flat is None else flat
        self.parts = [piece.view(s) for piece, s in zip(self.flat.split(sizes), shapes, strict=True)]
        self.missing = set(range(len(sizes)))
        self.payload: Payload | None = None
        self.received: Received | None = None
        self.refused: NotFinite | None = None

    def described(self) -> Group:
        """For `codecs.saved`."""
        return Group(codec=self.spec.text, tensors=tuple(zip(self.names, self.shapes, strict=True)))

    @property
    def complete(self) -> bool:
        return not self.missing

    def put(self, position: int, gradient: torch.Tensor) -> None:
        """Raises: Unsupported for a sparse gradient."""
        if gradient.layout != torch.strided:
            raise Unsupported(
                f"the gradient of {self.names[position]} is sparse", where=self.codec.name, hint="use dense gradients, or leave this to DDP alone"
            )
        self.parts[position].copy_(gradient)
        self.missing.discard(position)

    def leave_out(self) -> None:
        """Gradients that did not come this step count as zero."""
        for position in self.missing:
            self.parts[position].zero_()
        self.missing.clear()

    def encode(self, at: At) -> None:
        """Raises: Unsupported; NotFinite at once only for bare signs, which cannot carry NaN to the other ranks."""
        try:
            self.payload = self.codec.encode(self.flat, self.state, at)
        except NotFinite as error:
            telling = make_codec(self.spec, self.shapes, name=self.codec.name, nonfinite="pass")
            self.payload = telling.encode(torch.full_like(self.flat, float("nan")), self.state, at)
            self.refused = error

    def exchange(self, at: At, group: dist.ProcessGroup | None) -> None:
        """Raises: RuntimeError of the process group; what `advance` raises."""
        assert self.payload is not None
        if self.spec.aggregation == "all-gather":
            self.received = self._gathered(self.payload, at, group)
            return
        payload: Payload | None = self.payload
        while payload is not None:
            if at.world > 1 and payload.summand.numel():
                add_up(payload.summand, group)
            last, payload = payload, self.codec.advance(payload, self.state, at)
        self.received = last

    def _gathered(self, payload: Payload, at: At, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        if at.world == 1:
            return [payload.wire]
        (size,) = self.spec.rounds(self.shapes, step=at.step)
        lengths = [payload.size_bytes] * at.world
        if not size.exact:
            lengths = gather(torch.tensor([payload.size_bytes]), group).tolist()
        longest = max(lengths)
        if not longest:
            return [payload.wire] * at.world
        wire = payload.wire
        if wire.numel() < longest:
            wire = torch.cat([wire, wire.new_zeros(longest - wire.numel())])
        everything = gather(wire, group)
        return [everything[r * longest : r * longest + n] for r, n in enumerate(lengths)]

    def decode(self, world: int) -> None:
        """The mean of all ranks' gradients, into `parts`; the only division.

        Raises: NotFinite on every rank, where some rank's gradient was refused; RunError for a payload that cannot be one.
        """
        assert self.received is not None
        if self.refused is not None:
            raise self.refused
        if isinstance(self.received, list):
            for rank, wire in enumerate(self.received):
                payload = self.codec.unpack(wire)
                self._require_finite(payload, f"rank {rank}")
                self.codec.decode(payload, self.flat, accumulate=rank > 0)
        else:
            self._require_finite(self.received, "another rank")
            self.codec.decode(self.received, self.flat)
        self.codec.finish(self.flat, world)

    def _require_finite(self, payload: Payload, whose: str) -> None:
        """What stands for a refused gradient has NaN in its numbers, whatever the codec."""
        if self.nonfinite == "refuse" and not all(_finite(p) for p in payload.parts if p.dtype.is_floating_point):
            said = f"the gradient of {whose} is not finite"
            if self.spec.aggregation == "all-reduce" and self.spec.name == "fp16":
                said += ", or beyond fp16 (65,504), alone or when ranks were added up"
            raise NotFinite(
                said, where=self.codec.name, hint="see that rank's message, which names the element",
                data={"group": self.codec.name},
            )  # fmt: skip

    def begin(self) -> None:
        """Forget the step before."""
        self.payload = self.received = self.refused = None
        self.missing = set(range(len(self.parts)))

    def give_up(self) -> None:
        """The exchange failed: what was encoded goes back to the codec's memory, where it keeps one and the ranks did not sum yet."""
        if self.payload is not None and self.refused is None and self.spec.aggregation == "all-gather":
            self.codec.take_back(self.payload, self.state)
        self.begin()


def _finite(numbers: torch.Tensor) -> bool:
    if numbers.dtype == torch.float32:
        return bool(kernels_of(numbers).largest_magnitude(numbers) < INFINITE)
    return bool(numbers.isfinite().all())
