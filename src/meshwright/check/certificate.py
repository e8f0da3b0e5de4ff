"""Certificates of lower bounds, re-verified from the fabric alone in exact rationals. A claim must equal what its certificate gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..bound import Bound, fraction_of
from ..fabric import Fabric
from ..plan import TrainingLayout
from .verdict import Finding

__all__ = ["check_bound"]


class _Wrong(Exception):
    """The certificate does not prove what is claimed."""


class _Open(Exception):
    """The certificate cannot be checked with what is at hand."""


def check_bound(bound: Bound, fabric: Fabric, *, layout: TrainingLayout | None = None) -> list[Finding]:
    """Findings about a bound and its parts; `layout` lets the work behind a roofline be counted again."""
    try:
        proved = _proved(bound, fabric, layout)
        if proved != bound.exact:
            raise _Wrong(f"the certificate gives {proved} {bound.unit}, claimed is {bound.value}")
    except (_Wrong, _Open, KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        detail = f"lacks or mangles {error}" if isinstance(error, KeyError) else str(error)
        facts = {"quantity": bound.quantity, "kind": bound.certificate.kind, "value": bound.value}
        status = "unknown" if isinstance(error, _Open) else "wrong"
        text = f"the bound on {bound.quantity} ({bound.certificate.kind}): {detail}"
        return [Finding(check="certificate", message=text, witness=facts, status="unknown" if status == "unknown" else "wrong")]
    return []


def _proved(bound: Bound, fabric: Fabric, layout: TrainingLayout | None) -> Fraction:
    data = bound.certificate.data
    kind = bound.certificate.kind
    if kind == "cut":
        return _cut(data, fabric)
    if kind == "partition":
        return _partition(data, fabric)
    if kind == "roofline":
        return _roofline(data, fabric, layout)
    if kind == "memory":
        if int(data["needed_bytes"]) <= int(data["available_bytes"]):
            raise _Wrong("what is needed is available")
        return Fraction(int(data["needed_bytes"]))
    if not bound.parts:
        raise _Wrong("a sum without parts")
    for part in bound.parts:
        for finding in check_bound(part, fabric, layout=layout):
            raise (_Open if finding.status == "unknown" else _Wrong)(finding.message)
        if part.unit != bound.unit:
            raise _Wrong(f"adds {part.unit} to {bound.unit}")
    return sum((part.exact for part in bound.parts), Fraction(0))


def _ranks(data: Mapping[str, Any], fabric: Fabric) -> set[str]:
    names = list(data["devices"]) if "devices" in data else [d.name for d in fabric.devices]
    devices = {d.name for d in fabric.devices}
    if len(set(names)) < len(names) or not set(names) <= devices or len(names) != int(data["ranks"]):
        raise _Wrong(f"its {data['ranks']} ranks are not that many different devices of fabric {fabric.name!r}")
    return set(names)


def _known(names: Sequence[str], fabric: Fabric) -> set[str]:
    unknown = sorted(set(names) - set(fabric.actor_names))
    if unknown:
        raise _Wrong(f"fabric {fabric.name!r} has no {unknown[0]!r}")
    return set(names)


def _cut(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """Bytes that must leave a set of actors, whatever the algorithm, over the rate of all links that leave it."""
    inside, ranks = _known(data["inside"], fabric), _ranks(data, fabric)
    within, n, op = len(inside & ranks), len(ranks), data["demand"]
    leaving = sum(x.rate_Bps for x in fabric.links if x.src in inside and x.dst not in inside)
    if within != int(data["devices_inside"]):
        raise _Wrong(f"{within} ranks are inside, it says {data['devices_inside']}")
    if leaving != fraction_of(str(data["leaving_Bps"])):
        raise _Wrong(f"links of {leaving} B/s leave the set, it says {data['leaving_Bps']}")
    if not leaving:
        raise _Wrong("no link leaves the set")
    size = Fraction(int(data["size_bytes"]))
    root = data.get("root", "")
    if op in ("all-gather", "reduce-scatter", "all-reduce"):
        if not 0 < within < n:
            raise _Wrong("the cut must have a rank on either side")
        crossing = {"all-gather": size * within / n, "reduce-scatter": size * (n - within) / n, "all-reduce": size}[op]
    elif root in ranks and {"broadcast": root in inside and within < n, "reduce": root not in inside and within > 0}.get(op, False):
        crossing = size
    else:
        raise _Wrong(f"the cut does not force any byte of a {op} out of the set")
    if "crossing_bytes" in data and fraction_of(str(data["crossing_bytes"])) != crossing:
        raise _Wrong(f"{crossing} bytes must leave the set, it says {data['crossing_bytes']}")
    return crossing / leaving


def _partition(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """All-reduce over p parts: p - 1 partial sums must reach the first part that is complete, p - 1 sums the others."""
    ranks = _ranks(data, fabric)
    parts = [_known(part, fabric) for part in data["parts"]]
    union = set().union(*parts)
    if data["demand"] != "all-reduce" or len(parts) < 2:
        raise _Wrong("a partition bounds an all-reduce over two parts or more")
    if sum(map(len, parts)) != len(union) or not ranks <= union or any(not part & ranks for part in parts):
        raise _Wrong("the parts must be disjoint, hold a rank each, and all ranks together")
    for s in fabric.switches:
        if (s.multicast or s.aggregate) and s.name not in union:
            raise _Wrong(f"switch {s.name!r} can add or copy and lies in no part")
    entering = sum(x.rate_Bps for x in fabric.links for part in parts if x.dst in part and x.src not in part)
    if entering != fraction_of(str(data["entering_Bps"])) or not entering:
        raise _Wrong(f"links of {entering} B/s enter the parts, it says {data['entering_Bps']}")
    return Fraction(2 * (len(parts) - 1) * int(data["size_bytes"]), entering)


def _roofline(data: Mapping[str, Any], fabric: Fabric, layout: TrainingLayout | None) -> Fraction:
    """Arithmetic that must be done over the peak of all devices together."""
    flops, speed = int(data["flops"]), int(data["flops_per_s"])
    if layout is not None:
        counted = 0
        for s in layout.segments:
            each = (s.forward.flops + s.backward.flops) * layout.microbatches * layout.data
            # a split segment states one part's share, rounded down
            counted += (each + 2 * layout.microbatches * layout.data) * layout.tensor if s.split else each
        if flops > counted:
            raise _Wrong(f"the layout's segments do {counted} operations, it says {flops}")
    if int(data["devices"]) != len(fabric.devices):
        raise _Wrong(f"the fabric has {len(fabric.devices)} devices, it says {data['devices']}")
    dtype = data.get("dtype", "fp32")
    silent = [d.name for d in fabric.devices if dtype not in d.flops]
    if silent:
        assumed = data.get("default_flops_per_s")
        if assumed is None and speed >= sum(d.flops.get(dtype, 0) for d in fabric.devices):
            raise _Open(f"device {silent[0]!r} states no peak for {dtype}")
    peak = sum(int(d.flops.get(dtype, data.get("default_flops_per_s", 0))) for d in fabric.devices)
    if not silent and peak != speed:
        raise _Wrong(f"the devices do {peak} operations per second, it says {speed}")
    return Fraction(flops, speed)
