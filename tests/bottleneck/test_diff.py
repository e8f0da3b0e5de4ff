"""Differences: leaves sum to the totals on both sides, what was made slower comes first, sides that do not fit are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cuda_traces import Settings, write_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.bottleneck.diff import by_step, difference
from meshwright.cli.frame import main

leaves = st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from("pq")), st.floats(0, 10), max_size=12)


@given(leaves, leaves)
@settings(max_examples=100, deadline=None)
def test_totals_add_up_on_every_level(a, b):
    found = difference(a, b)
    assert found.b_s - found.a_s == pytest.approx(sum(c.delta_s for c in found.changes), abs=1e-9)
    assert [abs(c.delta_s) for c in found.changes] == sorted((abs(c.delta_s) for c in found.changes), reverse=True)
    for branch in found.branches:
        below = [c for c in found.changes if c.leaf[: len(branch.leaf)] == branch.leaf]
        assert branch.delta_s == pytest.approx(sum(c.delta_s for c in below), abs=1e-9)
    assert {c.leaf for c in found.changes} == a.keys() | b.keys()


spans = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 80), st.integers(1, 30)), max_size=12)


@given(spans)
@settings(max_examples=100, deadline=None)
def test_steps_of_each_rank_fill_its_time(found):
    rank, step, start, length = (np.array(x, np.int64) for x in zip(*found, strict=True)) if found else (np.zeros(0, np.int64),) * 4
    times = by_step(
        rank.astype(np.int32), step.astype(np.int32), start / 1e9, (start + length) / 1e9, makespan_s=120e-9, ranks=2,
        leaf_of=[("forward", f"step {i}") for i in range(4)],
    )  # fmt: skip
    for r in range(2):
        mine = [(s, a, a + n) for q, s, a, n in found if q == r]
        busy = {t for _, a, b in mine for t in range(a, min(b, 120))}
        assert round(times[f"rank {r}", "idle"] * 1e9) == 120 - len(busy)
        assert sum(v for k, v in times.items() if k[0] == f"rank {r}") == pytest.approx(120e-9)
        alone = {s: {t for q, a, b in mine if q == s for t in range(a, b)} - {t for q, a, b in mine if q != s for t in range(a, b)} for s in range(4)}
        for s, ns in alone.items():
            assert round(times.get((f"rank {r}", "forward", f"step {s}"), 0.0) * 1e9) >= len(ns)


def test_what_was_made_slower_comes_first(tmp_path, capsys):
    for name, plant in (("a", {}), ("b", {"copy_in": (1, 700.0)})):
        (tmp_path / name).mkdir()
        write_ranks(tmp_path / name, Settings(seed=1, **plant))
        (tmp_path / name / "modules.json").write_text('{"schema": "meshwright.trace-modules", "version": 1}')  # no trace: passed over
    assert main(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0]["path"] == ["forward", "layers.1", "copy"]
    assert document["changes"][0]["delta_s"] == pytest.approx(700e-6, rel=0.05)
    assert document["delta_s"] == pytest.approx(sum(c["delta_s"] for c in document["changes"]))
    assert document["joined_by"] == "modules"
    assert main(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--limit", "3"]) == 0
    text = capsys.readouterr().out
    assert "more" in text and "forward / layers.1 / copy" in text


def test_sides_that_do_not_fit_are_refused(tmp_path, capsys):
    one, two = map(str, write_ranks(tmp_path, Settings()))
    empty = tmp_path / "empty"
    empty.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    plan = tmp_path / "plan.json"
    plan.write_text('{"schema": "meshwright.plan", "version": 1}')
    for arguments, said in (
        ([one, str(tmp_path / "nothing.json")], "cannot read"),
        ([one, str(empty)], "holds no trace"),
        ([one, two, "--by", "steps"], "only runs and plans of ours have steps"),
        ([str(plan), str(plan)], "both are plans"),
        ([str(plan), one], "compared with the folder of a run"),
        ([one, two, "--limit", "-1"], ">= 0"),
    ):
        assert main(["trace", "diff", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["trace", "diff", one, str(run)]) == 1  # its run.json is empty
    capsys.readouterr()
