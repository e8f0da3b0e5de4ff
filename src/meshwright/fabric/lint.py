"""What is wrong or unlikely in a fabric, with the place and what to do about it.

error     no collective can run, or it would run at a small part of what the machine can do
warning   the fabric contradicts itself or its own kind: one server unlike the others, one direction unlike the other
note      worth knowing; often right as it is
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, Literal

from .edit import PCIE_KINDS, is_port
from .fabric import Fabric

__all__ = ["RULES", "SEVERITIES", "Finding", "lint_fabric", "missing_nics", "nic_ports", "nvlink_counts", "slow_pcie_links", "uneven_totals"]

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
RULES = {  # what each looks for; docs/clusters.md lists them
    "island": "devices that no path joins to the others, in either direction",
    "one-way": "devices that data reaches but cannot leave, or leaves but cannot reach",
    "unlinked-device": "a device without a link",
    "slow-pcie": "a PCIe link far below the others: a placeholder bridge (2.5 GT/s x1), or a card that trained down",
    "one-way-link": "a link without one back",
    "uneven-directions": "a link whose way back has another rate",
    "uneven-nvlinks": "a GPU with more or fewer NVLinks than most of its server",
    "missing-nic": "a server with fewer NICs than most servers like it",
    "far-nic": "a GPU that reaches a NIC only through another GPU or between sockets, where others do better",
    "unused-switch": "a switch without links",
    "parallel-links": "several links of a kind side by side: cables used together, or a line copied twice",
    "rates-too-long": "rates with so small a common divisor that exact planning does not fit into 64 bits",
    "rates-without-divisor": "rates with a small common divisor: plans get thousands of trees",
    "no-latency": "no link has a latency",
    "no-network-latency": "network links without latency beside others that have one",
    "unknown-device": "devices without memory or FLOP/s, which training needs",
}
SLOW_PCIE_Bps = 4_000_000_000  # gen 3 x4, of which NCCL counts 3; a GPU or NIC behind less is as good as lost
UNLIKELY_FACTOR = 8  # times slower than its neighbours for a PCIe link to be reported
MAX_EXACT_BITS = 62  # what the exact planner's integers hold
MAX_ISLANDS = 64  # parts that no path joins, after which no more are told apart
MAX_OF_A_KIND = 8  # findings of one rule that are listed one by one
_BUNDLE = re.compile(r"NV(\d{1,4})\Z")


@dataclass(frozen=True)
class Finding:
    """`where` names the part (or file and line), `hint` says what to do; `rule` is stable, for scripts."""

    severity: Severity
    rule: str
    where: str
    message: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lint_fabric(fabric: Fabric) -> list[Finding]:
    """All findings, errors first; of one rule at most MAX_OF_A_KIND, the rest counted in a last one."""
    found = [
        f
        for rule in (_connected, _slow_pcie, _directions, _nvlinks, _nics, _gpu_to_nic, _dangling, _parallel, _rates, _latencies, _facts)
        for f in _capped(list(rule(fabric)))
    ]
    return sorted(found, key=lambda f: SEVERITIES.index(f.severity))


def _capped(found: list[Finding]) -> list[Finding]:
    if len(found) <= MAX_OF_A_KIND:
        return found
    first, rest = found[: MAX_OF_A_KIND - 1], found[MAX_OF_A_KIND - 1 :]
    return [*first, Finding(first[0].severity, first[0].rule, rest[0].where, f"and {len(rest)} more like this", first[0].hint)]


# ---- reachability ------------------------------------------------------------------------------------------------------
def _connected(fabric: Fabric) -> Iterator[Finding]:
    """Islands (nothing joins them) and one-way cuts, each by its devices."""
    names, islands = fabric.actor_names, _islands(fabric)
    for island in islands[1:]:
        home, there = islands[0][0], island[0]
        ways = [(a, b) for a, b in ((home, there), (there, home)) if b in fabric.reachable(a)]
        some = ", ".join(names[a] for a in island[:4]) + (f" and {len(island) - 4} more" if len(island) > 4 else "")
        if ways:
            message = f"data gets from {names[ways[0][0]]} to {names[ways[0][1]]}, but not back"
            yield Finding("error", "one-way", some, message, "add the links of the other direction")
        else:
            hint = "add links, or name a connected part with --devices"
            yield Finding("error", "island", some, f"no path from {names[home]}, in either direction", hint)


def _islands(fabric: Fabric) -> list[list[int]]:
    """Sets of devices that reach each other both ways, that of device 0 first; when there are very many, the first of them."""
    left = set(range(len(fabric.devices)))
    islands: list[list[int]] = []
    while left and len(islands) <= MAX_ISLANDS:
        start = min(left)
        there, back = _reach(fabric, start, forward=True), _reach(fabric, start, forward=False)
        islands.append(sorted(left & there & back))
        left -= there & back
    return islands


def _reach(fabric: Fabric, start: int, *, forward: bool) -> set[int]:
    """Actors that data gets to from `start`, or (backward) from which it gets there, through any actor."""
    links, end = (fabric.out_links, 1) if forward else (fabric.in_links, 0)
    seen, open_ends = {start}, [start]
    while open_ends:
        for link in links[open_ends.pop()]:
            if (peer := fabric.link_ends[link][end]) not in seen:
                seen.add(peer)
                open_ends.append(peer)
    return seen


def uneven_totals(fabric: Fabric) -> dict[tuple[str, str], tuple[int, int]]:
    """Pairs joined both ways at unlike rates -> bytes/s one way and back, parallel links added up."""
    total = _totals(fabric)
    return {(a, b): (rate, total[b, a]) for (a, b), rate in total.items() if a < b and total.get((b, a), rate) != rate}


def _totals(fabric: Fabric) -> dict[tuple[str, str], int]:
    total: dict[tuple[str, str], int] = {}
    for x in fabric.links:
        total[x.src, x.dst] = total.get((x.src, x.dst), 0) + x.rate_Bps
    return total


def _directions(fabric: Fabric) -> Iterator[Finding]:
    total = _totals(fabric)
    for a, b in total:
        if (b, a) not in total:
            hint = "cables carry both; add it, unless a sketch means it"
            yield Finding("warning", "one-way-link", f"{a} -> {b}", "has no link the other way", hint)
    for (a, b), (rate, back) in uneven_totals(fabric).items():
        yield Finding("warning", "uneven-directions", f"{a} <-> {b}", f"{rate} B/s one way, {back} B/s the other", "give both the same rate")


# ---- PCIe, NVLink, NICs ------------------------------------------------------------------------------------------------
def slow_pcie_links(fabric: Fabric) -> tuple[frozenset[int], int]:
    """Numbers of the PCIe links that are far below the others, and the rate of the fastest."""
    best = max((x.rate_Bps for x in fabric.links if x.kind in PCIE_KINDS), default=0)
    slow = (i for i, x in enumerate(fabric.links) if x.kind in PCIE_KINDS and x.rate_Bps <= SLOW_PCIE_Bps and x.rate_Bps * UNLIKELY_FACTOR <= best)
    return frozenset(slow), best


def _slow_pcie(fabric: Fabric) -> Iterator[Finding]:
    """A placeholder bridge (2.5 GT/s x1 is 0.19 GB/s) in front of GPUs or NICs: everything behind it crawls."""
    slow, best = slow_pcie_links(fabric)
    seen: set[frozenset[str]] = set()
    for x in (fabric.links[i] for i in sorted(slow)):
        if (pair := frozenset((x.src, x.dst))) in seen:
            continue
        seen.add(pair)
        yield Finding(
            "error",
            "slow-pcie",
            f"{x.src} <-> {x.dst}",
            f"{x.rate_Bps / 1e9:.2g} GB/s where other PCIe links have {best / 1e9:.3g}",
            "a placeholder bridge of a virtual machine, or a card that trained down: correct link_speed and link_width, or reseat it",
        )


def nvlink_counts(fabric: Fabric) -> dict[str, int]:
    """NVLinks of every device, those to switches included."""
    total: dict[str, int] = {d.name: 0 for d in fabric.devices}
    for x in fabric.links:
        match = _BUNDLE.match(x.kind)
        if match and x.src in total:
            total[x.src] += int(match[1])
    return total


def _nvlinks(fabric: Fabric) -> Iterator[Finding]:
    """GPUs of one server whose NVLinks add up to something else than most: one cable or one driver short."""
    total = nvlink_counts(fabric)
    for group, members in fabric.groups.items():
        counts = Counter(total[fabric.devices[i].name] for i in members)
        usual, how_many = counts.most_common(1)[0]
        if len(counts) < 2 or 2 * how_many <= len(members):
            continue
        for i in members:
            name = fabric.devices[i].name
            if total[name] != usual:
                yield Finding(
                    "warning" if total[name] else "error",
                    "uneven-nvlinks",
                    name,
                    f"{total[name]} NVLinks; most of {group or 'the server'} have {usual}",
                    "a lost link or a GPU that the topology dump missed: see `nvidia-smi nvlink --status`",
                )


def nic_ports(fabric: Fabric) -> dict[str, list[str]]:
    """NICs of every server by name; of servers whose devices are on the network themselves, those devices."""
    found: dict[str, list[str]] = {g: [] for g in fabric.groups if g}
    for s in fabric.switches:
        if s.group in found and is_port(fabric, s.name):
            found[s.group].append(s.name)
    for group in found:  # devices that are on the network themselves
        inside = {fabric.devices[i].name for i in fabric.groups[group]}
        found[group] += sorted({x.src for x in fabric.links if x.src in inside and x.kind == "NET"})
    return found


def missing_nics(fabric: Fabric) -> dict[str, tuple[int, int]]:
    """Servers with fewer NICs than most servers of as many devices and NVLinks have -> NICs there, NICs usual."""
    ports, links = nic_ports(fabric), nvlink_counts(fabric)
    alike: dict[tuple[int, int], list[str]] = {}
    for group in ports:
        members = fabric.groups[group]
        alike.setdefault((len(members), sum(links[fabric.devices[i].name] for i in members)), []).append(group)
    found: dict[str, tuple[int, int]] = {}
    for groups in alike.values():
        counts = Counter(len(ports[g]) for g in groups)
        usual = max(counts, key=lambda n: (counts[n], n))
        found |= {g: (len(ports[g]), usual) for g in groups if len(ports[g]) < usual}
    return found


def _nics(fabric: Fabric) -> Iterator[Finding]:
    for group, (count, usual) in missing_nics(fabric).items():
        yield Finding(
            "warning" if count else "error",
            "missing-nic",
            group,
            f"{count or 'no'} NIC{'s' if count > 1 else ''}; most servers like it have {usual}",
            "dump the topology while the network is in use, or check that the NIC is up",
        )


def _gpu_to_nic(fabric: Fabric) -> Iterator[Finding]:
    """GPUs whose way to every NIC crosses another GPU or the link between sockets, where other GPUs do better."""
    ports = nic_ports(fabric)
    if len(fabric.devices) > 1024:
        return
    worst: dict[str, int] = {}
    for group, names in ports.items():
        targets = [fabric.actor_of[p] for p in names if fabric.actor_of[p] >= len(fabric.devices)]
        if not targets:
            continue
        for i in fabric.groups[group]:
            worst[fabric.devices[i].name] = min(_distance(fabric, i, t) for t in targets)
    best = min(worst.values(), default=0)
    for name, distance in worst.items():
        if distance > best and distance >= 1:
            how = "no path at all" if distance == 3 else "through another GPU" if distance == 2 else "between sockets (SYS)"
            yield Finding(
                "error" if distance == 3 else "note",
                "far-nic",
                name,
                f"nearest NIC: {how}; other GPUs are closer",
                "give it a NIC on its own PCIe switch, or expect its traffic to go through neighbours",
            )


def _distance(fabric: Fabric, device: int, port: int) -> int:
    from ..errors import Disconnected

    try:
        route = fabric.route(device, port)
    except Disconnected:
        return 3
    if any(fabric.link_ends[x][0] < len(fabric.devices) for x in route[1:]):
        return 2
    return int(any(fabric.links[x].kind == "SYS" for x in route))


# ---- shape and numbers -------------------------------------------------------------------------------------------------
def _dangling(fabric: Fabric) -> Iterator[Finding]:
    n = len(fabric.devices)
    for number, switch in enumerate(fabric.switches):
        links = len(fabric.out_links[n + number]) + len(fabric.in_links[n + number])
        if not links:
            yield Finding("note", "unused-switch", switch.name, "has no links", "leave it out")
    for number, device in enumerate(fabric.devices):
        if n > 1 and not fabric.out_links[number] and not fabric.in_links[number]:
            yield Finding("error", "unlinked-device", device.name, "has no links", "add links, or leave it out")


def _parallel(fabric: Fabric) -> Iterator[Finding]:
    for (a, b, _), count in Counter((x.src, x.dst, x.kind) for x in fabric.links).items():
        if count > 1:
            yield Finding(
                "note", "parallel-links", f"{a} -> {b}", f"{count} links side by side",
                "of one latency they count as one link of all rates, else a message takes the fastest; or was a line copied?",
            )


def _rates(fabric: Fabric) -> Iterator[Finding]:
    """Exact planning scales rates to whole numbers without a common divisor; strange rates make them too long."""
    if not fabric.links:
        return
    unit = gcd(*(x.rate_Bps for x in fabric.links))
    total = sum(x.rate_Bps for x in fabric.links) // unit
    bits = (total * max(1, len(fabric.devices))).bit_length()
    if bits > MAX_EXACT_BITS:
        odd = min(fabric.links, key=lambda x: gcd(x.rate_Bps, 1_000_000))
        yield Finding(
            "error",
            "rates-too-long",
            f"{odd.src} -> {odd.dst}",
            f"the rates share no divisor above {unit} B/s; exact planning needs {bits} bits",
            f"round {odd.rate_Bps} B/s to whole MB/s",
        )
    elif bits > 48:
        yield Finding(
            "note",
            "rates-without-divisor",
            fabric.name,
            f"the rates share no divisor above {unit} B/s; exact planning needs {bits} bits",
            "round them to whole MB/s: plans get few trees instead of thousands",
        )


def _latencies(fabric: Fabric) -> Iterator[Finding]:
    net = [x for x in fabric.links if x.kind == "NET"]
    if fabric.links and not any(x.latency_s or x.library_latency_s for x in fabric.links):
        yield Finding("note", "no-latency", fabric.name, "no link has a latency", "small messages will look free; state or measure latencies")
    elif net and not any(x.latency_s for x in net):
        yield Finding("warning", "no-network-latency", f"{net[0].src} -> {net[0].dst}", "network links without a latency", "1.3 us per link is usual")


def _facts(fabric: Fabric) -> Iterator[Finding]:
    unknown = [d.name for d in fabric.devices if not d.memory_bytes or not d.flops]
    if unknown:
        yield Finding(
            "note",
            "unknown-device",
            unknown[0],
            f"memory or FLOP/s of {len(unknown)} devices unknown",
            "collectives do not need them, training does: `fabric import --gpu h100`, or edit the file",
        )
