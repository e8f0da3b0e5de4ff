"""A large fabric so that it can be read: servers that are alike are drawn once, with their number, and links are counted by kind.

Two servers are alike when their devices are, and their links lead from the same places inside to the same places, by position: a link into the
network to a switch with the same name but for digits, a link to another server to just that. What stands for a kind is its first server.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..fabric.fabric import Fabric
from ..io.quantity import show_rate

__all__ = ["Fold", "drawn", "fold_text"]

_DIGITS = re.compile(r"\d+")
MAX_DRAWN_DEVICES = 64  # one by one
MAX_LINES = 40  # of the text


@dataclass(frozen=True)
class Fold:
    """`fabric`: one server of each kind with the network it touches; `kinds`: the servers of each kind, the first stands for them; `stands_for`:
    for each link of the whole fabric the number of the folded fabric's link that stands for it, or -1."""

    fabric: Fabric
    kinds: tuple[tuple[str, ...], ...]
    stands_for: tuple[int, ...]


def drawn(fabric: Fabric) -> Fold:
    """What a drawing shows: all of a small fabric, of a larger one alike servers once."""
    return fold(fabric, least=2 if len(fabric.devices) > MAX_DRAWN_DEVICES else len(fabric.devices) + 1)


def fold(fabric: Fabric, least: int) -> Fold:
    """The fabric with alike servers once; unchanged where it has fewer than `least` servers or all are unlike."""
    group_of = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    place = _places(fabric)
    facts: dict[str, list[object]] = {g: [] for g in group_of.values() if g}
    for device in fabric.devices:
        if device.group:
            facts[device.group].append((place[device.name], replace(device, name="", group="")))
    for link in fabric.links:
        for own in {group_of[link.src], group_of[link.dst]} - {""}:
            ends = tuple(_seen(name, group_of[name], own, place) for name in (link.src, link.dst))
            facts[own].append((ends, link.kind, link.rate_Bps, link.latency_s, link.library_latency_s))
    kinds: dict[str, list[str]] = {}
    for group, found in facts.items():
        kinds.setdefault(repr(sorted(map(repr, found))), []).append(group)
    if len(facts) < least or len(kinds) == len(facts):
        return Fold(fabric, tuple((g,) for g in facts), tuple(range(len(fabric.links))))
    return _folded(fabric, [tuple(g) for g in kinds.values()], group_of, place)


def _folded(fabric: Fabric, kinds: Sequence[tuple[str, ...]], group_of: dict[str, str], place: dict[str, str]) -> Fold:
    first = {group: kind[0] for kind in kinds for group in kind}
    title = {kind[0]: kind[0] + (f" and {len(kind) - 1} alike" if len(kind) > 1 else "") for kind in kinds}
    inside = {name for name, group in group_of.items() if not group or group in title}
    touched = _network_of(fabric, inside, group_of)
    kept = {name for name in inside if group_of[name] or name in touched}
    position = {(group_of[n], place[n]): n for n in kept if group_of[n]}
    links = [x for x in fabric.links if x.src in kept and x.dst in kept]
    number: dict[tuple[str, str, str], int] = {}
    for k, x in enumerate(links):
        number.setdefault((x.src, x.dst, x.kind), k)
    near = {_bare(name): name for name in sorted(kept, reverse=True) if not group_of[name]}  # a switch of a server's own, such as tor7, by its kind

    def stand_in(name: str) -> str:
        group = group_of[name]
        if group:
            return position.get((first[group], place[name]), name)
        return name if name in kept else near.get(_bare(name), name)

    def stands_for(src: str, dst: str, kind: str) -> int:
        between = group_of[src] and group_of[dst] and group_of[src] != group_of[dst]
        return number.get((src, dst, kind) if between else (stand_in(src), stand_in(dst), kind), -1)

    stands = tuple(stands_for(x.src, x.dst, x.kind) for x in fabric.links)
    whole = replace(
        fabric, links=tuple(links),
        devices=tuple(replace(d, group=title.get(d.group, d.group)) for d in fabric.devices if d.name in kept or not d.group),
        switches=tuple(replace(s, group=title.get(s.group, s.group)) for s in fabric.switches if s.name in kept),
    )  # fmt: skip
    return Fold(whole, tuple(kinds), stands)


def _network_of(fabric: Fabric, inside: set[str], group_of: dict[str, str]) -> set[str]:
    """The network's switches that the shown servers touch, and those behind them; of a kind that is touched, no others (one server's own tor)."""
    beside: dict[str, list[str]] = {}
    for x in fabric.links:
        if not (group_of[x.src] and group_of[x.dst]):
            beside.setdefault(x.src, []).append(x.dst)
            beside.setdefault(x.dst, []).append(x.src)
    network = {s.name for s in fabric.switches if not s.group}
    wave = {n for name in inside if group_of[name] for n in beside.get(name, ()) if n in network}
    found: set[str] = set()
    while wave:
        found |= wave
        kinds = {_bare(name) for name in found}
        wave = {n for name in wave for n in beside.get(name, ()) if n in network and n not in found and _bare(n) not in kinds}
    return found


def _places(fabric: Fabric) -> dict[str, str]:
    """Actor -> where it stands in its server: `gpu 3`, by kind of name and count, so that names of other servers give the same."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for name, group in [(d.name, d.group) for d in fabric.devices] + [(s.name, s.group) for s in fabric.switches]:
        role = _role(name, group)
        found[name] = f"{role} {seen[group, role]}"
        seen[group, role] += 1
    return found


def _role(name: str, group: str) -> str:
    return _bare(name.removeprefix(f"{group}/").rpartition("/")[2])


def _bare(name: str) -> str:
    return _DIGITS.sub("", name).strip("-_:. ") or "node"


def _seen(name: str, group: str, own: str, place: dict[str, str]) -> str:
    return place[name] if group == own else f"network {_bare(name)}" if not group else "another server"


# ---- text --------------------------------------------------------------------------------------------------------------
def fold_text(fabric: Fabric) -> str:
    """What each kind of server consists of and how it is joined, and the network: one line per kind of link between kinds of parts."""
    group_of = {d.name: d.group for d in fabric.devices} | {s.name: s.group for s in fabric.switches}
    links: dict[str, list[tuple[str, str, str, int]]] = {}
    for x in fabric.links:
        for own in {group_of[x.src], group_of[x.dst]} - {""} or {""}:
            links.setdefault(own, []).append((x.src, x.dst, x.kind, x.rate_Bps))
    lines: list[str] = []
    for kind in fold(fabric, least=1).kinds:
        last = f" ... {kind[-1]}" if len(kind) > 2 else f", {kind[1]}" if len(kind) == 2 else ""
        lines.append(f"{len(kind)} x {kind[0]}{last}" if len(kind) > 1 else kind[0])
        if len(lines) <= MAX_LINES:
            lines += [f"  {line}" for line in _edges(links.get(kind[0], ()), group_of, kind[0])]
    network = _edges(links.get("", ()), group_of, "")
    lines += ["network", *(f"  {line}" for line in network)] if network else []
    return "\n".join(lines[:MAX_LINES] + ([f"and {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []))


def _edges(links: Iterable[tuple[str, str, str, int]], group_of: dict[str, str], own: str) -> list[str]:
    """`8 gpu - 1 nvswitch: 8 x NV18 450 GB/s`, per kind of link and of the two ends."""
    ends: dict[tuple[str, str, str, int], list[tuple[str, str]]] = {}
    for src, dst, kind, rate in links:
        a, b = (_role(n, group_of[n]) if group_of[n] in (own, "") else "other servers" for n in (src, dst))
        ends.setdefault((a, b, kind, rate), []).append((src, dst))
    said = []
    done: set[tuple[str, str, str, int]] = set()
    for (a, b, kind, rate), pairs in ends.items():
        if (a, b, kind, rate) in done:
            continue
        done |= {(a, b, kind, rate), (b, a, kind, rate)}
        both = sorted(pairs) == sorted((y, x) for x, y in ends.get((b, a, kind, rate), []))
        count = len(pairs) // 2 if a == b and both else len(pairs)
        sources, targets = (len(set(names)) for names in zip(*pairs, strict=True))
        where = f"{sources} {a} among each other" if a == b else f"{sources} {a} - {b if b == 'other servers' else f'{targets} {b}'}"
        said.append(f"{where}: {count} x {kind} {show_rate(rate)}{'' if both else ', one way'}")
    return said
