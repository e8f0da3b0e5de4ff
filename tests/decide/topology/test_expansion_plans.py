"""Schedules of expansions as plans: checked, simulated, and never better than breadth-first broadcasts on the explicit graph."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.decide.collective import CollectiveProblem, strategy
from meshwright.decide.topology import TopologyProblem
from meshwright.decide.topology.directconnect.families import complete, generalized_kautz, ring
from meshwright.decide.topology.directconnect.schedule import expanded, turned
from meshwright.decide.topology.directconnect.strategy import WiringDesign
from meshwright.decide.topology.directconnect.wiring import Wiring, copies, line_graph, product
from meshwright.drive import expansion
from meshwright.drive.collective.job import plan_collective
from meshwright.errors import Unsupported, UsageError

MADE = {
    "L(K3)": line_graph(complete(3)), "ring 3*2": copies(ring(3, paired=True), 2), "K3 x K3": product(complete(3), complete(3)), "K4": complete(4),
}  # fmt: skip


def design(wiring: Wiring) -> tuple[WiringDesign, TopologyProblem]:
    nothing = Fraction(0)
    made = WiringDesign(wiring=wiring, gather=None, scatter=None, steps=0, factor=nothing, steps_bound=0, factor_bound=nothing)
    return made, TopologyProblem(nodes=wiring.nodes, ports=min(wiring.ports, wiring.nodes - 1))


@pytest.mark.parametrize("name", MADE)
def test_every_rule_gives_a_program_that_checks_and_is_never_faster_than_the_explicit_graph(name: str) -> None:
    made, problem = design(MADE[name])
    for op in ("all-gather", "reduce-scatter", "all-reduce"):
        plan = expansion.plan_expansion(made, problem, op, 1 << 20)  # raises where the checker finds fault
        best, _ = plan_collective(CollectiveProblem.on(made.fabric(problem), op, 1 << 20), candidates=[strategy("bfb")()])
        assert plan.prediction is not None and best.prediction is not None
        assert plan.prediction.time_s >= best.prediction.time_s * (1 - 1e-9)
        assert plan.decisions[f"collective:{op}"]["notes"]["expansion"] == MADE[name].name


def test_what_has_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no schedule of broadcast"):
        expansion.plan_expansion(*design(MADE["L(K3)"]), "broadcast", 1 << 20)
    with pytest.raises(Unsupported, match="loops or parallel"):
        expansion.plan_expansion(*design(generalized_kautz(8, 2)), "all-gather", 1 << 20)
    monkeypatch.setattr(expansion, "MAX_TRANSFERS", 3)
    with pytest.raises(Unsupported, match="of at most 3"):
        expansion.plan_expansion(*design(MADE["K4"]), "all-gather", 1 << 20)


ONE_WAY = [line_graph(copies(ring(3, paired=False), 2)), copies(line_graph(complete(3)), 2), line_graph(line_graph(complete(3)))]


@pytest.mark.parametrize("made", ONE_WAY, ids=lambda x: x.name)
def test_one_way_wirings_have_all_operations(made: Wiring) -> None:
    """Reduce-scatters run on the wiring turned round: each is as long as the all-gather there, and an all-reduce is both."""
    assert not made.paired
    back = turned(made)
    assert back.wiring.links() == {(b, a): count for (a, b), count in made.links().items()}
    for op, halves in (("reduce-scatter", [back]), ("all-reduce", [back, expanded(made)])):
        plan = expansion.plan_expansion(*design(made), op, 1 << 20)
        notes = plan.decisions[f"collective:{op}"]["notes"]
        assert notes["steps"] == sum(half.steps for half in halves)
        assert Fraction(notes["bandwidth_factor"]) == sum(half.load for half in halves) * made.ports / made.nodes


def test_an_all_to_all_takes_the_paths_of_a_linear_program() -> None:
    plan = expansion.plan_expansion(*design(MADE["K3 x K3"]), "all-to-all", 9 << 22)
    assert plan.prediction is not None and plan.bound is not None and plan.prediction.time_s < 1.2 * float(Fraction(plan.bound.value))
