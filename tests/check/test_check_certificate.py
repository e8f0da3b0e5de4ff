"""Certificates: the planners' own are confirmed, and every lie in one is named."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bound import Bound, Certificate
from meshwright.check.bounds.certificate import check_bound
from meshwright.decide.collective import OPERATIONS, CollectiveProblem, collective_bound
from meshwright.decide.collective.problem import SHARDED
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.testing.fabrics import fabrics


def island(n: int = 4, **switch: bool) -> Fabric:
    devices = tuple(Device(name=f"d{i}", flops={"fp32": 10**9}) for i in range(n))
    links = tuple(x for i in range(n) for x in (Link(src=f"d{i}", dst="s", rate_Bps=100), Link(src="s", dst=f"d{i}", rate_Bps=100)))
    return Fabric(name="island", devices=devices, switches=(Switch(name="s", **switch),), links=links)


@settings(max_examples=60, deadline=None)
@given(fabric=fabrics(min_devices=2, max_devices=5), op=st.sampled_from(OPERATIONS), size=st.sampled_from([4, 4096, 1 << 30]), data=st.data())
def test_the_planners_bounds_are_confirmed(fabric: Fabric, op: str, size: int, data: st.DataObject) -> None:
    n = len(fabric.devices)
    more: dict[str, Any] = {}
    if op in SHARDED and data.draw(st.booleans()):
        shards = [4 * x for x in data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))]
        shards[data.draw(st.integers(0, n - 1))] += 4
        more, size = {"shard_bytes": tuple(shards)}, sum(shards)
    if op == "permute":
        more = {"peers": tuple(data.draw(st.lists(st.integers(-1, n - 1), min_size=n, max_size=n)))}
    bound = collective_bound(CollectiveProblem.on(fabric, op, size, root=data.draw(st.integers(0, n - 1)), **more))
    assert check_bound(bound, fabric) == []
    worse = msgspec.structs.replace(bound, value=str(bound.exact * Fraction(11, 10) + 1))
    assert check_bound(worse, fabric)[0].status == "wrong"


def test_a_cut_proves_no_more_than_brute_force_over_all_cuts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = int(rng.integers(2, 5))
        links = tuple(Link(src=f"d{i}", dst=f"d{j}", rate_Bps=int(rng.integers(1, 9))) for i in range(n) for j in range(n) if i != j)
        fabric = Fabric(name="full", devices=tuple(Device(name=f"d{i}") for i in range(n)), links=links)
        bound = collective_bound(CollectiveProblem.on(fabric, "all-gather", 4 * n))
        best = Fraction(0)
        for k in range(1, n):
            for inside in combinations(range(n), k):
                leaving = sum(x.rate_Bps for x in links if int(x.src[1]) in inside and int(x.dst[1]) not in inside)
                best = max(best, Fraction(4 * k, leaving))
        assert bound.exact == best and check_bound(bound, fabric) == []


def cut(**changes: Any) -> Bound:
    data = {
        "inside": ["d0", "d1"], "devices_inside": 2, "leaving_Bps": "200", "demand": "all-gather", "ranks": 4, "devices": ["d0", "d1", "d2", "d3"],
        "root": "", "size_bytes": 400, "crossing_bytes": "200",
    } | changes  # fmt: skip
    return Bound(quantity="time", value=str(changes.pop("value", 1)), unit="s", certificate=Certificate(kind="cut", data=data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inside": ["d0", "nobody"]}, "has no 'nobody'"),
        ({"devices_inside": 3}, "2 ranks are inside, it says 3"),
        ({"leaving_Bps": "100"}, "links of 200 B/s leave the set"),
        ({"inside": ["d0", "d1", "d2", "d3", "s"], "devices_inside": 4, "leaving_Bps": "0"}, "no link leaves"),
        ({"inside": ["s"], "devices_inside": 0, "leaving_Bps": "400"}, "a rank on either side"),
        ({"demand": "broadcast", "root": "d3"}, "does not force any byte"),
        ({"demand": "reduce", "root": "d0"}, "does not force any byte"),
        ({"demand": "all-to-all"}, "400 bytes must leave the set"),
        ({"demand": "juggle"}, "does not force any byte"),
        ({"crossing_bytes": "300"}, "200 bytes must leave the set"),
        ({"ranks": 5}, "not that many different devices"),
        ({"devices": ["d0", "d0", "d2", "d3"]}, "not that many different devices"),
        ({"leaving_Bps": "2e2"}, "not an exact rational"),
        ({"value": "2"}, "the certificate gives 1 s, claimed is 2"),
    ],
)
def test_a_lie_in_a_cut_is_named(changes: dict[str, Any], words: str) -> None:
    assert check_bound(cut(), island()) == []
    found = check_bound(cut(**changes), island())
    assert len(found) == 1 and found[0].status == "wrong" and words in found[0].message, found


def test_a_missing_field_is_wrong_not_a_crash() -> None:
    bound = cut()
    data = {k: v for k, v in bound.certificate.data.items() if k != "inside"}
    found = check_bound(msgspec.structs.replace(bound, certificate=Certificate(kind="cut", data=data)), island())
    assert found[0].status == "wrong" and "inside" in found[0].message


def partition(**changes: Any) -> Bound:
    data = {
        "parts": [["d0"], ["d1"], ["d2"], ["d3"]], "entering_Bps": "400", "demand": "all-reduce", "ranks": 4,
        "devices": ["d0", "d1", "d2", "d3"], "size_bytes": 400,
    } | changes  # fmt: skip
    return Bound(quantity="time", value="6", unit="s", certificate=Certificate(kind="partition", data=data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": [["d0", "d1", "d2", "d3"]]}, "over two parts or more"),
        ({"demand": "all-gather"}, "bounds an all-reduce"),
        ({"parts": [["d0"], ["d0", "d1"], ["d2"], ["d3"]]}, "disjoint"),
        ({"parts": [["d0"], ["d1"], ["d2"]]}, "all ranks together"),
        ({"parts": [["d0"], ["d1"], ["d2"], ["d3"], ["s"]]}, "hold a rank each"),
        ({"entering_Bps": "300"}, "links of 400 B/s enter the parts"),
    ],
)
def test_a_lie_in_a_partition_is_named(changes: dict[str, Any], words: str) -> None:
    assert check_bound(partition(), island()) == []
    found = check_bound(partition(**changes), island())
    assert len(found) == 1 and found[0].status == "wrong" and words in found[0].message


def test_a_partition_must_hold_switches_that_add() -> None:
    assert "can add or copy" in check_bound(partition(), island(aggregate=True))[0].message


def roofline(**changes: Any) -> Bound:
    data = {"flops": 8 * 10**9, "flops_per_s": 4 * 10**9, "devices": 4, "dtype": "fp32"} | changes
    return Bound(quantity="step time", value="2", unit="s", certificate=Certificate(kind="roofline", data=data))


def test_rooflines() -> None:
    assert check_bound(roofline(), island()) == []
    assert "it says 3000000000" in check_bound(roofline(flops_per_s=3 * 10**9), island())[0].message
    assert "has 4 devices" in check_bound(roofline(devices=3), island())[0].message
    assert check_bound(roofline(dtype="bf16"), island())[0].status == "unknown"  # no device states that peak


def test_sums_and_memory() -> None:
    both = Bound(quantity="both", value="3", unit="s", certificate=Certificate(kind="sum", data={}), parts=(cut(), roofline()))
    assert check_bound(both, island()) == []
    assert "gives 3 s" in check_bound(msgspec.structs.replace(both, value="4"), island())[0].message
    assert "without parts" in check_bound(msgspec.structs.replace(both, parts=()), island())[0].message
    lie = msgspec.structs.replace(both, parts=(cut(leaving_Bps="1"), roofline()))
    assert "200 B/s leave" in check_bound(lie, island())[0].message
    mixed = msgspec.structs.replace(both, parts=(cut(), msgspec.structs.replace(roofline(), unit="bytes")))
    assert "adds bytes to s" in check_bound(mixed, island())[0].message
    memory = Bound(quantity="m", value="9", unit="bytes", certificate=Certificate(kind="memory", data={"needed_bytes": 9, "available_bytes": 5}))
    assert check_bound(memory, island()) == []
    fits = msgspec.structs.replace(memory, certificate=Certificate(kind="memory", data={"needed_bytes": 9, "available_bytes": 10}))
    assert "its own figures fit" in check_bound(fits, island())[0].message


METRIC = {"lengths": [["d0", "s", 1], ["s", "d0", 1]], "demand": "all-to-all", "ranks": 4, "devices": ["d0", "d1", "d2", "d3"], "size_bytes": 400}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": [["d0", "s", -1]]}, "no whole number >= 0"),
        ({"lengths": [["d0", "s", 1], ["d0", "s", 1]]}, "stated twice"),
        ({"lengths": [["d0", "x", 1]]}, "has no 'x'"),
        ({"lengths": []}, "no link has a length"),
        ({"lengths": [["d0", "s", 1]]}, "gives 3 s"),
        ({"demand": "all-reduce"}, "lengths bound all-to-all and permute"),
        ({"demand": "permute", "peers": ["d1"]}, "one rank, or none, per rank"),
        ({"demand": "permute", "peers": ["d1", "d0", "", "d9"]}, "one rank, or none, per rank"),
        ({"size_bytes": 800}, "gives 6 s"),
    ],
)
def test_a_lie_in_lengths_is_named(changes: dict[str, Any], words: str) -> None:
    def bound(data: dict[str, Any]) -> Bound:
        return Bound(quantity="time", value="2", unit="s", certificate=Certificate(kind="metric", data=data))

    assert check_bound(msgspec.structs.replace(bound(METRIC), value="3"), island()) == []  # 6 pairs of 100 bytes over 2 links of 100 B/s
    found = check_bound(bound(METRIC | changes), island())
    assert len(found) == 1 and found[0].status == "wrong" and words in found[0].message, found


LENGTHS = [["d0", "s", 3], *([f"d{i}", "s", 1] for i in (1, 2, 3)), *(["s", f"d{i}", 1] for i in range(4))]  # offer 1000 a second
PACKED = {"devices": ["d0", "d1", "d2", "d3"], "demand": "all-reduce", "size_bytes": 400}


def packed(value: str, lengths: list[list[Any]] = LENGTHS, **group: Any) -> Bound:
    data = {"lengths": lengths, "groups": [PACKED | group]}
    return Bound(quantity="time", value=value, unit="s", certificate=Certificate(kind="packing", data=data))


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        ({}, "24/5"),  # two trees of three edges, each the cheaper way round: 2
        ({"demand": "all-gather"}, "13/5"),  # to leave d0 costs 4, then 2 per further rank: 8 for its part, 6 for each other
        ({"demand": "reduce-scatter"}, "3"),  # to reach d0: 6, any other: 8
        ({"demand": "broadcast", "root": "d0"}, "16/5"),
        ({"demand": "reduce", "root": "d0"}, "12/5"),
        ({"demand": "scatter", "root": "d0"}, "6/5"),
        ({"demand": "gather", "root": "d0"}, "3/5"),
        ({"demand": "scatter", "root": "d0", "shard_bytes": [400, 0, 0, 0]}, "0"),
        ({"demand": "all-to-all"}, "3"),
        ({"demand": "permute", "peers": ["d1", "d0", "", ""]}, "12/5"),
    ],
)
def test_what_a_packing_proves(group: dict[str, Any], seconds: str) -> None:
    """By hand: d0's link into the switch is three long, all others one."""
    assert check_bound(packed(seconds, **group), island()) == []
    assert check_bound(packed("7", **group), island())[0].status == "wrong"


def test_a_packing_merges_switches_that_copy() -> None:
    assert check_bound(packed("6/5", demand="broadcast", root="d1", hosts={"s": "d1"}), island(multicast=True)) == []  # three edges of 1


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"demand": "gossip"}, "no rule for 'gossip'"),
        ({"demand": "permute", "peers": ["d1", "d0"]}, "a permutation needs a peer for every rank"),
        ({"devices": ["d0"]}, "two or more different devices"),
        ({"devices": ["d0", "d0"]}, "two or more different devices"),
        ({"devices": ["d0", "s"]}, "two or more different devices"),
        ({"size_bytes": -1}, "a negative size"),
        ({"shard_bytes": [100, 100, 100]}, "the shards do not add up"),
        ({"shard_bytes": [100, 100, 100, 101]}, "the shards do not add up"),
        ({"shard_bytes": [-100, 200, 200, 100]}, "the shards do not add up"),
        ({"hosts": {"x": "d0"}}, "hosts must merge switches with ranks"),
        ({"hosts": {"s": "d9"}}, "hosts must merge switches with ranks"),
    ],
)
def test_a_lie_in_a_packing_is_named(group: dict[str, Any], words: str) -> None:
    found = check_bound(packed("1", **group), island())
    assert len(found) == 1 and found[0].status == "wrong" and words in found[0].message, found


def test_other_lies_in_a_packing() -> None:
    assert "is merged with no rank" in check_bound(packed("1"), island(aggregate=True))[0].message
    assert "no link has a length" in check_bound(packed("1", lengths=[]), island())[0].message
    assert "stated twice" in check_bound(packed("1", lengths=[*LENGTHS, LENGTHS[0]]), island())[0].message
    assert "has no link d0 -> d1" in check_bound(packed("1", lengths=[["d0", "d1", 1]]), island())[0].message
    none = Bound(quantity="time", value="1", unit="s", certificate=Certificate(kind="packing", data={"lengths": LENGTHS, "groups": []}))
    assert "no collective is named" in check_bound(none, island())[0].message
    plain = island()
    one_way = replace(plain, links=tuple(x for x in plain.links if x.dst != "d2"))
    assert "no path from d0 to d2" in check_bound(packed("1", lengths=LENGTHS[:4]), one_way)[0].message


LATENCY = {"from": "d0", "to": "d2", "latency_s": "5/2000", "demand": "all-gather", "ranks": 4, "devices": ["d0", "d1", "d2", "d3"], "root": ""}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latency_s": "1/100"}, "the quickest path takes 1/400 s"),
        ({"to": "d0"}, "two different ranks"),
        ({"to": "s"}, "two different ranks"),
        ({"demand": "broadcast", "root": "d1"}, "d2 needs nothing of d0 in a broadcast"),
        ({"demand": "gather", "root": "d3"}, "d2 needs nothing of d0 in a gather"),
        ({"demand": "permute", "peers": ["d1", "d0", "", "d2"]}, "d2 needs nothing of d0 in a permute"),
        ({"demand": "all-gather", "shard_bytes": [0, 4, 4, 4]}, "d2 needs nothing of d0 in a all-gather"),
        ({"demand": "scatter", "root": "d0", "shard_bytes": [4, 4, 0]}, "not one per rank"),
    ],
)
def test_a_lie_in_a_latency_is_named(changes: dict[str, Any], words: str) -> None:
    plain = island()
    slow = replace(plain, links=tuple(replace(x, latency_s=0.001, library_latency_s=0.0005) for x in plain.links))

    def bound(data: dict[str, Any]) -> Bound:
        return Bound(quantity="time", value="1/400", unit="s", certificate=Certificate(kind="latency", data=data))

    assert check_bound(bound(LATENCY), slow) == []
    found = check_bound(bound(LATENCY | changes), slow)
    assert len(found) == 1 and found[0].status == "wrong" and words in found[0].message, found
    one_way = replace(slow, links=tuple(x for x in slow.links if x.dst != "d2"))
    assert "no path from d0 to d2" in check_bound(bound(LATENCY), one_way)[0].message
