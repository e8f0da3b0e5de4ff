"""Whom to cite for a plan of any kind."""

from __future__ import annotations

from ..cite import Cite
from ..decide.collective import STRATEGIES as COLLECTIVE
from ..decide.collective.sparse import STRATEGIES as SPARSE
from ..decide.experts import STRATEGIES as EXPERTS
from ..decide.pipeline import STRATEGIES as PIPELINE
from ..decide.pipeline import fill, offload
from ..decide.place import STRATEGIES as PLACE
from ..decide.strategies import cite_of
from ..decide.tables import STRATEGIES as TABLES
from ..decide.traffic.adaqp import STRATEGIES as HALO
from ..interop.msccl import CITE as MSCCL_CITE
from ..plan.plan import Plan
from .training.decisions import cites_of

__all__ = ["citations"]


def citations(plan: Plan) -> list[tuple[str, Cite]]:
    """(decision, Cite) of every published method that the plan uses."""
    if plan.kind == "training":
        tables = plan.decisions.get("tables")
        return cites_of(plan.decisions) + ([("tables", cite)] if tables and (cite := _cite("tables", tables["strategy"])) else [])
    return [(key, cite) for key, entry in plan.decisions.items() for name in entry["strategy"].split("+") if (cite := _cite(key, name))]


def _cite(key: str, strategy: str) -> Cite | None:
    if key.startswith("collective:"):
        imported = MSCCL_CITE if strategy == "msccl" else None
        return imported or cite_of("collective", COLLECTIVE, strategy) or cite_of("collective.sparse", SPARSE, strategy)
    if key == "pipeline":
        return cite_of("pipeline", PIPELINE, strategy)
    if key == "experts":
        return cite_of("experts", EXPERTS, strategy)
    if key == "place":
        return cite_of("place", PLACE, strategy)
    if key == "tables":
        return cite_of("tables", TABLES, strategy)
    if key == "halo":
        return cite_of("traffic.halo", HALO, strategy)
    return {"fill": fill.CITE, "offload": offload.CITE}.get(key)
