"""fabric list, show, subset through the command line."""

import json
from xml.etree import ElementTree

import pytest

from meshwright.cli import main
from meshwright.fabric.machines import MACHINES
from meshwright.fabric.presets import PRESETS
from meshwright.io.fabric.name import load_fabric


def run(capsys, *argv, code=0):
    assert main(list(argv)) == code
    return capsys.readouterr()


def test_list_names_every_preset_and_every_listed_option_works(capsys):
    out = run(capsys, "fabric", "list").out
    document = json.loads(run(capsys, "fabric", "list", "--json").out)
    assert document["schema"] == "meshwright.fabric-list" and [p["name"] for p in document["presets"]] == list(PRESETS)
    value = {"rate": "7GB/s", "size": "3GB", "flops": "2GFLOP/s", "count": "2", "flag": "1", "sides": "1x2x4"}
    shapes = {m.name: m.shape for m in MACHINES.values()}
    tried = {shapes.get(p["name"], p["name"]): p["name"] for p in document["presets"]}.values()  # one machine of a shape has the options of all
    for preset in document["presets"]:
        assert preset["name"] + ":n" in out and all(alias in out for alias in preset["aliases"]) and all(s in out for s in preset["sources"])
        assert preset["sources"] or preset["name"] not in MACHINES
        if preset["name"] not in tried or shapes.get(preset["name"]) == "slice":
            continue
        plain = load_fabric(preset["name"] + ":2")
        named = {option["name"] for option in preset["options"]}
        for option in preset["options"]:
            for text in option["choices"] or [value[option["kind"]]]:
                wiring = {"oversubscription": "&net=spine", "trunk": "&net=trunk"}.get(option["name"], "") if "net" in named else ""
                query = f"{option['name']}={text}{wiring}"
                changed = load_fabric(f"{preset['name']}:{1 if query == 'net=direct' and preset['name'] == 'h100-a100' else 2}?{query}")
                if option["choices"] == [] and option["name"] != "cores":
                    assert (changed.devices, changed.links) != (plain.devices, plain.links), query


def test_show_two_islands(capsys):
    lines = run(capsys, "fabric", "show", "two-islands", "--rates").out.splitlines()
    assert lines[0] == "fabric two-islands:2" and "connected yes" in lines
    at = lines.index("      CPU0  CPU1  CPU2  CPU3  Device")
    assert lines[at + 1 : at + 5] == [
        "CPU0  X     125M  25M   25M   island0/cpu0",
        "CPU1  125M  X     25M   25M   island0/cpu1",
        "CPU2  25M   25M   X     125M  island1/cpu0",
        "CPU3  25M   25M   125M  X     island1/cpu1",
    ]


def test_show_kinds_like_nvidia_smi(capsys):
    out = run(capsys, "fabric", "show", "dgx1-v100").out
    assert "GPU0  X     NV2   NV1   NV1   NV2   NV2*  NV1*  NV1*  box0/gpu0" in out  # to 5 through 4, which is wider than through 1
    assert "*     through another device" in out and "NV# = a bundle" in out and "NET " not in out.partition("Legend")[2]
    out = run(capsys, "fabric", "show", "dgx-a100:2", "--devices", "0,1,8").out  # NICs 0 and 1 are on different planes
    assert "GPU0  X     NV12  NET   box0/gpu0" in out and "GPU2  NET   NET*  X     box1/gpu0" in out


def test_show_json(capsys):
    document = json.loads(run(capsys, "fabric", "show", "dgx-h100:16", "--limit", "4", "--json").out)
    assert document["connected"] is True and document["fabric"]["schema"] == "meshwright.fabric"
    matrix = document["matrix"]
    assert matrix["truncated"] and len(matrix["kinds"]) == 4 and matrix["kinds"][0] == ["X", "NV18", "NV18", "NV18"]
    assert matrix["rates_Bps"][0] == [None, 450 * 10**9, 450 * 10**9, 450 * 10**9]


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        ("dgx-h100:16?net=spine", ["16 x box0 ... box15", "  8 gpu - 1 nvswitch: 8 x NV18 450 GB/s", "  8 gpu - 8 nic: 8 x PIX 50 GB/s",
                                   "  8 nic - 8 rail: 8 x NET 50 GB/s", "network", "  8 rail - 1 spine: 8 x NET 800 GB/s"]),
        ("h100-a100:1", ["box0", "  8 gpu - 1 nvswitch: 8 x NV18 450 GB/s", "  8 gpu - 8 nic: 8 x PIX 50 GB/s", "  8 nic - 1 ib: 8 x NET 50 GB/s",
                         "box1", "  8 gpu - 1 nvswitch: 8 x NV12 300 GB/s", "  8 gpu - 8 nic: 8 x PIX 25 GB/s", "  8 nic - 1 ib: 8 x NET 25 GB/s"]),
        ("mi300x", ["box0", "  8 gpu among each other: 28 x XGMI1 64 GB/s"]),
        ("tpu-v5p:64", ["16 x slice0/host0 ... slice0/host15", "  4 chip among each other: 4 x ICI1 100 GB/s",
                        "  4 chip - other servers: 16 x ICI1 100 GB/s"]),
        ("ndv2:2?sketch=1", ["2 x box0, box1", "  8 gpu among each other: 8 x NV2 50 GB/s", "  8 gpu among each other: 8 x NV1 25 GB/s",
                             "  1 gpu - 1 nic: 1 x PIX 12.5 GB/s, one way", "  1 nic - 1 ib: 1 x NET 12.5 GB/s"]),
    ],
)  # fmt: skip
def test_show_draws_alike_servers_once(capsys, spec, lines):
    out = run(capsys, "fabric", "show", spec, "--limit", "0").out
    assert out.splitlines()[-len(lines):] == lines  # fmt: skip


def test_show_cuts_the_matrix_of_a_big_fabric(capsys):
    out = run(capsys, "fabric", "show", "dgx-h100:16").out
    assert "... 96 more devices; --limit 128 shows all" in out and "GPU31" in out and "GPU32" not in out
    assert "devices   128 in 16 servers (16 x 8)" in out
    for limit, says in (("-1", "--limit: must be >= 0"), ("1025", "--limit must be between 0 and 1024")):
        assert says in run(capsys, "fabric", "show", "two-islands", "--limit", limit, code=2).err


def test_show_a_fabric_in_two_parts(capsys, tmp_path):
    content = 'schema = "meshwright.fabric"\nversion = 1\nname = "f"\n[[devices]]\nname = "d"\ncount = 2\ngroup = "host"\n'
    (tmp_path / "f.toml").write_text(content + '[[links]]\nsrc = "d0"\ndst = "d1"\nrate_Bps = 5\nkind = "ODD"\n')
    out = run(capsys, "fabric", "show", str(tmp_path / "f.toml")).out
    assert "connected NO: fabric 'f' is not connected: no path from d1 to d0" in out
    assert "GPU0  X     ODD   d0      host" in out and "GPU1  -     X     d1      host" in out and "-     no route" in out
    document = json.loads(run(capsys, "fabric", "show", str(tmp_path / "f.toml"), "--json").out)
    assert document["connected"] is False and document["matrix"]["rates_Bps"] == [[None, 5], [None, None]]


def test_subset_round_trip(capsys, tmp_path):
    expected = load_fabric("dgx-a100:2", "0-3,8-11")
    for name in ("part.toml", "part.json"):
        path = str(tmp_path / name)
        assert "8 devices, 20 switches" in run(capsys, "fabric", "subset", "dgx-a100:2", "--devices", "0-3,8-11", "--out", path).out
        assert load_fabric(path) == expected
    (tmp_path / "stdout.toml").write_text(run(capsys, "fabric", "subset", "dgx-a100:2", "--devices", "0-3,8-11").out)
    assert load_fabric(str(tmp_path / "stdout.toml")) == expected
    (tmp_path / "stdout.json").write_text(run(capsys, "fabric", "subset", "dgx-a100:2", "--devices", "0-3,8-11", "--json").out)
    assert load_fabric(str(tmp_path / "stdout.json")) == expected


def test_what_is_left(capsys, tmp_path):
    path = str(tmp_path / "left.toml")
    argv = ["fabric", "subset", "dgx-a100:2", "--devices", "0-3,8-11", "--without", "box0/nic2,box1/gpu3", "--degrade", "box0/nic1<->plane1=1/2"]
    assert "7 devices, 19 switches" in run(capsys, *argv, "--out", path).out
    fabric = load_fabric(path)
    assert {x.rate_Bps for x in fabric.links if {x.src, x.dst} == {"box0/nic1", "plane1"}} == {12_500_000_000}
    assert not any("nic2" in x.src and "box0" in x.src for x in fabric.links) and "box1/gpu3" not in fabric.actor_of
    assert [n.what for n in fabric.provenance][-2:] == ["scaled", "taken out"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["subset", "laptop:4"], "needs --devices, --without or --degrade"),
        (["subset", "laptop:4", "--without", "cpu0,,cpu1"], "--without: an empty name in 'cpu0,,cpu1'"),
        (["subset", "laptop:4", "--without", "cpu9"], "cpu9: fabric 'laptop:4' has no device, switch or server 'cpu9'"),
        (["subset", "laptop:4", "--degrade", "cpu0"], "--degrade: not NAME=FRACTION, once each: 'cpu0'"),
        (["subset", "laptop:4", "--degrade", "cpu0=fast"], "--degrade: not NAME=FRACTION"),
        (["subset", "laptop:4", "--degrade", "cpu0=0.5,cpu0=0.5"], "--degrade: not NAME=FRACTION, once each"),
        (["subset", "laptop:4", "--degrade", "cpu0=1/0"], "must be above 0 and below 1, got 1/0"),
        (["subset", "laptop:4", "--degrade", "cpu0=1.5"], "--degrade cpu0: must be above 0 and below 1, got 1.5"),
        (["subset", "laptop:4", "--devices", "9"], "--devices: '9' is not a range of its devices"),
        (["subset", "laptop:4", "--devices", "0", "--out", "x.yaml"], "--out must end in .toml or .json"),
        (["subset", "laptop:4", "--devices", "0", "--out", "nowhere/x.toml"], "nowhere/x.toml: the folder"),
        (["show", "laptop:4", "--svg", "nowhere/x.svg"], "nowhere/x.svg: the folder"),
        (["show", "nowhere.toml"], "nowhere.toml: cannot read the fabric: No such file or directory"),
    ],
)
def test_refused_and_nothing_written(capsys, tmp_path, monkeypatch, argv, error):
    monkeypatch.chdir(tmp_path)
    captured = run(capsys, "fabric", *argv, code=2)
    assert error in captured.err and captured.out == "" and not list(tmp_path.iterdir())


def test_svg_is_written(capsys, tmp_path):
    path = tmp_path / "f.svg"
    assert f"drawn into {path}" in run(capsys, "fabric", "show", "two-islands", "--svg", str(path)).out
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    run(capsys, "fabric", "show", "dgx-h100:16", "--svg", str(path), "--limit", "0")
    folded = path.read_text()
    assert "box0 and 15 alike" in folded and "box1/gpu0" not in folded and "box0/gpu7" in folded
    run(capsys, "fabric", "show", "dgx-h100:16", "--svg", str(path), "--limit", "0", "--whole")
    assert "box15/gpu7" in path.read_text()
