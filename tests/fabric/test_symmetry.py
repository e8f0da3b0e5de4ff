"""Symmetries that routing keeps: what is claimed for one route holds, by looking at every pair, for all images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.fabric.symmetry import link_orbits, routing_symmetry
from meshwright.io.fabric.name import load_fabric


def shifted(fabric: Fabric, by: int) -> dict[int, int]:
    n = len(fabric.devices)
    return {d: (d + by) % n for d in range(n)}


@pytest.mark.parametrize(("name", "by"), [("dgx-h100:3", 8), ("dgx-a100:2", 8), ("hgx-b200:2", 8), ("gb200-nvl72:1", 1)])
def test_images_of_routes_are_routes(name: str, by: int) -> None:
    fabric = load_fabric(name)
    n = len(fabric.devices)
    pairs = [(a, b) for a in range(min(by, 4)) for b in range(n) if a != b]
    some = [(a, b) for a, b in pairs if all(fabric.link_ends[x][0] >= n for x in fabric.route(a, b)[1:])]
    goes = shifted(fabric, by)
    moved = routing_symmetry(fabric, goes, [fabric.route(*pair) for pair in some], {d: d % by for d in range(n)})
    assert moved is not None
    for a, b in some:
        for _ in range(n // by):
            assert tuple(moved.link[list(fabric.route(a, b))].tolist()) == fabric.route(goes[a], goes[b])
            a, b = goes[a], goes[b]
    first = link_orbits([moved], len(fabric.links))
    assert np.array_equal(first, first[moved.link])
    # Every link of an orbit has the rate of its first.
    rate = np.array([x.rate_Bps for x in fabric.links])
    assert np.array_equal(rate, rate[first])


def star(rates: tuple[int, ...] = (9, 9, 9)) -> Fabric:
    links = [x for i, r in enumerate(rates) for x in (Link(src=f"d{i}", dst="s", rate_Bps=r), Link(src="s", dst=f"d{i}", rate_Bps=r))]
    return Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(len(rates))), switches=(Switch(name="s"),), links=tuple(links))


def test_what_is_no_symmetry_is_none() -> None:
    routes = [star().route(0, 1)]
    assert routing_symmetry(star(), shifted(star(), 1), routes) is not None
    assert routing_symmetry(star((9, 9, 8)), {0: 1, 1: 0}, routes) is not None
    assert routing_symmetry(star((9, 9, 8)), shifted(star(), 1), routes) is None  # rates differ
    slow = replace(star(), links=(replace(star().links[0], latency_s=1e-6), *star().links[1:]))
    assert routing_symmetry(slow, shifted(slow, 1), routes) is None
    missing = replace(star(), links=star().links[1:])
    assert routing_symmetry(missing, shifted(missing, 1), [missing.route(1, 2)]) is None
    assert routing_symmetry(star(), {0: 1, 1: 1}, routes) is None  # no permutation
    chain = Fabric(
        name="chain", devices=star().devices, links=tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=9) for a, b in ((0, 1), (1, 2), (2, 0)))
    )
    assert routing_symmetry(chain, shifted(chain, 1), [chain.route(0, 2)]) is None  # passes a device
    assert routing_symmetry(chain, shifted(chain, 1), [chain.route(0, 1)]) is not None


@pytest.mark.parametrize("at", ["source", "middle"])
def test_ways_that_tie_must_keep_their_order(at: str) -> None:
    """Two ways of equal width from every device to every other: the smaller link numbers decide, and a map may turn them round."""
    pairs = [("d0", "p"), ("d0", "q"), ("d1", "q"), ("d1", "p")] if at == "source" else [("d0", "p"), ("d0", "q"), ("d1", "p"), ("d1", "q")]
    back = [("p", "d0"), ("q", "d0"), ("p", "d1"), ("q", "d1")]
    fabric = Fabric(
        name="two ways", devices=(Device(name="d0"), Device(name="d1")), switches=(Switch(name="p"), Switch(name="q")),
        links=tuple(Link(src=a, dst=b, rate_Bps=9) for a, b in (*pairs, *back)),
    )  # fmt: skip
    moved = routing_symmetry(fabric, {0: 1, 1: 0}, [fabric.route(0, 1)])
    if moved is not None:
        assert tuple(moved.link[list(fabric.route(0, 1))].tolist()) == fabric.route(1, 0)
    # Devices on two switches with the same neighbours: a map that exchanges the ways would move a route to one that is not taken.
    crossed = replace(fabric, links=tuple(sorted(fabric.links, key=lambda x: (x.src, x.dst == "q") if x.src == "d0" else (x.src, x.dst == "p"))))
    moved = routing_symmetry(crossed, {0: 1, 1: 0}, [crossed.route(0, 1)])
    assert moved is None or tuple(moved.link[list(crossed.route(0, 1))].tolist()) == crossed.route(1, 0)


def test_alternatives_into_the_destination_are_looked_at() -> None:
    """Behind the switch in the middle two ways lead on to each device; for d1 they are numbered the other way round."""
    links = [Link(src=f"d{i}", dst="hub", rate_Bps=9) for i in range(2)]
    links += [Link(src="hub", dst=x, rate_Bps=9) for x in ("a0", "b0", "b1", "a1")]
    links += [Link(src=f"{x}{i}", dst=f"d{i}", rate_Bps=9) for i in range(2) for x in "ab"]
    switches = tuple(Switch(name=x) for x in ("hub", "a0", "b0", "a1", "b1"))
    fabric = Fabric(name="split", devices=(Device(name="d0"), Device(name="d1")), switches=switches, links=tuple(links))
    moved = routing_symmetry(fabric, {0: 1, 1: 0}, [fabric.route(0, 1)])
    assert moved is None or tuple(moved.link[list(fabric.route(0, 1))].tolist()) == fabric.route(1, 0)
    a = replace(fabric, links=(*links[:4], links[5], links[4], *links[6:]))
    assert routing_symmetry(a, {0: 1, 1: 0}, [a.route(0, 1)]) is not None
