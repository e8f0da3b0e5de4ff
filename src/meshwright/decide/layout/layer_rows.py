"""The rows of a layer table: what every layer of a chain of units costs one rank of a kind of device, at a tensor and a context degree.

Every operator is priced alone (roofline, the cost's own prices, or a framework's kernels), divided by its region's largest share; all-reduces of a
region are rings inside a server, exchanges of positions as `context_costs` says. Kept bytes are the storages that autograd keeps.
Cost: O(nodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...cost import Cost
from ...cost_models.gpu_rates import GPU_RATES
from ...fabric.fabric import Device
from ...fabric.servers import ServerKind
from ...graph.graph import OpGraph, OpNode, Work
from ...plan.context import ALL_TO_ALL, SHIFT
from ...plan.experts import MLP
from ...plan.precision import Precision
from ...plan.vocabulary import SUMS
from ...profile.frameworks import Framework
from ...profile.layer_table import LayerRow
from .context_costs import again_s, exchange_s
from .cut import Unit, dtype_bytes
from .operator_times import OperatorTimes
from .sharding import short_name
from .tensor_regions import Region

__all__ = ["Chain", "Pricing", "layer_rows", "set_sizes"]

EXCHANGED = "meshwright.context_"  # nodes of values that ranks exchange, in the model's own precision
# operators that treat every position of a sequence alone, so that sequence parallelism may divide them between regions
POSITIONWISE = frozenset({
    "layer_norm", "native_layer_norm", "rms_norm", "add", "sub", "mul", "div", "gelu", "relu", "silu", "dropout", "native_dropout", "embedding",
    "to", "rsqrt", "pow", "neg", "sigmoid", "tanh", "cast", "clone", "contiguous",
})  # fmt: skip


@dataclass
class Chain:
    """The graph in layers; the same at every micro-batch."""

    graph: OpGraph
    units: list[Unit]
    starts: list[int]
    borders: list[list[str]]
    size_of: dict[str, float] = field(default_factory=dict)  # bytes of every node's result, in the precision
    storage_owner: list[str] = field(default_factory=list)


def _scale(precision: Precision, dtype: str) -> float:
    return precision.value_bytes / 4 if dtype == "float32" else 1.0


def set_sizes(chain: Chain, precision: Precision) -> None:
    for n in chain.graph.nodes:
        if n.outputs:
            count = 1
            for d in n.outputs[0].shape:
                count *= d
            # parts of a loss and running results of attention are float32 whatever the precision
            wide = "/" in n.name and not n.target.startswith(EXCHANGED)
            scale = 1.0 if wide else _scale(precision, n.outputs[0].dtype)
            chain.size_of[n.name] = count * dtype_bytes(n.outputs[0].dtype) * scale
    chain.storage_owner = [s.owner for s in chain.graph.storages]


@dataclass
class Pricing:
    chain: Chain
    shares: Mapping[Region, tuple[int, ...]]
    tensor: int
    kind: ServerKind
    cost: Cost
    precision: Precision
    sequence: bool
    framework: Framework | None = None
    watts: Mapping[str, float] = field(default_factory=dict)
    context: int = 1
    experts: int = 1  # ranks that divide experts

    def __post_init__(self) -> None:
        self.device = _with_dtype(self.kind.device, self.precision.dtype)
        self.pricing = replace_cost(self.cost, self.precision.dtype)
        self.part_of: dict[str, float] = {}
        for u in self.chain.units:
            region = self.region(u)
            part = 1.0
            if region is not None:
                shares = self.shares[region] or (1,) * self.tensor
                part = max(shares) / sum(shares)
            for n in u.nodes:
                even = 1 / self.tensor if self.sequence and short_name(n.target) in POSITIONWISE else 1.0
                self.part_of[n.name] = part if region is not None else even if self.tensor > 1 else 1.0
        self.made = set(self.part_of)
        experts = [n for n in self.chain.graph.nodes if n.target == MLP] if self.experts > 1 else []
        self.expert_params = {v.removeprefix("param:") for n in experts for v in n.inputs if v.startswith("param:")}
        self.split_params = {s.param for r in self.shares for s in r.shards} if self.tensor > 1 else set()
        self.largest = {s.param: self._largest(r) for r in self.shares for s in r.shards}
        self.row_parallel = {v for r in self.shares for v in r.rows} if self.tensor > 1 else set()
        rates = GPU_RATES.get(self.kind.name.partition("/")[0]) if self.framework is not None else None
        if rates is not None and self.kind.name in self.watts:
            rates = rates.limited(self.watts[self.kind.name])
        self.rates, self.operators = rates, None
        if rates is not None and self.framework is not None:
            self.operators = OperatorTimes(
                self.chain.graph, self.device, rates, self.framework, self.precision.dtype, self.precision.value_bytes
            )

    def _largest(self, region: Region) -> float:
        shares = self.shares[region] or (1,) * self.tensor
        return max(shares) / sum(shares)

    def region(self, unit: Unit) -> Region | None:
        return unit.region if self.tensor > 1 and unit.region is not None and unit.region in self.shares else None

    def time_s(self, node: OpNode, work: Work) -> float:
        part = self.part_of[node.name]
        if self.operators is not None:
            return self.operators.time_s(node, backward=work is node.backward, part=part, row=node.name in self.row_parallel)
        fixed = not node.outputs or node.outputs[0].dtype.startswith(("float64", "complex", "bfloat16", "float16"))
        bytes_part = part if fixed else part * self.precision.value_bytes / 4
        scaled = Work(
            flops=round(work.flops * part), bytes_read=round(work.bytes_read * bytes_part), bytes_written=round(work.bytes_written * bytes_part),
            calls=work.calls,
        )  # fmt: skip
        return self.pricing.roofline(scaled, self.device).time_s if work.calls or work.flops else 0.0

    def ring_s(self, size_bytes: float) -> float:
        t = self.tensor
        if t == 1 or not size_bytes:
            return 0.0
        if self.rates is not None and self.framework is not None:
            exposed = 1 - self.framework.tensor_overlap
            return exposed * float(self.rates.collectives(self.kind.inside_Bps[t]).time_s("all-reduce", size_bytes, t))
        hop = self.kind.inside_latency_s + self.cost.transport.per_message_s
        return 2 * (t - 1) * (size_bytes / t / self.kind.inside_Bps[t] + hop)

    def sent_bytes(self, node: OpNode) -> float:
        """Of an exchanged value, as expected."""
        filled: Sequence[int] = node.kwargs.get("expected_bytes", ())
        if not filled:
            return self.chain.size_of[node.name] * self.part_of[node.name]
        return max(filled) * len(filled) * self.part_of[node.name] * _scale(self.precision, node.outputs[0].dtype)

    def update_s(self, parameters: float) -> float:
        state = self.precision.state
        moved = state.gradient + state.weight + 2 * state.optimizer + (self.framework.clipping_bytes if self.framework is not None else 0.0)
        work = Work(flops=round(10 * parameters), bytes_read=round(parameters * moved / 2), bytes_written=round(parameters * moved / 2), calls=8)
        return self.pricing.roofline(work, self.device).time_s if parameters else 0.0


def replace_cost(cost: Cost, dtype: str) -> Cost:
    import msgspec

    return msgspec.structs.replace(cost, dtype=dtype)


def _with_dtype(device: Device, dtype: str) -> Device:
    """A device that has no bf16 computes with fp16 of the same width."""
    other = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, "")
    if dtype not in device.flops and other in device.flops:
        return replace(device, flops={**device.flops, dtype: device.flops[other]})
    return device


def layer_rows(p: Pricing) -> tuple[LayerRow, ...]:
    chain = p.chain
    ends = [*chain.starts[1:], len(chain.units)]
    storages, counted = chain.graph.storages, set[int]()
    parameters = {q.name: q.size_bytes / dtype_bytes(q.dtype) for q in chain.graph.parameters}
    producer = {n.name: n for n in chain.graph.nodes}
    found = []
    for a, z in zip(chain.starts, ends, strict=True):
        units = chain.units[a:z]
        nodes = [n for u in units for n in u.nodes]
        names = {n.name for n in nodes}
        forward = sum(p.time_s(n, n.forward) for n in nodes)
        backward = sum(p.time_s(n, n.backward) for n in nodes)
        out, back = _collectives(p, units)
        weights, left = _weights(p, nodes)
        held = dict.fromkeys(v.removeprefix("param:") for n in nodes for v in n.inputs if v.startswith("param:"))
        count = sum(parameters.get(x, 0.0) * (p.largest[x] if x in p.split_params else 1.0) for x in held)
        kept: dict[int, float] = {}
        for n in nodes:
            for s in n.saved:
                if s not in counted:
                    counted.add(s)
                    kept[s] = storages[s].size_bytes * _kept_scale(p, producer, storages[s].owner)
        extra = sum(chain.size_of[n.inputs[0]] / p.precision.value_bytes * 4 * p.part_of[n.name] for n in nodes if n.target == SUMS)
        if p.framework is not None:
            extra = _loss_bytes(p, nodes, kept)
        whole = sum(kept.values()) + extra
        less, again = _selective(p, nodes, names, kept)
        into = sum(chain.size_of.get(v, 0.0) * p.part_of[v] for v in chain.borders[a]) if a else 0.0
        leaves = sum(chain.size_of.get(v, 0.0) * (p.part_of[v] if p.sequence else 1.0) for v in chain.borders[z]) if z < len(chain.units) else 0.0
        flops = [sum(w.flops * p.part_of[n.name] for n in nodes for w in (getattr(n, phase),)) for phase in ("forward", "backward")]
        found.append(
            LayerRow(
                forward_s=forward + out, backward_s=backward + back, update_s=p.update_s(count), parameters=count, output_bytes=leaves,
                kept_bytes=(whole, min(whole, less + extra), min(whole, into)), again_s=(0.0, again, forward + out), tensor_s=(out, back),
                flops=(flops[0], flops[1]), weights_s=weights, left_bytes=left,
                expert_parameters=sum(parameters.get(x, 0.0) * p.largest.get(x, 1.0) for x in held if x in p.expert_params),
            )
        )
    return tuple(found)


def _loss_bytes(p: Pricing, nodes: Sequence[OpNode], kept: Mapping[int, float]) -> float:
    """What a cross-entropy holds at once of its logits, beyond what it keeps by the graph."""
    assert p.framework is not None
    loss = {n.name for n in nodes if n.module == "loss"}
    logits = max((p.chain.size_of.get(v, 0.0) * p.part_of[n.name] for n in nodes if n.name in loss for v in n.inputs[:1]), default=0.0)
    owner = p.chain.storage_owner
    counted = sum(size for s, size in kept.items() if owner[s] in loss)
    return max(0.0, p.framework.loss_bytes * logits / p.precision.value_bytes - counted) if loss else 0.0


def _weights(p: Pricing, nodes: Sequence[OpNode]) -> tuple[float, float]:
    """(seconds of the backward that only gradients of weights need, bytes of gradients that wait for it).

    As a plan's split backward takes it until a run measures it: half of an operator's backward where it has trained parameters and an input
    with a gradient, all of it where parameters alone have one.
    """
    trained = {f"param:{q.name}" for q in p.chain.graph.parameters if q.trainable}
    rows = {v for r in p.shares for v in r.rows}
    seconds = size_bytes = 0.0
    for n in nodes:
        if not trained.intersection(n.inputs):
            continue
        whole = p.time_s(n, n.backward)
        if any(v in p.made for v in n.inputs):
            seconds += whole / 2
            size_bytes += p.chain.size_of.get(n.name, 0.0) * (1.0 if n.name in rows else p.part_of[n.name])
        else:
            seconds += whole
    return seconds, size_bytes


def _kept_scale(p: Pricing, producer: Mapping[str, OpNode], owner: str) -> float:
    node = producer.get(owner)
    if node is None:
        return 1.0
    dtype = node.outputs[0].dtype if node.outputs else "float32"
    return p.part_of[owner] * _scale(p.precision, dtype)


def _collectives(p: Pricing, units: Sequence[Unit]) -> tuple[float, float]:
    """Seconds of the all-reduces of the regions in `units`: of results in forward, of the entries' gradients in backward; and of exchanges of
    positions."""
    forward = backward = 0.0
    if max(p.context, p.experts) > 1:
        forward, backward = exchange_s(
            [n for u in units for n in u.nodes], max(p.context, p.experts), p.tensor, p.kind, p.cost, p.sent_bytes,
            lambda n, backward: p.time_s(n, n.backward if backward else n.forward),
        )  # fmt: skip
    for u in units:
        region = p.region(u)
        if region is not None:
            forward += sum(p.ring_s(p.chain.size_of.get(v, 0.0)) for v in region.rows)
            backward += sum(p.ring_s(p.chain.size_of.get(v, 0.0)) for v in region.entries)
    return forward, backward


def _selective(p: Pricing, nodes: Sequence[OpNode], names: set[str], kept: Mapping[int, float]) -> tuple[float, float]:
    """(bytes kept, seconds computed again) when what cheap operators of the layer made is dropped and computed again; blocks of a ring come again."""
    owner = p.chain.storage_owner
    by_name = {n.name: n for n in nodes}
    cheap = {n.name for n in nodes if not n.forward.flops and not n.random and n.target != ALL_TO_ALL}
    dropped = {s for s in kept if owner[s] in cheap}
    redo = {owner[s] for s in dropped}
    stored = {s: size for s, size in kept.items() if s not in dropped}
    open_ = list(redo)
    while open_:
        for value in by_name[open_.pop()].inputs:
            node = by_name.get(value)
            if node is None or not node.outputs:
                continue
            storage = node.outputs[0].storage
            made = owner[storage] if 0 <= storage < len(owner) else value
            if storage in stored or made in redo or made not in names:
                continue
            redo.add(made)
            open_.append(made)
    rows = {v for r in p.shares for v in r.rows}
    again = sum(p.time_s(by_name[x], by_name[x].forward) + (p.ring_s(p.chain.size_of[x]) if x in rows else 0.0) for x in redo)
    for x in redo:
        if by_name[x].target == SHIFT:
            round_ = by_name[f"{x.rpartition('/')[0]}/r0"]
            size = p.chain.size_of[x] * p.part_of[x]
            again += again_s(by_name[x], p.time_s(round_, round_.backward), p.context, p.tensor, p.kind, p.cost, size)
    return sum(stored.values()), again
