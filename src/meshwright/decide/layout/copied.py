"""Expert layers of a captured graph with copies of hot experts: buffers with a part for every slot, weights that travel, and who reads them.

Cite: `plan.copies`. Left open there: buffers that drop tokens, which would drop others than without copies. Our answer: refused by name.
Deviations: none. Invariant: what the layer computes is what it computed, but for the order of sums. Cost: O(nodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec

from ...errors import Unsupported
from ...graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from ...plan.context import COPIES
from ...plan.copies import COPIED, ExpertCopies, blocks_of, places_of
from ...plan.experts import COUNTS, GIVEN, MLP, ROWS, SLOTS, TOKENS
from .cut import dtype_bytes

__all__ = ["copied_layers", "with_copies"]


def copied_layers(graph: OpGraph) -> dict[str, tuple[OpNode, OpNode, OpNode, OpNode]]:
    """By name, the expert layers that could have copies: (rows, counts, experts, sums) of each. Raises: Unsupported naming one that cannot."""
    node, readers = {n.name: n for n in graph.nodes}, dict[str, list[OpNode]]()
    for n in graph.nodes:
        for v in n.inputs:
            readers.setdefault(v, []).append(n)
    found = {}
    for n in graph.nodes:
        if n.target != MLP:
            continue
        rows, counts, after = node.get(n.inputs[0]), node.get(n.inputs[1]), readers.get(n.name, [])
        alike = [x.target for x in after] == [TOKENS] and all(v.startswith("param:") for v in n.inputs[2:4])
        if rows is None or counts is None or not alike or not _alike(rows, counts):
            raise _refused(n, "it is not rows, experts and sums as converted layers have them", "convert_experts(model)")
        tokens = next(x.outputs[0].shape[0] for x in graph.nodes if x.name == rows.inputs[0])
        if int(rows.args[-1]) < tokens:
            dropping = f"its buffers of {rows.args[-1]} rows for {tokens} tokens drop some"
            raise _refused(n, dropping, "convert_experts(model), whose capacity_factor 0 drops none")
        found[n.name] = (rows, counts, n, after[0])
    return found


def _alike(rows: OpNode, counts: OpNode) -> bool:
    return (rows.target, counts.target) == (ROWS, COUNTS) and rows.args[2] is None and rows.inputs[1] == counts.inputs[0]


def _refused(n: OpNode, why: str, instead: str) -> Unsupported:
    return Unsupported(f"no copies of experts of {n.module or n.name!r}: {why}", where="--spare", hint=f"{instead}, or --spare 0")


def with_copies(graph: OpGraph, copies: Mapping[str, ExpertCopies]) -> OpGraph:
    """`graph` with these copies, by layer. Raises: Unsupported for a layer that can have none."""
    if not copies:
        return graph
    layers, storages = copied_layers(graph), list(graph.storages)
    instead: dict[str, OpNode] = {}
    before: dict[str, list[OpNode]] = {}
    shapes = {f"param:{p.name}": p for p in graph.parameters}

    def value(owner: str, shape: tuple[int, ...], dtype: str) -> GraphValue:
        storages.append(Storage(size_bytes=prod(shape) * dtype_bytes(dtype), owner=owner))
        return GraphValue(shape=shape, dtype=dtype, storage=len(storages) - 1)

    def longer(n: OpNode, slots: int) -> GraphValue:
        """The result with a part for every slot."""
        old, shape = n.outputs[0], (slots, *n.outputs[0].shape[1:])
        storages[old.storage] = msgspec.structs.replace(storages[old.storage], size_bytes=prod(shape) * dtype_bytes(old.dtype))
        return msgspec.structs.replace(old, shape=shape)

    for name, x in copies.items():
        rows, counts, mlp, sums = layers[name]
        slots, index = x.members * (x.local + places_of(x)), rows.inputs[1]
        where = next(n.outputs[0] for n in graph.nodes if n.name == index)
        placing = Work(bytes_read=prod(where.shape) * 8, bytes_written=prod(where.shape) * 8, calls=4)
        slot = OpNode(
            name=f"{name}/slots", target=SLOTS, module=mlp.module, inputs=(index,), args=[{"value": index}, [], [], [], []],
            outputs=(value(f"{name}/slots", where.shape, "int64"),), forward=placing,
        )  # fmt: skip
        gate_up, down = (shapes[v] for v in mlp.inputs[2:4])
        wide, size = prod(gate_up.shape[1:]) + prod(down.shape[1:]), dtype_bytes(gate_up.dtype)
        moved, all_own = blocks_of(x) * wide * size, (gate_up.size_bytes + down.size_bytes) // x.members
        give = OpNode(
            name=f"{name}/given", target=GIVEN, module=mlp.module, inputs=mlp.inputs[2:4],
            args=[*({"value": v} for v in mlp.inputs[2:4]), [], blocks_of(x)],
            outputs=(value(f"{name}/given", (blocks_of(x), wide), gate_up.dtype),), forward=Work(bytes_read=moved, bytes_written=moved, calls=1),
            backward=Work(bytes_read=moved + all_own, bytes_written=moved + 2 * all_own, calls=2),
        )  # fmt: skip
        came = value(f"{name}/{COPIED}", (places_of(x), wide), gate_up.dtype)
        kept = OpNode(
            name=f"{name}/{COPIED}", target=COPIES, module=mlp.module, inputs=(give.name,), args=[{"value": give.name}], kwargs={"copies": x},
            outputs=(came,),
        )  # fmt: skip
        first = rows if next(n.name for n in graph.nodes if n.name in (rows.name, counts.name)) == rows.name else counts
        before.setdefault(first.name, []).extend((slot, give, kept))
        here = {"value": slot.name}
        instead |= {
            rows.name: msgspec.structs.replace(
                rows, inputs=(rows.inputs[0], slot.name), args=[rows.args[0], here, None, slots, rows.args[4]], outputs=(longer(rows, slots),),
                saved=(*rows.saved, slot.outputs[0].storage), forward=rows.forward.share(slots, x.experts),
            ),
            counts.name: msgspec.structs.replace(counts, inputs=(slot.name,), args=[here, slots, *counts.args[2:]], outputs=(longer(counts, slots),)),
            name: msgspec.structs.replace(
                mlp, inputs=(*mlp.inputs, kept.name), kwargs={**mlp.kwargs, "copies": {"value": kept.name}}, outputs=(longer(mlp, slots),),
                saved=(*mlp.saved, came.storage),
            ),
            sums.name: msgspec.structs.replace(sums, inputs=_with(sums.inputs, index, slot.name), args=_values(sums.args, index, slot.name)),
        }  # fmt: skip
    nodes = tuple(y for n in graph.nodes for y in (*before.get(n.name, ()), instead.get(n.name, n)))
    return msgspec.structs.replace(graph, nodes=nodes, storages=tuple(storages), scaling=None)


def _with(inputs: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if v == old else v for v in inputs)


def _values(args: list[Any], old: str, new: str) -> list[Any]:
    return [{"value": new} if a == {"value": old} else a for a in args]
