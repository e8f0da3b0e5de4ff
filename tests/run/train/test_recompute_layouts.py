"""Layouts that recompute, on real processes: loss and gradients bit-equal to keeping everything, bytes kept those of the plan."""

from __future__ import annotations

import msgspec
import pytest
import torch
from rig import graph_of
from tensor_rig import compare, plan_case, recomputed, run_case, serial_step

from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.plan.recompute import LayoutRegions

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def run(pool, name, degrees, rule, **options):
    case = plan_case(name, degrees, recompute=rule, **options)
    return case, pool.run(run_case, case.layout.ranks, case)


def kept(outcomes):
    """Bytes that a segment keeps on the rank that keeps most."""
    found = {}
    for o in outcomes:
        for key, size in o.saved_bytes.items():
            found[key] = max(found.get(key, 0), size)
    return found


def in_pieces(segment, layout):
    """Its vocabulary is split over ranks: there the executor keeps a few masks and indices per target that the captured call does not have."""
    tables = {s.param for s in layout.shards if s.param in ("tokens.weight", "head.weight")}
    return any("/" in n or n == x.node for x in layout.losses for n in segment.nodes) or bool(tables & set(segment.params))


ALONG = {"options": TensorOptions(sequence=True)}
CASES = [
    ("even", (1, 1, 1), {}), ("even", (2, 2, 1), {}), ("even", (1, 1, 2), {}), ("odd_tied", (1, 3, 1), {}), ("odd_tied", (1, 2, 2), {}),
    ("odd_tied", (2, 1, 2), {}), ("grouped_repeat", (1, 2, 2), {}), ("grouped_repeat", (2, 1, 1), {"microbatch": 1, "step": 5}),
    ("grouped_native", (1, 2, 1), {}), ("even", (1, 2, 1), ALONG), ("odd_tied", (1, 4, 1), ALONG), ("odd_tied", (1, 2, 2), ALONG),
    ("grouped_repeat", (1, 3, 1), ALONG), ("scaled", (1, 2, 2), ALONG),
]  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "degrees", "options"), CASES)
def test_bits_and_bytes(pool, name, degrees, options):
    whole, plain = run(pool, name, degrees, "none", **options)
    expected = serial_step(whole, name)
    total = {}
    for rule in ("none", "selective", "full"):
        case, outcomes = (whole, plain) if rule == "none" else run(pool, name, degrees, rule, **options)
        compare(case, outcomes, expected)
        for a, b in zip(plain, outcomes, strict=True):
            assert a.loss == b.loss
            assert all(torch.equal(g, b.gradients[n]) for n, g in a.gradients.items())
        measured = kept(outcomes)
        for s in case.layout.segments:
            if not in_pieces(s, case.layout):
                assert measured[s.key] == s.saved_bytes, (rule, s.key)
        total[rule] = sum(s.saved_bytes for s in case.layout.segments)
    assert total["full"] < total["selective"] < total["none"] or name == "scaled"  # which has no attention
    assert total["full"] < total["selective"] == total["none"] or name != "scaled"


def test_dropout_is_drawn_again_as_it_was(pool):
    """With dropout inside the recomputed regions and several micro-batches in flight, later steps too; the masks themselves are not kept."""
    case, outcomes = run(pool, "odd_tied", (1, 1, 2), "full", microbatch=1, step=3)
    compare(case, outcomes, serial_step(case, "odd_tied"))
    again = {n for s in case.layout.segments for names in s.computed_again() for n in names}
    assert any("dropout" in n for n in again)
    _, different = run(pool, "odd_tied", (1, 1, 2), "full", microbatch=1, step=4)
    assert different[-1].loss != outcomes[-1].loss


def test_a_call_that_is_not_chosen_is_kept_whatever_the_plan_says(pool):
    """The executor never drops what it cannot make again: a plan that forgets a call costs memory, not values."""
    case = plan_case("even", (1, 1, 1), recompute="full")
    (segment,) = case.layout.segments
    first = segment.recompute[0]
    less = msgspec.structs.replace(first, again=first.again[1:], needed=())
    layout = msgspec.structs.replace(case.layout, segments=(msgspec.structs.replace(segment, recompute=(less, *segment.recompute[1:])),))
    case.layout = layout
    outcomes = pool.run(run_case, 1, case)
    compare(case, outcomes, serial_step(case, "even"))
    assert kept(outcomes)[segment.key] > segment.saved_bytes


def test_regions_cover_layers_and_keep_borders():
    layout = plan_case("odd_tied", (1, 2, 1)).layout
    regions = LayoutRegions(graph_of("tests/run/tensor_models.py:odd_tied", 2), layout)
    assert {r.layer for r in regions.regions} == {"blocks.0", "blocks.1"}
    border = {v for s in layout.segments for v in (*s.reads, *s.writes)}
    for s in recomputed(graph_of("tests/run/tensor_models.py:odd_tied", 2), layout, "full").segments:
        for names in s.computed_again():
            assert not border & {n for n in names if regions.makes(regions.node[n])}
