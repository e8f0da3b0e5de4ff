"""What ranks measured of their messages, fitted: exact on exact times."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.cost import Cost, Priced
from meshwright.run.calibrate.calibrate import RankCosts, cost_of_ranks
from meshwright.run.calibrate.rank_times import RankTimes
from meshwright.run.calibrate.transport import calibration_of
from meshwright.run.machine.pacing import Pacing

NONE = Pacing(mode="none")
SIZES = tuple(4 * 4**i for i in range(12))


def part(alpha, beta, cpu=0.5, sizes=SIZES):
    """What a rank reports when messages take alpha + beta * size and half of that is CPU time."""
    rows = [{"wall_s": alpha + beta * s, "cpu_s": cpu * (alpha + beta * s), "rounds": 10} for s in sizes]
    return {"sizes": list(sizes), "ring": rows, "pingpong": rows[::2], "add_s_per_byte": 4e-11}


def test_fit_is_exact_on_exact_times():
    found = calibration_of([part(2e-4, 1e-9)] * 4, NONE, seconds=2.0)
    assert found.ring.line.alpha_s == pytest.approx(2e-4) and found.ring.line.beta_s_per_byte == pytest.approx(1e-9)
    assert found.ring.errors.line_median < 1e-6 and found.ring.errors.points == 5
    assert found.seconds == 2.0
    assert found.transport.evidence == "measured" and found.transport.per_message_s == pytest.approx(0.5e-4)
    assert found.transport.per_byte_s == pytest.approx(1e-11 + 0.25e-9), "what is added, and the ends' own work on each byte"
    assert (found.transport.cpu_per_message_s, found.transport.cpu_per_byte_s) == pytest.approx((0.5e-4, 0.25e-9))
    assert {x.rate_Bps for x in found.fabric.links} == {2 * 10**9} and found.fabric.devices[0].cpu_share == 0
    assert len(found.to_json()["ring"]["wall_s"]) == 12 and "measured here" in found.fabric.provenance[-1].source


@pytest.mark.parametrize("mode", ["none", "quota"])
def test_a_message_between_two_ranks_takes_what_was_measured(mode):
    """Ends' overheads, latencies and the narrowest link of the route add up to alpha + beta * size again."""
    pacing = Pacing(mode=mode, share=0.4 if mode == "quota" else 1.0)
    found = calibration_of([part(3e-4, 2e-9, cpu=0.3)] * 3, pacing)
    links = [found.fabric.links[i] for i in found.fabric.route(0, 2)]
    for size in (4, 10**6):
        per_byte_s = found.transport.per_byte_s - found.add_s_per_byte / 4
        total = 2 * (found.transport.per_message_s + per_byte_s * size) + sum(x.latency_s for x in links) + size / min(x.rate_Bps for x in links)
        assert total == pytest.approx(3e-4 + 2e-9 * size, rel=1e-4)
    assert found.fabric.devices[0].cpu_share == (0.4 if mode == "quota" else 0.0)
    assert found.add_s_per_byte == pytest.approx(4e-11 / pacing.share)


def test_what_the_own_thread_does_for_a_byte_is_no_time_of_the_link():
    """gloo's sender copies a message into the socket on the thread that computes; the transport's threads do the rest beside it."""
    rows = [{"wall_s": 1e-4 + 3e-10 * s, "cpu_s": 2e-4 + 5e-10 * s, "thread_s": 4e-5 + 2e-10 * s, "rounds": 10} for s in SIZES]
    found = calibration_of([{"sizes": list(SIZES), "ring": rows, "pingpong": rows[::2], "add_s_per_byte": 0.0}] * 2, NONE)
    assert found.transport.per_message_s == pytest.approx(2e-5, rel=1e-3) and found.transport.per_byte_s == pytest.approx(1e-10)
    assert {x.rate_Bps for x in found.fabric.links} == {10**10}


def test_a_share_of_a_core_stretches_what_was_measured():
    times = RankTimes({"a|F": Priced(0.2, "measured", 0.2)}, 0, 0.002)
    costs = [RankCosts(rank=r, times=times, messages=part(2e-4, 1e-9)) for r in range(2)]
    for mode, per_step_s in (("quota", 0.005), ("paced", 0.002)):
        fabric, cost, calibration = cost_of_ranks(Cost(), costs, Pacing(mode=mode, share=0.4), seconds=3.0)
        assert cost.table["a|F"] == Priced(pytest.approx(0.5), "measured", pytest.approx(0.2))
        assert cost.transport.per_step_s == pytest.approx(per_step_s) and len(fabric.devices) == 2 and calibration.seconds == 3.0
    unlike = [msgspec.structs.replace(c, share=s) for c, s in zip(costs, (0.5, 0.25), strict=True)]  # before, all devices had the first one's share
    fabric, cost, _ = cost_of_ranks(Cost(), unlike, Pacing(mode="quota", share=0.5))
    assert [d.cpu_share for d in fabric.devices] == [0.5, 0.25] and "share 0.25, 0.5" in fabric.provenance[-1].source
    assert [cost.price("a|F", None, d).time_s for d in fabric.devices] == pytest.approx([0.4, 0.8])
    fabric, cost, calibration = cost_of_ranks(Cost(), costs[:1], Pacing(mode="none"))
    assert cost.table["a|F"].time_s == pytest.approx(0.2) and len(fabric.devices) == 1 and calibration is None
