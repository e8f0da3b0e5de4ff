"""What every pipeline schedule must do, on generated problems."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...check import check_program
from ...check.bounds.certificate import check_bound
from ...decide.pipeline import PipelineProblem, PipelineStrategy, Schedule
from ...decide.pipeline.bound import any_bound
from ...decide.pipeline.judge import Judged, judge
from ...decide.pipeline.lower import fabric_of
from ...decide.strategies import options_given
from ...drive.pipeline.pipelines import collective_planner
from ...errors import Infeasible, Unsupported
from ...program.hash import program_hash
from .chosen import named_and_cited, parametrized

Kind = type[PipelineStrategy]
EXAMPLES = settings(max_examples=5, deadline=None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "pipeline")


@st.composite
def problems(draw: st.DrawFn, messages: bool = True) -> PipelineProblem:
    devices = draw(st.integers(1, 4))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=devices, max_size=devices))

    return PipelineProblem.of(
        devices, draw(st.integers(1, 9)), forward_s=each(1, 4), input_grad_s=each(1, 4), weight_grad_s=each(0, 4),
        activation_bytes=each(2, 9), message_bytes=2 if messages else 0, p2p_latency_s=each(0, 2) if messages else 0,
        p2p_rate_Bps=draw(st.sampled_from([None, 4])) if messages else None, weight_bytes=draw(st.sampled_from([0, 64])),
        gradient_bytes=draw(st.sampled_from([0, 16])) if messages else 0, speeds=[draw(st.sampled_from([1, 2])) for _ in range(devices)],
        data=draw(st.sampled_from([1, 1, 2])), first_input_grad=draw(st.booleans()),
    )  # fmt: skip


def planned(kind: Kind, problem: PipelineProblem, **options: object) -> Schedule | None:
    """The schedule, or None for a refusal, which must say what to do."""
    try:
        return kind(**options).plan(problem, rng=np.random.default_rng(0))
    except (Unsupported, Infeasible) as refusal:
        assert refusal.message and refusal.hint
        return None


def judged(kind: Kind, problem: PipelineProblem) -> Judged | None:
    schedule = planned(kind, problem)
    return None if schedule is None else judge(problem, schedule, collective_planner(problem))


@EXAMPLES
@given(problem=problems())
def test_accepted_by_every_checker_and_never_below_the_bounds(kind: Kind, problem: PipelineProblem) -> None:
    j = judged(kind, problem)
    if j is None:
        return
    verdict = check_program(j.program, programs=j.callees)
    assert verdict.ok, verdict.findings
    for bound in (j.bound, any_bound(problem)):
        assert not check_bound(bound, fabric_of(problem))
        assert j.time_s >= float(bound) * (1 - 1e-9)
    assert 0 <= j.bubble < 1 and j.span_bubble <= j.bubble + 1e-9


@EXAMPLES
@given(problem=problems())
def test_a_cap_makes_the_bound_no_smaller_and_still_holds(kind: Kind, problem: PipelineProblem) -> None:
    free = judged(kind, problem)
    if free is None:
        return
    tight = replace(problem, memory_cap_bytes=free.memory_bytes)
    j = judged(kind, tight)
    assert j is not None and j.over_bytes == 0 and j.time_s == free.time_s
    assert float(free.bound) <= float(j.bound) <= j.time_s * (1 + 1e-9)


@EXAMPLES
@given(problem=problems())
def test_options_round_trip_and_equal_inputs_give_equal_bytes(kind: Kind, problem: PipelineProblem) -> None:
    one, two = judged(kind, problem), judged(kind, problem)
    assert (one is None) == (two is None)
    if one is None or two is None:
        return
    assert program_hash(one.program) == program_hash(two.program)
    options = json.loads(json.dumps(one.schedule.options))
    assert set(options) == {f.name for f in fields(kind)}  # type: ignore[arg-type]
    again = planned(kind, problem, **options)
    assert again is not None and again.orders == one.schedule.orders


@EXAMPLES
@given(problem=problems(messages=False))
def test_twice_the_speed_is_half_the_time(kind: Kind, problem: PipelineProblem) -> None:
    fast = replace(problem, speeds=tuple(2 * s for s in problem.speeds))
    one, two = judged(kind, problem), judged(kind, fast)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert two.schedule.orders == one.schedule.orders and two.time_s == pytest.approx(one.time_s / 2, rel=1e-9)


def test_name_and_citation(kind: Kind) -> None:
    named_and_cited(kind)


@EXAMPLES
@given(problem=problems())
def test_what_it_says_of_itself_is_true(kind: Kind, problem: PipelineProblem) -> None:
    """Variants have names of their own; a schedule has the stages, copies and backward that were announced; where it does not apply it refuses."""
    variants = kind.variants(problem, chunks=(2, 3))
    assert all(type(v) is kind for v in variants)
    assert len({(v.name, str(options_given(v, v.told))) for v in variants}) == len(variants)
    for variant in (kind().settled(), *variants):
        schedule = planned(kind, problem, **asdict(variant))  # type: ignore[call-overload]
        assert schedule is None or kind.applies(problem), "it does not apply, and plans"
        if schedule is not None:
            traits = variant.settled().traits
            assert (schedule.chunks, schedule.parts) == (traits.stages_per_device, traits.parts) and schedule.copies >= traits.copies
            assert schedule.split or not traits.split_backward
