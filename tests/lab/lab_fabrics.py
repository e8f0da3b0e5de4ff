"""Fabrics for the lab's tests: presets at rehearsal scale, and random ones."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

# (name, devices or None for all, scale): stars, trees of switches, direct links, several networks, cycles
PRESETS: list[tuple[str, str | None, int]] = [
    ("star:4", None, 100),
    ("two-islands:4", None, 1),
    ("lan:2", None, 1),
    ("fat-tree:3?leaf=2", None, 100),
    ("laptop:3", None, 100),
    ("dgx1-v100:1", "0-4", 8000),
    ("dgx-h100:2", "0,1,8,9", 45000),
    ("dgx-a100:2?net=rails", "0-2,8-10", 10000),
    ("dragonfly:2", None, 1000),
    ("torus:3", None, 1000),
    ("hypercube:3", None, 1000),
    ("wan:3", None, 10),
    ("ring:5", None, 100),
    ("line:3", None, 100),
    ("star-gpu:4", None, 100),
]


def preset(name: str, devices: str | None = None) -> Fabric:
    return load_fabric(name, devices)


def devices(count: int) -> tuple[Device, ...]:
    return tuple(Device(name=f"d{i}") for i in range(count))


def one_way_ring(count: int = 3, rate_Bps: int = 10**6) -> Fabric:
    links = tuple(Link(src=f"d{i}", dst=f"d{(i + 1) % count}", rate_Bps=rate_Bps) for i in range(count))
    return Fabric(name="one-way ring", devices=devices(count), links=links)


def both(a: str, b: str, rate_Bps: int, latency_s: float = 0.0) -> tuple[Link, Link]:
    return (
        Link(src=a, dst=b, rate_Bps=rate_Bps, latency_s=latency_s),
        Link(src=b, dst=a, rate_Bps=rate_Bps, latency_s=latency_s),
    )


def parting_routes() -> Fabric:
    """Two widest shortest routes to d1 that part at s1: a narrow first hop makes the branches equal for d0, not for d2.

    From d0 everything is at most 10 wide, so the smallest link numbers win (through s2, which is 20 wide); from d2 (100 wide) the
    wider branch through s3 does.
    """
    links = (
        *both("d0", "s1", 10**6), *both("s1", "s2", 2 * 10**6), *both("s2", "d1", 2 * 10**6), *both("d2", "s1", 10**7),
        *both("s1", "s3", 10**7), *both("s3", "d1", 10**7),
    )  # fmt: skip
    return Fabric(name="parting", devices=devices(3), switches=tuple(Switch(name=f"s{i}") for i in (1, 2, 3)), links=links)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    """Connected fabrics of 1-5 devices and 0-4 switches: a random tree, then more links, one-way and parallel ones among them."""
    count, switches = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    names = [f"d{i}" for i in range(count)] + [f"s{i}" for i in range(switches)]
    rate = st.integers(50_000, 10**7)
    links: list[Link] = []
    order = draw(st.permutations(names))
    for i, name in enumerate(order[1:], start=1):
        other = order[draw(st.integers(0, i - 1))]
        links += [Link(src=name, dst=other, rate_Bps=draw(rate)), Link(src=other, dst=name, rate_Bps=draw(rate))]
    for _ in range(draw(st.integers(0, 5))):
        a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if a != b:
            links.append(Link(src=a, dst=b, rate_Bps=draw(rate), latency_s=draw(st.sampled_from([0.0, 0.0, 1e-3]))))
    return Fabric(
        name="random", devices=devices(count), switches=tuple(Switch(name=f"s{i}") for i in range(switches)),
        links=tuple(draw(st.permutations(links))),
    )  # fmt: skip


SCALES = st.sampled_from([Fraction(1), Fraction(2), Fraction(7, 3)])
