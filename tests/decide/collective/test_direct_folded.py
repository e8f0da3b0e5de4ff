"""The direct all-to-all of alike servers, stored folded: the same as written out, proved on the stored lanes, and mistakes in it are found there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.folded.program import check_folded
from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.bounds.collective import collective_bound
from meshwright.decide.collective.classic import direct
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.io.fabric.name import load_fabric
from meshwright.program.fold import expand
from meshwright.program.hash import program_hash
from meshwright.program.program import Part, Program


def problem(boxes: int = 3, op: str = "all-to-all") -> CollectiveProblem:
    return CollectiveProblem.on(load_fabric(f"dgx-a100:{boxes}"), op, 24 << 12)


def planned(of: CollectiveProblem, **options: object) -> Program:
    return Direct(**options).plan(of, rng=np.random.default_rng(0)).program  # type: ignore[arg-type]


def proved(program: Program) -> bool:
    """Whether the proof on the stored lanes holds: a finding and a proof that does not apply are none."""
    try:
        return not check_folded(program)
    except Unsupported:
        return False


@pytest.mark.parametrize("window", [1, 2, 32])
def test_folded_is_right_and_as_fast_as_written_out(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr("meshwright.decide.collective.classic.direct_folded.WINDOW_SERVERS", window)
    of = problem()
    folded = planned(of, fold=True)
    assert folded.fold is not None and check_folded(folded) == []
    whole = expand(folded)
    assert check_program(whole).ok and len(whole.steps) == 3 * len(folded.steps)
    time_s = simulated_time_s(folded, of.fabric, of.ranks, None)
    assert simulated_time_s(whole, of.fabric, of.ranks, None) == pytest.approx(time_s, rel=1e-9)
    plain = planned(of, fold=False)
    sends = [int(((p.steps.parts & Part.SEND) != 0).sum()) for p in (whole, plain)]
    assert sends[0] == sends[1] == 24 * 23


def test_mistakes_are_found_on_the_stored_lanes() -> None:
    folded = planned(problem(), fold=True)
    s = folded.steps
    receives, sends = (np.flatnonzero((s.parts & part) != 0).tolist() for part in (Part.RECV, Part.SEND))
    rng = np.random.default_rng(0)
    for column, steps in (("dst_chunk", receives), ("src_chunk", sends)):
        for step in rng.choice(steps, 6, replace=False).tolist():
            wrong = getattr(s, column).copy()
            wrong[step] = (wrong[step] + int(rng.integers(1, 24))) % 24
            mutant = replace(folded, steps=replace(s, **{column: wrong}))
            assert not proved(mutant) and not check_program(expand(mutant)).ok
    assert proved(folded)
    c = folded.contracts[0]
    for other in (replace(c, outputs=c.outputs[8:] + c.outputs[:8]), replace(c, outputs=c.inputs), replace(c, op="all-reduce")):
        assert not proved(replace(folded, contracts=(other,)))
    short = replace(c, inputs=tuple((b, 0, 23) for b, _, _ in c.inputs), outputs=tuple((b, 0, 23) for b, _, _ in c.outputs))
    with pytest.raises(Unsupported, match="no equal blocks"):
        check_folded(replace(folded, contracts=(short,)))
    swapped = replace(c, inputs=c.inputs[8:] + c.inputs[:8], outputs=c.outputs[8:] + c.outputs[:8])
    with pytest.raises(Unsupported, match="another's buffers"):
        check_folded(replace(folded, contracts=(swapped,)))
    still = folded.fold.buffer_shift.copy() if folded.fold is not None else np.zeros((1, 16), np.int32)
    still[0, 8:] = 0
    with pytest.raises(Unsupported, match="do not move with their ranks"):
        check_folded(replace(folded, fold=replace(folded.fold, buffer_shift=still)))


def test_many_pairs_are_folded_and_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_UNFOLDED_PAIRS", 500)
    assert planned(problem()).fold is not None and planned(problem(), fold=False).fold is None
    plan = Direct().plan(problem(), rng=np.random.default_rng(0))
    again = Direct(**{k: tuple(v) if isinstance(v, list) else v for k, v in plan.options.items()}).plan(problem(), rng=np.random.default_rng(1))
    assert program_hash(again.program) == program_hash(plan.program)
    some = CollectiveProblem(fabric=problem().fabric, op="all-to-all", ranks=problem().ranks[:20], size_bytes=20 << 12)
    assert planned(some, fold=None).fold is None
    for of, options in ((problem(op="all-gather"), {}), (some, {}), (problem(), {"order": "servers"})):
        with pytest.raises(Unsupported, match="folded"):
            planned(of, fold=True, **options)


def test_pairs_of_many_ranks_are_not_listed_for_a_bound_that_is_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8,192 ranks the list alone took 7.5 GB."""
    monkeypatch.setattr("meshwright.decide.collective.bounds.flow.MAX_COLUMNS", 1)
    monkeypatch.setattr("meshwright.decide.collective.bounds.flow.demands", lambda _: pytest.fail("pairs were listed"))
    of = problem()
    assert collective_bound(of).certificate.kind != "metric"
