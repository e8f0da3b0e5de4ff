"""Starting programs in an order: what is rewritten, what is refused, and real processes that find each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from meshwright.cli.frame import main
from meshwright.errors import FormatError, UnknownName, UsageError
from meshwright.run.executor.ordered import LaunchOrder, is_local, ordered, read_order, write_order

pytestmark = pytest.mark.timeout(280)
FOUR = LaunchOrder(names=("a", "b", "c", "d"), host=(0, 1, 2, 3), address=("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"), order=(2, 0, 3, 1))
TWICE = LaunchOrder(names=("a0", "a1", "b0", "b1"), host=(0, 0, 1, 1), address=("10.0.0.1",) * 2 + ("10.0.0.2",) * 2, order=(2, 3, 0, 1))
PYTHON = ["python", "x.py"]


def env(rank: int, size: int = 4, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", **more}


def on(address: str) -> dict[str, object]:
    return {"local": lambda x: x == address}


# ---- what is rewritten ------------------------------------------------------------------------------------------------
def test_every_process_gets_its_rank_and_all_agree_on_rank_0() -> None:
    for order in permutations(range(4)):
        launch = replace(FOUR, order=order)
        found = [ordered(launch, PYTHON, env(e), local=lambda x, e=e: x == FOUR.address[e])[1] for e in range(4)]
        assert sorted(int(x["RANK"]) for x in found) == [0, 1, 2, 3]
        assert [int(x["RANK"]) for x in found] == [order.index(e) for e in range(4)]
        assert {x["MASTER_ADDR"] for x in found} == {FOUR.address[order[0]]} and {x["MASTER_PORT"] for x in found} == {"29500"}


def test_the_machine_is_told_by_its_address_not_by_the_launchers_order() -> None:
    assert ordered(FOUR, PYTHON, env(3), **on("10.0.0.3"))[1]["RANK"] == "0"  # type: ignore[arg-type]


def test_local_ranks_stay() -> None:
    for local in range(2):
        _, found = ordered(TWICE, PYTHON, env(local, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", GROUP_RANK="0"), **on("10.0.0.1"))  # type: ignore[arg-type]
        assert found["RANK"] == str(2 + local) and found["LOCAL_RANK"] == str(local) and found["GROUP_RANK"] == "1"
        assert found["MASTER_ADDR"] == "10.0.0.2"


def test_the_agents_store_stays_where_it_is() -> None:
    _, found = ordered(FOUR, PYTHON, env(0, TORCHELASTIC_USE_AGENT_STORE="True"), **on("10.0.0.1"))  # type: ignore[arg-type]
    assert found["MASTER_ADDR"] == "10.0.0.1" and found["RANK"] == "1"


def test_without_addresses_the_rank_says_who_it_is_and_rank_0_stays() -> None:
    plain = replace(FOUR, address=("",) * 4, order=(0, 2, 1, 3))
    assert [ordered(plain, PYTHON, env(e))[1]["RANK"] for e in range(4)] == ["0", "2", "1", "3"]
    with pytest.raises(UsageError, match=r"rank 0 is c now .* no address") as caught:
        ordered(replace(plain, order=(2, 0, 1, 3)), PYTHON, env(1))
    assert "--first" in caught.value.hint


@pytest.mark.parametrize("start", [["torchrun"], ["/opt/bin/torchrun"], ["python3", "-m", "torch.distributed.run"]])
def test_torchrun_gets_its_node_rank_and_the_address_of_node_0(start: list[str]) -> None:
    told = ["--nnodes", "4", "--master_addr=10.0.0.1", "--node-rank", "0", "--master-port=29500", "--tee", "3"]
    words = [*start, *told, "train.py", "--node-rank", "x"]
    argv, found = ordered(FOUR, words, {"PATH": "/bin"}, **on("10.0.0.2"))  # type: ignore[arg-type]
    rest = ["--nnodes", "4", "--master-port=29500", "--tee", "3", "train.py", "--node-rank", "x"]
    assert argv == [*start, "--node-rank", "3", "--master-addr", "10.0.0.3", *rest] and found == {"PATH": "/bin"}


def test_torchrun_with_modules_and_several_workers() -> None:
    words = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--no-python", "prog", "--nnodes", "9"]
    argv, _ = ordered(TWICE, words, {}, **on("10.0.0.1"))  # type: ignore[arg-type]
    expected = ["--node-rank", "1", "--master-addr", "10.0.0.2", "--nnodes=2", "--nproc-per-node=2", "--no-python", "prog", "--nnodes", "9"]
    assert argv == ["torchrun", *expected]
    argv, _ = ordered(TWICE, ["torchrun", "--nnodes=2", "--nproc-per-node=2", "-m", "pkg", "-m"], {}, me="b0")
    assert argv[1:3] == ["--node-rank", "0"] and argv[-3:] == ["-m", "pkg", "-m"]


# ---- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("launch", "argv", "environment", "more", "text"),
    [
        (FOUR, [], env(0), {}, "nothing to run"),
        (FOUR, PYTHON, {}, {}, "RANK is not set"), (FOUR, PYTHON, env(0) | {"RANK": "x"}, {}, "RANK is 'x'"),
        (FOUR, PYTHON, env(0, 8), {}, r"4 ranks, this launch has WORLD_SIZE=8"),
        (FOUR, PYTHON, env(0), on("10.9.9.9"), r"none of the order's addresses \(10.0.0.1, "),
        (TWICE, PYTHON, env(0, LOCAL_RANK="2"), on("10.0.0.1"), "LOCAL_RANK is 2, but the order has 2"),
        (TWICE, PYTHON, env(0, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"), on("10.0.0.1"), "LOCAL_WORLD_SIZE is 4"),
        (TWICE, PYTHON, env(0, LOCAL_RANK="0"), {"me": "a1"}, "number 1 on its host"),
        (replace(TWICE, order=(0, 2, 1, 3)), PYTHON, env(0), {}, "not together"),
        (replace(TWICE, order=(1, 0, 2, 3)), PYTHON, env(0), {}, "change places"),
        (FOUR, ["torchrun", "--nnodes=2", "x.py"], {}, on("10.0.0.1"), "4 hosts, torchrun has --nnodes=2"),
        (FOUR, ["torchrun", "x.py"], {}, on("10.0.0.1"), "--nnodes=1"),
        (FOUR, ["torchrun", "--nnodes=1:4", "x.py"], {}, on("10.0.0.1"), "--nnodes=1:4"),
        (TWICE, ["torchrun", "--nnodes=2", "x.py"], {}, on("10.0.0.1"), "2 endpoints per host, torchrun has --nproc-per-node=1"),
        (FOUR, ["torchrun", "--nnodes=4", "--rdzv-backend=c10d", "x.py"], {}, on("10.0.0.1"), "c10d rendezvous gives out"),
        (FOUR, ["torchrun", "--standalone", "x.py"], {}, on("10.0.0.1"), "--standalone rendezvous"),
        (FOUR, ["torchrun", "--nnodes=4", "x.py"], {}, on("10.7.7.7"), "none of the order's addresses"),
        (replace(FOUR, address=("",) * 4), ["torchrun", "--nnodes=4", "x.py"], {}, {}, "no addresses"),
        (replace(FOUR, address=("",) * 4), ["torchrun", "--nnodes=4", "--master-addr=h", "x.py"], {}, {"me": "a"}, "node 0 is c's host"),
    ],
)  # fmt: skip
def test_a_launch_that_the_order_is_not_for_is_refused(
    launch: LaunchOrder, argv: Sequence[str], environment: Mapping[str, str], more: dict[str, object], text: str
) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        ordered(launch, argv, environment, **more)  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownName, match="no endpoint 'z'"):
        ordered(FOUR, PYTHON, env(0), me="z")


def test_addresses_of_this_machine() -> None:
    assert is_local("127.0.0.1") and not is_local("192.0.2.1") and not is_local("no such name.invalid")


# ---- the file ---------------------------------------------------------------------------------------------------------
def test_the_order_file_reads_back(tmp_path: Path) -> None:
    write_order(tmp_path / "o.json", TWICE)
    assert read_order(tmp_path / "o.json") == TWICE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"order": [0, 0, 1, 2]}, "every endpoint"), ({"order": [0]}, "every endpoint"), ({"endpoints": []}, "endpoints"), ({"version": 2}, "newer"),
        ({"schema": "x"}, "expected"), ({"more": 1}, "more"), ({"endpoints": [{"name": "a", "host": 0}] * 4}, "names of their own"),
    ],
)  # fmt: skip
def test_a_bad_order_file_is_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    path = tmp_path / "o.json"
    write_order(path, FOUR)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=text):
        read_order(path)


def test_the_command_shows_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.json"
    write_order(path, FOUR)
    for name, value in env(1).items():
        monkeypatch.setenv(name, value)
    assert main(["run", "ordered", "--order", str(path), "--as", "b", "--show", "--", "python", "x.py", "--lr", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["MASTER_ADDR=10.0.0.3", "RANK=3", "python x.py --lr 1"]
    assert main(["run", "ordered", "--order", str(path), "--as", "b", "--", "/no/such/program"]) == 2
    assert "cannot start '/no/such/program'" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert main(["run", "ordered", "--order", str(path), "--", "python"]) == 2
    assert "WORLD_SIZE=5" in capsys.readouterr().err


def test_collective_order_writes_what_run_ordered_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    words = ["collective", "order", "--fabric", "two-islands:2", "--devices", "0,2,1,3", "--each-device", "--save-order", str(path)]
    assert main(words) == 0 and str(path) in capsys.readouterr().out
    launch = read_order(path)
    assert launch.names == ("island0/cpu0", "island1/cpu0", "island0/cpu1", "island1/cpu1") and launch.address == ("",) * 4
    assert [launch.names[e].split("/")[0] for e in launch.order] in (["island0"] * 2 + ["island1"] * 2, ["island1"] * 2 + ["island0"] * 2)


# ---- real processes ----------------------------------------------------------------------------------------------------
@pytest.mark.real
def test_an_unmodified_program_sees_its_new_rank(tmp_path: Path) -> None:
    """Three processes, each on an address of its own of this machine, meet at rank 0's address and tell each other who they are."""
    path, script = tmp_path / "o.json", tmp_path / "job.py"
    addresses = ("127.0.7.1", "127.0.7.2", "127.0.7.3")
    write_order(path, LaunchOrder(names=("a", "b", "c"), host=(0, 1, 2), address=addresses, order=(1, 2, 0)))
    script.write_text(
        "import os, socket, sys\n"
        "rank, size, port = int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), int(os.environ['MASTER_PORT'])\n"
        "where = (os.environ['MASTER_ADDR'], port)\n"
        "if rank == 0:\n"
        "    with socket.create_server(where) as server:\n"
        "        server.settimeout(100)\n"
        "        print(sorted(server.accept()[0].makefile().readline().strip() for _ in range(size - 1)))\n"
        "else:\n"
        "    for _ in range(300):\n"
        "        try:\n"
        "            link = socket.create_connection(where, timeout=100)\n"
        "            break\n"
        "        except OSError:\n"
        "            import time; time.sleep(0.1)\n"
        "    link.sendall(f'rank {rank} was {sys.argv[1]}\\n'.encode())\n"
    )
    with socket.create_server(("127.0.7.2", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "meshwright", "run", "ordered", "--order", str(path)]
    running = []
    for rank, name in enumerate("abc"):
        environment = {**os.environ, **env(rank, 3), "MASTER_ADDR": addresses[0], "MASTER_PORT": str(port)}
        words = [*command, "--as", name, "--", sys.executable, str(script), name]
        running.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    done = [p.communicate(timeout=200) for p in running]
    assert [p.returncode for p in running] == [0, 0, 0], done
    assert done[1][0].strip() == "['rank 1 was c', 'rank 2 was a']"
