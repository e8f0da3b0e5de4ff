"""Two-way wirings of two steps from finite fields, by the equations that their adjacency matrices have."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from meshwright.decide.topology import TopologyProblem
from meshwright.decide.topology.directconnect.geometries import Field, polar_fly, slim_fly
from meshwright.decide.topology.directconnect.loads import gather_cost
from meshwright.decide.topology.directconnect.wiring import Wiring
from meshwright.drive.wiring import design_wiring

POWERS = (2, 3, 4, 5, 7, 8, 9, 11, 16, 25, 27)


def adjacency(wiring: Wiring) -> np.ndarray:
    matrix = np.zeros((wiring.nodes, wiring.nodes), np.int64)
    np.add.at(matrix, tuple(wiring.arcs.T), 1)
    return matrix


@pytest.mark.parametrize("q", POWERS)
def test_a_field_has_inverses_and_distributes(q: int) -> None:
    field = Field.of(q)
    assert field is not None
    every, some = np.arange(q), np.random.default_rng(q).integers(0, q, (3, 50))
    assert all(sorted(row) == every.tolist() for row in field.add) and all(sorted(row[1:]) == every[1:].tolist() for row in field.times[1:])
    a, b, c = some
    assert (field.times[a, field.add[b, c]] == field.add[field.times[a, b], field.times[a, c]]).all()
    assert (field.times[a, field.times[b, c]] == field.times[field.times[a, b], c]).all() and (field.times[a, 1] == a).all()


def test_only_powers_of_primes_have_one() -> None:
    assert [q for q in range(2, 33) if Field.of(q) is None] == [6, 10, 12, 14, 15, 18, 20, 21, 22, 24, 26, 28, 30]


@pytest.mark.parametrize("q", [q for q in POWERS if q < 17])
def test_points_of_a_plane_are_joined_by_exactly_one_path_of_two(q: int) -> None:
    wiring = polar_fly(q * q + q + 1, q + 1)
    assert wiring is not None and wiring.paired
    matrix = adjacency(wiring)
    assert matrix.max() == 1 and np.trace(matrix) == q + 1, "loops of the self-conjugate points"
    assert (matrix @ matrix == 1 + q * np.eye(wiring.nodes, dtype=np.int64)).all()


@pytest.mark.parametrize("q", [q for q in POWERS if 2 < q < 16])
def test_slim_flies_have_two_steps_and_no_doubled_link(q: int) -> None:
    wiring = slim_fly(2 * q * q, (3 * q - ((q + 1) % 4 - 1)) // 2)
    assert wiring is not None and wiring.paired
    matrix = adjacency(wiring)
    assert matrix.max() == 1 and not np.trace(matrix) and (matrix @ matrix + matrix > 0).all()


def test_the_smallest_is_hoffmans_and_singletons_graph() -> None:
    """Of 50 nodes with 7 links: one path of two between any that are not joined, none between those that are. Nothing is better in either figure."""
    wiring = slim_fly(50, 7)
    assert wiring is not None
    matrix = adjacency(wiring)
    assert (matrix @ matrix + matrix == 1 + 6 * np.eye(50, dtype=np.int64)).all()
    [best] = design_wiring(TopologyProblem(nodes=50, ports=7, bidirectional=True), options={"evaluations": 20, "table": False})
    assert (best.design.steps, best.design.factor, best.design.steps_bound) == (2, Fraction(49, 50), 2)


def test_a_plane_of_31_points_is_two_steps_where_the_search_had_three() -> None:
    rows = design_wiring(TopologyProblem(nodes=31, ports=6, bidirectional=True), options={"evaluations": 20, "table": False})
    assert (rows[0].design.steps, rows[0].design.factor) == (2, Fraction(36, 31))
    assert rows[-1].design.steps == 3 and rows[-1].design.factor < 1
    assert gather_cost(polar_fly(31, 6) or rows[0].design.wiring).steps == 2


def test_other_sizes_have_none() -> None:
    assert slim_fly(50, 6) is None and slim_fly(72, 9) is None and slim_fly(51, 7) is None and slim_fly(2, 1) is None
    assert polar_fly(31, 7) is None and polar_fly(43, 7) is None and polar_fly(3, 2) is None
