"""How tokens choose experts, as an input of predictions: alike, by Zipf's law, or as measured in a run.

Cite: `plan.experts.GSHARD`; Zipf's law as in C. Hwang and others, "Tutel" (arXiv 2206.03382), section 2, where expert loads are far from equal.
Left open by the paper: which experts are the hot ones. Our answer: an order drawn from the layer's name, the same in every plan; or the measured one.
Invariant: shares of a layer are not negative and sum to 1. Cost: O(E log E) per layer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fnmatch import fnmatch

from ..errors import UsageError

__all__ = ["UNIFORM", "Routing"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """`zipf`: exponent of Zipf's law; 0: all experts alike. `measured`: (layer, tokens that chose each of its experts), which come first."""

    zipf: float = 0.0
    measured: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.zipf <= 8:
            raise UsageError(f"the exponent must be 0 to 8, got {self.zipf}", where="--routing", hint="e.g. zipf:1.2")

    def shares(self, experts: int, layer: str) -> list[float]:
        """Every expert's share of a layer's rows. Raises: UsageError where the measured layer has another number of experts."""
        for name, counts in self.measured:
            if not fnmatch(layer, name):
                continue
            if len(counts) != experts:
                text = f"{name!r} was measured with {len(counts)} experts, {layer!r} has {experts}"
                raise UsageError(text, where="--routing", hint="measure the model that is planned")
            total = sum(counts)
            return [x / total for x in counts] if total else [1 / experts] * experts
        if not self.zipf:
            return [1 / experts] * experts
        weights = [float(i + 1) ** -self.zipf for i in range(experts)]
        random.Random(layer).shuffle(weights)
        return [x / sum(weights) for x in weights]

    def __str__(self) -> str:
        if self.measured:
            return f"measured in {len(self.measured)} layers"
        return f"zipf:{self.zipf:g}" if self.zipf else "uniform"


UNIFORM = Routing()
