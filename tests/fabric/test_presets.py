"""Presets: published optima come out exactly (own max-flow oracle), wiring variants, provenance, caps."""

import json
import math
from fractions import Fraction

import networkx as nx
import pytest

from meshwright.cli.frame import main
from meshwright.errors import FormatError, UnknownName, UsageError
from meshwright.fabric.machine_shapes import slice_sides
from meshwright.fabric.machines import ELSEWHERE, GPUS, MACHINES, SOURCES
from meshwright.fabric.presets import MAX_DEVICES, PRESETS, usable_cores
from meshwright.io.fabric.document import DTYPES, fabric_document, fabric_from_document
from meshwright.io.fabric.name import load_fabric
from meshwright.io.fabric.toml import fabric_toml, parse_fabric_toml, read_fabric_toml
from meshwright.io.limits import MaxBytes


def all_gather_inverse_rate(fabric):
    """1/x*, seconds per byte of one shard: max over cuts of devices inside / rate leaving, by Newton's method on min cuts."""
    unit = math.gcd(*(x.rate_Bps for x in fabric.links))
    capacity = {}
    for (a, b), link in zip(fabric.link_ends, fabric.links, strict=True):
        capacity[a, b] = capacity.get((a, b), 0) + link.rate_Bps // unit
    n = len(fabric.devices)
    best = max(Fraction(n - 1, sum(r for (_, b), r in capacity.items() if b == v)) for v in range(n))
    while True:
        graph = nx.DiGraph()
        for (a, b), rate in capacity.items():
            graph.add_edge(a, b, capacity=rate * best.numerator)
        for v in range(n):
            graph.add_edge("s", v, capacity=best.denominator)
        for v in range(n):
            flow, (inside, _) = nx.minimum_cut(graph, "s", v)
            if flow < n * best.denominator:
                leaving = sum(r for (a, b), r in capacity.items() if a in inside and b not in inside)
                best = Fraction(sum(isinstance(a, int) and a < n for a in inside), leaving)
                break
        else:
            return best / unit


@pytest.mark.parametrize(
    ("spec", "optimum"),  # per GB/s, from the published models
    [
        ("dgx1-v100", "7/150"),
        ("ndv2:2", "16/25"),
        ("ndv2:2?sketch=1", "16/25"),
        ("ndv2:3", "32/25"),  # 24 GPUs at 18.75 GB/s
        ("ndv2:4", "48/25"),  # 32 GPUs at 16.67 GB/s
        ("dgx2:2?sketch=1", "31/125"),
        ("dgx-a100:2", "3/65"),
        ("dgx-a100:4", "3/25"),
        ("mi250", "7/150"),
        ("mi250:2", "15/166"),
        ("dgx1-p100", "7/80"),  # one GPU takes in seven shards over four links of 20
        ("mi300x", "1/64"),  # seven over seven links of 64
        ("hgx-b200", "7/900"),
        ("gb200-nvl72", "71/900"),
        ("dgx-h200:2", "3/100"),  # a GPU takes in 15 shards over 450 + 50; a box 8 over 400
        ("h100-a100", "3/65"),  # a GPU of the A100 box takes in 15 over 300 + 25
        ("dgx-h100:2?net=direct", "3/100"),
        ("dgx-h100:2?net=trunk&trunk=100GB/s", "8/100"),
        ("dgx-h100:4?net=trunk&oversubscription=2", "24/200"),
        ("p4d:2", "8/50"),  # a box's eight shards over four ports of 12.5
        ("a3-high:2", "8/100"),
        ("a2-highgpu:2", "8/12.5"),
        ("p5.48xlarge:2", "3/100"),  # as a DGX H100
        ("mi355x", "1/76.8"),
        ("trn1", "15/206"),  # a chip takes in fifteen over four links of 51.5
        ("tpu-v5p:64", "63/600"),  # six links of 100
        ("tpu7x:64", "63/600"),  # as many
        ("dgx-b300:2", "3/200"),  # a GPU takes in 15 shards over 900 + 100
        ("g4:2", "15/64"),  # a GPU takes in 15 shards through its slot
        ("v5p-128", "63/600"),  # the same, counted in cores
        ("tpu-v5e:16", "15/100"),  # a mesh: a corner has two links
        ("tpu-v5p:4?slices=2&nic=1GB/s", "4/1"),  # a slice of one host: four shards through its port
        ("g6e", "7/32"),
        ("gh200:3", "2/50"),
        ("dgx-spark:2?net=direct", "1/25"),
        ("line:5", "4/1"),
        ("ring:6", "5/2"),
        ("star:5", "4/1"),
        ("star-gpu:4", "3/1"),
        ("fat-tree:3?oversubscription=2", "11/1"),  # 8 shards into a leaf over 2; 11 into a device over 1
        ("fat-tree:3?leaf=8&oversubscription=8", "23/1"),  # 16 over 1; 23 into a device over 1
        ("dragonfly:3", "23/1"),
        ("dragonfly:2?trunk=100MB/s", "8/0.1"),
        ("mesh:3", "8/2"),  # a corner
        ("torus:3", "8/4"),
        ("torus:3?dims=3", "26/6"),
        ("mesh:2?dims=3", "7/3"),
        ("hypercube:4", "15/4"),
        ("lan:2", "3/0.0375"),  # a device on Wi-Fi
        ("wan:3", "4/0.025"),
        ("two-islands", "2/0.025"),  # one island's two shards over the trunk of 0.025 GB/s
    ],
)
def test_published_optimum(spec, optimum):
    numerator, _, denominator = optimum.partition("/")
    assert all_gather_inverse_rate(load_fabric(spec)) * 10**9 == Fraction(numerator) / Fraction(denominator)


SLICES = [m.name for m in MACHINES.values() if m.shape == "slice"]
RACKS = [m.name for m in MACHINES.values() if m.devices > 16]  # with NVSwitch like the others: tried once
ONE_OF_EACH_SHAPE = ("dgx-a100", "p4d", "mi300x", "trn1", "g6e", "gh200")
SPECS = [name for name in PRESETS if name not in RACKS] + [f"{RACKS[0]}:2?net=spine"] + [
    f"{name}:{n}{query}" for name in SLICES for n in (4, 64) for query in ("", "?slices=2&net=trunk")
] + [
    f"{name}:2{query}"
    for name, preset in PRESETS.items() if name not in (*SLICES, *RACKS)
    for query in ["", *(f"?net={net}" for net in (preset.options["net"].choices if "net" in preset.options else ()))]
    if (name, query) != ("h100-a100", "?net=direct")  # four boxes
    and not (query and name in MACHINES and name not in ONE_OF_EACH_SHAPE)
] + ["mi250:2?nics=pair", "mi250:3?net=spine&oversubscription=2&nics=pair", "dgx2:2?sketch=1", "ndv2:3?sketch=1", "laptop:4?cores=2",
     "h100-a100?net=direct", "mesh:3?dims=3", "torus:4?dims=3", "wan:4", "dgx-a100:3?net=trunk&trunk=30GB/s"]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_every_preset_is_sound(spec):
    fabric = load_fabric(spec)
    fabric.require_connected()
    assert fabric.provenance and all(note.what and note.source for note in fabric.provenance)
    preset = PRESETS[fabric.name.partition(":")[0]]
    one = ("line", "ring", "star", "star-gpu", "mesh", "torus", "hypercube", "lan")
    chips = int(fabric.name.partition(":")[2].partition("?")[0]) if preset.name in SLICES else 0
    hosts = {m.name: min(m.per_host, chips) for m in MACHINES.values() if m.shape == "slice"}
    sizes = hosts | {"laptop": len(fabric.devices), "two-islands": 2, "h100-a100": 8, "fat-tree": 4} | dict.fromkeys(one, 1)
    per_group = sizes.get(preset.name, preset.devices_per_unit)
    assert {len(members) for members in fabric.groups.values()} == {per_group}
    for device in fabric.devices:
        assert device.memory_bytes > 0 and device.memory_bandwidth_Bps > 0 and set(device.flops) <= set(DTYPES) and "fp32" in device.flops
    assert fabric_from_document(fabric_document(fabric)) == fabric
    assert parse_fabric_toml(fabric_toml(fabric)) == fabric
    if "sketch" not in spec:  # every port sends what it can receive
        for name in fabric.actor_names:
            assert sum(x.rate_Bps for x in fabric.links if x.src == name) == sum(x.rate_Bps for x in fabric.links if x.dst == name)


def test_growing_changes_nothing_inside_a_box():
    one, three = load_fabric("dgx-a100:1"), load_fabric("dgx-a100:3")
    inside = [x for x in three.links if x.src.startswith("box0/") and x.dst.startswith("box0/") and "nic" not in x.src + x.dst]
    assert tuple(inside) == one.links
    assert three.devices[:8] == one.devices


def test_planes_by_default_on_a100_and_one_switch_on_h100():
    a100, h100 = load_fabric("dgx-a100:2"), load_fabric("dgx-h100:2")
    assert {x.dst for x in a100.links if x.src == "box1/nic3"} == {"box1/gpu3", "plane1"}
    assert {x.dst for x in h100.links if x.src == "box1/nic3"} == {"box1/gpu3", "ib"}
    assert load_fabric("dgx-a100:2?net=planes").links == a100.links
    nvswitch = [s for s in h100.switches if "nvswitch" in s.name]
    assert all(s.multicast and s.aggregate for s in nvswitch) and not any(s.multicast or s.aggregate for s in a100.switches)


def test_spine_carries_the_rails_divided_by_the_oversubscription():
    fabric = load_fabric("dgx-h100:4?net=spine&oversubscription=2")
    assert {x.rate_Bps for x in fabric.links if x.dst == "spine"} == {4 * 50 * 10**9 // 2}


def test_v100_bundles_are_those_of_the_card():
    fabric = load_fabric("dgx1-v100")
    assert all(sum(x.rate_Bps for x in fabric.links if x.src == d.name) == 150 * 10**9 for d in fabric.devices)
    rates = {(x.src[-1], x.dst[-1]): x.rate_Bps // 10**9 for x in fabric.links}
    assert [rates.get(("0", str(i)), 0) for i in range(8)] == [0, 50, 25, 25, 50, 0, 0, 0]


def test_overrides_change_the_number_and_are_recorded():
    fabric = load_fabric("dgx-a100:2?nvlink=240GB/s&memory=40GB")
    assert {x.rate_Bps for x in fabric.links if x.dst == "box0/nvswitch"} == {240 * 10**9}
    assert {d.memory_bytes for d in fabric.devices} == {40 * 10**9}
    notes = {n.what: n.source for n in fabric.provenance}
    assert notes["GPU - NVSwitch rate"] == "overridden: 240000000000 B/s instead of 300000000000 B/s"
    assert "80000000000" in notes["memory_bytes"]
    assert fabric.name == "dgx-a100:2?memory=40GB&nvlink=240GB/s"


def test_laptop_shares_the_cores():
    assert load_fabric("laptop:4?cores=2").devices[0].cpu_share == pytest.approx(0.4)
    assert load_fabric("laptop:2?cores=16").devices[0].cpu_share == 1.0
    assert load_fabric("laptop:8").devices[0].cpu_share == min(1.0, 0.8 * usable_cores() / 8)
    assert load_fabric("laptop:4?memory=1GiB&flops=10GFLOP/s").devices[3].memory_bytes == 1 << 30


def test_the_example_file_is_the_preset():
    file, preset = read_fabric_toml("examples/fabrics/two_islands.toml"), load_fabric("two-islands")
    assert (file.name, file.devices, file.switches, file.links) == (preset.name, preset.devices, preset.switches, preset.links)


@pytest.mark.parametrize(
    ("spec", "kind", "text", "hint"),
    [
        ("p5.4xlarge", UnknownName, "no fabric is called", "did you mean 'p5.48xlarge'?; near by specification: a3-high (8 h100, 800 Gbit/s)"),
        ("a4x-highgpu-4g:2", UnknownName, "no fabric", "p6e-gb200 (72 gb200, 28800 Gbit/s), a4x (72 gb200, 28800 Gbit/s)"),
        ("BM.GPU.MI300X.8:2", UnknownName, "no fabric", "near by specification: nd-mi300x-v5 (8 mi300x, 3200 Gbit/s), mi300x"),
        ("my-a100-80gb", UnknownName, "no fabric", "near by specification: dgx-a100"),
        ("h200x8", UnknownName, "no fabric", "near by specification: dgx-h200"),
        ("v5p-7", UsageError, "7 is not a number of cores, which come in twos", "v5p-8"),
        ("v5p-0", UsageError, "0 is not a number of cores", "v5p-8"),
        ("p5.48xlarge:x", UsageError, "'p5': the number of boxes must be a whole number", "p5:1"),
        ("tpu-v5p:6", UsageError, "no usual slice has 6 chips", "topology=4x4x12"),
        ("tpu-v4:2", UsageError, "no usual slice has 2 chips", "topology"),
        ("tpu-v6e:512", UsageError, "at most 256 chips in a slice", "slices=2"),
        ("tpu-v5p:64?topology=4x4x8", UsageError, "topology=4x4x8 does not have 3 sides that make 64 chips", ""),
        ("tpu-v5p:16?topology=4x4", UsageError, "topology=4x4 does not have 3 sides", ""),
        ("tpu-v5p:64?topology=4x0x8", UsageError, "must be two or three numbers such as 4x4x8", "sides"),
        ("tpu-v5e:256?slices=100", UsageError, "256 makes more than 16384 devices", ""),
        ("pcie-box:2?gpu=h100", UsageError, "must be one of rtx-4090, l40s", "its GPUs"),
        ("aws-p5:2", UnknownName, "no fabric is called 'aws-p5'", "did you mean 'p5'?"),
        ("AWS p5", UnknownName, "no fabric is called 'AWS p5'", "did you mean 'p5'?"),
        ("gcp_a3-mega", UnknownName, "no fabric is called 'gcp_a3-mega'", "did you mean 'a3-mega'?"),
        ("aws", UnknownName, "no fabric is called 'aws'", "presets: laptop"),
        ("dgx-a10", UnknownName, "no fabric is called 'dgx-a10'", "did you mean 'dgx-a100'"),
        ("whatever", UnknownName, "no fabric", "presets: laptop"),
        ("", UnknownName, "no fabric is called ''", "must end in .toml"),
        ("laptop:", UsageError, "must be a whole number, got ''", "laptop:2"),
        ("laptop:x", UsageError, "must be a whole number, got 'x'", "laptop:2"),
        ("laptop:-1", UsageError, "must be a whole number", ""),
        ("laptop:0", UsageError, "between 1 and 16384, got 0", ""),
        ("dgx-h100:2049", UsageError, "between 1 and 2048", ""),
        ("laptop:99999999999", UsageError, "must be a whole number", ""),
        ("dgx-h100:2?nt=rails", UnknownName, "has no option 'nt'", "did you mean 'net'"),
        ("dgx-h100:2?", UnknownName, "has no option ''", "its options"),
        ("dgx-h100:2?net=rail", UsageError, "must be one of switch, rails", "between boxes"),
        ("dgx-h100:2?net", UsageError, "must be given once, as net=VALUE", ""),
        ("dgx-h100:2?net=rails&net=spine", UsageError, "must be given once", ""),
        ("dgx-h100:2?nic=fast", UsageError, "must be a number with a unit", ""),
        ("dgx-h100:2?nic=0GB/s", UsageError, "must be between 1 and", ""),
        ("dgx2:2?sketch=yes", UsageError, "must be 0 or 1, got 'yes'", ""),
        ("laptop:2?cores=0", UsageError, "must be a whole number > 0", ""),
        ("dgx-h100:2?net=spine&oversubscription=999999999999", UsageError, "must be a whole number > 0", ""),
        ("dgx-h100:3?net=direct", UsageError, "net=direct joins two boxes", "two boxes"),
        ("torus:26?dims=3", UsageError, "26 makes more than 16384 devices", ""),
        ("hypercube:15", UsageError, "15 makes more than 16384 devices", ""),
        ("hypercube:999", UsageError, "a hypercube of dimension 999 has too many devices", "hypercube:4"),
        ("fat-tree:2?leaf=16000", UsageError, "2 makes more than 16384 devices", ""),
        ("nowhere.toml", UsageError, "cannot read the fabric: No such file", "preset"),
        ("nowhere.json", UsageError, "cannot read the fabric", "preset"),
    ],
)
def test_bad_names(spec, kind, text, hint):
    with pytest.raises(kind) as caught:
        load_fabric(spec)
    assert text in str(caught.value) and hint in caught.value.hint and caught.value.exit_code == 2


def test_the_largest_preset_fits_its_cap():
    fabric = load_fabric("dgx-h100:2048")
    assert len(fabric.devices) == MAX_DEVICES
    fabric.require_connected()
    assert len(fabric_toml(fabric)) < MaxBytes.FABRIC_TOML  # what we write we can read
    assert len(json.dumps(fabric_document(fabric))) < MaxBytes.FABRIC_JSON


def test_parts():
    fabric = load_fabric("dgx-a100:2", devices="0-3,8-11")
    assert [d.name for d in fabric.devices] == [f"box{b}/gpu{i}" for b in range(2) for i in range(4)]
    assert fabric.name == "dgx-a100:2[0-3,8-11]" and len(fabric.switches) == 20
    assert load_fabric("dgx-a100:2", devices="box1/gpu7, 0").name == "dgx-a100:2[0,15]"
    assert load_fabric("laptop:4", devices="0-3") == load_fabric("laptop:4")
    assert len(load_fabric("laptop:999", devices=",".join(str(i) for i in range(0, 999, 2))).name) <= 128


@pytest.mark.parametrize("devices", ["", "0,", "4", "3-2", "0-4", "x", "loopback", "-1", "1-", "0 - 1", "9" * 50])
def test_bad_parts(devices):
    with pytest.raises(UsageError) as caught:
        load_fabric("laptop:4", devices=devices)
    assert str(caught.value).startswith("--devices: ") and caught.value.hint


def test_a_part_can_be_written_and_read(tmp_path):
    part = load_fabric("dgx-a100:2", devices="0-3,8-11")
    (tmp_path / "part.toml").write_text(fabric_toml(part))
    assert load_fabric(str(tmp_path / "part.toml")) == part


def test_a_wrong_file_is_a_format_error(tmp_path):
    (tmp_path / "f.json").write_text("{}")
    with pytest.raises(FormatError, match=r"f.json: schema: is missing"):
        load_fabric(str(tmp_path / "f.json"))


def test_shapes():
    found = {spec: load_fabric(spec) for spec in ("line:5", "ring:5", "mesh:3")}
    degree = {spec: sorted(map(len, fabric.out_links)) for spec, fabric in found.items()}
    assert degree == {"line:5": [1, 1, 2, 2, 2], "ring:5": [2] * 5, "mesh:3": [2, 2, 2, 2, 3, 3, 3, 3, 4]}
    assert len(load_fabric("ring:2").links) == 2 and len(load_fabric("ring:1").links) == 0 and len(load_fabric("torus:2").links) == 8
    for spec, same in (("torus:4?dims=2", nx.grid_graph([4, 4], periodic=True)), ("hypercube:4", nx.hypercube_graph(4)),
                       ("mesh:3?dims=3", nx.grid_graph([3, 3, 3])), ("star-gpu:5", nx.star_graph(4))):  # fmt: skip
        fabric = load_fabric(spec)
        assert nx.is_isomorphic(nx.Graph(fabric.link_ends), same), spec


def test_a_dragonfly_joins_every_two_groups_once():
    fabric = load_fabric("dragonfly:6")
    group = {s.name: s.group for s in fabric.switches}
    between = [(group[x.src], group[x.dst]) for x in fabric.links if x.src in group and x.dst in group and group[x.src] != group[x.dst]]
    assert len(between) == len(set(between)) == 6 * 5


def test_direct_and_trunk():
    direct = load_fabric("dgx-a100:2?net=direct")
    assert {(x.src, x.dst) for x in direct.links if x.kind == "NET"} == {(f"box{b}/nic{i}", f"box{1 - b}/nic{i}") for b in range(2) for i in range(8)}
    trunk = load_fabric("ndv2:3?net=trunk&trunk=5GB/s")
    assert {x.rate_Bps for x in trunk.links if "core" in (x.src, x.dst)} == {5 * 10**9}
    mixed = load_fabric("h100-a100?net=direct")
    assert {x.rate_Bps for x in mixed.links if x.kind == "NET"} == {25 * 10**9}  # the slower end


def test_the_p100_box_is_a_cube_of_quads():
    fabric = load_fabric("dgx1-p100")
    graph = nx.Graph(fabric.link_ends)
    assert len(fabric.links) == 32 and set(dict(graph.degree).values()) == {4} and nx.diameter(graph) == 2


def test_the_table_of_machines_is_whole():
    """Every figure has a source that exists and says when and where; names are unique; no source or device is there in vain."""
    used = {s for m in MACHINES.values() for s in m.sources} | {g.source for g in GPUS.values()}
    assert used == set(SOURCES)
    for source in SOURCES.values():
        assert source.title and source.date[:2] == "20" and source.url.startswith("https://") and source.read in ("page", "quoted", "known")
    devices = {d for m in MACHINES.values() for d in (m.device, *m.choices)} | {"p100", "v100", "mi250"}
    assert devices == set(GPUS) and {e.device for e in ELSEWHERE.values()} <= devices
    names = [n.casefold() for p in PRESETS.values() for n in (p.name, *p.aliases)]
    assert len(names) == len(set(names)) and not set(names) & set(ELSEWHERE)
    for gpu in GPUS.values():
        assert {"fp32"} <= set(gpu.flops) <= set(DTYPES) and gpu.memory_bytes and gpu.bandwidth_Bps
    for m in MACHINES.values():
        assert m.summary and m.nic_Bps and set(m.took) >= {"nic"} and (m.link_Bps or m.shape in ("pcie", "single"))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("p5.48xlarge:4", "p5:4"), ("ml.P5.48xlarge", "p5:1"), ("Standard_ND96isr_H100_v5:2?net=rails", "nd-h100-v5:2?net=rails"),
        ("u-p6e-gb200x72:2", "p6e-gb200:2"), ("dgx-b200", "hgx-b200:1"),
        ("a3-megagpu-8g:2", "a3-mega:2"), ("v5p-128", "tpu-v5p:64"), ("v4-8:3", "tpu-v4:4?slices=3"), ("v5litepod-16", "tpu-v5e:16"),
        ("v6e-8?nic=1GB/s", "tpu-v6e:8?nic=1GB/s"), ("standard_nd40rs_v2", "ndv2:1"),
    ],
)  # fmt: skip
def test_a_providers_name_is_the_preset(alias, name):
    assert load_fabric(alias) == load_fabric(name) and load_fabric(alias).name == name


def test_slices_are_the_providers_shapes():
    """Sides from Google's own tables of v4, v5e and v5p; rings where it says so."""
    usual = {4: (2, 2, 1), 8: (2, 2, 2), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8), 1024: (8, 8, 16)}
    assert {n: slice_sides(MACHINES["tpu-v5p"], n, None) for n in usual} == usual
    flat = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 128: (8, 16), 256: (16, 16)}
    assert {n: tuple(sorted(slice_sides(MACHINES["tpu-v5e"], n, None))) for n in flat} == flat
    for spec, sides, rings in (("tpu-v5p:64", (4, 4, 4), True), ("tpu-v4:32", (2, 4, 4), False), ("tpu-v5e:128", (8, 16), (False, True)),
                               ("tpu-v6e:32", (4, 8), False), ("trn2", (4, 4), True)):  # fmt: skip
        assert nx.is_isomorphic(nx.Graph(load_fabric(spec).link_ends), nx.grid_graph(sides[::-1], periodic=rings[::-1] if rings in
                                                                                     ((False, True),) else rings)), spec  # fmt: skip
    hosts = load_fabric("tpu-v5p:64").groups
    assert len(hosts) == 16 and set(map(len, hosts.values())) == {4}
    for members in hosts.values():  # a host is a square of neighbours
        inside = [e for e in load_fabric("tpu-v5p:64").link_ends if set(e) <= set(members)]
        assert len(inside) == 8


def _signature(m):
    return (m.shape, m.devices, m.in_network, m.link_Bps, m.nics, m.nic_Bps, m.pcie_Bps, m.per_switch, m.per_host, m.axes, m.net)


UNLIKE = list({_signature(m): m.name for m in MACHINES.values()}.values())


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", UNLIKE)
def test_every_machine_is_routed_planned_and_checked(name, capsys, tmp_path):
    """Two boxes of each that differs from the others: a route between all pairs, and an all-gather plan that the checker accepts, above its bound."""
    spec = f"{name}:8?slices=2" if name in SLICES else f"{name}:2"
    argv = ["--fabric", spec, "--size", "1MiB", "--strategy", "ring", "--out", str(tmp_path / "plan.json"), "--json"]
    fabric = load_fabric(spec, "0-3,72-75" if name in RACKS else None)
    for a in range(len(fabric.devices)):
        for b in range(len(fabric.devices)):
            assert (fabric.route(a, b) != ()) == (a != b)
    code = main(["collective", "plan", "all-gather", *argv, *(["--devices", "0-3,72-75"] if name in RACKS else [])])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["bound"]["time_s"] > 0 and found["time_s"] >= found["bound"]["time_s"]
    assert main(["collective", "check", str(tmp_path / "plan.json")]) == 0
