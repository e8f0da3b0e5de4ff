"""Switches that add and copy: the box of the card, several boxes, random boxes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.check.bounds.certificate import check_bound
from meshwright.check.program.links import link_time
from meshwright.decide.collective import CollectiveProblem, ForestColl
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.joint.innetwork import InNetwork
from meshwright.decide.collective.joint.innetwork_lower import InNetworkLowering, lower_in_network, pruned
from meshwright.decide.collective.joint.strategy import Joint
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.drive.collective.job import plan_collective
from meshwright.errors import Disconnected, Unsupported, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.program.program import Part, Space

GIB = 1 << 30
RNG = np.random.default_rng(0)


def boxes(sizes: list[int], seed: int, *, aggregate: bool = True, multicast: bool = True, plain: bool = False) -> Fabric:
    """Boxes around a capable switch each, the switches joined in a line; `plain`: a switch without abilities between them."""
    rng = np.random.default_rng(seed)
    links: list[Link] = []
    switches = [Switch(name=f"s{b}", group=f"box{b}", aggregate=aggregate, multicast=multicast) for b in range(len(sizes))]
    devices = [Device(name=f"b{b}d{i}", group=f"box{b}") for b, n in enumerate(sizes) for i in range(n)]

    def cable(a: str, b: str) -> None:
        rate = 10**6 * int(rng.integers(1, 6))
        links.extend([Link(src=a, dst=b, rate_Bps=rate), Link(src=b, dst=a, rate_Bps=rate)])

    for d in devices:
        cable(d.name, f"s{d.group[3:]}")
    for b in range(1, len(sizes)):
        if plain:
            cable(f"s{b}", "core")
        else:
            cable(f"s{b - 1}", f"s{b}")
    if plain:
        cable("s0", "core")
        switches.append(Switch(name="core"))
    return Fabric(name="boxes", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def test_the_h100_box_rises_from_257_to_450_gigabytes_per_second() -> None:
    fabric = load_fabric("dgx-h100:1")
    problem = CollectiveProblem.on(fabric, "all-reduce", GIB)
    able, alone = Joint(in_network=True, pieces=128).plan(problem, rng=RNG), Joint(pieces=128).plan(problem, rng=RNG)
    assert Fraction(GIB, 10**9) / Fraction(able.notes["bandwidth_time_s"]) == 450
    assert Fraction(GIB, 10**9) / Fraction(alone.notes["bandwidth_time_s"]) == Fraction(1800, 7)
    assert able.notes["in_network"] and able.notes["all_switches_capable"] and able.notes["limit_is_reached"] and able.switches == ("box0/nvswitch",)
    assert able.bound is not None and able.bound.exact == Fraction(able.notes["bandwidth_time_s"])
    actors = (*problem.ranks, *able.switches)
    times = [simulated_time_s(p.program, fabric, a, None) for p, a in ((able, actors), (alone, problem.ranks))]
    assert float(able.bound) * (1 - 1e-9) <= times[0] < 1.05 * float(able.bound) and times[1] > 1.7 * times[0]
    assert check_program(able.program).ok


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("plain", [False, True])
def test_random_boxes_are_right_and_within_bound_and_limit(seed: int, plain: bool) -> None:
    rng = np.random.default_rng(seed)
    fabric = boxes([int(x) for x in rng.integers(1, 4, int(rng.integers(1, 4)))] + [2], seed, plain=plain)
    problem = CollectiveProblem.on(fabric, "all-reduce", 80_640)
    plan = Joint(in_network=True, pieces=1 + seed % 3, unroll=bool(seed % 2)).plan(problem, rng=RNG)
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    actors = (*problem.ranks, *plan.switches)
    assert plan.bound is not None and not check_bound(plan.bound, fabric)
    assert simulated_time_s(plan.program, fabric, actors, None) >= float(plan.bound) * (1 - 1e-9)
    assert float(Fraction(plan.notes["bandwidth_time_s"])) >= plan.notes["limit_time_s"] * (1 - 1e-6)
    b = plan.program.buffers
    padding = Fraction(int(b.chunks[0] * b.chunk_bytes[0] * plan.program.lanes.repeat.max()), problem.size_bytes)
    assert max(link_time(plan.program, fabric, actors)[0].values()) <= Fraction(plan.notes["bandwidth_time_s"]) * padding
    alone = Joint(pieces=1).plan(problem, rng=RNG)
    if alone.notes.get("exact"):
        assert Fraction(plan.notes["bandwidth_time_s"]) <= Fraction(alone.notes["bandwidth_time_s"])


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "broadcast", "reduce"])
@pytest.mark.parametrize("seed", range(6))
def test_other_operations_with_trees_are_right_and_within_bound_and_limit(op: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spreads = op in ("all-gather", "broadcast")
    sizes = [int(x) for x in rng.integers(1, 4, int(rng.integers(1, 4)))] + [2]
    fabric = boxes(sizes, seed, plain=bool(seed % 2), aggregate=not spreads, multicast=spreads)  # the ability that the operation needs is enough
    ranks = tuple(d.name for d in fabric.devices)
    problem = CollectiveProblem(fabric=fabric, op=op, ranks=ranks, size_bytes=len(ranks) * 40_320, root=int(rng.integers(len(ranks))))
    plan = Joint(in_network=True, pieces=1 + seed % 3, unroll=seed < 3).plan(problem, rng=RNG)
    verdict = check_program(plan.program)
    assert verdict.ok, verdict.findings
    actors = (*problem.ranks, *plan.switches)
    assert plan.bound is not None and not check_bound(plan.bound, fabric)
    assert simulated_time_s(plan.program, fabric, actors, None) >= float(plan.bound) * (1 - 1e-9)
    exact = Fraction(plan.notes["bandwidth_time_s"])
    assert exact >= bandwidth_bound(problem).exact and float(exact) >= plan.notes["limit_time_s"] * (1 - 1e-6)
    b = plan.program.buffers
    padding = Fraction(int(b.chunks[0] * b.chunk_bytes[0] * plan.program.lanes.repeat.max()), problem.size_bytes)
    assert max(link_time(plan.program, fabric, actors)[0].values()) <= exact * padding


def test_one_message_into_the_switch_reaches_all() -> None:
    fabric = load_fabric("dgx-h100:1")
    problem = CollectiveProblem.on(fabric, "broadcast", 1 << 20)
    plan, alone = Joint(in_network=True).plan(problem, rng=RNG), ForestColl().plan(problem, rng=RNG)
    p = plan.program
    sends = p.lanes.actor[p.lane_of_step()][(p.steps.parts & Part.SEND) != 0]
    assert set(sends.tolist()) == {problem.root, len(problem.ranks)}  # the root and the switch, nobody else
    times = [simulated_time_s(x.program, fabric, (*problem.ranks, *x.switches), None) for x in (plan, alone)]
    assert times[0] < 0.85 * times[1]


def test_switches_add_and_copy_in_one_step_and_hold_a_slot() -> None:
    fabric = boxes([4], 1)
    plan = Joint(in_network=True, pieces=2, unroll=True, quantum=64).plan(CollectiveProblem.on(fabric, "all-reduce", 4096), rng=RNG)
    p = plan.program
    on_switch = p.lanes.actor[p.lane_of_step()] >= p.ranks
    assert p.switches == 1 and on_switch.any() and "multi" in p.requires
    assert all(parts & Part.IN_SET or parts & Part.OUT_SET for parts in p.steps.parts[on_switch].tolist())
    assert set(p.buffers.space[p.buffers.actor >= p.ranks].tolist()) == {Space.SWITCH}


def test_options_rebuild_the_program_and_the_plan_names_its_switches() -> None:
    problem = CollectiveProblem.on(load_fabric("dgx-h100:2"), "all-reduce", 1 << 26)
    first = Joint(in_network=True).plan(problem, rng=RNG)
    again = Joint(**first.options).plan(problem, rng=RNG)
    from meshwright.program.hash import program_hash

    assert program_hash(first.program) == program_hash(again.program) and first.strategy == "joint"
    plan, ranked = plan_collective(problem, candidates=[Joint(in_network=True), ForestColl()])
    assert plan.placement[len(problem.ranks) :] == first.switches and ranked[0].plan is not None and ranked[0].plan.switches == first.switches


def test_branches_without_ranks_are_cut_off() -> None:
    from meshwright.decide.collective.trees.pack import Tree

    tree = Tree(root=0, units=1, parent=(-1, 2, 0, 2, 1), order=(0, 2, 1, 3, 4), paths=((), (2, 1), (0, 2), (2, 3), (1, 4)))
    assert pruned(tree, 2) == {0: [2], 2: [1]}  # 0 and 1 are ranks; 3 and 4 are switches with no rank behind them


def test_a_rank_passes_on_to_all_that_follow() -> None:
    from meshwright.decide.collective.trees.lower import Part as TreePart
    from meshwright.decide.collective.trees.pack import Tree

    fabric = boxes([4], 1)
    tree = Tree(root=0, units=1, parent=(-1, 0, 1, 1), order=(0, 1, 2, 3), paths=((), (0, 1), (1, 2), (1, 3)))
    names = tuple(d.name for d in fabric.devices)
    how = InNetworkLowering(
        fabric=fabric, ranks=names, switches=(), names=names, op="broadcast", root=0, shards=1, units=1, pieces=2, unroll=True, depth=2,
        chunk_bytes=64,
    )  # fmt: skip
    program = lower_in_network([TreePart(shard=0, first=0, units=1, up=None, down=tree)], how)
    assert check_program(program).ok  # both that follow rank 1 have it


def test_refusals() -> None:
    capable = CollectiveProblem.on(boxes([3], 1), "all-reduce", 4096)
    for option in ("max_trees", "pieces", "max_pieces", "quantum", "depth"):
        with pytest.raises(UsageError, match=option):
            InNetwork(**{option: 0}).plan(capable, rng=RNG)
    with pytest.raises(Unsupported, match="adds nothing to all-to-all"):
        InNetwork().plan(replace(capable, op="all-to-all"), rng=RNG)
    with pytest.raises(Unsupported, match="needs equal shards"):
        InNetwork().plan(replace(capable, op="all-gather", shard_bytes=(4096, 0, 0)), rng=RNG)
    for half in ({"aggregate": False}, {"multicast": False}):
        with pytest.raises(Unsupported, match="needs a switch that adds and copies"):
            InNetwork().plan(CollectiveProblem.on(boxes([3], 1, **half), "all-reduce", 4096), rng=RNG)
    for op, half, word in (("reduce", {"aggregate": False}, "adds"), ("all-gather", {"multicast": False}, "copies")):
        with pytest.raises(Unsupported, match=f"needs a switch that {word}\n"):
            InNetwork().plan(CollectiveProblem.on(boxes([3], 1, **half), op, 4092), rng=RNG)
    apart = replace(capable.fabric, links=capable.fabric.links[:-2])
    with pytest.raises(Disconnected):
        InNetwork().plan(replace(capable, fabric=apart), rng=RNG)
    with pytest.raises(Unsupported, match="more than 1 trees"):
        InNetwork(max_trees=1).plan(CollectiveProblem.on(load_fabric("dgx-h100:2"), "all-reduce", 1 << 20), rng=RNG)
