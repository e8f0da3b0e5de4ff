"""Fabrics changed: parts out, parts slower, one more; what a name stands for; what is refused."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import Disconnected, Infeasible, UnknownName, UsageError
from meshwright.fabric.edit import find_part, is_port, scaled, with_one_more, without
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.io.fabric.toml import fabric_toml, parse_fabric_toml
from meshwright.testing.fabrics import fabrics

GB = 10**9


def test_names_of_parts():
    fabric = load_fabric("dgx-h100:2")
    assert find_part(fabric, "12").actors == {"box1/gpu4"} == find_part(fabric, "box1/gpu4").actors
    nic = find_part(fabric, "box1/nic7")
    assert nic.actors == {"box1/nic7"} and len(nic.links) == 4
    box = find_part(fabric, "box1")
    assert len(box.actors) == 8 + 8 + 1 and len(box.links) == 2 * (8 + 8 + 8)
    one_way, both = find_part(fabric, "box0/nic0->ib"), find_part(fabric, "box0/nic0<->ib")
    assert not one_way.actors and one_way.links < both.links and (len(one_way.links), len(both.links)) == (1, 2)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("box0/nic9", "no device, switch or server 'box0/nic9'", "did you mean"),
        ("99", "no device, switch or server '99'", ""),
        ("", "no device, switch or server ''", "name a device"),
        ("box0/nic0->box0/gpu1", "has no link box0/nic0->box0/gpu1", "links of box0/nic0 go to box0/gpu0, ib"),
        ("box0/nic0->nowhere", "no device, switch or server 'nowhere'", ""),
    ],
)
def test_unknown_names(name, text, hint):
    with pytest.raises(UnknownName) as caught:
        find_part(load_fabric("dgx-h100:2"), name)
    assert text in caught.value.message and hint in caught.value.hint


def test_without_parts_keeps_the_rest_and_says_so():
    fabric = load_fabric("dgx-h100:2")
    left = without(fabric, ["box1/nic7", "box0/gpu3", "box0/nvswitch->box0/gpu0"])
    assert len(left.devices) == 15 and len(left.switches) == len(fabric.switches) - 1
    assert {(x.src, x.dst) for x in fabric.links} - {(x.src, x.dst) for x in left.links} == {
        ("box1/nic7", "ib"), ("ib", "box1/nic7"), ("box1/nic7", "box1/gpu7"), ("box1/gpu7", "box1/nic7"), ("box0/gpu3", "box0/nvswitch"),
        ("box0/nvswitch", "box0/gpu3"), ("box0/gpu3", "box0/nic3"), ("box0/nic3", "box0/gpu3"), ("box0/nvswitch", "box0/gpu0"),
    }  # fmt: skip
    assert left.name == "dgx-h100:2 without box1/nic7, box0/gpu3, box0/nvswitch->box0/gpu0"
    assert left.provenance[-1].source == "box1/nic7, box0/gpu3, box0/nvswitch->box0/gpu0: 2 actors, 9 links"
    assert parse_fabric_toml(fabric_toml(left)) == left  # it can be written and read


def test_without_too_much():
    fabric = load_fabric("laptop:2")
    with pytest.raises(Infeasible, match="no device of 'laptop:2' remains"):
        without(fabric, ["laptop"])
    with pytest.raises(UsageError, match="nothing is named"):
        without(fabric, [])
    with pytest.raises(UsageError, match="'cpu0' is named twice"):
        without(fabric, ["cpu0", "0"])
    with pytest.raises(Disconnected):
        without(fabric, ["loopback"]).require_connected()


def test_scaled_rates_round_down_and_take_the_smaller_factor():
    fabric = Fabric(
        name="f",
        devices=(Device(name="a"), Device(name="b")),
        links=(Link(src="a", dst="b", rate_Bps=101), Link(src="b", dst="a", rate_Bps=100)),
    )
    assert [x.rate_Bps for x in scaled(fabric, {"a": Fraction(1, 2)}).links] == [50, 50]
    assert [x.rate_Bps for x in scaled(fabric, {"a": Fraction(1, 2), "a->b": Fraction(1, 4)}).links] == [25, 50]
    assert scaled(fabric, {"a->b": Fraction(3, 2)}).name == "f with a->b at 3/2"
    with pytest.raises(UsageError, match="would carry less than 1 byte/s"):
        scaled(fabric, {"a": Fraction(1, 1000)})
    with pytest.raises(UsageError, match="must be > 0, got 0"):
        scaled(fabric, {"a": Fraction(0)})


def test_what_a_nic_is():
    assert [s.name for s in load_fabric("dgx-a100:2").switches if is_port(load_fabric("dgx-a100:2"), s.name)] == [
        f"box{b}/nic{i}" for b in range(2) for i in range(8)
    ]
    islands = load_fabric("two-islands")
    assert not any(is_port(islands, name) for name in islands.actor_names)


def test_one_more_nic_is_its_twin():
    fabric = load_fabric("dgx-h100:2")
    more = with_one_more(with_one_more(fabric, ["box1/nic7"]), ["box1/nic7"])
    assert [s.name for s in more.switches][-2:] == ["box1/nic7.2", "box1/nic7.3"] and len(more.links) == len(fabric.links) + 8
    assert {(x.src, x.dst, x.rate_Bps) for x in more.links if "nic7.2" in x.src + x.dst} == {
        ("box1/nic7.2", "ib", 50 * GB), ("ib", "box1/nic7.2", 50 * GB), ("box1/nic7.2", "box1/gpu7", 50 * GB), ("box1/gpu7", "box1/nic7.2", 50 * GB),
    }  # fmt: skip


def test_one_more_link_widens_a_bundle_or_doubles_a_cable():
    fabric = load_fabric("dgx1-v100")
    more = with_one_more(fabric, [("box0/gpu0", "box0/gpu1")])
    changed = [(a, b) for a, b in zip(fabric.links, more.links, strict=True) if a != b]
    assert [(b.kind, a.rate_Bps, b.rate_Bps) for a, b in changed] == [("NV3", 50 * GB, 75 * GB)] * 2
    islands = load_fabric("two-islands")
    doubled = with_one_more(islands, [("island0/switch", "island1/switch")])
    assert len(doubled.links) == len(islands.links) + 2 and doubled.links[-1].rate_Bps == 25_000_000
    for part in ("nowhere", ("island0/cpu0", "island1/cpu0")):
        with pytest.raises(UnknownName):
            with_one_more(islands, [part])


@given(fabrics(min_devices=2, max_devices=6), st.data())
def test_without_a_part_nothing_of_it_remains_and_all_else_does(fabric, data):
    name = data.draw(st.sampled_from([*fabric.actor_names, *(f"{x.src}->{x.dst}" for x in fabric.links)]))
    part = find_part(fabric, name)
    if len(fabric.devices) == 1 or not {d.name for d in fabric.devices} - part.actors:
        return
    left = without(fabric, [name])
    assert not part.actors & set(left.actor_names) and set(fabric.actor_names) - part.actors == set(left.actor_names)
    assert left.links == tuple(x for i, x in enumerate(fabric.links) if i not in part.links)
    half = scaled(fabric, {name: Fraction(1, 2)})
    assert [b.rate_Bps for b in half.links] == [a.rate_Bps // 2 if i in part.links else a.rate_Bps for i, a in enumerate(fabric.links)]
