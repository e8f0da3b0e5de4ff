"""What an expert is: its parameters, which of them can be cut along an inner dimension, and its function for many experts at once.

Cite: Tutel (arXiv 2206.03382), section 3.1, for the layout: every parameter that has the inner dimension F has it first, so slices are contiguous.
Left open by the paper: experts of other forms. Our answer: any module (`ModuleExpert`), whole, with degrees 0 and 1.
Deviations: none. Invariant: for slices that together are the whole, `run` of the slices adds up to `run` of the whole. Cost: that of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.nn import functional

from ..errors import Unsupported
from ..kernels.experts.dropless import multiply, sparse_mlp

__all__ = ["ExpertForm", "FeedForward", "GatedFeedForward", "ModuleExpert"]

Tensors = Mapping[str, torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


class ExpertForm(Protocol):
    """A kind of expert. model, output, inner: H, H of the result, F (0: it cannot be cut). matrices: products of a token's way, for its price.

    sliced: shapes of one expert's parameters that begin with F; whole: of those that do not.
    """

    model: int
    output: int
    inner: int
    matrices: int

    @property
    def sliced(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def whole(self) -> Mapping[str, tuple[int, ...]]: ...
    def initial(self, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        """Parameters of a new expert."""
        ...

    def run(self, x: torch.Tensor, params: Tensors, share: float) -> torch.Tensor:
        """[E, R, H] -> [E, R, output], with E experts' parameters stacked. `share`: of F that `params` hold; what is added once is times that."""
        ...

    def run_rows(self, x: torch.Tensor, counts: torch.Tensor, params: Tensors, way: str, block: int) -> torch.Tensor:
        """[n, H] -> [n, output]: counts[e] rows for expert e, in order, by a way of `kernels.experts.dropless`. Raises: Unsupported, UsageError."""
        ...


class FeedForward:
    """y = act(x · W1ᵀ + b1) · W2 + b2; both matrices are [F, H]."""

    matrices = 2

    def __init__(self, model: int, inner: int, *, output: int = 0, activation: Activation = functional.gelu, bias: bool = True) -> None:
        self.model, self.inner, self.output, self.activation, self.bias = model, inner, output or model, activation, bias

    @property
    def sliced(self) -> dict[str, tuple[int, ...]]:
        own = {"w1": (self.inner, self.model), "w2": (self.inner, self.output)}
        return own | ({"b1": (self.inner,)} if self.bias else {})

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        return {"b2": (self.output,)} if self.bias else {}

    def initial(self, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        reach = {"w1": self.model, "b1": self.model, "w2": self.inner, "b2": self.inner}
        return _uniform({**self.sliced, **self.whole}, reach, generator)

    def run(self, x: torch.Tensor, params: Tensors, share: float) -> torch.Tensor:
        h = torch.bmm(x, params["w1"].transpose(1, 2))
        if self.bias:
            h = h + params["b1"].unsqueeze(1)
        y = torch.bmm(self.activation(h), params["w2"])
        return y + share * params["b2"].unsqueeze(1) if self.bias else y

    def run_rows(self, x: torch.Tensor, counts: torch.Tensor, params: Tensors, way: str, block: int) -> torch.Tensor:
        if way == "sparse":
            if self.bias:
                text = "experts with biases inside are not block-sparse products alone"
                raise Unsupported(text, where="sparse", hint="bias=False, or dropless='grouped'")
            return sparse_mlp(x, counts, params["w1"], None, params["w2"], self.activation, block)
        each = counts.tolist()
        owner = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
        h = multiply(x, params["w1"].transpose(1, 2), each, way)
        y = multiply(self.activation(h + params["b1"][owner] if self.bias else h), params["w2"], each, way)
        return y + params["b2"][owner] if self.bias else y


class GatedFeedForward:
    """y = (act(x · W1ᵀ) * (x · V1ᵀ)) · W2, all [F, H]: SwiGLU with the default activation."""

    matrices = 3

    def __init__(self, model: int, inner: int, *, output: int = 0, activation: Activation = functional.silu) -> None:
        self.model, self.inner, self.output, self.activation = model, inner, output or model, activation

    @property
    def sliced(self) -> dict[str, tuple[int, ...]]:
        return {"w1": (self.inner, self.model), "v1": (self.inner, self.model), "w2": (self.inner, self.output)}

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        return {}

    def initial(self, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        return _uniform(self.sliced, {"w1": self.model, "v1": self.model, "w2": self.inner}, generator)

    def run(self, x: torch.Tensor, params: Tensors, share: float) -> torch.Tensor:
        h = self.activation(torch.bmm(x, params["w1"].transpose(1, 2))) * torch.bmm(x, params["v1"].transpose(1, 2))
        return torch.bmm(h, params["w2"])

    def run_rows(self, x: torch.Tensor, counts: torch.Tensor, params: Tensors, way: str, block: int) -> torch.Tensor:
        if way == "sparse":
            return sparse_mlp(x, counts, params["w1"], params["v1"], params["w2"], self.activation, block)
        each = counts.tolist()
        gates = self.activation(multiply(x, params["w1"].transpose(1, 2), each, way))
        return multiply(gates * multiply(x, params["v1"].transpose(1, 2), each, way), params["w2"], each, way)


class ModuleExpert:
    """Experts that are modules of any kind: `make()` gives a new one, which maps [R, model] to [R, output]. They are whole: degrees 0 and 1.

    Modules keep no state between calls: buffers are those of the first.
    """

    inner = 0

    def __init__(self, make: Callable[[], torch.nn.Module], model: int, *, output: int = 0, matrices: int = 2) -> None:
        self.make, self.model, self.output, self.matrices = make, model, output or model, matrices
        self.module = make()
        self.shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}

    @property
    def sliced(self) -> dict[str, tuple[int, ...]]:
        return {}

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def initial(self, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng(devices=[], enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(1 << 62, (1,), generator=generator)))
            return {name: p.detach().clone() for name, p in self.make().named_parameters()}

    def run(self, x: torch.Tensor, params: Tensors, share: float) -> torch.Tensor:
        each = [torch.func.functional_call(self.module, {name: p[e] for name, p in params.items()}, (rows,)) for e, rows in enumerate(x)]
        return torch.stack(each)

    def run_rows(self, x: torch.Tensor, counts: torch.Tensor, params: Tensors, way: str, block: int) -> torch.Tensor:
        if way != "loop":
            raise Unsupported("modules run one after the other", where=way, hint="way='loop'")
        parts = x.split(counts.tolist())
        called = [torch.func.functional_call(self.module, {n: p[e] for n, p in params.items()}, (rows,)) for e, rows in enumerate(parts)]
        return torch.cat(called)


def _uniform(shapes: Mapping[str, tuple[int, ...]], reach: Mapping[str, int], generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """As torch.nn.Linear begins: uniform within 1 / sqrt(inputs)."""
    return {name: (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(reach[name]) for name, shape in shapes.items()}
