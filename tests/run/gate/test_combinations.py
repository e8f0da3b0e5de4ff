"""Generated nets, losses, optimizers and layouts: equal to a plain loop for several steps, or refused by name."""

from __future__ import annotations

import pytest
from gate_combinations import draw, judge
from hypothesis import given, settings
from hypothesis import strategies as st

NAMED = ("DifferentTraining: ", "Unsupported: ", "Infeasible: ", "CaptureError: ")


@settings(max_examples=6)  # benchmarks/gate.py judges hundreds
@given(number=st.integers(0, 1 << 20))
def test_equal_or_refused(number: int) -> None:
    combination = draw(number)
    verdict = judge(combination)
    assert verdict.outcome == "equal" or (verdict.outcome == "refused" and verdict.why.startswith(NAMED)), (str(combination), verdict)


def test_the_loop_would_notice(monkeypatch) -> None:
    """Equal is not what everything is: with a gate that lets all pass, the loop finds what trains something else."""
    import gate_combinations
    from gate_combinations import Combination

    from meshwright.run.gate.gate import GateReport

    monkeypatch.setattr(gate_combinations, "gate", lambda plan, data: GateReport(precision="float64"))
    assert judge(Combination("net_1", "mse", "sgd", (2, 1, 1))).outcome == "equal"
    assert judge(Combination("net_1", "contrast", "sgd", (2, 1, 1))).outcome == "different"


@pytest.mark.parametrize("number", [139, 474])
def test_a_scale_of_a_region_that_would_close_a_cycle_is_counted_once(number):
    """The region is kept whole, and with it the parameters whose gradients it would have made partial sums: they came out doubled."""
    combination = draw(number)
    assert judge(combination).outcome == "equal", str(combination)
