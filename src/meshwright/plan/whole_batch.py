"""Losses that look at the whole batch, of which each data replica has some samples: contrasts within a batch, balance losses of experts.

Calls of a captured graph, seen at a replica's batch and at the whole one, are of the replica's own samples, the same whatever the samples are, or of
the whole batch. A call that brings samples together becomes one of the whole batch, in one of two ways:
- a sum or mean over samples, and a product that sums over them: each replica's own (`N/own`), its share (`N/share`) added up over the replicas, and
  `N` back in its own type. So counts of experts and mean probabilities travel, a number per expert;
- any other: what it reads is gathered. `N/place<i>` has a replica's rows in their places among zeros, added up over the replicas; `N/all<i>` is that
  in its own type; `N` runs on the whole batch, on every replica alike.
Both sums have the sum of the gradients as their backward, of which each replica takes its rows. What is computed of the whole batch is computed by
each replica; the mean over replicas of their losses is the loss of the batch, and of the gradients its gradient. Sums and means that only lead to the
loss, by sums and factors, stay the replica's own: the mean over replicas is theirs already.
Cite: van den Oord et al., CPC, arXiv 1807.03748, equation 4; Radford et al., CLIP, arXiv 2103.00020, figure 3; Fedus et al., Switch Transformer,
arXiv 2101.03961, equations 4 to 6: each over the whole batch.
Deviations: rows are gathered by a sum with zeros (exact), twice the bytes of an all-gather; no replica leaves rows of the comparison to others.
Left open: several micro-batches of one replica, refused as in `batch_statistics`; random numbers in calls of the whole batch, refused.
Invariant: `N` of the whole batch is what one process computes. Cost: O(calls + arguments).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec

from ..errors import Unsupported
from ..graph.graph import GraphValue, OpGraph, OpNode, Work, operator_name
from .mixing import contracted, linear, mixes, over_samples, sums_samples

__all__ = ["BACK", "PLACE", "SHARE", "Call", "renamed", "shared_calls", "wide_type", "with_shared_batch"]

PLACE, SHARE, BACK = "meshwright.batch_place.default", "meshwright.batch_share.default", "meshwright.batch_whole.default"
LIKE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")  # of nothing but a shape and a type
CREATED = ("zeros", "ones", "full", "expand", "repeat", *LIKE)  # alike in every row
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
AS_THEY_LIE = (*VIEWS, "unsqueeze", "squeeze", "to", "alias", "contiguous", "clone", "detach")  # of a row of numbers: its elements in order
PICKING = ("index", "index_put", "index_put_")
TURNS = ("t", "transpose", "permute", "numpy_T", "mT", "adjoint", "alias", "detach")
SCALED = ("mul", "div", "true_divide", "add", "sub", "rsub", "pow")
OWN, FIXED, PLACED, WHOLE, TERM = "own", "fixed", "placed", "whole", "term"
INSTEAD = "leave --batch-statistics global out and plan one micro-batch in all (--dp 1), or state --batch-statistics local"


@dataclass(frozen=True)
class Call:
    """A call of the graph in which replicas share the batch. `role`: "own" and "whole" are the captured call `of`, at the replica's batch or the
    whole one, reading `names` in place of others; "share", "place" and "back" are of the value `of`; `mean`: a share of a mean; `dim`: of the
    samples, which lie there `outer` times one after the other (both views of a sample)."""

    name: str
    role: str
    of: str
    names: Mapping[str, str] = field(default_factory=dict)
    mean: bool = False
    dim: int = 0
    outer: int = 1


def wide_type(dtype: str) -> str:
    """What travels: sums of narrow numbers in float32, of whole numbers and of yes and no in int64."""
    return dtype if dtype == "float64" else "float32" if dtype.startswith(("float", "bfloat")) else "int64"


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Arguments that read other values."""
    if isinstance(value, list):
        return [renamed(v, names) for v in value]
    if isinstance(value, dict):
        one = len(value) == 1 and isinstance(value.get("value"), str)
        return {"value": names.get(value["value"], value["value"])} if one else {k: renamed(v, names) for k, v in value.items()}
    return value


def shared_calls(nodes: Sequence[Any], whole: Sequence[Any], inputs: Sequence[Any], whole_inputs: Sequence[Any], loss: str) -> list[Call]:
    """The calls in order; all of them "own" under their names where no call looks at other samples.

    `nodes`, `inputs`: as captured at a replica's batch; `whole`, `whole_inputs`: at the whole one. Raises: Unsupported.
    """
    if [(n.name, n.target) for n in nodes] != [(n.name, n.target) for n in whole] or not inputs:
        raise Unsupported("the model makes other calls on the whole batch than on a part of it", where="--batch-statistics global", hint=INSTEAD)
    return _Reader(nodes, whole, inputs, whole_inputs, loss).calls()


class _Reader:
    """`kind` of every value: OWN rows of samples (`dim`: which dimension; `outer`: rows of other dimensions above it), FIXED whatever the batch,
    PLACED by the position in the batch alone, of the WHOLE batch, or an own TERM of the loss."""

    def __init__(self, nodes: Sequence[Any], whole: Sequence[Any], inputs: Sequence[Any], whole_inputs: Sequence[Any], loss: str) -> None:
        self.nodes, self.whole = nodes, {n.name: n for n in whole}
        self.rows, self.all_rows = inputs[0].shape[0], whole_inputs[0].shape[0]
        self.shape: dict[str, tuple[int, ...]] = {f"input:{i}": x.shape for i, x in enumerate(inputs)}
        self.whole_shape: dict[str, tuple[int, ...]] = {f"input:{i}": x.shape for i, x in enumerate(whole_inputs)}
        self.kind = dict.fromkeys(self.shape, OWN)
        self.dim, self.outer = dict.fromkeys(self.shape, 0), dict.fromkeys(self.shape, 1)
        for n in nodes:
            for shapes, node in ((self.shape, n), (self.whole_shape, self.whole[n.name])):
                if (first := next((x for x in node.outputs if x is not None), None)) is not None:
                    shapes[n.name] = first.shape
        self.terms = _terms(nodes, self.shape, loss)
        self.numbers: set[str] = set()  # values that are the numbers of the samples, in order
        self.names: dict[str, str] = {}  # of values as the calls of the whole batch read them

    def calls(self) -> list[Call]:
        return [x for n in self.nodes for x in self.call(n)]

    def call(self, n: Any) -> Iterator[Call]:
        kinds = {self.kind.get(v, FIXED) for v in n.inputs}
        name = operator_name(n.target)
        if self.is_numbers(n, name):
            self.numbers.add(n.name)
        if n.name in self.terms and (TERM in kinds or (OWN in kinds and not kinds & {WHOLE, PLACED})):
            self.kind[n.name] = TERM
            yield Call(n.name, "own", n.name)
        elif not kinds & {OWN, WHOLE, TERM} or n.name not in self.shape or (name in LIKE and WHOLE not in kinds):
            self.kind[n.name] = self.without_samples(n, name, kinds)
            yield Call(n.name, "own", n.name)
        elif (name in PICKING and self.picks_own(n)) or (OWN in kinds and PLACED not in kinds and self.stays_own(n, name)):
            self.kind[n.name] = OWN
            yield Call(n.name, "own", n.name)
        elif OWN in kinds and not kinds & {PLACED, WHOLE} and sums_samples(n, name, self.dim, self.shape):
            self.kind[n.name] = WHOLE
            own, share = f"{n.name}/own", f"{n.name}/share"
            yield Call(own, "own", n.name)
            yield Call(share, "share", own, mean=name == "mean")
            yield Call(n.name, "back", share)
        else:
            yield from self.of_whole(n)

    def without_samples(self, n: Any, name: str, kinds: set[str]) -> str:
        changed = self.changed(n.name)
        alike = kinds <= {FIXED} or name in LIKE
        if not changed and alike and n.args == self.whole[n.name].args:
            return FIXED
        if len(changed) == 1 and name in CREATED and alike and self.in_rows(n.name, changed[0]):
            self.dim[n.name], self.outer[n.name] = changed[0], 1
            return OWN
        return PLACED

    def is_numbers(self, n: Any, name: str) -> bool:
        if name == "arange":
            return all(x.args in ([rows], [0, rows], [0, rows, 1]) for x, rows in ((n, self.rows), (self.whole[n.name], self.all_rows)))
        return name in AS_THEY_LIE and self.numbers.issuperset(n.inputs[:1]) and bool(n.inputs) and prod(self.shape[n.name]) == self.rows

    def picks_own(self, n: Any) -> bool:
        """Whether it takes of every sample, or sets in it, what it finds by that sample: `x[torch.arange(len(x)), places]`."""
        source, *others = n.inputs
        picks = [p["value"] if p else None for p in n.args[1]]
        at, changed = self.dim.get(source, len(picks)), self.changed(n.name)
        if self.kind.get(source) != OWN or self.shape[source][at] != self.rows or at >= len(picks) or picks[at] not in self.numbers:
            return False
        if any(self.kind.get(v, FIXED) not in (OWN, FIXED) for v in others if v not in self.numbers) or len(changed) != 1:
            return False
        self.dim[n.name], self.outer[n.name] = changed[0], 1
        return bool(self.shape[n.name][changed[0]] == self.rows)

    def changed(self, value: str) -> list[int]:
        """Dimensions that the batch changes; of an unlike number of dimensions, all."""
        a, b = self.shape.get(value, ()), self.whole_shape.get(value, ())
        return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y] if len(a) == len(b) else [*range(len(a) + 1)]

    def in_rows(self, value: str, dim: int) -> bool:
        size, rest = divmod(self.shape[value][dim], self.rows)
        return bool(rest == 0 and self.whole_shape[value][dim] == size * self.all_rows)

    def stays_own(self, n: Any, name: str) -> bool:
        """Whether every row of the result is of the same row of what is read, and perhaps of what is known of the whole batch."""
        changed = self.changed(n.name)
        if any(self.kind.get(v) == WHOLE and self.changed(v) for v in n.inputs) or len(changed) != 1 or not self.in_rows(n.name, changed[0]):
            return False
        if name in SCALED and n.args != self.whole[n.name].args:  # a number of samples among the operands
            return False
        own, inputs = [v for v in n.inputs if self.kind.get(v) == OWN], len(n.inputs)
        together = mixes(n, name, {v: self.dim[v] for v in own}, self.shape) or any(self.dim[v] in contracted(n, name, v, self.shape) for v in own)
        alike = len(own) == inputs and {self.dim[v] for v in own} == {changed[0]} and len({self.inner(v) for v in own}) == 1
        joined = together and name == "cat" and alike  # along the samples: of channels, as in U-Nets, the samples stay as they lie
        if together and not joined:
            return False
        if not joined and len({self.outer[v] for v in own}) > 1:
            return False
        self.dim[n.name] = changed[0]
        outer = sum(self.outer[v] for v in own) if joined else self.outer[own[0]]
        self.outer[n.name] = self.outer_of(n.name, own[0]) if name in VIEWS else outer
        return True

    def inner(self, value: str) -> int:
        """Rows of other dimensions below the samples within theirs."""
        return int(self.shape[value][self.dim[value]] // (self.rows * self.outer[value]))

    def outer_of(self, value: str, source: str) -> int:
        """Of a view: rows of other dimensions above the samples within the dimension that holds them."""
        above = self.outer[source] * prod(self.shape[source][: self.dim[source]])
        return max(1, above // prod(self.shape[value][: self.dim[value]]))

    def of_whole(self, n: Any) -> Iterator[Call]:
        if getattr(n, "random", False):
            raise Unsupported(f"{n.target} draws random numbers for the whole batch", where=f"node {n.name}", hint=INSTEAD)
        inputs = [self.turned(v) for v in dict.fromkeys(n.inputs)]
        gathered = [v for v in dict.fromkeys(inputs) if self.kind.get(v) == OWN and v not in self.names]
        places = [Call(f"{n.name}/place{i}", "place", v, dim=self.dim[v], outer=self.outer[v]) for i, v in enumerate(gathered)]
        yield from places
        for i, (v, place) in enumerate(zip(gathered, places, strict=True)):
            self.names[v] = f"{n.name}/all{i}"
            yield Call(self.names[v], "back", place.name)
        for v in n.inputs:
            yield from self.placed(v, PLACED if self.turned(v) == v else OWN)
        self.kind[n.name] = WHOLE
        yield Call(n.name, "whole", n.name, {v: self.names[v] for v in n.inputs if v in self.names})

    def turned(self, value: str) -> str:
        """What a value is another view of, so that it travels once."""
        node = self.whole.get(value)
        if node is None or self.kind.get(value) != OWN or operator_name(node.target) not in TURNS:
            return value
        return self.turned(node.inputs[0])

    def placed(self, value: str, kind: str = PLACED) -> Iterator[Call]:
        """What depends on positions alone, or is a view of what was gathered, for the whole batch."""
        if self.kind.get(value) != kind or value in self.names:
            return
        node = self.whole[value]
        for v in node.inputs:
            yield from self.placed(v, kind)
        self.names[value] = f"{value}/all"
        yield Call(self.names[value], "whole", value, {v: self.names[v] for v in node.inputs if v in self.names})


def _terms(nodes: Sequence[Any], shape: Mapping[str, tuple[int, ...]], loss: str) -> set[str]:
    """Calls whose results lead to the loss alone, by sums and constant factors, and those calls: means over replicas are means over samples there."""
    readers: dict[str, list[Any]] = {}
    samples: set[str] = {v for v in shape if v.startswith("input:")}
    for n in nodes:
        for v in n.inputs:
            readers.setdefault(v, []).append(n)
        if any(v in samples for v in n.inputs):
            samples.add(n.name)
    found, inner = set[str](), set[str]()
    for n in reversed(nodes):
        leads = readers.get(n.name, [])
        if (n.name != loss or leads) and not (leads and all(r.name in inner for r in leads)):
            continue
        if linear(n, operator_name(n.target), samples, shape):
            inner.add(n.name)
            found.add(n.name)
        elif over_samples(n, operator_name(n.target)):
            found.add(n.name)
    return found


def with_shared_batch(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """`graph`, captured at a replica's batch, with what brings samples together as above; `whole`: captured at the whole batch.

    Raises: Unsupported, see `shared_calls`; where the two captures keep other storages."""
    loss = graph.outputs[0] if graph.outputs else ""
    calls = shared_calls(graph.nodes, whole.nodes, graph.inputs, whole.inputs, loss)
    if all(c.role == "own" and c.name == c.of for c in calls):
        return graph
    if [s.owner for s in graph.storages] != [s.owner for s in whole.storages] or len(graph.joint) != len(whole.joint):
        raise Unsupported("the model keeps other values on the whole batch than on a part of it", where="--batch-statistics global", hint=INSTEAD)
    own, other = {n.name: n for n in graph.nodes}, {n.name: n for n in whole.nodes}
    known: dict[str, GraphValue] = {f"input:{i}": x for i, x in enumerate(graph.inputs)}
    types: dict[str, str] = {}
    nodes: list[OpNode] = []
    for c in calls:
        if c.role in ("own", "whole"):
            n = (own if c.role == "own" else other)[c.of]
            inputs = tuple(c.names.get(v, v) for v in n.inputs)
            made = msgspec.structs.replace(n, name=c.name, inputs=inputs, args=renamed(n.args, c.names), kwargs=renamed(n.kwargs, c.names))
        else:
            made = _moved(c, known[c.of], types, whole.inputs[0].shape[0] // graph.inputs[0].shape[0])
        nodes.append(made)
        if made.outputs:
            known[c.name] = made.outputs[0]
    of_all = {c.of for c in calls if c.role == "whole"}
    storages = tuple(b if b.owner in of_all else a for a, b in zip(graph.storages, whole.storages, strict=True))
    joint = tuple(b if b.node in of_all else a for a, b in zip(graph.joint, whole.joint, strict=True))
    return msgspec.structs.replace(graph, nodes=tuple(nodes), storages=storages, joint=joint, scaling=None)


def _moved(c: Call, value: GraphValue, types: dict[str, str], replicas: int) -> OpNode:
    shape, dtype = value.shape, value.dtype
    if c.role == "back":
        dtype = types[c.of]
    else:
        types[c.name], dtype = dtype, wide_type(dtype)
    if c.role == "place":
        shape = tuple(d * replicas if i == c.dim else d for i, d in enumerate(shape))
    size = prod(shape) * (8 if dtype.endswith("64") else 4)
    work = Work(bytes_read=size, bytes_written=size, calls=1)
    return OpNode(
        name=c.name, target={"share": SHARE, "place": PLACE, "back": BACK}[c.role], module="", inputs=(c.of,), args=[{"value": c.of}],
        outputs=(GraphValue(shape=shape, dtype=dtype, storage=-1),), forward=work, backward=work,
    )  # fmt: skip
