"""The drawing: well-formed, complete, nothing on top of each other, texts escaped."""

from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.report.fabric_matrix import cells, matrix_text, rates, summary_text
from meshwright.report.fabric_svg import MAX_DRAWN_DEVICES, NODE_H, NODE_W, fabric_svg
from meshwright.testing.fabrics import fabrics

NS = "{http://www.w3.org/2000/svg}"


def parts(fabric):
    """(nodes name -> (x, y, w, h), lines, texts, size) of the drawing."""
    root = ElementTree.fromstring(fabric_svg(fabric))
    nodes = {}
    for group in root.iter(f"{NS}g"):
        title, rect = group.find(f"{NS}title"), group.find(f"{NS}rect")
        if title is not None:
            nodes[title.text] = tuple(float(rect.get(k)) for k in ("x", "y", "width", "height"))
    lines = [x for x in root.iter(f"{NS}line") if x.find(f"{NS}title") is not None]
    return nodes, lines, [x.text for x in root.iter(f"{NS}text")], (float(root.get("width")), float(root.get("height")))


def sound(fabric, devices=None):
    nodes, lines, _, (width, height) = parts(fabric)
    expected = set(fabric.actor_names) if devices is None else set(devices)
    assert expected <= set(nodes)
    for (a, one), (b, two) in combinations(nodes.items(), 2):
        apart = abs(one[0] - two[0]) >= NODE_W or abs(one[1] - two[1]) >= NODE_H
        assert apart, (a, b)
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in nodes.values())
    return nodes, lines


SPECS = ["laptop:1", "laptop:20", "two-islands", "dgx1-v100", "dgx1-v100:2", "ndv2:3?sketch=1", "dgx2:2", "dgx-a100:2", "dgx-h100:9?net=spine"]


@pytest.mark.parametrize("spec", [*SPECS, "mi250", "mi250:2?net=rails"])
def test_presets_are_drawn_without_overlap(spec):
    fabric = load_fabric(spec)
    _, lines = sound(fabric)
    assert len(lines) == len({frozenset((x.src, x.dst)) for x in fabric.links})


@settings(max_examples=50)
@given(fabrics(max_devices=7))
def test_any_fabric_is_drawn_and_every_link_has_its_numbers(fabric):
    _, lines = sound(fabric)
    tips = [row for line in lines for row in line.find(f"{NS}title").text.split("\n")]
    assert sorted(tip.partition(":")[0] for tip in tips) == sorted(f"{x.src} -> {x.dst}" for x in fabric.links)
    arrows = sum(line.get("marker-end") is not None for line in lines)
    ends = {(x.src, x.dst) for x in fabric.links}
    assert arrows == sum((b, a) not in ends for a, b in ends)


def test_names_are_escaped():
    evil = '<script>"&'
    fabric = Fabric(
        name=evil,
        devices=(Device(name=evil, group="<g>"), Device(name="b", group="<g>")),
        switches=(Switch(name="]]>", group="&"),),
        links=(Link(src=evil, dst="b", rate_Bps=5, kind="<k>"),),
    )
    nodes, _, texts, _ = parts(fabric)
    assert evil in nodes and "]]>" in nodes and evil in texts and "<g>" in texts and any(t.startswith("<k>:") for t in texts)
    assert "<script" not in fabric_svg(fabric)


def test_widths_follow_rates_and_rates_are_written():
    fabric = load_fabric("two-islands")
    _, lines, texts, _ = parts(fabric)
    width = {line.find(f"{NS}title").text.split(":")[0]: float(line.get("stroke-width")) for line in lines}
    assert width["island0/switch -> island1/switch"] == 1 < width["island0/cpu0 -> island0/switch"] == 6
    assert "25 MB/s" in texts and "125 MB/s" in texts


def test_a_big_fabric_is_cut_at_whole_servers_and_says_so():
    fabric = load_fabric("dgx-h100:64")
    nodes, _, texts, _ = parts(fabric)
    assert sum(name in nodes for name in (d.name for d in fabric.devices)) == MAX_DRAWN_DEVICES
    assert any(t and f"{512 - MAX_DRAWN_DEVICES} more devices are not drawn" in t for t in texts)
    lonely = Fabric(name="x", devices=tuple(Device(name=f"d{i}") for i in range(300)))
    assert len(parts(lonely)[0]) == MAX_DRAWN_DEVICES


def test_equal_fabrics_give_equal_drawings():
    assert fabric_svg(load_fabric("mi250:2")) == fabric_svg(load_fabric("mi250:2"))


@settings(max_examples=50)
@given(fabrics(max_devices=6, connected=False) | fabrics(max_devices=6))
def test_matrix_agrees_with_the_routes(fabric):
    n = len(fabric.devices)
    kinds, widths = cells(fabric, n), rates(fabric, n)
    for a in range(n):
        for b in range(n):
            reached = a != b and b in fabric.reachable(a)
            assert (kinds[a][b] in ("X", "-")) == (widths[a][b] is None) == (not reached)
            if reached:
                route = fabric.route(a, b)
                assert widths[a][b] == min(fabric.links[x].rate_Bps for x in route)
                assert kinds[a][b].endswith("*") == any(fabric.link_ends[x][1] < n for x in route[:-1])
    lines = matrix_text(fabric, n).splitlines()
    starts = {line.index(d.name) for line, d in zip(lines[1 : n + 1], fabric.devices, strict=True)}
    assert starts == {lines[0].index("Device")}  # columns are aligned
    connected = all(set(range(n)) <= set(fabric.reachable(a)) for a in range(n))
    assert ("connected yes" in summary_text(fabric)) == connected
