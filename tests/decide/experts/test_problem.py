"""Sizes of a layer against counting, and refusals that name the nearest size that works."""

from __future__ import annotations

import pytest

from meshwright.decide.experts import Choice, ExpertProblem, ExpertShape, Tutel, degrees_of
from meshwright.decide.experts.tutel import alignment_of
from meshwright.drive.plans import read_fabric
from meshwright.errors import UsageError


def test_degrees() -> None:
    assert degrees_of(12, 1) == (0, 1, 2, 3, 4, 6, 12) and degrees_of(8, 2) == (0, 1, 2, 4)
    assert degrees_of(4, 8) == (0, 1) == degrees_of(4, 4) == degrees_of(8, 2, divisible=False)


def test_bytes_are_those_of_the_card() -> None:
    """T=1,024, H=256, F=1,024, two experts on four ranks: r=2 below C = 341 1/3, r=1 above, r=0 ties with r=2 at 512 (methods/tutel, section 8)."""
    shape = ExpertShape(ranks=4, experts=2, model=256, inner=1024)

    def total(r: int, capacity: int) -> int:
        return sum(shape.received_bytes(Choice(r, 1, "linear"), capacity))

    assert total(2, 340) < total(1, 340) and total(1, 342) < total(2, 342)
    assert total(0, 512) == 3_145_728 == total(2, 512) and total(0, 684) < total(1, 684) and total(1, 682) < total(0, 682)
    assert shape.received_bytes(Choice(1, 4, "linear"), 64) == shape.received_bytes(Choice(1, 1, "linear"), 64)
    assert len({shape.work(Choice(r, 1, "linear"), 64).flops for r in shape.degrees}) == 1


def test_alignment_suits_every_choice() -> None:
    for shares in (1, 2, 6):
        shape = ExpertShape(ranks=shares, experts=1, model=2, inner=shares)
        capacity = alignment_of(shares, (1, 2, 3))
        for r in shape.degrees:
            for d in (1, 2, 3):
                shape.require(Choice(r, d, "linear"), capacity)


@pytest.mark.parametrize(
    ("sizes", "text", "hint"),
    [
        ({"ranks": 4, "experts": 3}, "3 experts cannot be divided evenly among 4 ranks", "2 experts, or a multiple of 4"),
        ({"ranks": 4, "experts": 0}, "at least one rank and one expert", ""),
        ({"ranks": 4, "experts": 2, "inner": 7}, "cannot be cut into 2 equal slices", "8"),
        ({"ranks": 4, "experts": 2, "model": 0}, "must be at least 1", ""),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, int], text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        ExpertShape(**{"model": 4, "inner": 8, **sizes})  # type: ignore[arg-type]
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("choice", "capacity", "text", "hint"),
    [
        ((3, 1, "linear"), 64, "have no degree 3", "r=2; there are 0, 1, 2, 4"),
        ((1, 40, "linear"), 64, r"must be 1\.\.32", ""),
        ((1, 2, "linear"), 12, "cannot be cut into 8 equal parts", "capacity 16"),
    ],
)
def test_choices_that_there_are_not(choice: tuple[int, int, str], capacity: int, text: str, hint: str) -> None:
    shape = ExpertShape(ranks=8, experts=2, model=4, inner=8)
    with pytest.raises(UsageError, match=text) as error:
        shape.require(Choice(*choice), capacity)
    assert error.value.hint == hint


def test_problems_and_options_that_make_no_sense() -> None:
    fabric = read_fabric("laptop:2")
    ranks = tuple(d.name for d in fabric.devices)
    shape = ExpertShape(ranks=2, experts=2, model=4, inner=8)
    for wrong, text in (({"ranks": ranks[:1]}, "different devices"), ({"capacities": (2, 1)}, "ascending"), ({"passes": "both"}, "training or")):
        with pytest.raises(UsageError, match=text):
            ExpertProblem(**{"fabric": fabric, "ranks": ranks, "shape": shape, "capacities": (8,), **wrong})  # type: ignore[arg-type]
    problem = ExpertProblem(fabric=fabric, ranks=ranks, shape=shape, capacities=(8,))
    for options in ({"chunks": (0,)}, {"algorithms": ()}, {"degrees": (2,)}):
        with pytest.raises(UsageError):
            Tutel(**options).plan(problem)  # type: ignore[arg-type]
