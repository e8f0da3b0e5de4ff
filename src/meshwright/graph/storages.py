"""What the calls of a captured graph read and write, by storage, and the layers that repeat in it."""

from __future__ import annotations

from collections.abc import Mapping

from .graph import OpGraph, OpNode

__all__ = ["CallStorages", "repeated_modules", "works_in_place"]


class CallStorages:
    """Views cost nothing and make nothing: who reads a view reads the storage that it lies in."""

    def __init__(self, graph: OpGraph) -> None:
        self.of = {n.name: n.outputs[0].storage for n in graph.nodes if n.outputs}
        self.of |= {f"input:{i}": given.storage for i, given in enumerate(graph.inputs)}
        self._owned: dict[str, set[int]] = {}
        for index, entry in enumerate(graph.storages):
            self._owned.setdefault(entry.owner, set()).add(index)

    def makes(self, n: OpNode) -> frozenset[int]:
        """Storages that a call writes: its own and, where it works in place, its operand's."""
        made = {*self._owned.get(n.name, ())}
        if n.forward.calls:  # else a view, or the choice of one of several results
            reads = self.reads(n)
            made |= {o.storage for o in n.outputs if o.storage >= 0 and (o.storage not in reads or works_in_place(n))}
        return frozenset(made)

    def reads(self, n: OpNode) -> frozenset[int]:
        return frozenset(self.of[v] for v in n.inputs if self.of.get(v, -1) >= 0)


def works_in_place(node: OpNode) -> bool:
    parts = node.target.split(".")
    return len(parts) > 1 and parts[1].endswith("_") and not parts[1].startswith("_")


def repeated_modules(graph: OpGraph) -> Mapping[str, Mapping[int, list[OpNode]]]:
    """Module lists by path: their members' calls by number."""
    lists: dict[str, dict[int, list[OpNode]]] = {}
    for n in graph.nodes:
        parts = n.module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and i:
                lists.setdefault(".".join(parts[:i]), {}).setdefault(int(part), []).append(n)
                break
    return lists
