"""Pipeline schedules on a training layout: the problem that the layout poses, and the layout that a schedule makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...cost import Cost, Priced
from ...decide.pipeline import PipelineProblem, Schedule
from ...errors import Unsupported
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...plan.on_schedule import on_schedule, split_prices
from ...plan.plan import TrainingLayout
from ...plan.sizes import parameter_bytes, shard_bytes, training_works

__all__ = ["Orders", "actions_of", "layout_problem", "scheduled"]

Prices = Callable[[OpGraph, TrainingLayout], Mapping[str, Priced]]
Orders = tuple[tuple[tuple[str, int, int], ...], ...]


def actions_of(schedule: Schedule) -> Orders:
    """(phase, stage, micro-batch) of every device in order; a forward of several micro-batches as one after the other."""
    return tuple(tuple((a.kind, a.stage, m) for a in order for m in range(a.microbatch, a.microbatch + a.count)) for order in schedule.orders)


def scheduled(layout: TrainingLayout, graph: OpGraph, schedule: Schedule) -> TrainingLayout:
    """`layout`, which has a pipeline index per stage of the schedule, put on its devices. Raises: Unsupported, see `on_schedule`."""
    if schedule.parts != 1:
        raise Unsupported(
            "models cannot run backward passes of half a micro-batch", where=f"schedule {schedule.name}",
            hint="mode=double, with --microbatch half as large",
        )  # fmt: skip
    return on_schedule(
        layout, graph, name=schedule.name, pipeline=schedule.devices, placement=schedule.placement, copy_of=schedule.copy_of,
        split=schedule.split,
    )  # fmt: skip


def layout_problem(
    layout: TrainingLayout, graph: OpGraph, fabric: Fabric, cost: Cost, placement: tuple[str, ...], *, devices: int,
    prices: Prices | None = None, exchange_s: Sequence[float] = (),
) -> PipelineProblem:  # fmt: skip
    """What a schedule on `devices` pipeline indices must order, of a layout with one index per stage (several stages per device in a row).

    Times by `prices` where they have one, else by `cost`; messages take the slowest link of the fabric. `placement`: of the ranks of a layout with
    `devices` indices. It is the planners' view: what is printed and compared comes from the lowered program. `exchange_s`: of a forward's exchanges
    among experts, by stage of the layout; in a pair they pass beside the other half.
    """
    chunks = len(layout.stages) // devices
    first = fabric.devices[0]  # the one that measured prices are for
    works = dict(training_works(graph, layout))
    table = dict(prices(graph, layout)) if prices is not None else {}
    try:
        split = on_schedule(layout, graph, name="", pipeline=layout.pipeline, placement=(tuple(range(layout.pipeline)),), split=True)
    except Unsupported:
        pass  # no schedule of such a layout splits its backward
    else:
        works |= {k: w for k, w in training_works(graph, split).items() if k.endswith(("|I", "|W"))}
        table |= split_prices(prices(graph, split) if prices is not None else {}, split, cost, first)

    def seconds(phase: str) -> list[float]:
        found = [0.0] * devices
        for s in layout.segments:
            key = f"{s.key}|{phase}"
            found[s.stage // chunks] += (table[key] if key in table else cost.price(key, works.get(key), first)).time_s
        return found

    sizes = {v.name: v.size_bytes for v in layout.values}
    kept, sent, weights = [0] * devices, [0] * devices, [0] * devices
    held = shard_bytes(graph, layout)
    for s in layout.segments:
        kept[s.stage // chunks] += s.saved_bytes
    for stage in layout.stages:
        kept[stage.index // chunks] += sum(sizes[v] for v in stage.receives)
        weights[stage.index // chunks] += parameter_bytes(layout, sum(held[p] for p in stage.params), 0)
        sent[stage.index // chunks] = sum(sizes[v] for v in stage.sends) or sent[stage.index // chunks]
    ranks = layout.ranks // layout.pipeline
    hosts = [[fabric.device(placement[p * ranks + i]) for i in range(ranks)] for p in range(devices)]
    sample = works[f"{layout.segments[0].key}|F"]
    reference = cost.roofline(sample, first).time_s or 1.0
    speeds = [min(reference / (cost.roofline(sample, d).time_s or reference) for d in row) for row in hosts]
    limits = [min(d.memory_bytes for d in row) for row in hosts]
    backward, inputs, later = seconds("B"), seconds("I"), seconds("W")
    halves = not any(inputs) and not any(later)
    forward, inputs = seconds("F"), [b / 2 for b in backward] if halves else inputs
    exchanged = [sum(exchange_s[d * chunks : (d + 1) * chunks]) for d in range(devices)] if any(exchange_s) else None
    if exchanged is not None:
        forward, backward, inputs = ([a + x for a, x in zip(row, exchanged, strict=True)] for row in (forward, backward, inputs))
    return PipelineProblem.of(
        devices, layout.microbatches, forward_s=forward, backward_s=backward, exchange_s=exchanged, input_grad_s=inputs,
        weight_grad_s=[b / 2 for b in backward] if halves else later,
        activation_bytes=kept, message_bytes=sent, weight_bytes=weights, speeds=speeds, data=layout.data,
        p2p_latency_s=max((x.latency_s for x in fabric.links), default=0.0) + 2 * cost.transport.per_message_s,
        p2p_rate_Bps=min((x.rate_Bps for x in fabric.links), default=1 << 62), memory_cap_bytes=limits if all(limits) else None,
    )  # fmt: skip
