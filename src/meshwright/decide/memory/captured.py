"""The recomputation problem of a layer of a captured graph: its operators, the storages they read and make, what backward keeps.

A layer is a module path (`blocks.0`): every forward node that ran in it or below. Views cost nothing and make nothing: who reads a view
reads the storage. Storages that come from outside and are kept there anyway (parameters, what an earlier operator saved first) have
size 0 here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...errors import UnknownName
from ...graph.graph import OpGraph, OpNode
from .problem import Layer, Operator

__all__ = ["core_attention", "layer_nodes", "layer_of", "repeated_layers"]

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
    lists: dict[str, dict[int, list[str]]] = {}
    for n in graph.nodes:
        parts = n.module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and i:
                lists.setdefault(".".join(parts[:i]), {}).setdefault(int(part), []).append(n.target)
                break
    best: tuple[str, ...] = ()
    for name, members in lists.items():
        alike = [k for k in sorted(members) if members[k] == members[min(members)]]
        if len(alike) > len(best):
            best = tuple(f"{name}.{k}" for k in alike)
    return best


def _short(node: OpNode) -> str:
    parts = node.target.split(".")
    return (parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]).rstrip("_") or node.target


def layer_of(graph: OpGraph, module: str, time_s: Callable[[OpNode], float]) -> tuple[Layer, dict[int, int]]:
    """The layer, and graph storage -> storage of the layer. `time_s` prices one operator's forward. Raises: UnknownName."""
    nodes = layer_nodes(graph, module)
    inside = {n.name for n in nodes}
    storage = _storages(graph)
    earlier = _saved_before(graph, inside)
    used: dict[int, int] = {}
    sizes: list[int] = []

    def number(s: int) -> int:
        if s not in used:
            used[s] = len(sizes)
            held = graph.storages[s].owner.startswith(("param:", "buffer:")) or s in earlier
            sizes.append(0 if held else graph.storages[s].size_bytes)
        return used[s]

    owned: dict[str, list[int]] = {}
    for s, entry in enumerate(graph.storages):
        owned.setdefault(entry.owner, []).append(s)
    operators = []
    for n in nodes:
        reads = {storage[v] for v in n.inputs if storage.get(v, -1) >= 0}
        makes = {*owned.get(n.name, ())}
        if n.forward.calls:  # else a view, or the choice of one of several results
            makes |= {o.storage for o in n.outputs if o.storage >= 0 and (o.storage not in reads or _in_place(n))}
        if not makes:
            continue
        operators.append(
            Operator(name=n.name, time_s=time_s(n), reads=tuple(sorted(map(number, reads - makes))), makes=tuple(sorted(map(number, makes))))
        )
    needed = {number(s) for n in nodes for s in n.saved}
    return Layer(operators=tuple(operators), sizes=tuple(sizes), needed=tuple(sorted(needed))), used


def _in_place(node: OpNode) -> bool:
    parts = node.target.split(".")
    return len(parts) > 1 and parts[1].endswith("_") and not parts[1].startswith("_")


def _storages(graph: OpGraph) -> Mapping[str, int]:
    found = {n.name: n.outputs[0].storage for n in graph.nodes if n.outputs}
    found |= {f"input:{i}": v.storage for i, v in enumerate(graph.inputs)}
    return found


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
