"""The commands of a lab, read and walked by an independent interpreter (lab_network.py)."""

from __future__ import annotations

import ipaddress
import itertools
import socket
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_fabrics import PRESETS, SCALES, both, devices, fabrics, one_way_ring, parting_routes, preset
from lab_network import Network

from meshwright.errors import Disconnected, Infeasible, UnknownName, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.lab import impair
from meshwright.lab.commands import batches, build, relays, shell_text
from meshwright.lab.impair import Impairment, impairments, method_for
from meshwright.lab.planning import LabPlan, Options, plan_lab
from meshwright.lab.routes import find_routes, walk
from meshwright.lab.scaling import MIN_RATE_Bps, burst_bytes, load_of, merge_parallel, parse_scale, rehearsed, segment_bytes
from meshwright.lab.wiring import MAX_NAMESPACES, wire


@pytest.fixture(autouse=True)
def without_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned must not depend on the kernel on which the tests run."""
    monkeypatch.setattr("meshwright.lab.planning.has_netem", lambda path: False)
    monkeypatch.setattr("meshwright.lab.planning.has_priorities", lambda path: True)
    monkeypatch.setattr("meshwright.lab.planning.tool_path", lambda: "/usr/sbin")


def planned(fabric: Fabric, scale: Fraction | int = 1, **options: object) -> LabPlan:
    return plan_lab(fabric, "test", Options(scale=Fraction(scale), **options))  # type: ignore[arg-type]


def check_network(plan: LabPlan) -> None:
    """Every link is shaped once, as the fabric says; nothing else passes; every pair of devices takes the fabric's route."""
    network = Network(plan.shell_text())
    fabric, wiring = plan.fabric, plan.wiring
    shaped = {(n, i): s for n, space in network.spaces.items() for i, s in space.shapers.items()}
    assert all(len(s) == 1 for s in shaped.values())
    link_at: dict[tuple[str, str], int] = {}
    for index, link in enumerate(fabric.links):
        _, end = wiring.exit_of[index]
        place = (wiring.namespaces[end.actor], end.interface)
        assert place not in link_at
        link_at[place] = index
        shaper = shaped[place][0]
        assert shaper["kind"] == "tbf" and shaper["rate"] == f"{link.rate_Bps}bps" and shaper["burst"] == f"{link.burst_bytes}b"
        assert int(shaper["limit"][:-1]) >= link.burst_bytes + 65_536
        queues = network.spaces[place[0]].below[place[1]]
        assert sum(x.startswith("class ") for x in queues) == 2 or "netem" in queues[0]
        other = fabric.actor_of[link.dst]
        assert network.cables[place][0] == wiring.namespaces[other]  # the cable leads where the link does
    assert set(network.cables) == set(shaped)  # both ends of every cable
    assert all(shaped[place][0]["kind"] == "blackhole" for place in set(shaped) - set(link_at))
    for src, dst in itertools.permutations(range(len(fabric.devices)), 2):
        walked = network.bridged_path if wiring.style == "bridged" else network.routed_path
        path = walked(wiring.address(src), wiring.address(dst))
        assert [link_at[place] for place in path] == list(fabric.route(src, dst))
    check_names(plan, network)


def check_names(plan: LabPlan, network: Network) -> None:
    wiring = plan.wiring
    macs = [mac for space in network.spaces.values() for i, mac in space.interfaces.items() if i not in ("br0", "id0")]
    assert len(set(macs)) == len(macs)
    assert all(m.startswith("02:") for m in macs)  # locally administered
    addresses = [a for space in network.spaces.values() for found in space.addresses.values() for a in found]
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        socket.inet_aton(address.partition("/")[0])
        assert address.startswith("10.")
    nets = [ipaddress.ip_interface(a).network for a in addresses if a.endswith("/30")]
    assert all(nets.count(x) == 2 for x in nets)  # a network of its own for every cable
    hosts = [wiring.hostname(a) for a in range(len(plan.fabric.actor_names))]
    assert len(set(hosts)) == len(hosts)
    assert all(h.replace("-", "").isalnum() and len(h) <= 60 for h in hosts)


@pytest.mark.parametrize(("name", "chosen", "scale"), PRESETS)
def test_presets_are_built_as_they_are(name: str, chosen: str | None, scale: int) -> None:
    plan = planned(preset(name, chosen), scale, force=True)
    check_network(plan)


@given(fabrics(), SCALES, st.booleans())
def test_random_fabrics_are_built_as_they_are(fabric: Fabric, scale: Fraction, offload: bool) -> None:
    check_network(planned(fabric, scale, offload=offload, force=True))


def test_styles() -> None:
    styles = {name: planned(preset(name, chosen), scale, force=True).wiring.style for name, chosen, scale in PRESETS}
    assert {n.partition(":")[0] for n, s in styles.items() if s == "bridged"} == {"star", "two-islands", "lan", "fat-tree", "laptop"}


def test_pairs_whose_routes_part_get_rules_of_their_own() -> None:
    plan = planned(parting_routes())
    assert plan.routes is not None
    assert len(plan.routes.special) == 1
    assert " rule add from " in plan.shell_text()
    check_network(plan)


@given(fabrics())
def test_routes_walk_like_the_fabric(fabric: Fabric) -> None:
    wiring = wire(merge_parallel(fabric), "x-")
    routes = find_routes(wiring)
    for src, dst in itertools.permutations(range(len(fabric.devices)), 2):
        assert walk(wiring, routes, src, dst) == list(wiring.fabric.route(src, dst))


def test_a_hole_in_the_routes_is_seen() -> None:
    wiring = wire(one_way_ring(), "x-")
    routes = find_routes(wiring)
    short = type(routes)(tuple(h for h in routes.main if h.actor != 1), routes.special)
    with pytest.raises(LookupError, match="end at 1"):
        walk(wiring, short, 0, 2)


def test_one_way_links_have_one_open_end() -> None:
    text = planned(one_way_ring()).shell_text()
    assert text.count(" blackhole") == 3
    assert text.count(" tbf ") == 3


def test_the_whole_dry_run_of_a_pair() -> None:
    """A golden text of the smallest star: what a person pastes."""
    lines = planned(Fabric(name="x", devices=devices(1), switches=(preset("star:1").switches[0],), links=both("d0", "hub", 12_500_000))).shell_text()
    assert lines.splitlines() == [
        "unshare --mount --net --pid --uts --fork --kill-child --mount-proc --propagation slave bash   # all below is typed inside",
        "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns",
        "ip netns add mw-test-d0",
        "ip netns add mw-test-s0",
        "ip link add name eth0 netns mw-test-d0 address 02:4d:00:00:00:01 mtu 1500 type veth "
        "peer name to-d0 netns mw-test-s0 address 02:4d:00:00:00:02 mtu 1500",
        "ip netns exec mw-test-d0 sysctl -qw net.ipv4.tcp_congestion_control=reno",
        "ip netns exec mw-test-d0 sysctl -qw net.ipv4.tcp_slow_start_after_idle=0",
        "ip -n mw-test-d0 link set lo up",
        "ip -n mw-test-d0 link set eth0 gso_max_size 12500",
        "ip -n mw-test-d0 link set eth0 addrgenmode none",
        "ip -n mw-test-d0 link set eth0 up",
        "ip -n mw-test-d0 addr add 10.77.0.1/15 dev eth0",
        "ip -n mw-test-s0 link set lo up",
        "ip -n mw-test-s0 link add br0 address 02:4e:00:00:00:00 mtu 1500 type bridge",
        "ip -n mw-test-s0 link set br0 addrgenmode none",
        "ip -n mw-test-s0 link set br0 up",
        "ip -n mw-test-s0 addr add 10.76.0.1/15 dev br0",
        "ip -n mw-test-s0 link set to-d0 addrgenmode none",
        "ip -n mw-test-s0 link set to-d0 up",
        "ip -n mw-test-s0 link set to-d0 master br0",
        "tc -n mw-test-d0 qdisc add dev eth0 root handle 1: tbf rate 12500000bps burst 50000b limit 2550000b",
        *queues("mw-test-d0 eth0"),
        "tc -n mw-test-s0 qdisc add dev to-d0 root handle 1: tbf rate 12500000bps burst 50000b limit 2550000b",
        *queues("mw-test-s0 to-d0"),
    ]


def queues(place: str) -> list[str]:
    space, interface = place.split()
    return [
        f"tc -n {space} qdisc replace dev {interface} parent 1:1 handle 2: htb default 2",
        f"tc -n {space} class add dev {interface} parent 2: classid 2:1 htb rate 30gbit burst 1mb cburst 1mb quantum 60000 prio 0",
        f"tc -n {space} qdisc add dev {interface} parent 2:1 handle 21: bfifo limit 2550000",
        f"tc -n {space} class add dev {interface} parent 2: classid 2:2 htb rate 30gbit burst 1mb cburst 1mb quantum 60000 prio 1",
        f"tc -n {space} qdisc add dev {interface} parent 2:2 handle 22: bfifo limit 2550000",
        f"tc -n {space} filter add dev {interface} parent 2: protocol ip prio 1 u32 "
        "match u8 0x06 0xff at 9 match u16 0x0034 0xffff at 2 match u8 0x10 0xff at 33 flowid 2:1",
    ]


def test_kernels_without_priorities_get_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.lab.planning.has_priorities", lambda path: False)
    plan = planned(preset("star:2"), 100)
    assert "htb" not in plan.shell_text()
    assert any("acknowledgements wait" in note for note in plan.notes)


def test_batches_keep_the_order() -> None:
    commands = build(planned(preset("dgx1-v100:1", "0-4"), 8000).wiring, None)
    again = [(tool, space, words) for tool, space, lines in batches(commands) for words in lines]
    assert again == [(c.tool, c.namespace, c.words) for c in commands]


def test_kernels_without_ipv6_are_not_told_about_it() -> None:
    wiring = planned(preset("star:2"), 100).wiring
    assert "addrgenmode" in shell_text(build(wiring, None))
    assert "addrgenmode" not in shell_text(build(wiring, None, ipv6=False))


# ---- scaling -----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 10**11))
def test_buckets_hold_a_tick_and_four_super_packets(rate: int) -> None:
    assert burst_bytes(rate) >= rate * 4 // 1000
    assert burst_bytes(rate) >= 4 * segment_bytes(rate)
    assert 8192 <= segment_bytes(rate) <= 65_536
    assert burst_bytes(rate) <= max(4 * 8192, -(-rate * 4 // 1000), 4 * 65_536)


@given(fabrics())
def test_merging_keeps_every_cut(fabric: Fabric) -> None:
    merged = merge_parallel(fabric)
    for a, b in itertools.permutations(fabric.actor_names, 2):
        before = sum(x.rate_Bps for x in fabric.links if (x.src, x.dst) == (a, b))
        assert sum(x.rate_Bps for x in merged.links if (x.src, x.dst) == (a, b)) == before
    keys = [(x.src, x.dst, x.latency_s) for x in merged.links]
    assert len(set(keys)) == len(keys)


def test_a_stated_bucket_is_scaled_too() -> None:
    fabric = Fabric(name="x", devices=devices(2), links=tuple(Link(src=a, dst=b, rate_Bps=10**8, burst_bytes=10**7) for a, b in (["d0", "d1"], ["d1", "d0"])))  # noqa: E501
    assert {x.burst_bytes for x in rehearsed(fabric, Fraction(10), cores=2).links} == {10**6}


@pytest.mark.parametrize("cores", [1.0, 2.0, 16.0])
def test_what_the_processors_cannot_carry_is_refused_with_a_scale_that_helps(cores: float) -> None:
    fabric = preset("dgx-h100:1")
    with pytest.raises(Infeasible) as caught:
        rehearsed(fabric, Fraction(1), cores=cores)
    assert caught.value.data["sum_Bps"] == 8 * 450 * 10**9
    assert f"{8 * 450 * 8} Gbit/s" in caught.value.message.replace("2.88e+04", "28800")
    scale = parse_scale(caught.value.hint.rpartition(" ")[2])
    assert not load_of(rehearsed(fabric, scale, cores=cores), cores).heavy
    assert load_of(rehearsed(fabric, scale / 6, cores=cores, force=True), cores).heavy  # and it is not needlessly large
    assert rehearsed(fabric, Fraction(1), cores=cores, force=True).links


def test_heavy_fabrics_come_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from meshwright.run.machine import pacing

    two = replace(pacing.machine_facts(), cores=2.0)
    monkeypatch.setattr("meshwright.lab.planning.machine_facts", lambda: two)
    assert any("8 Gbit/s" in note for note in planned(preset("two-islands:4")).notes)
    assert not planned(preset("two-islands:4"), 4).notes


def test_links_that_get_too_slow_are_refused() -> None:
    with pytest.raises(Infeasible, match=r"island0/switch->island1/switch would pass 2500 B/s") as caught:
        planned(preset("two-islands:2"), 10_000)
    assert caught.value.data["least_Bps"] == MIN_RATE_Bps


def test_unconnected_and_too_large_fabrics_are_refused() -> None:
    with pytest.raises(Disconnected):
        planned(Fabric(name="x", devices=devices(2)))
    with pytest.raises(Infeasible, match=f"at most {MAX_NAMESPACES}"):
        planned(preset("star:600"), 10_000)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1/0", "nan", "inf", "9" * 40, "1e99999999"])
def test_bad_scales(text: str) -> None:
    with pytest.raises(UsageError, match="--scale"):
        parse_scale(text)


def test_good_scales() -> None:
    assert [parse_scale(x) for x in ("8000", "2.5", "1/4", "1e3")] == [8000, Fraction(5, 2), Fraction(1, 4), 1000]


@pytest.mark.parametrize("mtu", [0, 1279, 9001])
def test_bad_mtu(mtu: int) -> None:
    with pytest.raises(UsageError, match="--mtu"):
        planned(preset("star:2"), 100, mtu=mtu)


# ---- delay and loss ----------------------------------------------------------------------------------------------------
def slow_pair(latency_s: float = 0.005, rate_Bps: int = 10**6) -> Fabric:
    return Fabric(name="slow", devices=devices(2), links=both("d0", "d1", rate_Bps, latency_s))


def test_small_latencies_are_left_out_and_large_ones_made() -> None:
    assert impairments(preset("two-islands:2")) == {}
    assert impairments(slow_pair()) == {0: Impairment(delay_s=0.005), 1: Impairment(delay_s=0.005)}
    assert impairments(slow_pair(), delay=False) == {}
    assert impairments(slow_pair(), loss={"d0->d1": 0.5})[0] == Impairment(delay_s=0.005, loss=0.5)


def test_relayed_cables_are_pairs_of_taps_with_one_relay() -> None:
    plan = planned(slow_pair())
    check_network(plan)
    assert plan.helpers == tuple(relays(plan.wiring))
    text = plan.shell_text()
    assert text.count("tuntap add") == 2 and " veth " not in text
    assert '"delay_s": [0.005, 0.005]' in text
    assert any("relay" in note for note in plan.notes)
    assert any("--no-delay" in note for note in planned(slow_pair(), delay=False).notes)


def test_with_netem_the_kernel_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.lab.planning.has_netem", lambda path: True)
    plan = planned(slow_pair(), loss={"d0->d1": 0.01})
    check_network(plan)
    assert not plan.helpers
    lines = [x for x in plan.shell_text().splitlines() if "netem" in x]
    assert [x.partition("netem ")[2].rpartition(" limit ")[0] for x in lines] == ["delay 5000us loss 1.000000%", "delay 5000us"]
    assert all("parent 1:1 handle 2:" in x for x in lines)


@pytest.mark.parametrize(
    ("fabric", "loss", "words"),
    [
        (slow_pair(rate_Bps=impair.MAX_RELAY_Bps + 1), {}, r"delay on d0->d1 .*sch_netem"),
        (slow_pair(0.0, impair.MAX_LOSSY_RELAY_Bps + 1), {"d0->d1": 0.1}, r"loss on d0->d1 .*sch_netem"),
        (
            Fabric(name="many", devices=devices(4), links=tuple(x for i in range(3) for x in both(f"d{i}", f"d{i + 1}", impair.MAX_RELAY_Bps, 0.01))),
            {}, r"all relayed links have",
        ),
    ],
)  # fmt: skip
def test_what_neither_way_can_do_is_refused(fabric: Fabric, loss: dict[str, float], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        method_for(fabric, impairments(fabric, loss=loss), netem=False)
    assert caught.value.data["missing"] == "sch_netem"
    assert method_for(fabric, impairments(fabric, loss=loss), netem=True) == "netem"


def test_bad_losses() -> None:
    for value in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="loss of d0->d1"):
            impairments(slow_pair(), loss={"d0->d1": value})
    with pytest.raises(UnknownName):
        impairments(slow_pair(), loss={"d0->d7": 0.1})
    with pytest.raises(UnknownName, match="no link"):
        impairments(Fabric(name="x", devices=(Device(name="a"),)), loss={"a": 0.1})
