"""Plans and programs as files: what is written comes back, equal plans give equal bytes, and old files stay readable."""

from __future__ import annotations

import gzip
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bound import Bound, Certificate
from meshwright.errors import FormatError, UsageError
from meshwright.io.columns import Budget, decode_column, encode_column
from meshwright.io.plan.plan import (  # fmt: skip
    plan_bytes,
    plan_from_bytes,
    program_bytes,
    program_from_bytes,
    program_hash,
    read_plan,
    read_plan_or_program,
    read_program,
    write_plan,
    write_program,
)
from meshwright.plan.plan import Alternative, CycleEntry, Plan, Prediction, Segment, Stage, TrainingLayout, ValueInfo
from meshwright.program.builder import ProgramBuilder
from meshwright.program.hash import TABLES, column_forms
from meshwright.program.program import Program
from meshwright.program.tables import Csr
from meshwright.testing.programs import programs

DATA = Path(__file__).parent.parent / "data"


def swap() -> Program:
    b = ProgramBuilder(ranks=2, name="swap")
    x = b.buffer(0, chunks=4, chunk_bytes=4, role="input", name="act:x:0")
    y = b.buffer(1, chunks=4, chunk_bytes=4, role="output", name="act:y:0")
    c = b.channel(0, 1, depth=2)
    send, receive = b.lane(0), b.lane(1)
    for chunk in range(4):
        send.send(c, x, chunk)
        receive.recv(c, y, chunk)
    return b.build()


def full_plan() -> Plan:
    """A plan with something in every field."""
    program = swap()
    key = program_hash(program)
    layout = TrainingLayout(
        data=2, tensor=1, pipeline=1, microbatch_size=4, microbatches=2, global_batch=16,
        stages=(Stage(index=0, segments=("s0",), params=("w",)),),
        segments=(Segment(key="s0", stage=0, nodes=("linear",), reads=("input:0",), writes=("linear",), params=("w",)),),
        values=(ValueInfo(name="linear", shape=(4, 8), dtype="float32", size_bytes=128),),
    )  # fmt: skip
    certificate = Certificate(kind="roofline", data={"flops": 12, "flops_per_s": 3, "devices": 2})
    part = Bound(quantity="part", value="1/3", unit="s", certificate=certificate)
    return Plan(
        kind="training", job={"model": "gpt.py:small", "global_batch": 16}, target_fabric={"name": "laptop", "devices": ["a", "b"]},
        placement=("cpu0", "cpu1"), programs={key: program}, cycle=(CycleEntry(program=key), CycleEntry(program=key, when="evaluation")),
        decisions={"layout": {"strategy": "grid", "options": {"limit": 3}, "why": "fastest"}}, layout=layout,
        bound=Bound(quantity="step time", value="2", unit="s", certificate=certificate, parts=(part,)),
        prediction=Prediction(target_fabric="laptop", time_s=0.1, phases_s={"forward": 0.1}, memory_peak_bytes=(1, 2), evidence={"assumed": 1.0}),
        alternatives=(Alternative(what="TP2", time_s=0.2, why="slower"), Alternative(what="PP2", why="does not fit")), seed=7,
        versions={"meshwright": "0.1.0"},
    )  # fmt: skip


def same(a: Program, b: Program) -> None:
    """Field by field, types of arrays included: an oracle that does not use the hash."""
    for table in TABLES:
        for column in fields(TABLES[table]):
            left, right = getattr(getattr(a, table), column.name), getattr(getattr(b, table), column.name)
            if isinstance(left, Csr):
                assert left.ptr.tolist() == right.ptr.tolist()
                assert left.values.tolist() == right.values.tolist()
            elif isinstance(left, np.ndarray):
                assert left.dtype == right.dtype, (table, column.name)
                assert left.tolist() == right.tolist(), (table, column.name)
                assert right.flags.c_contiguous
            else:
                assert left == right, (table, column.name)
    assert (a.ranks, a.switches, a.name, a.contract) == (b.ranks, b.switches, b.name, b.contract)
    assert (a.fold is None) == (b.fold is None)
    if a.fold is not None and b.fold is not None:
        assert a.fold.axes == b.fold.axes
        assert a.fold.buffer_shift.tolist() == b.fold.buffer_shift.tolist()
        assert a.fold.buffer_shift.shape == b.fold.buffer_shift.shape


@given(programs())
def test_a_program_comes_back_as_it_was(program: Program) -> None:
    data = program_bytes(program)
    again = program_from_bytes(data)
    same(program, again)
    assert program_bytes(again) == data
    assert program_hash(again) == program_hash(program)


@given(st.data(), programs())
def test_every_difference_changes_the_hash(data: st.DataObject, program: Program) -> None:
    tables = [t for t in TABLES if len(getattr(program, t)) and any(form in ("i32", "i64") for form in column_forms(t).values())]
    if not tables:
        assert program_hash(replace(program, name=program.name + "x")) != program_hash(program)
        return
    table = data.draw(st.sampled_from(tables))
    column = data.draw(st.sampled_from([c for c, form in column_forms(table).items() if form in ("i32", "i64")]))
    held = getattr(program, table)
    values = getattr(held, column).copy()
    values[data.draw(st.integers(0, len(values) - 1))] += 1
    changed = replace(program, **{table: replace(held, **{column: values})})
    assert program_hash(changed) != program_hash(program)


def test_the_hash_is_fixed() -> None:
    """Names in old plans depend on it: it may change only together with the version of the format."""
    assert program_hash(swap()) == (DATA / "swap.hash").read_text().strip()


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = full_plan()
    for name in ("plan.json", "plan.json.gz"):
        write_plan(tmp_path / name, plan)
        again = read_plan(tmp_path / name)
        for field in fields(Plan):
            if field.name != "programs":
                assert getattr(again, field.name) == getattr(plan, field.name), field.name
        assert again.programs.keys() == plan.programs.keys()
        same(again.main, plan.main)
        assert plan_bytes(again) == plan_bytes(plan)
    assert again.bound is not None
    assert again.bound.exact == Fraction(2)
    assert gzip.decompress((tmp_path / "plan.json.gz").read_bytes()) == (tmp_path / "plan.json").read_bytes()


def test_equal_plans_give_equal_bytes(tmp_path: Path) -> None:
    one, two = full_plan(), full_plan()
    two = replace(two, job=dict(reversed(list(two.job.items()))))  # the order in which a planner filled a mapping does not matter
    assert plan_bytes(one) == plan_bytes(two)
    write_plan(tmp_path / "a.json.gz", one)
    write_plan(tmp_path / "b.json.gz", two)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_version_1_stays_readable() -> None:
    """Written when the format was made; every later reader must still read them."""
    plan = read_plan(DATA / "plan-v1.json")
    assert plan.decisions == full_plan().decisions
    same(plan.main, swap())
    same(read_program(DATA / "program-v1.json"), swap())


def test_either_kind_of_file(tmp_path: Path) -> None:
    write_program(tmp_path / "p.json", swap())
    write_plan(tmp_path / "plan.json", full_plan())
    assert isinstance(read_plan_or_program(tmp_path / "p.json"), Program)
    assert isinstance(read_plan_or_program(tmp_path / "plan.json"), Plan)
    with pytest.raises(FormatError, match=r"is a 'meshwright.program' document, expected 'meshwright.plan'"):
        read_plan(tmp_path / "p.json")


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_plan(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_plan(tmp_path)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2), max_size=60))
def test_columns_of_any_numbers(values: list[int]) -> None:
    raw = encode_column(np.array(values, np.int64))
    assert decode_column(raw, np.int64, where="x", budget=Budget(0), expected=len(values)).tolist() == values


@pytest.mark.parametrize(
    ("values", "form"),
    [([7] * 1000, b'"runs"'), (list(range(1000)), b'"delta_runs"'), ([x * x for x in range(900)], b'"delta"'), ([1, 2, 3], b"[1,2,3]")],
)
def test_each_form_where_it_is_smallest(values: list[int], form: bytes) -> None:
    raw = encode_column(np.array(values))
    assert form in raw
    assert len(raw) <= len(str(values).replace(" ", ""))
    assert decode_column(raw, np.int32, where="x", budget=Budget(0)).tolist() == values


def test_what_cannot_be_written_is_refused() -> None:
    plan = full_plan()
    for changed, message in [
        (replace(plan, decisions={"x": {"y": float("nan")}}), r"plan.decisions.x.y: nan cannot be written"),
        (replace(plan, decisions={"x": [1.0, float("inf")]}), r"plan.decisions.x\[1\]: inf cannot be written"),
        (replace(plan, job={"x": object()}), r"plan.job: cannot be written as JSON"),
        (replace(plan, programs={"0" * 64: plan.main}), r"plan.programs: is named '0000000000000000', but its content hash is"),
        (replace(plan, cycle=()), r"plan.cycle: a plan needs at least one program"),
        (replace(plan, kind="cake"), r"plan.kind: must be one of training, .*, experts, placement, tables, halo, imported, got 'cake'"),
        (replace(plan, placement=("cpu0",)), r"plan.placement: has 1 names, the program has 2 actors"),
    ]:
        with pytest.raises(FormatError, match=message):
            plan_bytes(changed)


def test_nothing_half_written(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", full_plan())
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(FormatError):
        write_plan(tmp_path / "plan.json", replace(full_plan(), cycle=()))
    assert (tmp_path / "plan.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_from_bytes_and_from_file_agree(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", full_plan())
    assert plan_bytes(plan_from_bytes((tmp_path / "plan.json").read_bytes())) == plan_bytes(read_plan(tmp_path / "plan.json"))
