"""A captured graph as one rank of a context group computes it: its positions of every sequence, and attention by exchanges.

Cite: `plan.context.RING` and `ULYSSES`.
Left open by the papers: where sequences are in a module that nobody annotated. Our answer: they begin where a token-wise input (samples, positions,
...) meets a parameter, and are carried through operators that keep positions apart (`sequence_rules`). What is made of inputs alone (labels shifted
by one, position numbers) is computed whole by every rank, and each takes its positions of the result; so is what is made of parameters alone.
Attention is `scaled_dot_product_attention` over the positions of one sequence. Every other operator that brings positions together is refused by
name. Deviations: ring: keys and values that came may be kept until backward, so only their gradients travel then; `ring-again` is the published
form, which sends them again.
Invariant: the loss of a rank is the mean (or sum) over its positions; the mean over a group is that of all.
Cost: O(nodes).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import Unsupported
from ...graph.graph import GraphValue, OpGraph, OpNode, Storage, Work
from ...plan.context import PART, part_of, require_positions
from ...plan.experts import COUNTS, EXPERTS, TOKENS
from .context_attention import ATTENTION, AttentionSteps
from .experts import of_positions
from .operator_rules import OPERATORS
from .sequence_rules import Along, carried
from .sharding import POINTWISE, POINTWISE_UNARY, short_name
from .split import Needs, Refused, Split

__all__ = ["context_graph"]

LOSSES = frozenset({
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "mean", "sum",
})  # fmt: skip
NUMBERS = frozenset({"add", "sub", "mul", "div", "neg", "to", "_to_copy", "clone", "view", "reshape", "squeeze", "contiguous", "float", "double"})
APART = frozenset({"repeat_interleave", "einsum", "view_as_complex", "view_as_real"})  # beside those of `sequence_rules`
ALIKE = frozenset({"one_hot", "expand_as"})  # each element of the result is of the same position
ROUTING = {"topk": 2, "gather": 1, "scatter": 1, "scatter_": 1, "argmax": 1}  # operators along a dimension, and its place among the arguments


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
class _Positions(AttentionSteps):
    """`numbers`: losses of this rank's positions; `of_input`: values made of inputs; `counts`: numbers of this rank's rows of experts."""

    numbers: set[str] = field(default_factory=set)
    counts: set[str] = field(default_factory=set)
    of_input: set[str] = field(default_factory=set)

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
        if n.target in (*EXPERTS, TOKENS):
            n, self.states[n.name] = of_positions(n, self.states, self.shapes, self.parts)
            self.counts |= {n.name} if n.target == COUNTS else set()
            self.nodes.append(n)
            return
        if any(v in self.counts for v in n.inputs):
            raise Refused(f"{n.name}: takes the number of rows of a rank's own positions")
        n = self._cut_first(n)
        found = {v: a for v in n.inputs if (a := self.states.get(v)) is not None}
        if not found:
            self.nodes.append(n)
            return
        if name == ATTENTION:
            self.attention(n)
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
            # Not approximated: a mean over positions and what all ranks have alike need other weights where losses are sums.
            raise Refused(f"{n.name}: adds what every rank has whole to a loss")
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

    def _routed(self, n: OpNode, name: str, known: dict[str, Along | None]) -> Along:
        """What routers do with the scores of each token: along another dimension than the positions', all operands divided alike."""
        first, place, rank = n.inputs[0], ROUTING.get(name, 0), len(self.shapes[n.inputs[0]])
        along = known.get(first)
        if along is None or any(known.get(v) != along for v in n.inputs):
            raise Refused(f"{n.name}: {n.target} of values that are not all divided alike")
        if name in ALIKE:
            return along
        dim = n.args[place] if len(n.args) > place else n.kwargs.get("dim", -1 if name == "topk" else None)
        if dim is None or dim % rank == along.split.dim:
            raise Refused(f"{n.name}: {n.target} over positions")
        gone = name == "argmax" and len(self.shapes[n.name]) < rank and dim % rank < along.split.dim
        return along._replace(split=along.split.at(along.split.dim - gone))

    def _carried(self, n: OpNode, name: str, known: dict[str, Along | None]) -> Along | None:
        if name in ROUTING or name in ALIKE:
            return self._routed(n, name, known)
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
        name, shape = part_of(n.name, value), self.shapes[value]
        info = self._info(value)
        local = self.local(shape, along)
        made = self.made(name, local, info.dtype)
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

    # ---- sizes -------------------------------------------------------------------------------------------------
    def finished(self) -> OpGraph:
        g, made_here = self.graph, len(self.graph.storages)
        split = {n.name for n in self.nodes if self.states.get(n.name) is not None or n.name in self.numbers}
        size = {f"param:{p.name}": p.size_bytes for p in g.parameters}
        nodes = self._read()
        captured = {n.name for n in nodes if n.target in (*EXPERTS, TOKENS) or not n.target.startswith("meshwright.")}
        nodes = tuple(self._sized(n, size) if n.name in split & captured else n for n in nodes)
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
        own = [self.local(o.shape, along) if len(o.shape) > along.split.dim else o.shape for o in n.outputs]
        outputs = tuple(msgspec.structs.replace(o, shape=shape) for o, shape in zip(n.outputs, own, strict=True))
        return msgspec.structs.replace(n, outputs=outputs)

    def _sized(self, n: OpNode, size: dict[str, int]) -> OpNode:
        """Work of this rank's positions; parameters are read, and their gradients written, whole."""
        whole = sum(size.get(v, 0) for v in dict.fromkeys(n.inputs))

        def share(w: Work, reads: int, writes: int) -> Work:
            read, written = min(reads, w.bytes_read), min(writes, w.bytes_written)
            rest = Work(flops=w.flops, bytes_read=w.bytes_read - read, bytes_written=w.bytes_written - written, calls=w.calls).share(1, self.parts)
            return msgspec.structs.replace(rest, bytes_read=rest.bytes_read + read, bytes_written=rest.bytes_written + written)

        return msgspec.structs.replace(n, forward=share(n.forward, whole, 0), backward=share(n.backward, whole, whole))


def _with_operand(n: OpNode, old: str, new: str) -> OpNode:
    def swapped(x: Any) -> Any:
        if isinstance(x, dict):
            return {"value": new} if x == {"value": old} else {k: swapped(v) for k, v in x.items()}
        return [swapped(v) for v in x] if isinstance(x, list) else x

    inputs = tuple(new if v == old else v for v in n.inputs)
    return msgspec.structs.replace(n, inputs=inputs, args=swapped(n.args), kwargs={k: swapped(v) for k, v in n.kwargs.items()})
