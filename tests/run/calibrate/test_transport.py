"""Calibration with real processes: structure and cleanliness exactly; times only for plausibility."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost import Priced
from meshwright.errors import MissingExtra, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.probe.costs.run import run_cost
from meshwright.run.calibrate import transport
from meshwright.run.calibrate.transport import calibrate_laptop, calibration_of, laptop_shape
from meshwright.run.machine.pacing import Pacing, choose_pacing

NONE = Pacing(mode="none")
QUICK = {"sizes": (4, 1024, 65536, 1 << 20), "budget_s": 0.01, "batches": 1}


def part(alpha, beta, cpu=0.5, sizes=transport.MESSAGE_SIZES):
    """What a rank reports when messages take alpha + beta * size and half of that is CPU time."""
    rows = [{"wall_s": alpha + beta * s, "cpu_s": cpu * (alpha + beta * s), "rounds": 10} for s in sizes]
    return {"sizes": list(sizes), "ring": rows, "pingpong": rows[::2], "reference_s": 1.1e-3, "add_s_per_byte": 4e-11}


def descendants() -> set[int]:
    me, found = os.getpid(), set()
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    todo = [me]
    while todo:
        pid = todo.pop()
        children = {p for p, above in parents.items() if above == pid}
        found |= children
        todo.extend(children)
    return found


def test_fit_is_exact_on_exact_times():
    found = calibration_of([part(2e-4, 1e-9)] * 4, NONE, reference_alone_s=1e-3, seconds=2.0)
    assert found.ring.line.alpha_s == pytest.approx(2e-4) and found.ring.line.beta_s_per_byte == pytest.approx(1e-9)
    assert found.ring.errors.line_median < 1e-6 and found.ring.errors.points == 5
    assert found.slowdown == pytest.approx(1.1) and found.seconds == 2.0
    assert found.transport.evidence == "measured" and found.transport.per_message_s == pytest.approx(0.5e-4)
    assert found.transport.per_byte_s == pytest.approx(1e-11)
    assert (found.transport.cpu_per_message_s, found.transport.cpu_per_byte_s) == pytest.approx((0.5e-4, 0.25e-9))
    assert {x.rate_Bps for x in found.fabric.links} == {10**9} and found.fabric.devices[0].cpu_share == 0
    assert len(found.to_json()["ring"]["wall_s"]) == 12 and "measured here" in found.fabric.provenance[-1].source


@pytest.mark.parametrize("mode", ["none", "quota"])
def test_a_message_between_two_ranks_takes_what_was_measured(mode):
    """Ends' overheads, latencies and the narrowest link of the route add up to alpha + beta * size again."""
    pacing = Pacing(mode=mode, share=0.4 if mode == "quota" else 1.0)
    found = calibration_of([part(3e-4, 2e-9, cpu=0.3)] * 3, pacing)
    links = [found.fabric.links[i] for i in found.fabric.route(0, 2)]
    for size in (4, 10**6):
        total = 2 * found.transport.per_message_s + sum(x.latency_s for x in links) + size / min(x.rate_Bps for x in links)
        assert total == pytest.approx(3e-4 + 2e-9 * size, rel=1e-4)
    assert found.slowdown == 1.0  # nobody measured alone
    assert found.fabric.devices[0].cpu_share == (0.4 if mode == "quota" else 0.0)
    assert found.add_s_per_byte == pytest.approx(4e-11 / pacing.share)


def test_another_shape_keeps_its_names():
    devices = tuple(Device(name=n, kind="cpu") for n in "ab")
    shape = Fabric(name="pair", devices=devices, links=(Link(src="a", dst="b", rate_Bps=1), Link(src="b", dst="a", rate_Bps=1)))
    found = calibration_of([part(1e-4, 1e-9)] * 2, NONE, shape=shape)
    assert found.fabric.name == "pair" and [x.rate_Bps for x in found.fabric.links] == [10**9, 10**9]


def test_cost_of_a_run():
    found = calibration_of([part(2e-4, 1e-9)] * 4, Pacing(mode="quota", share=0.4), reference_alone_s=1e-3)
    cost = run_cost(found, {"s0|F": Priced(0.1, "measured", 0.1)})
    assert cost.table["s0|F"].time_s == pytest.approx(0.1 * 1.1 / 0.4) and cost.transport == found.transport and "quota" in cost.source
    assert run_cost(found, {"s0|F": Priced(0.1, "measured", 0.1)}, measured_together=True).table["s0|F"].time_s == pytest.approx(0.25)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_real_processes_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = descendants()
    pacing = choose_pacing(3, 2)
    found = calibrate_laptop(3, pacing, limit_s=90, **QUICK)
    assert found.fabric.name == "laptop:3" and found.pacing == pacing and len(found.ring.sizes) == 4 and len(found.pingpong.sizes) == 2
    wall, cpu = np.array(found.ring.wall_s), np.array(found.ring.cpu_s)
    assert np.all(wall > 0) and np.all(cpu > 0) and found.ring.sizes[-1] > found.ring.sizes[0]
    assert 0 < found.transport.per_message_s < 0.1 and found.fabric.links[0].rate_Bps > 10**6
    assert descendants() <= before and list(tmp_path.iterdir()) == []


def test_refusals(monkeypatch):
    with pytest.raises(UsageError, match="at least 2 ranks"):
        calibrate_laptop(1, NONE)
    with pytest.raises(UsageError, match="has 3 devices, not 2"):
        calibrate_laptop(2, NONE, shape=laptop_shape(3))
    with pytest.raises(UsageError, match="must be positive"):
        calibrate_laptop(2, NONE, sizes=(0, 4))
    monkeypatch.setattr(transport, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="torch"):
        calibrate_laptop(2, NONE)
