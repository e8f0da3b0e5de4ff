"""Pipeline bounds: what a certificate proves, worked out by hand; a changed figure changes or refuses it."""

from __future__ import annotations

import copy

import msgspec
import pytest

from meshwright.bound import Bound, Certificate
from meshwright.check.bounds.certificate import check_bound
from meshwright.check.bounds.pipeline import pipeline_time
from meshwright.decide.pipeline import Chimera, OneFOneB, PipelineProblem
from meshwright.decide.pipeline.bound import any_bound, schedule_bound
from meshwright.decide.pipeline.lower import fabric_of
from meshwright.decide.pipeline.orders import times
from meshwright.decide.pipeline.vschedules import ZBV
from meshwright.decide.pipeline.zerobubble import ZB1P

of = PipelineProblem.of


def test_values_by_hand() -> None:
    p = of(4, 8, forward_s=1, backward_s=2)
    assert float(schedule_bound(p, OneFOneB().plan(p))) == 3 + 8 * 3 + 6  # last device: its way in, its work, the way out
    assert float(any_bound(p)) == 24
    q = of(4, 4)
    # a device of the middle: its four F take 4 s of the 6 before its first B can begin, and after its last B there is one below
    assert float(schedule_bound(q, Chimera().plan(q))) == 2 + 4 * 3 + 2
    one = of(4, 1, forward_s=1, backward_s=2)
    assert float(schedule_bound(one, OneFOneB().plan(one))) == 12  # one micro-batch: its whole way


def test_memory_makes_it_longer() -> None:
    p = of(2, 100, forward_s=1, backward_s=1, activation_bytes=1)
    schedule = OneFOneB().plan(p)
    free, tight = schedule_bound(p, schedule), schedule_bound(p, schedule, cap_bytes=(1, 1))
    assert tight.certificate.data["form"] == "memory" and float(tight) == 400  # one micro-batch at a time: 4 s each
    assert float(free) < float(tight) and not check_bound(tight, fabric_of(p))


def test_what_a_device_can_keep_makes_it_idle() -> None:
    """Stages alike, one or two a device: a device idles (D - 1)(F + I + 4c - W) with a cap of D whole stages, whatever its orders."""
    for d, f, i, w, c in ((4, 2.0, 3.0, 2.0, 0.0), (3, 5.0, 4.0, 1.0, 0.5)):
        p = of(d, 3 * d, forward_s=f, input_grad_s=i, weight_grad_s=w, activation_bytes=7, message_bytes=0, p2p_latency_s=c)
        schedule = ZB1P(tries=0).plan(p)
        tight = schedule_bound(p, schedule, cap_bytes=(7 * d + 6,) * d)  # no part of an activation fits
        assert tight.certificate.data["form"] == "idle" and not check_bound(tight, fabric_of(p))
        first, last = (d - 1) * (i + 2 * c), (d - 1) * (f + 2 * c - w)
        assert float(tight) == pytest.approx(3 * d * (f + i + w) + first + max(0.0, last))
        assert float(schedule_bound(p, schedule)) < float(tight) <= times(p, schedule).makespan_s
        more = schedule_bound(p, schedule, cap_bytes=(7 * (d + 1),) * d)
        assert float(more) < float(tight)
        data = {**tight.certificate.data, "cap_bytes": -1}
        with pytest.raises(ValueError, match="below 0"):
            pipeline_time(data)
    # plans of earlier versions say "busy"
    old = {**tight.certificate.data, "form": "busy", "device": 0, "weights": True}
    assert pipeline_time(old) == 9 * 10


@pytest.mark.parametrize("change", ["seconds", "microbatches", "form", "placement", "device", "up_s", "cap"])
def test_tampering_is_seen(change: str) -> None:
    p = of(2, 4, forward_s=[1, 2], activation_bytes=3)
    bound = schedule_bound(p, ZBV().plan(p))
    assert not check_bound(bound, fabric_of(p))
    data = copy.deepcopy(bound.certificate.data)
    if change == "seconds":
        data["seconds"]["F"][0] = ["9"] * 4
    elif change == "microbatches":
        data["microbatches"] = [5]
    elif change == "form":
        data["form"] = "guess"
    elif change == "placement":
        data["placement"] = [[0, 1, 1, 7]]
    elif change == "device":
        data |= {"form": "entry", "copy": 0, "stage": 2}
    elif change == "up_s":
        data["up_s"] = [["-1"] * 3]
    else:
        data |= {"form": "memory", "cap_bytes": 0}
    forged = msgspec.structs.replace(bound, certificate=Certificate(kind="pipeline", data=data))
    (finding,) = check_bound(forged, fabric_of(p))
    assert finding.status == "wrong"


def test_a_speed_of_zero_is_no_certificate() -> None:
    with pytest.raises(ValueError, match="speed of 0"):
        pipeline_time({"form": "any", "microbatches": 1, "work_s": "1", "path_s": "1", "speeds": ["0"]})
    claim = Bound(quantity="x", value="2", unit="s", certificate=any_bound(of(2, 2)).certificate)
    assert check_bound(claim, fabric_of(of(2, 2)))
