"""What every gradient codec does: encode a flat tensor into a payload, decode payloads into their sum, finish the sum into a mean.

Where a codec is used, in this order, at every step and on every rank:

    payload = codec.encode(x, state, at)
    all-gather codecs:  exchange `payload.wire`; for each rank's: codec.decode(codec.unpack(wire), out, accumulate=True), in rank order
    all-reduce codecs:  sum `payload.summand` over the ranks, in place; payload = codec.advance(payload, state, at); again until it is None;
                        codec.decode(the last payload, out)
    codec.finish(out, world)        the only division by the number of ranks

A codec holds its options and sizes only; what changes from step to step lies in `state`, named tensors that a checkpoint saves as they are.
Encoding is a function of (x, state, at): equal inputs give equal bits. `x` is left alone. Work is done in float32: bfloat16 and float16 are
widened, float64 is rounded (and refused where it does not fit).

NaN or infinity is refused (`NotFinite`, naming the group), or with `nonfinite="pass"` sent as a payload that decodes to NaN in at least one
element, without touching the state: every rank then sees the NaN and skips its step, as loss scaling expects, and no residual is poisoned.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
import torch

from ...codec.codec import CodecSpec
from ...codec.terms import Shapes, elements_of
from ...errors import NotFinite, RunError, Unsupported
from ...kernels.counter_random import key_of
from ...kernels.select import INFINITE
from .devices import kernels_of, require_device

__all__ = ["PENDING", "RESIDUAL", "At", "Codec", "NonFinite", "Payload", "State"]

State = dict[str, torch.Tensor]
NonFinite = Literal["refuse", "pass"]
RESIDUAL = "residual"  # in a state: what was not sent yet, one number per element
PENDING = (RESIDUAL, "velocity")  # states that become gradient later (DGC's velocity too): over ranks they add up, and none may be lost
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class At:
    """Which encoding this is: random numbers and warm-up depend on it, never on the clock or on a hidden counter."""

    step: int
    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Payload:
    """`wire`: the bytes that are sent (uint8, contiguous). `parts`: typed views of it, in the codec's order; all-reduce codecs have one."""

    wire: torch.Tensor
    parts: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return int(self.wire.numel())

    @property
    def summand(self) -> torch.Tensor:
        """What an all-reduce codec's ranks add up, in place."""
        return self.parts[0]

    @classmethod
    def of(cls, layout: Sequence[tuple[torch.dtype, int]], wire: torch.Tensor | None = None, *, device: torch.device | None = None) -> Payload:
        """Parts of these types and lengths one after the other, in new memory on `device` or in `wire`, which must have just that size.

        Larger types come first in every layout, so that all parts are aligned.
        """
        sizes = [dtype.itemsize * count for dtype, count in layout]
        if wire is not None and wire.storage_offset() % 8:
            wire = wire.clone()  # a slice of a larger buffer: typed views need aligned memory
        if wire is None:
            wire = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if wire.dtype != torch.uint8 or wire.numel() != sum(sizes):
            raise RunError(f"a payload has {wire.numel()} elements of {wire.dtype}, expected {sum(sizes)} bytes", hint="ranks use different options")
        parts, start = [], 0
        for (dtype, _), size in zip(layout, sizes, strict=True):
            parts.append(wire[start : start + size].view(dtype))
            start += size
        return cls(wire, tuple(parts))


class Codec(ABC):
    """A codec for one fused group of tensors of the given shapes. `name` is for messages: which group it was."""

    def __init__(self, spec: CodecSpec, shapes: Shapes, *, name: str = "", nonfinite: NonFinite = "refuse") -> None:
        self.spec, self.shapes, self.name, self.nonfinite = spec, tuple(tuple(s) for s in shapes), name, nonfinite
        self.elements = elements_of(self.shapes)

    def state_sizes(self) -> dict[str, int]:
        """What it remembers between steps: names and numbers of float32; nothing for most."""
        return {}

    def new_state(self, device: torch.device | None = None) -> State:
        """The memory before the first step, on the device of the gradients (the processor's unless said)."""
        return {name: torch.zeros(size, device=device) for name, size in self.state_sizes().items()}

    def encode(self, x: torch.Tensor, state: State, at: At) -> Payload:
        """The first (or only) round's payload. Raises: NotFinite; Unsupported (type, size, device)."""
        values = self.flat(x)
        if self.finite(values, at):
            return self.pack(values, state, at)
        return self.pack(self.poisoned(values), {k: v.clone() for k, v in state.items()}, at)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as contiguous float32 of one dimension; a copy only where it is not."""
        require_device(x, self.name)
        if x.dtype not in FLOATS or x.layout != torch.strided:
            raise Unsupported(f"codec {self.spec.name} takes dense floating-point tensors, not {x.dtype} {x.layout}", where=self.name)
        if x.numel() != self.elements:
            raise Unsupported(f"codec {self.spec.name} was made for {self.elements} elements, not {x.numel()}", where=self.name)
        return x.detach().reshape(-1).to(torch.float32).contiguous()

    def finite(self, x: torch.Tensor, at: At) -> bool:
        """Whether all elements are. Raises: NotFinite when they are not, unless they may pass."""
        if kernels_of(x).largest_magnitude(x) < INFINITE:
            return True
        if self.nonfinite == "refuse":
            self.refuse(x, at)
        return False

    def refuse(self, x: torch.Tensor, at: At) -> NoReturn:
        """Raises: NotFinite, naming the group and the first element that is not."""
        first = int(torch.nonzero(~torch.isfinite(x))[0])
        raise NotFinite(
            f"the gradient is not finite: element {first} is {float(x[first])}", where=self.name,
            hint="lower the learning rate or the loss scale, clip, or let it pass to a loss scaler with nonfinite='pass'",
            data={"group": self.name, "element": first, "step": at.step, "rank": at.rank},
        )  # fmt: skip

    def overflow(self) -> NoReturn:
        """Raises: NotFinite, for finite gradients that add up to infinity with what was kept."""
        raise NotFinite("residual and gradient add up to infinity", where=self.name, hint="the run has diverged: lower the learning rate")

    def key(self, *numbers: int) -> tuple[np.uint32, np.uint32]:
        """The key of this group's random numbers at these numbers (step; rank where ranks must differ)."""
        return key_of(self.spec.integer("seed"), zlib.crc32(self.name.encode()), *numbers)

    def poisoned(self, x: torch.Tensor) -> torch.Tensor:
        """What is packed instead of a gradient that is not finite and may pass."""
        return torch.full_like(x, float("nan"))

    @abstractmethod
    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        """Encode flat float32. NaN in every element must decode to some NaN."""

    def advance(self, payload: Payload, state: State, at: At) -> Payload | None:
        """The next round of an all-reduce codec, given the summed payload of this one; None after the last."""
        return None

    def unpack(self, wire: torch.Tensor) -> Payload:
        """Another rank's bytes as a payload. Raises: RunError when they cannot be one."""
        raise Unsupported(f"codec {self.spec.name} sums its payloads and never unpacks another rank's", where=self.name)

    def decode(self, payload: Payload, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Write (or add) what the payload stands for to `out`: `elements` numbers of any float type."""
        if out.numel() != self.elements:
            raise Unsupported(f"codec {self.spec.name} decodes {self.elements} elements, not {out.numel()}", where=self.name)
        if out.dtype == torch.float32 and out.is_contiguous():
            self.expand(payload, out.view(-1), accumulate)
            return
        dense = torch.empty(self.elements, device=out.device)
        self.expand(payload, dense, False)
        if accumulate:
            out += dense.view(out.shape)
        else:
            out.copy_(dense.view(out.shape))

    @abstractmethod
    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        """`decode` into flat contiguous float32."""

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        """x -= what this rank's payload of this round stands for, before any summing: leaves what was not sent, for error feedback."""
        decoded = torch.empty_like(x)
        self.expand(payload, decoded, False)
        x -= decoded

    def take_back(self, payload: Payload, state: State) -> None:  # noqa: B027
        """Return to the memory what this payload was to send, after its exchange failed; without a memory there is nothing to do."""

    def finish(self, out: torch.Tensor, world: int) -> None:
        """The mean over ranks from their sum, in place."""
        if world != 1:
            out /= world
