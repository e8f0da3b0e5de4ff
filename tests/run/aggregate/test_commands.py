"""The aggregator as a command and as a lab's helper, and what `run doctor` says of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from aggregate_rig import seat, switch

from meshwright.cli.frame import main
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.lab import Lab
from meshwright.lab.planning import Options, plan_lab
from meshwright.run.aggregate.client import Stream
from meshwright.run.aggregate.sockets import parse_address


@pytest.mark.real
def test_the_command_serves_until_it_is_ended_and_says_what_it_counted() -> None:
    words = [sys.executable, "-m", "meshwright", "collective", "aggregator", "--listen", "127.0.0.1:0", "--slots", "8", "--words", "64", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("listening on"))
        with Stream.join(parse_address(line.split()[2].rstrip(":")), seat(0, 1)) as stream:
            assert stream.all_reduce(np.arange(100, dtype=np.int32))[99] == 99
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=200)
    document = json.loads(said)
    assert process.returncode == 0 and document["schema"] == "meshwright.aggregator" and document["packets"]["contributions"] == 2


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--listen", "nowhere"], ["--listen", "127.0.0.1:0", "--lost", "1"], ["--listen", "127.0.0.1:0", "--words", "4096"]):
        assert main(["collective", "aggregator", *words]) == 2
    assert "--words" in capsys.readouterr().err


def test_an_operator_is_what_the_named_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def number():\n    return 3\n")
    words = ["collective", "aggregator", "--listen", "127.0.0.1:0", "--operator", f"{tmp_path / 'mine.py'}:number"]
    assert main(words) == 2
    assert "gives int, no operator" in capsys.readouterr().err


def test_the_doctor_asks_a_switch(capsys: pytest.CaptureFixture[str]) -> None:
    with switch() as up, Stream.join(up.address, seat(0, 1)):
        assert main(["run", "doctor", "--aggregator", str(up.address), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.aggregator-status" and not document["wrong"]
    assert [(j["job"], j["state"]) for j in document["jobs"]] == [("job", "running")]


def fabric(*, parallel: bool = False) -> Fabric:
    ways = [("a", "tor"), ("b", "tor"), ("b", "plain"), ("a", "plain")] if parallel else [("a", "tor"), ("b", "tor")]
    links = tuple(Link(src=x, dst=y, rate_Bps=12_500_000) for way in ways for x, y in (way, way[::-1]))
    switches = (Switch(name="tor", aggregate=True, multicast=True), *([Switch(name="plain")] if parallel else []))
    return Fabric(name="pair", devices=(Device(name="a"), Device(name="b")), switches=switches, links=links)


def test_only_switches_that_add_get_a_process() -> None:
    plan = plan_lab(fabric(parallel=True), "trial", Options())
    assert plan.wiring.style == "routed"
    assert [json.loads(argv[3]) for argv in plan.helpers] == [{"namespace": "mw-trial-s0", "host": "0.0.0.0", "slots": 1024}]


WORKER = """
import os, numpy as np
from meshwright.run.aggregate.client import Seat, Stream
from meshwright.run.aggregate.sockets import parse_address
found = dict(item.split("=") for item in os.environ["MESHWRIGHT_AGGREGATORS"].split(","))
seat = Seat(job="lab", worker=int(os.environ["RANK"]), children=2)
with Stream.join(parse_address(found["tor"]), seat) as stream:
    print(int(stream.all_reduce(np.full(5000, 20 + seat.worker, np.int32)).sum()))
"""


@pytest.mark.lab
@pytest.mark.parametrize("parallel", [False, True])
def test_a_lab_has_one_per_switch_that_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool) -> None:
    monkeypatch.setenv("MESHWRIGHT_LAB_DIR", str(tmp_path))
    try:
        lab = Lab.up(fabric(parallel=parallel), verify=False)
    except Unsupported as error:
        pytest.skip(f"no lab can be built here: {error.message}")
    with lab:
        known = Path(f"/proc/{lab.state.holder}/environ").read_bytes().split(b"\0")
        assert f"NUMBA_CACHE_DIR={os.environ['NUMBA_CACHE_DIR']}".encode() in known, "its switches would compile their kernels again"
        result = lab.run([sys.executable, "-c", WORKER], env={"PYTHONPATH": os.pathsep.join(sys.path)}, timeout_s=100)
        assert [output.strip() for output in result.outputs] == [b"205000", b"205000"]


def test_plans_that_need_a_switch_are_refused_by_name_where_only_ranks_run(tmp_path: Path) -> None:
    """By the group of ranks and by the executor; both say what carries such a plan out."""
    from meshwright.drive.plans import read_plan
    from meshwright.errors import Unsupported
    from meshwright.run.executor.lanes import require_executable
    from meshwright.run.group.plans import _from_file

    plan = tmp_path / "plan.json"
    words = ["collective", "plan", "all-reduce", "--fabric", "dgx-h100:1", "--size", "64KiB", "--strategy", "switchml", "--in-network"]
    assert main([*words, "--out", str(plan)]) == 0
    with pytest.raises(Unsupported, match="strategy switchml computes in switches") as refused:
        _from_file(str(plan))
    assert "collective aggregator" in str(refused.value.hint)
    with pytest.raises(Unsupported, match="in-network actors"):
        require_executable(read_plan(plan).main)
