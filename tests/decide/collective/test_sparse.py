"""Sparse all-reduces as programs: proved, bounded, stored and read again, and what a step really sends."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check import check_program, check_volume
from meshwright.check.program.volume import symbolic_bytes
from meshwright.cli.frame import main
from meshwright.cost import Cost, Transport
from meshwright.decide.collective.sparse import NAMES, SparseProblem, strategy
from meshwright.decide.collective.sparse.choice import rank_sparse, receive_bound_s
from meshwright.decide.collective.sparse.oktopk import OkTopk
from meshwright.drive.collective.sparse import check_sparse, plan_sparse
from meshwright.errors import CheckFailed, UnknownName, Unsupported, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.plan import read_plan, read_program, write_plan, write_program
from meshwright.program.hash import program_hash
from meshwright.program.program import Kind, Part, Program
from meshwright.run.sparse.reducer import RankReducer
from meshwright.simulate.pricing import durations
from meshwright.testing.sparse_twin import Sent, run_twin

STRATEGY = st.sampled_from(sorted(NAMES))


def problem(ranks: int, elements: int = 10_000_000, k: int = 100_000, **more: float) -> SparseProblem:
    fabric = load_fabric(f"star:{ranks}?link=12.5MB/s")
    return SparseProblem(fabric=fabric, ranks=tuple(d.name for d in fabric.devices), elements=elements, k=k, **more)  # type: ignore[arg-type]


@given(name=STRATEGY, ranks=st.integers(2, 11), elements=st.integers(1, 1 << 33), share=st.floats(0, 1), overlap=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_every_program_is_proved_and_moves_what_its_formula_says(name: str, ranks: int, elements: int, share: float, overlap: float) -> None:
    asked = problem(ranks, elements, max(1, int(share * elements)), overlap=overlap)
    try:
        plan = strategy(name)().plan(asked)
    except Unsupported:
        assert name == "zen" and elements >= 1 << 31
        return
    check_sparse(plan, asked)
    for program in plan.programs.values():
        low, expected, most = (symbolic_bytes(program, which) for which in ("lower", "expected", "upper"))  # type: ignore[arg-type]
        for way in range(2):
            assert np.all(low[way] <= expected[way]) and np.all(expected[way] <= most[way])
        assert set(program.requires) == {"symbolic-size"}


def test_programs_survive_their_files(tmp_path: Path) -> None:
    for name in NAMES:
        for kind, program in strategy(name)().plan(problem(3)).programs.items():
            write_program(tmp_path / "p.json.gz", program)
            assert program_hash(read_program(tmp_path / "p.json.gz")) == program_hash(program), (name, kind)


def shifted(p: Program, part: Part) -> Program:
    """The last message of data takes or puts one chunk beside where it should, or is no longer what it was."""
    s = p.steps
    at = int(np.flatnonzero((s.kind == Kind.TRANSFER) & (s.size >= 0) & ((s.parts & part) != 0) & (s.count == 1))[-1])
    column = "src_chunk" if part == Part.SEND else "dst_chunk"
    moved = getattr(s, column).copy()
    buffer = (s.src_buffer if part == Part.SEND else s.dst_buffer)[at]
    moved[at] = (moved[at] + 1) % p.buffers.chunks[buffer]
    return replace(p, steps=replace(s, **{column: moved}))


@pytest.mark.parametrize("part", [Part.SEND, Part.RECV])
@pytest.mark.parametrize("name", ["oktopk", "topkdsa", "zen", "topka"])
def test_a_region_that_goes_astray_is_found(name: str, part: Part) -> None:
    plan = strategy(name)().plan(problem(4))
    verdict = check_program(shifted(plan.programs[plan.usual], part))
    assert not verdict.ok


def test_more_volume_than_was_said_is_found() -> None:
    asked = problem(4)
    plan = OkTopk().plan(asked)
    program = plan.programs["steady"]
    assert not check_volume(program, 4 * plan.words + 8 * len(program.sizes))
    found = check_volume(program, 4 * plan.words / 2)
    assert [f.check for f in found] == ["volume", "volume"] and found[0].witness["bytes"] > 4 * plan.words / 2
    with pytest.raises(CheckFailed, match="the plan says"):
        check_sparse(replace(plan, words=plan.words / 2), asked)


def bound(p: Program, sent: list[Sent]) -> Program:
    """The program with its symbols bound to what a step really sent: every symbol to one size, that of all its messages."""
    s, actual = p.steps, {m.step: m.size_bytes for m in sent}
    assert len(actual) == len(sent)
    found: dict[int, set[int]] = {}
    for step in np.flatnonzero((s.parts & Part.SEND) != 0).tolist():
        if s.size[step] >= 0:
            found.setdefault(int(s.size[step]), set()).add(actual.get(step, 0))
    assert all(len(sizes) == 1 for sizes in found.values())
    sizes = np.array([found[i].pop() for i in range(len(p.sizes))], np.int64)
    assert np.all(p.sizes.lower <= sizes) and np.all(sizes <= p.sizes.upper)
    return replace(p, sizes=replace(p.sizes, expected=sizes))


def messages(p: Program) -> list[Sent]:
    """What every rank sends, in its order; empty messages are not posted."""
    s, b, lane, bytes_ = p.steps, p.buffers, p.lane_of_step(), p.message_bytes()
    found = []
    for step in np.flatnonzero((s.parts & Part.SEND) != 0).tolist():
        phase = p.sizes.name[s.size[step]].split()[0] if s.size[step] >= 0 else b.name[s.src_buffer[step]].split(":")[0]
        assert p.channels.src[s.chan_out[step]] == p.lanes.actor[lane[step]]
        found.append(Sent(phase, int(p.lanes.actor[lane[step]]), int(p.channels.dst[s.chan_out[step]]), int(bytes_[step]), step))
    return sorted((m for m in found if m.size_bytes), key=lambda m: m.source)


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("threshold", ["reuse", "gaussian"])
def test_what_a_step_sends_is_the_checked_program_with_its_sizes(name: str, ranks: int, threshold: str) -> None:
    """Source, target, phase, bytes and order of every message, for every kind of step; thresholds jump in one, blocks are made equal."""
    elements, k = 4000, 80
    more: dict[str, Any] = {"region_period": 4, "balance": 1.0} if name == "oktopk" else {}
    reducers = [RankReducer(r, ranks, elements, k=k, method=name, threshold=threshold, period=3, **more) for r in range(ranks)]
    rng = np.random.default_rng(0)
    scale = np.exp(-5 * np.linspace(0, 1, elements))
    kinds: set[str] = set()
    phases: set[str] = set()
    for turn in range(9):
        vectors = [(rng.standard_normal(elements) * scale * (30 if turn == 4 else 1)).astype(np.float32) for _ in range(ranks)]
        kind = reducers[0].kind
        program = reducers[0].walk(kind).program
        _, sent = run_twin([partial(r.protocol, x) for r, x in zip(reducers, vectors, strict=True)], turn)
        assert sorted(sent, key=lambda m: m.source) == messages(bound(program, sent))
        kinds.add(kind)
        phases |= {m.phase for m in sent}
        if threshold == "reuse":
            assert program_hash(program) == program_hash(strategy(name)().plan(problem(ranks, elements, k)).programs[kind])
    assert kinds == set(NAMES[name].kinds)  # type: ignore[attr-defined]
    if name == "oktopk":
        assert phases >= {"headers", "counts", "regions", "edges", "histogram", "sizes", "balance", "gather"}


def test_the_choice_is_by_simulated_time_and_never_beats_its_bound() -> None:
    slow = problem(8)
    plan, ranked = plan_sparse(slow)
    times = {r.strategy: r.mean_s for r in ranked}
    assert plan is not None and ranked[0].strategy == "oktopk" and plan.decisions["collective:all-reduce"]["cite"] == ["li2022oktopk"]
    assert min(t for t in times.values() if t is not None) >= receive_bound_s(slow) * 0.999
    assert set(times) == {*NAMES, "dense"} and all(r.upper_s >= r.time_s for r in ranked if r.time_s is not None and r.upper_s is not None)
    none, ranked = plan_sparse(problem(8, 1000, 500), strategies=["oktopk", "topka"])
    assert none is None and ranked[0].strategy == "dense" and len(ranked) == 3


def test_messages_that_are_expected_to_be_empty_cost_nothing() -> None:
    asked = problem(4)
    program = OkTopk().plan(asked).programs["steady"]
    s, cost = program.steps, Cost(transport=Transport(per_message_s=1.0))
    time_s = durations(program, cost, asked.fabric, asked.ranks)
    moves, empty = s.kind == Kind.TRANSFER, (s.size >= 0) & (program.message_bytes() == 0)
    assert np.all(time_s[moves & empty] == 0) and np.any(moves & empty)
    assert np.all(time_s[moves & ~empty] >= 1)


def test_the_plan_holds_the_cycle(tmp_path: Path) -> None:
    plan, ranked = plan_sparse(problem(3), strategies=["oktopk"])
    assert plan is not None and ranked[0].plan is not None
    assert plan.cycle[0].when == "select" and set(plan.cycle[0].table) == set(ranked[0].plan.programs)
    write_plan(tmp_path / "plan.json.gz", plan)
    assert read_plan(tmp_path / "plan.json.gz").cycle == plan.cycle


def test_what_cannot_be_planned_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="got 65"):
        OkTopk().plan(problem(65))
    with pytest.raises(UsageError, match="periods"):
        OkTopk(period=0).plan(problem(2))
    ranked = rank_sparse(problem(2, 1 << 31, 1 << 20), [("zen", NAMES["zen"]())])
    assert ranked[-1].strategy == "zen" and ranked[-1].time_s is None and "2^31" not in ranked[-1].why and "elements" in ranked[-1].why
    with pytest.raises(UnknownName, match="fastest"):
        strategy("fastest")
    for wrong in ({"elements": 0}, {"k": 0}, {"k": 11}, {"overlap": 2.0}):
        with pytest.raises(UsageError):
            problem(2, **{"elements": 10, "k": 2, **wrong})  # type: ignore[arg-type]
    fabric = load_fabric("star:2?link=1MB/s")
    with pytest.raises(UsageError, match="2 different devices"):
        SparseProblem(fabric=fabric, ranks=(fabric.devices[0].name,), elements=10, k=1)


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sparse_collectives.md").read_text(encoding="utf-8")
    command, _, shown = page.partition("$ meshwright ")[2].partition("```")[0].partition("\n")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip() == shown.strip()
