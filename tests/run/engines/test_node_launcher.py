"""The launcher that travels with a job: an attempt starts once on a server, never beside an earlier one, and only where it was decided."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.run.engines import node

pytestmark = pytest.mark.real
NODE = Path(node.__file__)


def told(folder, command, servers=("a", "a", "b"), attempt=1, **facts):
    document = {"job": "j", "attempt": attempt, "command": command, "plan": "", "addresses": {}, "own_gpus": True, "port": 0,
                "ranks": [{"server": s, "gpus": [n]} for n, s in enumerate(servers)]} | facts  # fmt: skip
    (folder / f"ranks-{attempt}.json").write_text(json.dumps(document))


def run(folder, server, attempt=1, **environment):
    words = [sys.executable, "-S", "-E", str(NODE), str(folder), str(attempt), *([server] if server else [])]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment or None)


def test_once_on_a_server_and_only_where_it_was_decided(tmp_path):
    told(tmp_path, ["sh", "-c", "echo $RANK"])
    assert run(tmp_path, "a").returncode == 0 and run(tmp_path, "a").returncode == node.AGAIN
    assert run(tmp_path, "c").returncode == node.ELSEWHERE and (tmp_path / "elsewhere-1-c.json").exists()
    assert [(tmp_path / f"out-1-{r}.txt").read_text() for r in (0, 1)] == ["0\n", "1\n"] and not (tmp_path / "out-1-2.txt").exists()
    assert run(tmp_path, "", SLURMD_NODENAME="b").returncode == 0 and json.loads((tmp_path / "ended-1-b.json").read_text())["code"] == 0


def test_not_while_an_earlier_attempt_runs(tmp_path):
    told(tmp_path, ["true"], attempt=2)
    with (tmp_path / "lock-1").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert run(tmp_path, "a", 2).returncode == node.EARLIER and not list(tmp_path.glob("claim*"))
    assert run(tmp_path, "a", 2).returncode == 0


def test_one_that_fails_ends_the_others(tmp_path):
    told(tmp_path, ["sh", "-c", '[ "$RANK" = 1 ] && exit 5; exec sleep 1000'])
    done = run(tmp_path, "a")
    assert done.returncode == 143 and json.loads((tmp_path / "ended-1-a.json").read_text())["code"] == 143


def test_ports_plans_and_gpus_of_the_engine(tmp_path):
    told(tmp_path, ["sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT $MESHWRIGHT_PLAN $CUDA_VISIBLE_DEVICES"], servers=("a",), plan="p.json", port=29500,
         addresses={"a": "10.0.0.1"}, own_gpus=False)  # fmt: skip
    assert run(tmp_path, "a", CUDA_VISIBLE_DEVICES="7").returncode == 0
    assert (tmp_path / "out-1-0.txt").read_text() == f"10.0.0.1:29500 {tmp_path}/p.json 7\n"


def test_one_that_is_asked_to_leave_has_its_grace_and_later_ones_start_nothing(tmp_path):
    """One saves and ends, the other must be killed; the file alone tells them."""
    for attempt, script, code in ((1, "trap 'exit 3' TERM; touch begun-1; while :; do sleep 0.02; done", 3),
                                  (2, "trap '' TERM; touch begun-2; while :; do sleep 0.02; done", 137)):  # fmt: skip
        told(tmp_path, ["sh", "-c", f"cd {tmp_path}; {script}"], servers=("a",), attempt=attempt, grace_s=0.2)
        words = [sys.executable, "-S", "-E", str(NODE), str(tmp_path), str(attempt), "a"]
        launcher = subprocess.Popen(words)
        while not (tmp_path / f"begun-{attempt}").exists():
            assert launcher.poll() is None
            time.sleep(0.01)
        (tmp_path / f"leave-{attempt}").touch()
        assert launcher.wait(60) == code
        note = json.loads((tmp_path / f"ended-{attempt}-a.json").read_text())
        assert note["asked"] and note["code"] == code
    told(tmp_path, ["true"], attempt=3)
    (tmp_path / "leave-3").touch()
    assert run(tmp_path, "a", 3).returncode == node.LEAVING and not (tmp_path / "claim-3-a").exists()
