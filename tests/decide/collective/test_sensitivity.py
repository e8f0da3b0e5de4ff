"""The bottleneck in words: figures against hand computation and against brute force over all cuts of the changed fabric."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import CollectiveProblem, collective_bound
from meshwright.decide.collective.bounds.sensitivity import find_bottleneck
from meshwright.fabric.edit import with_one_more, without
from meshwright.fabric.fabric import Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.report.bottleneck_text import explain_bottleneck
from meshwright.testing.fabrics import fabrics

GIB = 1 << 30


def explained(spec: str, op: str, **more):
    problem = CollectiveProblem.on(load_fabric(spec), op, GIB, **more)
    return explain_bottleneck(problem, collective_bound(problem))


def gains(data) -> dict[str, Fraction]:
    return {change["what"]: Fraction(change["gain"]) for change in data["changes"]}


def test_eight_nics_of_a_box():
    lines, data = explained("dgx-h100:16", "all-gather")
    assert lines[0] == "bottleneck: what box0 can receive: 8 NICs at 50 GB/s (box0/nic0 -> box0/gpu0); 400 GB/s in all"
    assert lines[1] == "  just as tight: 15 (box1, box2, box3, ...)"
    found = gains(data)
    assert found["one more NIC like box0/nic7, and one at each of the 15 others"] == Fraction(1, 8)
    assert found["one more NIC like box0/nic7 at box0 alone"] == 0
    assert found["NIC box0/nic7 down"] == Fraction(-1, 8)
    # twice: 800 GB/s into a box for 15/16 of the data; a GPU: 450 + 100 for 127/128 of it
    assert found["all NICs like it twice as fast"] == Fraction(550 * 128, 127) / Fraction(400 * 16, 15) - 1
    assert "  NIC box0/nic7 down: -12.5 % throughput" in lines and not any("no gain" in line for line in lines)
    assert data["complete"] and data["where"] == "box0" and not data["outward"] and len(data["tied"]) == 15


def test_one_gpu_of_a_mesh():
    _, data = explained("dgx1-v100", "all-gather")
    found = gains(data)
    assert len(data["tied"]) == 7
    assert found["one more link like box0/gpu0 <-> box0/gpu4, and one at each of the 7 others"] == Fraction(25, 150)
    assert found["link box0/gpu0 <-> box0/gpu4 down"] == Fraction(100, 150) - 1


def test_parts_of_an_all_reduce():
    lines, data = explained("dgx-h100:4", "all-reduce")
    found = gains(data)
    assert found["one more NIC like box0/nic7 at box0 alone"] == Fraction(1, 32)
    assert found["one more NIC like box0/nic7, and one at each of the 3 others"] == Fraction(1, 8)
    assert lines[0].startswith("bottleneck: the links into box0 and 3 more parts: 32 NICs at 50 GB/s")


def test_a_trunk_is_one_element_from_both_ends():
    lines, data = explained("two-islands:3", "broadcast")
    assert "what island0 can send: 1 x NET at 25 MB/s" in lines[0]
    assert gains(data)["one more link like island0/switch <-> island1/switch"] == 1
    down = next(c for c in data["changes"] if c["what"].endswith("down"))
    assert down["gain"] == "-1" and "no path from" in down["then"]


def test_broadcast_ties_the_root_and_the_receivers():
    _, data = explained("dgx-h100:4", "broadcast", root=9)
    assert {data["where"], *data["tied"]} == {"box0", "box1", "box2", "box3"}
    assert max(gains(data).values()) > 0 and Fraction(1, 8) in gains(data).values()


def test_latency_has_no_links():
    problem = CollectiveProblem.on(load_fabric("dgx-h100:4"), "all-gather", 128)
    bound = collective_bound(problem)
    lines, data = explain_bottleneck(problem, bound)
    assert bound.certificate.kind == "latency" and find_bottleneck(problem, bound) is None
    assert "faster links would not help at this size" in lines[0] and data["changes"] == []


def test_all_to_all_names_links():
    problem = CollectiveProblem.on(load_fabric("two-islands:2"), "all-to-all", GIB)
    lines, data = explain_bottleneck(problem, collective_bound(problem))
    assert data["kind"] in ("cut", "metric") and lines[0].startswith("bottleneck: ") and data["rate_Bps"] > 0


def test_no_time_no_changes_and_it_says_so():
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-gather", GIB)
    _, data = explain_bottleneck(problem, collective_bound(problem), effort_s=-1.0)
    assert data["changes"] == [] and not data["complete"]


def brute_force_s(fabric: Fabric, ranks: tuple[str, ...]) -> Fraction | None:
    """All-gather of GIB: the worst of all cuts; None when some rank cannot be reached."""
    worst = Fraction(0)
    names = fabric.actor_names
    for inside in product((False, True), repeat=len(names)):
        side = {name for name, here in zip(names, inside, strict=True) if here}
        within = sum(r in side for r in ranks)
        if 0 < within < len(ranks):
            leaving = sum(x.rate_Bps for x in fabric.links if x.src in side and x.dst not in side)
            if not leaving:
                return None
            worst = max(worst, Fraction(GIB * within, len(ranks)) / leaving)
    return worst


@settings(max_examples=60)
@given(fabrics(min_devices=2, max_devices=5, zero_latency=True), st.data())
def test_gains_are_those_of_all_cuts(fabric, data):
    problem = CollectiveProblem.on(fabric, "all-gather", GIB)
    before = brute_force_s(fabric, problem.ranks)
    _, facts = explain_bottleneck(problem, collective_bound(problem), effort_s=60)
    assert facts["complete"] and facts["changes"]
    for change in facts["changes"]:
        edit = change["edit"]
        if "add" in edit:
            changed = with_one_more(fabric, edit["add"])
        elif "without" in edit:
            changed = without(fabric, edit["without"])
        else:
            kind, rate = edit["twice"]
            factor = [2 if (x.kind, x.rate_Bps) == (kind, rate) else 1 for x in fabric.links]
            twice = tuple(Link(src=x.src, dst=x.dst, rate_Bps=n * x.rate_Bps) for n, x in zip(factor, fabric.links, strict=True))
            changed = Fabric(name="twice", devices=fabric.devices, switches=fabric.switches, links=twice)
        after = brute_force_s(changed, problem.ranks)
        assert Fraction(change["gain"]) == (-1 if after is None else before / after - 1)
        if "add" in edit or "twice" in edit:
            assert Fraction(change["gain"]) >= 0


@pytest.mark.parametrize("op", ["reduce-scatter", "gather", "scatter", "reduce", "permute"])
def test_every_operation_is_explained(op):
    lines, data = explained("dgx-a100:2", op)
    assert lines and data["complete"] and data["changes"]
