"""`meshwright program show|stats|diff` on files, as a user calls them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.frame import main
from meshwright.io.plan.plan import program_hash, write_plan, write_program
from meshwright.plan.plan import CycleEntry, Plan
from meshwright.program.builder import ProgramBuilder, StepRef
from meshwright.program.program import Program
from meshwright.testing.mutate import mutate

sys.path.insert(0, str(Path(__file__).parent.parent / "check"))
from check_programs import chain_broadcast, ring_all_reduce


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["program", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code, out, err = call(capsys, *words, "--json")
    assert code in (0, 1) and not err, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    write_program(tmp_path / "ring.json", ring_all_reduce(3))
    return tmp_path / "ring.json"


def plan_with_calls() -> Plan:
    callee = ring_all_reduce(2)
    name = program_hash(callee)
    b = ProgramBuilder(ranks=2, name="caller")
    comm = b.comm("dp", [0, 1])
    for r in range(2):
        x = b.buffer(r, chunks=2, chunk_bytes=100, role="gradient", name="gradients")
        b.lane(r).call(b.call(comm, name, [(0, x, 0)]))
    program = b.build()
    return Plan(
        kind="collective", job={}, target_fabric={}, placement=("a", "b"), programs={program_hash(program): program, name: callee},
        cycle=(CycleEntry(program=program_hash(program)),), decisions={},
    )  # fmt: skip


# ---- show --------------------------------------------------------------------------------------------------------------
def test_show_prints_lanes_and_steps(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "show", ring)
    assert code == 0
    assert out.startswith("program ring-all-reduce-3: 3 ranks, 6 lanes, 24 steps")
    assert "lane 1 of rank 0: comm, 4 steps" in out
    assert "recv+read+add+store 1 chunk from rank 2 of data0[2] into data0[2]" in out
    assert "after 4" in out


def test_show_limits(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "show", ring, "--rank", 1, "--limit", 5)
    assert [len(lane["steps"]) for lane in found["lanes"]] == [4, 1] and found["hidden_steps"] == 3
    assert {lane["actor"] for lane in found["lanes"]} == {1}
    assert [lane["lane"] for lane in as_json(capsys, "show", ring, "--lane", 4, "--limit", 0)["lanes"]] == [4]
    _, out, _ = call(capsys, "show", ring, "--limit", 2)
    assert "... 22 more steps" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "3"], "ranks 0..2, got --rank 3"),
        (["--lane", "6"], "lanes 0..5, got --lane 6"),
        (["--limit", "-1"], "--limit: must be >= 0"),
        (["--program", "x"], "0 programs are called 'x'"),
    ],
)
def test_show_refuses_what_is_not_there(ring: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = call(capsys, "show", ring, *words)
    assert code == 2 and not out and message in err


def test_show_names_a_program_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", plan_with_calls())
    assert as_json(capsys, "show", tmp_path / "plan.json")["name"] == "caller"
    assert as_json(capsys, "show", tmp_path / "plan.json", "--program", "ring-all-reduce-2")["name"] == "ring-all-reduce-2"
    key = next(iter(plan_with_calls().main.calls.names))
    assert as_json(capsys, "show", tmp_path / "plan.json", "--program", key[:10])["name"] == "ring-all-reduce-2"


def test_a_file_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{")
    for verb in ("show", "stats"):
        code, out, err = call(capsys, verb, tmp_path / "x.json")
        assert code == 1 and not out and err.startswith("error: x.json")
        assert call(capsys, verb, tmp_path / "missing.json")[0] != 0


# ---- stats -------------------------------------------------------------------------------------------------------------
def test_stats_of_a_ring(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "stats", ring)
    assert found["live"] and found["wellformed"]
    assert found["channel_bytes"] == [16, 16, 16]
    assert found["smallest_depth"]["per_channel"] == [1, 1, 1] and found["smallest_depth"]["stated"] == [2, 2, 2]
    assert found["worst_order_memory"]["peak_bytes"] == [12, 12, 12]
    assert found["critical_path_steps"]["length"] == 8  # four messages one after the other, each a send and a receive
    assert found["kinds"]["transfer"] == 24
    code, out, _ = call(capsys, "stats", ring)
    assert code == 0 and "critical path: 8 steps" in out and "at most 1 needed" in out


def test_stats_follow_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(tmp_path / "chain.json.gz", chain_broadcast(4, repeat=5))
    found = as_json(capsys, "stats", tmp_path / "chain.json.gz")
    assert found["executed_steps"] == 20 and found["steps"] == 4
    assert found["critical_path_steps"]["length"] == 4 + 5 - 1
    assert found["channel_bytes"] == [20, 20, 20]


def test_stats_write_calls_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", plan_with_calls())
    found = as_json(capsys, "stats", tmp_path / "plan.json")
    assert found["steps"] == 2 and found["written_out"]["steps"] == 4 + 2 * 4
    assert found["channel_bytes"] == [200, 200]
    write_program(tmp_path / "caller.json", plan_with_calls().main)
    code, _, err = call(capsys, "stats", tmp_path / "caller.json")
    assert code == 2 and "give the plan file" in err


def deadlocked() -> Program:
    b = ProgramBuilder(ranks=1, name="stuck")
    one, two = b.lane(0), b.lane(0)
    one.nop(after=[StepRef(two.number, 0)])
    two.nop(after=[StepRef(one.number, 0)])
    return b.build()


def test_stats_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(tmp_path / "stuck.json", deadlocked())
    found = as_json(capsys, "stats", tmp_path / "stuck.json")
    assert not found["live"] and sorted(found["cycle"]) == [0, 1]
    assert "it deadlocks" in call(capsys, "stats", tmp_path / "stuck.json")[1]
    broken = mutate(ring_all_reduce(3), "drop step", np.random.default_rng(0))
    assert broken is not None
    write_program(tmp_path / "broken.json", broken.program)
    found = as_json(capsys, "stats", tmp_path / "broken.json")
    assert not found["wellformed"] and "has no partner" in found["fault"]


# ---- diff --------------------------------------------------------------------------------------------------------------
def test_equal_programs_do_not_differ(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "diff", ring, ring)
    assert code == 0 and out == "the programs are the same\n"
    assert as_json(capsys, "diff", ring, ring) == {"schema": "meshwright.program-diff", "version": 1, "equal": True, "differences": []}


def test_diff_names_the_step_that_changed(ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"drop step": "- ", "shift source chunk": "+ ", "lower depth": "depth 2 became 1", "drop after edge": "after lane"}
    for operator, words in expected.items():
        made = mutate(ring_all_reduce(3), operator, np.random.default_rng(1))
        assert made is not None
        write_program(tmp_path / "other.json", made.program)
        code, out, _ = call(capsys, "diff", ring, tmp_path / "other.json")
        assert code == 1 and words in out, operator
        found = as_json(capsys, "diff", ring, tmp_path / "other.json")
        assert not found["equal"] and 1 <= len(found["differences"]) <= 3, operator  # one change is not blown up


def test_every_kind_of_mutation_shows_in_the_diff(tmp_path: Path, ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cli.program_diff import differences
    from meshwright.testing.mutate import OPERATORS

    program = ring_all_reduce(3, repeat=2)
    for operator in OPERATORS:
        made = mutate(program, operator, np.random.default_rng(3))
        if made is not None and operator != "shorten lifetime":
            assert differences(program, made.program), operator
    assert {d["where"] for d in differences(program, ring_all_reduce(2, repeat=2))} >= {"ranks", "lane 4", "channels"}
    assert differences(program, replace(program, ranks=4))[0]["text"] == "3 became 4"


def test_diff_limit(ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(tmp_path / "other.json", ring_all_reduce(4))
    code, out, _ = call(capsys, "diff", ring, tmp_path / "other.json", "--limit", 2)
    assert code == 1 and len(out.splitlines()) == 3 and "more differences" in out
    code, _, err = call(capsys, "diff", ring, tmp_path / "other.json", "--limit", "-2")
    assert code == 2 and "--limit" in err
