"""A rank is the one that the plan puts on its device, whatever number the launcher gave it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rig import make_plan

from meshwright.errors import UsageError
from meshwright.io.plan.plan import write_plan
from meshwright.run.launch.elastic import rank_on_device
from ports import free_port

PLACED = ("a", "b", "c")


def test_the_device_decides_where_the_launcher_names_it():
    assert [rank_on_device(PLACED, {"RANK": "2", "MESHWRIGHT_DEVICE": d}) for d in PLACED] == [0, 1, 2]
    for environment in ({}, {"MESHWRIGHT_DEVICE": ""}, {"MESHWRIGHT_DEVICE": "a", "LOCAL_WORLD_SIZE": "2"}):
        assert rank_on_device(PLACED, {"RANK": "2", **environment}) == 2
    with pytest.raises(UsageError, match="no rank on this device, 'd': it was made for a, b, c") as refused:
        rank_on_device(PLACED, {"RANK": "0", "MESHWRIGHT_DEVICE": "d"})
    assert refused.value.data["device"] == "d"


@pytest.mark.real
@pytest.mark.timeout(280)
def test_ranks_change_places_with_their_devices(tmp_path):
    """The process that hosts the store is the plan's second stage here; only that stage has losses, and rank 0 still writes the run."""
    plan = make_plan((1, 1, 2), microbatch=4)
    write_plan(tmp_path / "plan.json", plan)
    port = free_port()
    command = [sys.executable, "-m", "meshwright", "train", "run", str(tmp_path / "plan.json"), "--steps", "2", "--no-calibration", "--json"]
    started = []
    for number, device in enumerate(reversed(plan.placement)):
        environment = {
            **os.environ, "RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x",
            "MESHWRIGHT_DEVICE": device,
        }  # fmt: skip
        words = [*command, "--out", str(tmp_path / "run")]
        started.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = []
    try:
        said = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], said
    assert not said[0][0].strip() and json.loads(said[1][0]), "the launcher's second process is the plan's rank 0"
    assert len(json.loads((tmp_path / "run/run.json").read_text())["losses"]) == 2
