"""The curvature of one Linear layer: sums being collected, averaged factors, damped inverses, and what they make of a gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .factors import damped_inverse, damping_split, gram, pack, trace, unpack, with_ones

__all__ = ["FACTORS", "Factor", "LinearCurvature"]

Factor = Literal["input", "gradient"]
FACTORS: tuple[Factor, ...] = ("input", "gradient")
TENSORS = ("input_factor", "gradient_factor", "input_inverse", "gradient_inverse")


class LinearCurvature:
    """Fisher block of a layer y = W x + b as A ⊗ B.

    input_factor A [d_a, d_a]: mean of a aᵀ over rows (tokens); gradient_factor B [d_out, d_out]: sum of e eᵀ over rows, divided by the number of
    terms that the loss has, with e the gradient of one term. B is its diagonal [d_out] where d_out > `diagonal_above`.
    Everything is kept in float32, or in float64 for a layer in float64.
    """

    def __init__(self, name: str, module: torch.nn.Linear, *, diagonal_above: int) -> None:
        self.name, self.module = name, module
        self.bias = module.bias is not None
        self.dtype = torch.float64 if module.weight.dtype == torch.float64 else torch.float32
        self.diagonal = module.out_features > diagonal_above
        self.input_sum: torch.Tensor | None = None
        self.gradient_sum: torch.Tensor | None = None
        self.rows = 0
        self.terms = 0
        self.input_factor: torch.Tensor | None = None
        self.gradient_factor: torch.Tensor | None = None
        self.input_inverse: torch.Tensor | None = None
        self.gradient_inverse: torch.Tensor | None = None

    # ---- curvature ---------------------------------------------------------------------------------------------
    def add_input(self, x: torch.Tensor) -> None:
        """Curvature A of some rows [..., d_in]."""
        a = with_ones(x.detach(), self.bias)
        own = gram(a, self.dtype)
        self.input_sum = own if self.input_sum is None else self.input_sum.add_(own)
        self.rows += a.shape[0]

    def add_gradient(self, e: torch.Tensor, *, terms: int) -> None:
        """Curvature B of some rows [..., d_out], each the gradient of one term of the loss; `terms` of them are in these rows."""
        own = gram(e.detach().reshape(-1, e.shape[-1]), self.dtype, diagonal=self.diagonal)
        self.gradient_sum = own if self.gradient_sum is None else self.gradient_sum.add_(own)
        self.terms += terms

    def discard(self) -> None:
        """Forget what was collected since the last `average`."""
        self.input_sum = self.gradient_sum = None
        self.rows = self.terms = 0

    def average(self, decay: float) -> None:
        """Factors = decay · factors + (1 - decay) · what was collected; the first time they are what was collected."""
        if self.input_sum is not None and self.rows:
            self.input_factor = _mix(self.input_factor, self.input_sum / self.rows, decay)
        if self.gradient_sum is not None and self.terms:
            self.gradient_factor = _mix(self.gradient_factor, self.gradient_sum / self.terms, decay)
        self.discard()

    # ---- sums over replicas --------------------------------------------------------------------------------------
    def shape(self, what: Factor) -> torch.Size:
        """Of A ("input") or B ("gradient") and of its inverse."""
        d_a, d_out = self.module.in_features + self.bias, self.module.out_features
        return torch.Size((d_a, d_a) if what == "input" else (d_out,) if self.diagonal else (d_out, d_out))

    def packed_sum(self, what: Factor) -> torch.Tensor:
        """What was collected of one factor, as a vector that replicas add up: the triangle of the sum, and the count."""
        zeros = {"device": self.module.weight.device, "dtype": self.dtype}
        own, count = (self.input_sum, self.rows) if what == "input" else (self.gradient_sum, self.terms)
        return torch.cat([pack(own if own is not None else torch.zeros(self.shape(what), **zeros)), torch.tensor([count], **zeros)])

    def take_sum(self, what: Factor, packed: torch.Tensor) -> None:
        """What `packed_sum` of all replicas add up to becomes what was collected."""
        own, count = unpack(packed[:-1], self.shape(what)), int(packed[-1])
        if what == "input":
            self.input_sum, self.rows = own, count
        else:
            self.gradient_sum, self.terms = own, count

    def packed_inverse(self, what: Factor, *, room: bool = False) -> torch.Tensor:
        """The triangle of an inverse, as a vector to send; `room`: one of that length for another rank's."""
        like = self.input_factor if what == "input" else self.gradient_factor
        own = self.input_inverse if what == "input" else self.gradient_inverse
        given = like if room else own
        assert given is not None
        return pack(given)

    def take_inverse(self, what: Factor, packed: torch.Tensor) -> None:
        """Another rank's `packed_inverse` becomes this layer's inverse."""
        setattr(self, f"{what}_inverse", unpack(packed, self.shape(what)))

    # ---- inverses and preconditioning ------------------------------------------------------------------------------
    @property
    def usable(self) -> bool:
        """Both factors are there and not all zero."""
        both = self.input_factor, self.gradient_factor
        return all(f is not None and trace(f) != 0 for f in both)

    def invert_input(self, damping: float) -> None:
        """(A + gamma_A I)^-1 from the current factors; nothing while one of them is all zero. Raises: RunError as `damped_inverse`."""
        if self.usable:
            assert self.input_factor is not None and self.gradient_factor is not None
            gamma = damping_split(self.input_factor, self.gradient_factor, damping)[0]
            self.input_inverse = damped_inverse(self.input_factor, gamma, where=f"{self.name} (inputs)")[0]

    def invert_gradient(self, damping: float) -> None:
        """(B + gamma_B I)^-1, as `invert_input`."""
        if self.usable:
            assert self.input_factor is not None and self.gradient_factor is not None
            gamma = damping_split(self.input_factor, self.gradient_factor, damping)[1]
            self.gradient_inverse = damped_inverse(self.gradient_factor, gamma, where=f"{self.name} (output gradients)")[0]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def precondition(self) -> None:
        """The layer's gradient G [d_out, d_a] becomes (B + gamma_B I)^-1 G (A + gamma_A I)^-1, in place; untouched before the first inverses."""
        weight, bias = self.module.weight, self.module.bias
        if self.input_inverse is None or self.gradient_inverse is None or weight.grad is None or (self.bias and bias.grad is None):
            return
        g = weight.grad.to(self.dtype)
        if self.bias:
            g = torch.cat([g, bias.grad.to(self.dtype).unsqueeze(1)], 1)
        left = self.gradient_inverse.unsqueeze(1) * g if self.diagonal else self.gradient_inverse @ g
        out = left @ self.input_inverse
        if self.bias:
            weight.grad.copy_(out[:, :-1])
            bias.grad.copy_(out[:, -1])
        else:
            weight.grad.copy_(out)

    # ---- state -----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Factors and inverses that exist, by name."""
        return {k: v for k in TENSORS if (v := getattr(self, k)) is not None}

    def load(self, state: dict[str, Any]) -> None:
        for key in TENSORS:
            value = state.get(key)
            setattr(self, key, None if value is None else value.to(device=self.module.weight.device, dtype=self.dtype).clone())


def _mix(old: torch.Tensor | None, new: torch.Tensor, decay: float) -> torch.Tensor:
    return new if old is None else old.mul(decay).add_(new, alpha=1 - decay)
