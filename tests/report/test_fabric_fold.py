"""Folding: nothing is lost but what is alike, and what stands for a link is like it."""

from collections import Counter

import pytest
from hypothesis import given, settings

from meshwright.io.fabric.name import load_fabric
from meshwright.report.fabric_fold import drawn, fold, fold_text
from meshwright.report.fabric_svg import arrangement
from meshwright.testing.fabrics import fabrics


def sound(fabric, found):
    groups = {d.group for d in fabric.devices} | {s.group for s in fabric.switches}
    assert sorted(g for kind in found.kinds for g in kind) == sorted(groups - {""})
    assert len(found.stands_for) == len(fabric.links)
    for link, k in zip(fabric.links, found.stands_for, strict=True):
        if k >= 0:
            like = found.fabric.links[k]
            assert (like.kind, like.rate_Bps, like.latency_s) == (link.kind, link.rate_Bps, link.latency_s)


@settings(max_examples=40)
@given(fabrics(max_devices=7))
def test_what_stands_for_a_link_is_like_it(fabric):
    for least in (1, len(fabric.devices) + 1):
        sound(fabric, fold(fabric, least))
    assert fold_text(fabric)


@pytest.mark.parametrize(
    ("spec", "kinds", "devices", "alone"),  # links that nothing stands for: the ways into other servers' own switches, and between servers
    [("dgx-h100:12?net=spine", 1, 8, 0), ("h100-a100:5", 2, 16, 0), ("dgx-h100:12?net=trunk", 1, 8, 0), ("tpu-v5p:128", 1, 4, 128 * 4),
     ("gh200:70", 1, 1, 0)],
)
def test_alike_servers_are_one(spec, kinds, devices, alone):
    fabric = load_fabric(spec)
    found = drawn(fabric)
    sound(fabric, found)
    assert (len(found.kinds), len(found.fabric.devices)) == (kinds, devices) and Counter(found.stands_for)[-1] == alone
    assert set(arrangement(found.fabric).places) == set(found.fabric.actor_names)
    assert sum(kind in d.group for kind in (" alike",) for d in found.fabric.devices) == devices


def test_a_server_that_differs_stands_alone_and_small_fabrics_are_whole():
    lame = load_fabric("dgx-h100:12", ",".join(str(i) for i in range(96) if i != 17))
    assert sorted(map(len, fold(lame, 1).kinds)) == [1, 11]
    small = load_fabric("dgx-h100:8")
    assert drawn(small).fabric is small
