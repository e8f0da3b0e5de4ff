"""One place of the fault rig: imports torch once, then forks a fresh rank for every case that it is told on standard input.

A rank strikes itself: the n-th wait of its second collective is where it is killed, stopped, raises, or asks the rig to cut or slow a link.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright.torch  # noqa: F401
from meshwright.errors import MeshwrightError
from meshwright.run.group.messages import GlooMessages

torch.set_num_threads(1)


class Striker:
    """Counts waits and strikes at one of them."""

    def __init__(self, case: dict[str, Any], folder: Path, rank: int) -> None:
        self.fault, self.folder = case["fault"], folder
        self.mine = self.fault is not None and self.fault["rank"] == rank
        self.armed = False
        self.waits = 0
        self.struck_s = 0.0

    def wait(self, messages: GlooMessages, work: Any, limit: timedelta) -> None:
        if self.armed:
            self.waits += 1
            if self.mine and self.waits == self.fault["at"]:
                self.strike()
        work.wait(limit)

    def strike(self) -> None:
        kind = self.fault["kind"]
        self.struck_s = time.monotonic()
        note(self.folder / "struck", {"time_s": self.struck_s})
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "exception":
            raise ValueError("planted")
        else:  # the rig does something to the network
            deadline = time.monotonic() + 20
            while not (self.folder / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.005)


def note(path: Path, document: Any) -> None:
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(document))
    partial.rename(path)


def be_rank(case: dict[str, Any], rank: int) -> None:
    """Two collectives more than the warm-up; what came of them goes to `rank-N.json`."""
    folder = Path(case["folder"])
    os.environ.update(case["env"], RANK=str(rank), WORLD_SIZE=str(case["world"]))
    striker = Striker(case, folder, rank)
    GlooMessages.wait = lambda messages, work, limit: striker.wait(messages, work, limit)  # type: ignore[method-assign]
    result: dict[str, Any] = {"rank": rank, "code": "", "right": True}
    dist.init_process_group(case["backend"], timeout=timedelta(seconds=30 if case["backend"] == "meshwright" else case["timeout_s"]))
    tensor = torch.empty(case["elements"], dtype=torch.int32)
    want = case["world"] * (case["world"] + 1) // 2
    if case["backend"] == "meshwright":
        dist.distributed_c10d._get_default_group().engine.health.check()
    try:
        for k in range(3):
            striker.armed = k == 1
            tensor.fill_(rank + 1)
            if case["backend"] != "meshwright" and k == 1 and striker.mine:
                striker.strike()
            dist.all_reduce(tensor)
            result["right"] = result["right"] and bool((tensor == want).all())
    except BaseException as error:
        result |= {"time_s": time.monotonic(), "type": type(error).__name__, "message": str(error)[:2000]}
        if isinstance(error, MeshwrightError):
            result |= {"code": error.code, "data": {k: v for k, v in error.data.items() if k != "views"}, "where": error.where}
            with contextlib.suppress(MeshwrightError):  # the next call must say the same at once
                dist.all_reduce(tensor)
                result["again"] = "no error"
        else:
            result["code"] = "untyped"
    result["waits"] = striker.waits
    note(folder / f"rank-{rank}.json", result)
    if case["backend"] == "meshwright":
        dist.destroy_process_group()
    result["end_s"] = time.monotonic()
    note(folder / f"rank-{rank}.json", result)


def say(document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Lines in: a case with the ranks to be, or {"reap": seconds, "thaw": bool}. Lines out: one answer each."""
    children: dict[int, int] = {}
    say({"ready": os.getpid()})
    for line in sys.stdin:
        asked = json.loads(line)
        if "reap" in asked:
            if asked.get("thaw"):
                for pid in children:
                    os.kill(pid, signal.SIGCONT)
            say(reap(children, asked["reap"]))
            continue
        for rank in asked["ranks"]:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    log = os.open(Path(asked["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    be_rank(asked, rank)
                    code = 0
                except BaseException as error:
                    note(Path(asked["folder"]) / f"rank-{rank}.json", {"rank": rank, "code": "broken", "right": False, "message": str(error)})
                    sys.stderr.write(f"{type(error).__name__}: {error}\n")
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            children[pid] = rank
        say({"pids": {r: p for p, r in children.items()}})


def reap(children: dict[int, int], limit_s: float) -> dict[str, Any]:
    """Wait for the children; what still runs is killed and named."""
    codes, deadline = {}, time.monotonic() + limit_s
    while children and time.monotonic() < deadline:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    left = sorted(children.values())
    for pid in list(children):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del children[pid]
    return {"codes": codes, "left": left}


if __name__ == "__main__":
    serve()
