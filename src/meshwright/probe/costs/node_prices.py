"""Prices of a layout's segments from operators measured here, for planning a fabric whose devices are like this machine's processor.

The whole model is run in place, operator by operator, at one batch size (`run.calibrate.operators`). A segment costs the sum of its operators,
scaled to its micro-batch and to its share of a split operator. Only what was measured as it will run (same batch, not split) is called measured;
the rest is interpolated.
Where backward is split, the work of an operator for its parameters is the share that was measured in a backward in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ...cost import Priced
from ...fabric.fabric import Fabric, Provenance
from ...graph.graph import OpGraph
from ...job import Training
from ...plan.forward_again import run_again
from ...plan.on_schedule import weight_roles
from ...plan.plan import Segment, TrainingLayout
from ...plan.vocabulary import base_node, sums_of

__all__ = ["MeasuredPrices", "NodePair", "as_measured", "measured_prices", "segment_prices"]

NodePair = tuple[Priced, Priced]  # forward, backward


@dataclass(frozen=True)
class MeasuredPrices:
    """Prices any layout of the model whose operators were measured. `share`: of a core, per device; `weights`: of an operator's backward, for its
    parameters."""

    nodes: Mapping[str, NodePair]
    batch_size: int
    share: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, graph: OpGraph, layout: TrainingLayout) -> dict[str, Priced]:
        parts = {n: 1.0 if whole else self.weights.get(n, 0.5) for n, whole in weight_roles(graph, layout).items()} if layout.split_backward else {}
        return segment_prices(self.nodes, self.batch_size, layout, share=self.share, weights=parts)

    def peak_flops(self, graph: OpGraph) -> int:
        """The highest rate that any operator reached: what the processor can do at least."""
        scale = self.batch_size / graph.batch_size
        rates = [0.0]
        for n in graph.nodes:
            if n.name in self.nodes:
                forward, backward = self.nodes[n.name]
                rates += [w.flops * scale / p.time_s for w, p in ((n.forward, forward), (n.backward, backward)) if p.time_s > 0]
        return math.ceil(max(rates))


def as_measured(fabric: Fabric, flops: int, dtype: str) -> Fabric:
    """The fabric with devices at least as fast as was measured, so that its roofline stays a bound."""
    slower = any(d.flops.get(dtype, 0) < flops for d in fabric.devices)
    if not slower:
        return fabric
    devices = tuple(replace(d, flops={**d.flops, dtype: max(flops, d.flops.get(dtype, 0))}) for d in fabric.devices)
    source = Provenance(what=f"devices: {dtype} rate {flops}", source="fastest operator measured here; the stated rate was lower")
    return replace(fabric, devices=devices, provenance=(*fabric.provenance, source))


def measured_prices(job: Training, *, batch_size: int, share: float = 1.0, repeats: int = 3) -> MeasuredPrices:
    """Measures the job's model here, on one thread. Raises: CaptureError, UsageError as `capture.trace_forward` does."""
    from ...capture.forward import trace_forward
    from ...run.calibrate.operators import measure_graph, measure_weight_shares

    traced = trace_forward(job.model, loss=job.loss, batch_size=batch_size, seed=job.seed, device="cpu")
    nodes = measure_graph(traced, repeats=repeats)
    return MeasuredPrices(nodes, batch_size, share, measure_weight_shares(traced, repeats=repeats))


def segment_prices(
    nodes: Mapping[str, NodePair], batch_size: int, layout: TrainingLayout, *, share: float = 1.0, weights: Mapping[str, float] | None = None
) -> dict[str, Priced]:
    """`"segment|F"` and `"segment|B"` (or `I` and `W`) -> price on one rank, for one micro-batch: of the rank with most, and
    with `@<tensor index>` of each where they have unequal shares. `weights`: see `MeasuredPrices`, by operator."""
    of_weights = weights or {}
    found, second = dict[str, Priced](), run_again(layout)
    for s in layout.segments:
        parts = (Fraction(sum(s.shares), max(s.shares)) if s.shares else layout.tensor) if s.split else 1  # of the rank with most
        scale = layout.microbatch_size / batch_size / float(parts)
        evidence = "measured" if layout.microbatch_size == batch_size and parts == 1 else "interpolated"
        own = [n for n in _measured_nodes(s, layout) if n in nodes]
        forward, backward = (sum(_cpu_s(nodes[n][i]) for n in own) for i in (0, 1))
        again = sum(_cpu_s(nodes[n][0]) for names in s.computed_again() for n in names if n in nodes)
        if s.step is not None and s.step.forward_s() > 0:
            again = forward * s.step.again_s() / s.step.forward_s()
        later = sum(of_weights.get(n, 0.0) * _cpu_s(nodes[n][1]) for n in own) if layout.split_backward else 0.0
        timed = {"F": forward, "B": backward + again}
        if layout.split_backward:
            timed = {"F": forward, "I": backward - later + again, "W": later}
        timed |= {"R": forward} if s.key in second else {}
        for name, seconds in timed.items():
            own_s = scale * seconds
            found[f"{s.key}|{name}"] = Priced(own_s / share, evidence, own_s)  # type: ignore[arg-type]
            for part, units in enumerate(s.shares if len(set(s.shares)) > 1 else ()):
                part_s = own_s * units / max(s.shares)
                found[f"{s.key}|{name}@{part}"] = Priced(part_s / share, "interpolated", part_s)
    return found


def _cpu_s(priced: Priced) -> float:
    return priced.cpu_s or priced.time_s


def _measured_nodes(segment: Segment, layout: TrainingLayout) -> Iterator[str]:
    """The captured nodes a segment stands for. A split loss's time is where its classes are summed; finding the maximum and the end are small."""
    in_parts = {x.node for x in layout.losses}
    for name in segment.nodes:
        if base_node(name) not in in_parts:
            yield name
        elif name == sums_of(base_node(name)):
            yield base_node(name)
