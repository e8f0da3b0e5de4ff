"""What every strategy for gradient traffic must do, on generated problems. A new one only has to be listed in STRATEGIES."""

from __future__ import annotations

import random
from dataclasses import asdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.check.traffic import check_traffic
from meshwright.decide.traffic import CITES, NAMES, STRATEGIES, TrafficProblem, TrafficStrategy
from meshwright.drive_traffic import plan_traffic
from meshwright.testing_traffic import traffic_profile as profile
from meshwright.traffic import Curve, TrafficProfile

pytestmark = pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
Kind = type[TrafficStrategy]
EXAMPLES = settings(max_examples=8, deadline=None)


@st.composite
def profiles(draw: st.DrawFn) -> TrafficProfile:
    rng = random.Random(draw(st.integers(0, 10**6)))
    return profile(rng, draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 250])), knee=draw(st.booleans()))


def name_of(kind: Kind) -> str:
    (name,) = (n for n, k in NAMES.items() if k is kind)
    return name


@EXAMPLES
@given(found=profiles())
def test_accepted_by_the_checker_and_never_below_the_bounds(kind: Kind, found: TrafficProfile) -> None:
    plan = plan_traffic(found, strategy=name_of(kind))
    assert not check_traffic(plan)
    assert plan.bound.exact * 10**9 <= plan.step_ns
    assert plan.bound.exact <= plan.uncompressed.exact  # "none" is among the codecs


@EXAMPLES
@given(found=profiles())
def test_equal_inputs_give_equal_bytes_and_options_round_trip(kind: Kind, found: TrafficProfile) -> None:
    one = plan_traffic(found, strategy=name_of(kind))
    again = plan_traffic(found, strategy=name_of(kind), options=one.options)
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


def test_has_a_name_and_a_citation(kind: Kind) -> None:
    assert CITES[name_of(kind)].key and asdict(kind()) is not None  # type: ignore[call-overload]
