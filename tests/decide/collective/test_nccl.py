"""NCCL's choice: the model's cells by hand, figures its users report, options, refusals; the schedule that stands for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from classic_oracle import assert_right, hub
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.decide.collective import OPERATIONS, CollectiveProblem
from meshwright.decide.collective.nccl.model import Channels, NcclTopology, changes, choices, parse_list, predict, topology_of
from meshwright.decide.collective.nccl.strategy import Nccl
from meshwright.decide.collective.nccl.tables import ALGORITHMS, PROTOCOLS
from meshwright.errors import Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric

RNG = np.random.default_rng


def of(name: str, **more: str) -> NcclTopology:
    fabric = load_fabric(name)
    return topology_of(fabric, [d.name for d in fabric.devices], **more)


def cell(t: NcclTopology, op: str, size: int, algorithm: str, protocol: str) -> tuple[float, float, float]:
    found = next(c for c in predict(t, op, size) if (c.algorithm, c.protocol) == (algorithm, protocol))
    assert found.time_us is not None and found.latency_us is not None and found.bandwidth_GBps is not None, found.why
    return found.time_us, found.latency_us, found.bandwidth_GBps


# ---- cells, computed by hand from the published formulas -------------------------------------------------------------------
def test_cells_of_one_a100_box() -> None:
    """12 channels of 20 GB/s, 8 ranks: 240 GB/s on the bus."""
    t = of("dgx-a100:1")
    assert t.ring == Channels(count=12, intra_GBps=20.0, inter_GBps=20.0) and (t.arch, t.intra, t.nvls) == ("ampere", "nvlink", None)
    size = 1 << 20
    time, latency, bandwidth = cell(t, "all-reduce", size, "ring", "Simple")
    assert latency == pytest.approx(8.4 + 14 * 3.4) and bandwidth == pytest.approx(240 * 8 / 14)
    assert time == pytest.approx(latency + size / 1000 / bandwidth)
    _, latency, bandwidth = cell(t, "all-reduce", size, "ring", "LL")
    assert latency == pytest.approx(6.6 + 14 * 0.6) and bandwidth == pytest.approx(87.7 * 8 / 14)
    _, latency, bandwidth = cell(t, "all-gather", size, "ring", "LL128")
    assert latency == pytest.approx(14 + 7 * 1.9) and bandwidth == pytest.approx(240 * 0.92 * 8 / 7)
    _, latency, bandwidth = cell(t, "all-reduce", size, "tree", "LL128")
    assert latency == pytest.approx(14 + 2 * 7 * 1.25) and bandwidth == pytest.approx(240 * 0.92 * 7 / 9 / 2 * 0.6)
    _, latency, bandwidth = cell(t, "broadcast", size, "ring", "Simple")
    assert latency == pytest.approx(8.4 + 3.4) and bandwidth == pytest.approx(240.0)


def test_cells_of_two_h100_boxes() -> None:
    t = of("dgx-h100:2")
    assert t.nodes == 2 and t.arch == "hopper" and t.ring == Channels(count=8, intra_GBps=45.0, inter_GBps=45.0)
    _, latency, bandwidth = cell(t, "all-reduce", 1 << 28, "ring", "Simple")
    assert latency == pytest.approx((8.4 + (30 - 2) * max(3.4, 3.0) + 2 * 14) * 1.4) and bandwidth == pytest.approx(360 * 16 / 30)
    _, latency, bandwidth = cell(t, "all-reduce", 1 << 28, "tree", "Simple")
    assert latency == pytest.approx(8.4 + 2 * (7 * 4 + 14)) and bandwidth == pytest.approx(min(360 * 0.92, 8 * 41.4) * 0.85 / 2 * 0.9)
    _, latency, bandwidth = cell(t, "all-reduce", 1 << 28, "nvlstree", "Simple")
    assert latency == pytest.approx(25 + 2 * 20.9) and bandwidth == pytest.approx(16 * min(20 * 0.85 * 15 / 16 * 2, 2 * 24, 57.7) * 16 / 30)


def test_pat_has_a_logarithmic_and_a_linear_part() -> None:
    fabric = load_fabric("dgx-h100:8")
    one_each = [f"box{b}/gpu0" for b in range(8)]
    t = topology_of(fabric, one_each)
    assert t.nodes == t.ranks == 8
    _, latency, _ = cell(t, "all-gather", 1 << 20, "pat", "Simple")
    assert latency == pytest.approx(8 + 3 * 14 / 3.5 + 8 * 2.8)


# ---- what users see --------------------------------------------------------------------------------------------------------
def test_forty_h100_with_four_ports_per_box() -> None:
    """nccl #1368 reports 190 GB/s for the ring and 150 GB/s for the tree on the bus: 5 boxes, 4 ports of 400 Gbit/s each."""
    devices = [Device(name=f"b{b}g{i}", group=f"b{b}", flops={"bf16": 989 * 10**12, "fp8": 1979 * 10**12}) for b in range(5) for i in range(8)]
    switches = [Switch(name=f"b{b}{what}", group=f"b{b}") for b in range(5) for what in ("nv", "nic0", "nic1", "nic2", "nic3")]
    links = []
    for b in range(5):
        pairs = [(f"b{b}g{i}", f"b{b}nv", 450, "NV18") for i in range(8)] + [(f"b{b}g{i}", f"b{b}nic{i // 2}", 50, "PIX") for i in range(8)]
        pairs += [(f"b{b}nic{i}", "ib", 50, "NET") for i in range(4)]
        links += [Link(src=x, dst=y, rate_Bps=rate * 10**9, kind=kind) for u, v, rate, kind in pairs for x, y in ((u, v), (v, u))]
    fabric = Fabric(name="40xH100", devices=tuple(devices), switches=(*switches, Switch(name="ib")), links=tuple(links))
    t = topology_of(fabric, [d.name for d in devices])
    size = 8 << 30
    ring, tree = (size / cell(t, "all-reduce", size, a, "Simple")[0] / 1e3 * 2 * 39 / 40 for a in ("ring", "tree"))
    assert ring == pytest.approx(190, rel=0.03) and tree == pytest.approx(150, rel=0.03)


def test_an_h100_box_takes_nvls_for_large_messages_and_its_figure_is_the_reported_one() -> None:
    """About 480 GB/s on the bus is what users report for 8 H100 with NVLS."""
    t = of("dgx-h100:1")
    by_size = choices(t, "all-reduce", [1 << k for k in range(10, 34)])
    assert by_size[0][1].protocol == "LL" and by_size[-1][1].algorithm == "nvls"
    size, best = by_size[-1]
    assert best.time_us is not None and size / best.time_us / 1e3 * 2 * 7 / 8 == pytest.approx(480, rel=0.08)


# ---- options ---------------------------------------------------------------------------------------------------------------
def test_lists_are_read_as_nccl_reads_them() -> None:
    assert parse_list(None, ALGORITHMS, "algorithm") == ALGORITHMS
    assert parse_list("Ring,tree", ALGORITHMS, "algorithm") == ("tree", "ring")
    assert parse_list("^LL128", PROTOCOLS, "protocol") == ("LL", "Simple")
    t = of("dgx-a100:2")
    assert predict(t, "all-reduce", 1024, algorithms=("ring",))[0].algorithm == "ring"
    assert "switched off" in next(c for c in predict(t, "all-reduce", 1024, algorithms=("ring",)) if c.algorithm == "tree").why
    assert predict(t, "all-gather", 1024, algorithms=("tree",))[0].algorithm == "ring"  # nothing is left: the ring stays
    for bad in ("hexagon", "^tree,ring,nvls,nvlstree,pat"):
        with pytest.raises(UsageError):
            parse_list(bad, ALGORITHMS, "algorithm")


@settings(max_examples=60, deadline=None)
@given(size=st.integers(4, 1 << 34), name=st.sampled_from(["dgx-a100:1", "dgx-a100:4", "dgx-h100:2", "ndv2:2"]))
def test_the_choice_is_the_least_time_and_changes_where_it_says(size: int, name: str) -> None:
    t = of(name)
    cells = predict(t, "all-reduce", size)
    assert len(cells) == 15 and cells[0].time_us == min(c.time_us for c in cells if c.time_us is not None)
    assert all(c.why for c in cells if c.time_us is None)
    for text in changes(t, "all-reduce", size):
        if text.startswith(("from", "up to")):
            border = int(text.split(" B ")[0].split()[-1])
            assert border > size if text.startswith("from") else border < size
            there = predict(t, "all-reduce", border)[0]
            assert text.endswith(f"{there.algorithm}/{there.protocol}")
            assert (there.algorithm, there.protocol) != (cells[0].algorithm, cells[0].protocol)


def test_the_processor_matters_between_nodes() -> None:
    intel, amd = of("dgx-h100:4"), of("dgx-h100:4", cpu="amd")
    assert cell(intel, "all-gather", 1 << 26, "ring", "LL")[2] > cell(amd, "all-gather", 1 << 26, "ring", "LL")[2]
    assert cell(intel, "all-gather", 1 << 10, "ring", "Simple")[1] < cell(amd, "all-gather", 1 << 10, "ring", "Simple")[1]


# ---- what it cannot say ----------------------------------------------------------------------------------------------------
def test_what_is_not_nccls_is_refused() -> None:
    for name, why in (("laptop:2", "processors"), ("mi250:1", "RCCL")):
        with pytest.raises(Unsupported, match=why) as refusal:
            of(name)
        assert refusal.value.hint
    with pytest.raises(Unsupported, match="sends and receives"):
        predict(of("dgx-a100:1"), "all-to-all", 1024)
    for more in ({"arch": "kepler"}, {"cpu": "abacus"}):
        with pytest.raises(UsageError):
            of("dgx-a100:1", **more)
    lonely = replace(hub(2, servers=2), links=())
    with pytest.raises(Unsupported, match="no link to the others"):
        topology_of(lonely, ["d0", "d1"])
    with pytest.raises(Unsupported, match="uneven"):
        Nccl().plan(CollectiveProblem.on(hub(2), "all-gather", 16, shard_bytes=(4, 12)), rng=RNG(0))


def test_links_beyond_the_processor_have_no_ll128() -> None:
    fabric = load_fabric("dgx-a100:2")
    far = replace(fabric, links=tuple(replace(x, kind="SYS") if x.kind == "PIX" else x for x in fabric.links))
    t = topology_of(far, [d.name for d in far.devices])
    assert all(c.time_us is None for c in predict(t, "all-reduce", 1 << 20) if c.protocol == "LL128")


@pytest.mark.parametrize(("sm", "arch"), [(70, "volta"), (75, "volta"), (80, "ampere"), (89, "ampere"), (90, "hopper"), (100, "blackwell")])
def test_a_compute_capability_tells_the_architecture(sm: int, arch: str) -> None:
    fabric = hub(4)
    named = replace(fabric, devices=tuple(replace(d, sm=sm) for d in fabric.devices))
    t = topology_of(named, [d.name for d in named.devices])
    assert t.arch == arch and not any("Ampere assumed" in x for x in t.assumptions)


def test_a_nic_behind_a_slow_slot_is_fed_slowly() -> None:
    """One of four boxes has a NIC whose card trained down to a gen 3 x4 slot: fewer or slower channels everywhere."""
    fabric = load_fabric("dgx-h100:4")
    ranks = [d.name for d in fabric.devices]
    nic = next(x.src for x in fabric.links if x.src.startswith("box3/") and not x.dst.startswith("box3/"))
    slot = {(x.src, x.dst) for x in fabric.links if nic in (x.src, x.dst) and x.src.startswith("box3/") and x.dst.startswith("box3/")}
    assert slot
    slow = replace(fabric, links=tuple(replace(x, rate_Bps=3 * 10**9) if (x.src, x.dst) in slot else x for x in fabric.links))
    well, ill = topology_of(fabric, ranks), topology_of(slow, ranks)
    assert ill.ring.count * ill.ring.inter_GBps < well.ring.count * well.ring.inter_GBps
    best = [predict(t, "all-reduce", 1 << 30)[0].time_us or 0.0 for t in (well, ill)]
    assert best[1] > 1.05 * best[0]


def test_gpus_without_figures_are_assumed_and_said_so() -> None:
    t = topology_of(hub(4, servers=2), [f"d{i}" for i in range(4)])
    assert t.arch == "ampere" and any("assumed" in x for x in t.assumptions)
    assert topology_of(hub(4), [f"d{i}" for i in range(4)], arch="volta").arch == "volta"


# ---- the schedule ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("algo", [None, "ring", "tree"])
def test_its_schedules_are_right(servers: int, algo: str | None) -> None:
    for op in OPERATIONS:
        problem = CollectiveProblem.on(hub(6, servers=servers, rate_Bps=10**10), op, 4 * 600, root=4)
        plan = Nccl(algo=algo).plan(problem, rng=RNG(0))
        assert_right(plan.program, problem, RNG(1))
        assert check_program(plan.program).ok and plan.strategy == "nccl"
        assert "prediction" in plan.notes
        if algo == "tree" and op == "all-reduce":
            assert plan.notes["schedule"] == "tree" and plan.options["arch"] == "ampere"


def test_nvls_is_replaced_and_said_so() -> None:
    plan = Nccl().plan(CollectiveProblem.on(load_fabric("dgx-h100:1"), "all-reduce", 1 << 28), rng=RNG(0))
    assert plan.notes["algorithm"] == "nvls" and plan.notes["schedule"] == "ring" and "inside switches" in plan.notes["stand_in"]
