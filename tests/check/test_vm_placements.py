"""The checker of placements: every lie is found, each by its own words."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from meshwright.bound import Certificate
from meshwright.check.vms import check_vm_placement
from meshwright.cluster.vm_placement import Stay
from meshwright.cluster.vms import Resize, VmHosts, VmTrace
from meshwright.decide.cluster.vms import forecast, strategy
from meshwright.drive.vms import place_vms

HOSTS = VmHosts.of([2])


def problem():
    sizes = np.array([[[0.5]], [[0.25]], [[0.75]]])
    trace = VmTrace(
        name="t", resources=("cores",), kinds=("host",), shapes=("a", "b", "c"), size=sizes, shape=np.array([2, 0, 2, 1], np.int32),
        arrival_s=np.array([0.0, 10.0, 20.0, 30.0]), end_s=np.array([500.0, 300.0, 400.0, np.inf]), owner=np.zeros(4, np.int32), low=np.zeros(4,
            bool),
        since_s=0.0, until_s=1000.0, resizes=(Resize(100.0, 1, 1),),
    )  # fmt: skip
    return trace, place_vms(trace, HOSTS, strategy("first-fit")(), forecast("perfect", trace), from_s=50.0)[0]


def changed(made, number, **fields):
    stays = list(made.stays)
    stays[number] = msgspec.structs.replace(stays[number], **fields)
    return msgspec.structs.replace(made, stays=tuple(stays))


def test_what_the_planner_makes_is_right():
    trace, made = problem()
    verdict = check_vm_placement(made, trace, HOSTS)
    assert verdict.ok and not verdict.notes and made.refused == (2,) and made.resized == (0,)
    assert [(s.vm, s.host) for s in made.stays] == [(0, 0), (1, 1), (3, 0), (1, 1)]
    assert verdict.facts["used_host_s"] == pytest.approx(950 + 250) and verdict.facts["moves"] == 1  # the resize begins a stay
    bare = check_vm_placement(msgspec.structs.replace(made, bound=None), trace, HOSTS)
    assert bare.ok and bare.notes == ("the placement states no bound",)


@pytest.mark.parametrize(("lie", "says"), [
    (lambda m: msgspec.structs.replace(m, trace="u"), "it is of"), (lambda m: msgspec.structs.replace(m, hosts=(3,)), "it is of"),
    (lambda m: changed(m, 0, host=7), "no host 7"), (lambda m: changed(m, 0, vm=9), "no machine 9"), (lambda m: changed(m, 0, to_s=-5.0),
        "from 0.0 to"),
    (lambda m: msgspec.structs.replace(m, refused=(2, 9)), "no machine 9"), (lambda m: msgspec.structs.replace(m, resized=(4,)), "no resize 4"),
    (lambda m: msgspec.structs.replace(m, refused=()), "neither somewhere nor refused"), (lambda m: msgspec.structs.replace(m, refused=(0, 2)),
        "or both"),
    (lambda m: changed(m, 0, from_s=5.0), "all the time"), (lambda m: changed(m, 0, to_s=450.0), "all the time"), (lambda m: changed(m, 3,
        from_s=150.0), "all the time"),
    (lambda m: changed(m, 0, to_s=None), "all the time"), (lambda m: changed(m, 1, host=0), "host 0 holds 1.25 of itself at 10"),
    (lambda m: msgspec.structs.replace(m, resized=()), None),
    (lambda m: msgspec.structs.replace(m, stays=(*m.stays[:2], m.stays[2], Stay(1, 1, 120.0, 300.0)), ), "all the time"),
    (lambda m: msgspec.structs.replace(m, used_host_s=m.used_host_s - 1), "claimed is"),
    (lambda m: msgspec.structs.replace(m, bound=msgspec.structs.replace(m.bound, value="1201")), "proves at least"),
    (lambda m: msgspec.structs.replace(m, bound=msgspec.structs.replace(m.bound, unit="bytes")), "other times"),
    (lambda m: msgspec.structs.replace(m, bound=msgspec.structs.replace(m.bound, certificate=Certificate(kind="hosts", data={"from_s": 0.0}))),
        "other times"),
])  # fmt: skip
def test_lies(lie, says):
    trace, made = problem()
    verdict = check_vm_placement(lie(made), trace, HOSTS)
    if says is None:  # a half that was not made smaller still fits there
        assert verdict.ok
        return
    assert verdict.status == "wrong" and any(says in f.message for f in verdict.findings), verdict.findings


def test_a_resize_begins_a_stay():
    trace, made = problem()
    stays = tuple(Stay(1, 1, 10.0, 300.0) if s.vm == 1 and s.from_s == 10.0 else s for s in made.stays if not (s.vm == 1 and s.from_s == 100.0))
    found = check_vm_placement(msgspec.structs.replace(made, stays=stays), trace, HOSTS)
    assert any("begins no stay" in f.message for f in found.findings)


def test_a_bound_between_what_the_load_needs_and_what_is_used_is_no_bound():
    """Machines that have left need nothing any more: 2 hosts from 50 to 300 s, then one, 1,200 host seconds of the 1,400 in use."""
    trace, made = problem()
    apart = msgspec.structs.replace(changed(made, 2, host=1), used_host_s=1400.0)
    for value, right in (("1200", True), ("1201", False), ("1399", False)):
        verdict = check_vm_placement(msgspec.structs.replace(apart, bound=msgspec.structs.replace(made.bound, value=value)), trace, HOSTS)
        assert verdict.ok == right and verdict.facts["least_host_s"] == pytest.approx(1200), verdict.findings
