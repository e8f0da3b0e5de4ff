"""Model FLOPs of a layout are those of the captured graph, whatever is split, repeated or computed again; without a known peak there is no MFU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig import TINY, graph_of, make_plan
from tensor_rig import plan_case

from meshwright.drive.plans import read_fabric
from meshwright.io.fabric.document import fabric_document
from meshwright.ledger.captured import captured_flops
from meshwright.run.train.utilisation import model_flops, utilisation_of


def test_every_sample_counts_once_in_every_layout():
    counted = captured_flops(graph_of(TINY, 2)).scaled(8, 2).hardware
    for degrees in ((1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 1)):
        # a loss over a split vocabulary has sums of its own
        assert model_flops(make_plan(degrees).layout) == pytest.approx(counted, rel=1e-3 if degrees[1] > 1 else 0), degrees


def test_what_is_computed_again_is_left_out():
    plain, again = (plan_case("grouped_packed", (1, 2, 1), recompute=rule).layout for rule in ("none", "full"))
    assert sum(s.again.flops for s in again.segments) > 0 == sum(s.again.flops for s in plain.segments)
    assert model_flops(again) == model_flops(plain) > 0


def test_the_share_is_of_what_the_plans_devices_state():
    fabric = read_fabric("laptop:2")
    plan = replace(
        make_plan((2, 1, 1)), target_fabric=fabric_document(fabric), placement=tuple(d.name for d in fabric.devices),
    )  # fmt: skip
    found, (peak,) = utilisation_of(plan, "cpu"), {d.flops["fp32"] * (d.cpu_share or 1) for d in fabric.devices}
    assert found.peak_flops == 2 * peak and found.source.startswith("2 x ") and found.source.endswith(f"in fp32, as fabric {fabric.name!r} states")
    assert found.mfu(2.0) == pytest.approx(model_flops(plan.layout) / (2.0 * 2 * peak)) and found.mfu(0.0) == 0.0
    assert utilisation_of(plan, "cuda") is None, "the plan's devices are processors"
    silent = replace(fabric, devices=tuple(replace(d, flops={}) for d in fabric.devices))
    assert utilisation_of(replace(plan, target_fabric=fabric_document(silent)), "cpu") is None
    assert utilisation_of(replace(plan, target_fabric={}), "cpu") is None
