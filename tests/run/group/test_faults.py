"""Real processes, real faults: every survivor raises the same typed error that names what was planted, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_rig import CaseResult, FaultRig, judge

from meshwright.cli import main
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.doctor import diagnose, find_records
from ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
TIMEOUT_S = 6.0  # of a wait; the grace, in which each rank must answer, is a quarter of it
ALLOWED_S = 80.0  # far beyond deadline and grace: the machine may be busy; benchmarks/faults.py measures


def make_plan(folder: Path, fabric: str, size: str = "64KiB", strategy: str = "ring") -> Path:
    path = folder / f"{fabric.partition('?')[0].replace(':', '')}-{strategy}-{size}.json"
    assert main(["collective", "plan", "all-reduce", "--fabric", fabric, "--size", size, "--strategy", strategy, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plan(tmp_path_factory.mktemp("plans"), "laptop:3")


@pytest.fixture(scope="module")
def rig(plan: Path) -> Iterator[FaultRig]:
    with FaultRig(3, plan, timeout_s=TIMEOUT_S) as made:
        yield made


def test_a_healthy_run_has_no_error(rig: FaultRig) -> None:
    result = rig.run(None)
    assert judge(result, 3, ALLOWED_S) == "" and set(result.codes.values()) == {0}
    assert result.ranks[0]["waits"] >= 8


@pytest.mark.parametrize(("kind", "rank", "at"), [("kill", 0, 1), ("kill", 2, 8), ("stop", 0, 3), ("stop", 1, 6), ("exception", 1, 5)])
def test_a_fault_in_a_step_is_named_by_all(rig: FaultRig, kind: str, rank: int, at: int) -> None:
    result = rig.run({"kind": kind, "rank": rank, "at": at})
    assert result.struck
    assert judge(result, 3, ALLOWED_S) == "", result.logs
    if kind == "stop":
        assert result.ranks[rank]["code"] == "rank-frozen", "the frozen one learns of it when it goes on"
    assert all(code == 0 for r, code in result.codes.items() if r != rank or kind != "kill")


def told(result: CaseResult, culprit: int, *, of: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """The one error of ranks `of`."""
    assert not result.left, result.logs
    errors = [result.ranks[r] for r in of]
    assert len({(e["code"], e["message"]) for e in errors}) == 1, errors
    assert errors[0]["data"]["rank"] == culprit, errors[0]
    assert all(e["anew"] for e in errors), "the group can be made anew in the same processes"
    return errors[0]


def test_another_size_is_a_divergence(rig: FaultRig) -> None:
    """gloo would end the process that gets a longer message than it expects."""
    error = told(rig.run(None, scenario="size", culprit=1), 1)
    assert error["code"] == "rank-diverged" and "8 KiB" in error["message"] and "4 KiB" in error["message"]


def test_another_collective_is_a_divergence(rig: FaultRig) -> None:
    error = told(rig.run(None, scenario="order", culprit=2), 2)
    assert error["code"] == "rank-diverged" and "broadcast" in error["message"]


def test_a_rank_that_does_not_come(rig: FaultRig) -> None:
    error = told(rig.run(None, scenario="late", culprit=1), 1)
    assert error["code"] == "run-timeout" and "rank 1 has not come to collective 2" in error["message"]


def test_an_aborted_group(rig: FaultRig) -> None:
    error = told(rig.run(None, scenario="abort", culprit=1), 1)
    assert error["code"] == "group-failed" and "rank 1 aborted the group" in error["message"]


def test_a_flipped_bit_is_found_in_debug_mode(plan: Path) -> None:
    before = os.environ.get("MESHWRIGHT_DEBUG")
    os.environ["MESHWRIGHT_DEBUG"] = "1"
    try:
        with FaultRig(3, plan, timeout_s=TIMEOUT_S) as rig:
            assert judge(rig.run(None), 3, ALLOWED_S) == ""
            result = rig.run(None, scenario="flip", culprit=1)
    finally:
        os.environ.pop("MESHWRIGHT_DEBUG") if before is None else os.environ.update(MESHWRIGHT_DEBUG=before)
    errors = list(result.ranks.values())
    assert {e["code"] for e in errors} == {"message-damaged"} and len({e["message"] for e in errors}) == 1
    assert errors[0]["data"]["link"].endswith(" -> 1") and "step" in errors[0]["message"] and errors[0]["data"]["step"] >= 0


def test_another_plan_on_one_rank(rig: FaultRig, tmp_path: Path) -> None:
    other = make_plan(tmp_path, "laptop:3", strategy="direct")
    result = rig.run(None, culprit=2, culprit_env={"MESHWRIGHT_PLAN": str(other)})
    said = {r: v["message"] for r, v in result.ranks.items()}
    assert len(set(said.values())) == 1 and "rank 2 has other plans" in said[0], said


def test_a_damaged_plan_on_one_rank(rig: FaultRig, tmp_path: Path) -> None:
    """The others must not wait for a rank that cannot come."""
    (tmp_path / "damaged.json").write_text("{")
    result = rig.run(None, culprit=0, culprit_env={"MESHWRIGHT_PLAN": str(tmp_path / "damaged.json")})
    said = {r: v["message"] for r, v in result.ranks.items()}
    assert "rank 0 could not join" in said[1] and said[1] == said[2] and not result.left, said


@pytest.mark.parametrize("late", [None, 1])
def test_the_planning_rank_dies(late: int | None, rig: FaultRig) -> None:
    """It hosts the store, too: the others wait there for its plan; or one comes when the other has found it dead."""
    env = {"MESHWRIGHT_PLAN": "", "MESHWRIGHT_FABRIC": "laptop:3", "MESHWRIGHT_MIN_BYTES": "0", "MESHWRIGHT_TIMEOUT_S": "30"}
    result = rig.run(None, scenario="planning", culprit=0, late=late, more_env=env)
    errors = [result.ranks[r] for r in (1, 2)]
    assert {e["code"] for e in errors} == {"rank-died"} and {e["data"]["rank"] for e in errors} == {0}, errors
    assert len({e["message"] for e in errors}) == 1 and "rank 0 died" in errors[0]["message"] and not result.left, errors


# ---- processes that end by themselves --------------------------------------------------------------------------------------
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import meshwright.torch
torch.set_num_threads(1)
from datetime import timedelta
rank, how = int(os.environ["RANK"]), sys.argv[1]
if how == "sigterm":
    signal.signal(signal.SIGTERM, lambda *_: (print("mine", flush=True), os._exit(7)))
dist.init_process_group("meshwright", timeout=timedelta(seconds=60))
x = torch.ones(1024)
dist.all_reduce(x)
if rank == 1:
    time.sleep(0.3)
    if how == "exception":
        raise ValueError("sample 20 is damaged")
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    sys.exit(0)
try:
    dist.all_reduce(x)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def run_script(plan: Path, tmp_path: Path, how: str) -> list[tuple[int, str]]:
    env = {
        **os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "MESHWRIGHT_PLAN": str(plan), "MESHWRIGHT_TIMEOUT_S": "30", "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for r in range(3)]
    return [(p.wait(), out) for p in ranks for out in [p.communicate(timeout=90)[0]]]


@pytest.mark.parametrize(("how", "code", "said"), [
    ("exception", 1, "rank 1 failed outside of a collective: ValueError: sample 20 is damaged"),
    ("sigterm", 7, "rank 1 was told to end (SIGTERM)"),
    ("exit", 0, "rank 1 has ended"),
])  # fmt: skip
def test_the_end_of_a_process_is_told_at_once(plan: Path, tmp_path: Path, how: str, code: int, said: str) -> None:
    """The deadline is half a minute; nobody waits for it. The user's SIGTERM handler still runs."""
    ranks = run_script(plan, tmp_path, how)
    assert ranks[1][0] == code, ranks
    assert ranks[0][1] == ranks[2][1] and said in ranks[0][1], ranks
    assert how != "sigterm" or "mine" in ranks[1][1]
    records, _ = find_records([tmp_path / f"meshwright-{os.getuid()}"])
    assert {r.header.rank for r in records} >= {0, 2}, "records of a failed run stay"
    found = diagnose(records)
    assert found.wrong and said in found.line


# ---- links -----------------------------------------------------------------------------------------------------------------
@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_cut_and_slow_links_are_named(tmp_path: Path) -> None:
    from meshwright.lab import Lab

    fabric = load_fabric("ring:3?link=100Mbit/s")
    plan = make_plan(tmp_path, "ring:3?link=100Mbit/s", "4MiB")
    with Lab.up(fabric, verify=False) as lab, FaultRig(3, plan, lab, timeout_s=TIMEOUT_S, elements=1 << 20) as rig:
        assert judge(rig.run(None), 3, ALLOWED_S) == ""
        for kind, act in (("cut", lambda: lab.cut("d0<->d1")), ("slow", lambda: lab.set_rate("d0<->d1", 125_000))):
            result = rig.run({"kind": kind, "rank": 0, "at": 2}, act, lambda: lab.restore("d0<->d1"))
            assert judge(result, 3, ALLOWED_S, (0, 1)) == "", (kind, result.logs)
            assert result.ranks[0]["code"]
        # A message is half transferred when rank 1 fails: gloo says nothing to its receiver, who must hear of it long before the deadline.
        rig.timeout_s = 200.0
        result = rig.run({"kind": "exception", "rank": 1, "at": 2})
        assert judge(result, 3, ALLOWED_S) == "", result.logs


def test_nothing_is_left(rig: FaultRig) -> None:
    """All processes of a case were waited for by its place, and its session has the processes that it had before the first one."""
    result = rig.run({"kind": "kill", "rank": 1, "at": 2})
    assert sorted(result.codes) == [0, 1, 2] and not result.left
    assert list(rig.base.iterdir()) == [], "cases clean up after themselves"
    assert rig.sessions <= rig.at_start == rig.processes()
