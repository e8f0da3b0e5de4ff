"""Which of a graph's regions a tensor degree uses, and with which shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...errors import Unsupported
from ...graph.graph import OpGraph
from ...plan.plan import ParamShard, PartialGradient
from ...plan.shards import part_ranges, replica_groups
from .cut import Unit, order_units
from .tensor_regions import Region
from .tensor_shares import LEVEL, TensorOptions, choose_shares

__all__ = ["Usable", "ordered_units", "usable_regions"]


class Usable:
    """`shares[region]` for the regions in use, their parameters' shards, and why others are not in use."""

    def __init__(self) -> None:
        self.shares: dict[Region, tuple[int, ...]] = {}
        self.shards: list[ParamShard] = []
        self.partial: list[PartialGradient] = []
        self.notes: list[str] = []


def usable_regions(graph: OpGraph, regions: Sequence[Region], parts: int, options: TensorOptions = LEVEL) -> Usable:
    """The regions that `parts` ranks can share out; bundles whole or not at all."""
    found = Usable()
    if parts == 1:
        return found
    bundles: dict[str, list[Region]] = {}
    for r in regions:
        if options.vocabulary or not _over_vocabulary(r):
            bundles.setdefault(r.bundle, []).append(r)
    shapes = {p.name: p.shape for p in graph.parameters}
    for members in bundles.values():
        units = min(r.units for r in members)
        groups = sorted({x for r in members for x in r.groups})
        shares = choose_shares(units, groups, parts, options)
        name = members[0].nodes[0]
        if any(map(_over_vocabulary, members)) and units < parts * options.vocabulary_rows:
            found.notes.append(f"the region at {name} is kept whole: {units} rows are too few for {parts} ranks")
            continue
        if shares is None:
            what = f"{units} units" + (f" in {groups} groups" if groups else "")
            found.notes.append(f"the region at {name} is kept whole: {what} cannot be shared by {parts} ranks")
            continue
        if len(set(shares)) > 1 and any(s.dim == 0 for r in members for _, s in r.inner):
            found.notes.append(f"the region at {name} is kept whole: {units} experts are not shared alike by {parts} ranks")
            continue
        try:
            shards = _shards(members, shares, shapes, parts)
            partial = [x for s in shards if (x := replica_groups(shapes[s.param], s, parts)) is not None]
            partial += [PartialGradient(param=p, groups=(tuple(range(parts)),)) for p in dict.fromkeys(p for r in members for p in r.whole)]
        except Unsupported as error:
            found.notes.append(f"the region at {name} is kept whole: {error.message}; {error.hint}")
            continue
        found.shares |= dict.fromkeys(members, shares)
        found.shards += shards
        found.partial += partial
    return found


def _drop_dissolved(usable: Usable, units: Sequence[Unit]) -> bool:
    """Forget bundles of which a region could not be made contiguous (`cut.order_units` dissolves those). True if there were any."""
    live = {u.region for u in units if u.region is not None}
    lost = {r.bundle for r in usable.shares if r not in live}
    gone = {p for r in usable.shares if r.bundle in lost for p in (*(s.param for s in r.shards), *r.whole)}
    usable.shares = {r: x for r, x in usable.shares.items() if r.bundle not in lost}
    usable.shards = [s for s in usable.shards if s.param not in gone]
    usable.partial = [p for p in usable.partial if p.param not in gone]
    usable.notes += [f"the region at {name} is kept whole: it would close a cycle" for name in sorted(lost)]
    return bool(lost)


def ordered_units(graph: OpGraph, usable: Usable) -> list[Unit]:
    """The graph's units with the usable regions contiguous."""
    while True:
        units = order_units(graph, list(usable.shares))
        if not _drop_dissolved(usable, units):
            return units


def _over_vocabulary(r: Region) -> bool:
    return bool(r.losses) or not r.entries


def _shards(members: Sequence[Region], shares: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], parts: int) -> list[ParamShard]:
    """Each parameter once; raises Unsupported if the shares do not fit one of them."""
    found: dict[str, ParamShard] = {}
    for s in (s for r in members for s in r.shards):
        shard = msgspec.structs.replace(s, shares=shares)
        if found.setdefault(s.param, shard) != shard:
            raise Unsupported(f"parameter {s.param!r} is used in two places that need different splits")
        for part in range(parts):
            part_ranges(shapes[s.param][s.axis], shard, part, parts)
    return list(found.values())
