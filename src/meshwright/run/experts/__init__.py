"""Expert layers that run: what ranks agree on before a step, and the walk of a choice's programs with its gradients."""

from __future__ import annotations

from .agreement import Agreement, Facts, agree
from .copies import CopyPrices, ExpertCopies
from .exchange import ExchangeRunner, Held
from .weights import WeightLayout

__all__ = ["Agreement", "CopyPrices", "ExchangeRunner", "ExpertCopies", "Facts", "Held", "WeightLayout", "agree"]
