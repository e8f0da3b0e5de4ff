"""Several collectives at once: merged programs keep every promise, the joint optimum against a flow program, bounds, plans, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program
from meshwright.check.bounds.certificate import check_bound
from meshwright.check.program.links import link_time
from meshwright.cli import main
from meshwright.cost import Transport
from meshwright.decide.collective import CollectiveProblem, ForestColl, Ring
from meshwright.decide.collective.groups.merge import merge_programs
from meshwright.decide.collective.groups.problem import GroupsProblem
from meshwright.decide.collective.groups.strategy import Groups, groups_bound, independent, packing_problem
from meshwright.decide.collective.joint.strategy import Joint
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.rates import rate_graph
from meshwright.decide.collective.trees.lp import PackingProblem, solve_packing
from meshwright.drive.collective.groups import plan_groups
from meshwright.drive.plans import read_plan
from meshwright.errors import Infeasible, TimeLimit, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric
from meshwright.kernels.effort import Deadline
from meshwright.kernels.highs import require_optimal, solver
from meshwright.program.builder import ProgramBuilder
from meshwright.testing.fabrics import fabrics

MIB = 1 << 20
PACKED = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
RNG = np.random.default_rng(0)


def on(fabric: Fabric, op: str, members: list[int], size: int, **more: object) -> CollectiveProblem:
    return CollectiveProblem(fabric=fabric, op=op, ranks=tuple(fabric.devices[i].name for i in members), size_bytes=size, **more)  # type: ignore[arg-type]


def tensor_and_data(name: str, tensor: int, tensor_bytes: int, data_bytes: int, op: str = "all-reduce") -> GroupsProblem:
    """Tensor groups of neighbours, data groups across them."""
    fabric = load_fabric(name)
    n = len(fabric.devices)
    groups = [on(fabric, op, list(range(i, i + tensor)), tensor_bytes) for i in range(0, n, tensor)]
    groups += [on(fabric, "all-reduce", list(range(i, n, tensor)), data_bytes) for i in range(tensor)]
    return GroupsProblem(groups=tuple(groups))


def time_of(program: object, problem: GroupsProblem) -> float:
    return simulated_time_s(program, problem.fabric, problem.ranks, None)  # type: ignore[arg-type]


@st.composite
def group_problems(draw: st.DrawFn, symmetric: bool | None = None) -> GroupsProblem:
    fabric = draw(fabrics(min_devices=3, max_devices=5, symmetric=symmetric))
    n = len(fabric.devices)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(n)))[: draw(st.integers(2, n))]
        op = draw(st.sampled_from(PACKED))
        size = draw(st.sampled_from([4, 5040 * 16, 1 << 18]))
        groups.append(on(fabric, op, members, size, root=draw(st.integers(0, len(members) - 1))))
    return GroupsProblem(groups=tuple(groups))


@settings(max_examples=60, deadline=None)
@given(problem=group_problems())
def test_joint_plans_are_right_within_the_packing_and_not_below_the_bound(problem: GroupsProblem) -> None:
    try:
        plan = Groups(max_trees=64, max_pieces=4).plan(problem, rng=RNG)
    except Unsupported as refusal:
        assert refusal.hint
        return
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    assert [c.op for c in plan.program.contracts] == [g.op for g in problem.groups]
    assert [c.ranks for c in plan.program.contracts] == [problem.members(i) for i in range(len(problem.groups))]
    assert plan.bound is not None and not check_bound(plan.bound, problem.fabric)
    loaded_s = Fraction(plan.notes["bandwidth_time_s"])  # of bytes alone, which a bound of latency may exceed
    assert plan.bound.certificate.kind in ("latency", "delay") or loaded_s >= plan.bound.exact or not loaded_s
    assert time_of(plan.program, problem) >= float(plan.bound) * (1 - 1e-9)
    same = Groups(**json.loads(json.dumps(plan.options))).plan(problem, rng=RNG)
    assert time_of(same.program, problem) == time_of(plan.program, problem)
    json.dumps(plan.notes)


@settings(max_examples=40, deadline=None)
@given(problem=group_problems(symmetric=True), data=st.data())
def test_merged_programs_keep_every_promise(problem: GroupsProblem, data: st.DataObject) -> None:
    strategies = [data.draw(st.sampled_from([Ring(), ForestColl(unroll=True, max_pieces=2, fold=False)])) for _ in problem.groups]
    plans = [s.plan(g, rng=RNG) for s, g in zip(strategies, problem.groups, strict=True)]
    merged = independent(problem, plans)
    verdict = check_program(merged.program)
    assert verdict.ok, verdict.findings
    assert len(merged.program.steps) == sum(len(p.program.steps) for p in plans)
    alone = [simulated_time_s(p.program, problem.fabric, g.ranks, None) for p, g in zip(plans, problem.groups, strict=True)]
    together = time_of(merged.program, problem)
    if len(plans) == 1:
        assert together == alone[0]
    load = link_time(merged.program, problem.fabric, problem.ranks)[0]
    apart = [link_time(p.program, problem.fabric, g.ranks)[0] for p, g in zip(plans, problem.groups, strict=True)]
    assert load == {x: sum((a.get(x, Fraction(0)) for a in apart), Fraction(0)) for x in load}


def compact_optimum(problem: PackingProblem) -> float:
    """All groups by a flow per group, direction and member; shares free only where the demand leaves them."""
    arcs = list(problem.rate)
    rows: list[tuple[float, float, dict[int, float]]] = []
    columns = 1
    capacity: list[dict[int, float]] = [{0: -float(problem.rate[a])} for a in arcs]
    for demand in problem.demands:
        members, allowed = list(demand.members), set(problem.arcs_of(demand))
        share = list(range(columns, columns + len(members)))
        columns += len(members)
        for i, c in enumerate(share):
            if demand.weight is not None:
                rows.append((float(demand.weight[i]), float(demand.weight[i]), {c: 1.0}))
        rows.append((1, 1, dict.fromkeys(share, 1.0)))
        for wanted, turned in ((demand.spread, False), (demand.collect, True)):
            if not wanted:
                continue
            load = {k: columns + i for i, k in enumerate(k for k, a in enumerate(arcs) if a in allowed)}
            columns += len(load)
            heads = {k: (arcs[k][1], arcs[k][0]) if turned else arcs[k] for k in load}
            for k, c in load.items():
                capacity[k][c] = float(demand.size)
            for w in range(problem.nodes):
                terms = {load[k]: 1.0 if v == w else -1.0 for k, (u, v) in heads.items() if w in (u, v)}
                if w not in members and terms:
                    rows.append((0, 0, terms))
            for sink in members:
                flow = {k: columns + i for i, k in enumerate(load)}
                columns += len(flow)
                feed = list(range(columns, columns + len(members)))
                columns += len(members)
                rows += [(-highspy.kHighsInf, 0, {flow[k]: 1.0, load[k]: -1.0}) for k in load]
                rows += [(-highspy.kHighsInf, 0, {f: 1.0, s: -1.0}) for f, s in zip(feed, share, strict=True)]
                for node in range(problem.nodes):
                    terms = {flow[k]: 1.0 if v == node else -1.0 for k, (u, v) in heads.items() if node in (u, v)}
                    if node in members:
                        terms[feed[members.index(node)]] = 1.0
                    if terms:
                        rows.append((float(node == sink), float(node == sink), terms))
    lp = solver()
    lp.addVars(columns, np.zeros(columns), np.full(columns, highspy.kHighsInf))
    lp.changeColCost(0, 1.0)
    for low, high, terms in [*rows, *((-highspy.kHighsInf, 0.0, c) for c in capacity)]:
        lp.addRow(low, high, len(terms), np.fromiter(terms, np.int32), np.fromiter(terms.values(), float))
    require_optimal(lp, what="compact")
    return float(lp.getInfo().objective_function_value)


@settings(max_examples=30, deadline=None)
@given(problem=group_problems())
def test_the_joint_optimum_equals_the_compact_flow_program(problem: GroupsProblem) -> None:
    same = replace(problem, groups=tuple(replace(g, size_bytes=g.size_bytes if g.size_bytes > 4 else 5040) for g in problem.groups))
    packed = packing_problem(same, rate_graph(same.fabric, same.ranks), relay=True)
    scaled = replace(packed, demands=tuple(replace(d, size=d.size / 5040) for d in packed.demands))
    top = max(packed.rate.values())
    assert solve_packing(scaled, what="t").time * top == pytest.approx(compact_optimum(scaled) * top, rel=1e-5)


def test_tensor_and_data_groups_on_one_box_gain_a_fifth_and_more() -> None:
    """16 dies, tensor groups of 4, data groups of 4: the best of independent plans with their own choice and with relays."""
    problem = tensor_and_data("mi250:1", 4, 64 * MIB, 64 * MIB)
    joint = Groups(pieces=16).plan(problem, rng=RNG)
    assert joint.notes["of_optimum"] == 1.0 and joint.bound is not None and Fraction(joint.notes["bandwidth_time_s"]) == joint.bound.exact
    times = []
    for relay in (None, True):
        plans = [ForestColl(unroll=False, pieces=16, relay=relay, fold=False).plan(g, rng=RNG) for g in problem.groups]
        times.append(time_of(independent(problem, plans).program, problem))
    assert min(times) >= 1.2 * time_of(joint.program, problem)
    assert check_program(joint.program).ok


def test_a_group_that_is_not_packed_is_planned_around() -> None:
    fabric = load_fabric("mi250:1")
    exchange, sums = on(fabric, "all-to-all", [0, 1, 2, 3], MIB), on(fabric, "all-reduce", [0, 4, 8, 12], 4 * MIB)
    plan, ranked = plan_groups([exchange, sums])
    assert {e.name for e in ranked} >= {"joint groups"} and plan.main.contracts[0].op == "all-to-all"
    joint = next(e for e in ranked if e.name == "joint groups")
    assert joint.plan is not None and joint.plan.strategies[1] == "groups" and joint.plan.strategies[0] != "groups"
    assert plan.bound is not None and {g["demand"] for g in plan.bound.certificate.data["groups"]} == {"all-to-all", "all-reduce"}


def test_relays_are_used_only_where_they_help() -> None:
    fabric = load_fabric("dgx1-v100")
    alone = GroupsProblem(groups=(on(fabric, "all-reduce", list(range(8)), MIB),))
    assert Groups().plan(alone, rng=RNG).options["relay"] is False
    pair = GroupsProblem(groups=(on(fabric, "all-reduce", [0, 1], MIB),))
    assert Groups().plan(pair, rng=RNG).options["relay"] is True
    assert Groups(relay=False).plan(pair, rng=RNG).options["relay"] is False


def test_the_driver_never_takes_the_slower_plan_and_its_file_comes_back(tmp_path: Path) -> None:
    problem = tensor_and_data("dgx1-v100", 4, MIB, 4 * MIB)
    plan, ranked = plan_groups(problem.groups)
    times = [e.time_s for e in ranked if e.time_s is not None]
    assert plan.prediction is not None and plan.prediction.time_s == min(times) == times[0] and len(ranked) == 3
    from meshwright.drive.plans import write_plan

    write_plan(tmp_path / "p.json", plan)
    again = read_plan(tmp_path / "p.json")
    assert again.main.contracts == plan.main.contracts and again.bound == plan.bound and not check_bound(plan.bound, problem.fabric)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "groups.json"
    line = ["collective", "groups", "--fabric", "two-islands", "--group", "all-reduce:64KiB:0,1/2,3", "--group", "all-reduce:64KiB:0,2/1,3"]
    assert main([*line, "--json", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.collective-groups" and len(document["groups"]) == 4 and document["ratio"] >= 1 - 1e-9
    assert document["time_s"] <= min(a["time_s"] for a in document["alternatives"] if a["time_s"] is not None)
    assert read_plan(out).kind == "collective"
    assert main(line) == 0 and "4 groups on two-islands" in capsys.readouterr().out
    for wrong, words in ((["all-reduce:64KiB"], "OP:SIZE:DEVICES"), (["all-reduce:soon:0-1"], "--group 1"), (["all-reduce:64KiB:9"], "9")):
        assert main(["collective", "groups", "--fabric", "two-islands", "--group", *wrong]) == 2
        assert words in capsys.readouterr().err
    assert main([*line, "--out", str(tmp_path / "none" / "x.json")]) == 2


def line_fabric() -> Fabric:
    links = [Link(src=a, dst=b, rate_Bps=10**6) for a, b in (("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"))]
    return Fabric(name="apart", devices=tuple(Device(name=x) for x in "abcd"), links=tuple(links))


def test_refusals() -> None:
    fabric = load_fabric("two-islands")
    group = on(fabric, "all-reduce", [0, 1], 4096)
    with pytest.raises(UsageError, match="no group"):
        GroupsProblem(groups=())
    with pytest.raises(UsageError, match="one fabric"):
        GroupsProblem(groups=(group, on(load_fabric("dgx1-v100"), "all-reduce", [0, 1], 4096)))
    with pytest.raises(UsageError, match="one transport"):
        GroupsProblem(groups=(group, replace(group, transport=Transport(per_message_s=1e-3))))
    with pytest.raises(UsageError, match="time_limit_s"):
        GroupsProblem(groups=(group,), time_limit_s=0)
    problem = GroupsProblem(groups=(group,))
    for option in ("max_trees", "pieces", "max_pieces"):
        with pytest.raises(UsageError, match=option):
            Groups(**{option: 0}).plan(problem, rng=RNG)
    apart = GroupsProblem(groups=(on(line_fabric(), "all-reduce", [0, 2], 4096),))
    with pytest.raises(Infeasible):
        Groups().plan(apart, rng=RNG)
    with pytest.raises(Infeasible):
        plan_groups(apart.groups)
    scatter = GroupsProblem(groups=(on(fabric, "scatter", [0, 1], 4096),))
    with pytest.raises(Unsupported, match="no schedule of its own"):
        Groups().plan(scatter, rng=RNG)
    with pytest.raises(Unsupported, match="no group's operation"):
        Groups().plan(scatter, rng=RNG, alone=[ForestColl().plan(group, rng=RNG)])
    with pytest.raises(TimeLimit):
        Groups().plan(replace(problem, time_limit_s=1e-9), rng=RNG)
    assert groups_bound(problem, deadline=Deadline(clock_s=0.0)) is None


def test_no_whole_trees_within_the_limit_is_a_refusal() -> None:
    problem = tensor_and_data("mi250:1", 4, MIB, MIB)
    with pytest.raises(Unsupported, match="more than 1 trees"):
        Groups(max_trees=1).plan(problem, rng=RNG)


def test_programs_that_cannot_run_side_by_side_are_refused() -> None:
    fabric = load_fabric("dgx1-v100")
    group = on(fabric, "all-reduce", list(range(8)), MIB)
    once, often = Joint(unroll=True, pieces=2).plan(group, rng=RNG).program, Joint(unroll=False, pieces=4).plan(group, rng=RNG).program
    with pytest.raises(Unsupported, match="repeat 1 and 4 times"):
        merge_programs(8, [(once, range(8)), (often, range(8))], name="x")
    computing = ProgramBuilder(ranks=2, name="computes")
    computing.lane(0).compute(computing.op("F"))
    with pytest.raises(Unsupported, match="computes cannot run beside others"):
        merge_programs(2, [(computing.build(), range(2))], name="x")
