"""Adds to a captured step what its operators could read or write instead: extra nodes (packed results) and alternatives.

`with_variants(step)` gives a new step graph; `run.steps.variants` runs what it adds. Bytes are exact. Times and workspaces of extra nodes
and alternatives are measured where costs are given; else times are estimated from the bytes they move beyond the plain operator, at the rate of the
graph's own elementwise operators (its `evidence` says so).
Source: the card of MONeT, section 3.6. Deviation: the output form of normalisations is exact up to rounding only, so it is offered with
`rounding=True` and marked lossy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import fx

from ...errors import UsageError
from ...graph.step_graph import Alternative, StepGraph, StepNode, StepStorage, renumbered
from ...run.steps.pieces import CONVOLUTION_BACKWARD, GROUPS, MASK, PIECES, TRANSPOSED, pool_geometry
from ...run.steps.variants import BINARY, BLOCK_ELEMENTS, IN_PLACE, INVERSE, MIN_WEIGHT, OVER_GRADIENT, register
from .costs import StepCosts
from .host_copies import CopyRates
from .norms_apart import norms_apart
from .variants import measure_variants, pools_by_offsets

__all__ = ["with_variants"]

LOSSY = ("bf16", "int8")
MIN_NARROWED_BYTES = 1 << 12  # of a result: a smaller one, or one of this size, is not worth a narrower copy
# they compare with a limit, which rounding may cross
COMPARING = ("aten.threshold_backward.default", "aten.hardtanh_backward.default", "aten.max_pool2d_with_indices_backward.default")
MIN_WORKSPACE_BYTES = 1 << 16  # of an operator that is done in pieces: less is not worth the extra calls
PIECE_PARTS = (1, 4, 16)  # images or channels in one piece
MAX_PIECES = 64  # of an operator, a call each
ELEMENTWISE = ("aten.relu.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.threshold_backward.default", "aten.gelu.default")


class JointGraph(Protocol):
    """What is used of a captured step, or of a traced segment."""

    @property
    def graph_module(self) -> fx.GraphModule: ...

    @property
    def step_graph(self) -> StepGraph: ...


def with_variants(
    step: JointGraph, graph: StepGraph | None = None, *, costs: StepCosts | None = None, rounding: bool = False, lossy: Collection[str] = (),
    offload: CopyRates | None = None, offload_only: bool = False, workspaces_only: bool = False,
) -> StepGraph:  # fmt: skip
    """`graph`: the step's own, with measured times (default: `step.step_graph`). `costs`: implementations are measured, and operators in pieces are
    among them. `rounding`: what is exact up to rounding too: normalisations from their output, weight gradients by images. `lossy`: narrower saves,
    of "bf16" and "int8". `offload`: results may go to the host and come back, at these rates where copies are not measured with the rest;
    `offload_only`: nothing else may.
    `workspaces_only`: only what reads the same and writes over nothing, so that schedules of the plain operators are schedules of these.

    Raises: UsageError for an unknown lossy form; with `costs` as `probe.steps.costs.measure_step`.
    """
    unknown = [x for x in lossy if x not in LOSSY]
    if unknown:
        raise UsageError(f"no lossy form {unknown[0]!r}", where="lossy", hint="bf16 or int8")
    measured = costs is not None and costs.environment["device"] == "cpu" and not offload_only
    graph = graph or step.step_graph
    if costs is not None and measured:
        graph = pools_by_offsets(step.graph_module, graph, costs)
    found = _Choices(step, graph)
    for i, n in enumerate(found.graph.nodes):
        if measured:
            found.pieces(i, n, over=not workspaces_only)
        if workspaces_only:
            continue
        if offload is not None and n.phase == "backward" and n.makes:
            found.offload(i, n, offload)
        if offload_only:
            continue
        found.over_operand(i, n)
        if n.phase == "forward":
            found.in_place(i, n)
        elif n.phase == "backward" and n.makes:
            found.over_gradient(i, n)
            found.masks(i, n)
            found.relu(i, n)
            found.from_output(i, n)
            found.pooling(i, n)
            if rounding:
                found.inverse(i, n)
            for form in lossy:
                found.narrower(i, n, form)
    graph = found.inserted()
    if costs is not None and measured:
        graph = norms_apart(step.graph_module, graph, costs)
    register(graph)
    if costs is not None and measured:
        graph = measure_variants(step.graph_module, graph, costs, rounding=rounding)
        register(graph)
    else:
        note = "times of other implementations: estimated from the bytes they move"
        graph = msgspec.structs.replace(graph, evidence=f"{graph.evidence}; {note}" if graph.evidence else note)
    return graph


@dataclass
class _Extra:
    """An optional node to stand after node `after`."""

    after: int
    name: str
    target: str
    inputs: tuple[int, ...]
    size_bytes: int
    time_s: float


@dataclass
class _Choices:
    """`extras[k]` is read as -1 - k in the alternatives collected here."""

    step: JointGraph
    graph: StepGraph
    extras: list[_Extra] = field(default_factory=list)
    known: dict[tuple[str, int], int] = field(default_factory=dict)
    ways: dict[int, list[Alternative]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call = {n.name: n for n in self.step.graph_module.graph.nodes}
        self.index = {n.name: i for i, n in enumerate(self.graph.nodes)}
        rates = sorted(self._moved(i, n) / n.time_s for i, n in enumerate(self.graph.nodes) if n.target in ELEMENTWISE and n.time_s > 0)
        self.second_per_byte = 1 / rates[len(rates) // 2] if rates else 0.0

    def _moved(self, i: int, n: StepNode) -> int:
        return sum(self.size(x) for x in n.inputs) + sum(self.graph.storages[s].size_bytes for s in n.makes)

    def size(self, x: int) -> int:
        return sum(self.graph.storages[s].size_bytes for s in self.graph.nodes[x].storages)

    def value(self, x: int) -> Any:
        return self.call[self.graph.nodes[x].name].meta["val"]

    def root(self, x: int) -> int:
        """The node whose result a view shows unchanged."""
        node = self.graph.nodes[x]
        while node.target == "aten.detach.default":
            x = node.inputs[0]
            node = self.graph.nodes[x]
        return x

    def saved(self, x: int) -> bool:
        """A tensor that the forward pass makes and the backward pass reads as it is."""
        node = self.graph.nodes[self.root(x)]
        made = all(self.graph.storages[s].kind == "made" for s in node.storages)
        return node.phase == "forward" and len(node.storages) == 1 and made and isinstance(self.value(x), torch.Tensor)

    def extra(self, form: str, x: int, size_bytes: int, target: str = "") -> int:
        x = self.root(x)
        if (form, x) not in self.known:
            name = f"{self.graph.nodes[x].name}.{form.partition(':')[0]}"
            moved = (self.size(x) + size_bytes) * self.second_per_byte
            self.known[form, x] = -1 - len(self.extras)
            self.extras.append(_Extra(x, name, target or f"meshwright.{form}", (x,), size_bytes, moved))
        return self.known[form, x]

    def way(
        self, i: int, name: str, inputs: tuple[int, ...], *, more_bytes: int = 0, workspace: int = 0, over: int = -1, lossless: bool = True
    ) -> None:
        n = self.graph.nodes[i]
        time_s = max(0.0, n.time_s + more_bytes * self.second_per_byte)
        found = Alternative(
            name=name, inputs=inputs, time_s=time_s, workspace_bytes=n.workspace_bytes + workspace, over=over, lossless=lossless
        )  # fmt: skip
        self.ways.setdefault(i, []).append(found)

    def in_place(self, i: int, n: StepNode) -> None:
        if n.target in IN_PLACE and self._over(n, n.inputs[0]):
            self.way(i, "in_place", n.inputs, over=n.inputs[0])

    def _over(self, n: StepNode, x: int) -> bool:
        """n's result can lie where x lies: one made storage of the same size, laid out alike."""
        node = self.graph.nodes[x]
        if len(node.storages) != 1 or self.graph.storages[node.storages[0]].kind != "made" or len(n.makes) != 1 or len(n.inputs) < 1:
            return False
        a, b = self.value(x), self.value(self.index[n.name])
        alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        return bool(alike and self.size(x) == self.graph.storages[n.makes[0]].size_bytes)

    def over_gradient(self, i: int, n: StepNode) -> None:
        if n.target in OVER_GRADIENT and self._gradient_over(n):
            self.way(i, "over_gradient", n.inputs, over=n.inputs[0])

    def _gradient_over(self, n: StepNode) -> bool:
        return len(n.inputs) == 2 and self.graph.nodes[n.inputs[0]].phase == "backward" and self._over(n, n.inputs[0])

    def over_operand(self, i: int, n: StepNode) -> None:
        """A sum, product, difference or quotient over one of its terms; not of a tensor with itself."""
        terms = self.call[n.name].args[:2] if n.target in BINARY else ()
        places = [self.index[t.name] if isinstance(t, fx.Node) else -1 for t in terms]
        for position, x in enumerate(places):
            if x >= 0 and places.count(x) == 1 and self.graph.nodes[x].phase == n.phase and self._over(n, x):
                self.way(i, f"over {position}", n.inputs, over=x)

    def pieces(self, i: int, n: StepNode, *, over: bool) -> None:
        """In pieces of 1, 4 or 16 images or channels' groups, where there is something to save."""
        able = {kind for target, kind in PIECES if target == n.target}
        if not able or n.workspace_bytes < MIN_WORKSPACE_BYTES:
            return
        args: Any = self.call[n.name].args
        wholes = dict(zip(("images", "channels"), args[0].meta["val"].shape, strict=False))
        if n.target == CONVOLUTION_BACKWARD and (args[MASK][0] or args[TRANSPOSED] or args[GROUPS] > 1):
            able.remove("channels")  # of the weight's gradient only, and where an output channel reads all of the input
        for kind in sorted(able):
            for k in sorted({-(-wholes[kind] // part) for part in PIECE_PARTS}):
                if 1 < k <= MAX_PIECES:
                    self.way(i, f"{kind} {k}", n.inputs, lossless=False)  # until it is measured
                    if over and n.target == CONVOLUTION_BACKWARD and args[MASK][0] and kind == "images":
                        self.image_over(i, n, k)

    def image_over(self, i: int, n: StepNode, pieces: int) -> None:
        """The input's gradient over the output's."""
        gradient = self.index[self.call[n.name].args[0].name]
        a, b = self.value(gradient), self.value(i)[0]
        whole = a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        alone = [self.graph.storages[s] for s in self.graph.nodes[gradient].storages]
        if whole and len(alone) == 1 and alone[0].kind == "made" and alone[0].size_bytes == self.size(i) and len(n.makes) == 1:
            self.way(i, f"images {pieces} over", n.inputs, over=gradient, lossless=False)

    def masks(self, i: int, n: StepNode) -> None:
        for k, x in enumerate(n.inputs):
            if self.saved(x) and self.value(x).dtype == torch.bool:
                bits = self.extra("mask_bits", x, -(-self.value(x).numel() // 8))
                self.way(i, f"mask_bits {k}", _replaced(n.inputs, k, bits), more_bytes=self.size(x), workspace=self.size(x))

    def relu(self, i: int, n: StepNode) -> None:
        if n.target != "aten.threshold_backward.default" or len(n.inputs) != 2 or self.call[n.name].args[2] != 0 or not self.saved(n.inputs[1]):
            return
        y = self.root(n.inputs[1])
        made = self.graph.nodes[y]
        if self.value(y).dtype in (torch.float32, torch.float64):
            bits = self.extra("sign_bits", y, -(-self.value(y).numel() // 8))
            self.way(i, "sign_bits", (n.inputs[0], bits), more_bytes=-self.size(y))
            if self._gradient_over(n) and self.value(n.inputs[0]).is_contiguous():
                self.way(i, "sign_bits over", (n.inputs[0], bits), more_bytes=-self.size(y), over=n.inputs[0])
        if made.target == "aten.relu.default":
            self.way(i, "operand input", (n.inputs[0], made.inputs[0]))

    def from_output(self, i: int, n: StepNode) -> None:
        """hardtanh and ReLU6: the output is at a limit exactly where the input is at or beyond it."""
        if n.target != "aten.hardtanh_backward.default" or len(n.inputs) != 2:
            return
        limits = tuple(self.call[n.name].args[2:])
        for j, m in enumerate(self.graph.nodes[: self.graph.boundary]):
            given = tuple(self.call[m.name].args[1:]) if m.target == "aten.hardtanh.default" else None
            if given is not None and m.inputs == (self.root(n.inputs[1]),) and (given or (-1.0, 1.0)) == limits:
                self.way(i, "operand output", (n.inputs[0], j))

    def pooling(self, i: int, n: StepNode) -> None:
        call = self.call[n.name]
        if n.target != "aten.max_pool2d_with_indices_backward.default" or len(n.inputs) != 3 or not self.saved(n.inputs[2]):
            return
        geometry = pool_geometry(call)
        if geometry[0] * geometry[1] > 16:
            return
        indices = self.value(n.inputs[2])
        numbers = [*geometry, *indices.shape[-2:], *self.value(n.inputs[1]).shape[-2:]]
        target = "meshwright.pool_argmax:" + ":".join(str(int(x)) for x in numbers)
        packed = self.extra(target.removeprefix("meshwright."), n.inputs[2], -(-indices.numel() // 2), target)
        self.way(i, target, (n.inputs[0], packed), more_bytes=-self.size(n.inputs[2]))

    def inverse(self, i: int, n: StepNode) -> None:
        """From the output and the statistics; not where a weight is near 0 (real modules: looked at here; always: when it runs)."""
        names = [str(a.name) for a in self.call[n.name].all_input_nodes]
        x = self.root(n.inputs[1]) if len(n.inputs) > 1 else -1
        forward = {m.inputs[0]: j for j, m in enumerate(self.graph.nodes[: self.graph.boundary]) if "norm" in m.target and m.phase == "forward"}
        if n.target not in INVERSE or x not in forward or not self.saved(n.inputs[1]) or len(names) != len(n.inputs):
            return
        made = self.graph.nodes[forward[x]]
        outputs = [j for j, m in enumerate(self.graph.nodes) if m.target == "operator.getitem" and m.inputs == (forward[x],) and m.phase == "forward"]
        if len(made.inputs) < 3 or not outputs or self._near_zero(made.inputs[1]):
            return
        weight, bias = made.inputs[1:3]
        if weight not in n.inputs:
            return
        inputs = _replaced(n.inputs, 1, outputs[0])
        inputs = inputs if bias in inputs else (*inputs, bias)
        self.way(i, "inverse", inputs, more_bytes=2 * self.size(x), workspace=self.size(x), lossless=False)

    def _near_zero(self, weight: int) -> bool:
        owner = self.graph.nodes[weight].module.partition(":")[2]
        source = getattr(self.step, "source", None)
        found = None if source is None else dict(source.module.named_parameters()).get(owner)
        if found is None or found.is_meta or isinstance(found.data, torch._subclasses.FakeTensor):
            return False
        return bool(found.abs().min() < MIN_WEIGHT)

    def narrower(self, i: int, n: StepNode, form: str) -> None:
        if n.target in COMPARING or (form == "int8" and "norm" in n.target):  # a normalisation divides the rounding by what may be a small variance
            return
        for k, x in enumerate(n.inputs):
            if self._wide(x):
                count = self.value(x).numel()
                size = 2 * count if form == "bf16" else -(-count // BLOCK_ELEMENTS) * (BLOCK_ELEMENTS + 4)
                narrow = self.extra(form, x, size)
                self.way(i, f"{form} {k}", _replaced(n.inputs, k, narrow), more_bytes=self.size(x), workspace=self.size(x), lossless=False)

    def _contiguous(self, x: int) -> bool:
        return self.saved(x) and self.value(x).dtype.is_floating_point and self.size(x) > MIN_NARROWED_BYTES and self.value(x).is_contiguous()

    def _wide(self, x: int) -> bool:
        return self._contiguous(x) and self.value(x).dtype == torch.float32

    def offload(self, i: int, n: StepNode, rates: CopyRates) -> None:
        for k, x in enumerate(n.inputs):
            if self._contiguous(x):
                self.extra("host", x, 0)
                position = -1 - self.known["host", self.root(x)]
                self.extras[position].time_s = self.size(x) / rates.to_host_Bps
                self.way(i, f"host {k}", _replaced(n.inputs, k, self.known["host", self.root(x)]), workspace=self.size(x))
                way = self.ways[i][-1]
                self.ways[i][-1] = msgspec.structs.replace(way, time_s=n.time_s + self.size(x) / rates.from_host_Bps)

    def inserted(self) -> StepGraph:
        """The graph with the extra nodes in their places and all numbers moved along."""
        at: dict[int, list[int]] = {}
        for k, e in enumerate(self.extras):
            at.setdefault(e.after, []).append(k)
        order: list[int] = []  # old numbers, or -1 - k
        for i in range(len(self.graph.nodes)):
            order += [i, *(-1 - k for k in at.get(i, ()))]
        number = {x: new for new, x in enumerate(order)}
        storages = [*self.graph.storages]
        nodes: list[StepNode] = []
        for x in order:
            if x < 0:
                e = self.extras[-1 - x]
                storages.append(StepStorage(size_bytes=e.size_bytes, owner=e.name))
                made = (len(storages) - 1,)
                inputs = tuple(number[y] for y in e.inputs)
                module = self.graph.nodes[e.after].module
                nodes.append(StepNode(name=e.name, target=e.target, phase="forward", module=module, inputs=inputs, storages=made, makes=made,
                                      time_s=e.time_s, optional=True))  # fmt: skip
            else:
                n = self.graph.nodes[x]
                n = msgspec.structs.replace(n, alternatives=(*n.alternatives, *self.ways.get(x, ())))
                nodes.append(renumbered(n, number.__getitem__))
        return msgspec.structs.replace(
            self.graph, nodes=tuple(nodes), storages=tuple(storages), boundary=number.get(self.graph.boundary, len(nodes)),
            results=tuple(number[r] for r in self.graph.results),
        )  # fmt: skip


def _replaced(inputs: tuple[int, ...], k: int, by: int) -> tuple[int, ...]:
    return (*inputs[:k], by, *inputs[k + 1 :])
