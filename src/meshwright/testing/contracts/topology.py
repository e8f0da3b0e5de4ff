"""What every topology strategy must do, on small problems."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ...decide.topology import TopologyProblem, TopologyStrategy
from ...errors import MeshwrightError, UsageError
from .chosen import named_and_cited, parametrized

Kind = type[TopologyStrategy]
SIZES = ((4, 2, False), (8, 2, True), (9, 4, False), (16, 3, True))
PROBLEMS = [TopologyProblem(nodes=nodes, ports=ports, bidirectional=paired) for nodes, ports, paired in SIZES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "topology")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.nodes}x{p.ports}")
def test_every_design_joins_all_accelerators_and_has_a_price(kind: Kind, problem: TopologyProblem) -> None:
    try:
        designs = kind().plan(problem, rng=np.random.default_rng(0))
    except MeshwrightError as refused:
        assert not isinstance(refused, UsageError) and refused.hint, "a refusal says why and what to do"
        return
    assert designs
    for design in designs:
        fabric = design.fabric(problem)
        fabric.require_connected()
        assert len(fabric.devices) == design.nodes >= problem.nodes and design.name
        assert problem.prices.of(design.parts) > 0


def test_equal_seeds_give_equal_designs(kind: Kind) -> None:
    def made() -> list[object]:
        designs = kind().plan(PROBLEMS[0], rng=np.random.default_rng(0))
        return [(d.name, dict(d.parts), d.fabric(PROBLEMS[0])) for d in designs]

    assert made() == made()


def test_name_citation_and_options(kind: Kind) -> None:
    named_and_cited(kind)
    assert kind.answers in ("wiring", "network") and kind(**asdict(kind())) == kind()  # type: ignore[call-overload]
