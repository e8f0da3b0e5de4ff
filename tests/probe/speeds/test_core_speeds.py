"""How much busy cores slow each other down: the estimator on made samples, the fabric that carries it, a real machine's shape."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.cli import main
from meshwright.errors import RunError, UsageError
from meshwright.fabric.fabric import Device, Fabric
from meshwright.io.fabric.document import fabric_document, fabric_from_document
from meshwright.probe.speeds.cores import CoreSpeeds, busy_counts, measure_cores, quota_cost, speeds_of, with_speeds


def test_speeds_are_ratios_within_a_round_so_a_slow_round_says_the_same() -> None:
    """With four busy each takes 1.6 times as long as alone, with two 1.25 times; rounds are slowed by 1 to 4, one core of one round by others."""
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(9):
        slow = float(rng.uniform(1, 4))
        rounds.append({1: [slow], 2: [1.25 * slow] * 2, 4: [1.6 * slow] * 4})
    rounds[3][4][2] *= 30
    assert speeds_of(rounds) == pytest.approx((1.0, 0.8, (0.8 + 0.625) / 2, 0.625), abs=1e-4), "three busy: halfway between two and four"


def test_no_core_is_faster_beside_others_and_one_core_has_one_speed() -> None:
    assert speeds_of([{1: [2.0], 2: [1.9, 1.9]}]) == (1.0, 1.0)
    assert speeds_of([{1: [2.0]}]) == (1.0,)
    assert [busy_counts(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


@pytest.mark.parametrize("rounds", [[], [{1: [0.0]}], [{1: [1.0], 2: []}]])
def test_a_core_that_did_nothing_is_no_speed(rounds: list[dict[int, list[float]]]) -> None:
    with pytest.raises(RunError, match="did no work"):
        speeds_of(rounds)


def test_a_quota_costs_what_the_same_work_takes_more() -> None:
    found = quota_cost(0.25, [{"compute": ((1.0, 1.0), (1.1, 0.25)), "memory": ((2.0, 1.0), (3.0, 0.27))}] * 3)
    assert found.cost == {"compute": 1.1, "memory": 1.5} and found.got == pytest.approx(0.26)
    with pytest.raises(RunError, match="did no work"):
        quota_cost(0.25, [{"compute": ((1.0, 1.0), (0.0, 0.0))}])


FOUND = CoreSpeeds(cores=2, speeds={"compute": (1.0, 0.9), "memory": (1.0, 0.55)}, quotas=(), rounds=9, others_share=0.04)


def test_the_fabric_says_what_was_measured_and_where_from() -> None:
    plain = Fabric(name="box", devices=tuple(Device(name=x, kind="cpu") for x in "ab"))
    fabric = with_speeds(plain, FOUND)
    assert fabric_from_document(json.loads(json.dumps(fabric_document(fabric)))) == fabric
    assert fabric.devices[1].cpu_cores == 2.0 and fabric.devices[0].cpu_speeds == FOUND.speeds
    assert fabric.provenance[-1].what == "cpu_speeds" and "9 rounds" in fabric.provenance[-1].source and "4%" in fabric.provenance[-1].source
    with pytest.raises(UsageError, match="g is no CPU"):
        with_speeds(Fabric(name="box", devices=(Device(name="g"),)), FOUND)


def test_a_machine_has_a_speed_for_every_busy_core() -> None:
    found = measure_cores(rounds=1, window_s=0.002, quotas=())
    assert set(found.speeds) == {"compute", "memory"} and not found.quotas and 0 <= found.others_share <= 1
    assert all(len(s) == found.cores and s[0] == 1.0 and 0 < min(s) <= max(s) <= 1.0 for s in found.speeds.values())


@pytest.mark.parametrize("asked", [{"rounds": 0}, {"window_s": 0.0}, {"window_s": 60.0}])
def test_what_cannot_be_measured_is_refused(asked: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="cannot measure"):
        measure_cores(**asked)  # type: ignore[arg-type]


def test_the_command_measures_this_machine_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["fabric", "here", "--measure-cores", "--boxes", "2"]) == 2
    assert "--measure-cores" in capsys.readouterr().err
    monkeypatch.setattr("meshwright.probe.speeds.cores.measure_cores", lambda: FOUND)
    monkeypatch.setattr("meshwright.probe.fabric.machine.machine_outputs", lambda: ({}, []))
    assert main(["fabric", "here", "--measure-cores", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    document = document.get("result", document)
    assert document["cores"]["speeds"]["memory"] == [1.0, 0.55]
    assert document["fabric"]["devices"][0]["cpu_speeds"] == {"compute": [1.0, 0.9], "memory": [1.0, 0.55]}
