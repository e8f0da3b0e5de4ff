"""Slots of switches that add: the time of the frame bound, one tree per root, shards over planes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.check import check_plan, check_program
from meshwright.decide.collective import CollectiveProblem, auto, default_candidates
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.decide.collective.switchml.strategy import SwitchML
from meshwright.drive.collective.job import plan_collective
from meshwright.errors import Disconnected, Unsupported, UsageError
from meshwright.fabric.edit import forwarding_only
from meshwright.fabric.fabric import Device, Fabric, Link, Switch

RNG = np.random.default_rng(0)
RATE = 6_250_000


def wired(devices: int, switches: dict[str, bool], cables: list[tuple[str, str]], latency_s: float = 1e-4) -> Fabric:
    """`switches`: name -> whether it adds and copies; devices are d0, d1, ..."""
    links = tuple(Link(src=a, dst=b, rate_Bps=RATE, latency_s=latency_s) for x, y in cables for a, b in ((x, y), (y, x)))
    made = tuple(Switch(name=name, aggregate=able, multicast=able) for name, able in switches.items())
    return Fabric(name="wired", devices=tuple(Device(name=f"d{i}") for i in range(devices)), switches=made, links=links)


def star(devices: int, **more: float) -> Fabric:
    return wired(devices, {"s": True}, [(f"d{i}", "s") for i in range(devices)], **more)


def planned(fabric: Fabric, size_bytes: int = 1 << 20, **options: int | None) -> tuple[dict[str, object], float]:
    problem = CollectiveProblem.on(fabric, "all-reduce", size_bytes)
    plan = SwitchML(**options).plan(problem, rng=RNG)
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    return dict(plan.notes), simulated_time_s(plan.program, fabric, (*problem.ranks, *plan.switches), None)


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_the_time_does_not_grow_with_the_ranks(devices: int) -> None:
    notes, time_s = planned(star(devices))
    assert notes["switches"] == ["s"] and notes["height"] == 1
    assert (1 << 20) / RATE <= time_s <= 1.02 * (1 << 20) / RATE + float(notes["round_trip_s"])  # type: ignore[arg-type]


def test_too_few_slots_wait_for_round_trips() -> None:
    fabric = star(4, latency_s=2e-3)
    (enough, fast), (one, slow) = planned(fabric), planned(fabric, slots=1)
    assert int(enough["slots"]) > 20 and one["slots"] == 1  # type: ignore[call-overload]
    assert fast < 1.05 * (1 << 20) / RATE + 0.01 and slow == pytest.approx(float(one["model_time_s"]), rel=0.1) and slow > 10 * fast  # type: ignore[arg-type]


def test_two_levels_send_everything_once_over_every_link() -> None:
    cables = [(f"d{i}", f"leaf{i // 3}") for i in range(6)] + [("leaf0", "top"), ("leaf1", "top")]
    fabric = wired(6, {"leaf0": True, "leaf1": True, "top": True}, cables)
    notes, time_s = planned(fabric)
    assert notes["height"] == 2 and len(notes["switches"]) in (2, 3)  # type: ignore[arg-type]
    assert time_s <= 1.05 * (1 << 20) / RATE + 0.01
    plain = wired(6, {"leaf0": False, "leaf1": False, "top": True}, cables)  # all six streams over the leaves' uplinks
    assert planned(plain)[1] > 2.9 * time_s


def test_planes_share_the_message() -> None:
    fabric = wired(3, {"a": True, "b": True, "c": False}, [(f"d{i}", s) for i in range(3) for s in "abc"])
    notes, time_s = planned(fabric)
    assert notes["roots"] == ["a", "b"] and time_s < 0.53 * (1 << 20) / RATE
    assert planned(fabric, shards=1)[1] > 1.9 * time_s


@pytest.mark.parametrize("size_bytes", [4, 8, 1000, 4 * 257, 4 * 12345])
def test_odd_sizes(size_bytes: int) -> None:
    notes, _ = planned(star(3), size_bytes)
    held = int(notes["chunk_bytes"]) * int(notes["slots"]) * int(notes["turns"])  # type: ignore[call-overload]
    assert size_bytes <= held < size_bytes + 4 * int(notes["slots"]) * int(notes["turns"])  # type: ignore[call-overload]


def test_a_switch_holds_no_more_than_its_memory() -> None:
    """Fewer slots where memory is short, another root where there is none; the checker counts for itself."""
    fabric = star(4, latency_s=2e-3)
    tight = replace(fabric, switches=tuple(replace(s, aggregate_bytes=8192) for s in fabric.switches))
    problem = CollectiveProblem.on(tight, "all-reduce", 1 << 18)
    plan, _ = plan_collective(problem, candidates=(SwitchML(),))
    notes = plan.decisions["collective:all-reduce"]["notes"]
    assert notes["slots"] * notes["chunk_bytes"] * 2 <= 8192 and notes["slots"] >= 4
    less = replace(tight, switches=tuple(replace(s, aggregate_bytes=8000) for s in tight.switches))
    found = [f for f in check_plan(plan, fabric=less).findings if f.check == "memory"]
    assert len(found) == 1 and found[0].witness["switch"] == "s"
    with pytest.raises(Unsupported, match="memory for 4096 bytes"):
        SwitchML(slots=5, chunk_bytes=1024).plan(problem, rng=RNG)
    assert not any(s.aggregate_bytes for s in forwarding_only(tight).switches)
    two = wired(3, {"a": True, "b": True}, [(f"d{i}", s) for i in range(3) for s in "ab"])
    forwards = replace(two, switches=(replace(two.switches[0], aggregate_bytes=2047), two.switches[1]))
    assert planned(forwards)[0]["roots"] == ["b"]
    with pytest.raises(Unsupported, match="no switch adds"):
        planned(replace(star(3), switches=(replace(star(3).switches[0], aggregate_bytes=2047),)))


def test_what_is_refused() -> None:
    problem = CollectiveProblem.on(star(3), "all-gather", 1200)
    assert not SwitchML.applies(problem)
    with pytest.raises(Unsupported, match="does not do"):
        SwitchML().plan(problem, rng=RNG)
    plain = CollectiveProblem.on(wired(2, {"s": False}, [("d0", "s"), ("d1", "s")]), "all-reduce", 1000)
    assert not SwitchML.applies(plain)
    with pytest.raises(Unsupported, match="no switch adds"):
        SwitchML().plan(plain, rng=RNG)
    behind = CollectiveProblem.on(wired(3, {"s": True}, [("d0", "s"), ("d1", "s"), ("d2", "d1")]), "all-reduce", 1000)
    with pytest.raises(Unsupported, match="over switches alone"):
        SwitchML().plan(behind, rng=RNG)
    with pytest.raises(Disconnected):
        SwitchML().plan(CollectiveProblem.on(wired(3, {"s": True}, [("d0", "s"), ("d1", "s")]), "all-reduce", 1000), rng=RNG)
    whole = CollectiveProblem.on(star(3), "all-reduce", 1000)
    with pytest.raises(Unsupported, match="2 shards"):
        SwitchML(shards=2).plan(whole, rng=RNG)
    for option in ("slots", "chunk_bytes", "shards"):
        with pytest.raises(UsageError, match=option):
            SwitchML(**{option: 0}).plan(whole, rng=RNG)


def test_auto_tries_it_where_switches_may_take_part() -> None:
    problem = CollectiveProblem.on(star(4), "all-reduce", 1 << 20)
    assert not any(isinstance(c, SwitchML) for c in default_candidates(problem))
    mine = [c for c in default_candidates(problem, in_network=True) if isinstance(c, SwitchML)]
    assert mine == [SwitchML()]
    ranked = auto(problem, candidates=default_candidates(problem, in_network=True))
    assert ranked[0].plan is not None and ranked[0].plan.strategy in ("switchml", "joint")


def test_the_plan_leaves_through_the_checks() -> None:
    plan, ranked = plan_collective(CollectiveProblem.on(star(4), "all-reduce", 1 << 20), candidates=(SwitchML(),))
    assert len(ranked) == 1 and plan.placement == ("d0", "d1", "d2", "d3", "s")
