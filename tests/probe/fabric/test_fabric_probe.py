"""The probe of a fabric: streams between agents, files, the command, and a job that probes itself."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_networks import SyntheticNetwork, racks

from meshwright.cli.frame import main
from meshwright.decide.collective.cloudcollectives.cost import CostMatrix
from meshwright.drive.plans import read_fabric
from meshwright.errors import FormatError, RunError, Unsupported, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.toml import read_fabric_json, read_fabric_toml
from meshwright.probe.fabric import flow
from meshwright.probe.fabric.campaign import probe_fabric
from meshwright.probe.fabric.flow import stream, take
from meshwright.probe.fabric.infer import Inferred, infer_fabric
from meshwright.probe.fabric.measurements import Measurements, measurements_of_matrix, read_measurements, write_measurements
from meshwright.probe.fabric.network import AgentNetwork
from meshwright.probe.fabric.rank_order import Endpoint
from meshwright.probe.fabric.rank_order_agent import Agent
from meshwright.probe.fabric.report import probed_toml
from ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
TOKEN = "0123456789abcdef"
TIMES = {"warm_s": 0.05, "window_s": 0.1, "tail_s": 0.02}


@contextmanager
def agents(count: int, token: str = TOKEN) -> Iterator[list[Agent]]:
    served = [Agent("127.0.0.1", 0, token, 60.0) for _ in range(count)]
    threads = [threading.Thread(target=a.serve) for a in served]
    for thread in threads:
        thread.start()
    try:
        yield served
    finally:
        for agent, thread in zip(served, threads, strict=True):
            agent.stopped.set()
            thread.join(60)
            assert not thread.is_alive()


def ends(served: list[Agent]) -> list[Endpoint]:
    return [Endpoint(f"a{k}", "127.0.0.1", a.port, "127.0.0.1") for k, a in enumerate(served)]


# ---- streams -----------------------------------------------------------------------------------------------------------
def test_a_stream_is_counted_by_its_receiver() -> None:
    with agents(1) as (agent,):
        found = stream({"host": "127.0.0.1", "port": agent.port, "buffer_bytes": 1 << 17, **TIMES, "window_s": 2.0}, TOKEN, "127.0.0.1")
    assert found["bytes"] > 1 << 16 and 1.0 <= found["seconds"] <= 2.0 and 0 <= found["idle"] <= 1


class Told:
    """A reader whose clock goes on when it reads, and not otherwise; `comes(number of the read)` is done before."""

    def __init__(self, reader: BufferedReader, step_s: float, comes: Callable[[int], object], patched: pytest.MonkeyPatch) -> None:
        self.reader, self.step_s, self.comes, self.reads, self.fileno = reader, step_s, comes, 0, reader.fileno
        patched.setattr(flow, "time", SimpleNamespace(monotonic=lambda: self.reads * self.step_s))

    def readinto1(self, view: memoryview) -> int:
        self.reads += 1
        self.comes(self.reads)
        return self.reader.readinto1(view)


def test_a_slow_stream_is_counted_over_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes every 30 ms: those after the first within the window, over the time between them."""
    here, there = socket.socketpair()
    with here, there, here.makefile("rb") as reader:
        told = Told(reader, 0.03, lambda number: there.sendall(bytes(1000)), monkeypatch)
        found = take(told, {"warm_s": 0.05, "window_s": 0.12, "tail_s": 0.02})
    assert found["bytes"] == 3000 and found["seconds"] == pytest.approx(0.09)


def test_what_waited_for_a_late_reader_is_no_part_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that gets no processor for a while finds 100,000 bytes; while it counts, after the first read, 7,000 come."""
    monkeypatch.setattr(flow, "BLOCK_BYTES", 1 << 14)  # less than what waits
    here, there = socket.socketpair()
    there.sendall(bytes(100_000))
    with here, there, here.makefile("rb") as reader:

        def comes(number: int) -> None:
            if number <= 8:
                there.sendall(bytes(1000))
            else:
                there.shutdown(socket.SHUT_WR)

        found = take(Told(reader, 0.02, comes, monkeypatch), {"warm_s": 0.0, "window_s": 0.2, "tail_s": 0.02})
    assert found["bytes"] == 7000


def test_streams_without_the_token_or_an_agent_are_errors() -> None:
    with agents(1) as (agent,):
        assert "error" in stream({"host": "127.0.0.1", "port": agent.port, **TIMES}, "another token 123")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        assert "error" in stream({"host": "127.0.0.1", "port": silent.getsockname()[1], **TIMES}, TOKEN)


@pytest.mark.parametrize("bad", [{"warm_s": -1}, {"window_s": float("nan")}, {"tail_s": 1e9}])
def test_times_beyond_the_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at most together"):
        stream({"host": "127.0.0.1", "port": 9, **TIMES, **bad}, TOKEN)


def test_another_program_on_the_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link, contextlib.suppress(ConnectionResetError):  # whoever asked may have gone with our answer unread
                link.sendall(b"[1]\n")
                while link.recv(1 << 16):
                    continue

        thread = threading.Thread(target=answer)
        thread.start()
        found = stream({"host": "127.0.0.1", "port": server.getsockname()[1], **TIMES}, TOKEN)
        thread.join(60)
    assert "error" in found


def test_agents_run_transfers_at_once() -> None:
    with agents(3) as served:
        network = AgentNetwork(ends(served), TOKEN, echoes=5, warm_s=0.05, window_s=1.0)
        rtt = network.round_trips()
        rates = network.transfer([(0, 1), (1, 2), (2, 0)])
    assert rtt.shape == (3, 3) and (rtt == rtt.T).all() and (rtt[~np.eye(3, dtype=bool)] > 0).all()
    assert len(rates) == 3 and min(rates) > 0 and 0 <= network.idle <= 1 and "3 agents" in network.source


def test_an_agent_that_is_gone_is_named() -> None:
    with agents(2) as served, socket.socket() as silent:
        endpoints = ends(served)
        silent.bind(("127.0.0.1", 0))
        gone = Endpoint("gone", "127.0.0.1", silent.getsockname()[1])
        network = AgentNetwork([endpoints[0], gone], TOKEN, echoes=3)
        with pytest.raises(RunError, match="a0 cannot reach gone"):
            network.transfer([(0, 1)])
        with pytest.raises(RunError, match="no agent gone"):
            network.transfer([(1, 0)])
        with pytest.raises(RunError, match="a0 cannot reach gone"):
            network.round_trips()


# ---- files -------------------------------------------------------------------------------------------------------------
def known() -> tuple[Fabric, Measurements]:
    fabric = racks([[0, 2, 4], [1, 3, 5]], 400, 300)
    return fabric, probe_fabric(SyntheticNetwork(fabric), budget_s=1000)[0]


def test_measurements_read_back(tmp_path: Path) -> None:
    _, measured = known()
    for name in ("m.json", "m.json.gz"):
        write_measurements(tmp_path / name, measured)
        again = read_measurements(tmp_path / name)
        assert again.trials == measured.trials and again.held_out == measured.held_out and again.names == measured.names
        assert (again.rtt_s == measured.rtt_s).all() and any(again.held_out)
    assert gzip.decompress((tmp_path / "m.json.gz").read_bytes())[:1] == b"{"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"names": ["a"]}, "names"), ({"names": ["a", "a"]}, "twice"), ({"host": ["a"]}, "host"), ({"rtt_s": [[1.0]]}, "rtt_s"),
        ({"rtt_s": [[0, -1], [0, 0]]}, "rtt_s"), ({"idle": -1}, "idle"), ({"trials": []}, "trials"),
        ({"schema": "x"}, "schema"), ({"version": 9}, "newer"), ({"trials": [{"flows": [[0, 2]], "rate_Bps": [1]}]}, r"flows\[0\]"),
        ({"trials": [{"flows": [[1, 1]], "rate_Bps": [1]}]}, "different endpoints"),
        ({"trials": [{"flows": [[0, 1]], "rate_Bps": []}]}, "a rate for each"), ({"trials": [{"flows": [[0, 1]], "rate_Bps": [-1]}]}, "B/s"),
        ({"what": 1}, "what"),
    ],
)  # fmt: skip
def test_bad_measurements_are_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    document = {
        "schema": "meshwright.fabric-measurements", "version": 1, "names": ["a", "b"], "trials": [{"flows": [[0, 1]], "rate_Bps": [1.0]}],
    }  # fmt: skip
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document | change))
    with pytest.raises(FormatError, match=text):
        read_measurements(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        read_measurements(path)


def test_costs_are_pairs_alone_and_need_rates(tmp_path: Path) -> None:
    matrix = CostMatrix(names=("a", "b"), alpha_s=np.full((2, 2), 1e-5), beta_s_per_byte=np.full((2, 2), 1e-8), host=(0, 1), group=(0, 0))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(matrix.to_document()))
    measured = read_measurements(path)
    assert [t.rate_Bps for t in measured.trials] == [(pytest.approx(1e8),)] * 2 and measured.rtt_s[0, 1] == pytest.approx(2e-5)
    with pytest.raises(FormatError, match="no rate"):
        measurements_of_matrix(CostMatrix(names=("a", "b"), alpha_s=np.ones((2, 2)), beta_s_per_byte=np.zeros((2, 2)), host=(0, 1), group=(0, 0)))
    path.write_text(json.dumps(matrix.to_document() | {"address": ["x"]}))
    with pytest.raises(FormatError, match="address"):
        read_measurements(path)


# ---- the command ---------------------------------------------------------------------------------------------------------
def test_the_command_infers_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, measured = known()
    write_measurements(tmp_path / "m.json", measured)
    files = {x: str(tmp_path / x) for x in ("f.toml", "f.json", "costs.json")}
    assert main(["fabric", "probe", "--from", str(tmp_path / "m.json"), "-o", files["f.toml"], "--save-matrix", files["costs.json"], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "tree" and document["error"] < 0.05 and document["held_out_error"] < 0.05 and len(document["trunks"]) == 1
    fabric = read_fabric_toml(files["f.toml"])
    assert Path(files["f.toml"]).read_text().startswith("# measured") and len(fabric.switches) == 2
    assert main(["fabric", "probe", "--from", str(tmp_path / "m.json"), "-o", files["f.json"]]) == 0
    assert "trunk of d" in capsys.readouterr().out and read_fabric_json(files["f.json"]) == fabric
    assert main(["collective", "order", "--matrix", files["costs.json"], "--save-order", str(tmp_path / "o.json")]) == 0
    assert "2 groups" in capsys.readouterr().out


def test_the_command_writes_nothing_that_does_not_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = [{"flows": [[i, j]], "rate_Bps": [1e7]} for i in range(3) for j in range(3) if i != j]
    shared += [{"flows": [[i, j], [j, i]], "rate_Bps": [4e6, 4e6]} for i in range(3) for j in range(3) if i != j]
    path, out = tmp_path / "m.json", tmp_path / "f.toml"
    path.write_text(json.dumps({"schema": "meshwright.fabric-measurements", "version": 1, "names": ["a", "b", "c"], "trials": shared}))
    assert main(["fabric", "probe", "--from", str(path), "-o", str(out)]) == 4
    assert "does not explain" in capsys.readouterr().err and not out.exists()
    assert main(["fabric", "probe", "--from", str(path), "-o", str(out), "--unexplained", "1"]) == 0
    assert "unexplained" in out.read_text() and any(p.what == "unexplained" for p in read_fabric_toml(out).provenance)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "one source"), (["--from", "x", "--probe-local", "2"], "one source"), (["--probe-local", "1"], "2 to 64"),
        (["--probe", "a=h:1", "--probe", "b=h:2"], "secret"), (["--probe", "a=h:1", "--token-file", "/no/such"], "cannot read"),
        (["--from", "x", "-o", "x.csv"], ".toml or .json"), (["--from", "x", "--tolerance", "0"], "--tolerance"),
        (["--from", "x", "--unexplained", "2"], "--unexplained"), (["--from", "x", "--budget", "0"], "--budget"),
        (["--from", "/no/such"], "cannot read"),
        (["--from", "x", "--seed", "-1"], "--seed"), (["--from", "x", "--window", "0"], "--window"),
    ],
)  # fmt: skip
def test_bad_words_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", "probe", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_command_probes_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.toml"
    assert main(["fabric", "probe", "--probe-local", "2", "-o", str(out), "--window", "0.5", "--unexplained", "1"]) == 0
    fabric = read_fabric_toml(out)
    assert len(fabric.devices) == 2 and {x.kind for x in fabric.links} == {"LO"} and "one host" in capsys.readouterr().out


# ---- within a job ----------------------------------------------------------------------------------------------------------
def test_a_job_probes_itself(tmp_path: Path) -> None:
    out = tmp_path / "job.toml"
    port = str(free_port())
    worker = [sys.executable, "-m", "meshwright.probe.fabric.worker", "-o", str(out), "--window", "0.5", "--budget", "60", "--unexplained", "1"]
    running = []
    for rank in range(2):
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        running.append(subprocess.Popen(worker, env={**os.environ, **told}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    done = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0, 0], done
    fabric = read_fabric_toml(out)
    # On a busy machine half a round trip may be measured as long as a message of the library, which then adds nothing.
    assert [d.name for d in fabric.devices] == ["rank0", "rank1"] and len({x.library_latency_s for x in fabric.links}) == 1
    assert "one host" in done[0][0] and not done[1][0]


@pytest.mark.parametrize(("ping_s", "library_s"), [([5e-4, 3e-4], 1e-4), ([1e-4, 2e-4], 0.0)])
def test_what_the_library_adds_to_half_a_round_trip(ping_s: list[float], library_s: float) -> None:
    from meshwright.probe.fabric.job import _with_library

    ends = ("a", "b")
    measured = Measurements(names=ends, host=ends, address=ends, rtt_s=np.array([[0, 2e-4], [2e-4, 0]]), trials=(), held_out=())
    found = Inferred(fabric=read_fabric("laptop:2"), kind="direct", trunks=(), checks=(), at_least=(), latency_error=0.0)
    told, fabric = _with_library((measured, found), ping_s)
    assert told.library_latency_s == library_s and {x.library_latency_s for x in fabric.fabric.links} == {library_s}


def test_a_job_of_one_rank_or_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from meshwright.probe.fabric.job import probe_group

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="at least two endpoints"):
            probe_group()
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        with pytest.raises(Unsupported, match="needs a gloo group, not nccl"):
            probe_group()
    finally:
        dist.destroy_process_group()


def test_the_address_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.probe.fabric.job import own_address

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RunError, match="no IPv4 address of interface 'nosuch0'"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_ranks_learn_why_rank_0_failed(tmp_path: Path) -> None:
    """A budget that is too small: rank 0 says so, and the others say that it was rank 0."""
    port = free_port()
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        "from meshwright.errors import MeshwrightError\n"
        "from meshwright.probe.fabric import job as fabric_job\n"
        "dist.init_process_group('gloo')\n"
        "try:\n"
        "    fabric_job.probe_group(tolerance=2.0)\n"
        "except MeshwrightError as error:\n"
        "    print(type(error).__name__, error)\n"
        "dist.destroy_process_group()\n"
    )
    running = []
    for rank in range(2):
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        running.append(subprocess.Popen([sys.executable, str(script)], env={**os.environ, **told}, stdout=subprocess.PIPE, text=True))
    said = [p.communicate(timeout=120)[0] for p in running]
    assert said[0].startswith("UsageError tolerance") and said[1].startswith("RunError the probe failed on rank 0: tolerance")


def test_a_name_that_no_device_can_have_is_refused() -> None:
    _, measured = known()
    odd = replace(measured, names=("a b", *measured.names[1:]))
    with pytest.raises(FormatError, match="blanks"):
        probed_toml(odd, infer_fabric(odd), 0.1)
