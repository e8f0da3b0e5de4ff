"""The ranks of the transport calibration. Started by `meshwright.probe.transport`; reads and writes JSON lines.

Importing torch takes seconds of processor time, so one process does it and then forks the ranks (no torch thread runs by then).

stdin: the configuration, then "go". stdout, each line shorter than a pipe's atomic write: `{"pids": [...]}`, `{"rank": r, "ready": seconds alone}`,
`{"rank": r, "done": true}`, `{"rank": r, "exit": code}`. Results are files `result<rank>.json` in the given folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
POLL_S = 0.02


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends; Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def say(document: dict[str, Any]) -> None:
    os.write(1, json.dumps(document).encode() + b"\n")


def rank_main(rank: int, config: dict[str, Any], gate: int) -> None:
    import torch
    import torch.distributed as dist

    from .message_times import MessageTimes, reference_s

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    store = dist.FileStore(str(folder / "store"), config["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config["ranks"], timeout=timedelta(seconds=config["timeout_s"]))
    say({"rank": rank, "ready": reference_s() if rank == 0 else 0.0})  # the others are idle now
    os.read(gate, 1)  # the quotas are in place
    part = MessageTimes(sizes=config["sizes"], budget_s=config["budget_s"], batches=config["batches"]).run()
    (folder / f"result{rank}.json").write_text(json.dumps(part))
    say({"rank": rank, "done": True})
    dist.destroy_process_group()


def _fork(rank: int, config: dict[str, Any], gate: tuple[int, int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.close(gate[1])
        rank_main(rank, config, gate[0])
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    config = json.loads(sys.stdin.readline())
    die_with_parent(int(config["parent"]))

    from . import message_times  # noqa: F401  loads torch once, before the fork

    gates = [os.pipe() for _ in range(config["ranks"])]
    ranks = {_fork(rank, config, gate): rank for rank, gate in enumerate(gates)}
    say({"pids": list(ranks)})
    waiting = True
    while ranks:
        if waiting and select.select([0], [], [], POLL_S)[0]:
            os.read(0, 64)
            for _, gate in gates:
                os.write(gate, b"g")
            waiting = False
        pid, status = os.waitpid(-1, os.WNOHANG) if waiting else os.wait()
        if pid:
            say({"rank": ranks.pop(pid), "exit": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
