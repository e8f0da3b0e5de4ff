"""Files that describe clusters: what is read from each, by hand; round trips; what is refused, with file and line; fuzz."""

import json
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import FormatError, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.adjacency import edges_text, matrix_text_of, parse_edges, parse_matrix
from meshwright.io.fabric.dcgm_topo import parse_dcgm_topo
from meshwright.io.fabric.document import fabric_document, fabric_from_document
from meshwright.io.fabric.imported import Source, format_of, import_fabric, read_source
from meshwright.io.fabric.name import load_fabric
from meshwright.io.fabric.nvidia_topo import parse_nvidia_topo
from meshwright.io.fabric.rocm_topo import parse_rocm_topo
from meshwright.io.fabric.topo_matrix import Assumed, TopoMatrix, matrix_fabric
from meshwright.io.nccl.fabric import Join, nccl_fabric, nvlink_rate_Bps
from meshwright.io.nccl.graph import graph_lines, parse_nccl_graph
from meshwright.io.nccl.topology import parse_nccl_topology, read_nccl_topology
from meshwright.io.nccl.write import nccl_topology_text
from meshwright.report.fabric_matrix import cells
from meshwright.testing.fabrics import fabrics

DATA = Path(__file__).parent.parent / "data" / "topology"
GB = 10**9


def read(name: str, **more) -> Fabric:
    fabric = import_fabric([read_source(str(DATA / name))], **more)
    assert fabric_from_document(fabric_document(fabric)) == fabric and fabric.provenance
    return fabric


def rate(fabric: Fabric, a: str, b: str) -> int:
    return sum(x.rate_Bps for x in fabric.links if (x.src, x.dst) == (a, b))


# ---- NCCL topology -----------------------------------------------------------------------------------------------------
def test_rates_of_an_nvswitch_box():
    fabric = read("box_nvswitch.xml")
    assert [d.name for d in fabric.devices] == ["box0/gpu0", "box0/gpu1", "box0/gpu2"]
    assert rate(fabric, "box0/gpu0", "box0/nvswitch") == 18 * 20_600_000_000 == rate(fabric, "box0/nvswitch", "box0/gpu0")
    assert rate(fabric, "box0/gpu0", "box0/pci-16-00") == 48 * GB  # gen 5 x16
    assert rate(fabric, "box0/cpu0", "box0/cpu1") == 22 * GB  # Sapphire Rapids
    assert rate(fabric, "box0/mlx5_1", "box0/card-9a-00") == 48 * GB and rate(fabric, "box0/mlx5_1.2", "box0/card-9a-00") == 48 * GB
    assert next(s for s in fabric.switches if s.name == "box0/nvswitch").multicast
    fabric.require_connected()
    # as `nvidia-smi topo -m` would say
    assert cells(fabric, 3) == [["X", "NV18", "NV18"], ["NV18", "X", "NV18"], ["NV18", "NV18", "X"]]
    tree = nccl_fabric([parse_nccl_topology((DATA / "box_nvswitch.xml").read_bytes().replace(b"count", b"unused"))], "x")
    assert rate(tree, "box0/gpu0", "box0/nvswitch") == 2 * 20_600_000_000  # a link without a count is one


def test_kinds_of_a_pcie_tree():
    fabric = read("vm.xml")
    assert cells(fabric, 3) == [["X", "PIX", "SYS"], ["PIX", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert rate(fabric, "box0/pci-ffff-ff-01", "box0/cpu0") == 187_500_000  # 2.5 GT/s x1
    assert rate(fabric, "box0/cpu0", "box0/cpu1") == 16 * GB  # AMD


def test_direct_links_cpus_and_virtual_nics():
    fabric = read("box_direct.xml")
    assert rate(fabric, "box0/gpu0", "box0/gpu1") == 60 * GB == rate(fabric, "box0/gpu1", "box0/gpu0")
    assert sorted(x.rate_Bps for x in fabric.links if (x.src, x.dst) == ("box0/gpu0", "box0/cpu0")) == [12 * GB, 60 * GB]  # gen 3 x16 assumed
    assert "box0/eth_0_x" in fabric.actor_of
    nominal = read("box_direct.xml", join=Join(rates="nominal"))
    assert rate(nominal, "box0/gpu0", "box0/gpu1") == 75 * GB


def test_xgmi():
    fabric = read("rccl.xml")
    assert all(rate(fabric, f"box0/gpu{a}", f"box0/gpu{b}") == 48 * GB for a in range(3) for b in range(3) if a != b)
    assert {x.kind for x in fabric.links if x.src == "box0/gpu0" and "gpu" in x.dst} == {"XGMI1"}


def test_several_hosts_of_one_file_share_their_nvswitch():
    fabric = read("trays.xml")
    assert [d.group for d in fabric.devices] == ["box0", "box0", "box1", "box1"]
    assert rate(fabric, "box1/gpu0", "nvswitch") == 18 * 40_100_000_000 and rate(fabric, "box1/gpu1", "nvswitch") == 0
    assert sum(x.rate_Bps for x in fabric.links if x.kind == "C2C" and x.src == "box0/gpu0") == 44_712_000_000 * 5
    assert rate(fabric, "box0/mlx5_0", "ib") == 50 * GB


@pytest.mark.parametrize("net", ["switch", "rails", "spine", "planes", "direct", "trunk"])
def test_files_are_joined_by_the_network_that_is_stated(net):
    fabric = read("box_nvswitch.xml", join=Join(copies=2, net=net))
    fabric.require_connected()
    assert len(fabric.devices) == 6 and len(fabric.groups) == 2
    assert sum(x.rate_Bps for x in fabric.links if x.kind == "NET" and x.src.startswith("box1/")) == (50 + 50) * GB + 12_500_000_000
    two = import_fabric([read_source(str(DATA / "box_nvswitch.xml")), read_source(str(DATA / "vm.xml"))], join=Join(nic=10 * GB))
    assert len(two.devices) == 6 and rate(two, "box1/nic-0101-00-00", "ib") == 10 * GB


def test_what_a_cloud_file_leaves_out_can_be_stated():
    fabric = read("vm.xml", join=Join(nvswitch=300 * GB, gpu="a100", copies=2))
    assert rate(fabric, "box1/gpu2", "box1/nvswitch") == 300 * GB and fabric.devices[0].memory_bytes == 80 * GB
    for bad, text in ((Join(gpu="z80"), "no GPU make 'z80'"), (Join(copies=3000), "too many"), (Join(copies=0), "no topology")):
        with pytest.raises(UsageError, match=text):
            read("vm.xml", join=bad)
    with pytest.raises(UsageError, match="has an NVSwitch already"):
        read("box_nvswitch.xml", join=Join(nvswitch=GB))
    with pytest.raises(UsageError, match="net=direct joins two boxes"):
        read("vm.xml", join=Join(copies=3, net="direct"))


def test_nvlink_figures():
    assert [nvlink_rate_Bps(sm) // 10**6 for sm in (60, 70, 80, 86, 90, 100, 103, 0)] == [18000, 20000, 20000, 12000, 20600, 40100, 40100, 18000]


BOX = '<system version="1"><cpu numaid="0">{}</cpu></system>'
GPU = '<pci busid="0000:0{0}:00.0" class="0x030200"><gpu dev="{0}" sm="80">{1}</gpu></pci>'


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("<graphs/>", "t.xml: line 1: <graphs>", "must be a <system> document"),
        ('<system version="3"><cpu/></system>', "line 1", "version 3 is not known"),
        ("<system/>", "line 1", "has no <cpu>"),
        (BOX.format(""), "line 1", "has no GPU"),
        (BOX.format("\n<pci busid='x'/>"), "line 2: <pci>", "busid: must look like"),
        (BOX.format(GPU.format(1, "") + "\n" + GPU.format(1, "")), "line 2: <pci>", "busid 0000:01:00.0 is used twice, first in line 1"),
        (BOX.format(GPU.format(1, "") + "\n" + GPU.format(2, "").replace('dev="2"', 'dev="1"')), "line 2", "GPU dev 1 is used twice"),
        (BOX.format(GPU.format(1, "<nvlink target='q'/>")), "<nvlink>", "target: must be a bus id"),
        (BOX.format(GPU.format(1, "<nvlink target='0:1:2.0' count='-1'/>")), "<nvlink>", "count: must be 0..1024"),
        (BOX.format(GPU.format(1, "<c2c bw='99999999999' count='1'/>")), "<c2c>", "bw: must be within"),
        (BOX.format(GPU.format(1, "").replace("<gpu", "<gpu/><gpu")), "<gpu>", "a second <gpu>"),
        (BOX.format(GPU.format(1, "").replace('class="', 'link_width="-1" class="')), "<pci>", "link_width: must be 0..64"),
        (BOX.format(GPU.format(1, "").replace('sm="80"', 'sm="eighty"')), "<gpu>", "sm: must be a whole number, got 'eighty'"),
        ('<system version="1"><cpu numaid="0"/><cpu numaid="0">' + GPU.format(1, "") + "</cpu></system>", "<cpu>", "numaid 0 is used twice"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><system/>', "line 1", "has a DOCTYPE"),
        (BOX.format("<pci busid='0:0:0.0'>" * 80), "line 1", "nests deeper"),
    ],
)
def test_wrong_topologies_point(text, where, message):
    with pytest.raises(FormatError) as caught:
        parse_nccl_topology(text.encode(), "t.xml")
    assert where in caught.value.where and message in caught.value.message


def test_a_link_to_nowhere_points():
    system = parse_nccl_topology(BOX.format("\n" + GPU.format(1, "<nvlink target='0000:77:00.0' count='2' tclass='0x030200'/>")).encode(), "t.xml")
    with pytest.raises(FormatError, match=r"t.xml: line 2: <nvlink>: target 0000:77:00.0 is no GPU of this file"):
        nccl_fabric([system], "x")
    alone = parse_nccl_topology(BOX.format(GPU.format(1, "")).encode(), "t.xml")
    with pytest.raises(UsageError, match="box0 has no NIC to join it by"):
        nccl_fabric([alone, alone], "x")


def shape(fabric: Fabric) -> nx.DiGraph:
    graph = nx.DiGraph()
    for i, name in enumerate(fabric.actor_names):
        graph.add_node(name, device=i < len(fabric.devices))
    for x in fabric.links:
        old = graph.get_edge_data(x.src, x.dst, {"rate": 0})["rate"]
        graph.add_edge(x.src, x.dst, rate=old + x.rate_Bps)
    return graph


def alike(a: Fabric, b: Fabric) -> bool:
    return nx.is_isomorphic(shape(a), shape(b), node_match=lambda x, y: x == y, edge_match=lambda x, y: x == y)


@pytest.mark.parametrize("name", ["box_nvswitch.xml", "box_direct.xml", "vm.xml", "rccl.xml"])
def test_written_and_read_again_it_is_the_same_machine(name):
    first = read(name)
    again = nccl_fabric([parse_nccl_topology(nccl_topology_text(first).encode())], first.name)
    assert [d.name for d in again.devices] == [d.name for d in first.devices]
    if name != "box_nvswitch.xml":  # there a card with two ports becomes two NICs behind a switch
        assert alike(first, again)
    twice = nccl_fabric([parse_nccl_topology(nccl_topology_text(again).encode())], first.name)
    assert alike(again, twice)


@pytest.mark.parametrize("spec", ["dgx1-v100", "dgx-a100:2", "dgx-h100:2", "mi300x", "dgx1-p100:2", "mi250"])
def test_presets_become_topology_files(spec):
    fabric = load_fabric(spec)
    made = nccl_fabric([parse_nccl_topology(nccl_topology_text(fabric, "box0").encode())], "x", Join(rates="nominal"))
    assert len(made.devices) == len(fabric.groups["box0"])

    def bundles(of: Fabric) -> list[tuple[str, int, int]]:
        number = {d.name: i for i, d in enumerate(of.devices) if d.group == "box0"}
        return sorted((x.kind, number[x.src], number.get(x.dst, -1)) for x in of.links if x.kind[:2] in ("NV", "XG") and x.src in number)

    assert bundles(made) == bundles(fabric) != []
    with pytest.raises(UsageError, match="servers"):
        nccl_topology_text(load_fabric("dgx-a100:2"))


# ---- matrices for people -----------------------------------------------------------------------------------------------
def test_nvidia_smi_with_an_nvswitch():
    matrix = parse_nvidia_topo((DATA / "topo_a100.txt").read_text())
    assert matrix.names == ("GPU0", "GPU1", "GPU2", "GPU3", "NIC0", "NIC1") and matrix.nic_names == {"NIC0": "mlx5_0", "NIC1": "mlx5_3"}
    assert matrix.numa == {0: "0", 1: "0", 2: "1", 3: "1"} and matrix.cells[0, 4] == "PXB"
    fabric = matrix_fabric([matrix], "x")
    assert rate(fabric, "box0/gpu3", "box0/nvswitch") == 300 * GB and "box0/mlx5_3" in fabric.actor_of
    fabric.require_connected()


def test_nvidia_smi_of_pcie_cards_pasted_with_drift():
    matrix = parse_nvidia_topo((DATA / "topo_pcie.txt").read_text())
    fabric = matrix_fabric([matrix], "x", Assumed(pcie=12 * GB, sys=9 * GB))
    wanted = [["X", "PIX", "SYS", "SYS"], ["PIX", "X", "SYS", "SYS"], ["SYS", "SYS", "X", "PHB"], ["SYS", "SYS", "PHB", "X"]]
    assert cells(fabric, 4) == wanted
    assert {x.rate_Bps for x in fabric.links if x.kind == "SYS"} == {9 * GB} and {x.rate_Bps for x in fabric.links if x.kind == "PIX"} == {12 * GB}


def amd_text(form: str, weights: list[list[int]], kinds: str = "XGMI", numa: tuple[int, ...] = ()) -> str:
    """What AMD's tools print; pairs whose weight is 15 have a link of their own."""
    n = len(weights)
    names = [f"GPU{i}" for i in range(n)] if form == "rocm-smi" else [f"0000:{16 * i + 5:02x}:00.0" for i in range(n)]
    of_type = [["0" if i == j else kinds for j in range(n)] for i in range(n)]
    titles = {"Weight between two GPUs": weights, "Hops between two GPUs": [[int(i != j) for j in range(n)] for i in range(n)],
              "Link Type between two GPUs": of_type}  # fmt: skip
    if form == "amd-smi":
        titles = {"WEIGHT TABLE:": weights, "LINK TYPE TABLE:": [["SELF" if c == "0" else c for c in row] for row in of_type]}
    lines = []
    for title, table in titles.items():
        lines += [f"{title:=^60}" if form == "rocm-smi" else title, " " * 13 + "".join(f"{x:<13}" for x in names)]
        lines += [f"{name:<13}" + "".join(f"{c:<13}" for c in row) for name, row in zip(names, table, strict=True)] + [""]
    return "\n".join([*lines, *(f"GPU[{i}]\t\t: (Topology) Numa Node: {node}" for i, node in enumerate(numa)), "==== End of ROCm SMI Log ===="])


@pytest.mark.parametrize("form", ["rocm-smi", "amd-smi"])
def test_amd_links_are_those_of_one_hop(form):
    square = [[0, 15, 15, 30], [15, 0, 30, 15], [15, 30, 0, 15], [30, 15, 15, 0]]
    source = Source("topo.txt", amd_text(form, square).encode())
    assert format_of(source) == "rocm-smi"
    fabric = import_fabric([source], assumed=Assumed(gpu="mi300x"))
    links = {(x.src[-1], x.dst[-1]): (x.rate_Bps, x.kind) for x in fabric.links}
    assert links == {(str(a), str(b)): (64 * GB, "XGMI1") for a in range(4) for b in range(4) if square[a][b] == 15}
    assert fabric.devices[0].memory_bytes == 192 * GB
    assert {x.rate_Bps for x in import_fabric([source], assumed=Assumed(nvlink=50 * GB)).links} == {50 * GB}


def test_amd_cards_on_pcie_meet_in_their_numa_node():
    text = amd_text("rocm-smi", [[0, 40, 72, 72], [40, 0, 72, 72], [72, 72, 0, 40], [72, 72, 40, 0]], "PCIE", (0, 0, 1, 1))
    fabric = matrix_fabric([parse_rocm_topo(text)], "x")
    assert cells(fabric, 4) == [["X", "NODE", "SYS", "SYS"], ["NODE", "X", "SYS", "SYS"], ["SYS", "SYS", "X", "NODE"], ["SYS", "SYS", "NODE", "X"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Link Type between", "Link Type\n"), "no row for each"), (("XGMI         0", "XGMI         7"), "with 0 on the diagonal"),
        (("0            XGMI", "0            NVL"), "type 'NVL'"), (("15", "x"), "weight 'X'"), (("GPU1", "GPU0"), "of them different"),
        (("Weight between two GPUs", "Weight"), None), (("GPU1         15", "GPU2         15"), "no row for each"),
    ],
)  # fmt: skip
def test_damaged_amd_tables_point(change, message):
    text = amd_text("rocm-smi", [[0, 15], [15, 0]]).replace(*change)
    if message is None:
        assert parse_rocm_topo(text).cells == {(0, 1): "NV1", (1, 0): "NV1"}
        return
    with pytest.raises(FormatError, match=message):
        parse_rocm_topo(text, "t.txt")


def test_a_text_of_powershell_and_a_quoted_one_are_read(tmp_path):
    """PowerShell's `>` writes UTF-16; mails and issues quote with `> `."""
    text = (DATA / "topo_a100.txt").read_text()
    plain = import_fabric([Source("t.txt", text.encode())])
    (tmp_path / "t.txt").write_text(text, encoding="utf-16")
    assert import_fabric([read_source(str(tmp_path / "t.txt"))]) == plain
    assert import_fabric([Source("t.txt", "\n".join(f"> {line}" for line in text.splitlines()).encode())]) == plain


@pytest.mark.parametrize("text", ["SwitchName=s0 Nodes=tux[0-5]", "Architecture: x86_64\nCPU(s): 64", "# nThread 1\n  8  2  float  sum  -1"])
def test_a_file_of_no_known_kind_says_what_is_known(text):
    with pytest.raises(FormatError, match=r"no known kind of file; read as a (matrix|list of edges)") as caught:
        import_fabric([Source("t.txt", text.encode())])
    assert "nvidia-smi topo -m" in caught.value.hint


def tree_matrix(draw) -> TopoMatrix:
    """A random PCIe tree as the matrix that nvidia-smi would print."""
    n = draw(st.integers(2, 9))
    at = [tuple(draw(st.integers(0, 1)) for _ in range(4)) for _ in range(n)]  # socket, NUMA node, bridge, tree
    levels = ("SYS", "NODE", "PHB", "PXB", "PIX")
    said = {(a, b): levels[next((i for i in range(4) if at[a][i] != at[b][i]), 4)] for a in range(n) for b in range(n) if a != b}
    return TopoMatrix("t", tuple(f"GPU{i}" for i in range(n)), said)


@settings(max_examples=60)
@given(st.composite(tree_matrix)())
def test_a_tree_is_rebuilt_as_it_was_printed(matrix):
    fabric = matrix_fabric([matrix], "x")
    n = len(matrix.names)
    assert {(a, b): cell for a, row in enumerate(cells(fabric, n)) for b, cell in enumerate(row) if a != b} == dict(matrix.cells)
    header = "\t" + "\t".join(matrix.names)
    rows = ["\t".join([name, *("X" if i == j else matrix.cells[i, j] for j in range(n))]) for i, name in enumerate(matrix.names)]
    assert parse_nvidia_topo("\n".join([header, *rows])).cells == matrix.cells


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no header"),
        ("GPU0 GPU1\nGPU0 X NV2", "no row for GPU1"),
        ("GPU0 GPU1\nGPU0 X\nGPU1 NV2 X", "1 cells for 2 columns"),
        ("GPU0 GPU1\nGPU0 X QPI\nGPU1 NV2 X", "1 of 2 cells, then 'QPI'"),
        ("GPU0 GPU1\nGPU0 NV2 X\nGPU1 NV2 X", "column GPU0: 'NV2'"),
        ("GPU0 GPU0\nGPU0 X NV2", "the header names 2 columns, 1 of them different"),
        ("GPU0 GPU1\nGPU0 X NV2\nGPU0 X NV2", "a second row GPU0"),
    ],
)
def test_wrong_tables_point(text, message):
    with pytest.raises(FormatError) as caught:
        parse_nvidia_topo(text, "t.txt")
    assert message in str(caught.value) and caught.value.where.startswith("t.txt")


def test_a_table_that_contradicts_itself():
    with pytest.raises(FormatError, match="GPU0 - GPU1 is NV2, the other way PIX"):
        matrix_fabric([parse_nvidia_topo("GPU0 GPU1\nGPU0 X NV2\nGPU1 PIX X")], "x")
    for bad, text in ((Assumed(gpu="z80"), "no GPU make"), (Assumed(copies=2), "box0 has no NIC"), (Assumed(copies=0), "0 servers")):
        with pytest.raises(UsageError, match=text):
            matrix_fabric([parse_nvidia_topo("GPU0 GPU1\nGPU0 X NV2\nGPU1 NV2 X")], "x", bad)


def test_dcgm():
    matrix = parse_dcgm_topo((DATA / "dcgm.json").read_text())
    assert matrix.names == ("GPU0", "GPU1", "GPU2") and matrix.nvlinks(0, 1) == 2 and matrix.nvlinks(2, 0) == 1 and matrix.cells[2, 1] == "SYS"
    fabric = matrix_fabric([matrix], "x", Assumed(nvlink=20 * GB))
    assert rate(fabric, "box0/gpu0", "box0/gpu1") == 40 * GB and rate(fabric, "box0/gpu2", "box0/gpu0") == 20 * GB
    fabric.require_connected()
    one = '{"header": ["GPU ID: %d"], "body": %s}'
    for text, message in [
        ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("{}", "must have a list `header`"),
        (one % (0, '{"To GPU 0": {"value": "Unknown"}}'), "joined to itself"),
        ('{"header": ["Topology Information", "mygroup"], "body": {}}', "no `GPU ID: N`"), (one % (0, '{"To GPU 1": 3}'), "must be a table of texts"),
        (one % (0, '{"To GPU 1": {"value": "Connected by hand"}}'), "unknown path 'Connected by hand'"),
        (one % (0, "{}") + one % (0, "{}"), "GPU 0 is there twice"),
        (one % (0, '{"To GPU 1": {"value": "Unknown", "overflow": ["Connected via many NVLINKs"]}}'), "unknown path"), ("", "0 GPUs"),
        (one % (0, '{"To GPU 1": {"value": "Unknown"}, "To GPU 2": {"value": "Unknown"}}'), "no document says how GPU 1 and GPU 2 are connected"),
    ]:  # fmt: skip
        with pytest.raises(FormatError) as caught:
            parse_dcgm_topo(text, "t.json")
        assert message in caught.value.message, text[:80]


# ---- graphs ------------------------------------------------------------------------------------------------------------
def test_rings_and_trees():
    graphs = parse_nccl_graph((DATA / "graph.xml").read_bytes())
    assert [g.pattern for g in graphs] == ["ring", "tree", "NVLS"] and graphs[0].channels[0].enters == 0 and graphs[0].channels[0].leaves == 1
    lines = graph_lines(graphs)
    assert "  channel 0: net 0 -> GPU0 -> GPU1 -> GPU2 -> GPU3 -> net 1" in lines and "  channel 1: GPU0 -> GPU2 -> GPU1 -> GPU3 -> GPU0" in lines
    head = '<graphs><graph id="0" pattern="4" nchannels="{}" speedintra="{}">{}</graph></graphs>'
    for text, message in [
        ("<system/>", "must be a <graphs>"), ("<graphs/>", "has no <graph>"),
        (head.format(2, 1, '<channel><gpu dev="0"/></channel>'), "nchannels is 2, but 1"),
        (head.format(1, 1, "<channel/>"), "has no <gpu>"),
        (head.format(1, 1, '<channel><gpu dev="0"/><gpu dev="0"/></channel>'), "GPU 0 is there twice"),
        (head.format(0, "fast", ""), "speedintra: must be a number"), (head.format(0, "-1", ""), "between 0 and"),
        (head.format("x", 1, ""), "nchannels: must be"),
    ]:  # fmt: skip
        with pytest.raises(FormatError, match=message):
            parse_nccl_graph(text.encode())


# ---- matrices and edges for programs -----------------------------------------------------------------------------------
def test_matrices():
    assert {(x.src[1:], x.dst[1:], x.rate_Bps) for x in read("dgx1.txt", unit_Bps=25 * GB).links} == {
        (x.src[-1], x.dst[-1], x.rate_Bps) for x in load_fabric("dgx1-v100").links
    }
    hub = read("hub.csv")
    assert [s.name for s in hub.switches] == ["hub"] and rate(hub, "gpu1", "hub") == 12_500_000_000 and rate(hub, "hub", "gpu1") == 500_000_000
    lab = read("lab.edges")
    assert [d.name for d in lab.devices] == ["a",
    "b"] and lab.devices[0].group == "hostA" and lab.links[-1].latency_s == 0.7e-6 and len(lab.links) == 5


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_matrix, "", "is empty"),
        (parse_matrix, "0 1\n1", "line 2: 1 cells for 2 rows"),
        (parse_matrix, "1 1\n1 0", "line 1: column 1: 'd0' is joined to itself"),
        (parse_matrix, "0 fast\n1 0\n1 2", "no name: '0'"),
        (parse_matrix, "0 1x\n1 0", "column 2: "),
        (parse_matrix, "0 99999999999\n1 0", "must be above 0 and at most"),
        (parse_matrix, "a a\n0 1\n1 0", "the name 'a' is used twice"),
        (parse_matrix, "n a b\na 0 1\nc 1 0", "row 'c' stands where column 'b' does"),
        (parse_matrix, "a* b*\n0 1\n1 0", "names switches only"),
        (parse_edges, "a b", "line 1: 2 words"),
        (parse_edges, "a a 1", "'a' is joined to itself"),
        (parse_edges, "a b fast", "must be a number with a unit"),
        (parse_edges, "a b 0", "must be above 0"),
        (parse_edges, "a b 1 5", "has no unit"),
        (parse_edges, "a b 1 9000s", "at most 3600 s"),
        (parse_edges, "a b 1 1s " + "k" * 17, "is longer than 16"),
        (parse_edges, "device a\ndevice a", "line 2: 'a' is declared twice"),
        (parse_edges, "switch s", "names no device"),
        (parse_edges, "-a b 1", "no name: '-a'"),
        (parse_edges, "a b 0.0000000001GB/s", "not a whole number"),
    ],
)
def test_wrong_matrices_and_edges_point(parse, text, message):
    with pytest.raises(FormatError) as caught:
        parse(text, where="t")
    assert message in f"{caught.value.where}: {caught.value.message} {caught.value.hint}"


@settings(max_examples=80)
@given(fabrics(min_devices=1, max_devices=6))
def test_round_trips(fabric):
    again = parse_edges(edges_text(fabric), unit_Bps=1)
    facts = [(x.src, x.dst, x.rate_Bps, x.latency_s, x.kind) for x in fabric.links]
    assert [(x.src, x.dst, x.rate_Bps, x.latency_s, x.kind) for x in again.links] == facts
    assert again.actor_names == fabric.actor_names and [d.group for d in again.devices] == [d.group for d in fabric.devices]
    matrix = parse_matrix(matrix_text_of(fabric), unit_Bps=1)
    assert matrix.actor_names == fabric.actor_names and shape(matrix).edges == shape(fabric).edges
    assert all(shape(matrix).edges[e] == shape(fabric).edges[e] for e in shape(fabric).edges)


# ---- all of them -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "form"),
    [("box_nvswitch.xml", "nccl"), ("graph.xml", "nccl-graph"), ("topo_a100.txt", "nvidia-smi"), ("topo_pcie.txt", "nvidia-smi"), ("dcgm.json",
    "dcgm"),
     ("dgx1.txt", "matrix"), ("hub.csv", "matrix"), ("lab.edges", "edges")],
)  # fmt: skip
def test_formats_are_told_by_content(name, form):
    assert format_of(read_source(str(DATA / name))) == form


def test_refused_sources(tmp_path):
    with pytest.raises(FormatError, match="is empty"):
        format_of(Source("e", b" \n"))
    with pytest.raises(FormatError, match="is not UTF-8"):
        import_fabric([Source("e", b"\xff\xfe\x00")])
    with pytest.raises(UsageError, match="cannot read"):
        read_source(str(tmp_path / "nowhere"))
    files = [read_source(str(DATA / x)) for x in ("vm.xml", "hub.csv")]
    with pytest.raises(UsageError, match="several formats: matrix, nccl"):
        import_fabric(files)
    with pytest.raises(UsageError, match="one matrix file describes the whole fabric"):
        import_fabric([files[1], files[1]])
    with pytest.raises(UsageError, match="rings and trees, not a fabric"):
        import_fabric([read_source(str(DATA / "graph.xml"))])
    with pytest.raises(UsageError, match="0 files"):
        import_fabric([])
    with pytest.raises(UsageError, match="no format 'x'"):
        import_fabric(files[:1], form="x")


SAMPLES = [path.read_bytes() for path in sorted(DATA.iterdir())]


@settings(max_examples=400)
@given(st.data())
def test_damaged_files_are_read_or_refused(data):
    blob = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(blob)))
        how = data.draw(st.sampled_from(["cut", "byte", "copy", "word"]))
        if how == "cut":
            del blob[at : at + data.draw(st.integers(1, 40))]
        elif how == "byte":
            blob[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif how == "copy":
            blob[at:at] = blob[at : at + data.draw(st.integers(1, 60))]
        else:
            blob[at:at] = data.draw(st.sampled_from([
                b"<pci>", b"NV99", b"-1", b"1e99", b"\x00", b"&lt;", b'"', b"GPU0 ",
                b"[" * 50, b"999999999999999999999",
            ]))
    source = Source("f", bytes(blob))
    try:
        if format_of(source) == "nccl-graph":
            parse_nccl_graph(source.data)
        else:
            fabric = import_fabric([source])
            assert fabric_from_document(fabric_document(fabric)) == fabric
    except (FormatError, UsageError) as error:
        assert error.message


# ---- command -----------------------------------------------------------------------------------------------------------
def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fabric", "import", str(DATA / "box_nvswitch.xml"), "--boxes", "2", "--net", "rails", "-o", "c.toml", "--name", "c"]) == 0
    assert "6 devices" in capsys.readouterr().out
    fabric = load_fabric("c.toml")
    assert fabric.name == "c" and any(s.name == "rail2" for s in fabric.switches)
    assert any("box_nvswitch.xml" in note.source for note in fabric.provenance)
    for form, reader in (("edges", parse_edges), ("matrix", parse_matrix)):
        assert main(["fabric", "import", str(DATA / "lab.edges"), "--as", form]) == 0
        assert len(reader(capsys.readouterr().out, unit_Bps=1).links) == 5
    assert main(["fabric", "import", str(DATA / "vm.xml"), "--as", "nccl", "-o", "again.xml"]) == 0
    assert len(list(read_nccl_topology("again.xml").devices())) == len(list(read_nccl_topology(DATA / "vm.xml").devices()))
    capsys.readouterr()
    assert main(["fabric", "import", str(DATA / "graph.xml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["graphs"][0]["pattern"] == "ring"
    assert main(["fabric", "import", str(DATA / "hub.csv"), "-o", "hub.json"]) == 0 and load_fabric("hub.json").name == "hub"
    for words, code, text in [
        (["vm.xml", "--net", "ring"], 2, "no network 'ring'"), (["vm.xml", "--boxes", "0"], 2, "--boxes: must be >= 1"),
        (["vm.xml", "--nic", "fast"], 2, "--nic: must be a number with a unit"), (["vm.xml", "--unit", "0B/s"], 2, "--unit: must be above 0"),
        (["vm.xml", "--format", "x"], 2, "no format 'x'"), (["vm.xml", "--format", "dcgm"], 1, "vm.xml"),
    ]:  # fmt: skip
        capsys.readouterr()
        assert main(["fabric", "import", str(DATA / words[0]), *words[1:]]) == code
        assert text in capsys.readouterr().err
