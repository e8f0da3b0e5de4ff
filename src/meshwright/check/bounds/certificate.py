"""Certificates of lower bounds, re-verified from the fabric alone in exact rationals. A claim must equal what its certificate gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ...bound import Bound, fraction_of
from ...fabric.fabric import Fabric
from ...plan.plan import TrainingLayout
from ..fill import fill_time
from ..verdict import Finding
from .delay import DelayOpen, delay_seconds
from .packing import packing_time
from .pipeline import pipeline_time

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
    except (_Wrong, _Open, KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
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
    if kind == "delay":
        return _delay(data, fabric)
    if kind == "partition":
        return _partition(data, fabric)
    if kind == "metric":
        return _metric(data, fabric)
    if kind == "packing":
        return packing_time(data, fabric)
    if kind == "latency":
        return _latency(data, fabric)
    if kind == "roofline":
        return _roofline(data, fabric, layout)
    if kind == "memory":
        if int(data["needed_bytes"]) <= int(data["available_bytes"]):
            raise _Wrong("the bound says that memory is lacking, and its own figures fit")
        return Fraction(int(data["needed_bytes"]))
    if kind == "pipeline":
        return pipeline_time(data)
    if kind == "fill":
        return fill_time(data)
    if kind in ("prices", "fillings"):
        raise _Open("it speaks of jobs that share a cluster, and is checked with their allocation (check.cluster)")
    if kind == "hosts":
        raise _Open("it speaks of machines on hosts, and is checked with their placement (check.vms)")
    if kind == "fusion":
        raise _Open("it speaks of gradient traffic, and is checked with the plan that holds it (check.traffic)")
    if kind == "tables":
        raise _Open("it speaks of embedding tables, and is checked with the plan that holds them (check.tables)")
    if kind == "placement":
        raise _Open("it speaks of placed tasks, and is checked with the plan that holds them (check.placement)")
    if kind == "halo":
        raise _Open("it speaks of rows of a graph training, and is checked with the plan that holds them (check.halo)")
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
    unknown = sorted(name for name in set(names) if name not in fabric.actor_of)
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
    shards = _shards(data, ranks, size)
    # What the ranks inside own must get out where all gather; what those outside own must be reached by sums of what is inside.
    here = sum((shards[r] for r in ranks & inside), Fraction(0))
    there = sum((shards[r] for r in ranks - inside), Fraction(0))
    if op in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"):
        if not 0 < within < n:
            raise _Wrong("the cut must have a rank on either side")
        wanted = _peers(data, ranks).items() if op == "permute" else ()
        pairs = size * sum(1 for r, peer in wanted if peer in inside and r not in inside)
        across = size / n * within * (n - within)
        crossing = {"all-gather": here, "reduce-scatter": there, "all-reduce": size, "all-to-all": across, "permute": pairs}[op]
    elif root in ranks and root in inside and within < n and op in ("broadcast", "scatter"):
        crossing = size if op == "broadcast" else there
    elif root in ranks and root not in inside and within > 0 and op in ("reduce", "gather"):
        crossing = size if op == "reduce" else here
    else:
        raise _Wrong(f"the cut does not force any byte of a {op} out of the set")
    if "crossing_bytes" in data and fraction_of(str(data["crossing_bytes"])) != crossing:
        raise _Wrong(f"{crossing} bytes must leave the set, it says {data['crossing_bytes']}")
    return crossing / leaving


def _delay(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """A cut whose last bytes have still to get where they are needed."""
    time_s = _cut(data, fabric)
    leaving = fraction_of(str(data["leaving_Bps"]))
    try:
        value, latest = delay_seconds(data, fabric, time_s * leaving, leaving)
    except DelayOpen as error:
        raise _Open(str(error)) from None
    if value < latest:
        raise _Wrong(f"it holds from {latest} s on, and gives {value} s")
    return value


def _shards(data: Mapping[str, Any], ranks: set[str], size: Fraction) -> dict[str, Fraction]:
    """Bytes that each rank owns: as stated, or equal shares."""
    if "shard_bytes" not in data:
        return dict.fromkeys(ranks, size / len(ranks))
    stated = [int(x) for x in data["shard_bytes"]]
    names = list(data["devices"])
    if len(stated) != len(names) or min(stated) < 0 or sum(stated) != size:
        raise _Wrong(f"its shards are not one per rank that add up to {size} bytes")
    return {name: Fraction(x) for name, x in zip(names, stated, strict=True)}


def _peers(data: Mapping[str, Any], ranks: set[str]) -> dict[str, str]:
    """Rank -> the rank whose data it gets, of a permutation."""
    names, peers = list(data["devices"]), list(data["peers"])
    if len(peers) != len(names) or not set(peers) <= ranks | {""}:
        raise _Wrong("its peers are not one rank, or none, per rank")
    return {name: peer for name, peer in zip(names, peers, strict=True) if peer and peer != name}


def _metric(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """Whatever the routes, bytes of a pair travel at least the shortest path; all links together offer rate · length per second."""
    ranks, size = _ranks(data, fabric), Fraction(int(data["size_bytes"]))
    stated: dict[tuple[str, str], int] = {}
    for src, dst, length in data["lengths"]:
        if type(length) is not int or length < 0 or (src, dst) in stated:
            raise _Wrong(f"the length of {src} -> {dst} is no whole number >= 0, or stated twice")
        stated[src, dst] = length
    _known([name for pair in stated for name in pair], fabric)
    offered = sum(x.rate_Bps * stated.get((x.src, x.dst), 0) for x in fabric.links)
    if not offered:
        raise _Wrong("no link has a length")
    pairs: dict[str, dict[str, Fraction]] = {}
    if data["demand"] == "all-to-all":
        pairs = {s: {t: size / len(ranks) for t in ranks if t != s} for s in ranks}
    elif data["demand"] == "permute":
        for rank, peer in _peers(data, ranks).items():
            pairs.setdefault(peer, {})[rank] = size
    else:
        raise _Wrong(f"lengths bound all-to-all and permute, not {data['demand']}")
    needed = Fraction(0)
    for source, row in pairs.items():
        reach = _shortest(fabric, source, [Fraction(stated.get((x.src, x.dst), 0)) for x in fabric.links])
        needed += sum((d * reach[t] for t, d in row.items() if t in reach), Fraction(0))
    return needed / offered


def _latency(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """The quickest path from one rank to one that needs its data: latencies of links, and the library's on the first."""
    ranks, op, source, target = _ranks(data, fabric), data["demand"], data["from"], data["to"]
    if source == target and fraction_of(str(data["latency_s"])) == 0:
        return Fraction(0)
    if source not in ranks or target not in ranks or source == target:
        raise _Wrong("it does not join two different ranks")
    root = data.get("root", "")
    shards = _shards(data, ranks, Fraction(sum(map(int, data["shard_bytes"])))) if "shard_bytes" in data else dict.fromkeys(ranks, Fraction(1))
    # Only where the target's result depends on the source's data does a path between them bound the time.
    forced = {
        "all-reduce": True, "all-to-all": True, "all-gather": shards[source] > 0, "reduce-scatter": shards[target] > 0, "broadcast": source == root,
        "scatter": source == root and shards[target] > 0, "reduce": target == root, "gather": target == root and shards[source] > 0,
        "permute": op == "permute" and _peers(data, ranks).get(target) == source,
    }  # fmt: skip
    if not forced.get(op, False):
        raise _Wrong(f"{target} needs nothing of {source} in a {op}")
    hop = [Fraction(repr(x.latency_s)) for x in fabric.links]
    # repr of a float is its shortest decimal, so the fraction is the number that the file states. The library's latency counts once, on the
    # first link.
    first = [h + Fraction(repr(x.library_latency_s)) for h, x in zip(hop, fabric.links, strict=True)]
    reach = _shortest(fabric, source, hop, first)
    if target not in reach:
        raise _Wrong(f"no path from {source} to {target}")
    if reach[target] != fraction_of(str(data["latency_s"])):
        raise _Wrong(f"the quickest path takes {reach[target]} s, it says {data['latency_s']}")
    return reach[target]


def _shortest(fabric: Fabric, source: str, length: Sequence[Fraction], first: Sequence[Fraction] | None = None) -> dict[str, Fraction]:
    """Shortest distances over links by repeated relaxation; `first`: lengths of the links that leave the source."""
    reach = {source: Fraction(0)}
    waiting = [source]
    out: dict[str, list[int]] = {}
    for k, x in enumerate(fabric.links):
        out.setdefault(x.src, []).append(k)
    while waiting:
        later: list[str] = []
        for name in waiting:
            for k in out.get(name, ()):
                there = reach[name] + (first[k] if first is not None and name == source else length[k])
                if fabric.links[k].dst not in reach or there < reach[fabric.links[k].dst]:
                    reach[fabric.links[k].dst] = there
                    later.append(fabric.links[k].dst)
        waiting = list(dict.fromkeys(later))
    return reach


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
    # Partial sums enter parts from outside, over these links alone; a link into each part counts for that part.
    part_of = {name: i for i, part in enumerate(parts) for name in part}  # they are disjoint
    entering = sum(x.rate_Bps for x in fabric.links if x.dst in part_of and part_of.get(x.src) != part_of[x.dst])
    if entering != fraction_of(str(data["entering_Bps"])) or not entering:
        raise _Wrong(f"links of {entering} B/s enter the parts, it says {data['entering_Bps']}")
    return Fraction(2 * (len(parts) - 1) * int(data["size_bytes"]), entering)


def _roofline(data: Mapping[str, Any], fabric: Fabric, layout: TrainingLayout | None) -> Fraction:
    """Arithmetic that must be done over the peak of all devices together."""
    flops, speed = int(data["flops"]), int(data["flops_per_s"])
    if layout is not None:
        counted = 0
        for s in layout.segments:
            each = (s.forward.flops + s.backward.flops) * layout.all_microbatches
            # a split segment states one part's share, rounded down
            # Rounding down may have lost less than one operation in each of two passes of every micro-batch.
            counted += (each + 2 * layout.all_microbatches) * layout.tensor if s.split else each
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
