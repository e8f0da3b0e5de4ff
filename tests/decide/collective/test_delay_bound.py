"""Bytes and latency in one bound: against schedules found by exhaustive search, closed forms, every strategy's simulated time, and lies."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bound import Bound
from meshwright.check.bounds import delay as check_delay
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import CollectiveProblem, ForestColl, Ring
from meshwright.decide.collective.bounds.collective import bandwidth_bound
from meshwright.decide.collective.bounds.delay import delay_bound
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.testing.fabrics import fabrics

OPERATIONS = ("all-gather", "reduce-scatter", "broadcast", "reduce")
CHUNK = 4


def direct_fabric(latency: dict[tuple[int, int], int], n: int) -> Fabric:
    """One chunk a second on every link."""
    links = tuple(Link(src=f"d{u}", dst=f"d{v}", rate_Bps=CHUNK, latency_s=float(s)) for (u, v), s in latency.items())
    return Fabric(name="tiny", devices=tuple(Device(name=f"d{i}") for i in range(n)), links=links)


def quickest_s(latency: dict[tuple[int, int], int], n: int, held: tuple[int, ...]) -> int:
    """Least time in which every device gets every chunk, by search over all schedules in whole seconds; chunk c starts at device held[c]."""
    chunks = len(held)
    start = tuple(0 if held[c] == d else 99 for d in range(n) for c in range(chunks))
    states, now, best = {start}, 0, 99
    while now < best:
        following = set()
        for state in states:
            choices = [[-1, *(c for c in range(chunks) if state[u * chunks + c] <= now and state[v * chunks + c] > now + 1 + s)]
                       for (u, v), s in latency.items()]  # fmt: skip
            for sent in product(*choices):
                after = list(state)
                for ((_, v), s), c in zip(latency.items(), sent, strict=True):
                    if c >= 0:
                        after[v * chunks + c] = min(after[v * chunks + c], now + 1 + s)
                best = min(best, max(after))
                following.add(tuple(after))
        states, now = following, now + 1
    return best


def best_bound(problem: CollectiveProblem) -> Bound:
    return delay_bound(problem) or bandwidth_bound(problem)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_no_schedule_of_a_tiny_fabric_is_quicker(data: st.DataObject, gather: bool) -> None:
    n = 3
    pairs = [(0, 1), (1, 2), (2, 0), *data.draw(st.lists(st.sampled_from([(1, 0), (2, 1), (0, 2)]), unique=True, max_size=2))]
    latency = {pair: data.draw(st.integers(0, 3)) for pair in pairs}
    fabric = direct_fabric(latency, n)
    held, op = ((0, 1, 2), "all-gather") if gather else ((0, 0), "broadcast")
    problem = CollectiveProblem.on(fabric, op, CHUNK * len(held), element_bytes=1)
    bound = best_bound(problem)
    assert check_bound(bound, fabric) == []
    assert bound.exact <= quickest_s(latency, n, held)


@pytest.mark.parametrize("op", OPERATIONS)
def test_two_devices_reach_the_bound(op: str) -> None:
    links = tuple(Link(src=a, dst=b, rate_Bps=1000, latency_s=0.25, library_latency_s=0.5) for a, b in (("a", "b"), ("b", "a")))
    fabric = Fabric(name="pair", devices=(Device(name="a"), Device(name="b")), links=links)
    problem = CollectiveProblem.on(fabric, op, 8000)
    sent = 4000 if op in ("all-gather", "reduce-scatter") else 8000
    assert best_bound(problem).exact == Fraction(sent, 1000) + Fraction(3, 4)
    plan = ForestColl(pieces=1).plan(problem, rng=np.random.default_rng(0))
    assert simulated_time_s(plan.program, fabric, problem.ranks, None) == pytest.approx(sent / 1000 + 0.75)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_the_last_bytes_of_a_root_reach_one_device_at_once_and_all_one_message_later(op: str) -> None:
    """On a switch the root's link carries each byte once. While one message's time is left only one of three others can profit, later all."""
    n, rate = 4, 100
    links = tuple(x for i in range(n) for x in (Link(src=f"d{i}", dst="s", rate_Bps=rate, latency_s=0.5), Link(src="s", dst=f"d{i}", rate_Bps=rate)))
    fabric = Fabric(name="star", devices=tuple(Device(name=f"d{i}") for i in range(n)), switches=(Switch(name="s"),), links=links)
    problem = CollectiveProblem.on(fabric, op, 4000)
    message = Fraction(1, 2)
    assert best_bound(problem).exact == Fraction(4000, rate) + message * Fraction(1 + 2 * 2, 3)


@settings(max_examples=40, deadline=None)
@given(
    fabric=fabrics(min_devices=2, max_devices=5), op=st.sampled_from(OPERATIONS), size=st.sampled_from([64, 1 << 16, 1 << 24]),
    root=st.integers(0, 4),
)  # fmt: skip
def test_simulated_times_are_never_below(fabric: Fabric, op: str, size: int, root: int) -> None:
    problem = CollectiveProblem.on(fabric, op, size, root=root % len(fabric.devices))
    bound = delay_bound(problem)
    if bound is None:
        return
    assert bound.exact > bandwidth_bound(problem).exact
    assert check_bound(bound, fabric) == []
    for strategy in (ForestColl(), Ring(), Direct()):
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
        except Unsupported:
            continue
        assert simulated_time_s(plan.program, fabric, problem.ranks, None) >= float(bound) * (1 - 1e-9)


@pytest.mark.parametrize(("op", "turned"), [("all-gather", "reduce-scatter"), ("broadcast", "reduce")])
def test_reductions_are_the_same_backwards(op: str, turned: str) -> None:
    fabric = load_fabric("dgx-h100:2")
    backwards = replace(fabric, links=tuple(replace(x, src=x.dst, dst=x.src) for x in fabric.links))
    one, two = best_bound(CollectiveProblem.on(fabric, op, 1 << 30)), best_bound(CollectiveProblem.on(backwards, turned, 1 << 30))
    assert one.exact == two.exact


def test_two_boxes_of_eight_lose_a_network_message_and_most_of_an_nvlink_one() -> None:
    """Every byte enters a box once, over a NIC (16.6 us), and seven of eight GPUs have it 4.1 us later."""
    fabric = load_fabric("hgx-b200:2")
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 30)
    bound = best_bound(problem)
    lost = bound.exact - bandwidth_bound(problem).exact
    assert lost == Fraction(166, 10**7) + Fraction(7, 8) * Fraction(41, 10**7)
    assert check_bound(bound, fabric) == []


def test_what_has_no_such_bound_has_none() -> None:
    fabric = load_fabric("dgx-h100:2")
    assert delay_bound(CollectiveProblem.on(fabric, "all-to-all", 1 << 30)) is None
    assert delay_bound(CollectiveProblem.on(fabric, "all-gather", 64)) is None  # latency alone: the bytes have gone before it matters
    still = replace(fabric, links=tuple(replace(x, latency_s=0.0, library_latency_s=0.0) for x in fabric.links))
    assert delay_bound(CollectiveProblem.on(still, "all-gather", 1 << 30)) is None


def lied(bound: Bound, **data: object) -> Bound:
    certificate = msgspec.structs.replace(bound.certificate, data={**bound.certificate.data, **data})
    return msgspec.structs.replace(bound, certificate=certificate)


def test_lies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load_fabric("dgx-h100:2")
    problem = CollectiveProblem.on(fabric, "broadcast", 1 << 30)
    bound = best_bound(problem)
    assert bound.certificate.kind == "delay"
    assert "claimed is" in check_bound(msgspec.structs.replace(bound, value=str(bound.exact * 2)), fabric)[0].message
    assert "delays bound no scatter" in check_bound(lied(bound, demand="scatter", crossing_bytes=str(1 << 29)), fabric)[0].message
    small = lied(bound, size_bytes=64, crossing_bytes="64")
    assert "it holds from" in check_bound(small, fabric)[0].message
    one_way = replace(fabric, links=tuple(x for x in fabric.links if x.dst != "box1/gpu3" and x.src != "box1/gpu3"))
    assert "reaches every rank there" in check_bound(bound, one_way)[0].message
    tiny = replace(fabric, links=tuple(replace(x, latency_s=x.latency_s * 1.0000001e-290) for x in fabric.links))
    assert check_bound(bound, tiny)[0].status == "unknown"
    monkeypatch.setattr(check_delay, "MAX_ACTORS", 3)
    assert check_bound(bound, fabric)[0].status == "unknown"
