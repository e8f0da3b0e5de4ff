"""Placements by energy and cost: beside brute force, never dearer than HEFT's, above their bound; and what is edited is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from cases import random_problem, seconds, sum_of, with_powers

from effort import few
from meshwright.cli import main
from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.exact import Exact
from meshwright.decide.place.giph.strategy import Giph
from meshwright.decide.place.lists import Cpop, Heft
from meshwright.decide.place.search import Search
from meshwright.decide.place.sums import reweighted, sums_of
from meshwright.drive.place import plan_placement
from meshwright.drive.plans import check_plan, read_plan, write_plan
from meshwright.errors import CheckFailed, Unsupported, UsageError
from meshwright.io.fabric.toml import fabric_toml


def case(seed, objective, **sizes):
    return with_powers(random_problem(seed, **{"tasks": 6, "devices": 3, "switch": bool(seed % 2), **sizes}), objective, seed)


def least(problem):
    places = ([k for k in range(len(problem.fabric.devices)) if seconds(problem, i, k) < float("inf")] for i in range(len(problem.graph.tasks)))
    return min(sum_of(problem, on) for on in itertools.product(*places))


@pytest.mark.parametrize("objective", ["energy", "cost"])
@pytest.mark.parametrize("seed", range(few(8)))
def test_the_cheapest_is_found_and_bounded(seed, objective, tmp_path):
    problem = case(seed, objective)
    plan, ranked, bound = plan_placement(problem, [Search(), Heft(), Cpop()])
    best, by_name = ranked[0], {t.strategy.name: t for t in ranked}
    assert best.value == pytest.approx(sum_of(problem, best.placement.on), rel=1e-12) == pytest.approx(least(problem), rel=1e-9)
    assert by_name["search"].value <= min(t.value for t in ranked)
    assert 0.9 * best.value <= float(bound) <= best.value and bound.unit == {"energy": "J", "cost": "s"}[objective]
    write_plan(tmp_path / "p.json", plan)
    again = read_plan(tmp_path / "p.json")
    assert check_plan(again).ok and again.job["objective"]["value"] == best.value and float(again.bound) <= again.prediction.time_s


@pytest.mark.parametrize("objective", ["energy", "cost"])
def test_a_tree_is_bounded_exactly_and_large_graphs_by_heft(objective):
    tree = case(1, objective, tasks=25, devices=4, dense=0)
    edges = tuple(type(e)(src=f"t{i // 2}", dst=f"t{i + 1}", size_bytes=50 + i) for i, e in zip(range(24), random_problem(
        1, tasks=8, devices=2, dense=1.0).graph.edges, strict=False))  # fmt: skip
    tree = replace(tree, graph=type(tree.graph)(tasks=tree.graph.tasks, edges=edges))
    found = reweighted(sums_of(tree), tree.graph.order)
    assert found.value == pytest.approx(sum_of(tree, tuple(found.on.tolist())), rel=1e-9)
    large = case(2, objective, tasks=60, devices=6, dense=0.1)
    heft, search = (kind.plan(large, rng=np.random.default_rng(0)) for kind in (Heft(), Search()))
    assert sum_of(large, search.on) < sum_of(large, heft.on)


def test_what_is_edited_or_cannot_be_is_refused():
    problem = case(3, "energy")
    plan, _, _ = plan_placement(problem, [Search()])
    said = plan.job["objective"]
    data = said["bound"]["certificate"]["data"]
    edits = [
        ({"value": said["value"] * 0.9}, "the plan says"), ({"unit": "s"}, "no objective"),
        ({"bound": {**said["bound"], "value": "1000000/1"}}, "the certificate proves"),
        ({"bound": {**said["bound"], "certificate": {"kind": "placement", "data": {**data, "moved": [[[1.0]]]}}}}, "lacks or mangles"),
    ]
    for change, told in edits:
        with pytest.raises(CheckFailed, match=told):
            check_plan(replace(plan, job={**plan.job, "objective": {**said, **change}}))
    rng = np.random.default_rng(0)
    for refused in (Exact(), Giph()):
        with pytest.raises(Unsupported, match="energy"):
            refused.plan(problem, rng=rng)
    with pytest.raises(UsageError, match="does not say what it draws"):
        sums_of(replace(random_problem(3, tasks=4, devices=2), objective="energy"))
    with pytest.raises(UsageError, match="is no sum"):
        sums_of(random_problem(3, tasks=4, devices=2))
    with pytest.raises(UsageError, match="no objective"):
        PlaceProblem(graph=problem.graph, fabric=problem.fabric, objective="beauty")


def test_the_command_says_joules_and_their_bound(tmp_path, capsys):
    problem = case(4, "energy", switch=False)
    (tmp_path / "f.toml").write_text(fabric_toml(problem.fabric), encoding="utf-8")
    graph = {"schema": "meshwright.tasks", "version": 1, "tasks": [{"name": t.name, "work": t.work, "kind": t.kind} for t in problem.graph.tasks],
             "edges": [{"src": e.src, "dst": e.dst, "size_bytes": e.size_bytes} for e in problem.graph.edges]}  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(graph), encoding="utf-8")
    line = ["place", "compare", str(tmp_path / "t.json"), "--fabric", str(tmp_path / "f.toml"), "--objective", "energy"]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "no energy is below" in text and " J " in text and "learned to make schedules short" not in text.splitlines()[4]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {r["strategy"]: r["value"] for r in found["strategies"] if r["value"] is not None}
    assert found["unit"] == "J" and found["bound_value"] <= rows["search"] == min(rows.values()) and rows["search"] <= rows["heft"]
