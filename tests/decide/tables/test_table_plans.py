"""Plans of embedding tables: beside brute force and an LP, memory, unequal devices, splits, few moves; checked plans and their mutants."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import msgspec
import numpy as np
import pytest
from table_cases import additive_costs, fabric_of, grown_costs, problem_of, tables_of

from effort import few
from meshwright.check import check_plan
from meshwright.decide.tables import STRATEGIES, TableProblem, table_bound
from meshwright.decide.tables.bound import floors
from meshwright.decide.tables.classic import DimGreedy, RandomTables, SizeGreedy
from meshwright.decide.tables.learned import learned
from meshwright.decide.tables.neuroshard import NeuroShard
from meshwright.decide.tables.problem import Learned, Phases, Piece, halves, merged
from meshwright.decide.tables.refine import FewestMoves
from meshwright.drive.tables import Measured, compare_tables, plan_tables, shards_of
from meshwright.errors import FormatError, Infeasible, Unsupported, UsageError
from meshwright.graph.embeddings import Shard, Table, Tables, moved_bytes
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes

RNG = np.random.default_rng


def test_without_splits_it_is_within_five_percent_of_brute_force():
    over = []
    for seed in range(few(6, least=3)):
        problem = problem_of(seed, tables=6, devices=3)
        found = NeuroShard(levels=0).plan(problem, rng=RNG(0))
        every = [problem.phases(*problem.sums(problem.whole, np.array(on))).total_s for on in product(range(3), repeat=6)]
        assert found.cost_s >= min(every) * (1 - 1e-9)
        over.append(found.cost_s / float(min(every)))
    assert np.mean(over) <= 1.05


@pytest.mark.parametrize("seed", range(few(4, least=2)))
def test_it_is_never_dearer_than_a_classic_rule_and_splits_help(seed):
    problem = problem_of(seed, tables=5, devices=4)
    best = NeuroShard().plan(problem, rng=RNG(0))
    others = [kind().plan(problem, rng=RNG(0)) for kind in STRATEGIES if kind not in (NeuroShard, RandomTables, FewestMoves)]
    assert best.cost_s <= min(p.cost_s for p in others) * (1 + 1e-9)
    assert best.cost_s < NeuroShard(levels=0).plan(problem, rng=RNG(0)).cost_s, "five tables on four devices want to be cut"


def test_the_bound_is_the_lp_of_additive_costs_and_below_every_plan():
    import highspy

    batch = 16
    costs = (additive_costs(batch), additive_costs(batch, element=4e-7, each=0.0))
    problem = TableProblem(tables=tables_of(3, 5), fabric=fabric_of(3, slow=("d2",)), costs=costs, kinds=(0, 1, 0))
    each, many = floors(problem)
    lp = highspy.Highs()
    lp.setOptionValue("output_flag", False)
    lp.addVar(0.0, lp.getInfinity())
    lp.changeColCost(0, 1.0)
    for _ in range(each.size):
        lp.addVar(0.0, 1.0)
    at = lambda d, t: 1 + d * len(many) + t  # noqa: E731
    for d in range(3):
        row = [0, *(at(d, t) for t in range(len(many)))]
        lp.addRow(0.0, lp.getInfinity(), len(row), row, [1.0, *(-each[d] * many).tolist()])
    for t in range(len(many)):
        lp.addRow(1.0, 1.0, 3, [at(d, t) for d in range(3)], [1.0] * 3)
    lp.run()
    bound = float(table_bound(problem))
    assert bound == pytest.approx(lp.getInfo().objective_function_value, rel=1e-6)
    for seed in range(few(20, least=8)):
        assert RandomTables().plan(problem, rng=RNG(seed)).cost_s >= bound


@pytest.mark.parametrize("burst_bytes", [200, 100_000])
def test_full_token_buckets_are_taken_off_exchanges_and_off_the_bound(burst_bytes):
    plain = problem_of(3, tables=5, devices=3, costs=additive_costs(16))
    links = tuple(replace(x, burst_bytes=burst_bytes) for x in plain.fabric.links)
    problem = replace(plain, fabric=replace(plain.fabric, links=links))
    columns = np.array([100.0, 30.0, 60.0])
    saved = 2 * burst_bytes / plain.rates[0]  # two links out of each device
    np.testing.assert_allclose(problem.by_links(columns), np.maximum(plain.by_links(columns) - saved, 0.0))
    lookups_s = table_bound(replace(plain, fabric=fabric_of(3, rate_Bps=10**15)))
    assert float(lookups_s) <= float(table_bound(problem)) * (1 + 1e-6) and float(table_bound(problem)) < float(table_bound(plain))
    for seed in range(few(20, least=8)):
        assert RandomTables().plan(problem, rng=RNG(seed)).cost_s >= float(table_bound(problem))
    plan = plan_tables(problem, [NeuroShard()])[0]
    assert plan.prediction.time_s >= float(plan.bound) and check_plan(plan).ok
    more = replace(plan, bound=msgspec.structs.replace(plan.bound, value=table_bound(plain).value))
    assert any("certificate proves" in f.message for f in check_plan(more).findings), "the bound of links without buckets"


@pytest.mark.parametrize("end", ["src", "dst"])
def test_buckets_ahead_of_one_device_count_on_the_way_they_help(end):
    """What a device is given off is what its links out and its links in hold; the checker adds that up by itself."""
    plain = problem_of(3, tables=5, devices=3, costs=additive_costs(16))
    links = tuple(replace(x, burst_bytes=400 * (getattr(x, end) == "d0")) for x in plain.fabric.links)
    plan = plan_tables(replace(plain, fabric=replace(plain.fabric, links=links)), [NeuroShard()])[0]
    assert check_plan(plan).ok
    for more in (Fraction(1001, 1000), Fraction(1)):
        raised = replace(plan, bound=msgspec.structs.replace(plan.bound, value=str(plan.bound.exact * more)))
        assert check_plan(raised).ok == (more == 1)


def test_small_memory_cuts_rows_and_what_does_not_fit_is_refused_with_the_proof():
    big = Tables(tables=(Table(name="long", rows=4000, dim=4), Table(name="wide", rows=50, dim=32)), batch=8)
    problem = TableProblem(tables=big, fabric=fabric_of(4, memory_bytes=25_000), costs=(additive_costs(8),))
    plan, ranked, _ = plan_tables(problem, [NeuroShard()])
    cut = [s for s in shards_of(plan) if s.table == "long"]
    assert len(cut) >= 3 and all(s.columns == (0, 4) for s in cut) and ranked[0].plan is not None
    with pytest.raises(Infeasible, match=r"need .* bytes on their devices") as refused:
        replace(problem, fabric=fabric_of(2, memory_bytes=25_000))
    assert refused.value.data["needed_bytes"] > refused.value.data["available_bytes"] and "bytes more" in refused.value.hint
    wide = Tables(tables=(Table(name="wide", rows=2, dim=4),), batch=1 << 20)
    with pytest.raises(Infeasible, match=r"need|holds even"):
        NeuroShard().plan(TableProblem(tables=wide, fabric=fabric_of(8, memory_bytes=30 << 20), costs=(additive_costs(1 << 20),)), rng=RNG(0))


def test_a_rule_that_finds_no_room_says_what_lacks_and_splits_find_some():
    job = Tables(tables=tuple(Table(name=f"t{i}", rows=1000, dim=d) for i, d in enumerate((4, 4, 4, 8))), batch=2)
    problem = TableProblem(tables=job, fabric=fabric_of(2, memory_bytes=41_500), costs=(additive_costs(2),))
    for rule in (RandomTables, SizeGreedy):
        with pytest.raises(Infeasible, match="room") as refused:
            rule().plan(problem, rng=RNG(0))
        assert refused.value.hint and refused.value.data
    assert len(NeuroShard().plan(problem, rng=RNG(0)).shards) > 4
    with pytest.raises(Infeasible, match="left over"):
        NeuroShard(levels=0).plan(problem, rng=RNG(0))


def test_a_slow_device_gets_less():
    costs = (additive_costs(16), additive_costs(16, element=8e-7, column=8e-7))
    problem = TableProblem(tables=tables_of(1, 12), fabric=fabric_of(3), costs=costs, kinds=(1, 0, 0))
    found = NeuroShard().plan(problem, rng=RNG(0))
    assert found.columns[0] < min(found.columns[1:])
    assert found.cost_s < DimGreedy().plan(problem, rng=RNG(0)).cost_s


def test_relabelled_devices_keep_the_cost_and_a_batch_of_others_is_refused():
    problem = problem_of(4, tables=7, devices=3)
    turned = replace(problem, fabric=replace(problem.fabric, devices=problem.fabric.devices[::-1]))
    assert NeuroShard().plan(turned, rng=RNG(0)).cost_s == pytest.approx(NeuroShard().plan(problem, rng=RNG(0)).cost_s, rel=0.02)
    with pytest.raises(UsageError, match="batches of 99"):
        replace(problem, costs=(grown_costs(99),))
    with pytest.raises(UsageError, match="kinds of devices"):
        replace(problem, kinds=(0, 5, 0))
    with pytest.raises(UsageError, match="do not mix"):
        replace(problem, costs=(grown_costs(16), additive_costs(16)))
    with pytest.raises(UsageError, match="without a plan to start from"):
        replace(problem, move_bytes=3)


def test_planning_again_moves_no_more_than_allowed_and_empties_lost_devices():
    problem = problem_of(2, tables=8, devices=3, costs=additive_costs(16))
    before = RandomTables().plan(problem, rng=RNG(5))
    costs = []
    for most in (0, 2_000, 20_000, 10**9):
        again = replace(problem, start=before.shards, move_bytes=most)
        found = FewestMoves().plan(again, rng=RNG(0))
        assert found.moved_bytes == moved_bytes(before.shards, found.shards, problem.tables) <= most
        costs.append(found.cost_s)
    assert costs == sorted(costs, reverse=True) and costs[0] == pytest.approx(before.cost_s) and costs[-1] < costs[0]
    with pytest.raises(Unsupported, match="may be moved"):
        NeuroShard().plan(replace(problem, start=before.shards, move_bytes=0), rng=RNG(0))
    with pytest.raises(Unsupported, match="no plan to start from"):
        FewestMoves().plan(problem, rng=RNG(0))
    smaller = replace(problem, fabric=fabric_of(2), start=before.shards)
    lost = sum(s.elements * 4 for s in before.shards if s.device == "d2")
    assert {s.device for s in FewestMoves().plan(smaller, rng=RNG(0)).shards} == {"d0", "d1"}
    with pytest.raises(Infeasible, match="devices that are gone"):
        FewestMoves().plan(replace(smaller, move_bytes=lost - 1), rng=RNG(0))


class Machine:
    """One whose lookups take other times than the costs say: every table so many times as long, and all of them half as long again."""

    def __init__(self, problem, spread=0.4):
        of_table = RNG(9).uniform(-spread, spread, len(problem.tables.tables))
        self.problem, self.exchanged, self.looked = replace(problem, learned=Learned(factor=1.5, of_table=tuple(of_table.tolist()))), [], []

    def _phases(self, plan):
        pieces = [Piece(self.problem.tables.number_of[s.table], s.rows, s.columns) for s in plan.shards]
        return self.problem.phases(*self.problem.sums(pieces, np.array([self.problem.fabric.actor_of[s.device] for s in plan.shards])))

    def lookups_s(self, plans):
        self.looked += plans
        return [self._phases(p).compute_s.tolist() for p in plans]

    def __call__(self, plans, compute_s):
        assert compute_s == [self._phases(p).compute_s.tolist() for p in plans], "what was looked at, not looked at again"
        self.exchanged += plans
        kinds = ("compute_s", "backward_s", "forward_s")
        return [Measured(**{k: tuple(getattr(self._phases(p), k).tolist()) for k in kinds}) for p in plans]


def test_finalists_are_measured_and_the_best_of_them_wins():
    problem = problem_of(0, tables=6, devices=2)
    machine = Machine(problem)
    plan, ranked, bound = plan_tables(problem, measure=machine, finalists=2)
    taken = [t for t in ranked if t.measured]
    assert len(machine.exchanged) == len(taken) == 2 and ranked[:2] == sorted(taken, key=lambda t: t.time_s)
    assert plan.decisions["tables"]["measured_s"] == pytest.approx(ranked[0].time_s) == pytest.approx(machine._phases(ranked[0].plan).total_s)
    assert float(bound) > 0
    lucky = Machine(problem)
    lucky._phases = lambda plan: Phases(np.zeros(2), np.full(2, 0.1), np.full(2, 0.1), np.array(0.2))
    assert plan_tables(problem, [DimGreedy()], measure=lucky)[0].bound is None, "costs below the floor prove no bound"
    found, _ = compare_tables(problem)
    assert [t.refused is not None for t in found].count(True) == 1 and "no plan to start from" in found[-1].why


@pytest.mark.parametrize("seed", range(few(6, least=4)))
def test_costs_learn_from_measured_plans_and_plan_again(seed):
    """Where costs err by 40 % on each table: no worse than any strategy's own plan, and near what exact costs would have found."""
    problem = problem_of(seed, tables=12, devices=3)
    machine = Machine(problem)
    alone = [t.plan for t in compare_tables(problem)[0] if t.plan]
    before = sorted(float(machine._phases(p).total_s) for p in alone)
    best = compare_tables(problem, measure=machine, finalists=3)[0][0]
    exact = NeuroShard().plan(machine.problem, rng=RNG(0)).cost_s
    assert best.time_s <= before[0] * (1 + 1e-9) and best.time_s <= exact * 1.03
    stuck = replace(problem, start=alone[0].shards, move_bytes=0)
    assert compare_tables(stuck, measure=machine, finalists=1)[0][0].plan.moved_bytes == 0, "the limit of moved bytes holds"


def test_what_is_learned_is_what_was_changed():
    problem = problem_of(1, tables=6, devices=3)
    machine = Machine(problem, spread=0.1)
    plans = [RandomTables().plan(problem, rng=RNG(k)) for k in range(40)]
    found = learned(problem, plans, machine.lookups_s(plans))
    assert found.factor == pytest.approx(1.5, rel=0.03) and np.abs(np.subtract(found.of_table, machine.problem.learned.of_table)).max() < 0.03
    cuts = replace(problem, learned=Learned(factor=1.0, of_table=(0.0,) * 6, each_s=2e-5))
    plans += [p for k in range(8) for p in NeuroShard().plan(problem_of(1, tables=6, devices=3), rng=RNG(k)).others]
    machine.problem = cuts
    assert learned(problem, plans, machine.lookups_s(plans)).each_s == pytest.approx(2e-5, rel=0.3), "what a piece costs, told by plans of many cuts"
    nothing = learned(problem, plans[:1], [[0.0] * 3])
    assert nothing == Learned(factor=1.0, of_table=(0.0,) * 6)


@pytest.fixture(scope="module")
def plan():
    return plan_tables(problem_of(1, tables=6, devices=3), [NeuroShard()])[0]


def test_a_plan_is_written_read_and_proved(plan):
    again = plan_from_bytes(plan_bytes(plan))
    assert check_plan(again).ok and plan_bytes(again) == plan_bytes(plan)
    assert plan.prediction.time_s >= float(plan.bound)
    with pytest.raises(FormatError, match="kind"):
        shards_of(replace(plan, kind="placement"))
    with pytest.raises(FormatError, match="shards"):
        shards_of(replace(plan, job={**plan.job, "shards": [{"table": 3}]}))


def _with_shard(plan, change):
    shards = [dict(s) for s in plan.job["shards"]]
    change(shards)
    return replace(plan, job={**plan.job, "shards": shards})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop(), "elements|looks up|never pass|are \\d+ bytes"), (lambda s: s.append(dict(s[0])), "two shards hold"),
        (lambda s: s[0].update(columns=(2, 4)), "no multiples"), (lambda s: s[0].update(table="x"), "no such table"),
        (lambda s: s[0].update(rows=(0, 10**6)), "not inside"), (lambda s: s[0].update(device="d9"), "no device"),
        (lambda s: s[0].update(device="d1" if s[0]["device"] != "d1" else "d2"), "bytes, the program sends|floor|looks up"),
    ],
)  # fmt: skip
def test_changed_shards_are_found(plan, change, says):
    import re

    verdict = check_plan(_with_shard(plan, change))
    assert not verdict.ok and any(re.search(says, f.message) for f in verdict.findings), verdict.findings


def test_changed_prices_bounds_and_orders_are_found(plan):
    cost = msgspec.to_builtins(plan.job["cost"])
    key = next(iter(cost["table"]))
    entry = cost["table"][key]
    cost["table"][key] = {**entry, "time_s": 1e-12} if isinstance(entry, dict) else [1e-12, *entry[1:]]
    cheap = check_plan(replace(plan, job={**plan.job, "cost": cost}))
    assert any("floor" in f.message for f in cheap.findings)
    raised = msgspec.structs.replace(plan.bound, value=str(plan.bound.exact * 2).replace(" ", ""))
    assert any("certificate proves" in f.message for f in check_plan(replace(plan, bound=raised)).findings)
    for data in ({"form": "path", "weights": {}}, {"form": "load", "weights": {"d0": -1.0, "d1": 1.0, "d2": 1.0}}, {}):
        bound = msgspec.structs.replace(plan.bound, certificate=msgspec.structs.replace(plan.bound.certificate, data=data))
        assert any("mangles" in f.message for f in check_plan(replace(plan, bound=bound)).findings)
    steps = plan.main.steps
    for step in range(len(steps)):
        if steps.after_ptr[step + 1] > steps.after_ptr[step]:  # a wait that is taken away
            fewer = steps.after_ptr[step + 1] - steps.after_ptr[step]
            ptr = np.where(np.arange(len(steps.after_ptr)) > step, steps.after_ptr - fewer, steps.after_ptr)
            keep = np.ones(len(steps.after_step), bool)
            keep[steps.after_ptr[step] : steps.after_ptr[step + 1]] = False
            lost = replace(steps, after_ptr=ptr.astype(np.int32), after_step=steps.after_step[keep], after_lag=steps.after_lag[keep])
            from meshwright.program.hash import program_hash

            program = replace(plan.main, steps=lost)
            name = program_hash(program)
            entry = msgspec.structs.replace(plan.cycle[0], program=name)
            assert not check_plan(replace(plan, programs={name: program}, cycle=(entry,))).ok
    missing = check_plan(replace(plan, job={k: v for k, v in plan.job.items() if k != "floor"}))
    assert any("job.tables" in f.message for f in missing.findings)


def test_moved_bytes_counts_what_is_not_there():
    job = Tables(tables=(Table(name="a", rows=10, dim=8), Table(name="b", rows=5, dim=4)), batch=2, state_bytes=4)
    old = [Shard(table="a", device="x", rows=(0, 10), columns=(0, 8))]
    new = [Shard(table="a", device="x", rows=(0, 10), columns=(0, 4)), Shard(table="a", device="y", rows=(0, 10), columns=(4, 8)),
           Shard(table="b", device="y", rows=(0, 5), columns=(0, 4))]  # fmt: skip
    assert moved_bytes(old, new, job) == 10 * 4 * 8


@pytest.mark.parametrize("seed", range(few(40, least=20)))
def test_pieces_cut_in_columns_and_in_rows_tile_their_tables(seed):
    """Halves by columns, some of them halved by rows behind that: a run of columns must stay within the columns of its own rows."""
    problem, rng = problem_of(seed, tables=3, devices=3), RNG(seed)
    pieces = list(problem.whole)
    for _ in range(int(rng.integers(1, 40))):
        at = int(rng.integers(len(pieces)))
        pieces[at : at + 1] = halves(pieces[at]) or (pieces[at],)
    on = rng.integers(3, size=len(pieces))
    names = [d.name for d in problem.fabric.devices]
    held = {t.name: np.zeros((t.rows, t.dim), int) for t in problem.tables.tables}
    by_device: dict[tuple[str, str], int] = {}
    for s in merged(problem, pieces, on):
        held[s.table][slice(*s.rows), slice(*s.columns)] += 1
        by_device[s.table, s.device] = by_device.get((s.table, s.device), 0) + (s.rows[1] - s.rows[0]) * (s.columns[1] - s.columns[0])
    assert all((x == 1).all() for x in held.values())
    wanted: dict[tuple[str, str], int] = {}
    for p, d in zip(pieces, on, strict=True):
        key = problem.tables.tables[p.table].name, names[d]
        wanted[key] = wanted.get(key, 0) + p.kind[1] * p.kind[2]
    assert by_device == wanted
