"""Seconds of operators as a framework runs them on a measured GPU: products and attention by their kernels, what lies between them by memory.

    times = OperatorTimes(graph, device, rates, framework, value_bytes=2)
    times.time_s(node, backward=False, part=1 / 8, row=True)

Products follow `cost_models.products` in their own shapes, forward, input's and weight's gradient. Attention on a causal mask computes half of the
scores. Of position-wise operators, each moves its operands and result (eager), or a run of them between two products is one kernel (fused): a
value is read where a product, or an earlier run, made it, and written where one uses it. Its backward reads the same values again, and their
gradients flow the other way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ...cost_models.gpu_rates import GpuRates
from ...cost_models.products import ProductModel
from ...fabric.fabric import Device
from ...graph.graph import OpGraph, OpNode, operator_name
from ...plan.context import HEADS, RING_BLOCK, RING_END
from ...plan.vocabulary import base_node
from ...profile.frameworks import Framework
from .cut import dtype_bytes

__all__ = ["OperatorTimes"]

FUSED_LOSS = 0.25  # of an eager cross-entropy's traffic in float32: 16-bit logits read twice, read and their gradients written once more
# Eager attention moves a score so many times in 16 bits beside its products, forward and backward: Megatron's scaled, upper-triangle-masked softmax
# reads the lower half only (half + 1; half + half + 1), dropout with its one-byte mask is 2.5 either way.
SCORE_MOVES = (4.0, 4.5)
ROUNDS = frozenset({RING_BLOCK, RING_END, HEADS})  # attention on a part of the positions
LINEAR = frozenset({"add", "sub", "neg", "cat", "clone", "contiguous", "to"})  # whose backward needs none of its operands


@dataclass
class OperatorTimes:
    graph: OpGraph
    device: Device
    rates: GpuRates
    framework: Framework
    dtype: str
    value_bytes: float
    _products: ProductModel = field(init=False)
    _moved: dict[str, tuple[float, float]] = field(init=False)  # bytes of a fused operator forward, backward
    _causal: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.peak = self.device.flops[self.dtype]
        self.memory_Bps = self.device.memory_bandwidth_Bps * self.rates.product[4]
        self._products = self.rates.products(self.peak, self.device.memory_bandwidth_Bps)
        self._causal = frozenset(c.node for c in self.graph.joint if c.causal)
        self._moved = _fused_bytes(self.graph, self.value_bytes) if self.framework.fused else {}

    def time_s(self, node: OpNode, *, backward: bool, part: float, row: bool) -> float:
        """`part`: of the operator, on one rank; `row`: divided along what a product sums over, else along its columns."""
        work = node.backward if backward else node.forward
        if node.forward.flops and ("scaled_dot_product" in node.target or node.target in ROUNDS):
            return self._attention_s(node, work.flops * part, backward=backward, part=part)
        if node.forward.flops and node.module != "loss":
            return self._product_s(node, backward=backward, part=part, row=row)
        scale = self._scale(node)
        if node.module == "loss":
            share = FUSED_LOSS if self.framework.fused_loss else 1.0
            return part * share * (work.bytes_read + work.bytes_written) / self.memory_Bps
        if node.name in self._moved:
            return part * self._moved[node.name][backward] / self.memory_Bps
        return part * scale * (work.bytes_read + work.bytes_written) / self.memory_Bps + work.calls * self.rates.product[0] * 1e-6

    def _scale(self, node: OpNode) -> float:
        return self.value_bytes / 4 if node.outputs and node.outputs[0].dtype == "float32" else 1.0

    def _product_s(self, node: OpNode, *, backward: bool, part: float, row: bool) -> float:
        shape = node.outputs[0].shape
        n = shape[-1] if shape else 1
        m = max(1, prod(shape) // max(1, n))
        k = max(1.0, node.forward.flops / (2 * m * n))
        k, cut = (k * part, n) if row else (k, n * part)
        time = self._products.time_s
        if not backward:
            return float(time(m, cut, k))
        each = float(time(m, k, cut)) + float(time(cut, k, m))
        found = each if node.backward.flops > 1.5 * node.forward.flops else each / 2
        return found + cut * k * self.framework.accumulate_bytes / self.memory_Bps

    def _attention_s(self, node: OpNode, flops: float, *, backward: bool, part: float) -> float:
        queries, positions, width = _attended(node)
        if self.framework.attention == "eager":
            scores = queries * positions * part
            products = (4 if backward else 2) * float(self._products.time_s(scores / positions, positions, width))  # all heads as one batch
            return products + SCORE_MOVES[backward] * scores * self.value_bytes / self.memory_Bps
        half = 0.5 if base_node(node.name) in self._causal else 1.0
        return half * flops / (self.peak * self.rates.attention_share(self.framework.attention, positions))


def _attended(node: OpNode) -> tuple[int, int, int]:
    """(queries of all heads and samples, keys that each sees or is masked from, width of a result)."""
    if node.target == HEADS:  # of some heads, over the positions of all ranks
        samples, positions, (heads, _, _, width) = node.args[-5:-2]
        positions *= node.outputs[0].shape[0]
        return samples * heads * positions, positions, width
    shape = node.outputs[0].shape
    return prod(shape[:-1]), shape[-2], shape[-1] - 2 * (node.target == RING_BLOCK)


def _fused_bytes(graph: OpGraph, value_bytes: float) -> dict[str, tuple[float, float]]:
    """Of every position-wise operator that is part of a fused run: bytes that it moves, forward and backward."""
    by_name = {n.name: n for n in graph.nodes}
    base: dict[str, str] = {}  # a view's value is that of what it looks at
    depth: dict[str, int] = {}  # products on the longest way to a value
    light: set[str] = set()
    for n in graph.nodes:
        before = [base.get(v, v) for v in n.inputs if v in by_name]
        depth[n.name] = max((depth[v] + (v not in light) for v in before), default=0)
        if not n.forward.calls and not n.forward.flops and before:
            base[n.name] = before[0]
        elif not n.forward.flops and n.module != "loss" and operator_name(n.target) != "embedding" and before:
            light.add(n.name)
    seen: set[tuple[str, int]] = set()
    read: dict[str, float] = {}
    written: set[str] = set()
    for n in graph.nodes:
        if n.name in base:
            continue
        total = 0.0
        for v in dict.fromkeys(base.get(v, v) for v in n.inputs if v in by_name):
            apart = v not in light or n.name not in light or depth[v] < depth[n.name]
            if apart:
                written.add(v)
                if (v, depth[n.name]) not in seen:
                    seen.add((v, depth[n.name]))
                    total += _bytes(by_name[v], value_bytes)
        read[n.name] = total
    found = {}
    for name in light:
        n = by_name[name]
        out = _bytes(n, value_bytes) if name in written else 0.0
        again = 0.0 if operator_name(n.target) in LINEAR else read[name]
        found[name] = (read[name] + out, read[name] + out + again)
    return found


def _bytes(node: OpNode, value_bytes: float) -> float:
    if not node.outputs:
        return 0.0
    dtype = node.outputs[0].dtype
    return prod(node.outputs[0].shape) * (value_bytes if dtype == "float32" else dtype_bytes(dtype))
