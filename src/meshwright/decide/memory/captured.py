"""The recomputation problem of a layer: its operators, the storages they read and make, what backward keeps.

A layer of a captured graph is a module path (`blocks.0`): every forward node that ran in it or below, on one rank; of a layout, a region
(`plan.recompute`). Storages that come from outside and are kept there anyway (parameters, what an earlier operator saved first) have size 0 here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ...errors import UnknownName
from ...graph.graph import OpGraph, OpNode
from ...graph.storages import CallStorages, repeated_modules
from ...plan.recompute import Region, Remade
from .problem import Layer, Operator

__all__ = ["core_attention", "layer_nodes", "layer_of", "layer_of_region", "repeated_layers"]

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_THROUGH = (
    "div", "mul", "add", "masked_fill", "where", "dropout", "native_dropout", "softmax", "_softmax", "to", "_to_copy", "view", "reshape", "expand",
    "_unsafe_view", "getitem", "sub",
)  # fmt: skip


def layer_nodes(graph: OpGraph, module: str) -> tuple[OpNode, ...]:
    """Raises: UnknownName when nothing ran there."""
    found = tuple(n for n in graph.nodes if n.module == module or n.module.startswith(f"{module}."))
    if not found:
        known = sorted({n.module for n in graph.nodes if n.module})
        raise UnknownName(f"no operator of {graph.model} ran in a module {module!r}", hint=f"modules: {', '.join(known[:12])}")
    return found


def repeated_layers(graph: OpGraph) -> tuple[str, ...]:
    """Paths `<list>.<number>` of the longest run of modules with equal operators: the layers of a transformer; () if nothing repeats."""
    best: tuple[str, ...] = ()
    for name, members in repeated_modules(graph).items():
        targets = {k: [n.target for n in nodes] for k, nodes in members.items()}
        alike = [k for k in sorted(members) if targets[k] == targets[min(members)]]
        if len(alike) > len(best):
            best = tuple(f"{name}.{k}" for k in alike)
    return best


def _short(node: OpNode) -> str:
    parts = node.target.split(".")
    return (parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]).rstrip("_") or node.target


def layer_of(graph: OpGraph, module: str, time_s: Callable[[OpNode], float]) -> Layer:
    """`time_s` prices one operator's forward. Raises: UnknownName."""
    nodes, storages = layer_nodes(graph, module), CallStorages(graph)
    earlier = _saved_before(graph, {n.name for n in nodes})
    calls = tuple(Remade(n, storages.reads(n) - makes, makes, may=True) for n in nodes if (makes := storages.makes(n)))
    needed = frozenset(s for n in nodes for s in n.saved)
    free = {i for i, s in enumerate(graph.storages) if s.owner.startswith(("param:", "buffer:"))} | earlier
    size = {s: 0 if s in free else graph.storages[s].size_bytes for s in needed.union(*(c.reads | c.makes for c in calls))}
    return layer_of_region(Region("", module, 0, calls, needed, size), time_s)


def layer_of_region(region: Region, time_s: Callable[[OpNode], float]) -> Layer:
    """The calls that may run again, with the storages they touch; `time_s` prices one call's forward on one rank."""
    number: dict[int, int] = {}

    def numbers(storages: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(number.setdefault(s, len(number)) for s in sorted(storages)))

    operators = tuple(
        Operator(name=c.node.name, time_s=time_s(c.node), reads=numbers(c.reads), makes=numbers(c.makes)) for c in region.calls if c.may
    )
    needed = numbers(region.needed)
    return Layer(operators=operators, sizes=tuple(region.size.get(s, 0) for s in number), needed=needed)


def _saved_before(graph: OpGraph, inside: set[str]) -> set[int]:
    found: set[int] = set()
    for n in graph.nodes:
        if n.name in inside:
            return found
        found.update(n.saved)
    return found


def core_attention(nodes: Sequence[OpNode]) -> tuple[str, ...]:
    """From the product of Q and K to the dropped-out probabilities: around every softmax of `nodes`, through cheap operators, up to a product.

    Fused attention is one operator and counts as its own core.
    """
    by_name = {n.name: n for n in nodes}
    readers: dict[str, list[OpNode]] = {}
    for n in nodes:
        for v in n.inputs:
            readers.setdefault(v, []).append(n)
    constant: set[str] = set()  # a mask made on the spot belongs to the core as well: reading it would keep it
    for n in nodes:
        if all(v in constant for v in n.inputs):
            constant.add(n.name)
    found = {n.name for n in nodes if "scaled_dot_product_attention" in n.target}
    for n in nodes:
        if _short(n) not in ("softmax", "_softmax"):
            continue
        members, stack = {n.name}, [n]
        while stack:  # towards the product of Q and K
            for v in stack.pop().inputs:
                before = by_name.get(v)
                if before is not None and before.name not in members and (
                    before.name in constant or _short(before) in _PRODUCTS or _short(before) in _THROUGH
                ):
                    members.add(before.name)
                    if _short(before) not in _PRODUCTS:
                        stack.append(before)
        stack = [n]
        while stack:  # towards the product with V
            for after in readers.get(stack.pop().name, ()):
                if after.name not in members and (_short(after) in _THROUGH or _short(after) in _PRODUCTS):
                    members.add(after.name)
                    if _short(after) not in _PRODUCTS:
                        stack.append(after)
        if any(_short(by_name[m]) in _PRODUCTS for m in members):
            found |= members
    return tuple(n.name for n in nodes if n.name in found)
