"""`traffic plan` and `traffic compare` as a user meets them."""

from __future__ import annotations

import json
import random

import pytest

from meshwright.cli.frame import main
from meshwright.cli.traffic_plan import codec_names
from meshwright.io.plan.traffic import read_traffic_plan, write_traffic_profile
from meshwright.testing.traffic import traffic_profile


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    write_traffic_profile(path, traffic_profile(random.Random(14), 9, 3))
    return str(path)


def said(capsys, *words):
    code = main(list(words))
    found = capsys.readouterr()
    return code, found.out + found.err


def test_codecs_of_a_profile_can_be_named_and_its_fabric_cannot(capsys, profile):
    """`--codecs none` chose among all codecs of the profile."""
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--codecs", "none", "--json")
    assert code == 0 and json.loads(text)["codecs"] == ["none"]
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--codecs", "fp16", "--json")
    assert code == 0 and sorted(json.loads(text)["codecs"]) == ["fp16", "none"]
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--codecs", "int8")
    assert code == 2 and "no costs of codec 'int8'" in text
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--fabric", "laptop:2")
    assert code == 2 and "--fabric: belongs to --model and --tensors" in text


def test_a_plan_is_written_and_says_what_it_risks_and_what_none_would_take(capsys, tmp_path, profile):
    out = tmp_path / "plan.json"
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--out", str(out))
    assert code == 0 and "without compression at least" in text and "optimal" in text and f"wrote {out}" in text
    assert "one codec for all groups" in text and all(f"\n{c} " in text for c in ("none", "topk", "fp16"))
    plan = read_traffic_plan(out)
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--json")
    candidates = json.loads(text)["candidates"]
    assert sorted(c["codecs"] for c in candidates) == [["fp16"], ["none"], ["topk"]] and all(c["risks"] for c in candidates)
    assert all(c["time_s"] * 1e9 >= plan.step_ns for c in candidates)
    code, text = said(capsys, "traffic", "plan", "--profile", profile, "--json", "--only", "topk")
    document = json.loads(text)
    assert code == 0 and document["schema"] == "meshwright.traffic.plan" and document["codecs"] == ["topk"] and document["candidates"] == []
    assert document["time_s"] * 1e9 >= plan.step_ns and document["uncompressed_bound"]["time_s"] == float(plan.uncompressed)
    code, text = said(capsys, "cite", str(out), "--json")
    cites = {c["part"]: c["key"] for c in json.loads(text)["citations"]}
    assert code == 0 and cites["traffic"] == "wang2023cupcake"
    assert {p.removeprefix("codec:") for p in cites} - {"traffic"} <= {g.codec for g in plan.groups}
    assert document["risks"][0]["bias"] == "biased" and document["risks"][0]["delay_steps"] == pytest.approx(99, rel=0.1)


def test_every_candidate_is_in_the_comparison(capsys, profile):
    code, text = said(capsys, "traffic", "compare", "--profile", profile, "--json")
    rows = json.loads(text)["rows"]
    assert code == 0 and len(rows) == 1 + 3 * 5
    assert [r["time_s"] for r in rows] == sorted(r["time_s"] for r in rows)
    code, text = said(capsys, "traffic", "compare", "--profile", profile)
    assert code == 0 and "layer-wise" in text and "without compression no step is shorter than" in text and "none: exact" in text


def test_tensors_from_a_spreadsheet_are_priced_on_a_fabric(capsys, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("name,shape,ready_s\n" + "".join(f"w{i},20x20,{0.001 * (i + 1)}\n" for i in range(4)))
    code, text = said(capsys, "traffic", "plan", "--tensors", str(path), "--fabric", "laptop:2", "--codecs", "fp16", "--json")
    document = json.loads(text)
    assert code == 0 and document["tensors"] == 4 and document["ranks"] == 2 and document["time_s"] >= document["compute_s"] >= 0.004


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give one of --model"), (["--tensors", "t.csv"], "--fabric: is missing"), (["--profile", "p", "--tensors", "t"], "give one of"),
        (["--profile", "missing.json"], "cannot read"), (["--tensors", "t", "--fabric", "laptop:2", "--interference", "-1"], "0 to 10000"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(capsys, words, text):
    code, found = said(capsys, "traffic", "plan", *words)
    assert code == 2 and text in found


def test_wrong_strategies_and_codecs_are_named(capsys, profile):
    for words, text in ((["--strategy", "magic"], "no strategy 'magic'"), (["--only", "zip"], "no codec 'zip'")):
        code, found = said(capsys, "traffic", "plan", "--profile", profile, *words)
        assert code == 2 and text in found


def test_codecs_are_told_apart_by_commas_and_semicolons():
    assert codec_names("fp16,topk:density=0.01,feedback=false;qsgd") == ["fp16", "topk:density=0.01,feedback=false", "qsgd"]
