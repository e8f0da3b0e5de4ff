"""A captured graph as the search for tensor-parallel regions asks for it: nodes by name, who reads what, shapes, products of weights."""

from __future__ import annotations

from typing import NamedTuple

from ...graph.graph import OpGraph, OpNode
from .sharding import short_name
from .split import made_from

__all__ = ["GraphIndex", "Product"]


class Product(NamedTuple):
    """A matrix product of an activation and a parameter. `columns`: the weight's dimension that becomes the features of the result."""

    x: str
    weight: str
    bias: str  # "": none
    columns: int
    turned: str = ""  # the operator that transposes the weight before, if there is one


class GraphIndex:
    """A graph's nodes by name, who reads what, and shapes."""

    def __init__(self, graph: OpGraph) -> None:
        self.node = {n.name: n for n in graph.nodes}
        self.order = {n.name: i for i, n in enumerate(graph.nodes)}
        self.readers: dict[str, list[str]] = {}
        for n in graph.nodes:
            for value in dict.fromkeys(n.inputs):
                self.readers.setdefault(value, []).append(n.name)
        self.shapes: dict[str, tuple[int, ...]] = {n.name: n.outputs[0].shape for n in graph.nodes if n.outputs}
        self.shapes |= {f"param:{p.name}": p.shape for p in graph.parameters} | {f"buffer:{p.name}": p.shape for p in graph.buffers}
        self.shapes |= {f"input:{i}": x.shape for i, x in enumerate(graph.inputs)}
        self.outputs = set(graph.outputs)
        self.param_readers: dict[str, int] = {v: len(r) for v, r in self.readers.items() if v.startswith("param:")}

        self.from_input: set[str] = set()
        self.trained_params = frozenset(f"param:{p.name}" for p in graph.parameters if p.trainable)
        self.made_from_params = made_from(graph, {f"param:{p.name}" for p in graph.parameters})
        for n in graph.nodes:
            if any(v.startswith("input:") or v in self.from_input for v in n.inputs):
                self.from_input.add(n.name)

    def product(self, name: str, *, tied: bool = False) -> Product | None:
        """What `name` multiplies, if it is an activation and a matrix that nothing else reads (`tied`: but embeddings)."""
        n = self.node.get(name)
        kind = short_name(n.target) if n is not None else ""
        if n is None or kind not in ("linear", "addmm", "mm", "matmul") or len(n.inputs) < 2 + (kind == "addmm"):
            return None
        if kind == "linear":
            found = Product(n.inputs[0], n.inputs[1], n.inputs[2] if len(n.inputs) > 2 else "", 0)
        elif kind == "addmm":
            found = Product(n.inputs[1], n.inputs[2], n.inputs[0], 1)
            if n.kwargs.get("beta", 1) != 1 or n.kwargs.get("alpha", 1) != 1 or len(self.shapes[found.bias]) != 1:
                return None
        else:
            found = Product(n.inputs[0], n.inputs[1], "", 1)
        if (before := self.node.get(found.weight)) is not None and self.readers[found.weight] == [name] and _turns(before):
            found = found._replace(weight=before.inputs[0], columns=1 - found.columns, turned=before.name)
        params = [p for p in found[1:3] if p]
        own = all(p.startswith("param:") and (self.param_readers[p] == 1 or (tied and self.only_embeddings(p, name))) for p in params)
        return found if own and not found.x.startswith("param:") and len(self.shapes[found.weight]) == 2 else None

    def is_linear(self, name: str, *, tied: bool) -> bool:
        n = self.node.get(name)
        return n is not None and short_name(n.target) == "linear" and self.product(name, tied=tied) is not None

    def products_of(self, x: str) -> list[str]:
        """All products of the activation `x`."""
        return [r for r in self.readers.get(x, ()) if (p := self.product(r)) is not None and p.x == x]

    def only_embeddings(self, param: str, but: str) -> bool:
        return all(r == but or short_name(self.node[r].target) == "embedding" for r in self.readers[param])


def _turns(n: OpNode) -> bool:
    """Whether it transposes a matrix."""
    kind = short_name(n.target)
    return kind in ("t", "numpy_T", "mT") or (kind == "transpose" and len(n.outputs[0].shape) == 2)
