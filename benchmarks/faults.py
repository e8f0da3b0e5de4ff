"""Faults: what the flight recorder costs, 100,000 virtual faults, 500 real ones, and what the built-in backend says in the same faults.

    python benchmarks/faults.py [--virtual 100000] [--real 504] [--only recorder|virtual|real --part FILE]
    python benchmarks/faults.py --join FILE...

Real cases: processes on loopback, and in a lab (three devices in a circle, 100 Mbit/s) whose links are cut or slowed to 1 % while a message is under
way. A rank strikes at every wait of its second all-reduce. A case counts as named when every survivor raised the same typed error, the error names
what was planted, a later call raises it at once, and nothing is left: no process, no record outside the case's folder, no namespace of the lab.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "run" / "group"), str(TESTS)]
import machine  # noqa: E402
from fault_rig import CaseResult, FaultRig, judge  # noqa: E402

TIMEOUT_S, GRACE_S, SLACK_S = 1.5, 0.5, 1.0  # deadline of a wait, grace of the agreement, the machine's load
LAB_RATE = "100Mbit/s"


# ---- the recorder --------------------------------------------------------------------------------------------------------
def recorder_rows(plans: dict[str, Path]) -> list[dict[str, Any]]:
    """Processor time of one wait and of one collective in the recorder, and its share of real collectives."""
    from meshwright.run.group.record_file import pack_call
    from meshwright.run.group.recorder import FlightFile, Recorder

    with tempfile.TemporaryDirectory() as folder:
        file = FlightFile(folder, "cost", 0, 4)
        file.users = 1
        recorder = Recorder(file, range(4), 0)
        waiting, moving, number = recorder.waiting, recorder.moving, 100_000

        def waits() -> None:
            for _ in range(number):
                waiting(5, 2, 1)
                moving()

        def collectives() -> None:
            for _ in range(number // 10):
                recorder.begin(recorder.asked(call, 1 << 20, 7))
                recorder.end()

        call = pack_call("all-reduce", -1, "sum", "float32")
        wait_ns = machine.cpu_s(waits)[0] / number * 1e9
        collective_ns = machine.cpu_s(collectives)[0] / (number // 10) * 1e9
        recorder.close()
    rows: list[dict[str, Any]] = [
        {"what": "recorder: processor time per wait of a walk", "value": round(wait_ns, 1), "unit": "ns"},
        {"what": "recorder: processor time per collective", "value": round(collective_ns, 1), "unit": "ns"},
    ]
    for name, elements in (("64 KiB", 1 << 14), ("1 MiB", 1 << 18)):
        with FaultRig(4, plans[name], timeout_s=30, elements=elements) as rig:
            found = [rig.run(None, repeat=60).ranks[0] for _ in range(3)]
        best = min(found, key=lambda r: r["cpu_s"])
        share = (best["waits"] * wait_ns + collective_ns) / 1e9 / best["cpu_s"]
        rows.append({
            "what": f"recorder: share of the processor time of an all-reduce of {name} on 4 gloo ranks", "value": round(share, 6), "unit": "",
            "limit": 0.01, "waits": best["waits"], "cpu_us": round(best["cpu_s"] * 1e6, 1),
        })  # fmt: skip
    return rows


# ---- virtual faults -------------------------------------------------------------------------------------------------------
def virtual_rows(number: int) -> list[dict[str, Any]]:
    import fault_cases
    import torch

    torch.set_num_threads(1)
    every = fault_cases.cells()
    counts: Counter[str] = Counter()
    named: Counter[str] = Counter()
    wrong: list[str] = []
    seconds: list[float] = []
    start = time.process_time()
    for seed in range(number):
        made = every[seed % len(every)]
        try:
            kind, code, latency_s = fault_cases.check_case(made, seed)
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}"[:500])
            continue
        counts[kind] += 1
        if code:
            named[kind] += 1
            seconds.append(latency_s)
    spent = time.process_time() - start
    what = f"{number} virtual faults over {len(every)} programs: hangs, wrong results, wrong or unlike errors"
    return [
        {"what": what, "value": len(wrong), "unit": "", "limit": 0, "ratio": 0.0 if not wrong else float(len(wrong)), "first": wrong[:5],
         "planted": dict(sorted(counts.items())), "named": dict(sorted(named.items())),
         "programs": sorted({f"{c.strategy} {c.op}" for c in every})},
        {"what": "virtual faults per second of processor time", "value": round(number / spent, 1), "unit": "1/s"},
        {"what": f"virtual detection, worst (deadline {fault_cases.TIMEOUT_S} s)", "value": round(max(seconds, default=0.0), 4), "unit": "virtual s",
         "limit": fault_cases.TIMEOUT_S + 2.5 * fault_cases.GRACE_S},
    ]  # fmt: skip


# ---- real faults ------------------------------------------------------------------------------------------------------------
Case = tuple[str, dict[str, Any], tuple[int, int] | None, Callable[[], None] | None, Callable[[], None] | None]


def loopback_cases(waits: int, world: int) -> Iterator[Case]:
    """Every wait of every rank: killed, stopped, an exception."""
    for at in range(1, waits + 1):
        for kind in ("kill", "stop", "exception"):
            for rank in range(world):
                yield f"loopback {kind}", {"kind": kind, "rank": rank, "at": at}, None, None, None


def lab_cases(lab: Any, names: list[str], rate_Bps: int, waits: int) -> Iterator[Case]:
    """Every wait of every rank: a link cut or slowed, in both directions and in one."""
    world = len(names)

    def act(kind: str, link: str) -> Callable[[], None]:
        return (lambda: lab.cut(link)) if kind == "cut" else (lambda: lab.set_rate(link, rate_Bps // 100))

    for at in range(1, waits + 1):
        for arrow in ("<->", "->"):
            for kind in ("cut", "slow"):
                for rank in range(world):
                    peer = (rank + 1) % world
                    link = f"{names[rank]}{arrow}{names[peer]}"
                    undo = lambda link=link: lab.restore(link)  # noqa: E731
                    name = f"lab {kind}{' one way' if arrow == '->' else ''}"
                    yield name, {"kind": kind, "rank": rank, "at": at}, (rank, peer), act(kind, link), undo
        for kind in ("kill", "stop", "exception"):
            for rank in range(world):
                yield f"lab {kind}", {"kind": kind, "rank": rank, "at": at}, None, None, None


class Campaign:
    """Runs cases and keeps what came of them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def run(self, rig: FaultRig, cases: Iterator[Case], most: int) -> None:
        for done, (name, fault, link, act, undo) in enumerate(cases):
            if done >= most:
                return
            result = rig.run(fault, act, undo)
            why = judge(result, rig.world, TIMEOUT_S + GRACE_S + SLACK_S, link)
            with self.lock:
                self.rows.append(self.row(name, fault, result, why))

    def row(self, name: str, fault: dict[str, Any], result: CaseResult, why: str) -> dict[str, Any]:
        error = next((r for r in result.ranks.values() if r.get("code")), {})
        return {
            "case": name, "rank": fault["rank"], "wait": fault["at"], "struck": result.struck, "wrong": why, "latency_s": round(result.latency_s, 4),
            "code": error.get("code", ""), "message": error.get("message", "")[:200], "left": result.left,
        }  # fmt: skip


def real_rows(plans: dict[str, Path], most: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Loopback and lab side by side: most of a case is waiting."""
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab

    campaign = Campaign()
    fabric = load_fabric(f"ring:3?link={LAB_RATE}")
    names, rate = [d.name for d in fabric.devices], fabric.links[0].rate_Bps
    before = namespaces()
    with Lab.up(fabric, verify=False) as lab:
        near = FaultRig(4, plans["64 KiB"], timeout_s=TIMEOUT_S)
        far = FaultRig(3, plans["lab"], lab, timeout_s=TIMEOUT_S, elements=1 << 20)
        with near as here, far as there:
            waits = {rig: max(r["waits"] for r in rig.run(None).ranks.values()) for rig in (here, there)}
            cases = list(lab_cases(lab, names, rate, waits[there]))
            far_most = min(len(cases), most // 2)
            near_cases = itertools.cycle(loopback_cases(waits[here], 4))
            parts = [
                threading.Thread(target=campaign.run, args=(here, near_cases, most - far_most)),
                threading.Thread(target=campaign.run, args=(there, iter(cases), far_most)),
            ]
            for part in parts:
                part.start()
            for part in parts:
                part.join()
            baseline = baselines(here, there, lab, names, rate)
        name = lab.name
    orphans = [n for n in namespaces() - before if name in n]
    orphans += [f"process {words}" for session, words in processes() if name in words or session in near.sessions]
    return summary(campaign.rows, orphans) + baseline, campaign.rows


def summary(cases: list[dict[str, Any]], orphans: list[str]) -> list[dict[str, Any]]:
    wrong = [c for c in cases if c["wrong"]]
    orphans += [f"{c['case']}: ranks {c['left']}" for c in cases if c["left"]]
    rows = [
        {"what": f"{len(cases)} real faults: not named by all survivors, or late, or a result wrong", "value": len(wrong), "unit": "", "limit": 0,
         "ratio": float(len(wrong)), "first": wrong[:8], "named": dict(Counter(c["case"] for c in cases if c["code"])),
         "without effect": dict(Counter(c["case"] for c in cases if not c["code"] and not c["wrong"]))},
        {"what": "orphans (processes, namespaces)", "value": len(orphans), "unit": "", "limit": 0, "ratio": float(len(orphans)),
         "which": orphans[:8]},
    ]  # fmt: skip
    for name in sorted({c["case"] for c in cases}):
        seconds = sorted(c["latency_s"] for c in cases if c["case"] == name and c["code"])
        if seconds:
            p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
            row = {"what": f"{name}: until the last survivor raised, p99 of {len(seconds)}", "value": p99, "unit": "s"}
            rows.append(row | {"limit": TIMEOUT_S + GRACE_S + SLACK_S, "median_s": round(statistics.median(seconds), 4), "worst_s": seconds[-1]})
    return rows


def baselines(here: FaultRig, there: FaultRig, lab: Any, names: list[str], rate_Bps: int) -> list[dict[str, Any]]:
    """The built-in backend in the same faults: what survivors say, and whether any of them names the rank."""
    rows = []
    link = f"{names[1]}<->{names[2]}"
    acts: dict[str, Callable[[], None]] = {"cut": lambda: lab.cut(link), "slow": lambda: lab.set_rate(link, rate_Bps // 100)}
    for kind in ("kill", "stop", "exception", "cut", "slow"):
        rig = there if kind in acts else here
        fault = {"kind": kind, "rank": 1, "at": 1}
        result = rig.run(fault, acts.get(kind), (lambda: lab.restore(link)) if kind in acts else None, backend="gloo")
        said = {r: v.get("message", "") for r, v in result.ranks.items() if v.get("code") and r != 1}
        named = sum(bool(re.search(r"\brank 1\b", text)) for text in said.values())
        rows.append({
            "what": f"built-in gloo, {kind}: survivors that name rank 1", "value": named, "unit": f"of {rig.world - 1}",
            "latency_s": round(result.latency_s, 3), "different messages": len({re.sub(r":\d+", "", text) for text in said.values()}),
            "said": {r: t[:300] for r, t in said.items()},
        })  # fmt: skip
    return rows


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False, timeout=20)
    return {line.split()[0] for line in done.stdout.splitlines() if line.strip()}


def processes() -> list[tuple[int, str]]:
    """(session, command line) of all but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            session = int((path.parent / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, IndexError, ValueError):
            continue
        if int(path.parent.name) != os.getpid():
            found.append((session, words))
    return found


def make_plans(folder: Path) -> dict[str, Path]:
    made = {}
    for name, fabric, size in (("64 KiB", "laptop:4", "64KiB"), ("1 MiB", "laptop:4", "1MiB"), ("lab", f"ring:3?link={LAB_RATE}", "4MiB")):
        made[name] = folder / f"{name.replace(' ', '')}.json"
        words = ["collective", "plan", "all-reduce", "--fabric", fabric, "--size", size, "--strategy", "ring", "--out", str(made[name])]
        subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, capture_output=True, timeout=600)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--virtual", type=int, default=100_000)
    parser.add_argument("--real", type=int, default=504)
    parser.add_argument("--only", choices=("recorder", "virtual", "real"))
    parser.add_argument("--part", metavar="FILE", help="write the rows of --only here instead of the results")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="record what --part wrote, instead of running anything")
    args = parser.parse_args()
    rows, facts = machine.join_parts(args.join or ())
    with tempfile.TemporaryDirectory() as folder:
        if args.join:
            args.only = "nothing"
        plans = make_plans(Path(folder)) if args.only in (None, "recorder", "real") else {}
        if args.only in (None, "recorder"):
            rows += recorder_rows(plans)
        if args.only in (None, "real"):
            real, facts["cases"] = real_rows(plans, args.real)
            rows += real
        if args.only in (None, "virtual"):
            rows += virtual_rows(args.virtual)
    for row in rows:
        print(f"{row['what']}: {row['value']} {row['unit']}" + (f" (limit {row['limit']})" if "limit" in row else ""))
    if args.part:
        machine.keep_part(args.part, rows, **facts)
    else:
        machine.record("faults", rows, deadline_s=TIMEOUT_S, grace_s=GRACE_S, **facts)


if __name__ == "__main__":
    main()
