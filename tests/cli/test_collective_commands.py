"""`meshwright collective bound|plan`: documents, lines for people, files, refusals."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.fabric import Device, Fabric, Link
from meshwright.io.fabric_toml import fabric_toml


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
    assert code == 0 and len(out.splitlines()) == 1
    for part in parts:
        assert part in out


def test_plan_names_the_winner_the_bound_and_the_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "plan.json"
    words = ["collective", "plan", "all-reduce", "--fabric", "two-islands", "--size", "1MiB"]
    code, out, _ = run(capsys, "--json", *words, "--out", str(out_file))
    document = json.loads(out)
    assert code == 0 and document["strategy"] == "forestcoll" and document["plan"] == str(out_file)
    assert 1 <= document["ratio"] < 1.2 and document["ratio"] == pytest.approx(document["time_s"] / document["bound"]["time_s"])
    assert document["busbw_Bps"] == pytest.approx(1.5 * document["algbw_Bps"])
    assert {a["strategy"] for a in document["alternatives"]} == {"ring", "ring both ways"}
    assert all(a["time_s"] > document["time_s"] and "slower" in a["why"] for a in document["alternatives"])
    code, again, _ = run(capsys, *words)
    assert code == 0 and "forestcoll" in again and "above)" in again and "ring" in again

    from meshwright.drive import check, read_plan

    plan = read_plan(out_file)
    check(plan)
    assert plan.kind == "collective" and plan.placement == ("island0/cpu0", "island0/cpu1", "island1/cpu0", "island1/cpu1")
    assert plan.prediction is not None and plan.prediction.time_s == document["time_s"]


def test_equal_requests_write_equal_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        assert run(capsys, "collective", "plan", "all-gather", "--fabric", "dgx1-v100", "--size", "1MiB", "--out", str(file))[0] == 0
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
        (["bound", "broadcast", "--fabric", "laptop:2", "--size", "1MB", "--root", "2"], 2, "root must be 0..1"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--strategy", "star"], 2, "no collective strategy"),
        (["plan", "all-reduce", "--fabric", "laptop:2", "--size", "1MB", "--strategy", "ring", "--trees", "2"], 2, "--trees means nothing"),
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
