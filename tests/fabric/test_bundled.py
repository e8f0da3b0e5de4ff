"""Links side by side are one link of their rates together, wherever a command reads a fabric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.check import check_plan
from meshwright.decide.collective import CollectiveProblem
from meshwright.drive.collective.job import plan_collective
from meshwright.fabric.edit import bundled
from meshwright.fabric.fabric import Device, Fabric, Link
from meshwright.io.fabric.name import load_fabric

TEXT = """schema = "meshwright.fabric"
version = 1
name = "square"

[[devices]]
name = "d"
count = 4
"""
RATE_Bps = 10**9


def square(folder: Path, rates: tuple[int, ...]) -> str:
    ends = [f'[[links]]\nsrc = "d{i}"\ndst = "d{(i + 1) % 4}"' for i in range(4)]
    lines = [f"{end}\nrate_Bps = {rate}\nlatency_s = 5e-6\nboth_ways = true\n" for end in ends for rate in rates]
    path = folder / "square.toml"
    path.write_text(TEXT + "\n" + "\n".join(lines))
    return str(path)


@pytest.mark.parametrize("op", ["all-gather", "broadcast"])
def test_two_cables_carry_what_one_of_both_rates_does(tmp_path: Path, op: str) -> None:
    times = []
    for rates in ((3 * RATE_Bps,), (RATE_Bps, 2 * RATE_Bps)):
        fabric = load_fabric(square(tmp_path, rates))
        ranks = tuple(d.name for d in fabric.devices)
        plan, _ = plan_collective(CollectiveProblem(fabric=fabric, op=op, size_bytes=1 << 22, ranks=ranks, root=0))
        assert check_plan(plan).ok
        assert plan.bound is not None and plan.prediction is not None
        times.append((plan.prediction.time_s, plan.bound.value))
    assert times[0] == times[1]


def test_what_is_unlike_stays_and_nothing_else_changes(tmp_path: Path) -> None:
    names = ("a", "b")
    links = (
        Link(src="a", dst="b", rate_Bps=4, latency_s=1e-6, kind="NV1"), Link(src="b", dst="a", rate_Bps=4, latency_s=1e-6, kind="NV1"),
        Link(src="a", dst="b", rate_Bps=5, latency_s=1e-6, kind="NV1"), Link(src="a", dst="b", rate_Bps=1, latency_s=1e-6, kind="PIX"),
        Link(src="a", dst="b", rate_Bps=2, latency_s=2e-6, kind="NV1"), Link(src="b", dst="a", rate_Bps=3, latency_s=1e-6, kind="NV1", burst_bytes=8),
    )  # fmt: skip
    fabric = Fabric(name="f", devices=tuple(Device(name=n) for n in names), links=links)
    found = bundled(fabric)
    assert found.links == (replace(links[0], rate_Bps=9), links[1], *links[3:])
    assert [p.source for p in found.provenance] == ["a->b: the rates of 2 links side by side, added up"]
    assert bundled(found) is found, "nothing is left to add up"
    shaped = (replace(links[5], src="a", dst="b"),) * 2
    assert bundled(replace(fabric, links=shaped)).links == (replace(shaped[0], rate_Bps=6, burst_bytes=16),)
    huge = (replace(links[0], rate_Bps=1 << 62),) * 2
    assert bundled(replace(fabric, links=huge)).links == huge, "their sum is no number of bytes/s"
    path = square(tmp_path, (RATE_Bps, RATE_Bps))
    assert len(load_fabric(path).links) == 8 and len(load_fabric(path, as_written=True).links) == 16
