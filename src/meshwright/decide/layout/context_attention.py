"""Attention over positions that ranks divide, as the steps and exchanges of `plan.context`: what `context` puts in its place in a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from ...plan.context import ALL_TO_ALL, HEADS, JOIN, OUT, RING_BLOCK, RING_END, SHIFT, UNITE, part_of
from .cut import dtype_bytes
from .sequence_rules import Along
from .sharding import short_name
from .split import Refused, Split

__all__ = ["ATTENTION", "AttentionSteps"]

ATTENTION = "scaled_dot_product_attention"


@dataclass
class AttentionSteps(ABC):
    """The graph so far. `states`: of values that are divided; `of_param`: those made of parameters; `shapes`: whole."""

    graph: OpGraph
    parts: int
    exchange: str
    states: dict[str, Along | None] = field(default_factory=dict)
    nodes: list[OpNode] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    of_param: set[str] = field(default_factory=set)
    attended: int = 0

    @abstractmethod
    def _part(self, n: OpNode, value: str, along: Along) -> OpNode:
        """`n` with this rank's part of an operand in its place."""

    def attention(self, n: OpNode) -> None:
        q, k, v = n.inputs[:3]
        shapes = [self.shapes[x] for x in (q, k, v)]
        if argument(n, 4, "dropout_p", 0.0):
            raise Refused(f"{n.name}: it drops attention weights, whose bits no rank has; set attention dropout to 0")
        if any(len(s) != 4 for s in shapes) or any(s[2] != shapes[0][2] for s in shapes):
            raise Refused(f"{n.name}: queries {list(shapes[0])} and keys {list(shapes[1])} are not positions of one sequence")
        if any((a := self.states.get(x)) is None or a.split != Split(2) for x in (q, k, v)):
            raise Refused(f"{n.name}: query, key and value are not all divided by positions; in cross-attention one of them is whole")
        mask = self._mask(n, shapes[0])
        k, v = self._unrepeated(n, k), self._unrepeated(n, v)
        groups, heads = self.shapes[k][1], shapes[0][1]
        if self.shapes[v][1] != groups or heads % groups:
            raise Refused(f"{n.name}: {groups} key and {self.shapes[v][1]} value heads for {heads} query heads")
        self.states[n.name] = Along(Split(2), shapes[0][2])
        self.attended += 1
        (self._ulysses if self.exchange == "ulysses" else self._ring)(n, q, k, v, mask)

    def _mask(self, n: OpNode, queries: Sequence[int]) -> tuple[str, ...]:
        """The mask, which every rank has whole: pairs of positions, the same for all heads."""
        found = n.inputs[3:4]
        for v in found:
            shape = self.shapes[v]
            if v in self.of_param or self.states.get(v) is not None:
                raise Refused(f"{n.name}: its mask {v} is made of what is trained, or of positions")
            if len(shape) != 4 or shape[2:] != (queries[2], queries[2]) or shape[1] != 1 or shape[0] not in (1, queries[0]):
                raise Refused(f"{n.name}: its mask of shape {list(shape)} is not of all pairs of positions, the same for all heads")
        return found

    def _unrepeated(self, n: OpNode, value: str) -> str:
        """Key-value heads before they are repeated for their query heads: by repeat_interleave, or unsqueeze, expand and reshape."""
        made = {x.name: x for x in self.nodes}
        at, shape = value, self.shapes[value]
        while (x := made.get(at)) is not None:
            name = short_name(x.target)
            if name == "repeat_interleave" and argument(x, 2, "dim", None) in (1, -3):
                return x.inputs[0]
            if name not in ("reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "expand", "unsqueeze", "slice"):
                break
            source = self.shapes[x.inputs[0]]
            if name in ("unsqueeze", "slice") and len(source) == 4 and (source[0], *source[2:]) == (shape[0], *shape[2:]) and source[1] < shape[1]:
                return x.inputs[0] if self.shapes[x.name][:3] == (source[0], source[1], 1) else value
            if name in ("reshape", "view", "_unsafe_view", "flatten") and len(source) != 5:
                break
            at = x.inputs[0]
        return value

    def local(self, shape: Sequence[int], along: Along) -> tuple[int, ...]:
        return tuple(d // self.parts if i == along.split.dim else d for i, d in enumerate(shape))

    def made(self, name: str, shape: tuple[int, ...], dtype: str) -> GraphValue:
        size = dtype_bytes(dtype)
        for d in shape:
            size *= d
        self.storages.append(Storage(size_bytes=size, owner=name))
        return GraphValue(shape=shape, dtype=dtype, storage=len(self.storages) - 1)

    def _add(self, n: OpNode, suffix: str, target: str, inputs: Sequence[str], made: GraphValue, **more: Any) -> str:
        """Another node of attention `n`."""
        name = f"{n.name}/{suffix}"
        owner = self.storages[made.storage]
        self.storages[made.storage] = Storage(size_bytes=owner.size_bytes, owner=name)
        args = [{"value": v} for v in inputs] + more.pop("args", [])
        self.nodes.append(OpNode(name=name, target=target, module=n.module, inputs=tuple(inputs), args=args, outputs=(made,), **more))
        self.shapes[name] = made.shape
        self.of_param.add(name)
        return name

    def _copy(self, made: GraphValue) -> Work:
        size = self.storages[made.storage].size_bytes
        return Work(bytes_read=size, bytes_written=size, calls=1)

    def _storage_of(self, value: str) -> int:
        return next(x for x in reversed(self.nodes) if x.name == value).outputs[0].storage

    def _ring(self, n: OpNode, q: str, k: str, v: str, mask: tuple[str, ...]) -> None:
        b, heads, whole, keys = self.shapes[q]
        groups, width, dtype, s = self.shapes[k][1], self.shapes[v][3], n.outputs[0].dtype, whole // self.parts
        causal, scale = argument(n, 5, "is_causal", False), argument(n, 6, "scale", None)
        facts = [keys, bool(causal), float(keys**-0.5 if scale is None else scale)]
        wide = "float64" if dtype == "float64" else "float32"
        joined = self.made("", (b, groups, s, keys + width), dtype)
        kv = [self._add(n, "kv0", JOIN, (k, v), joined, forward=self._copy(joined), backward=self._copy(joined))]
        rounds = [x.share(1, self.parts * self.parts) for x in (n.forward, n.backward)]
        for j in range(1, self.parts):
            again = [True] if self.exchange == "ring-again" else []
            kv.append(self._add(n, f"kv{j}", SHIFT, (kv[-1],), self.made("", (b, groups, s, keys + width), dtype), args=again))
        state: list[str] = []
        for m in mask:  # of this rank's queries
            self._part(n, m, Along(Split(2), whole))
        mask = tuple(part_of(n.name, m) for m in mask)
        of_mask = tuple(self._storage_of(m) for m in mask)
        for j in range(self.parts - 1):
            made = self.made("", (b, heads, s, width + 2), wide)
            kept = (self._storage_of(q), self._storage_of(kv[j]), *of_mask)
            state = [self._add(
                n, f"r{j}", RING_BLOCK, (q, kv[j], *state, *mask), made, forward=rounds[0], backward=rounds[1], saved=kept, args=[j, *facts],
            )]  # fmt: skip
        total = self.made(f"{n.name}/total", (b, heads, s), wide)
        saved = (self._storage_of(q), self._storage_of(kv[-1]), n.outputs[0].storage, total.storage, *of_mask)
        inputs = (q, kv[-1], *state, *mask)
        self.nodes.append(msgspec.structs.replace(
            n, target=RING_END, inputs=inputs, args=[*({"value": x} for x in inputs), self.parts - 1, *facts], kwargs={},
            forward=rounds[0], backward=rounds[1], saved=saved,
        ))  # fmt: skip

    def _ulysses(self, n: OpNode, q: str, k: str, v: str, mask: tuple[str, ...]) -> None:
        b, heads, whole, keys = self.shapes[q]
        groups, width, dtype, s, parts = self.shapes[k][1], self.shapes[v][3], n.outputs[0].dtype, whole // self.parts, self.parts
        if heads % parts or (groups % parts and parts % groups):
            near = max(d for d in range(1, parts + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0))
            raise Refused(f"{n.name}: {heads} query and {groups} key-value heads do not divide by {parts} ranks; ring does, or --context {near}")
        own, held = heads // parts, max(1, groups // parts)
        causal, scale = argument(n, 5, "is_causal", False), argument(n, 6, "scale", None)
        sizes = [own, held, keys, width]
        sent = self.made("", (parts, b * s * (own * keys + held * (keys + width))), dtype)
        out = self._add(n, "out", OUT, (q, k, v), sent, args=[parts], forward=self._copy(sent), backward=self._copy(sent))
        came = self._add(n, "in", ALL_TO_ALL, (out,), self.made("", sent.shape, dtype))
        attended = self.made("", (parts, b * own * s * width), dtype)
        self.storages.append(Storage(size_bytes=3 * self.storages[sent.storage].size_bytes, owner=f"{n.name}/heads"))  # in order, result, sums
        found = self._add(
            n, "heads", HEADS, (came, *mask), attended, args=[b, s, sizes, bool(causal), scale], forward=n.forward.share(1, parts),
            backward=n.backward.share(1, parts), saved=(len(self.storages) - 1,),
        )  # fmt: skip
        back = self._add(n, "back", ALL_TO_ALL, (found,), self.made("", attended.shape, dtype))
        copied = self._copy(attended)
        self.nodes.append(msgspec.structs.replace(
            n, target=UNITE, inputs=(back,), args=[{"value": back}, b, s, heads], kwargs={}, forward=copied, backward=copied, saved=(),
        ))  # fmt: skip


def argument(n: OpNode, position: int, name: str, default: Any) -> Any:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name, default)
