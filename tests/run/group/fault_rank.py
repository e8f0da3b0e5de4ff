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
from meshwright.run.group.plans import GroupPlans

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
            deadline = time.monotonic() + 60
            while not (self.folder / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.005)


def note(path: Path, document: Any) -> None:
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(document))
    partial.rename(path)


def be_rank(case: dict[str, Any], rank: int) -> None:
    """Two collectives more than the warm-up; what came of them goes to `rank-N.json`."""
    folder = Path(case["folder"])
    os.environ.update(case["env"] | case.get("more_env", {}), RANK=str(rank), WORLD_SIZE=str(case["world"]))
    striker = Striker(case, folder, rank)
    GlooMessages.wait = lambda messages, work, limit: striker.wait(messages, work, limit)  # type: ignore[method-assign]
    result: dict[str, Any] = {"rank": rank, "code": "", "right": True}
    if rank == case.get("culprit"):
        os.environ.update(case.get("culprit_env", {}))
        if case.get("scenario") == "planning":
            GroupPlans._plan = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    tensor = torch.empty(case["elements"], dtype=torch.int32)
    want = case["world"] * (case["world"] + 1) // 2
    try:  # the group may end before this rank's first call: another may have died by then
        dist.init_process_group(case["backend"], timeout=timedelta(seconds=30 if case["backend"] == "meshwright" else case["timeout_s"]))
        if case["backend"] == "meshwright":
            health = dist.distributed_c10d._get_default_group().engine.health
            if rank == case.get("late"):
                health._known.wait(case["timeout_s"] + 60)  # as on a busy machine: it comes when the others know already
            health.check()
        if case.get("repeat"):
            measure(case, result, tensor, striker)
            note(folder / f"rank-{rank}.json", result)
            dist.destroy_process_group()
            return
        if case.get("scenario"):
            scenario(case, rank, result, tensor)
        for k in range(3 if not case.get("scenario") else 0):
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
                if dist.is_initialized():
                    dist.all_reduce(tensor)
                    result["again"] = "no error"
        else:
            result["code"] = "untyped"
    result["waits"] = striker.waits
    if case.get("scenario") and case["scenario"] != "planning" and result.get("type") != "RuntimeError" and dist.is_initialized():
        result["anew"] = again(case, rank, folder)
    note(folder / f"rank-{rank}.json", result)
    if case["backend"] == "meshwright" and dist.is_initialized():
        dist.destroy_process_group()
    result["end_s"] = time.monotonic()
    note(folder / f"rank-{rank}.json", result)


def plant(case: dict[str, Any], rank: int, tensor: torch.Tensor) -> None:
    """What a scenario's rank does instead of its second all-reduce."""
    kind = case["scenario"]
    if rank != case["culprit"]:
        return
    if kind == "size":
        dist.all_reduce(torch.zeros(2 * tensor.numel(), dtype=tensor.dtype))
    elif kind == "order":
        dist.broadcast(tensor, 0)
    elif kind == "destroy":
        dist.destroy_process_group()
        raise RuntimeError("left")
    elif kind == "late" or kind == "barrier":
        time.sleep(2 * case["timeout_s"])
    elif kind == "abort":
        dist.distributed_c10d._get_default_group().abort()
    elif kind == "flip":
        inner = dist.distributed_c10d._get_default_group().engine._messages.inner
        receive, wait, posted = inner.receive, inner.wait, {}

        def receiving(into: torch.Tensor, peer: int, tag: int) -> Any:
            work = receive(into, peer, tag)
            posted[id(work)] = into
            return work

        def flipping(work: Any, limit: timedelta) -> None:
            wait(work, limit)
            into = posted.get(id(work))
            if into is not None and flips:
                flips.pop()
                into.view(torch.uint8)[0] ^= 4

        flips = [True]
        inner.receive, inner.wait = receiving, flipping


def scenario(case: dict[str, Any], rank: int, result: dict[str, Any], tensor: torch.Tensor) -> None:
    for k in range(3):
        tensor.fill_(rank + 1)
        if k == 1:
            plant(case, rank, tensor)
            if case["scenario"] == "barrier":
                dist.barrier()
        dist.all_reduce(tensor)


def again(case: dict[str, Any], rank: int, folder: Path) -> bool:
    """After a failure: destroy, make the group anew in the same processes, and compute."""
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "second"), case["world"])
    dist.init_process_group("meshwright", store=store, rank=rank, world_size=case["world"], timeout=timedelta(seconds=30))
    tensor = torch.full((case["elements"],), rank + 1, dtype=torch.int32)
    dist.all_reduce(tensor)
    return bool((tensor == case["world"] * (case["world"] + 1) // 2).all())


def measure(case: dict[str, Any], result: dict[str, Any], tensor: torch.Tensor, striker: Striker) -> None:
    """Processor time of a healthy collective, and how many waits it has."""
    tensor.fill_(0)
    for _ in range(5):
        dist.all_reduce(tensor)
    striker.armed = True
    before = time.process_time()
    for _ in range(case["repeat"]):
        dist.all_reduce(tensor)
    result |= {"cpu_s": (time.process_time() - before) / case["repeat"], "waits": striker.waits / case["repeat"]}


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
