"""What every restart strategy must do, on generated problems: placements of ranks, and transfers of bytes."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...decide.restart import RestartProblem, RestartStrategy
from ...decide.restart.problem import STORAGE, PlacementProblem, PlacementStrategy, TransferStrategy
from ...plan.regions import elements, intersection, minus
from ..restarts import problems
from .chosen import named_and_cited, parametrized

EXAMPLES = settings(max_examples=40, deadline=None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "restart")


def test_name_and_citation(kind: type[RestartStrategy]) -> None:
    named_and_cited(kind)
    assert kind.answers in ("placement", "transfers") and kind(**asdict(kind())) == kind()  # type: ignore[call-overload]


@st.composite
def placements(draw: st.DrawFn) -> PlacementProblem:
    ranks = draw(st.integers(1, 5))
    devices = draw(st.integers(ranks, 6))
    source = np.random.default_rng(draw(st.integers(0, 10**6)))
    allowed = None
    if draw(st.booleans()):
        allowed = source.random((ranks, devices)) < 0.5
        allowed[np.arange(ranks), source.permutation(devices)[:ranks]] = True  # one placement at least
    return PlacementProblem(reuse=source.integers(0, 100, (ranks, devices)), allowed=allowed)


@EXAMPLES
@given(problem=placements())
def test_every_rank_has_a_device_of_its_own_where_it_may_go(placement_kind: type[PlacementStrategy], problem: PlacementProblem) -> None:
    found = placement_kind().plan(problem)
    assert len(set(found.column)) == len(found.column) == len(problem.reuse)
    assert problem.allowed is None or all(problem.allowed[i, j] for i, j in enumerate(found.column))
    assert placement_kind().plan(problem).column == found.column


@EXAMPLES
@given(problem=problems())
def test_every_byte_comes_once_from_where_it_is(transfers_kind: type[TransferStrategy], problem: RestartProblem) -> None:
    found = transfers_kind().plan(problem)
    assert found == transfers_kind().plan(problem)
    for piece in found.pieces:
        held = problem.files[piece.file][piece.tensor]
        assert elements(x for box in held if (x := intersection(piece.box, box)) is not None) == elements([piece.box]), "the file does not hold that"
        assert piece.file in problem.stored if piece.source == STORAGE else problem.placement[piece.source] in problem.homes[piece.file]
    here = [f for f, where in problem.homes.items() if set(where) & set(problem.placement)] + sorted(problem.stored)
    for rank, needs in enumerate(problem.needs):
        for tensor, region in needs.items():
            left = list(region)
            for piece in [p for p in found.pieces if (p.rank, p.tensor) == (rank, tensor)]:
                before, left = elements(left), minus(left, piece.box)
                assert before - elements(left) == elements([piece.box]), "twice, or not needed"
            lost = [x.box for x in found.lost if (x.rank, x.tensor) == (rank, tensor)]
            assert elements(left) == elements(lost)
            for file in here:
                assert all(intersection(a, b) is None for a in lost for b in problem.files[file].get(tensor, ())), "lost although somebody has it"
    assert sum(found.received_bytes) == sum(found.sent_bytes)
