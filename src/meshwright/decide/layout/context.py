"""A captured graph as one rank of a context group computes it: its positions of every sequence, and attention by exchanges.

Cite: `plan.context.RING` and `ULYSSES`.
Left open by the papers: where sequences are in a module that nobody annotated. Our answer: they begin where a token-wise input ([samples, positions,
...]) meets a parameter, and are carried through operators that keep positions apart (`sequence_rules`). What is made of inputs alone (labels shifted
by one, masks, position numbers) is computed whole by every rank, and each takes its positions of the result; so is what is made of parameters alone.
Attention is `scaled_dot_product_attention` over the positions of one sequence. Every other operator that brings positions together is refused by name.
Deviations: ring: keys and values that came are kept until backward instead of being sent again, and only their gradients travel then.
Invariant: the loss of a rank is the mean (or sum) over its positions; the mean over a group is that of all.
Cost: O(nodes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import Unsupported
from ...graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from ...plan.context import ALL_TO_ALL, HEADS, JOIN, OUT, PART, RING_BLOCK, RING_END, SHIFT, UNITE, part_of, require_positions
from .cut import dtype_bytes
from .operator_rules import OPERATORS
from .sequence_rules import Along, carried
from .sharding import POINTWISE, POINTWISE_UNARY, short_name
from .split import Needs, Refused, Split

__all__ = ["context_graph"]

ATTENTION = "scaled_dot_product_attention"
LOSSES = frozenset({
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "mean", "sum",
})  # fmt: skip
NUMBERS = frozenset({"add", "sub", "mul", "div", "neg", "to", "_to_copy", "clone", "view", "reshape", "squeeze", "contiguous", "float", "double"})
APART = frozenset({"repeat_interleave", "einsum", "view_as_complex", "view_as_real"})  # beside those of `sequence_rules`


_RECENT: deque[tuple[OpGraph, int, str, OpGraph | Unsupported]] = deque(maxlen=16)  # by identity: graphs are immutable, and too large to hash


def context_graph(graph: OpGraph, parts: int, exchange: str) -> OpGraph:
    """`graph` for one of `parts` ranks; the last few are remembered. Raises: Unsupported, naming the operator and what to change."""
    if parts == 1:
        return graph
    made = next((x for g, n, way, x in list(_RECENT) if g is graph and (n, way) == (parts, exchange)), None)
    if made is None:
        try:
            made = _Positions(graph, parts, exchange).run()
        except Unsupported as error:
            made = error
        _RECENT.append((graph, parts, exchange, made))
    if isinstance(made, Unsupported):
        raise made
    return made


@dataclass
class _Positions:
    graph: OpGraph
    parts: int
    exchange: str
    states: dict[str, Along | None] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)  # losses of this rank's positions
    nodes: list[OpNode] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # whole
    storages: list[Storage] = field(default_factory=list)
    of_input: set[str] = field(default_factory=set)
    of_param: set[str] = field(default_factory=set)
    attended: int = 0

    def run(self) -> OpGraph:
        g = self.graph
        if not g.joint or g.method == "opaque":
            raise self.refused("the model could not be traced", "its positions cannot be told apart")
        if all(short_name(n.target) != ATTENTION for n in g.nodes):
            raise self.refused("there is no attention over positions of a sequence", "the model calls no scaled_dot_product_attention")
        self.storages = list(g.storages)
        self.shapes = {f"param:{p.name}": p.shape for p in g.parameters} | {f"buffer:{p.name}": p.shape for p in g.buffers}
        self.shapes |= {f"input:{i}": x.shape for i, x in enumerate(g.inputs)} | {n.name: n.outputs[0].shape for n in g.nodes if n.outputs}
        for n in g.nodes:
            if any(v.startswith("input:") or v in self.of_input for v in n.inputs):
                self.of_input.add(n.name)
            if any(v.startswith("param:") or v in self.of_param for v in n.inputs):
                self.of_param.add(n.name)
            self.take(n)
        if not self.attended or g.outputs[0] not in self.numbers:
            raise self.refused("no sequence is divided", "no attention is over positions of an input, or the loss is not over these")
        return self.finished()

    def refused(self, what: str, why: str, where: str = "") -> Unsupported:
        hint = "use --context 1, or change that part of the model"
        return Unsupported(f"context degree {self.parts}: {what}: {why}", where=where or self.graph.model, hint=hint)

    # ---- one node ----------------------------------------------------------------------------------------------
    def take(self, n: OpNode) -> None:
        try:
            self._take(n)
        except Refused as why:
            module = f" in {n.module}" if n.module else ""
            raise self.refused(f"{n.target}{module}", str(why), where=f"node {n.name}") from None

    def _take(self, n: OpNode) -> None:
        if n.name not in self.of_param or not n.outputs:  # of inputs and constants alone
            self.nodes.append(n)
            return
        name = short_name(n.target)
        if any(v in self.numbers for v in n.inputs):
            self._number(n, name)
            return
        n = self._cut_first(n)
        found = {v: a for v in n.inputs if (a := self.states.get(v)) is not None}
        if not found:
            self.nodes.append(n)
            return
        if name == ATTENTION:
            self._attention(n)
            return
        self.states[n.name] = state = None if n.outputs[0].shape == () and name in LOSSES else self._state(n, name, found)
        if n.random and name not in ("dropout", "native_dropout"):
            raise Refused(f"{n.name}: draws random numbers for the whole value")
        if state is None:
            if any(self.states.get(v) is None and self._aligned(n, v) for v in n.inputs):
                n = self._alike(n, next(v for v in n.inputs if v in found))
            self.numbers.add(n.name)
        else:
            n = self._whole_operands(n, name, state)
        self.nodes.append(n)

    def _number(self, n: OpNode, name: str) -> None:
        others = [v for v in n.inputs if v not in self.numbers]
        if name not in NUMBERS or n.outputs[0].shape != () or any(self.states.get(v) is not None or self.shapes[v] != () for v in others):
            raise Refused(f"{n.name}: {n.target} of a loss that is a mean over each rank's positions")
        if name in ("mul", "div") and (len(n.inputs) - len(others) > 1 or any(v in self.of_param for v in others)):
            raise Refused(f"{n.name}: {n.target} of two losses, each a mean over a rank's positions")
        if name in ("add", "sub") and any(v in self.of_param for v in others):
            raise Refused(f"{n.name}: adds what every rank has whole to a loss")  # each rank would give its gradient in full: it is right only as a mean
        self.numbers.add(n.name)
        self.nodes.append(n)

    def _state(self, n: OpNode, name: str, found: dict[str, Along]) -> Along:
        """What the result is. Raises: Refused."""
        if name == "embedding":
            if n.inputs[1] not in found or n.inputs[0] in found:
                raise Refused(f"{n.name}: looks up in a table that is made of positions")
            return found[n.inputs[1]]
        if name in LOSSES and n.outputs[0].shape != () and name not in ("mean", "sum"):  # without a reduction
            first = n.inputs[0]
            return Along(found[first].split._replace(dim=0), found[first].extent)
        known: dict[str, Along | None] = dict(found)
        while True:
            try:
                state = self._carried(n, name, known)
                break
            except Needs as need:
                if need.value in known:
                    raise Refused(f"{n.name}: {n.target} of {need.value}, which is whole") from None
                known[need.value] = Along(need.split, next(iter(found.values())).extent)
        if state is None or state.split.groups or state.split.mixed or state.split.repeated:
            raise Refused(f"{n.name}: no rule for {n.target} on positions")
        size = n.outputs[0].shape[state.split.dim]
        if size % state.split.blocks or size // state.split.blocks % (2 * self.parts):
            raise Refused(f"{n.name}: dimension {state.split.dim} of size {size} does not hold whole chunks of positions")
        return state

    def _carried(self, n: OpNode, name: str, known: dict[str, Along | None]) -> Along | None:
        if name not in APART and not (name in OPERATORS and any(v not in known for v in n.inputs) and name in ("cat", "stack")):
            return carried(n, known, self.shapes)
        found = OPERATORS[name](n, {v: a.split for v, a in known.items() if a is not None}, self.shapes)
        return Along(found, next(a.extent for a in known.values() if a is not None)) if isinstance(found, Split) else None

    # ---- operands that every rank has whole --------------------------------------------------------------------
    def _cut_first(self, n: OpNode) -> OpNode:
        """Where nothing is split yet: token-wise inputs that meet a parameter here are."""
        if any(self.states.get(v) is not None for v in n.inputs):
            return n
        for v in dict.fromkeys(n.inputs):
            shape = self.shapes.get(v, ())
            token_wise = len(shape) >= 2 and shape[0] == self.graph.batch_size and shape[1] > 1
            if v not in self.of_param and (v in self.of_input or v.startswith("input:")) and token_wise and short_name(n.target) != ATTENTION:
                if (short_name(n.target) in ("linear", "matmul")) and len(shape) < 3:
                    continue  # features of a sample
                require_positions(shape[1], self.parts, f"node {n.name}")
                n = self._part(n, v, Along(Split(1), shape[1]))
        return n

    def _aligned(self, n: OpNode, value: str) -> bool:
        return value not in self.numbers and self.shapes.get(value, ()) != () and not value.startswith("param:")

    def _alike(self, n: OpNode, first: str) -> OpNode:
        """A loss: what the split operand is compared with is split as it is."""
        along = self.states[first]
        assert along is not None
        shape = self.shapes[first]
        for v in dict.fromkeys(n.inputs):
            other = self.shapes[v]
            if self.states.get(v) is None and self._aligned(n, v):
                dim = along.split.dim
                if len(other) == len(shape) - 1:  # classes against probabilities: dimension 1, or 0 where there is no batch
                    dim -= dim > (1 if len(shape) > 1 else 0)
                if len(other) not in (len(shape), len(shape) - 1) or other[dim] != shape[along.split.dim]:
                    continue  # weights of classes
                n = self._part(n, v, along._replace(split=along.split.at(dim)))
        return n

    def _whole_operands(self, n: OpNode, name: str, state: Along) -> OpNode:
        """Whole operands are cut where they are as long as the sequence."""
        if name in LOSSES and name not in ("mean", "sum"):
            return self._alike(n, next(v for v in n.inputs if self.states.get(v) is not None))
        out = self.shapes[n.name]
        for v in dict.fromkeys(n.inputs):
            if self.states.get(v) is not None:
                continue
            if name in ("cat", "stack"):
                n = self._part(n, v, next(a for x in n.inputs if (a := self.states.get(x)) is not None))
            elif name in POINTWISE or (name in POINTWISE_UNARY and v == n.inputs[0]):
                at = state.split.dim - (len(out) - len(self.shapes[v]))
                if at >= 0 and self.shapes[v][at] != 1:
                    n = self._part(n, v, state._replace(split=state.split.at(at)))
        return n

    def _part(self, n: OpNode, value: str, along: Along) -> OpNode:
        """`n` with this rank's part of an operand in its place."""
        name, shape = part_of(n.name, value), self.shapes[value]
        info = self._info(value)
        local = self._local(shape, along)
        made = self._value(name, local, info.dtype)
        size = self.storages[made.storage].size_bytes
        self.nodes.append(OpNode(
            name=name, target=PART, module=n.module, inputs=(value,), args=[{"value": value}, along.split.dim, along.split.blocks], outputs=(made,),
            forward=Work(bytes_read=size, bytes_written=size, calls=1),
            backward=Work(bytes_read=size, bytes_written=size, calls=1) if value in self.of_param else Work(),
        ))  # fmt: skip
        self.states[name], self.shapes[name] = along, shape
        if value in self.of_param or value.startswith("param:"):
            self.of_param.add(name)
        return _with_operand(n, value, name)

    def _info(self, value: str) -> GraphValue:
        kind, _, rest = value.partition(":")
        if kind == "input":
            return self.graph.inputs[int(rest)]
        for p in (*self.graph.parameters, *self.graph.buffers):
            if value in (f"param:{p.name}", f"buffer:{p.name}"):
                return GraphValue(shape=p.shape, dtype=p.dtype, storage=-1)
        return self.graph.node(value).outputs[0]

    # ---- attention ---------------------------------------------------------------------------------------------
    def _attention(self, n: OpNode) -> None:
        q, k, v = n.inputs[:3]
        shapes = [self.shapes[x] for x in (q, k, v)]
        if len(n.inputs) > 3 or _argument(n, 3, "attn_mask", None) is not None:
            raise Refused(f"{n.name}: it has a mask; is_causal=True needs none (packed sequences and windows cannot be divided so far)")
        if _argument(n, 4, "dropout_p", 0.0):
            raise Refused(f"{n.name}: it drops attention weights, whose bits no rank has; set attention dropout to 0")
        if any(len(s) != 4 for s in shapes) or any(s[2] != shapes[0][2] for s in shapes):
            raise Refused(f"{n.name}: queries {list(shapes[0])} and keys {list(shapes[1])} are not positions of one sequence")
        if any((a := self.states.get(x)) is None or a.split != Split(2) for x in (q, k, v)):
            raise Refused(f"{n.name}: query, key and value are not all divided by positions; in cross-attention one of them is whole")
        k, v, n = self._unrepeated(n, k), self._unrepeated(n, v), n
        groups, heads = self.shapes[k][1], shapes[0][1]
        if self.shapes[v][1] != groups or heads % groups:
            raise Refused(f"{n.name}: {groups} key and {self.shapes[v][1]} value heads for {heads} query heads")
        self.states[n.name] = Along(Split(2), shapes[0][2])
        self.attended += 1
        (self._ring if self.exchange == "ring" else self._ulysses)(n, q, k, v)

    def _unrepeated(self, n: OpNode, value: str) -> str:
        """Key-value heads before they are repeated for their query heads: by repeat_interleave, or unsqueeze, expand and reshape."""
        made = {x.name: x for x in self.nodes}
        at, shape = value, self.shapes[value]
        while (x := made.get(at)) is not None:
            name = short_name(x.target)
            if name == "repeat_interleave" and _argument(x, 2, "dim", None) in (1, -3):
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

    def _local(self, shape: Sequence[int], along: Along) -> tuple[int, ...]:
        return tuple(d // self.parts if i == along.split.dim else d for i, d in enumerate(shape))

    def _value(self, name: str, shape: tuple[int, ...], dtype: str) -> GraphValue:
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

    def _ring(self, n: OpNode, q: str, k: str, v: str) -> None:
        b, heads, whole, keys = self.shapes[q]
        groups, width, dtype, s = self.shapes[k][1], self.shapes[v][3], n.outputs[0].dtype, whole // self.parts
        causal, scale = _argument(n, 5, "is_causal", False), _argument(n, 6, "scale", None)
        facts = [keys, bool(causal), float(keys**-0.5 if scale is None else scale)]
        wide = "float64" if dtype == "float64" else "float32"
        joined = self._value("", (b, groups, s, keys + width), dtype)
        kv = [self._add(n, "kv0", JOIN, (k, v), joined, forward=self._copy(joined), backward=self._copy(joined))]
        rounds = [x.share(1, self.parts * self.parts) for x in (n.forward, n.backward)]
        for j in range(1, self.parts):
            kv.append(self._add(n, f"kv{j}", SHIFT, (kv[-1],), self._value("", (b, groups, s, keys + width), dtype)))
        state: list[str] = []
        for j in range(self.parts - 1):
            made = self._value("", (b, heads, s, width + 2), wide)
            saved = (self._storage_of(q), self._storage_of(kv[j]))
            state = [self._add(
                n, f"r{j}", RING_BLOCK, (q, kv[j], *state), made, forward=rounds[0], backward=rounds[1], saved=saved, args=[j, *facts],
            )]  # fmt: skip
        total = self._value(f"{n.name}/total", (b, heads, s), wide)
        saved = (self._storage_of(q), self._storage_of(kv[-1]), n.outputs[0].storage, total.storage)
        inputs = (q, kv[-1], *state)
        self.nodes.append(msgspec.structs.replace(
            n, target=RING_END, inputs=inputs, args=[*({"value": x} for x in inputs), self.parts - 1, *facts], kwargs={},
            forward=rounds[0].share(self.parts, 1), backward=rounds[1].share(self.parts, 1), saved=saved,
        ))  # fmt: skip

    def _ulysses(self, n: OpNode, q: str, k: str, v: str) -> None:
        b, heads, whole, keys = self.shapes[q]
        groups, width, dtype, s, parts = self.shapes[k][1], self.shapes[v][3], n.outputs[0].dtype, whole // self.parts, self.parts
        if heads % parts or (groups % parts and parts % groups):
            near = max(d for d in range(1, parts + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0))
            raise Refused(f"{n.name}: {heads} query and {groups} key-value heads do not divide by {parts} ranks; ring does, or --context {near}")
        own, held = heads // parts, max(1, groups // parts)
        causal, scale = _argument(n, 5, "is_causal", False), _argument(n, 6, "scale", None)
        sizes = [own, held, keys, width]
        sent = self._value("", (parts, b * s * (own * keys + held * (keys + width))), dtype)
        out = self._add(n, "out", OUT, (q, k, v), sent, args=[parts], forward=self._copy(sent), backward=self._copy(sent))
        came = self._add(n, "in", ALL_TO_ALL, (out,), self._value("", sent.shape, dtype))
        attended = self._value("", (parts, b * own * s * width), dtype)
        self.storages.append(Storage(size_bytes=3 * self.storages[sent.storage].size_bytes, owner=f"{n.name}/heads"))  # in order, result, sums
        found = self._add(
            n, "heads", HEADS, (came,), attended, args=[b, s, sizes, bool(causal), scale], forward=n.forward.share(1, parts),
            backward=n.backward.share(1, parts), saved=(len(self.storages) - 1,),
        )  # fmt: skip
        back = self._add(n, "back", ALL_TO_ALL, (found,), self._value("", attended.shape, dtype))
        copied = self._copy(attended)
        self.nodes.append(msgspec.structs.replace(
            n, target=UNITE, inputs=(back,), args=[{"value": back}, b, s, heads], kwargs={}, forward=copied, backward=copied, saved=(),
        ))  # fmt: skip

    # ---- sizes -------------------------------------------------------------------------------------------------
    def finished(self) -> OpGraph:
        g, made_here = self.graph, len(self.graph.storages)
        split = {n.name for n in self.nodes if self.states.get(n.name) is not None or n.name in self.numbers}
        size = {f"param:{p.name}": p.size_bytes for p in g.parameters}
        nodes = self._read()
        nodes = tuple(self._sized(n, size) if n.name in split and not n.target.startswith("meshwright.") else n for n in nodes)
        nodes = tuple(self._shaped(n) for n in nodes)
        storages = tuple(self._shared(x, x.owner in split and i < made_here) for i, x in enumerate(self.storages))
        node_of = {j.name: j.node for j in g.joint}
        kept_whole = {o.storage for j in g.joint for o in j.outputs if j.name in set(g.gradients.values())}
        joint_storages = tuple(
            self._shared(x, node_of.get(x.owner, "") in split and i not in kept_whole) for i, x in enumerate(g.joint_storages)
        )
        return msgspec.structs.replace(g, nodes=nodes, storages=storages, joint_storages=joint_storages, scaling=None)

    def _read(self) -> tuple[OpNode, ...]:
        """Without repetitions of key-value heads that nothing reads any more."""
        used, kept = {*self.graph.outputs}, list[OpNode]()
        before = {v for n in self.graph.nodes for v in n.inputs}
        for n in reversed(self.nodes):
            if n.name in used or n.name not in before:
                kept.append(n)
                used.update(n.inputs)
        return tuple(reversed(kept))

    def _shared(self, x: Storage, split: bool) -> Storage:
        return msgspec.structs.replace(x, size_bytes=-(-x.size_bytes // self.parts)) if split else x

    def _shaped(self, n: OpNode) -> OpNode:
        along = self.states.get(n.name)
        if along is None or "/" in n.name or not n.outputs:
            return n
        outputs = tuple(msgspec.structs.replace(o, shape=self._local(o.shape, along) if len(o.shape) > along.split.dim else o.shape) for o in n.outputs)
        return msgspec.structs.replace(n, outputs=outputs)

    def _sized(self, n: OpNode, size: dict[str, int]) -> OpNode:
        """Work of this rank's positions; parameters are read, and their gradients written, whole."""
        whole = sum(size.get(v, 0) for v in dict.fromkeys(n.inputs))

        def share(w: Work, reads: int, writes: int) -> Work:
            read, written = min(reads, w.bytes_read), min(writes, w.bytes_written)
            rest = Work(flops=w.flops, bytes_read=w.bytes_read - read, bytes_written=w.bytes_written - written, calls=w.calls).share(1, self.parts)
            return msgspec.structs.replace(rest, bytes_read=rest.bytes_read + read, bytes_written=rest.bytes_written + written)

        return msgspec.structs.replace(n, forward=share(n.forward, whole, 0), backward=share(n.backward, whole, whole))


def _argument(n: OpNode, position: int, name: str, default: Any) -> Any:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name, default)


def _with_operand(n: OpNode, old: str, new: str) -> OpNode:
    def swapped(x: Any) -> Any:
        if isinstance(x, dict):
            return {"value": new} if x == {"value": old} else {k: swapped(v) for k, v in x.items()}
        return [swapped(v) for v in x] if isinstance(x, list) else x

    inputs = tuple(new if v == old else v for v in n.inputs)
    return msgspec.structs.replace(n, inputs=inputs, args=swapped(n.args), kwargs={k: swapped(v) for k, v in n.kwargs.items()})
