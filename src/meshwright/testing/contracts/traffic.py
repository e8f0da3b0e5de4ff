"""What every strategy for gradient traffic must do, on generated problems."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...check.traffic import check_traffic
from ...decide.traffic import TrafficProblem, TrafficStrategy
from ...drive.traffic import plan_traffic
from ...traffic import Curve, TrafficProfile
from ..traffic import traffic_profile as profile
from .chosen import named_and_cited, parametrized

Kind = type[TrafficStrategy]
EXAMPLES = settings(max_examples=8, deadline=None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "traffic")


@st.composite
def profiles(draw: st.DrawFn) -> TrafficProfile:
    rng = random.Random(draw(st.integers(0, 10**6)))
    return profile(rng, draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 250])), knee=draw(st.booleans()))


@EXAMPLES
@given(found=profiles())
def test_accepted_by_the_checker_and_never_below_the_bounds(kind: Kind, found: TrafficProfile) -> None:
    plan = plan_traffic(found, strategy=kind.name)
    assert not check_traffic(plan)
    assert plan.bound.exact * 10**9 <= plan.step_ns
    assert plan.bound.exact <= plan.uncompressed.exact  # "none" is among the codecs


@EXAMPLES
@given(found=profiles())
def test_equal_inputs_give_equal_bytes_and_options_round_trip(kind: Kind, found: TrafficProfile) -> None:
    one = plan_traffic(found, strategy=kind.name)
    again = plan_traffic(found, strategy=kind.name, options=one.options)
    assert msgspec.json.encode(one) == msgspec.json.encode(again)
    assert msgspec.json.decode(msgspec.json.encode(one), type=type(one)) == one


@EXAMPLES
@given(found=profiles())
def test_twice_the_speed_is_half_the_time(kind: Kind, found: TrafficProfile) -> None:
    def twice(curve: Curve) -> Curve:
        return msgspec.structs.replace(curve, times_ns=tuple(2 * t for t in curve.times_ns))

    slow = msgspec.structs.replace(
        found, tensors=tuple(msgspec.structs.replace(t, ready_ns=2 * t.ready_ns) for t in found.tensors),
        codecs=tuple(msgspec.structs.replace(c, encode=twice(c.encode), exchange=twice(c.exchange), decode=twice(c.decode)) for c in found.codecs),
    )  # fmt: skip
    fast = kind().plan(TrafficProblem.of(found))
    assert kind().plan(TrafficProblem.of(slow)).step_ns == pytest.approx(2 * fast.step_ns, abs=8 * 12)  # rounding: some ns per group


def test_name_and_citation(kind: Kind) -> None:
    named_and_cited(kind)
