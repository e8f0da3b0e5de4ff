"""`fabric lint`: every rule fires where it should and nowhere on good presets; what faults cost equals recomputed bounds."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.decide.collective import CollectiveProblem, collective_bound
from meshwright.drive.lint import fault_costs, lint_known_fabric, lint_source
from meshwright.fabric.edit import edited, with_one_more
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.fabric.lint import MAX_OF_A_KIND, RULES, lint_fabric, missing_nics
from meshwright.fabric.machines import MACHINES
from meshwright.fabric.presets import PRESETS
from meshwright.fabric.repair import REPAIRS, repaired
from meshwright.io.fabric.imported import Source
from meshwright.io.fabric.name import load_fabric
from meshwright.io.nccl.lint import NCCL_RULES, lint_nccl, repaired_nccl
from meshwright.io.nccl.topology import parse_nccl_topology
from meshwright.io.nccl.write import nccl_topology_text

GIB = 1 << 30


def cables(*ends: str, rate: int = 10**9, **more) -> tuple[Link, ...]:
    """`a-b` both ways, `a>b` one way."""
    found = []
    for text in ends:
        a, way, b = re.match(r"([\w/]+)([->])([\w/]+)", text).groups()
        found.append(Link(src=a, dst=b, rate_Bps=rate, **{"latency_s": 1e-6, **more}))
        if way == "-":
            found.append(Link(src=b, dst=a, rate_Bps=rate, **{"latency_s": 1e-6, **more}))
    return tuple(found)


def small(devices: str, links: tuple[Link, ...], switches: str = "") -> Fabric:
    named = tuple(Device(name=d, memory_bytes=1, flops={"fp32": 1}) for d in devices.split())
    return Fabric(name="small", devices=named, switches=tuple(Switch(name=s) for s in switches.split()), links=links)


def preset(spec: str, *down: str, **slow: Fraction) -> Fabric:
    fabric = load_fabric(spec)
    return edited(fabric, down, slow) if down or slow else fabric


def slow_bridge() -> Fabric:
    fabric = preset("dgx-a100:2")
    links = [replace(x, rate_Bps=187_500_000) if {x.src, x.dst} == {"box1/nic3", "box1/gpu3"} else x for x in fabric.links]
    return replace(fabric, links=tuple(links))


def without_latency(fabric: Fabric, *kinds: str) -> Fabric:
    return replace(
        fabric, links=tuple(replace(x, latency_s=0.0, library_latency_s=0.0) if not kinds or x.kind in kinds else x for x in fabric.links)
    )


# rule -> (a fabric where it fires, severity, what `where` names)
FIRES = {
    "island": (small("a b c d", cables("a-b", "c-d")), "error", "c, d"),
    "one-way": (small("a b c", cables("a-b", "b>c")), "error", "c"),
    "unlinked-device": (small("a b c", cables("a-b")), "error", "c"),
    "slow-pcie": (slow_bridge(), "error", "box1/gpu3 <-> box1/nic3"),
    "one-way-link": (small("a b c", cables("a>b", "b-c", "c-a")), "warning", "a -> b"),
    "uneven-directions": (small("a b", cables("a>b") + cables("b>a", rate=3)), "warning", "a <-> b"),
    "uneven-nvlinks": (preset("dgx1-v100", "box0/gpu0<->box0/gpu1"), "warning", "box0/gpu0"),
    "missing-nic": (preset("dgx-h100:3", "box1/nic2"), "warning", "box1"),
    "far-nic": (preset("dgx-h100:3", "box1/nic2"), "note", "box1/gpu2"),
    "unused-switch": (small("a b", cables("a-b"), "s"), "note", "s"),
    "parallel-links": (small("a b", cables("a-b", "a-b")), "note", "a -> b"),
    "rates-too-long": (small("a b", cables("a-b", rate=9 * 10**18) + cables("a-b", rate=9 * 10**18 - 1)), "error", "a -> b"),
    "rates-without-divisor": (small("a b", cables("a-b", rate=9 * 10**15 + 1) + cables("a>b", rate=10**15)), "note", "small"),
    "no-latency": (small("a b", cables("a-b", latency_s=0.0)), "note", "small"),
    "no-network-latency": (without_latency(preset("dgx-h100:2"), "NET"), "warning", "box0/nic0 -> ib"),
    "unknown-device": (Fabric(name="f", devices=(Device(name="a"), Device(name="b")), links=cables("a-b")), "note", "a"),
}


def test_every_rule_is_tried_here():
    assert set(FIRES) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_rule_fires(rule):
    fabric, severity, where = FIRES[rule]
    found = [f for f in lint_fabric(fabric) if f.rule == rule]
    assert found and (found[0].severity, found[0].where) == (severity, where) and found[0].message and found[0].hint
    assert {f.rule for f in lint_fabric(fabric)} <= set(RULES)


SLICES = [m.name for m in MACHINES.values() if m.shape == "slice"]
RACKS = [m.name for m in MACHINES.values() if m.devices > 16]  # with NVSwitch like the others
SPECS = [f"{name}:{n}" for name in PRESETS if name not in (*SLICES, *RACKS) for n in ((2,) if name in MACHINES else (1, 2, 3))]


@pytest.mark.parametrize("spec", [*SPECS, *(f"{name}:8?slices=2" for name in SLICES)])
def test_presets_are_clean(spec):
    found = lint_fabric(load_fabric(spec))
    assert {f.rule for f in found} <= ({"far-nic"} if spec.startswith("ndv2") else set()), found  # one NIC for eight GPUs: it is so
    assert not [f for f in found if f.severity != "note"]


@pytest.mark.parametrize("query", ["net=rails", "net=spine&oversubscription=2", "net=planes", "net=direct", "net=trunk&trunk=100GB/s"])
def test_every_wiring_is_clean(query):
    assert lint_fabric(load_fabric(f"dgx-h100:2?{query}")) == []


def test_no_nic_at_all_is_an_error_and_many_findings_are_counted():
    bare = preset("dgx-h100:3", *(f"box2/nic{i}" for i in range(8)))
    found = {f.rule: f for f in lint_fabric(bare)}
    assert found["missing-nic"].severity == "error" and found["missing-nic"].message == "no NIC; most servers like it have 8"
    assert {"island"} <= set(found)
    many = [f for f in lint_fabric(small("a b", cables("a-b"), " ".join(f"s{i}" for i in range(30)))) if f.rule == "unused-switch"]
    assert len(many) == MAX_OF_A_KIND and many[-1].message == "and 23 more like this"


def test_servers_of_unlike_kinds_are_not_compared():
    assert missing_nics(load_fabric("h100-a100:2")) == {}
    assert missing_nics(preset("dgx-h100:2", "box0/nic2")) == {"box0": (7, 8)}  # of two unlike servers the one with more is right


def test_large_one_way_cuts_are_found():
    """Above a size where all pairs would be too many."""
    n = 2100
    names = " ".join(f"d{i}" for i in range(n))
    ring = cables(*(f"d{i}-d{i + 1}" for i in range(n - 1) if i != 1999), "d1999>d2000")
    found = [f for f in lint_fabric(small(names, ring)) if f.rule == "one-way"]
    assert len(found) == 1 and found[0].where == "d2000, d2001, d2002, d2003 and 96 more"
    assert found[0].message == "data gets from d0 to d2000, but not back"


# ---- what it costs -----------------------------------------------------------------------------------------------------
def best(fabric: Fabric) -> Fraction:
    return GIB / collective_bound(CollectiveProblem.on(fabric, "all-gather", GIB)).exact


def test_costs_are_bounds_with_and_without():
    whole = load_fabric("dgx-h100:3")
    lint = lint_known_fabric(preset("dgx-h100:3", "box1/nic2"))
    assert [(c.rule, c.rate_Bps, c.repaired_Bps, c.ratio) for c in lint.costs] == [
        ("missing-nic", int(best(preset("dgx-h100:3", "box1/nic2"))), int(best(whole)), "10/9")
    ]
    assert lint.costs[0].line() == (
        "missing-nic: all-gather on this fabric: 469.6 GB/s at best; 521.7 GB/s if repaired (+11.1 %); "
        "NCCL's all-reduce, by its model: 167.4 GB/s; 197.9 GB/s if repaired (+18.2 %)"
    )
    slow = lint_known_fabric(slow_bridge()).costs
    assert [c.rule for c in slow] == ["slow-pcie"] and Fraction(slow[0].ratio) == best(repaired(slow_bridge(), "slow-pcie")) / best(slow_bridge()) > 1
    gen3_x4 = edited(load_fabric("dgx-h100:2"), [], {"box0/gpu3<->box0/nic3": Fraction(2, 25)})  # 4 GB/s, of which NCCL counts 3
    assert [(f.rule, f.where) for f in lint_fabric(gen3_x4)] == [("slow-pcie", "box0/gpu3 <-> box0/nic3")]
    mesh = lint_known_fabric(small("a b c", cables("a>b", "b-c", "c-a"))).costs
    assert [(c.rule, c.ratio) for c in mesh] == [("one-way-link", "2")]


def test_a_repair_leaves_nothing_to_repair_and_never_costs():
    for rule in REPAIRS:
        fabric = FIRES[rule][0]
        better = repaired(fabric, rule)
        if better is None:
            assert rule == "uneven-nvlinks"  # a mesh: which of its links are short is not known
            continue
        assert not [f for f in lint_fabric(better) if f.rule == rule] and repaired(better, rule) is None
        assert best(better) >= best(fabric)
    assert repaired(load_fabric("dgx-h100:2"), "slow-pcie") is None and repaired(load_fabric("dgx-h100:2"), "island") is None


def test_lost_nics_come_back_where_they_were():
    whole = load_fabric("dgx-h100:3")
    for lost in (["box1/nic2"], [f"box2/nic{i}" for i in range(8)], ["box0/nic1", "box0/nic3"]):
        assert sorted(map(repr, repaired(edited(whole, lost, {}), "missing-nic").links)) == sorted(map(repr, whole.links))
    renamed = edited(whole, ["box1/nic2", "box1/gpu2"], {})  # no GPU there for the namesake: one like the last, on gpu7
    assert repaired(renamed, "missing-nic") is None  # 7 GPUs are another kind of server
    odd = replace(whole, switches=tuple(replace(s, name=s.name.replace("box1/nic", "box1/hca")) for s in whole.switches),
                  links=tuple(replace(x, src=x.src.replace("box1/nic", "box1/hca"), dst=x.dst.replace("box1/nic", "box1/hca")) for x in whole.links))
    back = repaired(edited(odd, ["box1/hca2"], {}), "missing-nic")
    assert {x.dst for x in back.links if x.src == "box1/nic0"} == {"box1/gpu0", "ib"}  # unlike names: as the first of a whole server


def test_a_gpu_short_of_nvlinks_at_its_nvswitch():
    fabric = load_fabric("dgx-a100")
    short = [
        replace(x, kind="NV10", rate_Bps=250 * 10**9) if {x.src, x.dst} == {"box0/gpu5", "box0/nvswitch"} else x for x in fabric.links
    ]
    lint = lint_known_fabric(replace(fabric, links=tuple(short)))
    assert [f.where for f in lint.findings] == ["box0/gpu5"] and [c.ratio for c in lint.costs] == ["6/5"]
    assert with_one_more(fabric, [("box0/gpu5", "box0/nvswitch")]).links != fabric.links


def test_no_cost_without_a_bound():
    assert lint_known_fabric(FIRES["one-way"][0]).costs == []
    fabric = FIRES["one-way-link"][0]
    assert fault_costs(fabric, lint_fabric(fabric), lambda rule: None, "it") == []
    assert fault_costs(replace(fabric, devices=fabric.devices[:1], links=()), lint_fabric(fabric), lambda rule: fabric, "it") == []
    apart = FIRES["island"][0]
    assert fault_costs(fabric, lint_fabric(fabric), lambda rule: apart, "it") == []


# ---- NCCL topology files -----------------------------------------------------------------------------------------------
GOOD = """<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0000:21:00.0" count="4" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:12:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic></pci></pci>
  </cpu>
  <cpu numaid="1" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0000:20:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:21:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1" gdr="1"><nvlink target="0000:11:00.0" count="4" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:22:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_1" dev="1" speed="200000" port="1"/></nic></pci></pci>
  </cpu>
</system>
"""
SPEED = 'link_speed="16.0 GT/s PCIe" link_width="16"'
SECOND_NIC = GOOD[GOOD.index('      <pci busid="0000:22:00.0"') : GOOD.index("</pci></pci>\n  </cpu>\n</system>")] + "</pci>"
# rule -> (what to replace in the good file, by what, severity, line; 0 = the whole file)
NCCL_FIRES = {
    "slow-pcie": ([(SPEED, 'link_speed="2.5 GT/s PCIe" link_width="1"')], "error", 3),
    "unknown-speed": ([(SPEED, 'link_speed="Unknown speed" link_width="16"')], "warning", 3),
    "no-speed": ([(SPEED, "")], "note", 3),
    "no-nic": ([(r"<nic>.*?</nic>", ""), ("0x020700", "0x060400")], "warning", 0),
    "no-net-speed": ([('speed="200000"', 'speed="0"')], "warning", 6),
    "pcie-only": ([(r"<nic>.*?</nic>", "")], "warning", 0),
    "net-twice": ([("mlx5_1", "mlx5_0")], "warning", 0),
    "no-nvlink": ([(r"<nvlink[^>]*>", "")], "note", 0),
    "uneven-nvlinks": ([(SECOND_NIC, SECOND_NIC + '<pci busid="0000:23:00.0" class="0x030200" ' + SPEED + '><gpu dev="2" sm="80" gdr="1"/></pci>')],
                       "error", 14),
    "one-way-nvlink": ([('target="0000:11:00.0" count="4"', 'target="0000:11:00.0" count="2"')], "warning", 5),
    "far-nic": ([(SECOND_NIC, "")], "warning", 11),
    "no-gdr": ([('rank="1" gdr="1"', 'rank="1" gdr="0"')], "note", 11),
}  # fmt: skip


def damaged(rule: str) -> str:
    text = GOOD
    for old, new in NCCL_FIRES[rule][0]:
        times = 0 if old.startswith("<") or "020700" in old else 1
        changed = re.sub(old if old.startswith("<") else re.escape(old), lambda _, new=new: new, text, count=times)
        assert changed != text, old
        text = changed
    return text


def test_the_good_file_is_clean():
    assert set(NCCL_FIRES) == set(NCCL_RULES) and lint_nccl(parse_nccl_topology(GOOD.encode(), "good.xml")) == []
    assert {f.rule for f in lint_source(Source("good.xml", GOOD.encode())).findings} == {"unknown-device"}


@pytest.mark.parametrize("rule", NCCL_RULES)
def test_nccl_rule_fires_and_names_the_line(rule):
    _, severity, line = NCCL_FIRES[rule]
    found = [f for f in lint_nccl(parse_nccl_topology(damaged(rule).encode(), "node.xml")) if f.rule == rule]
    assert found and found[0].severity == severity and found[0].hint
    assert found[0].where.startswith(f"node.xml: line {line}: <" if line else "node.xml")


def test_a_placeholder_bridge_is_priced():
    """2.5 GT/s x1: 0.1875 GB/s instead of gen 4 x16; without NVLinks that is everything, with them the less."""
    text = re.sub(r"<nvlink[^>]*>", "", damaged("slow-pcie"))
    lint = lint_source(Source("node.xml", text.encode()))
    found = next(f for f in lint.findings if f.rule == "slow-pcie")
    assert found.where == "node.xml: line 3: <pci 0000:10:00.0>"
    assert found.message == "bridge at 2.5 GT/s PCIe x1: 0.19 GB/s for 2 devices behind it"
    alone, two = lint.costs
    assert (alone.on, alone.rate_Bps, alone.repaired_Bps) == ("node.xml", 375_000_000, 2 * 16 * 10**9)  # then the CPUs' 16 GB/s bind
    assert two.on == "2 such servers" and Fraction(two.ratio) == Fraction(best_of(text, 2, repair=True)) / best_of(text, 2)
    linked = lint_source(Source("node.xml", damaged("slow-pcie").encode())).costs[0]
    assert linked.line().startswith("slow-pcie: all-gather on node.xml: 160.4 GB/s at best; 192 GB/s if repaired (+19.7 %)")  # NVLinks: 80 GB/s


def best_of(text: str, copies: int, *, repair: bool = False) -> Fraction:
    from meshwright.io.nccl.fabric import Join, nccl_fabric

    if repair:
        text = text.replace('link_speed="2.5 GT/s PCIe" link_width="1"', SPEED)
    return best(nccl_fabric([parse_nccl_topology(text.encode())], "f", Join(copies=copies)))


def test_all_slow_are_repaired_to_gen_3():
    slow = GOOD.replace(SPEED, 'link_speed="2.5 GT/s PCIe" link_width="4"')
    changed = repaired_nccl(parse_nccl_topology(slow.encode()), "slow-pcie")
    assert {pci.rate_Bps for _, pci in changed.devices()} == {12 * 10**9} and repaired_nccl(parse_nccl_topology(GOOD.encode()), "slow-pcie") is None
    assert repaired_nccl(parse_nccl_topology(slow.encode()), "no-gdr") is None


@pytest.mark.parametrize("spec", ["dgx-a100", "dgx1-v100", "mi300x"])
def test_presets_as_topology_files_are_clean(spec):
    found = lint_nccl(parse_nccl_topology(nccl_topology_text(load_fabric(f"{spec}:1")).encode(), "preset.xml"))
    assert not [f for f in found if f.severity == "error"], found


def test_the_page_lists_every_rule():
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for rules in (RULES, NCCL_RULES):
        for rule, text in rules.items():
            assert f"| `{rule}` | {text} |" in page
