"""Fabric: what is refused, views, parts, and routing against the definition by brute force."""

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import Disconnected, UnknownName, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.testing.fabrics import fabrics


def build(devices, switches, links):
    """links: (src, dst, rate)."""
    return Fabric(
        name="t",
        devices=tuple(Device(name=x) for x in devices.split()),
        switches=tuple(Switch(name=x) for x in switches.split()),
        links=tuple(Link(src=a, dst=b, rate_Bps=r) for a, b, r in links),
    )


def best_by_definition(fabric, src, dst):
    """Enumerate every path without repeated actors; take the smallest key of the definition."""
    best = None
    stack = [(src, (), frozenset([src]))]
    while stack:
        at, path, seen = stack.pop()
        if at == dst:
            through = sum(fabric.link_ends[x][0] < len(fabric.devices) for x in path[1:])
            key = (through, len(path), -min(fabric.links[x].rate_Bps for x in path), path)
            best = key if best is None or key < best else best
            continue
        for link, (tail, head) in enumerate(fabric.link_ends):
            if tail == at and head not in seen:
                stack.append((head, (*path, link), seen | {head}))
    return best and best[3]


@given(fabrics(max_devices=5), st.booleans())
def test_route_is_the_definition(fabric, shuffle):
    if shuffle:  # other link numbers, same fabric
        fabric = replace(fabric, links=fabric.links[::-1])
    for src in range(len(fabric.actor_names)):
        for dst in range(len(fabric.actor_names)):
            if src != dst:
                expected = best_by_definition(fabric, src, dst)
                if expected is None:
                    with pytest.raises(Disconnected):
                        fabric.route(src, dst)
                else:
                    assert fabric.route(src, dst) == expected


@st.composite
def dense(draw):
    """Few actors, many links, few rates: ties everywhere."""
    devices = [f"d{i}" for i in range(draw(st.integers(1, 3)))]
    switches = [f"s{i}" for i in range(draw(st.integers(0, 4)))]
    pairs = [(a, b) for a in devices + switches for b in devices + switches if a != b]
    links = draw(st.lists(st.tuples(st.sampled_from(pairs), st.sampled_from([1, 2])), max_size=16)) if pairs else []
    return build(" ".join(devices), " ".join(switches), [(a, b, r) for (a, b), r in links])


@settings(max_examples=400)
@given(dense(), st.sampled_from([1, 2, 64]))
def test_route_is_the_definition_with_many_ties(fabric, few):
    """`few` routes of a source are found one by one, more on its paths to all actors."""
    fabric._router.few = few
    for src in range(len(fabric.actor_names)):
        for dst in range(len(fabric.actor_names)):
            if src != dst:
                assert fabric._router.route(src, dst) == best_by_definition(fabric, src, dst)


def test_narrower_half_way_but_equal_in_the_end_and_smaller_numbers_wins():
    # a-s1 (5) and a-s2 (9), then both meet in s3 and leave over a link of 3: widths tie at 3, so the numbers decide.
    fabric = build("a b", "s1 s2 s3", [("a", "s1", 5), ("a", "s2", 9), ("s1", "s3", 9), ("s2", "s3", 9), ("s3", "b", 3)])
    assert fabric.route(0, 1) == (0, 2, 4)


def test_a_longer_way_through_switches_beats_a_shorter_one_through_a_device():
    fabric = build("a b c", "s1 s2 s3", [("a", "c", 9), ("c", "b", 9), ("a", "s1", 1), ("s1", "s2", 1), ("s2", "s3", 1), ("s3", "b", 1)])
    assert fabric.route(0, 1) == (2, 3, 4, 5)


def test_route_to_itself_is_empty():
    assert build("a", "", []).route(0, 0) == ()


def test_long_chains_do_not_overflow_the_stack():
    n = 3000
    names = [f"s{i}" for i in range(n)]
    chain = ["a", *names, "b"]
    fabric = build("a b", " ".join(names), [(x, y, 1) for x, y in pairwise(chain)])
    assert fabric.route(0, 1) == tuple(range(n + 1))
    devices = build(" ".join(chain), "", [(x, y, 1) for x, y in pairwise(chain)])
    assert devices.route(0, n + 1) == tuple(range(n + 1))


@given(fabrics(max_devices=6, connected=False) | fabrics(max_devices=6))
def test_reachable_and_connected_agree_with_networkx(fabric):
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(len(fabric.actor_names)))
    graph.add_edges_from(fabric.link_ends)
    for src in range(len(fabric.actor_names)):
        assert set(fabric.reachable(src)) == {src} | nx.descendants(graph, src)
    devices = set(range(len(fabric.devices)))
    connected = all(devices <= set(fabric.reachable(d)) for d in devices)
    if connected:
        fabric.require_connected()
        return
    with pytest.raises(Disconnected) as caught:
        fabric.require_connected()
    inside, outside = ({fabric.actor_of[x] for x in caught.value.data[k]} for k in ("from", "to"))
    assert inside | outside == devices and inside and outside
    assert not any(head in outside for d in inside for head in nx.descendants(graph, d))
    assert caught.value.exit_code == 3


def test_no_path_names_both_ends():
    with pytest.raises(Disconnected, match="no path from b to a") as caught:
        build("a b", "", [("a", "b", 1)]).route(1, 0)
    assert caught.value.data["reachable"] == ["b"]


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ("a a", [], r"t: devices\[1\].name: 'a' is taken"),
        ("a s", [], r"t: switches\[0\].name: 's' is taken"),
        ("a b", [("a", "b", 0)], r"t: links\[0\].rate_Bps: must be a whole number > 0, got 0"),
        ("a b", [("a", "b", 1), ("a", "b", 1.5)], r"t: links\[1\].rate_Bps: .* got 1.5"),
        ("a b", [("a", "c", 1)], r"t: links\[0\].dst: no device or switch is called 'c'"),
        ("a b", [("c", "b", 1)], r"t: links\[0\].src"),
        ("a b", [("a", "a", 1)], r"t: links\[0\].dst: .*different actors"),
    ],
)
def test_what_is_refused(devices, links, message):
    with pytest.raises(UsageError, match=message):
        build(devices, "s", links)


@pytest.mark.parametrize("field", ["latency_s", "library_latency_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_latencies_are_finite(field, value):
    with pytest.raises(UsageError, match=rf"links\[0\].{field}"):
        Fabric(name="t", devices=(Device(name="a"), Device(name="b")), links=(Link(src="a", dst="b", rate_Bps=1, **{field: value}),))


def test_an_empty_name_is_refused():
    with pytest.raises(UsageError, match=r"devices\[0\].name: is empty"):
        Fabric(name="t", devices=(Device(name=""),))


def test_views():
    fabric = build("a b", "s", [("a", "s", 1), ("s", "b", 2), ("a", "s", 3)])
    assert fabric.out_links == ((0, 2), (), (1,))
    assert fabric.in_links == ((), (1,), (0, 2))
    assert fabric.device("b").name == "b"
    with pytest.raises(UnknownName, match="no device 's'"):
        fabric.device("s")


def test_subset_keeps_switches_and_what_joins_the_rest():
    fabric = build("a b c", "s", [("a", "s", 1), ("s", "b", 2), ("c", "s", 3), ("a", "c", 4)])
    part = fabric.subset(["c", 0])
    assert [d.name for d in part.devices] == ["a", "c"]
    assert [x.rate_Bps for x in part.links] == [1, 3, 4]
    assert fabric.subset([0, 1, 2]) == fabric
    for wrong in ([3], [-1], ["s"], ["z"], []):
        with pytest.raises(UsageError):
            fabric.subset(wrong)
