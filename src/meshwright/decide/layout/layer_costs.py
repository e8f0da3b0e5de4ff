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
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ...cost import Cost
from ...cost_models.collectives import PAYLOAD_SHARE
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.servers import ServerKind
from ...graph.graph import OpGraph
from ...plan.context import EXCHANGES
from ...plan.plan import VocabularyLoss
from ...plan.precision import FULL, MIXED, Precision
from ...plan.routing import UNIFORM, Routing
from ...plan.vocabulary import base_node, expand_losses
from ...profile.frameworks import Framework
from ...profile.layer_profile import Entry
from ...profile.layer_table import LayerRow, LayerTable
from .context import context_graph
from .context_costs import context_degrees, same_starts
from .cut import Unit, border_values
from .experts import experts_graph
from .layer_rows import Chain, Pricing, layer_rows, set_sizes
from .megatron import kept_notes, search_regions
from .tensor_usable import ordered_units, usable_regions

__all__ = ["FULL", "MIXED", "Precision", "layer_table"]

MEASURED_KERNELS = "where the device's kernels were measured, these as"  # of a table's source


def layer_table(
    graph_at: Callable[[int], OpGraph], kinds: Sequence[ServerKind], cost: Cost, *, microbatches: Sequence[int], tensors: Sequence[int],
    precision: Precision = MIXED, sequence: bool = True, least: int = 32, sharding_messages: Literal["overlapped", "blocking"] = "overlapped",
    framework: Framework | None = None, watts: Mapping[str, float] | None = None, contexts: Sequence[int] = (1,), experts: int = 1,
    routing: Routing = UNIFORM,
) -> LayerTable:  # fmt: skip
    """`graph_at(samples)`: the captured graph at a micro-batch. `sequence`: divide position-wise operators between regions too.

    `framework`: kernels, state and overlap of a training framework, on kinds of device whose kernels were measured; the roofline elsewhere.
    `watts`: power limits of kinds of device other than those that they were measured at. `contexts`: degrees of context parallelism beside none,
    each by the faster of its exchanges; none given: `context_degrees`, and what a model does not allow is left out with a note.

    `experts`: neighbouring replicas that divide the experts of every layer, whose tokens choose them as `routing` says (`experts_graph`); without
    contexts.

    Raises: Unsupported for experts that do not divide so; Infeasible when the graph cannot be cut at all, or positions not be divided as asked;
    UsageError for empty micro-batches or degrees; what `graph_at` raises.
    """
    if not microbatches or not tensors or min(*microbatches, *tensors) < 1:
        raise UsageError("micro-batches and tensor degrees must be >= 1", where="layer table")
    if experts > 1:
        graph_at, contexts = partial(_of_experts, graph_at, experts, routing), (1,)
    sizes, degrees, most = sorted(set(microbatches)), sorted(set(tensors)), max(k.devices for k in kinds)
    first = graph_at(sizes[0])
    cuts = _Cuts(least)
    make = partial(Pricing, cost=cost, precision=precision, sequence=sequence, framework=framework, watts=watts or {}, experts=experts)
    rows, notes = _entries(graph_at, sizes, degrees, kinds, cuts, make)
    found: dict[int, dict[Entry, tuple[LayerRow, ...]]] = {}
    for c in context_degrees(first, contexts, most):
        for exchange in (x for x in EXCHANGES if x != "ring-again"):  # that is what selective recomputation of a ring's layers means
            try:
                made, _ = _entries(partial(_on_positions, graph_at, c, exchange), sizes, degrees, kinds, cuts, make, c)
            except Unsupported as why:
                notes.append(f"{exchange}: {why.message}")
                continue
            known = found.setdefault(c, {})
            known |= {e: x for e, x in made.items() if e not in known or _total_s(x) < _total_s(known[e])}
    if missing := [c for c in contexts if c > 1 and c not in found]:
        raise Infeasible(
            f"context degree {missing[0]} is not possible: {notes[-1]}",
            where="--contexts", hint="degree 1 is always possible: --contexts 1",
        )  # fmt: skip
    starts, names, heads = cuts.starts, cuts.names, cuts.heads
    flops = sum(n.forward.flops + n.backward.flops for n in first.nodes) / first.batch_size
    if len(starts) < 2 and least > 1:
        raise Infeasible(f"{first.model} cannot be cut into layers", hint="its operators form one inseparable piece")
    payload = PAYLOAD_SHARE if framework is not None else 1.0
    return LayerTable(
        model=first.model, names=tuple(names), rows=rows, contexts=found, state=precision.state, sample_flops=flops, experts=experts,
        inside_Bps={k.name: payload * k.inside_Bps[k.gpus] for k in kinds if k.gpus > 1},
        outside_Bps={k.name: payload * k.device_nic_Bps for k in kinds if k.nics}, gpus_per_server={k.name: k.gpus for k in kinds},
        sharding_messages=sharding_messages, stolen=framework.stolen if framework is not None else 0.0,
        inside_hop_s={k.name: k.inside_latency_s + cost.transport.per_message_s for k in kinds},
        outside_hop_s={k.name: k.outside_latency_s + cost.transport.per_message_s for k in kinds},
        heads=tuple(heads), notes=tuple(notes),
        source=f"{cost.source}, {precision.dtype}" + (f"; {MEASURED_KERNELS} {framework.name} runs them" if framework is not None else ""),
    )  # fmt: skip


@dataclass
class _Cuts:
    """Where layers begin: at the first micro-batch by traffic, then at the same operators. `firsts`: the first operator of every layer's first unit;
    `heads`: see `_heads`."""

    least: int
    starts: list[int] = field(default_factory=list)
    firsts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def find(self, graph: OpGraph, chain: Chain) -> None:
        self.starts = _layer_starts(chain, self.least)
        self.firsts = [chain.units[a].nodes[0].name for a in self.starts]
        self.heads = _heads(graph, chain.units, self.starts)
        ends = [*self.starts[1:], len(chain.units)]
        self.names = [_name(chain.units, a, z) for a, z in zip(self.starts, ends, strict=True)]


def _entries(
    graph_at: Callable[[int], OpGraph], microbatches: Sequence[int], tensors: Sequence[int], kinds: Sequence[ServerKind], cuts: _Cuts,
    make: partial[Pricing], context: int = 1,
) -> tuple[dict[Entry, tuple[LayerRow, ...]], list[str]]:  # fmt: skip
    """Rows of every micro-batch, tensor degree and kind of device, and what is kept whole. `context`: ranks that `graph_at` divides positions of."""
    first = graph_at(microbatches[0])
    regions, kept = search_regions(first)
    top = max((t for t in tensors if usable_regions(first, regions, t).shares), default=1)
    usable = usable_regions(first, regions, top)
    losses = tuple(VocabularyLoss(node=x) for x in dict.fromkeys(x for r in usable.shares for x in r.losses))
    rows: dict[Entry, tuple[LayerRow, ...]] = {}
    notes = list(kept_notes(kept)) if max(tensors) > 1 else []
    starts: list[int] = []
    for number, microbatch in enumerate(microbatches):
        graph = graph_at(microbatch) if number else first
        expanded = expand_losses(graph, losses)
        units = ordered_units(expanded, usable)
        chain = Chain(expanded, units, starts, border_values(units))
        set_sizes(chain, make.keywords["precision"])
        if not cuts.starts:
            cuts.find(graph, chain)
        if not number:
            starts += cuts.starts if context == 1 else same_starts(cuts.firsts, units, first.model)
        for tensor in tensors:
            found = usable_regions(graph, regions, tensor)
            if tensor > 1 and not found.shares:
                continue
            shares = {r: found.shares[r] for r in usable.shares if r in found.shares} if tensor > 1 else {}
            if number == 0:
                notes += [x for x in found.notes if x not in notes]
            for kind in kinds:
                if kind.gpus >= tensor and kind.gpus % tensor == 0 and kind.devices % (tensor * context) == 0:
                    entry = Entry(kind.name, microbatch, tensor)
                    if entry not in rows:
                        rows[entry] = layer_rows(make(chain=chain, shares=shares, tensor=tensor, kind=kind, context=context))
    return rows, notes


def _on_positions(graph_at: Callable[[int], OpGraph], parts: int, exchange: str, samples: int) -> OpGraph:
    return context_graph(graph_at(samples), parts, exchange)


def _of_experts(graph_at: Callable[[int], OpGraph], parts: int, routing: Routing, samples: int) -> OpGraph:
    return experts_graph(graph_at(samples), parts, routing)


def _total_s(rows: Sequence[LayerRow]) -> float:
    return sum(r.forward_s + r.backward_s for r in rows)


# ---- layers ------------------------------------------------------------------------------------------------------------
def _layer_starts(chain: Chain, least: int) -> list[int]:
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
