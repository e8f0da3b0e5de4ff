"""Generated nets, losses, optimizers and layouts: equal to a plain loop for several steps, or refused by name."""

from __future__ import annotations

import msgspec
import pytest
from gate_combinations import draw, judge
from hypothesis import given, settings
from hypothesis import strategies as st

NAMED = ("DifferentTraining: ", "Unsupported: ", "Infeasible: ", "CaptureError: ")


@settings(max_examples=6)  # benchmarks/gate.py judges hundreds
@given(number=st.integers(0, 1 << 20))
def test_equal_or_refused(number: int) -> None:
    combination = draw(number, recipes=True)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "cause"), [(293, "batch-statistics"), (152, "batch-statistics"), (240, "optimizer"), (658, "optimizer")])
def test_a_cause_is_found_where_a_micro_batch_alone_has_no_loss_or_an_update_follows_rounding(number, cause):
    """They were refused without one: a loss of two terms, or without a target, beside batch statistics; a gradient of few directions, orthogonal.

    The last was let pass: its first step has the bits of the owner's, its later ones follow rounding.
    """
    verdict = judge(draw(number))
    assert (verdict.outcome, verdict.why) == ("refused", f"DifferentTraining: {cause}")


@pytest.mark.parametrize(("number", "why"), [(404, "DifferentTraining: batch-statistics"), (439, "float64"), (451, "float32")])
def test_narrow_combinations_that_were_judged_wrongly(number, why):
    """One was refused without a cause, since eight bits hid it; one could not be run in double, its model being kept whole; one diverges, and with it
    what eight bits round."""
    verdict = judge(draw(number, recipes=True, narrow=True))
    assert verdict.outcome == ("refused" if "Different" in why else "equal") and verdict.why == why, verdict


def test_a_difference_without_a_cause_is_no_refusal(monkeypatch) -> None:
    import gate_combinations
    from gate_combinations import Combination

    from meshwright.errors import DifferentTraining

    def unexplained(plan, data):
        raise DifferentTraining("something else", data={"cause": "operator"})

    monkeypatch.setattr(gate_combinations, "gate", unexplained)
    assert judge(Combination("net_1", "mse", "sgd", (2, 1, 1))).outcome == "unexplained"


def test_a_schedule_that_begins_at_rate_0_hides_no_optimizer() -> None:
    """Nothing moved in the step that was compared, so an update that follows rounding was let pass."""
    verdict = judge(draw(373, recipes=True))
    assert (verdict.outcome, verdict.why) == ("refused", "DifferentTraining: optimizer")


@pytest.mark.parametrize(("number", "outcome"), [(18, "equal"), (17, "equal"), (22, "equal")])
def test_masters_with_unused_weights_and_clipping_are_equal(number, outcome):
    """The first ended in an assertion; the others were refused, for a parameter that moved by no more than eight bits round."""
    assert judge(draw(number, recipes=True, narrow=True)).outcome == outcome


def test_the_loop_would_notice_what_narrow_steps_leave_out(monkeypatch) -> None:
    """Clipping, schedules and averages of masters: without them the loop is another."""
    import gate_combinations
    from gate_combinations import Combination, plain_loop

    recipe = {"clip_norm": 0.05, "schedule": "StepLR:step_size=1,gamma=0.5", "ema": 0.9}
    combination = Combination("narrow_1", "mse", "sgd", (2, 1, 1), {"recipe": recipe})
    assert judge(combination).outcome == "equal"
    for left_out in ({"clip_norm": 0.0}, {"schedule": ""}, {"ema": 0.5}):

        def other(job, *more, left_out=left_out):
            asked = msgspec.structs.replace(job.asked, **left_out)
            return plain_loop(msgspec.structs.replace(job, recipe=asked), *more)

        with monkeypatch.context() as patch:
            patch.setattr(gate_combinations, "plain_loop", other)
            assert judge(combination).outcome == "different", left_out
