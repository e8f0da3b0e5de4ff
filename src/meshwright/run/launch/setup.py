"""What the coordinating process works out once and every rank reads from the store: the traced model and all ranks' orders, of each of a plan's
shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...plan.plan import Plan
from ...plan.shapes import plans_of_shapes
from ...program.tables import I32
from ..machine.process import blob_get, blob_put
from ..steps.forward_graph import ForwardGraph
from .outcome import evaluation_graph_of, forward_graph, walk_orders

__all__ = ["Setup", "fetch_orders", "fetch_setup", "make_setup", "orders_from", "orders_to", "put_orders"]


@dataclass(frozen=True)
class Setup:
    """Of one shape. `orders`: of every rank, positions to steps of the inlined program."""

    graph: ForwardGraph
    orders: Sequence[I32]


def make_setup(store: Any, plan: Plan, *, evaluation: bool) -> list[Setup]:
    """Works it out for each shape of the plan, the largest first, and puts it into the store. Raises: as `forward_graph`, `evaluation_graph_of`."""
    found = []
    for number, one in enumerate(plans_of_shapes(plan)):
        assert one.layout is not None
        made = Setup(forward_graph(one, one.layout), walk_orders(one))
        blob_put(store, f"setup/graph/{number}", made.graph.to_json())
        put_orders(store, made.orders, number)
        found.append(made)
    if evaluation:
        assert plan.layout is not None
        blob_put(store, "setup/evaluation", evaluation_graph_of(plan, plan.layout, found[0].graph).to_json())
    return found


def fetch_setup(store: Any, shapes: int) -> list[Setup]:
    """What `make_setup` put there, for so many shapes."""
    return [Setup(ForwardGraph.from_json(blob_get(store, f"setup/graph/{i}")), fetch_orders(store, i)) for i in range(shapes)]


def fetch_orders(store: Any, number: int = 0) -> list[I32]:
    return orders_from(blob_get(store, f"setup/orders/{number}"))


def put_orders(store: Any, orders: Sequence[I32], number: int = 0) -> None:
    blob_put(store, f"setup/orders/{number}", orders_to(orders))


def orders_to(orders: Sequence[I32]) -> bytes:
    return msgspec.json.encode([o.tolist() for o in orders])


def orders_from(data: bytes) -> list[I32]:
    return [np.asarray(o, np.int32) for o in msgspec.json.decode(data, type=list[list[int]])]
