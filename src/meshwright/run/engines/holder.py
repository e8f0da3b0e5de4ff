"""Process 1 of a sandbox: starts its daemons in order, starts again what dies, reaps, and ends with its owner: `python holder.py FOLDER`. Standard
library only.

It is process 1 of a PID namespace: when it ends, the kernel ends every daemon and every job in there, whatever killed it. FOLDER/daemons.json lists
`name`, `argv` and `ready` (a path to wait for, or ""). The holder ends at the end of its standard input, which the owner holds, unless it was sent a
byte before: then it stays.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

AGAIN_S = 0.5  # before a daemon that died is started again
MAX_AGAIN = 20  # of one daemon
MAX_READY_S = 10.0
POLL_S = 0.05


def start(folder: Path, daemon: Any) -> subprocess.Popen[bytes]:
    with (folder / f"{daemon['name']}.out").open("ab") as out:
        return subprocess.Popen(
            daemon["argv"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ,
                **daemon["env"]}
        )


def wait_for(path: str) -> None:
    begun = time.monotonic()
    while path and not Path(path).exists() and time.monotonic() - begun < MAX_READY_S:
        time.sleep(0.01)


def reap(names: dict[int, str], died: dict[str, float]) -> None:
    """Everything in here that has no parent any more is ours."""
    while True:
        try:
            pid = os.waitpid(-1, os.WNOHANG)[0]
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in names:
            died[names[pid]] = time.monotonic()


def main(folder: Path) -> None:
    told = json.loads((folder / "daemons.json").read_text())
    daemons = {d["name"]: d for d in told["daemons"]}
    running: dict[str, subprocess.Popen[bytes]] = {}
    died: dict[str, float] = {}
    again: dict[str, int] = {}
    stays = False
    for name, daemon in daemons.items():
        running[name] = start(folder, daemon)
        wait_for(daemon["ready"])
    while True:
        if stays:
            time.sleep(POLL_S)
        elif select.select([0], [], [], POLL_S)[0]:
            stays = bool(os.read(0, 4096))
            if not stays:
                return
        reap({p.pid: name for name, p in running.items()}, died)
        for name in [x for x, at in died.items() if time.monotonic() - at > AGAIN_S and again.get(x, 0) < MAX_AGAIN]:
            again[name] = again.get(name, 0) + 1
            running[name] = start(folder, daemons[name])
            del died[name]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
