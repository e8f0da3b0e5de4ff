"""Low-rank factors: each matrix M of the group is sent as P = M Q, then Q = M^T P, both summed over the ranks.

Cite: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD (NeurIPS 2019), algorithm 1. Oracle: torch's powerSGD_hook.
Left open by the paper: rank-deficient factors. Our answer: a column of P that vanishes in orthonormalisation is sent as zero, and its column of the
next start is drawn anew, so that it can recover. Tensors of one dimension, and matrices that would not become half as small, go as they are.
The residual is M - P Q_own^T, with this rank's own Q (the paper's algorithm 2); torch's hook takes M minus the mean. Sums over ranks are equal,
so the updates are.
Invariant: P has orthonormal columns, so with one rank |M - P Q^T| <= |M|; over all ranks, decoded + residuals == gradients + old residuals.
A factor that is not finite leaves the state as it was.
Cost: three products with a thin matrix per step, bound by reading M; one call of torch per matrix and product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...codec.codec import CodecSpec
from ...codec.kinds import low_rank_parts
from ...codec.terms import Shapes
from .base import At, Codec, NonFinite, Payload, State
from .devices import kernels_of

__all__ = ["PowerSGD"]

START = "q"


@dataclass(frozen=True)
class Factors(Payload):
    """One round. `source`: the gradient; `first`: the round before, holding P and the plain tensors' sums; None in the first round."""

    source: torch.Tensor
    first: Factors | None = None


class PowerSGD(Codec):
    """State: `q`, the factors to start from, equal on all ranks."""

    def __init__(self, spec: CodecSpec, shapes: Shapes, *, name: str = "", nonfinite: NonFinite = "refuse") -> None:
        super().__init__(spec, shapes, name=name, nonfinite=nonfinite)
        self.matrices, self.plain = low_rank_parts(self.shapes, spec.integer("rank"))
        self.plain_elements = sum(b - a for a, b in self.plain)

    def state_sizes(self) -> dict[str, int]:
        return {START: sum(m.columns * m.rank for m in self.matrices)}

    def new_state(self, device: torch.device | None = None) -> State:
        return {START: self.drawn(0).to(device)}

    def drawn(self, step: int) -> torch.Tensor:
        """Random starts of all matrices, the same on every rank."""
        generator = torch.Generator().manual_seed(int.from_bytes(b"".join(k.tobytes() for k in self.key(step)), "little") >> 1)
        return torch.randn(self.state_sizes()[START], generator=generator)

    def of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of a flat group, as views."""
        return [x[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns) for m in self.matrices]

    def lefts(self, payload: Payload) -> list[torch.Tensor]:
        return _cut(payload.summand[self.plain_elements :], [(m.rows, m.rank) for m in self.matrices])

    def rights(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return _cut(flat, [(m.columns, m.rank) for m in self.matrices])

    def plains(self, payload: Payload) -> list[torch.Tensor]:
        return list(payload.summand[: self.plain_elements].split([b - a for a, b in self.plain]))

    def pack(self, x: torch.Tensor, state: State, at: At) -> Payload:
        if not self.spec["warm"]:
            state[START].copy_(self.drawn(at.step))
        made = Payload.of([(torch.float32, self.plain_elements + sum(m.rows * m.rank for m in self.matrices))], device=x.device)
        payload = Factors(made.wire, made.parts, x)
        for (a, b), into in zip(self.plain, self.plains(payload), strict=True):
            into.copy_(x[a:b])
        for matrix, q, p in zip(self.of(x), self.rights(state[START]), self.lefts(payload), strict=True):
            kernels_of(q).orthonormalise(q)
            torch.mm(matrix, q, out=p)
        return payload

    def advance(self, payload: Payload, state: State, at: At) -> Payload | None:
        assert isinstance(payload, Factors)
        if payload.first is not None:
            self.remember(payload, state, at)
            return None
        made = Payload.of([(torch.float32, sum(m.columns * m.rank for m in self.matrices))], device=payload.wire.device)
        for matrix, p, q in zip(self.of(payload.source), self.lefts(payload), self.rights(made.summand), strict=True):
            kernels_of(p).orthonormalise(p)
            torch.mm(matrix.t(), p, out=q)
        return Factors(made.wire, made.parts, payload.source, payload)

    def remember(self, payload: Payload, state: State, at: At) -> None:
        """The summed Q starts the next step; columns that have died are drawn again."""
        if not torch.isfinite(payload.summand).all():
            return
        fresh = self.rights(self.drawn(at.step + 1).to(payload.wire.device))
        for q, kept, new in zip(self.rights(payload.summand), self.rights(state[START]), fresh, strict=True):
            kept.copy_(torch.where(q.any(dim=0), q, new))

    def expand(self, payload: Payload, out: torch.Tensor, accumulate: bool) -> None:
        assert isinstance(payload, Factors)
        first = payload.first
        if first is None:
            raise ValueError("the first round alone cannot be decoded")
        for (a, b), summed in zip(self.plain, self.plains(first), strict=True):
            out[a:b] = out[a:b] + summed if accumulate else summed
        for into, p, q in zip(self.of(out), self.lefts(first), self.rights(payload.summand), strict=True):
            into.addmm_(p, q.t(), beta=float(accumulate))

    def remove(self, payload: Payload, x: torch.Tensor, at: At) -> None:
        """The plain tensors leave in the first round, what the factors hold in the second."""
        assert isinstance(payload, Factors)
        if payload.first is None:
            for a, b in self.plain:
                x[a:b] = 0
        elif torch.isfinite(payload.summand).all():
            for matrix, p, q in zip(self.of(x), self.lefts(payload.first), self.rights(payload.summand), strict=True):
                matrix.addmm_(p, q.t(), alpha=-1.0)


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    return [piece.view(shape) for piece, shape in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]
