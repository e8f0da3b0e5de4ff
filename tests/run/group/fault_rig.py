"""Real ranks with real faults: warm places (see `fault_rank`), on loopback or one per device of a lab."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import free_port

HERE = Path(__file__).parent
EXPECTED = {"kill": "rank-died", "stop": "rank-frozen", "exception": "rank-failed", "cut": "link-lost", "slow": "link-slow"}


@dataclass
class CaseResult:
    """`ranks`: what each rank wrote; `latency_s`: from the fault until the last survivor raised; `late_s`: of a stopped rank that goes on."""

    fault: dict[str, Any] | None
    ranks: dict[int, dict[str, Any]]
    codes: dict[int, int]
    left: list[int]
    latency_s: float = 0.0
    struck: bool = False
    logs: dict[int, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class FaultRig:
    """`world` ranks. Without a lab all are children of one place; with one, rank i lives on device i."""

    def __init__(self, world: int, plan: Path, lab: Any = None, *, timeout_s: float = 1.5, elements: int = 1024) -> None:
        self.world, self.plan, self.lab, self.timeout_s, self.elements = world, plan, lab, timeout_s, elements
        self.base = Path(tempfile.mkdtemp(prefix="meshwright-faults-"))
        self.address = lab.address(0) if lab is not None else "127.0.0.1"
        self.cases = 0
        argv = [sys.executable, str(HERE / "fault_rank.py")]
        env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.places: list[Any] = []
        if lab is None:
            env = {**os.environ, **env, "GLOO_SOCKET_IFNAME": "lo"}
            self.places = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)]
            self.inputs = [self.places[0].stdin]
        else:
            self.inputs = []
            for device in range(world):
                there, here = os.pipe()
                self.places.append(lab.popen(device, argv, {**env, "MESHWRIGHT_FABRIC": ""}, stdin=there, stdout=subprocess.PIPE))
                os.close(there)
                self.inputs.append(os.fdopen(here, "wb"))
        self.sessions = {place.pid for place in self.places} if lab is None else set()
        for place in self.places:
            json.loads(place.stdout.readline())
        self.at_start = self.processes()

    def processes(self) -> set[int]:
        """All of the place's session. The place is there, and what it lives with: its server of warm interpreters where it is a fork of one."""
        found = set[int]()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rpartition(")")[2].split()[3])
            except (OSError, ValueError, IndexError):
                continue
            if session in self.sessions:
                found.add(int(stat.parent.name))
        return found

    def __enter__(self) -> FaultRig:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.inputs:
            stream.close()
        for place in self.places:
            place.wait(timeout=200)
            place.stdout.close()
        shutil.rmtree(self.base)

    def _ask(self, place: int, document: Any) -> None:
        self.inputs[place].write(json.dumps(document).encode() + b"\n")
        self.inputs[place].flush()

    def _answer(self, place: int) -> Any:
        return json.loads(self.places[place].stdout.readline())

    def run(
        self, fault: dict[str, Any] | None, act: Callable[[], None] | None = None, undo: Callable[[], None] | None = None,
        backend: str = "meshwright", **more: Any,
    ) -> CaseResult:  # fmt: skip
        """One case. `act` is what the rig does to the network when the rank strikes, `undo` afterwards."""
        self.cases += 1
        folder = self.base / f"case-{self.cases}"
        (folder / "record").mkdir(parents=True)
        case = {
            "fault": fault, "folder": str(folder), "world": self.world, "backend": backend, "timeout_s": self.timeout_s, "elements": self.elements,
            "env": {
                "MASTER_ADDR": self.address, "MASTER_PORT": str(free_port()), "MESHWRIGHT_PLAN": str(self.plan),
                "MESHWRIGHT_TIMEOUT_S": str(self.timeout_s), "MESHWRIGHT_RECORD_DIR": str(folder / "record"),
            },
            **more,
        }  # fmt: skip
        per_place = [list(range(self.world))] if self.lab is None else [[r] for r in range(self.world)]
        for place, ranks in enumerate(per_place):
            self._ask(place, case | {"ranks": ranks})
        for place in range(len(per_place)):
            self._answer(place)
        struck = self._strike(folder, act) if fault is not None else False
        stopped = fault is not None and fault["kind"] == "stop" and struck
        if stopped:
            self._await(folder, [r for r in range(self.world) if r != fault["rank"]], 100)  # type: ignore[index]
        elif act is not None:
            self._await(folder, list(range(self.world)), 60)
        if undo is not None:
            undo()
        codes: dict[int, int] = {}
        left: list[int] = []
        for place in range(len(per_place)):
            self._ask(place, {"reap": 100, "thaw": stopped})
        for place in range(len(per_place)):
            found = self._answer(place)
            codes |= {int(r): c for r, c in found["codes"].items()}
            left += found["left"]
        return self._result(folder, fault, codes, left, struck)

    def _strike(self, folder: Path, act: Callable[[], None] | None) -> bool:
        deadline = time.monotonic() + 60
        while not (folder / "struck").exists():
            done = len(list(folder.glob("rank-*.json")))
            if time.monotonic() > deadline or done == self.world:
                return False
            time.sleep(0.002)
        if act is not None:
            act()
            struck = json.loads((folder / "struck").read_text()) | {"time_s": time.monotonic()}
            (folder / "struck").write_text(json.dumps(struck))
            (folder / "go").touch()
        return True

    def _await(self, folder: Path, ranks: list[int], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not all((folder / f"rank-{r}.json").exists() for r in ranks):
            time.sleep(0.005)

    def _result(self, folder: Path, fault: dict[str, Any] | None, codes: dict[int, int], left: list[int], struck: bool) -> CaseResult:
        ranks = {r: json.loads((folder / f"rank-{r}.json").read_text()) for r in range(self.world) if (folder / f"rank-{r}.json").exists()}
        found = CaseResult(fault, ranks, codes, left, struck=struck)
        if struck and fault is not None:
            at = json.loads((folder / "struck").read_text())["time_s"]
            times = [v["time_s"] - at for r, v in ranks.items() if "time_s" in v and not (fault["kind"] == "stop" and r == fault["rank"])]
            found.latency_s = max(times, default=0.0)
        found.logs = {r: (folder / f"rank-{r}.log").read_text()[-2000:] for r in range(self.world) if (folder / f"rank-{r}.log").exists()}
        found.files = sorted(p.name for p in (folder / "record").iterdir())
        shutil.rmtree(folder)
        return found


def judge(result: CaseResult, world: int, deadline_s: float, link: tuple[int, int] | None = None) -> str:
    """'' for a case that ended as it must, else what is wrong. `link`: global ranks of the link that was touched."""
    fault = result.fault
    if result.left:
        return f"ranks {result.left} had to be killed"
    if fault is None or not result.struck:
        bad = [r for r in range(world) if result.ranks.get(r, {}).get("code") != "" or not result.ranks[r]["right"]]
        return f"without a fault, ranks {bad} failed" if bad else ""
    survivors = [r for r in range(world) if not (fault["kind"] == "kill" and r == fault["rank"])]
    missing = [r for r in survivors if r not in result.ranks]
    if missing:
        return f"ranks {missing} said nothing"
    told = [result.ranks[r] for r in survivors]
    if not any(t["code"] for t in told):  # nobody needed what was broken
        return "" if all(t["right"] for t in told) and fault["kind"] in ("cut", "slow", "stop") else "no error, or a wrong result"
    if len({(t["code"], t.get("message"), json.dumps(t.get("data"), sort_keys=True)) for t in told}) > 1:
        return "different errors: " + " | ".join(f"{t['rank']}: {t['code']} {t.get('message')}" for t in told)
    first = told[0]
    if first["code"] != EXPECTED[fault["kind"]]:
        return f"{first['code']} instead of {EXPECTED[fault['kind']]}: {first['message']}"
    if any("again" in t for t in told):
        return "a later call did not say the same"
    if link is None and first["data"]["rank"] != fault["rank"]:
        return f"names rank {first['data']['rank']}: {first['message']}"
    if link is not None and first["data"]["link"] not in (f"{link[0]} -> {link[1]}", f"{link[1]} -> {link[0]}"):
        return f"names link {first['data']['link']}: {first['message']}"
    if result.latency_s > deadline_s:
        return f"took {result.latency_s:.2f} s, {deadline_s:.2f} s are allowed"
    if len(result.files) != world:
        return f"{len(result.files)} records of {world} ranks"
    return ""
