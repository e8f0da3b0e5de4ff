"""A model's embedding tables placed as a table plan says, so that `meshwright.plan` and `parallelize` spread them over data replicas.

    place_tables(model, "tables.json")                       # of `meshwright tables plan --model`; in place
    plan = meshwright.plan(model, batch, expert=2, ...)      # two neighbours divide the tables
    whole_tables(model, step.state_dict(full=True))          # under the owner's names
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..capture.placed_tables import PlacedTables, read_placed, whole_tables
from ..capture.placed_tables import place_tables as _place
from ..errors import UsageError
from ..plan.plan import Plan

__all__ = ["PlacedTables", "place_tables", "whole_tables"]


def place_tables(model: nn.Module, plan: Plan | str | Path) -> PlacedTables:
    """Puts the tables of `model`, in place, into one parameter; parts of it lie as a table plan, or its file, says.

    The model then computes what it did. Its tables' parameters are one, `placed_tables.pack`; make the optimizer after this.
    Raises: UsageError for a model that is none, and naming the table that is not there or cannot be placed; FormatError; UnknownName."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} was given", where="place_tables", hint="place_tables(nn.Module, PLAN)")
    if isinstance(plan, Plan):
        from ..drive.tables import shards_of, tables_of

        return _place(model, tables_of(plan), shards_of(plan), plan.placement)
    return _place(model, *read_placed(str(plan)))
