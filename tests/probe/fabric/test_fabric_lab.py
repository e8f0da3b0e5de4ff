"""Probes of shaped links between namespaces, and programs started in the order that comes out."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic_networks import MBIT, racks, star

from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.toml import read_fabric_toml
from meshwright.lab import Lab

pytestmark = [
    pytest.mark.lab, pytest.mark.real, pytest.mark.timeout(280),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc for network namespaces"),
]  # fmt: skip
PAYLOAD = 0.957  # what headers leave of a shaped rate


@contextmanager
def lab_with_agents(fabric: Fabric, folder: Path) -> Iterator[tuple[Lab, list[str]]]:
    """A lab with an agent on every device, and the words that name them."""
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    with Lab.up(fabric, verify=False) as lab:
        words = ["--token-file", str(token)]
        agents = []
        for k, device in enumerate(fabric.devices):
            where = ["--host", lab.address(k), "--port", "7000", "--token-file", str(token)]
            agents.append(lab.popen(k, [sys.executable, "-m", "meshwright.probe.fabric.rank_order_agent", *where], stdout=-1))
            words += ["--probe", f"{device.name}={lab.address(k)}:7000"]
        for agent in agents:
            assert agent.stdout is not None and agent.stdout.readline()
        yield lab, words


def meshwright(lab: Lab, words: Sequence[str]) -> str:
    process = lab.popen(0, [sys.executable, "-m", "meshwright", *words], stdout=-1, stderr=-1)
    out, error = process.communicate(200)
    assert process.returncode == 0, error.decode()
    return out.decode()


def test_a_slow_node_is_found(tmp_path: Path) -> None:
    out = tmp_path / "f.toml"
    with lab_with_agents(star([200, 200, 200, 50]), tmp_path) as (lab, agents):
        said = json.loads(meshwright(lab, ["fabric", "probe", *agents, "-o", str(out), "--window", "0.2", "--tolerance", "0.2", "--json"]))
    assert said["kind"] == "tree" and not said["trunks"]
    for link in read_fabric_toml(out).links:
        true = (50 if "d3" in (link.src, link.dst) else 200) * MBIT * PAYLOAD
        assert link.rate_Bps == pytest.approx(true, rel=0.2), link


def test_two_islands_are_found_and_programs_start_in_their_order(tmp_path: Path) -> None:
    """Ranks alternate between the islands; the order that comes out does not, and torchrun's agents on every host agree on it."""
    out, costs, order = tmp_path / "f.toml", tmp_path / "costs.json", tmp_path / "order.json"
    with lab_with_agents(racks([[0, 2], [1, 3]], 200, 50), tmp_path) as (lab, agents):
        words = ["-o", str(out), "--save-matrix", str(costs), "--window", "0.2", "--tolerance", "0.2", "--json"]
        said = json.loads(meshwright(lab, ["fabric", "probe", *agents, *words]))
        assert [sorted(t["members"]) for t in said["trunks"]] in ([["d0", "d2"]], [["d1", "d3"]])
        assert said["trunks"][0]["out_Bps"] == pytest.approx(50 * MBIT * PAYLOAD, rel=0.2)
        chosen = json.loads(meshwright(lab, ["collective", "order", "--matrix", str(costs), "--save-order", str(order), "--json"]))["rows"][0]
        assert [int(x[1]) % 2 for x in chosen["names"]] in ([0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1])
        script = tmp_path / "job.py"
        script.write_text("import os\nprint('played', os.environ['RANK'], os.environ['MESHWRIGHT_DEVICE'], os.environ['GROUP_RANK'])\n")
        agent = ["-m", "torch.distributed.run", "--nnodes", "4", "--nproc-per-node", "1", "--master-port", "29577", str(script)]
        wrapped = [sys.executable, "-m", "meshwright", "run", "ordered", "--order", str(order), "--", sys.executable, *agent]
        outputs = lab.run(wrapped, timeout_s=120).outputs
    played = sorted(line.split()[1:] for text in outputs for line in text.decode().splitlines() if line.startswith("played"))
    assert played == [[str(r), name, str(r)] for r, name in enumerate(chosen["names"])]
