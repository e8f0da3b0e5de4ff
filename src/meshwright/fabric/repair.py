"""What a fabric would be if a finding of `fabric.lint` were put right: for saying what it costs, not for writing files.

slow-pcie            every such link as fast as the fastest PCIe link
one-way-link         the missing direction added, like the one that is there
uneven-directions    the slower direction as fast as the other
uneven-nvlinks       as many links to the GPU's NVSwitch as most GPUs of its server have (GPUs without one: not known which links are short)
missing-nic          as many NICs as most servers like it have, joined as there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from .edit import with_one_more
from .fabric import Fabric
from .lint import missing_nics, nic_ports, nvlink_counts, slow_pcie_links, uneven_totals

__all__ = ["REPAIRS", "repaired"]


def repaired(fabric: Fabric, rule: str) -> Fabric | None:
    """The fabric with every finding of this rule put right; None where the rule has no repair or it changes nothing."""
    repair = REPAIRS.get(rule)
    changed = fabric if repair is None else repair(fabric)
    return None if changed.links == fabric.links else changed


def _slow_pcie(fabric: Fabric) -> Fabric:
    slow, best = slow_pcie_links(fabric)
    return replace(fabric, links=tuple(replace(x, rate_Bps=best) if i in slow else x for i, x in enumerate(fabric.links)))


def _one_way(fabric: Fabric) -> Fabric:
    pairs = {(x.src, x.dst) for x in fabric.links}
    return replace(fabric, links=(*fabric.links, *(replace(x, src=x.dst, dst=x.src) for x in fabric.links if (x.dst, x.src) not in pairs)))


def _directions(fabric: Fabric) -> Fabric:
    """The first link of the slower direction carries what is short."""
    links = list(fabric.links)
    first: dict[tuple[str, str], int] = {}
    for i, x in enumerate(links):
        first.setdefault((x.src, x.dst), i)
    for (a, b), (rate, back) in uneven_totals(fabric).items():
        i = first[(a, b) if rate < back else (b, a)]
        links[i] = replace(links[i], rate_Bps=links[i].rate_Bps + abs(rate - back))
    return replace(fabric, links=tuple(links))


def _nvlinks(fabric: Fabric) -> Fabric:
    total = nvlink_counts(fabric)
    for members in fabric.groups.values():
        usual = Counter(total[fabric.devices[i].name] for i in members).most_common(1)[0][0]
        for i in members:
            name = fabric.devices[i].name
            peers = {fabric.links[x].dst for x in fabric.out_links[i] if fabric.links[x].kind.startswith("NV")}
            if 0 < total[name] < usual and len(peers) == 1:
                for _ in range(usual - total[name]):
                    fabric = with_one_more(fabric, [(name, next(iter(peers)))])
    return fabric


def _nics(fabric: Fabric) -> Fabric:
    """The namesake of a NIC that a server like it has (`box0/nic2` for `box1`); where names do not fit, the server's last NIC once more."""
    short = missing_nics(fabric)
    for group, (count, usual) in short.items():
        for port in (p for other, ports in nic_ports(fabric).items() if other not in short and len(ports) == usual for p in ports):
            if len(nic_ports(fabric)[group]) < usual:
                fabric = _namesake(fabric, port, group) or fabric
        ports, switches = nic_ports(fabric)[group], {s.name for s in fabric.switches}
        if count and ports[-1] in switches:
            for _ in range(usual - len(ports)):
                fabric = with_one_more(fabric, [ports[-1]])
    return fabric


def _namesake(fabric: Fabric, port: str, group: str) -> Fabric | None:
    """With the port's twin in another server, joined there as the port is in its own; None where an end of a link is missing there."""
    here = next((s for s in fabric.switches if s.name == port), None)
    if here is None or not port.startswith(f"{here.group}/"):
        return None

    def there(name: str) -> str:
        return f"{group}/{name.removeprefix(f'{here.group}/')}" if name.startswith(f"{here.group}/") else name

    links = [replace(x, src=there(x.src), dst=there(x.dst)) for x in fabric.links if port in (x.src, x.dst)]
    known = {*fabric.actor_names, there(port)}
    if there(port) in fabric.actor_of or not all(x.src in known and x.dst in known for x in links):
        return None
    twin = replace(here, name=there(port), group=group)
    return replace(fabric, switches=(*fabric.switches, twin), links=(*fabric.links, *links))


REPAIRS: dict[str, Callable[[Fabric], Fabric]] = {
    "slow-pcie": _slow_pcie, "one-way-link": _one_way, "uneven-directions": _directions, "uneven-nvlinks": _nvlinks, "missing-nic": _nics,
}  # fmt: skip
