"""`meshwright collective bound|plan`: documents, lines for people, files, refusals."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.toml import fabric_toml


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([*words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_bound_of_two_h100_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    """The exact optimum of the methods card: 16 GPUs, 1600/3 GB/s."""
    code, out, _ = run(capsys, "--json", "collective", "bound", "all-gather", "--fabric", "dgx-h100:2", "--size", "1GiB")
    document = json.loads(out)
    assert code == 0
    assert {k: document[k] for k in ("schema", "version", "op", "fabric", "devices", "size_bytes")} == {
        "schema": "meshwright.collective", "version": 1, "op": "all-gather", "fabric": "dgx-h100:2", "devices": 16, "size_bytes": 1 << 30,
    }  # fmt: skip
    bound = document["bound"]
    assert bound["algbw_Bps"] == "1600000000000/3" and bound["busbw_Bps"] == "500000000000"
    assert Fraction(bound["exact_time_s"]) == Fraction(1 << 30) / Fraction(bound["algbw_Bps"])
    assert bound["certificate"]["kind"] == "cut"


def test_a_bound_says_what_full_token_buckets_allow(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    links = "".join(f'[[links]]\nsrc = "d{a}"\ndst = "d{1 - a}"\nrate = "100Mbit/s"\nburst = "64KiB"\n' for a in (0, 1))
    head = 'schema = "meshwright.fabric"\nversion = 1\nname = "shaped"\n[[devices]]\nname = "d0"\n[[devices]]\nname = "d1"\n'
    (tmp_path / "shaped.toml").write_text(head + links)
    words = ["collective", "bound", "broadcast", "--fabric", str(tmp_path / "shaped.toml"), "--size"]
    _, out, _ = run(capsys, *words, "128KiB")
    assert "token buckets can bring a first call 5.243 ms below: at least 5.243 ms" in out
    _, out, _ = run(capsys, "--json", *words, "32KiB")
    assert json.loads(out)["first_call_time_s"] == 0.0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["all-reduce", "--fabric", "two-islands", "--size", "25MB"], ["at least 1 s", "25 MB/s", "must leave 2 of 4 devices"]),
        (["all-reduce", "--fabric", "dgx1-v100", "--size", "25000000"], ["8 parts must take in 14 messages"]),
        (["broadcast", "--fabric", "two-islands", "--size", "25MB", "--root", "3", "--devices", "0-3"], ["at least 1 s"]),
    ],
)
def test_bound_says_why(capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]) -> None:
    code, out, _ = run(capsys, "collective", "bound", *words)
    assert code == 0 and out.splitlines()[1].startswith("bottleneck: ")
    for part in parts:
        assert part in out.splitlines()[0]


def test_plan_names_the_winner_the_bound_and_the_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "plan.json"
    words = ["collective", "plan", "all-reduce", "--fabric", "two-islands", "--size", "1MiB"]
    code, out, _ = run(capsys, "--json", *words, "--out", str(out_file))
    document = json.loads(out)
    assert code == 0 and document["plan"] == str(out_file)
    assert 1 <= document["ratio"] < 1.2 and document["ratio"] == pytest.approx(document["time_s"] / document["bound"]["time_s"])
    assert document["busbw_Bps"] == pytest.approx(1.5 * document["algbw_Bps"])
    named = {a["strategy"] for a in document["alternatives"]}
    assert {"ring", "ring both ways", "forestcoll"} <= named | {document["strategy"]}
    assert all(a["why"] and (a["time_s"] is None or a["time_s"] >= document["time_s"] * (1 - 1e-9)) for a in document["alternatives"])
    code, again, _ = run(capsys, *words)
    assert code == 0 and "forestcoll" in again and "above)" in again and "ring" in again

    from meshwright.drive.plans import check_plan, read_plan

    plan = read_plan(out_file)
    check_plan(plan)
    assert plan.kind == "collective" and plan.placement == ("island0/cpu0", "island0/cpu1", "island1/cpu0", "island1/cpu1")
    assert plan.prediction is not None and plan.prediction.time_s == document["time_s"]


def test_equal_requests_write_equal_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    words = ["collective", "plan", "all-gather", "--fabric", "dgx1-v100", "--devices", "0-3", "--size", "1MiB"]
    for file in files:
        assert run(capsys, *words, "--out", str(file))[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_named_strategy_is_the_only_one_tried(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collective", "plan", "reduce-scatter", "--fabric", "laptop:3", "--size", "12MB", "--strategy", "ring", "--pieces", "2"]
    code, out, _ = run(capsys, "--json", *words)
    document = json.loads(out)
    assert code == 0 and document["strategy"] == "ring" and document["alternatives"] == [] and document["options"]["slices"] == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bound", "all-to-none", "--fabric", "laptop:2", "--size", "1MB"], 2, "no collective 'all-to-none'"),
        (["bound", "all-reduce", "--fabric", "laptop:2", "--size", "1Mb"], 2, "unknown unit"),
        (["bound", "all-reduce", "--fabric", "laptop:2", "--size", "3B"], 2, "not a positive multiple"),
        (["bound", "all-reduce", "--fabric", "laptop:1", "--size", "1MB"], 2, "at least 2 ranks"),
        (["bound", "broadcast", "--fabric", "laptop:2", "--size", "1MB", "--root", "2"], 2, "root: must be 0..1"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--strategy", "star"], 2, "no collective strategy"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--strategy", "ring", "--trees", "2"], 2, "--trees does not apply"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--out", "/no/such/folder/p.json"], 2, "no directory"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--pieces", "0"], 2, "must be >= 1"),
    ],
)
def test_bad_requests_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str) -> None:
    got, out, err = run(capsys, "collective", *words)
    assert got == code and not out
    assert message in err and err.startswith("error: ") and "Traceback" not in err


def test_a_disconnected_fabric_is_infeasible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "apart.toml"
    fabric = Fabric(name="apart", devices=(Device(name="a"), Device(name="b")), links=(Link(src="a", dst="b", rate_Bps=10**6),))
    file.write_text(fabric_toml(fabric))
    code, _, err = run(capsys, "collective", "bound", "all-reduce", "--fabric", str(file), "--size", "1MB")
    assert code == 3, err
    assert "no path from" in err


def test_compare_prints_all_strategies_the_bound_and_one_winner_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collective", "compare", "all-gather", "--fabric", "two-islands", "--sizes", "1KiB:1MiB:32", "--strategies", "ring,forestcoll,bruck"]
    code, out, _ = run(capsys, *words)
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    assert [x.split()[0:2] for x in lines if " * " in x] == [["1", "KiB"], ["32", "KiB"], ["1", "MiB"]]
    assert sum("bound " in x for x in lines[2:]) == 3
    code, out, _ = run(capsys, "--json", *words)
    document = json.loads(out)
    assert code == 0 and document["schema"] == "meshwright.collective-sweep"
    assert [s["size_bytes"] for s in document["sizes"]] == [1024, 32768, 1 << 20]
    for size in document["sizes"]:
        times = [s["time_s"] for s in size["strategies"]]
        assert len(times) == 3 and times[0] == min(times) >= size["bound"]["time_s"] and size["strategies"][0]["why"].startswith("fastest")
    code, short, _ = run(capsys, *words, "--winners")
    assert code == 0 and len(short.splitlines()) == 5


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("1KiB:1", "is empty"),
        ("0:1KiB", "is empty"),
        ("1KiB:1MiB:1", "not a range"),
        ("1:2:3:4", "not a range"),
        ("x", "--sizes"),
        ("4:1GiB:2:", "not a range"),
        (",".join(["4"] * 65), "more than 64"),
        ("3", "multiple of the element size"),
    ],
)
def test_compare_refuses_sizes_that_make_no_sense(capsys: pytest.CaptureFixture[str], sizes: str, words: str) -> None:
    code, out, err = run(capsys, "collective", "compare", "all-gather", "--fabric", "two-islands", "--sizes", sizes)
    assert code == 2 and not out and words in err


def test_compare_refuses_unknown_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "collective", "compare", "all-gather", "--fabric", "two-islands", "--sizes", "4KiB", "--strategies", "sorcery")
    assert code == 2 and "sorcery" in err


def test_uneven_shards_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--json", "collective", "bound"]
    code, out, _ = run(capsys, *base, "all-gather", "--fabric", "two-islands", "--size", "12KiB", "--shards", "4KiB,0,0,8KiB")
    document = json.loads(out)
    assert code == 0 and document["shard_bytes"] == [4096, 0, 0, 8192] == document["bound"]["certificate"]["data"]["shard_bytes"]
    code, out, _ = run(capsys, *base, "permute", "--fabric", "two-islands", "--size", "12KiB", "--peers", "2,3,0,1")
    assert code == 0 and json.loads(out)["peers"] == [2, 3, 0, 1]
    for words, text in (
        (["all-gather", "--shards", "4KiB,4KiB"], "2 shards for 4 ranks"),
        (["all-gather", "--shards", "4KiB,4KiB,0,0"], "add up to"),
        (["all-gather", "--shards", "4KiB,4KiB,2,4094"], "must be a multiple of 4 B"),
        (["all-reduce", "--shards", "4KiB,4KiB,0,4KiB"], "has no shards"),
        (["permute", "--peers", "1,2"], "2 peers for 4 ranks"),
        (["permute", "--peers", "1,2,3,4"], "must be -1..3"),
        (["permute", "--peers", "1,2,3,x"], "not a list of ranks"),
        (["reduce", "--peers", "1,2,3,0"], "has no peers"),
    ):
        code, _, err = run(capsys, "collective", "bound", *words, "--fabric", "two-islands", "--size", "12KiB")
        assert code == 2 and text in err, err


def test_a_sketch_by_name_and_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ["--json", "collective", "plan", "all-gather", "--fabric", "ndv2:2", "--size", "1MiB", "--strategy", "taccl"]
    code, out, _ = run(capsys, *base, "--sketch", "ndv2-sk-1:2")
    assert code == 0 and json.loads(out)["time_s"] > 0
    (tmp_path / "bad.json").write_text('{"nnodes": "two"}')
    for words, text in (
        (["--sketch", "nope"], "no published sketch 'nope'"),
        (["--sketch", str(tmp_path / "bad.json")], "bad.json"),
        (["--sketch", str(tmp_path / "missing.json")], "missing.json"),
        (["--sketch", "ndv2-sk-1:2", "--strategy", "ring"], "does not apply to ring"),
    ):
        code, out, err = run(capsys, *base, *words)
        assert code in (1, 2) and not out and text in err


def test_options_of_a_strategy_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--json", "collective", "plan", "all-reduce", "--fabric", "two-islands", "--size", "1MiB"]
    code, out, _ = run(capsys, *base, "--strategy", "ring", "--option", "order=[0,2,1,3]", "--option", "bidirectional=true")
    options = json.loads(out)["options"]
    assert code == 0 and options["order"] == [0, 2, 1, 3] and options["bidirectional"] is True
    code, out, _ = run(capsys, *base, "--strategy", "blink", "--option", "form=one-tree")
    assert code == 0 and json.loads(out)["options"]["form"] == "one-tree"
    for words, text in (
        (["--option", "form=trees"], "--option needs --strategy"),
        (["--strategy", "blink", "--option", "form"], "not NAME=VALUE"),
        (["--strategy", "blink", "--option", "from=trees"], "no option 'from'"),
        (["--strategy", "blink", "--option", "form=7"], "Expected `str"),
        (["--strategy", "taccl", "--option", "sketch={}"], "cannot be given as text"),
    ):
        code, out, err = run(capsys, *base, *words)
        assert code == 2 and not out and text in err
