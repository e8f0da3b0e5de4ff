"""Programs of expert layers: proved, above their bounds, and caught when they are wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from effort import few
from meshwright.check import check_program
from meshwright.decide.experts import Choice, Exchanges, ExpertProblem, ExpertShape, Tutel, layer_program
from meshwright.decide.experts.bound import crossing_bytes, expert_bound
from meshwright.drive.experts import LayerPrograms, plan_experts, rank_choices
from meshwright.drive.plans import check_plan, read_fabric, read_plan, write_plan
from meshwright.errors import Unsupported, UsageError
from meshwright.program.calls import inline
from meshwright.program.program import Kind, Part


def problem_of(fabric: str, experts: int, capacities: tuple[int, ...] = (32,), **more: object) -> ExpertProblem:
    found = read_fabric(fabric)
    ranks = tuple(d.name for d in found.devices)
    shape = ExpertShape(ranks=len(ranks), experts=experts, model=8, inner=16, whole_elements=8, inner_elements=16 * 17)
    return ExpertProblem(fabric=found, ranks=ranks, shape=shape, capacities=capacities, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("experts", [1, 2, 4, 8])
def test_every_choice_is_proved_and_moves_what_it_should(experts: int) -> None:
    problem = problem_of("two-islands", experts)
    made = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    for choice in Tutel(chunks=(1, 2)).plan(problem).candidates:
        made.require_sound(choice, 32)
        program, _ = made.step(choice, 32, backward=False)
        if choice.algorithm == "linear":  # nothing is relayed: every byte that is received is for the receiver
            flat = inline(program, made.callees).program
            received = flat.message_bytes()[((flat.steps.parts & Part.RECV) != 0) & (flat.lanes.actor[flat.lane_of_step()] == 0)]
            assert int(received.sum()) == sum(problem.shape.received_bytes(choice, 32))
    if experts == 2:
        rows = rank_choices(problem, made, Tutel(chunks=(1,)).plan(problem).candidates, 32)
        assert [r.time_s for r in rows] == sorted(r.time_s for r in rows if r.time_s is not None)


def test_wrong_programs_are_caught() -> None:
    """Blocks that come back to another place, weights that are read too early, a gradient added up before it is complete."""
    problem = problem_of("laptop:2", 1)
    made = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    choice = Choice(1, 1, "linear")
    forward, _ = made.step(choice, 32, backward=False)
    flat = inline(forward, made.callees).program
    s = flat.steps
    sends = np.flatnonzero((s.kind == Kind.TRANSFER) & (s.parts & Part.READ != 0))
    moved = next(int(i) for i in sends if flat.buffers.name[int(s.src_buffer[i])] == "computed:0")
    chunks = s.src_chunk.copy()
    chunks[moved] ^= 1
    wrong = check_program(replace(flat, steps=replace(s, src_chunk=chunks)))
    assert any(f.check == "values" and "another chunk" in f.message for f in wrong.findings)
    for name, backward in (("weights", False), ("gradients", True)):
        program, _ = made.step(choice, 32, backward=backward)
        late = program.steps
        found = np.flatnonzero(late.kind == (Kind.CALL if backward else Kind.COMPUTE))
        keep = np.ones(len(late.after_step), bool)
        for step in found.tolist():
            weights = [k for k in range(late.after_ptr[step], late.after_ptr[step + 1]) if (backward or late.after_step[k] < 2 * problem.shape.ranks)]
            keep[weights] = False
        counts = np.array([keep[late.after_ptr[i] : late.after_ptr[i + 1]].sum() for i in range(len(late))])
        ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        loose = replace(late, after_ptr=ptr, after_step=late.after_step[keep], after_lag=late.after_lag[keep])
        verdict = check_program(replace(program, steps=loose), programs=made.callees)
        assert any(f.check == "races" for f in verdict.findings), name


@pytest.mark.parametrize("seed", range(few(8)))
def test_nothing_is_simulated_below_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    fabric = draw.choice(["two-islands", "laptop:4", "dgx-h100:1"])
    problem = problem_of(fabric, draw.choice([1, 2, 4, 8]), (draw.choice([32, 256]),), passes=draw.choice(["training", "inference"]))
    problem = replace(problem, shape=replace(problem.shape, model=draw.choice([8, 512]), output=0, inner_elements=0, whole_elements=0))
    made = LayerPrograms(problem.fabric, problem.ranks, problem.shape)
    candidates = Tutel(chunks=(draw.choice([1, 4]),)).plan(problem).candidates
    rows = rank_choices(problem, made, candidates, problem.capacities[0])
    least = expert_bound(problem, problem.capacities[0])
    for row in rows:
        assert row.time_s is None or row.time_s >= float(row.bound.time_s) * (1 - 1e-9) >= float(least.time_s) * (1 - 2e-9)
    assert rows[0].time_s is not None


def test_bytes_across_a_cut_by_counting() -> None:
    """Two experts on four ranks, each expert on one island: what enters an island, row by row and slice by slice."""
    problem = problem_of("two-islands", 2, (8,))
    shape, inside = problem.shape, frozenset([0, 1])
    rows = 8 * shape.model * 4
    assert crossing_bytes(problem, 8, 1, inside, backward=False) == (2 * rows + 2 * rows, 2 * rows + 2 * rows)  # 2 ranks' tokens in, 2 ranks' out
    assert crossing_bytes(problem, 8, 2, inside, backward=False)[0] == 4 * rows  # copies of a row are made behind the cut
    slices = 2 * (shape.slice_elements + shape.whole_slice_elements) * 4
    assert crossing_bytes(problem, 8, 0, inside, backward=False) == (slices, slices) == crossing_bytes(problem, 8, 0, inside, backward=True)


def test_plan_with_its_table(tmp_path: Path) -> None:
    problem = problem_of("two-islands", 2, (32, 160))
    plan, ranked = plan_experts(problem, Tutel(chunks=(1, 2)))
    table = plan.cycle[0].table
    assert sorted(table) == ["backward:128", "backward:256", "forward:128", "forward:256"] and set(table.values()) <= set(plan.programs)
    assert len(ranked) == 2 and plan.kind == "experts" and plan.prediction is not None and plan.prediction.time_s == ranked[-1][0].forward_s
    notes = plan.decisions["experts"]["notes"]["choices"]
    assert [n["choice"] for n in notes] == [list(rows[0].choice) for rows in ranked] and all(n["time_s"] >= n["bound_s"] for n in notes)
    write_plan(tmp_path / "plan.json", plan)
    assert check_plan(read_plan(tmp_path / "plan.json")).ok
    again, _ = plan_experts(problem, Tutel(chunks=(1, 2)))
    write_plan(tmp_path / "again.json", again)
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()


def test_what_does_not_apply_is_refused_by_name() -> None:
    problem = problem_of("laptop:4", 2)
    with pytest.raises(Unsupported, match="several servers with several ranks"):
        plan_experts(problem, Tutel(algorithms=("2dh",)))
    with pytest.raises(UsageError, match="no collective strategy 'spiral'"):
        plan_experts(problem, Tutel(algorithms=("spiral",)))
    with pytest.raises(Unsupported, match="is not planned"):
        layer_program(problem.shape, Choice(1, 1, "linear"), 32, Exchanges())
    whole = LayerPrograms(problem.fabric, problem.ranks, problem.shape).exchanges(Choice(0, 1, "linear"))
    with pytest.raises(Unsupported, match="not one message per pair"):
        layer_program(problem.shape, Choice(1, 1, "linear"), 32, Exchanges(tokens=whole.gather, gather=whole.gather))
