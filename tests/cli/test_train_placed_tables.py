"""`train plan --tables`: a model's tables are placed, the plan says how, and what does not go is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.drive.citations import citations
from meshwright.drive.plans import read_plan

DLRM = Path(__file__).parents[2] / "examples" / "dlrm.py"
pytestmark = pytest.mark.timeout(280)


def line(model, out, *more):
    given = ["--model", model, "--loss", "mse", "--global-batch", "16", "--fabric", "laptop:2", "--dp", "2", "--microbatch", "8"]
    return ["train", "plan", *given, "--tables", "assumed", "--out", str(out), *more]


def test_tables_are_placed_and_planned_with_the_other_layers(tmp_path, capsys):
    assert main(line(f"{DLRM}:tiny_sparse", tmp_path / "p.json", "--ep", "2")) == 0
    text = capsys.readouterr().out
    assert "tables over 2" in text and "in 2 parts by neuroshard" in text and "experts chosen alike" not in text
    plan, tables = read_plan(tmp_path / "p.json"), read_plan(tmp_path / "p.tables.json")
    assert plan.layout.expert == 2 and [s.param for s in plan.layout.expert_shards] == ["placed_tables.pack"]
    assert {x.target.rpartition("/")[2] for x in plan.layout.exchanges} == {"ids", "back"}
    assert plan.job["training"]["model"] == f"{DLRM}:tiny_sparse@{tmp_path / 'p.tables.json'}"
    said = plan.decisions["tables"]
    assert said["cost_s"] == tables.decisions["tables"]["cost_s"] >= said["bound_s"] > 0 and tables.job["tables"]["batch"] == 16
    assert {key for key, _ in citations(plan)} >= {"tables", "experts"}
    assert main(["train", "check", str(tmp_path / "p.json")]) == 0


@pytest.mark.parametrize(("change", "told"), [
    (["--tables", "p.json"], "goes behind the model's name"), (["--model", f"{DLRM}:tiny@x.json"], "has placed tables"),
    (["--model", f"{DLRM.parent / 'gpt.py'}:tiny"], "has no embedding tables that can be placed"), (["--tables", "no.safetensors"], "no.safetensors"),
])  # fmt: skip
def test_what_does_not_go_is_refused(tmp_path, capsys, change, told):
    assert main([*line(f"{DLRM}:tiny", tmp_path / "p.json"), *change]) in (1, 2, 3)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
