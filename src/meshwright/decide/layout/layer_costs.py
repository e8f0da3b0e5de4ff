"""Layer tables from a captured graph: where a model is cut into layers, and what each costs by device, micro-batch and tensor degree.

    table = layer_table(graph_at, kinds, cost, microbatches=(1, 2), tensors=(1, 2, 4, 8), precision=MIXED)

The forward chain is put in the order in which every tensor-parallel region is contiguous (`cut.order_units`) and cut where the least traffic
crosses: at all positions whose border is not above the smallest one that gives `least` layers. Every operator is priced alone (roofline or
the cost's own prices), divided by its region's largest share; a region's all-reduces are rings inside a server at the fabric's rates.
Selective recomputation of a layer drops what operators without multiply-adds keep, and computes again what is needed for that: norms and
activation functions, and with unfused attention the scores, which is Korthikanti et al.'s core attention (MLSys 2023, section 5).
Deviations: the loss over a split vocabulary is priced in its three parts at every degree; temporaries of single operators are not counted.
Cost: O(nodes) per (device, micro-batch, degree).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...cost import Cost
from ...cost_models.collectives import PAYLOAD_SHARE
from ...cost_models.gpu_rates import GPU_RATES
from ...errors import Infeasible, UsageError
from ...fabric.fabric import Device
from ...fabric.servers import ServerKind
from ...graph.graph import OpGraph, OpNode, Work
from ...plan.plan import VocabularyLoss
from ...plan.vocabulary import SUMS, base_node, expand_losses
from ...profile.frameworks import Framework
from ...profile.layer_profile import Entry
from ...profile.layer_table import LayerRow, LayerTable
from .cut import Unit, border_values, dtype_bytes
from .megatron import Region, kept_notes, search_regions
from .operator_times import OperatorTimes
from .precision import FULL, MIXED, Precision
from .sharding import short_name
from .tensor_usable import ordered_units, usable_regions

__all__ = ["FULL", "MIXED", "Precision", "layer_table"]

MEASURED_KERNELS = "where the device's kernels were measured, these as"  # of a table's source
# operators that treat every position of a sequence alone, so that sequence parallelism may divide them between regions
POSITIONWISE = frozenset({
    "layer_norm", "native_layer_norm", "rms_norm", "add", "sub", "mul", "div", "gelu", "relu", "silu", "dropout", "native_dropout", "embedding",
    "to", "rsqrt", "pow", "neg", "sigmoid", "tanh", "cast", "clone", "contiguous",
})  # fmt: skip


@dataclass
class _Chain:
    """The graph in layers; the same at every micro-batch."""

    graph: OpGraph
    units: list[Unit]
    starts: list[int]
    borders: list[list[str]]
    loss: tuple[VocabularyLoss, ...]
    size_of: dict[str, float] = field(default_factory=dict)  # bytes of every node's result, in the precision
    storage_owner: list[str] = field(default_factory=list)


def layer_table(
    graph_at: Callable[[int], OpGraph], kinds: Sequence[ServerKind], cost: Cost, *, microbatches: Sequence[int], tensors: Sequence[int],
    precision: Precision = MIXED, sequence: bool = True, least: int = 32, sharding_messages: Literal["overlapped", "blocking"] = "overlapped",
    framework: Framework | None = None, watts: Mapping[str, float] | None = None,
) -> LayerTable:  # fmt: skip
    """`graph_at(samples)`: the captured graph at a micro-batch. `sequence`: divide position-wise operators between regions too.

    `framework`: kernels, state and overlap of a training framework, on kinds of device whose kernels were measured; the roofline elsewhere.
    `watts`: power limits of kinds of device other than those that they were measured at.

    Raises: Infeasible when the graph cannot be cut at all; UsageError for empty micro-batches or degrees; what `graph_at` raises.
    """
    if not microbatches or not tensors or min(*microbatches, *tensors) < 1:
        raise UsageError("micro-batches and tensor degrees must be >= 1", where="layer table")
    first = graph_at(min(microbatches))
    regions, kept = search_regions(first)
    top = max((t for t in tensors if usable_regions(first, regions, t).shares), default=1)
    usable = usable_regions(first, regions, top)
    losses = tuple(VocabularyLoss(node=x) for x in dict.fromkeys(x for r in usable.shares for x in r.losses))
    starts, names, heads = [0], [""], [""]
    rows: dict[Entry, tuple[LayerRow, ...]] = {}
    notes = list(kept_notes(kept)) if max(tensors) > 1 else []
    flops = 0.0
    for number, microbatch in enumerate(sorted(set(microbatches))):
        graph = graph_at(microbatch)
        expanded = expand_losses(graph, losses)
        units = ordered_units(expanded, usable)
        chain = _Chain(expanded, units, starts, border_values(units), losses)
        _sizes(chain, precision)
        if not number:
            starts[:] = _layer_starts(chain, least)
            heads = _heads(graph, units, starts)
            names = [_name(units, a, z) for a, z in zip(starts, [*starts[1:], len(units)], strict=True)]
            flops = sum(n.forward.flops + n.backward.flops for n in graph.nodes) / graph.batch_size
        for tensor in sorted(set(tensors)):
            found = usable_regions(graph, regions, tensor)
            if tensor > 1 and not found.shares:
                continue
            shares = {r: found.shares[r] for r in usable.shares if r in found.shares} if tensor > 1 else {}
            if number == 0:
                notes += [x for x in found.notes if x not in notes]
            for kind in kinds:
                if kind.gpus >= tensor and (kind.gpus % tensor == 0):
                    entry = Entry(kind.name, microbatch, tensor)
                    if entry not in rows:
                        rows[entry] = _rows(_Pricing(chain, shares, tensor, kind, cost, precision, sequence, framework, watts or {}))
    if len(starts) < 2 and least > 1:
        raise Infeasible(f"{first.model} cannot be cut into layers", hint="its operators form one inseparable piece")
    payload = PAYLOAD_SHARE if framework is not None else 1.0
    return LayerTable(
        model=first.model, names=tuple(names), rows=rows, state=precision.state, sample_flops=flops,
        inside_Bps={k.name: payload * k.inside_Bps[k.gpus] for k in kinds if k.gpus > 1},
        outside_Bps={k.name: payload * k.device_nic_Bps for k in kinds if k.nics}, gpus_per_server={k.name: k.gpus for k in kinds},
        sharding_messages=sharding_messages, stolen=framework.stolen if framework is not None else 0.0,
        inside_hop_s={k.name: k.inside_latency_s + cost.transport.per_message_s for k in kinds},
        outside_hop_s={k.name: k.outside_latency_s + cost.transport.per_message_s for k in kinds},
        heads=tuple(heads), notes=tuple(notes),
        source=f"{cost.source}, {precision.dtype}" + (f"; {MEASURED_KERNELS} {framework.name} runs them" if framework is not None else ""),
    )  # fmt: skip


# ---- layers ------------------------------------------------------------------------------------------------------------
def _scale(precision: Precision, dtype: str) -> float:
    return precision.value_bytes / 4 if dtype == "float32" else 1.0


def _sizes(chain: _Chain, precision: Precision) -> None:
    for n in chain.graph.nodes:
        if n.outputs:
            count = 1
            for d in n.outputs[0].shape:
                count *= d
            scale = 1.0 if "/" in n.name else _scale(precision, n.outputs[0].dtype)
            chain.size_of[n.name] = count * dtype_bytes(n.outputs[0].dtype) * scale
    chain.storage_owner = [s.owner for s in chain.graph.storages]


def _layer_starts(chain: _Chain, least: int) -> list[int]:
    """Cuts with the least traffic; a cut that leaves less than a hundredth of the mean layer's work between it and the last is left out."""
    inside = [i for i in range(1, len(chain.units)) if chain.borders[i]]
    traffic = {i: sum(chain.size_of.get(v, 0.0) for v in chain.borders[i]) for i in inside}
    if not inside:
        return [0]
    levels = sorted(set(traffic.values()))
    work = [sum(w.flops + w.bytes_read + w.bytes_written for n in u.nodes for w in (n.forward, n.backward)) for u in chain.units]
    total = sum(work)
    starts = [0]
    for level in levels:
        positions = [i for i in inside if traffic[i] <= level]
        starts, done = [0], 0
        for i in positions:
            between, after = sum(work[starts[-1] : i]), sum(work[i:])
            if min(between, after) * 100 * max(1, len(positions)) >= total:
                starts.append(i)
                done = i
        if len(starts) >= least or (done == 0 and level == levels[-1]):
            break
    return starts


def _heads(graph: OpGraph, units: Sequence[Unit], starts: Sequence[int]) -> list[str]:
    """The operator of every layer that is first in the captured graph; of a loss in parts, the captured one."""
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    ends = [*starts[1:], len(units)]
    return [min((base_node(n.name) for u in units[a:z] for n in u.nodes), key=order.__getitem__) for a, z in zip(starts, ends, strict=True)]


def _name(units: Sequence[Unit], a: int, z: int) -> str:
    modules = list(dict.fromkeys(n.module for u in units[a:z] for n in u.nodes if n.module and (n.forward.calls or n.forward.flops)))
    return modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}" if modules else units[a].nodes[0].name


# ---- prices ------------------------------------------------------------------------------------------------------------
@dataclass
class _Pricing:
    chain: _Chain
    shares: Mapping[Region, tuple[int, ...]]
    tensor: int
    kind: ServerKind
    cost: Cost
    precision: Precision
    sequence: bool
    framework: Framework | None = None
    watts: Mapping[str, float] = field(default_factory=dict)

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
        bytes_part = part * self.precision.value_bytes / 4 if node.outputs and not node.outputs[0].dtype.startswith(("float64", "complex")) else part
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


def _rows(p: _Pricing) -> tuple[LayerRow, ...]:
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
            )
        )
    return tuple(found)


def _loss_bytes(p: _Pricing, nodes: Sequence[OpNode], kept: Mapping[int, float]) -> float:
    """What a cross-entropy holds at once of its logits, beyond what it keeps by the graph."""
    assert p.framework is not None
    loss = {n.name for n in nodes if n.module == "loss"}
    logits = max((p.chain.size_of.get(v, 0.0) * p.part_of[n.name] for n in nodes if n.name in loss for v in n.inputs[:1]), default=0.0)
    owner = p.chain.storage_owner
    counted = sum(size for s, size in kept.items() if owner[s] in loss)
    return max(0.0, p.framework.loss_bytes * logits / p.precision.value_bytes - counted) if loss else 0.0


def _weights(p: _Pricing, nodes: Sequence[OpNode]) -> tuple[float, float]:
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


def _kept_scale(p: _Pricing, producer: Mapping[str, OpNode], owner: str) -> float:
    node = producer.get(owner)
    if node is None:
        return 1.0
    dtype = node.outputs[0].dtype if node.outputs else "float32"
    return p.part_of[owner] * _scale(p.precision, dtype)


def _collectives(p: _Pricing, units: Sequence[Unit]) -> tuple[float, float]:
    """Seconds of the all-reduces of the regions in `units`: of results in forward, of the entries' gradients in backward."""
    forward = backward = 0.0
    for u in units:
        region = p.region(u)
        if region is not None:
            forward += sum(p.ring_s(p.chain.size_of.get(v, 0.0)) for v in region.rows)
            backward += sum(p.ring_s(p.chain.size_of.get(v, 0.0)) for v in region.entries)
    return forward, backward


def _selective(p: _Pricing, nodes: Sequence[OpNode], names: set[str], kept: Mapping[int, float]) -> tuple[float, float]:
    """(bytes kept, seconds computed again) when what cheap operators of the layer made is dropped and computed again."""
    owner = p.chain.storage_owner
    by_name = {n.name: n for n in nodes}
    cheap = {n.name for n in nodes if not n.forward.flops and not n.random}
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
    return sum(stored.values()), again
