"""Plan files for another job: refused by what they name, never left aside in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.errors import PlanMismatch
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.plan_match import MAX_RATE_SKEW_FACTOR, require_fitting


def names(fabric: Fabric) -> tuple[str, ...]:
    return tuple(d.name for d in fabric.devices)


def fits(planned_for: Fabric, fabric: Fabric | None, **other: Any) -> None:
    told: dict[str, Any] = {"world": len(planned_for.devices), "devices": (), "known": names(fabric) if fabric is not None else ()}
    require_fitting("p.json", names(planned_for), planned_for, fabric=fabric, **(told | other))


def test_the_same_fabric_scaled_measured_or_unknown_is_taken() -> None:
    fabric = load_fabric("two-islands:3")
    scaled = replace(fabric, links=tuple(replace(x, rate_Bps=x.rate_Bps // (8 + i % 2)) for i, x in enumerate(fabric.links)))
    fits(fabric, fabric, devices=names(fabric))
    fits(fabric, scaled)
    fits(fabric, None)
    fits(fabric, None, devices=names(fabric), known=names(fabric))
    fits(load_fabric("star:3"), load_fabric("star:5"), world=5, devices=names(load_fabric("star:5")))  # a group of three of the five may use it


@pytest.mark.parametrize(
    ("planned_for", "fabric", "other", "message"),
    [
        ("star:4", "star:4", {"world": 3}, "for 4 ranks, the job has 3"),
        ("star:4", "laptop:4", {}, "for other devices: "),
        ("star:4", "star:4", {"devices": ("d1", "d0", "d2", "d3")}, "in the order"),
        ("ring:4", "star:4", {}, "another fabric, 'ring:4': beside .*all that leaves d0 is 2 times slower"),
        ("two-islands:2", "two-islands:2?trunk=1Mbit/s", {}, "another fabric"),
    ],
)
def test_what_was_planned_for_another_job_is_refused(planned_for: str, fabric: str, other: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanMismatch, match=message) as refused:
        fits(load_fabric(planned_for), load_fabric(fabric), **other)
    assert refused.value.where == "p.json" and refused.value.__notes__ == [f"hint: {refused.value.hint}"], "tracebacks show what to do"


def test_a_path_that_only_one_of_the_fabrics_has() -> None:
    fabric = load_fabric("ring:3")
    one = fabric.devices[0].name
    cut = replace(fabric, links=tuple(x for x in fabric.links if one not in (x.src, x.dst)))
    with pytest.raises(PlanMismatch, match="a path there and none here"):
        fits(fabric, cut)
    with pytest.raises(PlanMismatch, match="no path there and one here"):
        fits(cut, fabric)


@pytest.mark.parametrize(("factor", "taken"), [(MAX_RATE_SKEW_FACTOR * 0.99, True), (MAX_RATE_SKEW_FACTOR * 1.01, False)])
def test_rates_may_differ_by_a_factor_from_place_to_place(factor: float, taken: bool) -> None:
    fabric = load_fabric("star:3")
    first, *rest = fabric.links
    other = replace(fabric, links=(replace(first, rate_Bps=int(first.rate_Bps / factor)), *rest))
    if taken:
        fits(fabric, other)
    else:
        with pytest.raises(PlanMismatch):
            fits(fabric, other)
