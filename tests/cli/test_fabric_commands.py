"""fabric list, show, subset through the command line."""

import json
from xml.etree import ElementTree

import pytest

from meshwright.cli import main
from meshwright.fabric.presets import PRESETS
from meshwright.io.fabric.name import load_fabric


def run(capsys, *argv, code=0):
    assert main(list(argv)) == code
    return capsys.readouterr()


def test_list_names_every_preset_and_every_listed_option_works(capsys):
    out = run(capsys, "fabric", "list").out
    document = json.loads(run(capsys, "fabric", "list", "--json").out)
    assert document["schema"] == "meshwright.fabric-list" and [p["name"] for p in document["presets"]] == list(PRESETS)
    value = {"rate": "7GB/s", "size": "3GB", "flops": "2GFLOP/s", "count": "2", "flag": "1"}
    for preset in document["presets"]:
        assert preset["name"] + ":n" in out
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


def test_show_cuts_the_matrix_of_a_big_fabric(capsys):
    out = run(capsys, "fabric", "show", "dgx-h100:16").out
    assert "... 96 more devices; --limit 128 shows all" in out and "GPU31" in out and "GPU32" not in out
    assert "devices   128 in 16 servers (16 x 8)" in out
    for limit in ("-1", "1025"):
        assert "--limit must be between 0 and 1024" in run(capsys, "fabric", "show", "two-islands", "--limit", limit, code=2).err


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
        (["subset", "laptop:4"], "nothing to leave out: --devices, --without or --degrade is needed"),
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
