"""`tables fit`, `plan`, `compare`, `run`, `export`: from a file and from a model, the page as it stands, refusals with their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import main

TABLES = {
    "schema": "meshwright.tables", "version": 1, "name": "two", "batch": 8,
    "tables": [{"name": "a", "rows": 60, "dim": 8, "pooling": 2}, {"name": "b", "rows": 20, "dim": 4, "mode": "mean"}],
}  # fmt: skip
MODEL = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(100, 8, mode="sum")

    def forward(self, words):
        return self.words(words)


def net():
    return Model(), (torch.arange(12).view(4, 3), torch.zeros(4, 8))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tables.json").write_text(json.dumps(TABLES), encoding="utf-8")
    Path("model.py").write_text(MODEL, encoding="utf-8")


def told(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out if code == 0 else said.err)


@pytest.mark.real
def test_fit_plan_again_run_and_export(here, capsys):
    fitted = told(capsys, "tables", "fit", "tables.json", "--fabric", "laptop:2", "--points", "20", "--exchange-points", "0", "--epochs", "2")
    assert fitted["file"] == "costs.safetensors" and fitted["errors"]["compute"] > 0 and fitted["machine"]["cpu"]
    found = told(capsys, "tables", "plan", "tables.json", "--fabric", "laptop:2", "--costs", "costs.safetensors", "--out", "plan.json")
    assert found["costs"] == "measured" and found["strategies"][0]["cost_s"] >= found["bound_s"] > 0
    assert sum(len(d["shards"]) for d in found["placed"]) == found["strategies"][0]["shards"]
    assert main(["train", "check", "plan.json"]) == 0 and "tables plan among 2 ranks: ok" in capsys.readouterr().out
    again = told(capsys, "tables", "plan", "tables.json", "--fabric", "laptop:3", "--from", "plan.json", "--move-at-most", "500B")
    assert again["moved_bytes"] <= 500 and "fewest-moves" in {r["strategy"] for r in again["strategies"]}  # who wins is a matter of what was measured
    ran = told(capsys, "tables", "run", "plan.json", "--steps", "1", "--dtype", "float64")
    assert ran["equal"] and ran["outputs_apart"] <= 1e-12 and ran["operator"] == "embedding_bag"
    told(capsys, "tables", "plan", "tables.json", "--fabric", "laptop:2", "--strategy", "dim-greedy", "--out", "whole.json")
    assert told(capsys, "tables", "export", "whole.json", "--out", "torchrec.json")["tables"] == 2
    assert json.loads(Path("torchrec.json").read_text())["world_size"] == 2


def test_the_bags_of_a_model_are_compared(here, capsys):
    found = told(capsys, "tables", "compare", "--model", "model.py:net", "--fabric", "laptop:2")
    assert (found["table_count"], found["batch"], found["costs"]) == (1, 4, "assumed")
    assert {r["strategy"] for r in found["strategies"]} >= {"neuroshard", "dim-greedy", "fewest-moves"}


@pytest.mark.real
def test_the_page_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, body in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.DOTALL):
        Path(name).write_text(body, encoding="utf-8")
    commands = re.findall(r"^\$ meshwright (.*)$", "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL)), re.MULTILINE)
    compare, plan, run, export = (next(c for c in commands if c.startswith(f"tables {verb}")) for verb in ("compare", "plan", "run", "export"))
    shown = page[page.index(plan) + len(plan) + 1 :].partition("```")[0]
    assert main(compare.split()) == 0
    capsys.readouterr()
    assert main(plan.split()) == 0 and capsys.readouterr().out == shown
    assert main(run.split()) == 0 and "\nequal to whole tables" in capsys.readouterr().out
    assert main(export.split()) == 0


def test_costs_of_another_machine_are_refused_unless_that_is_wanted(here, capsys):
    from meshwright.cost_models.lookups import LookupCosts
    from meshwright.io.costs.lookups import write_lookup_costs

    write_lookup_costs("theirs.safetensors", LookupCosts(batch=8, floor=(1e-9, 1e-9), overhead_s=1e-5, machine={"cpu": "another"}))
    words = ["tables", "plan", "tables.json", "--fabric", "laptop:2", "--costs", "theirs.safetensors"]
    assert "measured on cpu another" in json.dumps(told(capsys, *words, code=2))
    assert told(capsys, *words, "--foreign")["strategies"]
    named = ["--costs", "cpu0=theirs.safetensors"]
    assert "no costs for device cpu1" in json.dumps(told(capsys, *words[:-2], *named, "--foreign", code=2))
    assert told(capsys, *words, *named, "--foreign")["strategies"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["plan", "tables.json", "--fabric", "laptop:2", "--strategy", "magic"], 2, "no strategy 'magic'"),
        (["plan", "--fabric", "laptop:2"], 2, "one of them"), (["plan", "none.json", "--fabric", "laptop:2"], 2, "none.json"),
        (["plan", "tables.json", "--fabric", "laptop:2", "--dim", "x"], 2, "--dim"),
        (["plan", "tables.json", "--fabric", "laptop:2", "--lab", "x"], 2, "--lab"),
        (["plan", "tables.json", "--fabric", "small.toml"], 3, "bytes more"),
        (["plan", "tables.json", "--fabric", "laptop:2", "--move-at-most", "1B"], 2, "--move-at-most"),
        (["plan", "tables.json", "--fabric", "laptop:2", "--strategy", "fewest-moves"], 2, "no plan to start from"),
        (["fit", "tables.json", "--fabric", "laptop:2", "--points", "3"], 2, "points"), (["run", "tables.json"], 1, "schema"),
    ],
)  # fmt: skip
def test_refusals(here, capsys, words, code, says):
    device = '[[devices]]\nname = "{}"\nkind = "cpu"\nmemory_bytes = 900\n'
    link = '[[links]]\nsrc = "x"\ndst = "y"\nrate = "1MB/s"\nboth_ways = true\n'
    Path("small.toml").write_text('schema = "meshwright.fabric"\nversion = 1\nname = "s"\n' + device.format("x") + device.format("y") + link)
    assert says in json.dumps(told(capsys, "tables", *words, code=code))
