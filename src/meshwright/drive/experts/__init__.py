"""Expert layers: choices with their programs, ranked by simulation, checked, beside bounds; and the programs that a running layer walks."""

from __future__ import annotations

from .plan import RankedChoice, plan_experts, rank_choices, table_of
from .programs import ALGORITHMS, LayerPrograms

__all__ = ["ALGORITHMS", "LayerPrograms", "RankedChoice", "plan_experts", "rank_choices", "table_of"]
