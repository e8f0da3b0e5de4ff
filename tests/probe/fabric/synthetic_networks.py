"""Networks that answer a probe from a known fabric, by an oracle of their own: rates rise together in exact steps until links are full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.fabric.fabric import Device, Fabric, Link, Switch

MBIT = 125_000


def sharing(fabric: Fabric, flows: Sequence[tuple[str, str]]) -> list[float]:
    """Max-min fair rates, by filling all links at once in steps to the next full one (no progressive freezing by link, unlike the product)."""
    routes = [set(fabric.route(fabric.actor_of[a], fabric.actor_of[b])) for a, b in flows]
    rate, alive = [0.0] * len(flows), set(range(len(flows)))
    left = [float(x.rate_Bps) for x in fabric.links]
    while alive:
        users = [sum(k in routes[f] for f in alive) for k in range(len(left))]
        step = min(room / count for room, count in zip(left, users, strict=True) if count)
        left = [room - step * count for room, count in zip(left, users, strict=True)]
        for f in alive:
            rate[f] += step
        full = {k for k, room in enumerate(left) if room <= 1e-9 * fabric.links[k].rate_Bps}
        alive = {f for f in alive if not routes[f] & full}
    return rate


class SyntheticNetwork:
    """Implements `fabric_campaign.Network`. `noise`: relative, uniform, per transfer."""

    idle = 1.0
    source = "synthetic"

    def __init__(self, fabric: Fabric, *, seed: int = 0, noise: float = 0.02, disturbed: Sequence[int] = ()) -> None:
        self.fabric, self.noise, self.rng = fabric, noise, np.random.default_rng(seed)
        self.names = tuple(d.name for d in fabric.devices)
        self.host = tuple(d.group for d in fabric.devices)
        self.address = ("",) * len(self.names)
        self.count, self.disturbed = 0, set(disturbed)

    def round_trips(self) -> np.ndarray:
        n = len(self.names)
        rtt = np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                for a, b in ((i, j), (j, i)) if i != j else ():
                    rtt[i, j] += sum(self.fabric.links[x].latency_s for x in self.fabric.route(a, b))
        return rtt

    def transfer(self, flows: Sequence[tuple[int, int]], longer: float = 1.0) -> list[float]:
        self.count += 1
        rates = sharing(self.fabric, [(self.names[i], self.names[j]) for i, j in flows])
        less = 0.5 if self.count in self.disturbed else 1.0
        return [r * less * self.rng.uniform(1 - self.noise, 1 + self.noise) for r in rates]


def cable(a: str, b: str, rate: int, back: int | None = None, latency_s: float = 1e-5) -> list[Link]:
    """Rates in Mbit/s."""
    return [
        Link(src=a, dst=b, rate_Bps=rate * MBIT, latency_s=latency_s), Link(src=b, dst=a, rate_Bps=(back or rate) * MBIT, latency_s=latency_s),
    ]  # fmt: skip


def devices(n: int) -> tuple[Device, ...]:
    return tuple(Device(name=f"d{i}", group=f"d{i}") for i in range(n))


def star(up: Sequence[int], down: Sequence[int] | None = None) -> Fabric:
    down = up if down is None else down
    links = [x for i, (u, d) in enumerate(zip(up, down, strict=True)) for x in cable(f"d{i}", "s", u, d)]
    return Fabric(name="star", devices=devices(len(up)), switches=(Switch(name="s"),), links=tuple(links))


def racks(sets: Sequence[Sequence[int]], port: int, out: int, back: int | None = None) -> Fabric:
    """Two racks are joined by one trunk, more by one each to a core."""
    links: list[Link] = []
    switches = [Switch(name=f"rack{r}") for r in range(len(sets))]
    for r, members in enumerate(sets):
        for i in members:
            links += cable(f"d{i}", f"rack{r}", port)
        if len(sets) > 2:
            links += cable(f"rack{r}", "core", out, back)
    if len(sets) > 2:
        switches.append(Switch(name="core"))
    else:
        links += cable("rack0", "rack1", out, back)
    return Fabric(name="racks", devices=devices(sum(map(len, sets))), switches=tuple(switches), links=tuple(links))


def direct(n: int, pairs: dict[tuple[int, int], int]) -> Fabric:
    links = [x for (i, j), rate in pairs.items() for x in cable(f"d{i}", f"d{j}", rate)]
    return Fabric(name="direct", devices=devices(n), links=tuple(links))
