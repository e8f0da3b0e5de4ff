"""Rounds timed by their links: against the fabric's routes one by one, and against the event engine message by message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from effort import few
from meshwright.decide.strategies import answering
from meshwright.decide.topology import STRATEGIES, TopologyProblem
from meshwright.decide.topology.hammingmesh.network import NetworkDesign
from meshwright.drive import network
from meshwright.errors import Disconnected, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.simulate.rounds import Round, round_of_all_pairs, round_of_pairs


def fabric_of(links: list[Link], devices: int, switches: int = 0) -> Fabric:
    return Fabric(
        name="f", devices=tuple(Device(name=f"d{i}", kind="gpu") for i in range(devices)),
        switches=tuple(Switch(name=f"s{i}") for i in range(switches)), links=tuple(links),
    )  # fmt: skip


def drawn(seed: int) -> Fabric:
    """Devices in a directed ring, some switches, and random links of a few rates, latencies and copies between all of them."""
    rng = np.random.default_rng(seed)
    devices, switches = int(rng.integers(2, 9)), int(rng.integers(0, 4))
    names = [*(f"d{i}" for i in range(devices)), *(f"s{i}" for i in range(switches))]
    ends = [(names[i], names[(i + 1) % devices]) for i in range(devices)]
    for _ in range(int(rng.integers(0, 30))):
        a, b = rng.choice(len(names), 2, replace=False)
        ends.append((names[a], names[b]))
    rng.shuffle(ends)
    links = [Link(src=a, dst=b, rate_Bps=int(rng.choice([100, 200, 300])), latency_s=float(rng.choice([0, 0.5, 2]))) for a, b in ends]
    return fabric_of(links, devices, switches)


@pytest.mark.parametrize("seed", range(few(60)))
def test_all_pairs_take_the_routes_of_the_fabric(seed: int) -> None:
    fabric = drawn(seed)
    k = range(len(fabric.devices))
    one_by_one = round_of_pairs(fabric, [(a, b) for a in k for b in k if a != b])
    assert round_of_all_pairs(fabric) == pytest.approx(one_by_one, rel=1e-12)


def test_networks_take_as_long_as_message_by_message() -> None:
    """Every family, at a size with uneven sides. Rings too: a round's messages are alike there. All-to-alls reach the cut on tori of even sides."""
    problem = TopologyProblem(nodes=18)
    designs = [d for kind in answering(STRATEGIES, "network") for d in kind().plan(problem, rng=np.random.default_rng(0))]
    for design in designs:
        assert isinstance(design, NetworkDesign)
        fabric, job = design.fabric(problem), network.DEFAULT_JOB
        by_round = network._rings_s(fabric, design, job["all_reduce_bytes"]) + network.exchange_s(fabric, job["all_to_all_bytes"])
        assert by_round == pytest.approx(network.iteration_s(fabric, job, network._rings(design)), rel=1e-9), design.name
    large = replace(problem, nodes=256)
    for kind in answering(STRATEGIES, "network"):
        if kind.name in ("torus", "hyperx"):
            (design,) = kind().plan(large, rng=np.random.default_rng(0))
            ports_Bps = 16 * large.rate_Bps
            least = (design.nodes - 1) / float(design.global_bound) / ports_Bps
            assert round_of_all_pairs(design.fabric(large)).s_per_byte == pytest.approx(least, rel=1e-12)


def test_what_has_no_rounds() -> None:
    links = [Link(src="d0", dst="d1", rate_Bps=100), Link(src="d1", dst="d0", rate_Bps=100)]
    assert round_of_all_pairs(fabric_of(links, 2)) == Round(0.01, 0.0)
    with pytest.raises(Disconnected, match="no path from d1 to d0"):
        round_of_all_pairs(fabric_of(links[:1], 2))
    for more in ({"burst_bytes": 10}, {"library_latency_s": 1e-6}):
        with pytest.raises(Unsupported, match="message by message"):
            round_of_all_pairs(fabric_of([Link(src="d0", dst="d1", rate_Bps=100, **more), links[1]], 2))  # type: ignore[arg-type]
