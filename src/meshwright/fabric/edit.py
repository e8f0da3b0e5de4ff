"""Changing a fabric: parts taken out, slowed down, added once more. Every change is a new fabric that says what was done.

A part is named as people name it:
    box3/nic7           a device or a switch (a NIC is a switch), with every link it has; 12 = device number 12
    box3                a server: its devices and switches
    box3/nic7->ib       the links one way (parallel ones together), `box3/nic7<->ib` both ways

`with_one_more` is what "one more NIC" or "one more NVLink" means: a switch that joins its server to the outside is there twice,
with all its links; a bundle of k links (kinds `NV<k>`, `XGMI<k>`) has k + 1; any other link is there twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import Infeasible, UnknownName, UsageError
from .fabric import Fabric, Link, Provenance

__all__ = ["Part", "bundled", "burst_s", "edited", "forwarding_only", "sustained", "find_part", "is_port", "scaled", "with_one_more", "without"]

MAX_NAME_CHARACTERS = 128  # as readers allow
MAX_RATE_Bps = 1 << 63
PCIE_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_LINK = re.compile(r"(?P<src>.+?)(?P<arrow><->|->)(?P<dst>.+)\Z")
_BUNDLE = re.compile(r"(NV|XGMI)(\d{1,4})\Z")


@dataclass(frozen=True)
class Part:
    """What a name stands for: actors with all their links, or links alone (`actors` is then empty)."""

    name: str
    actors: frozenset[str]
    links: frozenset[int]


def find_part(fabric: Fabric, name: str) -> Part:
    """The part of the fabric that `name` names. Raises: UnknownName."""
    link = _LINK.match(name)
    if link and name not in fabric.actor_of and name not in fabric.groups:
        ends = {(link["src"], link["dst"])} | ({(link["dst"], link["src"])} if link["arrow"] == "<->" else set())
        for end in (link["src"], link["dst"]):
            if end not in fabric.actor_of:
                raise _unknown(fabric, end)
        found = frozenset(i for i, x in enumerate(fabric.links) if (x.src, x.dst) in ends)
        if not found:
            neighbours = sorted({fabric.links[i].dst for i in fabric.out_links[fabric.actor_of[link["src"]]]})[:8]
            raise UnknownName(
                f"fabric {fabric.name!r} has no link {name}", hint=f"links of {link['src']} go to {', '.join(neighbours) or 'nowhere'}", where=name
            )
        return Part(name, frozenset(), found)
    if name.isascii() and name.isdigit() and int(name[:9]) < len(fabric.devices):
        name = fabric.devices[int(name[:9])].name
    group = {d.name for d in fabric.devices if d.group == name and name} | {s.name for s in fabric.switches if s.group == name and name}
    actors = {name} if name in fabric.actor_of else group
    if not actors:
        raise _unknown(fabric, name)
    return Part(name, frozenset(actors), frozenset(i for i, x in enumerate(fabric.links) if x.src in actors or x.dst in actors))


def _unknown(fabric: Fabric, name: str) -> UnknownName:
    from difflib import get_close_matches

    known = [*fabric.actor_names[:8192], *fabric.groups]
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "name a device, a NIC or switch, a server, or a link a->b or a<->b"
    return UnknownName(f"fabric {fabric.name!r} has no device, switch or server {name[:64]!r}", hint=hint, where=name[:64])


def without(fabric: Fabric, names: Sequence[str]) -> Fabric:
    """The fabric without these parts. Raises: UnknownName; UsageError for none or a part named twice; Infeasible when no device remains."""
    if not names:
        raise UsageError("nothing is named", hint="e.g. --without box0/nic3,box1/gpu5")
    parts = [find_part(fabric, name) for name in names]
    if len({p.name for p in parts}) < len(parts):
        raise UsageError(f"{next(p.name for p in parts if [q.name for q in parts].count(p.name) > 1)!r} is named twice", where="without")
    actors = {name for p in parts for name in p.actors}
    links = {i for p in parts for i in p.links}
    devices = tuple(d for d in fabric.devices if d.name not in actors)
    if not devices:
        raise Infeasible(f"without {_listed(names)} no device of {fabric.name!r} remains", hint="name fewer parts")
    return replace(
        fabric,
        name=_name(fabric.name, f"without {_listed(names)}"),
        devices=devices,
        switches=tuple(s for s in fabric.switches if s.name not in actors),
        links=tuple(x for i, x in enumerate(fabric.links) if i not in links),
        provenance=(*fabric.provenance, Provenance(what="taken out", source=f"{_listed(names, 64)}: {len(actors)} actors, {len(links)} links")),
    )


def bundled(fabric: Fabric) -> Fabric:
    """The fabric with links that join the same two side by side as one link of their rates together, as a runtime uses cables of one kind.

    Links of unlike kinds or latencies stay: what goes over one of them is another choice. So do those whose sum is no number of bytes/s (2^63).
    """
    rows: dict[tuple[object, ...], list[Link]] = {}
    key: tuple[object, ...]
    for x in fabric.links:
        key = x.src, x.dst, x.kind, x.latency_s, x.library_latency_s, x.joules_per_byte, x.burst_bytes > 0
        rows.setdefault(key, []).append(x)
    several = {key: row for key, row in rows.items() if len(row) > 1 and sum(x.rate_Bps for x in row) < MAX_RATE_Bps}
    if not several:
        return fabric
    links = []
    for key, row in rows.items():
        one = replace(row[0], rate_Bps=sum(x.rate_Bps for x in row), burst_bytes=sum(x.burst_bytes for x in row))
        links += [one] if key in several else row
    first = next(iter(several.values()))
    source = f"{first[0].src}->{first[0].dst} and {len(several) - 1} more pairs" if len(several) > 1 else f"{first[0].src}->{first[0].dst}"
    told = Provenance(what="parallel links", source=f"{source}: the rates of {len(first)} links side by side, added up")
    return replace(fabric, links=tuple(links), provenance=(*fabric.provenance, told))


def scaled(fabric: Fabric, factors: Mapping[str, Fraction]) -> Fabric:
    """The fabric with the links of these parts at a fraction (or multiple) of their rate, rounded down to whole bytes/s.

    A link that two of the parts share takes the smaller factor. Raises: UnknownName; UsageError for a factor <= 0 or a rate below 1 byte/s.
    """
    factor_of: dict[int, Fraction] = {}
    for name, factor in factors.items():
        if factor <= 0:
            raise UsageError(f"must be > 0, got {factor}", where=name, hint="a part that is down is named with --without")
        for i in find_part(fabric, name).links:
            factor_of[i] = min(factor, factor_of.get(i, factor))
    links = tuple(_at(x, factor_of[i]) if i in factor_of else x for i, x in enumerate(fabric.links))
    said = ", ".join(f"{name} at {factor}" for name, factor in factors.items())
    note = Provenance(what="scaled", source=f"{said[:3800]}: {len(factor_of)} links")
    return replace(fabric, name=_name(fabric.name, f"with {said}"), links=links, provenance=(*fabric.provenance, note))


def _at(link: Link, factor: Fraction) -> Link:
    rate = int(link.rate_Bps * factor)
    if rate < 1:
        raise UsageError(f"{link.src} -> {link.dst} would carry less than 1 byte/s", hint="a link that is down is named with --without")
    return replace(link, rate_Bps=rate)


def edited(fabric: Fabric, down: Sequence[str], slow: Mapping[str, Fraction]) -> Fabric:
    """The fabric without the parts `down` and with the parts `slow` at a fraction of their rate. Raises: as `without`, `scaled`."""
    changed = scaled(fabric, slow) if slow else fabric
    return without(changed, down) if down else changed


def forwarding_only(fabric: Fabric) -> Fabric:
    """The fabric with switches that neither add nor copy; the same object where none does."""
    if not any(s.multicast or s.aggregate for s in fabric.switches):
        return fabric
    return replace(fabric, switches=tuple(replace(s, multicast=False, aggregate=False, aggregate_bytes=0) for s in fabric.switches))


# ---- one more ----------------------------------------------------------------------------------------------------------
def is_port(fabric: Fabric, name: str) -> bool:
    """Whether this is a NIC: a switch of a server with PCIe links inside it and links to the outside."""
    number = fabric.actor_of[name]
    if number < len(fabric.devices) or not (group := _group(fabric, number)):
        return False
    links = [(fabric.link_ends[i][1], i) for i in fabric.out_links[number]] + [(fabric.link_ends[i][0], i) for i in fabric.in_links[number]]
    inside = any(_group(fabric, peer) == group and fabric.links[i].kind in PCIE_KINDS for peer, i in links)
    return inside and any(_group(fabric, peer) != group for peer, _ in links)


def _group(fabric: Fabric, actor: int) -> str:
    n = len(fabric.devices)
    return fabric.devices[actor].group if actor < n else fabric.switches[actor - n].group


def with_one_more(fabric: Fabric, parts: Sequence[str | tuple[str, str]]) -> Fabric:
    """The fabric with one more of each: a NIC by its name, a link (both directions) by its two ends. Raises: UnknownName."""
    switches, links = list(fabric.switches), list(fabric.links)
    for part in parts:
        if isinstance(part, str):
            old = next((s for s in fabric.switches if s.name == part), None)
            if old is None:
                raise _unknown(fabric, part)
            copy = _free(part, {x.name for x in switches} | set(fabric.actor_of))
            switches.append(replace(old, name=copy))
            links += [_renamed(x, part, copy) for x in fabric.links if part in (x.src, x.dst)]
        else:
            ends = {part, part[::-1]}
            here = [i for i, x in enumerate(links) if (x.src, x.dst) in ends]
            if not here:
                raise UnknownName(f"fabric {fabric.name!r} has no link {part[0]}<->{part[1]}", where=part[0])
            firsts = {(links[i].src, links[i].dst): i for i in reversed(here)}
            for i in firsts.values():
                bundle = _BUNDLE.match(links[i].kind)
                if bundle and int(bundle[2]):
                    k = int(bundle[2])
                    links[i] = replace(links[i], rate_Bps=links[i].rate_Bps * (k + 1) // k, kind=f"{bundle[1]}{k + 1}")
                else:
                    links.append(links[i])
    return replace(fabric, name=_name(fabric.name, f"with one more {parts[0] if isinstance(parts[0], str) else '<->'.join(parts[0])}"),
                   switches=tuple(switches), links=tuple(links))  # fmt: skip


def _renamed(link: Link, old: str, new: str) -> Link:
    return replace(link, src=new if link.src == old else link.src, dst=new if link.dst == old else link.dst)


def _free(name: str, taken: set[str]) -> str:
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


def _listed(names: Iterable[str], most: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _name(name: str, change: str) -> str:
    text = f"{name} {change}"
    return text if len(text) <= MAX_NAME_CHARACTERS else text[: MAX_NAME_CHARACTERS - 3] + "..."


def sustained(fabric: Fabric) -> Fabric:
    """The fabric without token buckets: what planners and bounds count with, because a bucket passes only its first bytes faster than the rate."""
    if not any(x.burst_bytes for x in fabric.links):
        return fabric
    kept: Fabric | None = fabric.__dict__.get("_sustained")
    if kept is None:
        kept = fabric.__dict__["_sustained"] = replace(fabric, links=tuple(replace(x, burst_bytes=0) for x in fabric.links))
    return kept


def burst_s(fabric: Fabric) -> Fraction:
    """Seconds by which full token buckets can bring a call below a bound of the `sustained` fabric.

    In T seconds a link passes at most rate · T + burst bytes, so no more than without its bucket in T + burst / rate. A call that takes T is done
    without any bucket in T + the largest burst / rate: whatever proves that this is at least B proves T >= B - that.
    """
    return max((Fraction(x.burst_bytes, x.rate_Bps) for x in fabric.links), default=Fraction(0))
