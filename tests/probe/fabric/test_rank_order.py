"""The rank-order probe: tournaments, real agents on this machine, orders that carry no token, broken ends; and the command."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.frame import main
from meshwright.errors import RunError, RunTimeout, UsageError
from meshwright.probe.fabric import rank_order_agent
from meshwright.probe.fabric.rank_order import Endpoint, local_agents, parse_endpoint, probe, tournament
from meshwright.probe.fabric.rank_order_agent import Agent, both_on_one_port, measure

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
TOKEN = "0123456789abcdef"


@contextmanager
def agent(host: str = "127.0.0.1", token: str = TOKEN) -> Iterator[Agent]:
    served = Agent(host, 0, token, 60.0)
    thread = threading.Thread(target=served.serve)
    thread.start()
    try:
        yield served
    finally:
        served.stopped.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not [t for t in threading.enumerate() if "_echo" in t.name], "a thread waits on for echoes"


@contextmanager
def slow_way(to: int, delay_s: float) -> Iterator[int]:
    """A relay for datagrams and connections that holds every datagram back: the port of the slow way to an agent."""
    tcp, udp = both_on_one_port(socket.AF_INET, "127.0.0.1", 0)
    udp.settimeout(0.1)
    stop = threading.Event()

    def relay() -> None:
        behind = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        behind.connect(("127.0.0.1", to))
        behind.settimeout(10.0)
        while not stop.is_set():
            try:
                data, sender = udp.recvfrom(2048)
                time.sleep(delay_s)
                behind.send(data)
                udp.sendto(behind.recv(2048), sender)
            except TimeoutError:
                continue
        behind.close()

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield udp.getsockname()[1]
    finally:
        stop.set()
        thread.join(60)
        udp.close()
        tcp.close()


@pytest.mark.parametrize("n", range(2, 12))
def test_in_a_tournament_all_meet_once_and_nobody_twice_at_a_time(n: int) -> None:
    rounds = tournament(n)
    assert len(rounds) == (n - 1 if n % 2 == 0 else n)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(i, j) for i in range(n) for j in range(i + 1, n)]
    assert all(len({x for pair in pairs for x in pair}) == 2 * len(pairs) for pairs in rounds)


def test_agents_on_this_machine_are_probed_both_ways() -> None:
    with local_agents(4) as (endpoints, token):
        found = probe(endpoints, token, echoes=20, bursts=2, burst_bytes=1 << 18)
    off = ~np.eye(4, dtype=bool)
    assert (found.matrix.alpha_s[off] > 0).all() and (found.matrix.alpha_s == found.matrix.alpha_s.T).all()
    assert (found.matrix.beta_s_per_byte[off] >= 0).all() and found.matrix.names == ("local0", "local1", "local2", "local3")
    assert found.matrix.host == (0, 1, 2, 3) and found.echoes == 20


def test_a_delay_on_one_way_shows_and_a_low_percentile_ignores_the_rest() -> None:
    with agent() as near, slow_way(near.port, 0.2) as far:
        quick = measure("127.0.0.1", near.port, TOKEN, echoes=20, bursts=0, burst_bytes=1)
        slow = measure("127.0.0.1", far, TOKEN, echoes=10, bursts=0, burst_bytes=1)
    assert np.percentile(slow["rtt_s"], 10) >= 0.2 > np.percentile(quick["rtt_s"], 10)
    assert len(quick["rtt_s"]) == 20 and quick["burst_s"] == []


def test_an_agent_obeys_only_with_its_token_and_bounds_what_it_does() -> None:
    with agent() as served:
        def say(text: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", served.port), timeout=100) as link:
                link.sendall(text + b"\n")
                return link.recv(4096)

        assert say(json.dumps({"token": "wrong", "do": "stop"}).encode()) == b""
        assert say(b"[]") == say(b"nonsense") == say(json.dumps({"token": TOKEN, "do": "probe"}).encode()) == b""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            link.connect(("127.0.0.1", served.port))
            link.settimeout(100)
            link.send(bytes(1000))  # too long to be sent back
            link.send(b"hello")
            assert link.recv(2048) == b"hello"
        assert json.loads(say(json.dumps({"token": TOKEN, "do": "stop"}).encode())) == {"ok": True}


def test_a_port_whose_other_half_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Free for TCP and somebody's for UDP: another port is picked, unless this one was asked for."""
    secret = tmp_path / "secret"
    secret.write_text(TOKEN)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as somebody:
        somebody.bind(("127.0.0.1", 0))
        taken = somebody.getsockname()[1]
        picked: list[int] = []

        class Unlucky(socket.socket):
            def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
                unlucky = address[1] == 0 and not picked
                super().bind((address[0], taken) if unlucky else address)
                picked.append(self.getsockname()[1])

        with monkeypatch.context() as patch:
            patch.setattr(rank_order_agent.socket, "socket", Unlucky)
            tcp, udp = both_on_one_port(socket.AF_INET, "127.0.0.1", 0)
        with tcp, udp:
            assert picked[0] == taken and tcp.getsockname() == udp.getsockname() != somebody.getsockname()
        with pytest.raises(OSError, match="in use"):
            both_on_one_port(socket.AF_INET, "127.0.0.1", taken)
        monkeypatch.setattr("sys.argv", ["agent", "--port", str(taken), "--token-file", str(secret)])
        with pytest.raises(SystemExit):
            rank_order_agent.main()
        assert f"cannot listen on 127.0.0.1 port {taken}" in capsys.readouterr().err


def test_missing_and_deaf_ends_are_named() -> None:
    with agent() as served:
        here = Endpoint("here", "127.0.0.1", served.port)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = Endpoint("nobody", "127.0.0.1", taken.getsockname()[1])
            with pytest.raises(RunError, match=r"nobody|here cannot reach"):
                probe([here, nobody], TOKEN, echoes=1)
            with pytest.raises(RunError, match="no agent nobody"):
                probe([nobody, here], TOKEN, echoes=1)
        with pytest.raises(RunError, match="closed the connection"):
            probe([here, Endpoint("again", "127.0.0.1", served.port)], "f" * 16, echoes=1)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = [Endpoint(name, "127.0.0.1", silent.getsockname()[1]) for name in "ab"]
        with pytest.raises(RunTimeout):
            probe(mute, TOKEN, echoes=1, limit_s=0.3)


def test_what_is_no_probe_is_refused() -> None:
    one = Endpoint("a", "127.0.0.1", 1)
    for endpoints, more in (([one], {}), ([one, one], {}), ([one, Endpoint("b", "127.0.0.1", 2)], {"echoes": 0})):
        with pytest.raises(UsageError):
            probe(endpoints, TOKEN, **more)
    assert parse_endpoint("n0=10.0.0.1:70") == Endpoint("n0", "10.0.0.1", 70, "10.0.0.1")
    assert parse_endpoint("[::1]:70") == Endpoint("[::1]:70", "::1", 70, "::1")
    for bad in ("", "host", "host:", ":7", "host:0", "host:99999", "host:http"):
        with pytest.raises(UsageError):
            parse_endpoint(bad)


# ---- the command -----------------------------------------------------------------------------------------------------------
def command(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    assert main(["collective", "order", *words, "--json"]) == code
    out, err = capsys.readouterr()
    return json.loads(out if code == 0 else err)


def test_orders_for_a_fabric_and_what_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("hosts", "ranks", "matrix.json")]
    shuffled = "0,4,1,5,2,6,3,7"
    flags = ["--hostfile", files[0], "--assignment", files[1], "--save-matrix", files[2]]
    found = command(capsys, "--fabric", "two-islands:4", "--devices", shuffled, "--each-device", *flags)
    row = found["rows"][0]
    assert row["gain"] > 3.5 and row["verdict"] == "worth it" and row["proof"] and found["schema"] == "meshwright.rank-order"
    assert Path(files[0]).read_text().split() == row["names"]
    assert sorted(line.split("RANK=")[1] for line in Path(files[1]).read_text().splitlines()) == [str(i) for i in range(8)]
    again = command(capsys, "--matrix", files[2])
    assert again["rows"][0]["order"] == row["order"] and again["endpoints"] == found["endpoints"]
    best = command(capsys, "--matrix", files[2], "--algorithm", "best", "--sizes", "1KiB,64MiB", "--budget", "200", "--first", row["names"][3])
    assert len(best["rows"]) == 2 and all(r["names"][0] == row["names"][3] for r in best["rows"])
    assert main(["collective", "order", "--fabric", "two-islands:2"]) == 0
    assert "no gain" in capsys.readouterr().out


def test_a_local_probe_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = command(capsys, "--probe-local", "3", "--echoes", "10")
    assert found["endpoints"] == ["local0", "local1", "local2"] and "probed" in found["source"]


@pytest.mark.parametrize(
    "words",
    [
        [], ["--fabric", "laptop:2", "--matrix", "x"], ["--devices", "0,1", "--probe-local", "2"], ["--fabric", "laptop:3", "--devices", "0,0"],
        ["--fabric", "laptop:3", "--devices", "0,7"], ["--fabric", "laptop:3", "--devices", "0"], ["--fabric", "laptop:3", "--sizes", "big"],
        ["--fabric", "laptop:3", "--sizes", "8MiB:1MiB"], ["--fabric", "laptop:3", "--algorithm", "quantum"], ["all-round", "--fabric", "laptop:3"],
        ["--fabric", "laptop:3", "--first", "nobody"], ["--probe", "a=b:1"], ["--probe-local", "1"], ["--probe", "x", "--token-file", "/nowhere"],
        ["--fabric", "laptop:3", "--budget", "0"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_words_end_with_two(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert command(capsys, *words, code=2)["message"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1, "schema": 2}', '{"schema": "meshwright.rank-costs", "version": 1, "names": ["a", "b"]}', "[" * 100_000]
)
def test_wrong_matrix_files_end_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    assert "m.json" in command(capsys, "--matrix", str(path), code=1)["where"]


def test_nccl_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "nccl", "all-reduce", "--fabric", "dgx-h100:2", "--sizes", "1KiB:1MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 11 and document["rows"][0]["protocol"] == "LL" and len(document["rows"][0]["table"]) == 15
    assert main(["collective", "nccl", "all-reduce", "--fabric", "dgx-h100:2", "--sizes", "1MiB", "--all"]) == 0
    text = capsys.readouterr().out
    assert "NCCL's own model" in text and "needs CollNet" in text
    for words in (["all-to-all", "--fabric", "dgx-h100:1"], ["all-reduce", "--fabric", "laptop:2"], ["fold", "--fabric", "dgx-h100:1"],
                  ["all-reduce", "--fabric", "dgx-h100:1", "--sizes", "0"], ["all-reduce", "--fabric", "dgx-h100:1", "--algo", "hex"]):  # fmt: skip
        assert main(["collective", "nccl", *words]) == 2
        assert "error:" in capsys.readouterr().err
