"""`meshwright collective sparse` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.cost import Cost, Priced
from meshwright.io.costs.table import write_cost

FABRIC = ["collective", "sparse", "--fabric", "star:4?link=12.5MB/s"]


def test_the_ranking_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sparse.json.gz"
    assert main([*FABRIC, "--elements", "1e7", "--density", "0.01", "--strategies", "oktopk,topka", "--out", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["version"], found["best"], found["k"]) == ("meshwright.collective-sparse", 1, "oktopk", 100_000)
    assert [r["strategy"] for r in found["strategies"]] == ["oktopk", "topka", "dense"]
    assert found["bound"]["words"] == 150_000 and found["limit_words"] == 450_000
    assert main(["collective", "check", str(path)]) == 0
    assert main(["cite", str(path)]) == 0
    assert "Near-Optimal Sparse Allreduce" in capsys.readouterr().out


def test_where_dense_is_best_there_is_no_plan_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*FABRIC, "--elements", "20000", "--k", "10000"]
    assert main(small) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].startswith("dense") and "bound: a result of 10000 entries" in out
    assert main([*small, "--out", str(tmp_path / "x.json")]) == 2
    assert "dense all-reduce is fastest" in capsys.readouterr().err and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--elements", "0", "--k", "1"], ["--elements", "many", "--k", "1"], ["--elements", "10"],
        ["--elements", "10", "--k", "1", "--density", "0.1"],
        ["--elements", "10", "--density", "1.5"], ["--elements", "10", "--k", "11"], ["--elements", "10", "--k", "1", "--strategies", "best"],
        ["--elements", "10", "--k", "1", "--overlap", "-1"], ["--elements", "10", "--k", "1", "--out", "/no/such/folder/x.json"],
    ],
)  # fmt: skip
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FABRIC, *words]) == 2
    assert capsys.readouterr().err


def test_costs_that_were_measured_here_or_lie_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*FABRIC, "--elements", "300000", "--density", "0.01", "--strategies", "oktopk,gtopk", "--json", "--cost"]
    assert main([*asked, "measured"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"] == "kernels of sparse all-reduces timed here"
    kinds = {r["strategy"]: r["kinds_s"] for r in found["strategies"]}
    assert set(kinds["gtopk"]) == {"steady", "thresholds"} and "thresholds+regions" in kinds["oktopk"]
    mine = Cost(name="mine", table={"local|select": Priced(1.0), "exact|select": Priced(3.0)}, source="by hand")
    write_cost(mine, tmp_path / "cost.json")
    assert main([*asked, str(tmp_path / "cost.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    gtopk = next(r for r in found["strategies"] if r["strategy"] == "gtopk")
    assert found["cost"] == "by hand" and gtopk["kinds_s"]["thresholds"] - gtopk["time_s"] == pytest.approx(2)
    assert gtopk["mean_s"] - gtopk["time_s"] == pytest.approx(2 / 32)
    assert main([*asked, str(tmp_path / "none.json")]) == 2 and "cannot read" in capsys.readouterr().err


def test_a_refused_strategy_is_a_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FABRIC, "--elements", str(1 << 31), "--density", "0.001", "--strategies", "zen"]) == 0
    assert "zen        refused: " in capsys.readouterr().out
