"""Measured rates made alike: links of one kind get one rate, simple multiples are found, nothing moves far; packings on them have few trees."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshwright.decide.collective import CollectiveProblem
from meshwright.decide.collective.joint.strategy import Joint
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.choose import executed
from meshwright.run.group.merged_rates import MAX_RATE_DIFFERENCE_SHARE, merge_near_rates
from meshwright.run.group.predict import executor_transport


def rates(fabric: Fabric) -> list[int]:
    return [x.rate_Bps for x in fabric.links]


def nvlinks(noise: list[float]) -> Fabric:
    """GPUs 0-4 of a DGX-1 at Mbit/s, each direction off by so much."""
    fabric = load_fabric("dgx1-v100:1", "0-4")
    keep = {d.name for d in fabric.devices}
    links = [x for x in fabric.links if x.src in keep and x.dst in keep]
    row = tuple(replace(x, rate_Bps=int(x.rate_Bps / 8000 * (1 + noise[i % len(noise)]))) for i, x in enumerate(links))
    return Fabric(name="measured", devices=fabric.devices, links=row)


@given(st.lists(st.floats(-MAX_RATE_DIFFERENCE_SHARE / 2.1, MAX_RATE_DIFFERENCE_SHARE / 2.1), min_size=1, max_size=14))
def test_noise_goes_and_ratios_come_back(noise: list[float]) -> None:
    tidy = sorted(set(rates(merge_near_rates(nvlinks(noise)))))
    assert len(tidy) == 2 and abs(tidy[1] - 2 * tidy[0]) <= 1


@given(st.lists(st.integers(1000, 100_000), min_size=1, max_size=30))
def test_no_rate_moves_far(given_rates: list[int]) -> None:
    base = nvlinks([0.0])
    links = tuple(replace(base.links[0], rate_Bps=rate) for rate in given_rates)
    fabric = replace(base, links=links)
    tidy = merge_near_rates(fabric)
    assert all(abs(a - b) <= 2 * MAX_RATE_DIFFERENCE_SHARE * b + 1 for a, b in zip(rates(tidy), rates(fabric), strict=True))
    assert merge_near_rates(merge_near_rates(tidy)).links == merge_near_rates(tidy).links


def test_exact_fabrics_stay_as_they_are() -> None:
    fabric = load_fabric("dgx1-v100:1")
    assert merge_near_rates(fabric) is fabric


def test_the_executor_takes_the_packing_with_few_trees() -> None:
    measured = nvlinks([0.0, 1e-3, -7e-4, 2e-4, 5e-4])
    fabric = merge_near_rates(measured)
    problem = CollectiveProblem(
        fabric=fabric, op="all-reduce", size_bytes=4 << 20, ranks=tuple(d.name for d in fabric.devices), element_bytes=1,
        transport=executor_transport(fabric, 2.5),
    )  # fmt: skip
    best = executed(problem, [Joint()], fabric=measured)[0]
    assert best.ranked.plan is not None and best.ranked.plan.notes["trees"] == 2
    assert best.ranked.plan.notes["of_optimum"] == 1.0
