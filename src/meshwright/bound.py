"""A lower bound and the certificate that lets anyone check it again.

Certificates are data. `meshwright.check.bounds.certificate` re-verifies each kind from the definition, in exact rationals, without
the code that produced it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

import msgspec

from .notebook_repr import repr_html

__all__ = ["Bound", "Certificate", "fraction_of"]


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kind` says how to re-check it; `data` holds what is needed, names instead of numbers, rationals as strings.

    cut: `{"inside": [actor names], "devices_inside": n, "leaving_Bps": "…", "demand": "all-gather" | …, "ranks", "devices", "size_bytes",
        "crossing_bytes"}`: that many bytes must leave the set, so time >= crossing_bytes / leaving_Bps (`decide.collective.bounds.bandwidth`)
    delay: as cut, and what crosses it last has still to get where it is needed: time >= (crossing_bytes + sum over the links that leave of
        rate · mean latency from there on) / leaving_Bps; `by` "devices" or "servers": what is told apart (`decide.collective.bounds.delay`)
    partition: `{"parts": [[actor names], …], "entering_Bps": "…", "demand": "all-reduce", "ranks", "devices", "size_bytes"}`:
        time >= 2 (parts - 1) · size_bytes / entering_Bps
    metric: `{"lengths": [[actor, actor, whole number], …], "demand": "all-to-all" | "permute", "ranks", "devices", "size_bytes"}`:
        time >= sum over pairs of demand · shortest path / sum over links of rate · length (`decide.collective.bounds.flow`)
    packing: `{"lengths": [[actor, actor, whole number], …], "groups": [{"demand", "devices", "size_bytes", "root"?, "shard_bytes"?, "peers"?,
        "hosts"?: {switch: device}}, …]}`: collectives at once (or one): time >= sum over them of bytes · cheapest spanning trees, arborescences or
        paths under the lengths / sum over links of rate · length (`check.packing` states why; `decide.collective.bounds.allreduce`)
    latency: `{"from", "to", "latency_s", "demand", "ranks", "devices", "root"}`: the second needs data of the first, and no path is quicker
    roofline: `{"flops": …, "flops_per_s": …, "devices": n}`   work that must be done over the speed there is
    memory: `{"needed_bytes": …, "available_bytes": …}`
    pipeline: `{"form": "idle" | "entry" | "memory" | "counts" | "any", …}`: a device's or a stage's work with what must come before and after it,
        activations held over a cap, contradicting rows of a linear programme over slots of time, or all work over all speeds; fields
        and reasons in `check.pipeline` and `decide.pipeline.bound`
    fill: `{"ranks", "work_s", "idle_s", "step_s", "rounding"}`: work that only those ranks can do in the idle time of their steps: cycle time >=
        step_s · ceil(work_s (1 - rounding) / idle_s); `rounding` allows for sums of floats (`check.fill`)
    fusion: `{"codecs": […], "labels": [[position, compute, network, chain, decodes in ns], …]}`: states of a step's gradient traffic, closed under
        one more group unless that ends at or above the bound; checked with the plan that holds it (`check.traffic`)
    placement: `{"form": "path"}`: the longest path of tasks, each on its best device, messages over the cheapest links; or `{"form": "load",
        "weights": {device: share}}`: the sum over tasks of their least weighted seconds; both of the plan's own tasks (`check.placement`); or
        `{"form": "messages", "objective", "moved": [per edge [[per device], [per device]]]}`: energy or cost, least of every task and every message
        alone after parts of messages were moved to their tasks (`check.placement_sums`)
    tables: `{"form": "load", "weights": {device: share}}`: lookups, columns and tables, each at the least weighted floor of a device (`check.tables`)
    halo: `{"variance", "price", "shares": {device: share}}`: the sum over groups of rows of the least, over widths, of weighted seconds on the
        sender's links plus priced variance, minus price · variance; of the plan's own groups (`check.halo`)
    prices: `{"kinds": [[gpus, cores, memory_bytes, type], …], "gpu", "core", "gb": [per kind], "floors": [[profile, types, kind, price], …]}`:
        an upper bound on the speed of jobs that share a cluster, by linear duality (`check.cluster`)
    fillings: `{"jobs": [[profile, gpus, types, price], …]}`: an upper bound on the same, by prices of jobs and the best filling of a server at these
        prices (`check.cluster`)
    hosts: `{"from_s", "until_s"}`: time of hosts in use between the two, at every moment at least the load of the scarcest resource, rounded up
    (`check.vms`)
    feeding: `{"limit": "device" | "preparation" | "storage"}`: all items through every job's device, each prepared once on all cores, or what no
        memory holds read once, by the plan's own rates (`check.input_plan`)
    """

    kind: Literal[
        "cut", "delay", "partition", "metric", "packing", "latency", "roofline", "memory", "pipeline", "fill", "fusion", "placement", "tables",
        "halo", "prices", "fillings", "hosts", "feeding", "sum",
    ]  # fmt: skip
    data: dict[str, Any]


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`value` is an exact rational in `unit`; nothing can be better than it."""

    quantity: str  # what is bounded, e.g. "step time", "all-reduce time"
    value: str  # exact rational, "3/100"
    unit: Literal["s", "bytes", "s/byte", "GPUs", "J"]
    certificate: Certificate
    parts: tuple[Bound, ...] = ()  # for kind "sum" and for max over several bounds
    _repr_html_ = repr_html

    @property
    def exact(self) -> Fraction:
        return fraction_of(self.value)

    def __float__(self) -> float:
        return float(self.exact)


def fraction_of(text: str) -> Fraction:
    """Parse `"3/100"` or `"7"`; raises ValueError on anything else (no floats, no exponents)."""
    num, _, den = text.partition("/")
    if not num.lstrip("-").isdigit() or (den and not den.isdigit()) or (den and int(den) == 0):
        raise ValueError(f"not an exact rational: {text!r}")
    return Fraction(int(num), int(den) if den else 1)
