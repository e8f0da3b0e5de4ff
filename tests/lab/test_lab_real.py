"""Real labs: namespaces, shaped links, processes in them, and nothing left of any of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab_fabrics import both, devices, one_way_ring, parting_routes, preset

from meshwright.cli.frame import main
from meshwright.decide.experts import Choice, ExpertProblem, ExpertShape
from meshwright.drive.experts import LayerPrograms, rank_choices
from meshwright.errors import Interrupted, RankFailed, RunError, RunTimeout, UnknownName, Unsupported, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.toml import fabric_toml
from meshwright.lab import Lab, build
from meshwright.lab.calibrate import calibrate
from meshwright.lab.impair import has_netem
from meshwright.lab.planning import Options, plan_lab
from meshwright.lab.state import claim, known_labs, read_state, remove
from meshwright.run.machine.cpu_quota import quota_place

pytestmark = [pytest.mark.lab, pytest.mark.timeout(280)]

STAR = "star:3?link=12.5MB/s"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@pytest.fixture(scope="module", autouse=True)
def privileges(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = os.environ.get("MESHWRIGHT_LAB_DIR")
    os.environ["MESHWRIGHT_LAB_DIR"] = str(tmp_path_factory.mktemp("trial"))
    try:
        Lab.up("star:1?link=1MB/s", verify=False).down()
    except Unsupported as error:
        pytest.skip(f"no lab can be built here: {error.message}")
    finally:
        if before is None:
            del os.environ["MESHWRIGHT_LAB_DIR"]
        else:
            os.environ["MESHWRIGHT_LAB_DIR"] = before


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Labs of their own for every test, none of which may be left."""
    monkeypatch.setenv("MESHWRIGHT_LAB_DIR", str(tmp_path))
    yield tmp_path
    left = known_labs()
    for folder in left:
        if (folder / "state.json").exists():
            build.stop_holder(read_state(folder))
    assert not left


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = str(tmp_path_factory.mktemp("star"))
    before = os.environ.get("MESHWRIGHT_LAB_DIR")
    os.environ["MESHWRIGHT_LAB_DIR"] = folder
    try:
        lab = Lab.up(STAR, name="star")
    finally:
        os.environ.pop("MESHWRIGHT_LAB_DIR") if before is None else os.environ.__setitem__("MESHWRIGHT_LAB_DIR", before)
    with lab:
        yield lab


def members(pid_namespace: str) -> list[int]:
    """Processes in a PID namespace, seen from outside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str((entry / "ns" / "pid").readlink()) == pid_namespace and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def pid_namespace(lab: Lab) -> str:
    return str(Path(f"/proc/{lab.state.holder}/ns/pid").readlink())


def outside() -> dict[str, Any]:
    """Everything of this machine that a lab might be thought to touch."""
    found: dict[str, Any] = {}
    for command in ("ip -j addr", "ip -j route show table all", "ip -j rule"):
        words = command.split()
        text = subprocess.run(words, capture_output=True, text=True, check=True, env={"PATH": PATH}).stdout
        found[command] = [{k: v for k, v in x.items() if "life_time" not in k} for x in json.loads(text)] if "-j" in words and text else None
    found["names"] = [x for x in Path("/run/netns").iterdir() if x.name.startswith("mw-")] if Path("/run/netns").is_dir() else []
    found["qdiscs"] = [(x["kind"], x["dev"]) for x in json.loads(subprocess.run(["tc", "-j", "qdisc"], capture_output=True, check=True, env={"PATH": PATH}).stdout)]  # noqa: E501
    found["settings"] = {str(p): p.read_text() for p in sorted(Path("/proc/sys/net/ipv4").glob("conf/*/*")) + [Path("/proc/sys/net/ipv4/ip_forward")]}
    found["hosts"] = Path("/etc/hosts").read_bytes()
    found["etc/netns"] = sorted(Path("/etc/netns").iterdir()) if Path("/etc/netns").exists() else None
    found["mounts"] = [x for x in Path("/proc/self/mountinfo").read_text().splitlines() if "/netns" not in x or "/mw-" in x]
    found["hostname"] = socket.gethostname()
    return found


# ---- what a lab is -----------------------------------------------------------------------------------------------------
def test_every_link_was_measured(star: Lab) -> None:
    assert star.state.verified
    for link in star.state.links:
        assert abs(link.goodput_Bps / link.ceiling_Bps - 1) <= 0.03
        assert 0 < link.round_trip_s < 0.1
    assert [x.rate_Bps for x in star.measured_fabric.links] == [x.goodput_Bps for x in star.state.links]
    assert star.as_measured(star.fabric).links == star.measured_fabric.links
    assert [x.burst_bytes for x in star.fabric.links] == [x.burst_bytes for x in star.state.links]


def test_an_expert_layer_is_predicted_on_what_the_links_pass(
    star: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers take 4 % of a link's rate: predictions of the nominal rates were short by that."""
    (tmp_path / "star.toml").write_text(fabric_toml(star.fabric))
    words = ["--experts", "3", "--model-dim", "64", "--inner", "16", "--capacities", "64", "--chunks", "1", "--degrees", "1"]
    with monkeypatch.context() as here:
        here.setenv("MESHWRIGHT_LAB_DIR", str(star.folder.parent))
        line = ["experts", "bench", "--fabric", str(tmp_path / "star.toml"), *words, "--algorithms", "linear", "--steps", "1", "--lab", star.name]
        assert main([*line, "--json"]) == 0
    ranks, shape = tuple(d.name for d in star.fabric.devices), ExpertShape(ranks=3, experts=3, model=64, inner=16)
    problems = (ExpertProblem(fabric=f, ranks=ranks, shape=shape, capacities=(64,)) for f in (star.fabric, star.measured_fabric))
    nominal, real = (rank_choices(p, LayerPrograms(p.fabric, ranks, shape), [Choice(1, 1, "linear")], 64) for p in problems)
    assert json.loads(capsys.readouterr().out)["capacities"][0][0]["time_s"] == real[0].time_s > nominal[0].time_s


def test_ranks_find_their_environment(star: Lab) -> None:
    words = "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS $MESHWRIGHT_LAB $MESHWRIGHT_DEVICE $(hostname)"
    result = star.run(["sh", "-c", f"echo {words}; test -f $MESHWRIGHT_FABRIC"], order=[2, 0, 1])
    assert result.returncodes == [0, 0, 0]
    assert result.machine is not None and result.machine.own_s >= 0
    assert [out.decode().split() for out in result.outputs] == [
        [str(rank), "3", "0", "10.77.0.3", "eth0", "1", "star", f"d{device}", f"d{device}"] for rank, device in enumerate([2, 0, 1])
    ]


def test_several_ranks_on_a_device(star: Lab) -> None:
    result = star.run(["sh", "-c", "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MESHWRIGHT_DEVICE"], ranks=[0, 2], per_device=2)
    assert [out.decode().split() for out in result.outputs] == [
        ["0", "4", "0", "2", "0", "d0"], ["1", "4", "1", "2", "0", "d0"], ["2", "4", "0", "2", "1", "d2"], ["3", "4", "1", "2", "1", "d2"],
    ]  # fmt: skip


def test_names_resolve_both_ways_inside(star: Lab) -> None:
    code = "import socket; print(socket.gethostbyname('d1'), socket.gethostbyaddr('10.77.0.3')[0], socket.gethostbyname('localhost'))"
    assert star.run([sys.executable, "-c", code], ranks=[0]).outputs == [b"10.77.0.2 d2 127.0.0.1\n"]


SEND = """
import os, socket, sys
size = int(sys.argv[1])
if os.environ["RANK"] == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    peer, _ = server.accept()
    got = 0
    while got < size:
        got += len(peer.recv(1 << 20))
    peer.send(b"x")
else:
    for _ in range(500):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=100)
            break
        except ConnectionRefusedError:
            import time
            time.sleep(0.01)
    peer.sendall(bytes(size))
    peer.recv(1)
"""


def test_counters_show_what_was_sent(star: Lab) -> None:
    size = 2_000_000
    before = star.counters()
    star.run([sys.executable, "-c", SEND, str(size)], ranks=[0, 1], timeout_s=150)
    sent = {name: count - before[name] for name, count in star.counters().items()}
    for name in ("d1->hub", "hub->d0"):
        assert size <= sent[name].bytes <= 1.05 * size
        assert size * 1514 / 1448 <= sent[name].wire_bytes <= 1.1 * size  # what the shaper counts has all headers
    assert sent["d2->hub"].bytes < 1000 and sent["d0->hub"].bytes < 0.05 * size


def test_packets_take_the_fabrics_routes() -> None:
    size = 500_000
    with Lab.up(parting_routes(), verify=False) as lab:
        for src in ("d0", "d2"):
            before = lab.counters()
            lab.run([sys.executable, "-c", SEND, str(size)], order=[1, lab.device_number(src)], ranks=[1, lab.device_number(src)], timeout_s=150)
            used = {name for name, count in lab.counters().items() if (count - before[name]).bytes > 0.9 * size}
            route = lab.fabric.route(lab.device_number(src), 1)
            assert used == {lab.link_name(x) for x in route}
        assert {lab.link_name(x) for x in lab.fabric.route(0, 1)} != {lab.link_name(x) for x in lab.fabric.route(2, 1)}


def test_one_way_links_are_measured_and_used_one_way() -> None:
    with Lab.up(one_way_ring()) as lab:
        assert all(abs(x.goodput_Bps / x.ceiling_Bps - 1) <= 0.03 for x in lab.state.links)
        lab.run([sys.executable, "-c", SEND, "100000"], ranks=[0, 1], timeout_s=150)


def test_nothing_outside_is_touched() -> None:
    before = outside()
    with Lab.up(preset("dgx1-v100:1", "0-2"), scale=8000, verify=False) as lab:
        lab.run(["true"])
        during = outside()
        lab.cut("box0/gpu0")
    assert before == during == outside()


# ---- device speed ------------------------------------------------------------------------------------------------------
def test_declared_shares_are_kept() -> None:
    fabric = preset("star:2?link=12.5MB/s")
    fabric = replace(fabric, devices=(replace(fabric.devices[0], cpu_share=0.25), fabric.devices[1]))
    with Lab.up(fabric, verify=False) as lab:
        assert lab.state.pacing == ("quota" if quota_place() is not None else "paced")
        code = "cat /proc/self/cgroup; echo share=$MESHWRIGHT_CPU_SHARE pacing=$MESHWRIGHT_CPU_PACING"
        slow, whole = (out.decode() for out in lab.run(["sh", "-c", code]).outputs)
        assert f"share=0.25 pacing={lab.state.pacing}" in slow
        assert "share= pacing=" in whole
        if lab.state.pacing == "quota":
            with lab.popen(0, ["cat", "/proc/self/cgroup"], stdout=subprocess.PIPE) as one:
                assert f"meshwright-{os.getpid()}-".encode() in one.communicate(100)[0]
            assert f"meshwright-{os.getpid()}-" in slow
            assert f"meshwright-{os.getpid()}-" not in whole


# ---- delay and loss ----------------------------------------------------------------------------------------------------
def test_delay_and_loss_are_real() -> None:
    """Both are verified while the lab is built: goodput of what is not lost within 3 %, the round trip within a tenth and 2 ms."""
    links = (*both("d0", "d1", 1_250_000, 0.02), *both("d1", "d2", 1_250_000))
    with Lab.up(Fabric(name="late", devices=devices(3), links=links), loss={"d1->d2": 0.1}) as lab:
        assert lab.state.method == ("netem" if has_netem(PATH) else "relay")
        late = lab.state.links[0]
        assert 0.04 <= late.round_trip_s <= 0.046
        relays = [pid for pid in members(pid_namespace(lab)) if b"meshwright.lab.relay" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(relays) == (lab.state.method == "relay")
        assert {os.sched_getscheduler(pid) for pid in relays} <= {os.SCHED_OTHER}  # though tests run as batches: it runs as soon as it wakes
        assert lab.state.links[2].ceiling_Bps == pytest.approx(0.9 * 1_250_000 * 1472 / 1514, rel=1e-3)
        lab.run([sys.executable, "-c", SEND, "200000"], ranks=[0, 1], timeout_s=150)


# ---- faults ------------------------------------------------------------------------------------------------------------
LISTEN = "import socket, sys; s = socket.create_server(('', 7000)); print('up', flush=True)\nwhile True: s.accept()[0].send(b'x')"
ASK = "import socket, sys; s = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])); sys.exit(s.recv(1) != b'x')"


def test_a_link_is_cut_and_restored(star: Lab) -> None:
    with star.popen(0, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"

        def reaches(limit_s: str = "100") -> bool:
            with star.popen("d1", [sys.executable, "-c", ASK, star.address(0), limit_s], stderr=subprocess.DEVNULL) as asks:
                return asks.wait(150) == 0

        assert reaches()
        star.cut("d1->hub")
        star.cut("d1->hub")  # again: nothing changes
        dropped = star.counters()["d1->hub"].drops
        assert not reaches("1")
        assert star.counters()["d1->hub"].drops > dropped
        assert read_state(star.folder).links[star.links_named("d1->hub")[0]].cut
        star.restore("d1")
        assert reaches()


def test_rates_change_live(star: Lab) -> None:
    star.set_rate("d0->hub", 125_000)

    def rates() -> list[int]:
        shown = json.loads(star.control.read([["tc", "-n", star.state.namespaces[0], "-j", "qdisc"]])[0])
        return [x["options"]["rate"] for x in shown if x["kind"] == "tbf"]

    assert rates() == [125_000]
    star.restore("d0->hub")
    assert rates() == [12_500_000]
    with pytest.raises(UsageError, match="at least 1 B/s"):
        star.set_rate("d0->hub", 0)
    with pytest.raises(UnknownName, match="no device, switch or server"):
        star.cut("d9")


def test_signals_reach_the_process(star: Lab) -> None:
    with star.popen(1, ["sleep", "100"]) as process:
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"sleep\x00100\x00"
        process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
        assert process.wait(60) == -9
        process.kill()  # it is gone: nothing happens


def test_output_and_exit_code_of_one_process(star: Lab) -> None:
    with star.popen(2, ["sh", "-c", "echo out; echo err >&2; exit 3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.communicate(100) == (b"out\n", b"err\n")
        assert process.returncode == 3
    with pytest.raises(UsageError, match="cannot start 'no-such-program'"):
        star.popen(0, ["no-such-program"])
    with pytest.raises(UsageError, match="no device 'd7'"):
        star.popen("d7", ["true"])


# ---- ends --------------------------------------------------------------------------------------------------------------
FORKS = "setsid sh -c 'sleep 1000 & sleep 1000' & (trap '' TERM; sleep 1000) & "  # children in sessions of their own, and deaf ones


def test_the_first_failure_ends_all_and_names_itself(star: Lab) -> None:
    with pytest.raises(RankFailed, match="rank 1 ended with 7") as caught:
        star.run(["sh", "-c", FORKS + "if [ $RANK = 1 ]; then echo bad luck; exit 7; fi; wait"], timeout_s=150)
    assert caught.value.hint == "its last line of output: bad luck"
    assert len(members(pid_namespace(star))) == 1


def test_ranks_end_at_the_time_limit(star: Lab) -> None:
    with pytest.raises(RunTimeout, match=r"ranks 0, 2 still ran after 10 s"):
        star.run(["sh", "-c", FORKS + "if [ $RANK = 1 ]; then exit 0; fi; wait"], timeout_s=10.0)
    assert len(members(pid_namespace(star))) == 1


def test_nothing_to_run(star: Lab) -> None:
    with pytest.raises(UsageError, match="nothing to run"):
        star.run([])
    with pytest.raises(UsageError, match="cannot start"):
        star.run(["no-such-program"])
    assert len(members(pid_namespace(star))) == 1


def test_one_run_ends_without_the_other(star: Lab) -> None:
    with star.popen(0, ["sleep", "1000"], run="a") as a, star.popen(0, ["sh", "-c", FORKS + "wait"], run="b") as b:
        star.end("b")
        assert b.wait(60) == -9
        assert a.poll() is None
        assert len(members(pid_namespace(star))) == 2


def test_down_takes_everything_along() -> None:
    lab = Lab.up(STAR, verify=False)
    space = pid_namespace(lab)
    process = lab.popen(0, ["sh", "-c", FORKS + "wait"])
    lab.down()
    assert process.wait(60) == -9
    process.close()
    until(lambda: not members(space))
    assert not known_labs()
    with pytest.raises(RunError, match="is gone"):
        lab.counters()


def test_a_killed_holder_takes_everything_along(own_folder: Path) -> None:
    lab = Lab.up(STAR, verify=False, name="one")
    space = pid_namespace(lab)
    process = lab.popen(0, ["sh", "-c", FORKS + "wait"])
    os.kill(lab.state.holder, signal.SIGKILL)
    assert process.wait(60) == -9
    process.close()
    until(lambda: not members(space))
    with pytest.raises(RunError, match="is gone"):
        lab.popen(0, ["true"])
    with pytest.raises(RunError, match="is gone"):
        Lab.open("one")
    assert "one" in build.collect()
    assert not list(own_folder.iterdir())
    lab.close()


OWNER = """
import sys, time
from meshwright.lab import Lab
lab = Lab.up(sys.argv[1], verify=False, name="one")
process = lab.popen(0, ["sh", "-c", sys.argv[2] + "wait"])
print(lab.state.holder, flush=True)
time.sleep(1000)
"""


def test_a_killed_owner_takes_its_lab_along() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, STAR, FORKS], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    holder = int(owner.stdout.readline())
    space = str(Path(f"/proc/{holder}/ns/pid").readlink())
    try:
        until(lambda: len(members(space)) > 3)
        assert "one" not in build.collect()  # it lives
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    until(lambda: not members(space))
    assert build.collect() == ["one"]


def test_an_owner_that_just_ends_cleans_up() -> None:
    code = OWNER.replace("time.sleep(1000)", "")
    subprocess.run([sys.executable, "-c", code, STAR, FORKS], check=True, capture_output=True, timeout=200)
    assert not known_labs()


def test_a_builder_killed_at_any_moment_leaves_nothing(own_folder: Path) -> None:
    for after_s in (0.15, 0.2, 0.25, 0.3, 0.4):
        builder = subprocess.Popen([sys.executable, "-m", "meshwright", "lab", "up", STAR, "--name", "one"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: E501
        time.sleep(after_s)
        builder.kill()
        builder.wait()
        until(lambda: not holders_of(own_folder))
        for folder in known_labs():  # a folder that was claimed and not written is left alone while it is young
            os.utime(folder, (time.time() - 3600,) * 2)
        build.collect()
        assert not known_labs()


def holders_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [x for x in found if x != os.getpid()]


# ---- the command line --------------------------------------------------------------------------------------------------
def shell(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", "lab", *words]


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["--json", "lab", *words]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def test_a_lab_from_up_to_down(capsys: pytest.CaptureFixture[str]) -> None:
    up = document(capsys, "up", STAR, "--name", "one")
    assert up["verified"] and up["alive"] and up["owner"] == 0
    assert main(["lab", "up", STAR, "--name", "one"]) == 2
    assert "a lab is called 'one' already" in capsys.readouterr().err
    assert document(capsys, "show")["labs"][0]["alive"]
    ran = document(capsys, "run", "one", "--counters", "--", "sh", "-c", "echo $RANK")
    assert 0 <= ran["machine"]["others"] <= 1
    assert ran["returncodes"] == [0, 0, 0] and set(ran["counters"]) == {x["name"] for x in up["links"]}
    assert main(["lab", "run", "one", "--", "sh", "-c", "exit $((RANK * 5))"]) in (5, 10)
    assert "failed first: exit" in capsys.readouterr().out
    assert document(capsys, "fault", "one", "cut", "d0<->hub")["links"] == [
        {"link": "d0->hub", "rate_Bps": 12_500_000, "cut": True}, {"link": "hub->d0", "rate_Bps": 12_500_000, "cut": True},
    ]  # fmt: skip
    assert [x["cut"] for x in document(capsys, "show", "one")["links"]] == [True, True, False, False, False, False]
    assert document(capsys, "fault", "one", "restore", "d0")["links"][0]["cut"] is False
    assert document(capsys, "fault", "one", "rate", "d0->hub", "1Mbit/s")["links"][0]["rate_Bps"] == 125_000
    for words in (["rate", "d0->hub"], ["cut", "d0->hub", "1Mbit/s"], ["rate", "d0->hub", "fast"]):
        assert main(["lab", "fault", "one", *words]) == 2
    assert document(capsys, "gc")["removed"] == []
    assert document(capsys, "down", "one")["was_alive"]
    assert main(["lab", "down", "one"]) == 2
    assert "no lab is called 'one'" in capsys.readouterr().err


def test_a_dry_run_makes_nothing(capsys: pytest.CaptureFixture[str], own_folder: Path) -> None:
    lines = document(capsys, "up", "two-islands:2", "--dry-run")["commands"]
    assert lines[0].startswith("unshare ") and sum("tbf" in x for x in lines) == 10
    assert main(["lab", "up", "two-islands:2", "--dry-run", "--name", "one"]) == 0
    assert "mw-one-d0" in capsys.readouterr().out
    assert not list(own_folder.iterdir())


@pytest.mark.parametrize(
    ("fabric", "look", "shown"),
    [
        (STAR, "tc -n mw-one-s0 qdisc | grep -c tbf; ip -n mw-one-d1 -br addr show eth0", ["4", "3", "10.77.0.2/15"]),
        ("ring:3?link=1MB/s", "cat /proc/sys/net/ipv4/ip_forward; ip netns exec mw-one-d1 cat /proc/sys/net/ipv4/ip_forward; "
         "ip -n mw-one-d0 -br addr show id0; ip -n mw-one-d0 route get 10.77.0.3 | grep -c 'dev to-d2 src 10.77.0.1'",
         ["3", "0", "1", "10.77.0.1/32", "1"]),
    ],
)  # fmt: skip
def test_a_pasted_dry_run_builds_the_same(capsys: pytest.CaptureFixture[str], fabric: str, look: str, shown: list[str]) -> None:
    if os.geteuid():
        pytest.skip("pasting needs root")
    assert main(["lab", "up", fabric, "--dry-run", "--name", "one"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    script = "set -e\n" + "\n".join(rest) + "\nip netns list | wc -l; " + look
    words = first.partition("#")[0].split()
    done = subprocess.run([*words[:-1], "bash", "-c", script], capture_output=True, text=True, timeout=200, check=False, env={"PATH": PATH})
    assert done.returncode == 0, done.stderr
    assert [x.split()[-1] for x in done.stdout.splitlines()] == shown


def test_warnings_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "up", "star:2?link=1MB/s", "--name", "one", "--no-verify"]) == 0
    assert "WARNING: the links were not measured" in capsys.readouterr().out
    with pytest.raises(RunError, match="no link was measured"):
        lab = Lab.open("one")
        try:
            assert lab.measured_fabric
        finally:
            lab.close()
    assert main(["lab", "down", "one"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_command_takes_its_ranks_along(number: signal.Signals) -> None:
    with Lab.up(STAR, verify=False, name="one") as lab:
        space = pid_namespace(lab)
        command = subprocess.Popen(shell("run", "one", "--", "sh", "-c", FORKS + "echo up; wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert command.stdout is not None
        assert b"up" in command.stdout.readline()
        until(lambda: len(members(space)) > 3)
        command.send_signal(number)
        _, errors = command.communicate(timeout=200)
        assert command.returncode in (130, -15, -9)
        if number == signal.SIGINT:
            assert b"interrupted" in errors and command.returncode == 130
        until(lambda: members(space) == [lab.state.holder])


def test_interrupting_the_python_call(star: Lab) -> None:
    with pytest.raises(Interrupted):
        star.run(["sh", "-c", FORKS + "echo up; wait"], sink=lambda rank, line: os.kill(os.getpid(), signal.SIGINT) if rank == 0 else None)
    assert len(members(pid_namespace(star))) == 1


def test_torchrun_starts_one_agent_per_device(star: Lab, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(4) * (dist.get_rank() + 1); dist.all_reduce(x)\n"
        "print(dist.get_rank(), os.environ['LOCAL_RANK'], os.environ['MESHWRIGHT_DEVICE'], int(x.sum()), flush=True)\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    result = star.run([str(script)], torchrun=True, ranks=[0, 2], timeout_s=90)
    assert [[w for w in out.split(b"\n") if w[:2] in (b"0 ", b"1 ")] for out in result.outputs] == [[b"0 0 d0 12"], [b"1 0 d2 12"]]


# ---- without rights, tools, or a kernel that has all -------------------------------------------------------------------
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
INSIDE = """
import sys
from meshwright.lab import Lab
with Lab.up(sys.argv[1], verify=False) as lab:
    out = lab.run(["sh", "-c", "cat /sys/class/net/lo/address >/dev/null; hostname; ip -br addr show eth0"]).outputs
    lab.cut("d0"); lab.restore("d0")
    print(lab.state.user_namespace, *out, len(lab.counters()))
"""


def test_without_root_a_user_namespace_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid():
        pytest.skip("only root can become nobody")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        environment = os.environ | {"MESHWRIGHT_LAB_DIR": f"{folder}/labs", "PATH": PATH}
        done = subprocess.run([*NOBODY, sys.executable, "-c", INSIDE, STAR], capture_output=True, text=True, timeout=99, check=False, env=environment)
        if "namespaces may not be made here" in done.stderr:
            pytest.skip("this kernel allows no user namespaces to others than root")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("True b'd0") and "10.77.0.1/15" in done.stdout and done.stdout.endswith(" 6\n")
        assert not list(Path(folder, "labs").iterdir())


def test_without_root_and_without_a_place_for_names(own_folder: Path) -> None:
    """/run is root's and has no folder `netns` yet; the lab's own folder lies in it too."""
    if os.geteuid():
        pytest.skip("only root can become nobody")
    prepare = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir -m 700 -p /run/user/65534 && chown 65534 /run/user/65534 && exec \"$@\""
    inside = INSIDE.replace("hostname;", "grep -q schema $MESHWRIGHT_FABRIC && hostname;")
    command = ["unshare", "--mount", "sh", "-c", prepare, "sh", *NOBODY, sys.executable, "-c", inside, STAR]
    environment = {k: v for k, v in os.environ.items() if k != "MESHWRIGHT_LAB_DIR"} | {"XDG_RUNTIME_DIR": "/run/user/65534", "PATH": PATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    if "namespaces may not be made here" in done.stderr:
        pytest.skip("this kernel allows no user namespaces to others than root")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True b'd0")


def test_without_any_right_it_says_what_is_missing(own_folder: Path) -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *shell("up", STAR, "--json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"PATH": PATH})
    assert done.returncode == 2, done.stderr
    said = json.loads(done.stderr)
    assert said["code"] == "unsupported" and said["data"]["missing"] == "CAP_SYS_ADMIN"
    assert "user.max_user_namespaces" in said["hint"]
    assert not list(own_folder.iterdir())


def wrapper(folder: Path, tool: str, script: str) -> str:
    """A `tool` of our own before the real one on the search path."""
    (folder / tool).write_text(f"#!/bin/sh\n{script}\n")
    (folder / tool).chmod(0o755)
    return f"{folder}:{PATH}"


def test_a_kernel_without_shapers_is_named(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    script = "cat >/dev/null; echo 'Error: Specified qdisc kind is unknown.' >&2; echo 'Command failed -:1' >&2; exit 1"
    monkeypatch.setenv("PATH", wrapper(tmp_path_factory.mktemp("bin"), "tc", script))
    with pytest.raises(Unsupported, match="qdisc kind is unknown") as caught:
        Lab.up(STAR, name="one")
    assert caught.value.where.startswith("tc -n mw-one-d0 qdisc add dev eth0 root handle 1: tbf")
    assert "sch_tbf" in caught.value.hint
    assert not list(own_folder.iterdir())


def test_a_command_that_fails_is_named(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "cat >/dev/null; echo 'RTNETLINK answers: No buffer space available' >&2; echo 'Command failed -:2' >&2; exit 1"
    monkeypatch.setenv("PATH", wrapper(tmp_path_factory.mktemp("bin"), "ip", script))
    with pytest.raises(RunError, match="No buffer space available") as caught:
        Lab.up(STAR, name="one")
    assert caught.value.where == "ip netns add mw-one-d1"


def test_a_helper_that_does_not_come_up_is_named(own_folder: Path) -> None:
    plan = plan_lab(preset(STAR), "one", Options())
    folder = claim("one")
    with pytest.raises(RunError, match="could not be built: true x could not start"):
        build.start_holder(folder, plan.wiring, plan.commands, owner=os.getpid(), helpers=[["env", "true", "x"]])
    until(lambda: not holders_of(own_folder))
    remove(folder)


def test_commands_that_fail_inside_are_named(star: Lab) -> None:
    with pytest.raises(RunError, match="Cannot find device") as caught:
        star.control.do([("ip", star.state.namespaces[0], [["link", "set", "lo", "up"], ["link", "set", "nothing", "up"]])])
    assert caught.value.where == f"ip -n {star.state.namespaces[0]} link set nothing up"
    with pytest.raises(RunError, match=r"net\.nothing"):
        star.control.do([("sysctl", star.state.namespaces[0], [["net.nothing=1"]])])
    with pytest.raises(RunError):
        star.control.read([["false"]])


def test_links_that_cannot_be_measured(star: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="could not be measured"):
        calibrate(star)
    assert len(members(pid_namespace(star))) == 1


def test_a_link_that_misses_its_rate_is_named(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    """A `tc` that makes one link 20 % too slow."""
    real = next(p for p in ("/usr/sbin/tc", "/sbin/tc") if Path(p).exists())
    script = f'case "$*" in *s0*batch*) sed "s/\\(dev to-d1 .*\\)rate 1250000bps/\\1rate 1000000bps/" | {real} "$@";; *) exec {real} "$@";; esac'
    monkeypatch.setenv("PATH", wrapper(tmp_path_factory.mktemp("bin"), "tc", script))
    words = r"1 of 4 links miss their rate by more than 3%: hub->d1 passes 7\.6\d* Mbit/s of payload instead of 9\.564"
    with pytest.raises(RunError, match=words) as caught:
        Lab.up("star:2?link=1250000B/s")
    assert [x["link"] for x in caught.value.data["links"]] == ["hub->d1"]
    assert not list(own_folder.iterdir())
