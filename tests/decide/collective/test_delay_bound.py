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
from meshwright.decide.collective.bounds import delay
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.bounds.collective import collective_bound
from meshwright.decide.collective.bounds.delay import delay_bound
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.joint.innetwork import InNetwork
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.fabric.edit import forwarding_only
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


def by_servers(problem: CollectiveProblem) -> Bound | None:
    """The bound that is taken among many ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delay, "MAX_RANKS_ONE_BY_ONE", 1)
        problem.fabric.__dict__.pop("_remembered", None)
        found = delay_bound(problem)
    problem.fabric.__dict__.pop("_remembered", None)
    assert found is None or found.certificate.data["by"] == "servers"
    return found


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_no_schedule_of_a_tiny_fabric_is_quicker(data: st.DataObject, gather: bool) -> None:
    n = 3
    pairs = [(0, 1), (1, 2), (2, 0), *data.draw(st.lists(st.sampled_from([(1, 0), (2, 1), (0, 2)]), unique=True, max_size=2))]
    latency = {pair: data.draw(st.integers(0, 3)) for pair in pairs}
    fabric = direct_fabric(latency, n)
    held, op = ((0, 1, 2), "all-gather") if gather else ((0, 0), "broadcast")
    problem = CollectiveProblem.on(fabric, op, CHUNK * len(held), element_bytes=1)
    least = quickest_s(latency, n, held)
    for bound in (best_bound(problem), by_servers(problem)):
        assert bound is None or (check_bound(bound, fabric) == [] and bound.exact <= least)


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
    found = [bound for bound in (delay_bound(problem), by_servers(problem)) if bound is not None]
    if not found:
        return
    for bound in found:
        assert bound.exact > bandwidth_bound(problem).exact
        assert check_bound(bound, fabric) == []
    least = max(map(float, found))
    for strategy in (ForestColl(), Ring(), Direct()):
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
        except Unsupported:
            continue
        assert simulated_time_s(plan.program, fabric, problem.ranks, None) >= least * (1 - 1e-9)


@pytest.mark.parametrize("boxes", [(1, 2), (2, 3), (3, 1, 2)])
@pytest.mark.parametrize("op", OPERATIONS)
def test_switches_that_copy_and_add_serve_as_devices_do(boxes: tuple[int, ...], op: str) -> None:
    """Latencies of unlike sizes on every link: a schedule in the network must not beat what is proved without looking at it."""
    rng = np.random.default_rng(sum(boxes))
    links: list[Link] = []
    for box, n in enumerate(boxes):
        ends = [(f"b{box}d{i}", f"s{box}") for i in range(n)] + ([(f"s{box - 1}", f"s{box}")] if box else [])
        for a, b in (way for end in ends for way in (end, end[::-1])):
            wait = {name: int(rng.integers(0, 4)) / 10_000 for name in ("latency_s", "library_latency_s")}
            links.append(Link(src=a, dst=b, rate_Bps=10**6 * int(rng.integers(1, 4)), **wait))
    devices = tuple(Device(name=f"b{box}d{i}", group=f"box{box}") for box, n in enumerate(boxes) for i in range(n))
    switches = tuple(Switch(name=f"s{box}", group=f"box{box}", multicast=True, aggregate=True) for box in range(len(boxes)))
    fabric = Fabric(name="able", devices=devices, switches=switches, links=tuple(links))
    for size in (1 << 12, 1 << 16):
        problem = CollectiveProblem.on(fabric, op, size // len(devices) * len(devices) * 4)
        try:
            plan = InNetwork(pieces=8).plan(problem, rng=np.random.default_rng(0))
        except Unsupported:
            continue
        time_s = simulated_time_s(plan.program, fabric, (*problem.ranks, *plan.switches), None)
        for bound in (best_bound(problem), by_servers(problem)):
            assert bound is None or (check_bound(bound, fabric) == [] and float(bound) <= time_s * (1 + 1e-9))


def test_what_many_boxes_lose_is_two_messages_over_the_network() -> None:
    """A byte leaves the root's box (16.6 us) and has then to reach 12 boxes, of which one has it at once and its other GPUs 4.1 us later."""
    fabric = forwarding_only(load_fabric("dgx-h100:13"))
    for op in ("broadcast", "reduce"):
        problem = CollectiveProblem.on(fabric, op, 1 << 30, root=50)
        bound = collective_bound(problem)
        lost_us = Fraction(166, 10) + (7 * Fraction(41, 10) + 88 * Fraction(166, 10)) / 96
        assert bound.exact - bandwidth_bound(problem).exact == lost_us / 10**6
        assert bound.certificate.kind == "delay" and bound.certificate.data["by"] == "servers" and check_bound(bound, fabric) == []
    gather = CollectiveProblem.on(fabric, "all-gather", 1 << 30)
    assert collective_bound(gather) == bandwidth_bound(gather)


@pytest.mark.parametrize(("op", "turned"), [("all-gather", "reduce-scatter"), ("broadcast", "reduce")])
def test_reductions_are_the_same_backwards(op: str, turned: str) -> None:
    fabric = forwarding_only(load_fabric("dgx-h100:2"))
    backwards = replace(fabric, links=tuple(replace(x, src=x.dst, dst=x.src) for x in fabric.links))
    one, two = best_bound(CollectiveProblem.on(fabric, op, 1 << 30)), best_bound(CollectiveProblem.on(backwards, turned, 1 << 30))
    assert one.exact == two.exact


def test_two_boxes_of_eight_lose_a_network_message_and_most_of_an_nvlink_one() -> None:
    """Every byte enters a box once, over a NIC (16.6 us), and seven of eight GPUs have it 4.1 us later."""
    fabric = forwarding_only(load_fabric("hgx-b200:2"))
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 30)
    bound = best_bound(problem)
    lost = bound.exact - bandwidth_bound(problem).exact
    assert lost == Fraction(166, 10**7) + Fraction(7, 8) * Fraction(41, 10**7)
    assert check_bound(bound, fabric) == []


def test_what_has_no_such_bound_has_none() -> None:
    fabric = forwarding_only(load_fabric("dgx-h100:2"))
    assert delay_bound(CollectiveProblem.on(fabric, "all-to-all", 1 << 30)) is None
    assert delay_bound(CollectiveProblem.on(fabric, "all-gather", 64)) is None  # latency alone: the bytes have gone before it matters
    still = replace(fabric, links=tuple(replace(x, latency_s=0.0, library_latency_s=0.0) for x in fabric.links))
    assert delay_bound(CollectiveProblem.on(still, "all-gather", 1 << 30)) is None


def lied(bound: Bound, **data: object) -> Bound:
    certificate = msgspec.structs.replace(bound.certificate, data={**bound.certificate.data, **data})
    return msgspec.structs.replace(bound, certificate=certificate)


def test_lies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = forwarding_only(load_fabric("dgx-h100:2"))
    problem = CollectiveProblem.on(fabric, "broadcast", 1 << 30)
    bound = best_bound(problem)
    assert bound.certificate.kind == "delay"
    assert "claimed is" in check_bound(msgspec.structs.replace(bound, value=str(bound.exact * 2)), fabric)[0].message
    assert "delays bound no scatter" in check_bound(lied(bound, demand="scatter", crossing_bytes=str(1 << 29)), fabric)[0].message
    small = lied(bound, size_bytes=64, crossing_bytes="64")
    assert "it holds from" in check_bound(small, fabric)[0].message
    one_way = replace(fabric, links=tuple(x for x in fabric.links if x.dst != "box1/gpu3" and x.src != "box1/gpu3"))
    assert "reaches every rank there" in check_bound(bound, one_way)[0].message
    assert "by devices or by servers" in check_bound(lied(bound, by="pairs"), fabric)[0].message
    servers = by_servers(CollectiveProblem.on(forwarding_only(load_fabric("dgx-h100:3")), "broadcast", 1 << 30))
    assert servers is not None
    three = forwarding_only(load_fabric("dgx-h100:3"))
    assert check_bound(servers, three) == []
    nearer = replace(three, links=tuple(replace(x, latency_s=x.latency_s / 2) for x in three.links))
    assert "the certificate gives" in check_bound(servers, nearer)[0].message
    assert "it holds from" in check_bound(lied(servers, size_bytes=64, crossing_bytes="64"), three)[0].message
    unreached = replace(three, links=tuple(x for x in three.links if x.dst.startswith("box0/")))
    assert check_bound(servers, unreached)[0].status == "wrong"
    tiny = replace(fabric, links=tuple(replace(x, latency_s=x.latency_s * 1.0000001e-290) for x in fabric.links))
    assert check_bound(bound, tiny)[0].status == check_bound(lied(bound, by="servers"), tiny)[0].status == "unknown"
    assert delay_bound(replace(problem, fabric=tiny)) is None  # what cannot be checked is not claimed
    monkeypatch.setattr(check_delay, "MAX_ACTORS", 3)
    assert check_bound(bound, fabric)[0].status == "unknown"
