"""Planning again: what is lost is exact, the plan delivers on what is left, alike servers lose nothing where they are used."""

import json
from fractions import Fraction

import pytest

from meshwright.cli import main
from meshwright.decide.collective import CollectiveProblem, collective_bound
from meshwright.drive.collective.replan import levelled, reduced_problem, replan
from meshwright.drive.plans import check_plan, fabric_of
from meshwright.errors import Disconnected, UsageError
from meshwright.fabric.edit import edited
from meshwright.io.fabric.name import load_fabric

MIB = 1 << 20


def problem(spec: str, op: str = "all-gather", **more) -> CollectiveProblem:
    return CollectiveProblem.on(load_fabric(spec), op, 16 * MIB, **more)


def test_a_nic_is_down():
    found = replan(problem("dgx-h100:8"), ["box3/nic2"], {})
    assert found.lost == Fraction(1, 8)  # 7 of the 8 NICs of one box are left
    names = [r.strategy for r in found.ranked]
    assert "forestcoll on alike servers" in names and all(r.plan is not None and r.plan.notes["ratio"] == "1" for r in found.ranked)
    assert fabric_of(found.plan).name == "dgx-h100:8 without box3/nic2" and found.plan.bound is not None
    assert found.plan.bound.exact == found.now_bound.exact
    check_plan(found.plan)  # once more, from outside


def test_a_slow_nic_and_an_all_reduce():
    found = replan(problem("dgx-h100:3", "all-reduce"), [], {"box1/nic2": Fraction(1, 2)})
    assert 0 < found.lost < Fraction(1, 8)
    alike = next(r for r in found.ranked if r.strategy == "forestcoll on alike servers")
    assert alike.plan is not None and str(alike.plan.notes["planned_on"]).startswith("dgx-h100:3 with box0/nic2 at 1/2")


def test_a_gpu_is_down():
    found = replan(problem("dgx-a100:2"), ["box1/gpu5"], {})
    assert len(found.now.ranks) == 15 and "box1/gpu5" not in found.plan.placement
    brute = collective_bound(CollectiveProblem.on(edited(load_fabric("dgx-a100:2"), ["box1/gpu5"], {}), "all-gather", 16 * MIB))
    assert found.now_bound.exact == brute.exact and found.lost == 1 - found.whole_bound.exact / brute.exact


def test_what_can_be_levelled():
    fabric = load_fabric("dgx-h100:3")
    level = levelled(fabric, ["box1/nic7"], {})
    assert level is not None and sorted(set(fabric.actor_names) - set(level.actor_names)) == [f"box{b}/nic7" for b in range(3)]
    half = levelled(fabric, [], {"box1/nic7<->ib": Fraction(1, 2)})
    assert half is not None and sum(x.rate_Bps == 25 * 10**9 for x in half.links) == 6
    assert levelled(fabric, ["box1/gpu3"], {}) is None and levelled(fabric, ["ib"], {}) is None
    assert levelled(load_fabric("two-islands"), ["island0/cpu0->island0/switch"], {}) is not None


def test_refusals():
    with pytest.raises(Disconnected) as caught:
        replan(problem("two-islands"), ["island0/switch->island1/switch"], {})
    assert caught.value.data["from"] == ["island0/cpu0", "island0/cpu1"] and caught.value.data["to"] == ["island1/cpu0", "island1/cpu1"]
    with pytest.raises(UsageError, match="--without or --degrade is missing: no part is down or slow"):
        replan(problem("two-islands"), [], {})
    with pytest.raises(UsageError, match="the root island0/cpu0 is taken out"):
        replan(problem("two-islands", "broadcast"), ["island0/cpu0"], {})
    with pytest.raises(UsageError, match="1 device is left of 2"):
        replan(problem("laptop:2"), ["cpu1"], {})
    with pytest.raises(UsageError, match="the shards name it"):
        replan(problem("laptop:3", shard_bytes=(8 * MIB, 4 * MIB, 4 * MIB)), ["cpu1"], {})
    with pytest.raises(UsageError, match="the peers name it"):
        replan(problem("laptop:3", "permute"), ["cpu1"], {})


def test_ranks_move_up_and_the_root_stays_the_same_device():
    whole = problem("laptop:4", "broadcast", root=2)
    now = reduced_problem(whole, edited(whole.fabric, ["cpu0"], {}))
    assert now.ranks == ("cpu1", "cpu2", "cpu3") and now.ranks[now.root] == "cpu2"


def test_command(capsys, tmp_path):
    path = tmp_path / "plan.json"
    argv = ["collective", "replan", "all-gather", "--fabric", "two-islands", "--size", "1MiB", "--without", "island0/cpu1", "--out", str(path)]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    # three devices: 2/3 of the result must leave island1 instead of 1/2
    assert document["lost"] == "1/4" and document["devices"] == 3 and document["down"] == ["island0/cpu1"] and path.exists()
    assert document["whole"]["devices"] == 4 and document["bottleneck"]["where"] == "island0/cpu0"
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "lost: 25 % of the whole fabric's throughput; at best 37.5 MB/s instead of 50 MB/s" in out
    assert "bottleneck: what island0/cpu0 can receive" in out
    assert main([*argv[:-2], "--out", "nowhere/plan.json"]) == 2
