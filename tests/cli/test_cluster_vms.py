"""`cluster plan`, `simulate` and `compare` of machines: documents, files, refusals."""

from __future__ import annotations

import json

import pytest

from meshwright.cli import main
from meshwright.io.cluster import load_vms, read_vm_placement

SMALL = "vms:hosts=6,days=2,before_days=1,load=0.5,owners=20,warm_days=0.5,seed=1"


def told(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


def test_plans_runs_and_comparisons(tmp_path, capsys):
    out, kept = tmp_path / "p.json", tmp_path / "v.json"
    plan = told(capsys, "cluster", "plan", SMALL, "--warm-up", "12h", "--strategy", "lars", "--out", str(out))
    assert len(read_vm_placement(out).stays) == plan["stays"] and plan["hosts"] == 6 and plan["empty_share"] <= plan["most_empty_share"]
    run = told(capsys, "cluster", "simulate", SMALL, "--warm-up", "12h", "--strategy", "nilas", "--predictor", "perfect", "--export", str(kept),
        "--needed")
    assert run["strategy"] == "nilas" and 1 <= run["hosts_needed"] <= 24 and len(run["stranded"]) == 2 and len(load_vms(str(kept))) > 100
    again = told(capsys, "cluster", "simulate", str(kept), "--hosts", "6", "--warm-up", "12h", "--strategy", "nilas", "--predictor", "perfect")
    assert again["empty_share"] == run["empty_share"]
    rows = told(capsys, "cluster", "compare", SMALL, "--warm-up", "12h", "--strategies", "best-fit,aligned", "--predictors",
        "perfect,shuffled")["rows"]
    assert [(r["strategy"], r["predictor"]) for r in rows] == [("best-fit", ""), ("aligned", "perfect"), ("aligned", "shuffled")]
    assert main(["cluster", "simulate", SMALL, "--warm-up", "0.5d", "--fabric", "dgx-a100:6"]) == 0
    assert "stranded" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "says"), [
    (["--strategy", "magic"], "no strategy 'magic'"), (["--predictor", "magic"], "no predictor 'magic'"), (["--warm-up", "x"], "--warm-up"),
    (["--learn", "-1x"], "--learn"), (["--warm-up", "9d"], "warm-up"), (["--hosts", "3,4"], "--hosts"), (["--hosts", "0"], "hosts"),
    (["--export", "/nowhere/v.json"], "/nowhere"), (["--order", "las"], "machines have no such option"), (["--jobs-out", "j.csv"], "no such option"),
])  # fmt: skip
def test_refusals(capsys, words, says):
    assert says in json.dumps(told(capsys, "cluster", "simulate", SMALL, "--warm-up", "12h", *words, code=2))


def test_a_trace_of_no_hosts_asks_for_them(tmp_path, capsys):
    (tmp_path / "h.csv").write_text("vmid,cpu,memory,time,type\n0,1,2,10,0\n1,4,8,15,0\n", encoding="utf-8")
    assert "how many hosts" in told(capsys, "cluster", "simulate", str(tmp_path / "h.csv"), code=2)["message"]
    for words in (["simulate", "--strategy"], ["compare", "--strategies"]):  # nothing has ended, and packing asks for no forecast
        told(capsys, "cluster", words[0], str(tmp_path / "h.csv"), "--hosts", "3", "--warm-up", "0s", words[1], "best-fit")
    (tmp_path / "past.csv").write_text("vmid,cpu,memory,time,type\n0,1,2,10,0\n0,1,2,20,1\n1,4,8,45,0\n", encoding="utf-8")
    past = ["cluster", "simulate", str(tmp_path / "past.csv"), "--hosts", "3", "--strategy", "nilas"]
    told(capsys, *past, "--warm-up", "30s")  # nothing ended before 0: learnt from the warm-up
    assert "no machine has ended" in told(capsys, *past, "--warm-up", "15s", code=2)["message"]
    on = ["--fabric", "dgx1-v100:1", "--cores", "24", "--memory", "500GB", "--hosts", "3"]
    assert "queues have no such option" in told(capsys, "cluster", "simulate", "synthetic:jobs=3", *on, code=2)["message"]
    assert "a queue needs servers" in told(capsys, "cluster", "simulate", "synthetic:jobs=3", code=2)["message"]
