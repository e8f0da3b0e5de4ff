"""Redesigns of a wiring that stands: against all wirings of few nodes, with dead accelerators and cables, through the command and its files."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from effort import few
from meshwright.check.wiring import check_wiring
from meshwright.cli import main
from meshwright.decide.topology.directconnect.families import complete_bipartite, torus
from meshwright.decide.topology.directconnect.rewire import Standing, least_moved, rewire
from meshwright.drive.plans import read_fabric
from meshwright.drive.wiring import rewire_wiring
from meshwright.errors import Infeasible, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link


def all_wirings(nodes: int) -> set[tuple[tuple[int, int], ...]]:
    """Two links out and in everywhere, no loops: unions of two permutations without a fixed point."""
    moves = [p for p in permutations(range(nodes)) if all(a != b for a, b in enumerate(p))]
    return {tuple(sorted([*enumerate(p), *enumerate(q)])) for p in moves for q in moves}


def most_hops(arcs: tuple[tuple[int, int], ...], nodes: int) -> int | None:
    """None: not connected."""
    steps = 0
    for start in range(nodes):
        seen, edge, depth = {start}, {start}, 0
        while edge := {b for a, b in arcs if a in edge} - seen:
            seen, depth = seen | edge, depth + 1
        if len(seen) < nodes:
            return None
        steps = max(steps, depth)
    return steps


def test_the_least_moved_and_the_fewest_steps_are_those_of_all_wirings() -> None:
    rng, nodes = np.random.default_rng(3), 4
    everything = [arcs for arcs in all_wirings(nodes) if most_hops(arcs, nodes) is not None]
    for _ in range(few(5)):
        whole = everything[int(rng.integers(len(everything)))]
        arcs = tuple(sorted(whole[k] for k in rng.permutation(len(whole))[: int(rng.integers(2, 9))].tolist()))
        standing = Standing("s", nodes, 2, arcs, paired=False)
        moves = {other: sum((Counter(arcs) - Counter(other)).values()) for other in everything}
        assert least_moved(standing) <= min(moves.values())
        rows = rewire(standing, moved=8, evaluations=160, rng=np.random.default_rng(1))
        assert len(rows[0].unplugged) == min(moves.values())
        assert rows[-1].steps == min(most_hops(other, nodes) or 99 for other in everything)
        for row in rows:
            after = Counter((int(a), int(b)) for a, b in row.wiring.arcs)
            assert Counter(arcs) - after == Counter(row.unplugged) and after - Counter(arcs) == Counter(row.plugged)
            assert most_hops(tuple(after), nodes) == row.steps
        assert all(len(a.unplugged) < len(b.unplugged) and (b.steps, b.load) != (a.steps, a.load) for a, b in pairwise(rows))


def test_a_node_whose_ports_are_all_free_takes_them_from_cables_of_others() -> None:
    ring = tuple((a, (a + 1) % 4) for a in range(4)) * 2
    standing = Standing("s", 5, 2, ring, paired=False)
    assert least_moved(standing) == 2
    assert len(rewire(standing, moved=0, evaluations=20, rng=np.random.default_rng(0))[0].unplugged) == 2
    with pytest.raises(UsageError, match="more than 1 links"):
        least_moved(Standing("s", 4, 1, ring, paired=False))
    with pytest.raises(Infeasible, match="5 free ports of two-way cables are no pairs"):
        rewire(Standing("s", 5, 1, (), paired=True), moved=0, evaluations=5, rng=np.random.default_rng(0))
    apart = Standing("s", 4, 1, ((0, 1), (1, 0), (2, 3), (3, 2)), paired=False)
    with pytest.raises(Infeasible, match="at most 0 links unplugged joins all"):
        rewire(apart, moved=0, evaluations=5, rng=np.random.default_rng(0))
    assert rewire(apart, moved=2, evaluations=15, rng=np.random.default_rng(0))[0].steps == 3


@pytest.mark.parametrize("paired", [True, False])
def test_a_dead_accelerator_and_a_dead_link_leave_ports_that_are_joined(paired: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = torus((4, 4)) if paired else complete_bipartite(4)
    arcs = [(int(a), int(b)) for a, b in base.arcs] if paired else [(k, (k * 2 + j) % 16) for k in range(16) for j in (1, 2)]
    nodes = 16
    links = tuple(Link(src=f"d{a}", dst=f"d{b}", rate_Bps=10, kind="optical") for a, b in arcs if a != b)
    fabric = Fabric(name="pod", devices=tuple(Device(name=f"d{k}", kind="gpu") for k in range(nodes)), links=links)
    rows, problem = rewire_wiring(fabric, ["d3", "d4<->d5"] if paired else ["d3"], moved=6, evaluations=120)
    assert problem.nodes == 15 and problem.bidirectional == paired
    for row in rows:
        wiring, grown = row.design.wiring, row.grown
        assert grown is not None and wiring.paired == paired and row.least_unplugged <= len(grown.unplugged) <= row.least_unplugged + 6
        listed = [(int(a), int(b)) for a, b in wiring.arcs]
        gather = row.design.gather
        assert gather is not None
        assert check_wiring(15, problem.ports, listed, steps=gather.steps, load=gather.load, paired=paired).ok
        assert row.design.names[3] == "d4"
    if not paired:
        return
    from meshwright.io.fabric.toml import fabric_toml

    (tmp_path / "pod.toml").write_text(fabric_toml(fabric))
    words = ["fabric", "design", "--rewire", str(tmp_path / "pod.toml"), "--without", "d3", "--moved", "4", "--evaluations", "40"]
    assert main([*words, "--out", str(tmp_path / "new.toml"), "--moves", str(tmp_path / "moves.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["designs"][0]["least_unplugged"] == 0 == found["designs"][0]["unplugged"] and found["designs"][0]["plugged"] == 4
    assert len(read_fabric(str(tmp_path / "new.toml")).devices) == 15
    assert (tmp_path / "moves.csv").read_text().count("\n") > 4
    assert main([*words, "--nodes", "15"]) == 2 and main(["fabric", "design", "--nodes", "4", "--ports", "2", "--moved", "3"]) == 2
    capsys.readouterr()
    with pytest.raises(UsageError, match="has switches"):
        rewire_wiring(read_fabric("dgx-h100:1"), [])
    assert main([*words[:3], str(tmp_path / "new.toml"), "--without", "d99"]) == 2
