"""`fabric import` of every format, alone, together and from standard input; `fabric lint` with its exit codes."""

import io
import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.io.fabric.name import load_fabric

DATA = Path(__file__).parents[1] / "data" / "topology"
FILES = {  # file -> devices of one server
    "box_nvswitch.xml": 3, "box_direct.xml": 2, "trays.xml": 4, "rccl.xml": 3, "vm.xml": 3, "topo_a100.txt": 4, "topo_pcie.txt": 4, "dcgm.json": 3,
    "dgx1.txt": 8, "hub.csv": 2, "lab.edges": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_format_to_toml_and_json(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for out in ("f.toml", "f.json"):
        assert main(["fabric", "import", str(DATA / name), "--out", out]) == 0
        assert f"{out}: {FILES[name]} devices" in capsys.readouterr().out
    assert load_fabric("f.toml") == load_fabric("f.json") and len(load_fabric("f.toml").devices) == FILES[name]
    assert name in str(load_fabric("f.toml").provenance)
    assert main(["fabric", "import", str(DATA / name), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "f.json").read_text())
    assert main(["fabric", "show", "f.toml"]) == 0 and main(["fabric", "lint", "f.toml"]) in (0, 1)


@pytest.mark.parametrize("name", ["box_nvswitch.xml", "dcgm.json", "topo_a100.txt", "lab.edges", "hub.csv"])
def test_standard_input(capsys, tmp_path, monkeypatch, name):
    class Input:
        buffer = io.BytesIO((DATA / name).read_bytes())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", Input)
    assert main(["fabric", "import", "-", "-o", "in.toml", "--name", "in"]) == 0
    Input.buffer.seek(0)
    assert len(load_fabric("in.toml").devices) == FILES[name]
    capsys.readouterr()
    assert main(["fabric", "lint", "-"]) in (0, 1) and "standard input: " in capsys.readouterr().out


def test_several_files_are_several_servers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [str(DATA / "vm.xml"), str(DATA / "vm.xml"), str(DATA / "box_nvswitch.xml")]
    assert main(["fabric", "import", *files, "--net", "switch", "-o", "mixed.toml"]) == 0
    fabric = load_fabric("mixed.toml")
    assert {g: len(m) for g, m in fabric.groups.items()} == {"box0": 3, "box1": 3, "box2": 3}
    fabric.require_connected()
    capsys.readouterr()
    assert main(["collective", "bound", "all-gather", "--fabric", "mixed.toml", "--size", "1GiB"]) == 0
    assert "bottleneck: " in capsys.readouterr().out
    assert main(["fabric", "import", files[0], str(DATA / "hub.csv")]) == 2 and "several formats" in capsys.readouterr().err
    assert main(["fabric", "import", str(DATA / "hub.csv"), str(DATA / "hub.csv")]) == 2 and "describes the whole fabric" in capsys.readouterr().err


def test_refused_and_nothing_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.xml").write_text('<system version="1"><cpu/></system>')
    for words, code in (
        (["bad.xml"], 1), (["nowhere.xml"], 2), ([str(DATA / "vm.xml"), "--format", "dcgm"], 1), ([str(DATA / "vm.xml"), "--gpu", "x"], 2),
        ([str(DATA / "vm.xml"), "--boxes", "3", "--net", "direct"], 2), ([str(DATA / "graph.xml"), "bad.xml"], 1),
    ):  # fmt: skip
        assert main(["fabric", "import", *words, "--out", "out.toml"]) == code, words
        out, err = capsys.readouterr()
        assert not out and err.startswith("error: ") and not (tmp_path / "out.toml").exists()


# ---- lint ----------------------------------------------------------------------------------------------------------------
def test_exit_codes_of_lint(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fabric", "lint", "dgx-h100:2", "--strict"]) == 0
    assert capsys.readouterr().out == "dgx-h100:2: nothing to say\n"
    assert main(["fabric", "subset", "dgx-h100:3", "--without", "box1/nic2", "--out", "short.toml"]) == 0
    capsys.readouterr()
    assert main(["fabric", "lint", "short.toml"]) == 0
    out = capsys.readouterr().out
    assert "warning: box1: 7 NICs; most servers like it have 8 [missing-nic]" in out and out.endswith("0 errors, 1 warning, 1 note\n")
    assert "missing-nic: all-gather on this fabric: 469.6 GB/s at best; 521.7 GB/s if repaired (+11.1 %)" in out
    assert main(["fabric", "lint", "short.toml", "--strict"]) == 1
    assert main(["fabric", "lint", "short.toml", "--strict", "--devices", "0-7"]) == 0  # one whole server: nothing to compare with
    assert main(["fabric", "lint", "nowhere.toml"]) == 2 and main(["fabric", "lint", "no-such-preset"]) == 2
    capsys.readouterr()


def test_a_nic_that_bounds_nothing_still_slows_nccl(capsys, tmp_path, monkeypatch):
    """One of four boxes has a NIC that trained down to gen 3 x4: its other seven carry an all-gather, and NCCL makes slower channels everywhere."""

    def pci(bus, kind, link, inside):
        speed, width = link
        return f'<pci busid="0000:{bus:02x}:00.0" class="{kind}" link_speed="{speed}" link_width="{width}">{inside}</pci>'

    whole = ("32.0 GT/s PCIe", 16)
    monkeypatch.chdir(tmp_path)
    for name, slow in (("good", None), ("slow", 3)):
        slots = []
        for g in range(8):
            gpu = f'<gpu dev="{g}" sm="90" rank="{g}" gdr="1"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>'
            net = f'<nic><net name="mlx5_{g}" dev="{g}" speed="400000" port="1" guid="0x{g + 1:x}" gdr="1"/></nic>'
            card = pci(16 * g + 3, "0x020700", ("8.0 GT/s PCIe", 4) if g == slow else whole, net)
            slots.append(pci(16 * g + 1, "0x060400", whole, pci(16 * g + 2, "0x030200", whole, gpu) + card))
        cpu = f'<cpu numaid="0" arch="x86_64" vendor="GenuineIntel">{"".join(slots)}</cpu>'
        (tmp_path / f"{name}.xml").write_text(f'<system version="1">{cpu}</system>')
    assert main(["fabric", "import", "good.xml", "good.xml", "good.xml", "slow.xml", "-o", "four.toml"]) == 0
    capsys.readouterr()
    assert main(["fabric", "lint", "four.toml"]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("slow-pcie: "))
    assert "bound elsewhere" in line and "NCCL's all-reduce, by its model" in line and "if repaired (+" in line


def test_lint_as_json(capsys):
    assert main(["fabric", "lint", str(DATA / "vm.xml"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["version"], document["fabric"]) == ("meshwright.fabric-lint", 1, "vm.xml")
    first = document["findings"][0]
    assert (first["severity"], first["rule"]) == ("error", "slow-pcie") and first["where"].startswith("vm.xml: line 3: ")
    assert document["counts"]["error"] == 1 and {c["rule"] for c in document["costs"]} == {"slow-pcie"}
    assert all(c["repaired_Bps"] >= c["rate_Bps"] > 0 for c in document["costs"])


def test_a_file_that_cannot_be_read_is_a_finding(capsys, tmp_path):
    path = tmp_path / "broken.xml"
    path.write_text('<system version="1"><cpu numaid="0"><pci busid="?"/></cpu></system>')
    assert main(["fabric", "lint", str(path)]) == 1
    assert "error: broken.xml: line 1: <pci>: busid: must look like" in capsys.readouterr().out
