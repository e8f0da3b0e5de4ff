"""`fabric here`: what tools say of a machine, in the forms in which people post them; and hostile text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.frame import main
from meshwright.errors import FormatError, MeshwrightError, UsageError
from meshwright.fabric.near import device_called
from meshwright.io.fabric.machine_outputs import (
    Cpu,
    GpuState,
    Port,
    machine_fabric,
    parse_ibstat,
    parse_ibv_devinfo,
    parse_lscpu,
    parse_nvidia_q,
)
from meshwright.io.fabric.toml import parse_fabric_toml
from meshwright.probe.fabric import machine


def dgx_a100_topo():
    """The matrix of a DGX A100 with twelve NICs, as posted in NVIDIA/nccl issue 1505: two GPUs and two NICs under PCIe bridges, four times; a pair of
    storage NICs, which hang on their own."""
    names = [f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(12)]
    quad = {f"GPU{i}": i // 2 for i in range(8)} | dict(zip([f"NIC{i}" for i in range(12)], (0, 0, 1, 1, 4, 4, 2, 2, 3, 3, 5, 5), strict=True))

    def cell(a, b):
        if a == b:
            return " X "
        if a[0] == b[0] == "G":
            return "NV12"
        if quad[a] == quad[b]:
            return "PXB"
        return "SYS"

    numa = (3, 3, 1, 1, 7, 7, 5, 5)
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for i, a in enumerate(names):
        tail = f"\t48-63,176-191\t{numa[i]}\t\tN/A" if i < 8 else ""
        lines.append(a + "\t" + "\t".join(cell(a, b) for b in names) + tail)
    return "\n".join([*lines, "", "NIC Legend:", "", *(f"  NIC{i}: mlx5_{i}" for i in range(12))])


GPU_Q = """
==============NVSMI LOG==============

Timestamp                                 : Fri Nov  7 10:00:00 2025
Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 8
"""


def gpu_q(n, product="NVIDIA A100-SXM4-40GB", memory=40960, generation=4):
    one = f"""GPU 00000000:{{:02X}}:00.0
    Product Name                          : {product}
    Product Brand                         : NVIDIA
    PCI
        Bus                               : 0x07
        GPU Link Info
            PCIe Generation
                Max                       : {generation}
                Current                   : {generation}
                Device Max                : {generation}
            Link Width
                Max                       : 16x
                Current                   : 16x
    FB Memory Usage
        Total                             : {memory} MiB
        Reserved                          : 613 MiB
    BAR1 Memory Usage
        Total                             : 65536 MiB
"""
    return GPU_Q + "".join(one.format(i + 7) for i in range(n))


def ibstat(n, down=()):
    return "".join(
        f"CA 'mlx5_{i}'\n\tCA type: MT4123\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: {'Down' if i in down else 'Active'}\n"
        f"\t\tPhysical state: LinkUp\n\t\tRate: {40 if i in down else 200}\n\t\tLink layer: {'Ethernet' if i in down else 'InfiniBand'}\n"
        for i in range(n)
    )


LSCPU = "Architecture:            x86_64\nCPU(s):                  112\nModel name:              Intel(R) Xeon(R) Platinum 8462Y+\n" \
        "Socket(s):               2\nNUMA node(s):            2\nVulnerability Meltdown:  Not affected\n"  # fmt: skip


def test_a_dgx_a100_is_read():
    outputs = {"topo": dgx_a100_topo(), "nvidia-q": gpu_q(8), "ibstat": ibstat(12, down=(4, 5)), "lscpu": LSCPU}
    fabric = machine_fabric(outputs)
    assert len(fabric.devices) == 8 and {d.memory_bytes for d in fabric.devices} == {40960 << 20} and fabric.devices[0].flops["bf16"] == 312 * 10**12
    assert {x.rate_Bps for x in fabric.links if x.kind == "NV12"} == {300 * 10**9}
    assert sum("mlx5" in s.name for s in fabric.switches) == 10 and not any(s.name.endswith("mlx5_4") for s in fabric.switches)
    notes = {n.what: n.source for n in fabric.provenance}
    assert "10 ports up, the slowest at 25000000000 B/s; down and left out: mlx5_4, mlx5_5" in notes["ports"]
    assert "8 x NVIDIA A100-SXM4-40GB" in notes["GPUs"] and "A100" in notes["memory, FLOP/s"]
    two = machine_fabric(outputs, boxes=2, net="rails")
    assert len(two.devices) == 16 and {x.rate_Bps for x in two.links if x.kind == "NET"} == {25 * 10**9}
    two.require_connected()


def test_a_machine_of_pcie_cards_without_ports_and_unknown_ones():
    topo = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPHB\t0-63\t0\t\tN/A\nGPU1\tPHB\t X \t0-63\t0\t\tN/A\n"
    fabric = machine_fabric({"topo": topo, "nvidia-q": gpu_q(2, "NVIDIA GeForce RTX 5090", 32607, 5)})
    assert [d.memory_bytes for d in fabric.devices] == [32607 << 20] * 2 and not fabric.devices[0].flops
    assert {x.rate_Bps for x in fabric.links} == {48 * 10**9}
    assert any("not in our table" in n.source for n in fabric.provenance)


def test_nccls_own_file_is_preferred():
    xml = '<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"><pci' \
          '  busid="0000:07:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="80" rank="0" gdr="1"/></pci>' \
          '</cpu></system>'  # fmt: skip
    fabric = machine_fabric({"nccl": xml, "topo": dgx_a100_topo(), "nvidia-q": gpu_q(8)})
    assert len(fabric.devices) == 1 and fabric.name == "here"


def test_cpus_where_there_is_no_gpu():
    fabric = machine_fabric({"lscpu": LSCPU}, cores=4)
    assert len(fabric.devices) == 4 and fabric.devices[0].kind == "cpu" and "8462Y+" in fabric.provenance[-1].source
    assert len(machine_fabric({}).devices) == 1
    with pytest.raises(UsageError, match="no GPUs and no ports"):
        machine_fabric({"lscpu": LSCPU}, boxes=2)


def test_the_tools_texts():
    assert parse_nvidia_q(gpu_q(3))[2] == GpuState("NVIDIA A100-SXM4-40GB", 40960 << 20, 24 * 10**9)
    assert parse_ibstat(ibstat(2, down=(1,))) == [Port("mlx5_0", True, 25 * 10**9, "InfiniBand"), Port("mlx5_1", False, 5 * 10**9, "Ethernet")]
    text = "hca_id:\tmlx5_0\n\ttransport:\t\t\tInfiniBand (0)\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tmax_mtu:\t\t4096 (5)\n" \
           "\t\t\tactive_width:\t\t4X (2)\n\t\t\tactive_speed:\t\t100.0 Gbps (128)\n\t\t\tlink_layer:\t\tEthernet\n"  # fmt: skip
    assert parse_ibv_devinfo(text) == [Port("mlx5_0", True, 50 * 10**9, "Ethernet")]
    assert parse_ibv_devinfo(text.replace("active_speed", "x"))[0].rate_Bps == 0
    assert parse_lscpu(LSCPU) == Cpu("Intel(R) Xeon(R) Platinum 8462Y+", 2, 2, 112)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_nvidia_q, "nothing", "0 GPUs"),
        (parse_nvidia_q, "x" * ((4 << 20) + 1), "longer than"),
        (parse_nvidia_q, "GPU 00000000:07:00.0\n" * 1025, "1025 GPUs"),
        (parse_ibstat, "CA 'a'\nPort 1:\nState: Active\nRate: fast\n", "not a rate in Gbit/s: 'fast'"),
        (parse_ibstat, "CA 'a'\nPort 1:\nState: Active\nRate: 1\n" * 1025, "1025 ports"),
        (parse_ibv_devinfo, "hca_id: a\nport: 1\nstate: PORT_ACTIVE\nactive_width: 4X\nactive_speed: 1.2.3 Gbps\n", "not a rate"),
        (parse_lscpu, "CPU(s): many", "how many CPUs"),
    ],
)
def test_what_cannot_be_read_is_refused(parse, text, said):
    with pytest.raises(FormatError, match=said.replace("(", r"\(")) as caught:
        parse(text)
    assert caught.value.where


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["topo", "nvidia-q", "ibstat", "ibv_devinfo", "lscpu", "nccl"]), st.data())
def test_damaged_outputs_are_read_or_refused(name, data):
    whole = {"topo": dgx_a100_topo(), "nvidia-q": gpu_q(8), "ibstat": ibstat(12), "lscpu": LSCPU, "ibv_devinfo": "hca_id: a\nport: 1\nstate: x\n",
             "nccl": '<system version="1"><cpu numaid="0"/></system>'}  # fmt: skip
    text = whole[name]
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.text(max_size=12)) + text[at + data.draw(st.integers(0, 40)) :]
    outputs = {k: v for k, v in whole.items() if k != "nccl" or name == "nccl"} | {name: text}
    try:
        fabric = machine_fabric(outputs)
    except MeshwrightError as error:
        assert str(error)
    else:
        assert fabric.devices


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", ""), ("nvidia-h100-mega-80gb", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA-A100-SXM4-80GB", "a100"), ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("nvidia-tesla-a100", "a100"),
        ("NVIDIA H200", "h200"), ("NVIDIA GB200", "gb200"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"), ("AMD_Instinct_MI300X_OAM", "mi300x"), ("NVIDIA L4", ""), ("", ""),
    ],
)  # fmt: skip
def test_products_by_their_names(product, device):
    assert device_called(product) == device


def test_the_command(capsys, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("ibstat", ibstat(12)), ("lscpu", LSCPU)):
        (tmp_path / f"{name}.out").write_text(text)
        (tools / name).write_text(f"#!/bin/sh\ncat {tmp_path / name}.out\n")
    (tmp_path / "topo.out").write_text(dgx_a100_topo())
    (tmp_path / "q.out").write_text(gpu_q(8))
    (tools / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in topo) cat {tmp_path}/topo.out;; -q) cat {tmp_path}/q.out;; esac\n')
    (tools / "ibv_devinfo").write_text("#!/bin/sh\necho no devices >&2\nexit 255\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/nowhere.xml")
    monkeypatch.setenv("HOME", str(tmp_path))
    file, saved = tmp_path / "node.toml", tmp_path / "saved"
    assert main(["fabric", "here", "-o", str(file), "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "read: ibstat, lscpu, nvidia-q, topo" in out and "not read: ibv_devinfo -v: exit code 255: no devices" in out
    assert "NCCL is told NCCL_TOPO_FILE=/nowhere.xml" in out and "8 gpu - 1 nvswitch: 8 x NV12 300 GB/s" in out
    assert len(parse_fabric_toml(file.read_text()).devices) == 8
    assert main(["fabric", "here", "--from", str(saved), "--boxes", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.fabric-here" and len(document["fabric"]["devices"]) == 16


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--boxes", "0"], "--boxes: must be >= 1"),
        (["--cores", "9999"], "--cores: must be between"),
        (["--net", "x"], "--net: no network 'x'"),
        (["-o", "x.yaml"], "--out must end in .toml or .json"),
        (["--from", "nowhere"], "nowhere: none of the outputs is there"),
        (["--save", "file/x"], "cannot write"),
    ],
)
def test_the_command_refuses(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["fabric", "here", *argv]) == 2
    assert said in capsys.readouterr().err


def test_nccls_settings(tmp_path, monkeypatch):
    (tmp_path / ".nccl.conf").write_text("# mine\nNCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO\nnonsense\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = machine.nccl_settings({"NCCL_DEBUG": "WARN", "PATH": "x"})
    assert (found["NCCL_IB_HCA"], found["NCCL_DEBUG"]) == ("mlx5", "WARN") and "PATH" not in found
