"""The shipped table of base graphs: the best Cayley digraphs that longer searches than a command's own have found, by nodes, ports and kind of cable.

`python tools/base_graphs.py` makes it again, with the same search (`cayley.search`) and a stated number of evaluations and seed. A row is a proposal
only: it is evaluated like any other candidate. So a damaged or stale table costs quality, not truth.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from ....errors import FormatError

__all__ = ["TABLE", "BaseGraph", "shipped_graphs"]

TABLE = "base_graphs.json"
SCHEMA = "meshwright.base-graphs"


class BaseGraph(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The group Z_m x|_k Z_n and generators, in numbers of `cayley.Group`. `paired`: every generator's inverse is one too."""

    nodes: int
    ports: int
    paired: bool
    m: int
    n: int
    k: int
    generators: tuple[int, ...]


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """`evaluations`: of the search at every size, from `seed`."""

    schema: str
    version: int
    evaluations: int
    seed: int
    graphs: list[BaseGraph]


@cache
def shipped_graphs() -> dict[tuple[int, int, bool], tuple[BaseGraph, ...]]:
    """By (nodes, ports, two-way cables only). Raises: FormatError for a damaged installation."""
    try:
        table = msgspec.json.decode(files(__package__).joinpath(TABLE).read_bytes(), type=Table)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise FormatError(f"the shipped table of base graphs cannot be read: {error}", where=TABLE, hint="install the package again") from None
    if table.schema != SCHEMA or table.version != 1:
        raise FormatError(f"is {table.schema[:32]!r} {table.version}, not {SCHEMA!r} 1", where=TABLE, hint="install the package again")
    found: dict[tuple[int, int, bool], tuple[BaseGraph, ...]] = {}
    for row in table.graphs:
        key = row.nodes, row.ports, row.paired
        found[key] = (*found.get(key, ()), row)
    return found
